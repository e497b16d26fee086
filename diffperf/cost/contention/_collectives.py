"""Time of a collective by channels, threads, chunk size, algorithm and protocol: what is tuned when it runs beside compute.

`time = latency + wire (1 / rate + sync / (channels * chunk))`: each chunk of all channels pays one synchronisation, so the time falls with channels and
chunk until the link, or until a chunk exceeds a rank's share of a channel. The calibrated model of `diffperf.cost.collective` knows neither channels nor
chunks, NCCL's own tuner no chunks; rates of channels and synchronisation here are guesses from data sheets and from the published orderings of Lagom
(arXiv:2602.20656), to be replaced by measured ones.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...smooth import pnorm, safe_divide

OPERATIONS = {"all_reduce": 2.5, "all_gather": 2.0, "reduce_scatter": 3.0, "all_to_all": 2.0}
"""Collectives, and how often device memory is touched per byte that a rank sends: reads and writes of NCCL's primitives along a ring. An all-reduce is a
reduce-scatter and an all-gather, which send as much."""

PROTOCOLS = {"simple": (1.0, 1.0, math.inf), "ll128": (120 / 128, 1 / 3, 562.5 * 1024), "ll": (0.5, 1 / 6, 32.0 * 1024)}
"""Share of the wire that carries data, synchronisation and hop time relative to Simple, and most data per chunk [B] ("Demystifying NCCL", arXiv:2507.04786,
tables I and IV: about 6, 2 and 1 us per hop; NCCL `src/include/device.h` for the slot of LL)."""

ALGORITHMS = ("ring", "tree")
_TREE_SHARE = 0.92  # NCCL `src/graph/tuning.cc`: bandwidth of a tree relative to a ring
_CHANNEL_RATE_THREADS = 96.0  # threads at which a channel reaches half its rate; at 512 it has the stated one


class Fabric(NamedTuple):
    """What connects the ranks of a collective.

    Attributes:
      bandwidth: of one rank. [B/s]
      channel_rate: of one channel of 512 threads. [B/s]
      sync: per chunk of all channels. [s]
      base: to start. [s]
      hop: per step. [s]
      name: collectives of equal name share the link while they run together.
    """

    bandwidth: float
    channel_rate: float
    sync: float
    base: float
    hop: float
    name: str = "network"


FABRICS = {
    "a40_ib": Fabric(46e9, 22e9, 7e-6, 15e-6, 3e-6, "InfiniBand"),
    "a40_ib_100g": Fabric(11e9, 9e9, 12e-6, 20e-6, 5e-6, "InfiniBand"),
    "a40_nvlink": Fabric(44e9, 22e9, 4e-6, 8e-6, 1e-6, "NVLink"),
    "a40_pcie": Fabric(18e9, 10e9, 5e-6, 10e-6, 2e-6, "PCIe"),
    "h100_ib": Fabric(360e9, 36e9, 6e-6, 20e-6, 1.5e-6, "InfiniBand"),
    "h100_nvlink": Fabric(370e9, 36e9, 3e-6, 6e-6, 0.8e-6, "NVLink"),
    "a100_nvlink": Fabric(225e9, 22e9, 4e-6, 8e-6, 0.9e-6, "NVLink"),
    "v100_nvlink": Fabric(110e9, 18e9, 4e-6, 7e-6, 0.6e-6, "NVLink"),
}
"""Two nodes of 8 A40 with 2 x 400 Gbit/s and with 100 Gbit/s (the clusters of Lagom), inside one node of each, two nodes of 8 H100, and NVLink of H100, A100,
V100. Bandwidths of H100 and A100 are measured, the others data sheet times a usual share; rates of channels and times per chunk are guesses."""


class Collective(NamedTuple):
    """One collective.

    Attributes:
      op: one of `OPERATIONS`.
      nbytes: message: the buffer that all-reduce and all-to-all work on, the gathered buffer of all-gather and reduce-scatter. [B]
      ranks: in the group. [1]
      fabric: what connects them.
      stream: collectives of one stream run one after the other, those of several together.
      name: for messages.
      choices: pairs (algorithm, protocol) that may be chosen from.
    """

    op: str
    nbytes: float
    ranks: float
    fabric: Fabric
    stream: int = 0
    name: str = ""
    choices: tuple[tuple[str, str], ...] = (("ring", "simple"),)


class CollectiveRows(NamedTuple):
    """Numbers of several collectives, shape (collectives,), or (collectives, choices) for what the algorithm and protocol change.

    Attributes:
      bandwidth, channel_rate: see `Fabric`. [B/s]
      latency: [s]
      wire: data that a rank sends, without what the protocol adds. [B]
      share: most that one chunk of one channel may hold, times the channels. [B]
      efficiency: data over bytes on the link, and of a tree over a ring. [1]
      sync: per chunk of all channels. [s]
      chunk_limit: most data per chunk. [B]
      touches: of device memory per byte of `wire`. [1]
      link: number of the link.
    """

    bandwidth: Float[Array, "*m"]
    channel_rate: Float[Array, "*m"]
    latency: Float[Array, "*m v"]
    wire: Float[Array, "*m v"]
    share: Float[Array, "*m v"]
    efficiency: Float[Array, "*m v"]
    sync: Float[Array, "*m v"]
    chunk_limit: Float[Array, "*m v"]
    touches: Float[Array, "*m v"]
    link: Float[Array, "*m"]


class Settings(NamedTuple):
    """How collectives run, shape (collectives,), and (collectives, choices) for `weights`.

    Attributes:
      channels: channels, one block of threads each. [1]
      chunk_bytes: [B]
      threads: per channel. [1]
      weights: of each collective's choices, sum 1; one-hot for a choice that can run.
    """

    channels: Float[Array, "*m"]
    chunk_bytes: Float[Array, "*m"]
    threads: Float[Array, "*m"]
    weights: Float[Array, "*m v"]


def collective_rows(collectives: tuple[Collective, ...], choices: int) -> CollectiveRows:
    """Numbers of collectives, as NumPy; a collective with fewer than `choices` choices repeats its first."""
    links = list(dict.fromkeys(c.fabric.name for c in collectives))
    table: list[list[list[float]]] = []
    for c in collectives:
        n, f, rows = c.ranks, c.fabric, []
        for algorithm, protocol in (*c.choices, *[c.choices[0]] * (choices - len(c.choices))):
            share, relative, limit = PROTOCOLS[protocol]
            tree = algorithm == "tree"
            passes = 2 if c.op == "all_reduce" else 1
            steps = 2 * math.ceil(math.log2(max(n, 2))) if tree else passes * (n - 1)
            some = float(n > 1 and c.nbytes > 0)
            rows.append([some * (f.base + f.hop * relative * steps), passes * c.nbytes * (n - 1) / n, c.nbytes if tree else c.nbytes / n,
                         share * (_TREE_SHARE if tree else 1.0), f.sync * relative, limit, OPERATIONS[c.op] / share])  # fmt: skip
        table.append(rows)
    latency, wire, share, efficiency, sync, limit, touches = np.moveaxis(np.array(table, float), 2, 0)
    each = lambda get: np.array([get(c) for c in collectives], float)
    link = each(lambda c: links.index(c.fabric.name))
    bandwidth, channel_rate = each(lambda c: c.fabric.bandwidth), each(lambda c: c.fabric.channel_rate)
    return CollectiveRows(bandwidth, channel_rate, latency, wire, share, efficiency, sync, limit, touches, link)


def _softer_minimum(a: Float[Array, "..."], b: Float[Array, "..."], power: float) -> Float[Array, "..."]:
    """`(a^-power + b^-power)^(-1/power)` of non-negative numbers, at most their minimum; 0 where either is."""
    return safe_divide(1.0, pnorm(safe_divide(1.0, a), safe_divide(1.0, b), power)) * ((a > 0) & (b > 0))


def channel_time(
    rows: CollectiveRows, settings: Settings, channel_rate: Float[Array, ""], sync: Float[Array, ""], link_share: Float[Array, "*m"] | float = 1.0
) -> tuple[Float[Array, "*m"], Float[Array, "*m"], Float[Array, "*m"]]:
    """Time alone [s], bytes in flight in all channels [B], and traffic with device memory while it runs [B/s].

    Args:
      rows, settings: of collectives.
      channel_rate, sync: factors on what the rows say, for draws. [1]
      link_share: of the link's bandwidth that it gets. [1]
    """
    threads = settings.threads
    rate = channel_rate * rows.channel_rate * (1 + _CHANNEL_RATE_THREADS / 512) * threads / (threads + _CHANNEL_RATE_THREADS)
    both = _softer_minimum(settings.channels * rate, link_share * rows.bandwidth, 6.0)
    channels = settings.channels[..., None]
    buffer = jnp.minimum(settings.chunk_bytes[..., None], rows.chunk_limit)
    chunk = _softer_minimum(buffer, rows.share / channels, 4.0)
    times = rows.latency + rows.wire * (safe_divide(1.0, rows.efficiency * both[..., None]) + safe_divide(sync * rows.sync, channels * chunk))
    time = jnp.sum(settings.weights * times, axis=-1)
    in_flight = settings.channels * jnp.sum(settings.weights * buffer, axis=-1)
    traffic = safe_divide(jnp.sum(settings.weights * rows.touches * rows.wire, axis=-1), time)
    return time, in_flight, traffic
