"""Closed forms of what `_events.py` expands: a sum over steps for rings, a pipeline for chains, trees and exchanges.

They hold for equal ranks. Where nodes differ from the inside, rings take the larger of the way round and what the NIC carries. The event view is the judge.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ._events import RING_COLLECTIVES, chain_sequence, ring_sequence, tree_parents
from ._primitives import PRIMITIVES, EventCosts, primitive_times


def chain_time(
    collective: str, ranks: int, costs: EventCosts, chunk_bytes: Real[ArrayLike, " chunks"], nodes: int = 1, algorithm: str = "ring"
) -> Float[Array, ""]:
    """Time of a collective in closed form, for the arguments of `collective_events` (any number of channels: they share nothing).

    Rings of all-reduce, all-gather and reduce-scatter: per loop the sum of its primitives, and per hop a latency; of the hops, as many cross
    nodes as a path round the ring meets; at least what one NIC carries. Chains and trees: the fill of the first chunk,
    then the slowest stage for each further one; exact where all chunks but the last are equal.

    Returns:
      Time until the last rank is done. [s]
    References:
      Which loops are pipelined: "Demystifying NCCL", arXiv:2507.04786. The formulas follow from the order of the primitives.
    """
    sizes = si(chunk_bytes)
    table = primitive_times(costs, sizes)
    time = lambda primitive: table[PRIMITIVES.index(primitive)]
    if algorithm == "tree":
        return _tree_time(ranks, nodes, costs, time)
    if collective in RING_COLLECTIVES:
        return _ring_time(ring_sequence(collective, ranks), ranks, nodes, costs, time, sizes.shape[0])
    if collective == "all_to_all":
        return _exchange_time(ranks, nodes, costs, time)
    stages = []
    for rank, primitive in enumerate(["send", "directRecv"] if collective == "send_recv" else chain_sequence(collective, ranks)):
        stages += [time("transfer")] if rank and rank % (ranks // nodes) == 0 else []
        stages.append(time(primitive))
    return _pipeline(stages) + (ranks - nodes) * costs.intra_latency + (nodes - 1) * costs.inter_latency


def _pipeline(stages: list[Array]) -> Array:
    """Finish of the last chunk in the last stage, without latencies; each stage has the times of its chunks, all but the last one equal."""
    table = jnp.stack(stages)
    first, last = table[:, 0], table[:, -1]
    if table.shape[1] == 1:
        return jnp.sum(first)
    whole = jnp.cumsum(first) + lax.cummax(jnp.sum(table[:, 1:-1], axis=1))  # finish of the last whole chunk in each stage
    return jnp.max(whole + last + jnp.sum(last) - jnp.cumsum(last))


def _ring_time(sequence, ranks, nodes, costs, time, chunks):
    hops = chunks * (len(sequence) - 1)
    crossings = math.ceil(hops * nodes / ranks) if nodes > 1 else 0
    way = jnp.sum(sum(map(time, sequence))) + (hops - crossings) * costs.intra_latency + crossings * costs.inter_latency
    if nodes == 1:
        return way
    transfer = jnp.sum(time("transfer"))
    carried = time("send")[0] + (len(sequence) - 1) * transfer + costs.inter_latency + time(sequence[-1])[-1]
    return jnp.maximum(way + crossings * transfer / chunks, carried)


def _exchange_time(ranks, nodes, costs, time):
    send, recv = time("send"), time("directRecv")
    total = lambda times: (ranks - 1) * jnp.sum(times)
    if nodes == 1:
        return jnp.maximum(total(send) + recv[-1], send[0] + total(recv)) + costs.intra_latency
    transfer, inside = time("transfer"), ranks // nodes
    carried = (inside - 1) * jnp.sum(send) + send[0] + (ranks - inside) * jnp.sum(transfer) + recv[-1]  # the rank whose far peers come last
    return jnp.maximum(jnp.maximum(total(send) + transfer[-1] + recv[-1], send[0] + total(recv)), carried) + costs.inter_latency


def _tree_time(ranks, nodes, costs, time):
    """Up from the deepest leaf, through the root, and down to the leaf that is served last. The first of NCCL's two trees stands for both."""
    inside, parents = ranks // nodes, tree_parents(nodes, False)
    order = [node for node in range(nodes) if parents[node] < 0]
    turns: dict[int, tuple[int, ...]] = {order[0]: ()}  # per level: how many messages a NIC has sent when this way's is out
    for node in order:
        children = [child for child in range(nodes) if parents[child] == node]
        order += children
        turns |= {child: (*turns[node], turn + 1) for turn, child in enumerate(children)}
    served = max(turns.values(), key=lambda way: (len(way), sum(way)))
    levels = len(served)
    transfer, reduce_send, copy_send = map(time, ("transfer", "recvReduceSend", "recvCopySend"))
    chain = inside - 1 if levels else inside - 2  # ranks of the leaf's node that pass messages on
    up = [time("send"), *[reduce_send] * chain, *[transfer, reduce_send] * (levels - 1), *[transfer] * (levels > 0)]
    down = [part for turn in served for part in (turn * transfer, copy_send)][: 2 * levels - 1]
    stages = [*up, time("recvReduceCopySend"), *down, *[copy_send] * chain, time("recv")]
    return _pipeline(stages) + 2 * ((inside - 1) * costs.intra_latency + levels * costs.inter_latency)
