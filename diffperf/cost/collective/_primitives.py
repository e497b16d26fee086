"""What one primitive of a collective costs: piecewise linear in its bytes, with tables that were measured by others as a start.

A primitive is what one block of threads does with one chunk: read it from a peer, perhaps reduce it with local data, perhaps write it to the next
peer. Its time includes the wait inside the primitive for the wire, so that a channel's rate is the slope of `send`. Leaves out the noise of a measurement
and what concurrent channels take from each other.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si

PRIMITIVES = ("send", "recvReduceSend", "recvReduceCopySend", "recvCopySend", "recv", "recvReduceCopy", "directRecv", "transfer")
"""Order of the axis of primitives. `transfer` is not a kernel's: the NIC of a rank carries one chunk to another node."""

TABLES = ("clariden LL", "clariden Simple", "ault LL", "ault Simple")
"""Measured tables: machine (clariden: GH200; ault: not stated) and protocol."""

# ATLAHS (arXiv:2505.08936), NPKit tables of its public repository, means [ns] at the bytes of data per chunk, for the first five primitives
_BYTES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)
_MEANS = {
    "clariden LL": (
        (594, 638, 633, 578, 1027, 1835, 3319),
        (131, 131, 146, 142, 258, 431, 1016),
        (155, 171, 155, 171, 279, 506, 1122),
        (107, 114, 114, 118, 165, 257, 459),
        (92, 106, 114, 110, 150, 200, 344),
    ),
    "clariden Simple": (
        (1064, 1077, 1406, 1278, 883, 1051, 1236, 1550, 2679, 5222, 10733, 21543),
        (1399, 1566, 2280, 2078, 1660, 1662, 1737, 2032, 3947, 7495, 14293, 28148),
        (1474, 1616, 2164, 2386, 2201, 2236, 2406, 3226, 6323, 11921, 22853, 45098),
        (1290, 1567, 2211, 1057, 975, 996, 1294, 2396, 4731, 9334, 18957, 38169),
        (1008, 1152, 1813, 955, 917, 924, 949, 1375, 2777, 5546, 11091, 21921),
    ),
    "ault LL": (
        (365, 377, 370, 383, 1161, 1846, 2846),
        (176, 174, 166, 201, 389, 635, 1799),
        (217, 175, 176, 246, 416, 1006, 2232),
        (156, 113, 133, 169, 219, 376, 897),
        (91, 109, 150, 132, 239, 269, 742),
    ),
    "ault Simple": (
        (823, 961, 1334, 957, 1073, 1302, 1895, 2755, 6993, 20716, 47371, 110382),
        (1980, 2332, 3276, 3101, 3025, 3453, 4717, 10644, 20100, 41332, 91519, 156536),
        (1866, 2129, 3061, 4321, 4245, 4378, 5378, 12220, 23944, 54665, 105332, 184451),
        (1790, 2085, 3108, 1718, 1746, 2259, 4058, 9003, 16907, 39624, 70196, 106719),
        (1330, 1572, 2531, 1615, 1696, 2337, 3761, 7121, 12002, 26181, 42426, 68494),
    ),
}


class EventCosts(eqx.Module):
    """Times of primitives and of what lies between them.

    Attributes:
      sizes: knots of the tables, rising, shape (knots,), at least two. [B]
      times: of each primitive at the knots, shape (8, knots); linear between them and beyond the last, constant below the first. The row of
        `transfer` is not read. [s]
      intra_latency: from the end of a send to what the receiver can see, inside a node. [s]
      inter_latency: the same between nodes, after the last byte left. [s]
      inter_bandwidth: rate of one channel's transfers between nodes. [B/s]
    """

    sizes: Float[Array, " knots"] = eqx.field(converter=si)
    times: Float[Array, "primitives knots"] = eqx.field(converter=si)
    intra_latency: Float[Array, ""] = eqx.field(converter=si, default=0.0)
    inter_latency: Float[Array, ""] = eqx.field(converter=si, default=0.0)
    inter_bandwidth: Float[Array, ""] = eqx.field(converter=si, default=25e9)


def linear_costs(
    start: Real[ArrayLike, "..."],
    bandwidth: Real[ArrayLike, "..."],
    intra_latency: Real[ArrayLike, ""] = 0.0,
    inter_latency: Real[ArrayLike, ""] = 0.0,
    inter_bandwidth: Real[ArrayLike, ""] = 25e9,
) -> EventCosts:
    """Costs `start + bytes / bandwidth`, one number for all primitives or one for each, shape (8,).

    Args:
      start: of a primitive. [s]
      bandwidth: of a primitive's chunk. [B/s]
      intra_latency, inter_latency: see `EventCosts`. [s]
      inter_bandwidth: see `EventCosts`. [B/s]
    """
    start, bandwidth = (jnp.broadcast_to(si(x), (len(PRIMITIVES),)) for x in (start, bandwidth))
    sizes = si([0.0, 2.0**20])
    return EventCosts(sizes, start[:, None] + sizes / bandwidth[:, None], intra_latency, inter_latency, inter_bandwidth)


def measured_costs(table: str, **between: float) -> EventCosts:
    """Costs from a published table of `TABLES`; `between` names the fields of `EventCosts` that no table has.

    A primitive without a row of its own takes the nearest one: `recvReduceCopy` that of `recvReduceSend` (two reads, one write), `directRecv`
    that of `recv`. Below 16 KiB the tables of Simple do not rise with size: another code path.

    Raises:
      ValueError: for a table that is not there.
    References:
      ATLAHS, arXiv:2505.08936: means of the NPKit tables in its public repository.
    """
    if table not in TABLES:
        raise ValueError(f"table is {table!r}; it should be one of {', '.join(TABLES)}.")
    rows = [[1e-9 * t for t in row] for row in _MEANS[table]]
    send, reduce_send, reduce_copy_send, copy_send, recv = rows
    return EventCosts(_BYTES[: len(send)], [send, reduce_send, reduce_copy_send, copy_send, recv, reduce_send, recv, send], **between)


def primitive_times(costs: EventCosts, nbytes: Real[ArrayLike, " chunks"]) -> Float[Array, "primitives chunks"]:
    """Time of each primitive on chunks of `nbytes` [B]; 0 for an empty chunk. [s]"""
    nbytes = si(nbytes)
    sizes = costs.sizes
    place = jnp.clip(jnp.searchsorted(sizes, nbytes, side="right") - 1, 0, sizes.shape[0] - 2)
    share = (jnp.maximum(nbytes, sizes[0]) - sizes[place]) / (sizes[place + 1] - sizes[place])
    times = jax.vmap(lambda row: row[place] + share * (row[place + 1] - row[place]))(costs.times)
    times = times.at[PRIMITIVES.index("transfer")].set(nbytes / costs.inter_bandwidth)
    return jnp.where(nbytes > 0, times, 0.0)
