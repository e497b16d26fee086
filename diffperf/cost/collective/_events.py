"""Event view of a collective: primitives per rank, channel and chunk, with what each waits for; the time is the longest path.

Each collective expands into the sequence of primitives of NCCL's `src/device/*.h`, as ATLAHS does (arXiv:2505.08936).
A primitive waits for the one before it on its rank and channel, and for the message that it reads. Rings of all-reduce, all-gather and reduce-scatter run
loop by loop; chains and trees are pipelined over chunks; a tree goes up and down on two groups of warps. Messages of one stream between
nodes pass through the channel's NIC one after the other. Leaves out the finite FIFO (8 slots), contention of channels for one link, and unequal starts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ... import smooth
from ..._arrays import si
from ._primitives import PRIMITIVES, EventCosts, primitive_times

RING_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
EVENT_COLLECTIVES = (*RING_COLLECTIVES, "broadcast", "reduce", "all_to_all", "send_recv")
"""Collectives that expand into events; all-reduce also by trees."""

_SAME, _INTRA, _INTER = range(3)


class EventGraph(NamedTuple):
    """Tasks in rows of equal depth, padded to one width: row by row is a topological order. Integers, known before any trace.

    Attributes:
      primitive: place in `PRIMITIVES`, shape (depth, width).
      rank, channel, chunk: of the task, shape (depth, width).
      before: what it waits for, flat places in (depth, width), shape (depth, width, fan_in); depth * width for nothing.
      link: 0 on the same rank, 1 inside a node, 2 between nodes, shape (depth, width, fan_in).
      valid: False for padding, shape (depth, width).
    """

    primitive: np.ndarray
    rank: np.ndarray
    channel: np.ndarray
    chunk: np.ndarray
    before: np.ndarray
    link: np.ndarray
    valid: np.ndarray


class _Builder:
    """Collects tasks; a stream is a rank's program order."""

    def __init__(self, per_node: int):
        self.per_node = per_node
        self.tasks: list[tuple[int, int, int, int]] = []
        self.before: list[list[tuple[int, int]]] = []
        self.level: list[int] = []
        self.stream: list[str] = []
        self.last: dict[Any, int] = {}

    def add(self, primitive: str, rank: int, channel: int, chunk: int, messages: list[tuple[int, int]], stream: str = "") -> int:
        """A task that reads `messages`, pairs (task, its rank), after the last one of its stream."""
        before = [self._arrival(task, source, rank, channel, chunk) for task, source in messages]
        return self._put(primitive, rank, channel, chunk, before, stream)

    def _arrival(self, task: int, source: int, rank: int, channel: int, chunk: int) -> tuple[int, int]:
        if source // self.per_node == rank // self.per_node:
            return task, _INTRA
        return self._put("transfer", source, channel, chunk, [(task, _SAME)], f"{self.stream[task]} nic"), _INTER

    def _put(self, primitive: str, rank: int, channel: int, chunk: int, before: list[tuple[int, int]], stream: str) -> int:
        key = rank, channel, stream
        if key in self.last:
            before = [*before, (self.last[key], _SAME)]
        self.last[key] = len(self.tasks)
        self.tasks.append((PRIMITIVES.index(primitive), rank, channel, chunk))
        self.before.append(before)
        self.stream.append(stream)
        self.level.append(1 + max((self.level[task] for task, _ in before), default=-1))
        return self.last[key]

    def graph(self) -> EventGraph:
        level = np.array(self.level)
        width = np.bincount(level)
        shape, fan_in = (len(width), int(width.max())), max(1, *map(len, self.before))
        column = np.zeros(len(level), int)
        order = np.argsort(level, kind="stable")
        column[order] = np.arange(len(level)) - np.repeat(np.cumsum(width) - width, width)
        place = level * shape[1] + column
        fields = np.zeros((4, *shape), int)
        fields[:, level, column] = np.array(self.tasks).T
        before, link = np.full((*shape, fan_in), shape[0] * shape[1]), np.zeros((*shape, fan_in), int)
        for i, waits in enumerate(self.before):
            for j, (task, kind) in enumerate(waits):
                before[level[i], column[i], j], link[level[i], column[i], j] = place[task], kind
        valid = np.zeros(shape, bool)
        valid[level, column] = True
        return EventGraph(fields[0], fields[1], fields[2], fields[3], before, link, valid)


def ring_sequence(collective: str, ranks: int) -> list[str]:
    """Primitives of one rank in one loop of a ring of `ranks` (NCCL `src/device/all_reduce.h`, `all_gather.h`, `reduce_scatter.h`)."""
    middle = ranks - 2
    if collective == "all_reduce":
        return ["send", *["recvReduceSend"] * middle, "recvReduceCopySend", *["recvCopySend"] * middle, "recv"]
    if collective == "all_gather":
        return ["send", *["recvCopySend"] * middle, "recv"]
    return ["send", *["recvReduceSend"] * middle, "recvReduceCopy"]


def chain_sequence(collective: str, ranks: int) -> list[str]:
    """Primitives along the chain of a broadcast or a reduce, rank by rank."""
    middle, last = ("recvCopySend", "recv") if collective == "broadcast" else ("recvReduceSend", "recvReduceCopy")
    return ["send", *[middle] * (ranks - 2), last]


def tree_parents(nodes: int, mirrored: bool) -> list[int]:
    """Parent of each node in one of NCCL's two binary trees, -1 for the root (`src/graph/trees.cc`).

    Leaves of the first tree are the odd places, inner nodes the even ones. The second tree is the first one seen from the other end for an even
    number of nodes, and moved by one place for an odd number, so that a node is a leaf in one of the two.
    """
    def parent(node: int) -> int:
        if node == 0:
            return -1
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        return up if up < nodes else node ^ bit

    if not mirrored:
        return [parent(node) for node in range(nodes)]
    if nodes % 2 == 0:
        return [nodes - 1 - up if (up := parent(nodes - 1 - node)) >= 0 else -1 for node in range(nodes)]
    return [(up + 1) % nodes if (up := parent((node - 1) % nodes)) >= 0 else -1 for node in range(nodes)]


def _ring(build: _Builder, collective: str, ranks: int, channel: int, chunks: int) -> None:
    for chunk in range(chunks):
        earlier: list[int] = []
        for step, primitive in enumerate(ring_sequence(collective, ranks)):
            read = lambda rank, step=step, earlier=earlier: [(earlier[rank - 1], (rank - 1) % ranks)] if step else []
            earlier = [build.add(primitive, rank, channel, chunk, read(rank)) for rank in range(ranks)]


def _chain(build: _Builder, collective: str, ranks: int, channel: int, chunks: int) -> None:
    for chunk in range(chunks):
        task = -1
        for rank, primitive in enumerate(chain_sequence(collective, ranks)):
            task = build.add(primitive, rank, channel, chunk, [(task, rank - 1)] if rank else [])


def _tree(build: _Builder, ranks: int, nodes: int, channel: int, chunks: int) -> None:
    per_node = ranks // nodes
    up = [per_node * node if node >= 0 else -1 for node in tree_parents(nodes, channel % 2 == 1)]
    parents = [up[rank // per_node] if rank % per_node == 0 else rank - 1 for rank in range(ranks)]
    children: dict[int, list[int]] = {rank: [c for c in range(ranks) if parents[c] == rank] for rank in range(ranks)}
    root = parents.index(-1)
    down_order = [root]
    for rank in down_order:
        down_order += children[rank]
    for chunk in range(chunks):
        sent: dict[int, int] = {}
        for rank in reversed(down_order):
            below = children[rank]
            primitive = "recvReduceCopySend" if rank == root else "recvReduceSend" if below else "send"
            sent[rank] = build.add(primitive, rank, channel, chunk, [(sent[c], c) for c in below], "up")
        for rank in down_order[1:]:
            primitive = "recvCopySend" if children[rank] else "recv"
            sent[rank] = build.add(primitive, rank, channel, chunk, [(sent[parents[rank]], parents[rank])], "down")


def _exchange(build: _Builder, ranks: int, channel: int, chunks: int, one_way: bool) -> None:
    for distance in range(1, 2 if one_way else ranks):
        for chunk in range(chunks):
            senders = [0] if one_way else range(ranks)
            sent = {rank: build.add("send", rank, channel, chunk, [], "send") for rank in senders}
            for rank, task in sent.items():
                build.add("directRecv", (rank + distance) % ranks, channel, chunk, [(task, rank)], "recv")


def collective_events(collective: str, ranks: int, nodes: int = 1, channels: int = 1, chunks: int = 1, algorithm: str = "ring") -> EventGraph:
    """Expands a collective into its primitives.

    Args:
      collective: one of `EVENT_COLLECTIVES`; `send_recv` goes from rank 0 to rank 1.
      ranks: at least 2; neighbours in the ring or chain, those of one node side by side.
      nodes: divides `ranks`.
      channels: that run side by side on their own parts.
      chunks: loops of a ring, chunks of a chain or tree, chunks per peer of an exchange, on each channel.
      algorithm: "ring", or "tree" for all-reduce: chains in nodes, NCCL's two binary trees between them, on even and odd channels.
    Returns:
      The graph. Its size is about ranks * steps * chunks * channels tasks.
    Raises:
      ValueError: for an unknown name, or numbers that do not go together.
    """
    if collective not in EVENT_COLLECTIVES:
        raise ValueError(f"collective is {collective!r}; it should be one of {', '.join(EVENT_COLLECTIVES)}.")
    if algorithm not in ("ring", "tree") or (algorithm == "tree" and collective != "all_reduce"):
        raise ValueError(f'algorithm is {algorithm!r} for {collective}; it should be "ring", or "tree" for all_reduce.')
    for name, value, least in (("ranks", ranks, 2), ("nodes", nodes, 1), ("channels", channels, 1), ("chunks", chunks, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}; it should be at least {least}.")
    if ranks % nodes:
        raise ValueError(f"nodes is {nodes}; it should divide ranks = {ranks}.")
    if collective == "send_recv" and ranks != 2:
        raise ValueError(f"ranks is {ranks}; send_recv has 2.")
    build = _Builder(ranks // nodes)
    for channel in range(channels):
        if algorithm == "tree":
            _tree(build, ranks, nodes, channel, chunks)
        elif collective in RING_COLLECTIVES:
            _ring(build, collective, ranks, channel, chunks)
        elif collective in ("broadcast", "reduce"):
            _chain(build, collective, ranks, channel, chunks)
        else:
            _exchange(build, ranks, channel, chunks, collective == "send_recv")
    return build.graph()


def chunk_sizes(
    nbytes: Real[ArrayLike, ""], chunk_bytes: Real[ArrayLike, ""], chunks: int, channels: Real[ArrayLike, ""] = 1.0, pieces: Real[ArrayLike, ""] = 1.0
) -> Float[Array, " chunks"]:
    """Bytes of each chunk of a channel: whole chunks, then the rest.

    Args:
      nbytes: size of the buffer. [B]
      chunk_bytes: of a whole chunk. [B]
      chunks: loops, `ceil(nbytes / (channels * pieces * chunk_bytes))`; what does not fit into so many is put on the last. [1]
      channels: that share the buffer. [1]
      pieces: chunks of a channel per loop: ranks for all-reduce, all-gather and reduce-scatter by rings, and for all-to-all; else 1. [1]
    """
    share = si(nbytes) / (si(channels) * si(pieces))
    start = jnp.arange(chunks) * si(chunk_bytes)
    whole = jnp.where(jnp.arange(chunks) == chunks - 1, jnp.inf, si(chunk_bytes))
    return jnp.clip(share - start, 0.0, whole)


def longest_path(
    graph: EventGraph, durations: Float[Array, "depth width"], latencies: Float[Array, " links"], temperature: Real[ArrayLike, ""] = 0.0
) -> tuple[Float[Array, ""], Float[Array, "depth width"]]:
    """Finish of the whole and of each task.

    The gradient of the first in `durations` is 1 on the critical path and 0 off it (shared between equals).

    Args:
      graph: what waits for what.
      durations: of the tasks; padding is ignored. [s]
      latencies: per link of the graph (same rank, inside a node, between nodes), shape (3,). [s]
      temperature: above 0 each maximum is `diffperf.smooth.maximum`, which errs high. [1]
    """
    depth, width = graph.primitive.shape
    durations = jnp.where(jnp.asarray(graph.valid), durations, 0.0)
    delays = jnp.where(jnp.asarray(graph.before) < depth * width, si(latencies)[jnp.asarray(graph.link)], 0.0)

    def row(finish, at):
        index, before, delay, duration = at
        ready = smooth.maximum(finish[before] + delay, temperature)
        return lax.dynamic_update_slice(finish, ready + duration, (index * width,)), None

    start = jnp.zeros(depth * width + 1, durations.dtype)  # the last place is what nothing waits for
    finish, _ = lax.scan(row, start, (jnp.arange(depth), jnp.asarray(graph.before), delays, durations))
    finish = finish[:-1].reshape(depth, width)
    ends = jnp.where(jnp.asarray(graph.valid), finish, 0.0)
    return smooth.maximum(ends.reshape(-1), 0.0), ends


def event_time(
    graph: EventGraph, costs: EventCosts, chunk_bytes: Real[ArrayLike, " chunks"], temperature: Real[ArrayLike, ""] = 0.0
) -> tuple[Float[Array, ""], Float[Array, "depth width"]]:
    """Time of an expanded collective and the finish of each task, by `longest_path`. Differentiable in `costs` and `chunk_bytes`. [s]

    Args:
      graph: of `collective_events`.
      costs: of the primitives.
      chunk_bytes: of each chunk, of `chunk_sizes`. [B]
    """
    times = primitive_times(costs, chunk_bytes)
    durations = times[jnp.asarray(graph.primitive), jnp.asarray(graph.chunk)]
    latencies = jnp.stack([jnp.zeros_like(costs.intra_latency), costs.intra_latency, costs.inter_latency])
    return longest_path(graph, durations, latencies, temperature)
