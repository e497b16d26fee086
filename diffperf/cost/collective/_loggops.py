"""Messages by the LogGOPS model, with the rules that ATLAHS codes: clocks of a sender's CPU and NIC and of a receiver's NIC.

A collective is a list of rounds; in each, a rank sends at most one message, receives at most one, works on what it received, and goes on when that is
done. Rounds are a static pattern (`loggops_rounds`), sizes and parameters are traced. Leaves out congestion inside the network and matching order:
messages of one round are posted together.
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ._events import RING_COLLECTIVES

_ATLAHS = {"ai": (3700, 200, 5, 0.04, 0, 0), "hpc": (3000, 8000, 0, 0.18, 0, 256000)}
LOGGOPS_COLLECTIVES = (*RING_COLLECTIVES, "broadcast", "all_to_all")


class LogGops(eqx.Module):
    """Parameters of the model; its letters in brackets.

    Attributes:
      latency: of the network (L). [s]
      overhead: CPU time per message, on each side (o). [s]
      gap: NIC time per message (g). [s]
      gap_per_byte: NIC time per byte (G). [s/B]
      overhead_per_byte: CPU time per byte (O). [s/B]
      eager_bytes: largest message that is sent before the receiver asks for it (S). [B]
    """

    latency: Float[Array, ""] = eqx.field(converter=si)
    overhead: Float[Array, ""] = eqx.field(converter=si)
    gap: Float[Array, ""] = eqx.field(converter=si)
    gap_per_byte: Float[Array, ""] = eqx.field(converter=si)
    overhead_per_byte: Float[Array, ""] = eqx.field(converter=si)
    eager_bytes: Float[Array, ""] = eqx.field(converter=si)


class Rounds(NamedTuple):
    """Attributes:
    target: rank that each rank sends to, -1 for none, shape (rounds, ranks).
    reduces: whether a rank reduces what it receives, shape (rounds, ranks).
    """

    target: np.ndarray
    reduces: np.ndarray


def loggops(name: str) -> LogGops:
    """Parameters shipped with ATLAHS: "ai" (25 GB/s, always rendezvous) or "hpc" (5.6 GB/s, eager up to 256000 B).

    Raises:
      ValueError: for another name.
    """
    if name not in _ATLAHS:
        raise ValueError(f"name is {name!r}; it should be one of {', '.join(_ATLAHS)}.")
    latency, overhead, gap, gap_per_byte, overhead_per_byte, eager = (si(value) for value in _ATLAHS[name])
    return LogGops(1e-9 * latency, 1e-9 * overhead, 1e-9 * gap, 1e-9 * gap_per_byte, 1e-9 * overhead_per_byte, eager)


def _wire(parameters: LogGops, after_first, clock):
    """Time of a message's bytes on the NIC, in whole ticks where the clock has ticks."""
    time = after_first * parameters.gap_per_byte
    return time if clock == 0 else clock * jnp.floor(time / clock + 1e-6)


def message_time(parameters: LogGops, nbytes: Real[ArrayLike, "..."], clock: float = 0.0) -> Float[Array, "..."]:
    """One message between idle ranks, `2 o + L + g + (s - 1)(G + 2 O)`. [s]

    Args:
      parameters: of the network.
      nbytes: s, at least 1; less counts as 1. [B]
      clock: tick of the simulator's clock, such as 1e-9: the time on the wire is rounded down to it, and has no gradient then. [s]
    References:
      Rules of the LogGOPS back end of ATLAHS (arXiv:2505.08936), as coded.
    """
    more = jnp.maximum(si(nbytes) - 1, 0.0)
    p = parameters
    return 2 * p.overhead + p.latency + p.gap + _wire(p, more, clock) + 2 * more * p.overhead_per_byte


def loggops_rounds(collective: str, ranks: int, chunks: int = 1) -> Rounds:
    """The messages of a collective.

    Args:
      collective: all_reduce, all_gather, reduce_scatter (rings), broadcast (a chain from rank 0, `chunks` in turn) or all_to_all (at distance 1, 2, ...).
      ranks: at least 2.
      chunks: of a broadcast.
    Raises:
      ValueError: for another collective or fewer than 2 ranks.
    """
    if collective not in LOGGOPS_COLLECTIVES:
        raise ValueError(f"collective is {collective!r}; it should be one of {', '.join(LOGGOPS_COLLECTIVES)}.")
    if ranks < 2 or chunks < 1:
        raise ValueError(f"ranks is {ranks} and chunks {chunks}; there should be at least 2 ranks and 1 chunk.")
    rank = np.arange(ranks)
    if collective == "broadcast":
        chunk = np.arange(chunks + ranks - 2)[:, None] - rank  # that a rank forwards in a round
        return Rounds(np.where((chunk >= 0) & (chunk < chunks) & (rank < ranks - 1), rank + 1, -1), np.zeros(chunk.shape, bool))
    count = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    step = np.arange(count)[:, None]
    target = (rank + (step + 1 if collective == "all_to_all" else 1 + 0 * step)) % ranks
    reduces = step < (ranks - 1 if collective in ("all_reduce", "reduce_scatter") else 0)
    return Rounds(target, np.broadcast_to(reduces, target.shape))


def loggops_time(
    parameters: LogGops,
    rounds: Rounds,
    nbytes: Real[ArrayLike, "..."],
    reduce_time: Real[ArrayLike, "..."] = 0.0,
    clock: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, " ranks"]]:
    """Time until the last rank is done, and when each is.

    Args:
      parameters: of the network.
      rounds: the messages.
      nbytes: of each, one number or shape (rounds, ranks), by sender. [B]
      reduce_time: work on a received message where the collective reduces, one number or shape (rounds, ranks), by receiver. [s]
      clock: see `message_time`. [s]
    References:
      Rules of the LogGOPS back end of ATLAHS (arXiv:2505.08936): a rank sends when its CPU and NIC are free; the receiver's NIC takes a message
      after it arrived and the NIC and the CPU are free; above `eager_bytes` a send ends with its receive, without a handshake.
    """
    shape, p = rounds.target.shape, parameters
    sizes = jnp.broadcast_to(si(nbytes), shape)
    work = jnp.broadcast_to(si(reduce_time), shape) * jnp.asarray(rounds.reduces)
    source = np.full(shape, -1)
    for i, targets in enumerate(rounds.target):
        source[i, targets[targets >= 0]] = np.flatnonzero(targets >= 0)

    def step(clocks, at):
        cpu, nic_send, nic_receive = clocks
        target, origin, size, after = at
        sends, receives, more = target >= 0, origin >= 0, jnp.maximum(size - 1, 0.0)
        busy, wire = p.overhead + more * p.overhead_per_byte, _wire(p, more, clock)
        start = jnp.maximum(cpu, nic_send)
        cpu = jnp.where(sends, start + busy, cpu)
        nic_send = jnp.where(sends, start + p.gap + wire, nic_send)
        arrival = (start + busy + p.latency + wire)[origin]
        taken = jnp.maximum(jnp.maximum(nic_receive, arrival), cpu) + p.gap
        done = taken + busy[origin]
        ended = jnp.where(sends & (size > p.eager_bytes), done[target], 0.0)
        cpu = jnp.maximum(jnp.where(receives, done, cpu), ended) + jnp.where(receives, after, 0.0)
        return (cpu, jnp.maximum(nic_send, ended), jnp.where(receives, taken, nic_receive)), None

    zeros = jnp.zeros(shape[1], sizes.dtype)
    (cpu, _, _), _ = lax.scan(step, (zeros, zeros, zeros), (jnp.asarray(rounds.target), jnp.asarray(source), sizes, work))
    return jnp.max(cpu), cpu
