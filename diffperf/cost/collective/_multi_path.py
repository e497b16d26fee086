"""One collective over several paths at once: NVLink beside PCIe and NICs, several rails, and the NICs of neighbours as proxies.

All are one problem, `diffperf.smooth.path_split`: shares of the data such that all used paths finish together, and a path whose latency alone is longer
than that is left out. Its finish time is differentiable in every latency and rate. Sources: FlexLink (arXiv:2510.15882), Nezha (arXiv:2405.17870),
Zeppelin (arXiv:2509.21841); the forms are read from their descriptions, as the papers print no equations. Leaves out contention of the paths for one
resource (a NIC behind the same PCIe switch): give the slower path what is left of it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ...smooth import choice, minimum, path_split

_SMALLEST = 1e-6  # a transfer of 0 bytes as one of a millionth of a byte, so that its shares exist [B]


class Split(NamedTuple):
    """One transfer over several paths.

    Attributes:
      time: until the last path is done, shape (). [s]
      shares: of the data on each path, shape (n,); sum 1. [1]
    """

    time: Float[Array, ""]
    shares: Float[Array, " n"]


class Rails(NamedTuple):
    """One transfer over rails of different kinds.

    Attributes:
      time: until it is done, shape (). [s]
      shares: of the data on each rail, shape (n,); sum 1. [1]
      hot: 1 where several rails work together, 0 where one alone is faster; between them at a temperature, shape (). [1]
    """

    time: Float[Array, ""]
    shares: Float[Array, " n"]
    hot: Float[Array, ""]


def ring_traffic(op: str, ranks: Real[ArrayLike, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What a ring collective sends: bytes per rank over its buffer's size, and steps in turn.

    All-reduce `2 (n - 1) / n` and `2 (n - 1)`, all-gather and reduce-scatter `(n - 1) / n` and `n - 1`; the size is that of the whole buffer, as in
    nccl-tests (NVIDIA, nccl-tests, doc/PERFORMANCE.md).

    Raises:
      ValueError: another `op`.
    """
    if op not in ("all_reduce", "all_gather", "reduce_scatter"):
        raise ValueError(f"op is {op!r}; a ring carries all_reduce, all_gather or reduce_scatter.")
    n = jnp.maximum(si(ranks), 1.0)
    passes = 2.0 if op == "all_reduce" else 1.0
    return passes * (n - 1) / n, passes * (n - 1)


def multi_path_time(
    nbytes: Real[ArrayLike, ""], steps: Real[ArrayLike, ""], step_latency: Real[ArrayLike, " n"], rate: Real[ArrayLike, " n"]
) -> Split:
    """A transfer cut over `n` paths so that all used ones finish together (FlexLink).

    Path l with share f takes `steps * step_latency[l] + f nbytes / rate[l]`. Many steps make slow paths useless: in an all-reduce of 8 GPUs each of 14
    steps pays their latency.

    Args:
      nbytes: bytes that one rank sends in all, `ring_traffic` times the buffer. [B]
      steps: steps in turn. [1]
      step_latency: of each path. [s]
      rate: of each path, for one rank in one direction; 0 for a path that is down. [B/s]
    Returns:
      Time and shares; an infinite time where all paths are down.
    """
    rate, latency = jnp.broadcast_arrays(si(rate), si(steps) * si(step_latency))
    alive = rate > 0
    per_share = jnp.maximum(si(nbytes), _SMALLEST) / jnp.where(alive, rate, 1.0)
    alone = jnp.min(jnp.where(alive, latency + per_share, jnp.inf))
    late = lax.stop_gradient(jnp.where(jnp.isfinite(alone), 2 * alone, 0.0)) + 1.0  # a path that is down would start after the others are done
    time, shares = path_split(jnp.where(alive, latency, late), jnp.where(alive, per_share, 1.0))
    return Split(jnp.where(jnp.any(alive), time, jnp.inf), shares)


def multi_path_gain(
    nbytes: Real[ArrayLike, ""], steps: Real[ArrayLike, ""], step_latency: Real[ArrayLike, " n"], rate: Real[ArrayLike, " n"]
) -> Float[Array, ""]:
    """How much faster than on the first path alone, `time alone / time - 1`; arguments as of `multi_path_time`. [1]"""
    first = si(steps) * si(step_latency)[0] + si(nbytes) / si(rate)[0]
    return first / multi_path_time(nbytes, steps, step_latency, rate).time - 1


def rail_time(
    nbytes: Real[ArrayLike, ""],
    latency: Real[ArrayLike, " n"],
    rate: Real[ArrayLike, " n"],
    coordination: Real[ArrayLike, ""] = 0.0,
    temperature: Real[ArrayLike, ""] = 0.0,
) -> Rails:
    """A transfer over `n` rails of different protocols: on one of them (cold) or cut over several (hot), whichever is faster (Nezha).

    `min( min_r (latency_r + nbytes / rate_r), coordination + split )`, the split by `multi_path_time`. Short messages go on the rail of the shortest
    latency; with a coordination time there is a size from which splitting pays.

    Args:
      nbytes: message. [B]
      latency: of each rail. [s]
      rate: of each rail in one direction, positive. [B/s]
      coordination: extra time of the hot state. [s]
      temperature: 0 for the exact choice; above it errs low (see `smooth.minimum`).
    """
    latency, rate = jnp.broadcast_arrays(si(latency), si(rate))
    alone = latency + si(nbytes) / rate
    split = multi_path_time(nbytes, 1.0, latency, rate)
    cold, hot = jnp.min(alone), split.time + coordination
    times = jnp.stack([cold, hot])
    several = jnp.sum(split.shares > 0) > 1
    weight = jnp.where(several, choice(times, temperature)[1], 0.0)  # of equals the cold state, which needs one rail
    one = jnp.where(jnp.arange(len(alone)) == jnp.argmin(alone), 1.0, 0.0)
    return Rails(minimum(times, temperature), weight * split.shares + (1 - weight) * one, weight)


def direct_send_time(nbytes: Real[ArrayLike, ""], inter: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Time to send `nbytes` [B] to another node over the sender's own NIC, `inter * nbytes` with `inter` in s/B. [s]"""
    return si(inter) * si(nbytes)


def routed_send_time(nbytes: Real[ArrayLike, ""], inter: Real[ArrayLike, ""], intra: Real[ArrayLike, ""], proxies: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Time to send over the NICs of `proxies` GPUs, the sender among them: spread inside the node, send in parallel, gather on the other side (Zeppelin).

    `2 intra nbytes (x - 1) / x + inter nbytes / x`, the three phases one after the other. It beats the direct way exactly when `inter > 2 intra`,
    whatever the number of proxies.

    Args:
      nbytes: message. [B]
      inter, intra: time per byte between nodes and inside one. [s/B]
      proxies: x, at least 1. [1]
    """
    x = jnp.maximum(si(proxies), 1.0)
    return si(nbytes) * (2 * si(intra) * (x - 1) / x + si(inter) / x)


def proxy_send_time(
    nbytes: Real[ArrayLike, ""],
    inter: Real[ArrayLike, ""],
    intra: Real[ArrayLike, ""],
    proxies: Real[ArrayLike, ""],
    temperature: Real[ArrayLike, ""] = 0.0,
) -> Float[Array, ""]:
    """The shorter of `direct_send_time` and `routed_send_time`; a temperature errs low. [s]"""
    times = jnp.stack([direct_send_time(nbytes, inter), routed_send_time(nbytes, inter, intra, proxies)])
    return minimum(times, temperature)
