"""Calibrated time of a collective: latency counted in steps, wire time, and a ramp that fills the pipeline and then saturates.

    time = ((latency + wire + ramp)^3 + floor^3)^(1/3),    ramp = D (wire / (wire + half D))^power

`D` is the full cost of filling the pipeline of the bandwidth protocol: a best chunk count costs `sqrt(nbytes)` until chunks reach their
largest size, after which the extra time stays `D`. Between algorithms (ring, switch multicast, tree between nodes) the cheapest wire time
wins. Every number is a leaf that a fit or a gradient may move; only the operation and a forced algorithm are static. The form and
its start values come from a study of published nccl-tests logs and of the aiconfigurator tables (A100 to GB200); `docs/collectives.md` shows
each curve and its errors. Leaves out congestion by other jobs, dips of 10-25% where a library changes its protocol, and the choice of a
library that is not the cheapest (`_nccl.py` models NCCL's own choice).
"""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ... import smooth
from ..._arrays import si

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"]
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv")
Algorithm = Literal["auto", "ring", "tree", "nvls"]
ALGORITHMS: tuple[Algorithm, ...] = ("auto", "ring", "tree", "nvls")
FLOOR_POWER = 3.0
"""Norm by which the host's floor joins the device's time; 1 would add them, infinity would take the larger. 3 fits nine logs best."""
_SHARED = 8.0
"""Norm by which two rates in series (NVLink and NICs) limit one pipeline; at equal rates it costs 9%."""


class NodeConstants(eqx.Module):
    """One domain of fast links: NVLink, xGMI or PCIe.

    Attributes:
      bandwidth: rate of one device in one direction that a large all-gather reaches. [B/s]
      reduce_rate: rate of all-reduce over `bandwidth`. [1]
      exchange_rate: rate of all-to-all over `bandwidth`. [1]
      local_reduce_bandwidth: rank-local work of all-reduce, on `nbytes / ranks`. [B/s]
      local_gather_bandwidth: the same for all-gather. [B/s]
      local_scatter_bandwidth: the same for reduce-scatter. [B/s]
      local_exchange_bandwidth: the same for all-to-all. [B/s]
      launch: latency of a collective without its steps. [s]
      hop: latency of one step. [s]
      second_hop: rise of `hop`, as a share of it, above `second_bytes`, where the protocol of least latency ends. [1]
      second_bytes: size at which half of that rise is reached. [B]
      exchange_launch: `launch` of all-to-all. [s]
      exchange_hop: `hop` of all-to-all, per peer. [s]
      peer_bandwidth: low-latency path to one peer in an all-to-all. [B/s]
      peer_ceiling: cost of changing to the bandwidth path instead. [s]
      ramp: cost of filling the pipeline, `D`, of all-reduce. [s]
      gather_ramp: that of all-gather over it. [1]
      scatter_ramp: that of reduce-scatter over it. [1]
      exchange_ramp: that of all-to-all over it. [1]
      ramp_half: wire time, over `ramp`, at which the ramp is about half done. [1]
      ramp_power: exponent of the ramp. [1]
      nvls: share of `bandwidth` that in-switch reduction (NVLink SHARP) uses; 0 where the switch has none. [1]
      bump_step: extra latency per step just above the change to the bandwidth protocol; 0 for none. [s]
      bump_bytes: bytes per rank at which that change happens. [B]
      bump_limit: steps up to which the library changes too early, so that times double within one doubling of the size; with more steps the
        library changes where the protocols cross. [1]
      bump_line: extra wire time of the latency protocol, as a share, which then stands before the crossing. [1]
    """

    bandwidth: Float[Array, ""] = eqx.field(converter=si)
    reduce_rate: Float[Array, ""] = eqx.field(converter=si)
    exchange_rate: Float[Array, ""] = eqx.field(converter=si)
    local_reduce_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    local_gather_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    local_scatter_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    local_exchange_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    launch: Float[Array, ""] = eqx.field(converter=si)
    hop: Float[Array, ""] = eqx.field(converter=si)
    second_hop: Float[Array, ""] = eqx.field(converter=si)
    second_bytes: Float[Array, ""] = eqx.field(converter=si)
    exchange_launch: Float[Array, ""] = eqx.field(converter=si)
    exchange_hop: Float[Array, ""] = eqx.field(converter=si)
    peer_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    peer_ceiling: Float[Array, ""] = eqx.field(converter=si)
    ramp: Float[Array, ""] = eqx.field(converter=si)
    gather_ramp: Float[Array, ""] = eqx.field(converter=si)
    scatter_ramp: Float[Array, ""] = eqx.field(converter=si)
    exchange_ramp: Float[Array, ""] = eqx.field(converter=si)
    ramp_half: Float[Array, ""] = eqx.field(converter=si)
    ramp_power: Float[Array, ""] = eqx.field(converter=si)
    nvls: Float[Array, ""] = eqx.field(converter=si)
    bump_step: Float[Array, ""] = eqx.field(converter=si)
    bump_bytes: Float[Array, ""] = eqx.field(converter=si)
    bump_limit: Float[Array, ""] = eqx.field(converter=si)
    bump_line: Float[Array, ""] = eqx.field(converter=si)


class NetworkConstants(eqx.Module):
    """The network between domains.

    Attributes:
      bandwidth: datasheet rate of all NICs of one node, in one direction. [B/s]
      efficiency: share of it that large messages reach. [1]
      hop: latency of one level of the tree, or one step of the ring, between nodes. [s]
      ramp_ratio: cost of filling the pipeline over the latency. [1]
      ramp_half: wire time, over the ramp, at which it is about half done. [1]
      ramp_power: exponent of the ramp. [1]
      tree_rate: rate inside a node while a tree crosses it, over the link's bandwidth, without NVLS. [1]
      nvls: share of the link's bandwidth that in-switch reduction reaches below a tree between nodes; 0 where the switch has none. [1]
    """

    bandwidth: Float[Array, ""] = eqx.field(converter=si)
    efficiency: Float[Array, ""] = eqx.field(converter=si)
    hop: Float[Array, ""] = eqx.field(converter=si)
    ramp_ratio: Float[Array, ""] = eqx.field(converter=si)
    ramp_half: Float[Array, ""] = eqx.field(converter=si)
    ramp_power: Float[Array, ""] = eqx.field(converter=si)
    tree_rate: Float[Array, ""] = eqx.field(converter=si)
    nvls: Float[Array, ""] = eqx.field(converter=si)


class SourceConstants(eqx.Module):
    """What a library version and a way of measuring add: 1 and 0 for a current library timed in a CUDA graph.

    Attributes:
      floor: least time that the host needs to issue one collective. [s]
      latency: factor on every latency. [1]
      ramp: factor on the cost of filling the pipeline. [1]
      wire: factor on the wire time. [1]
      tree: factor on the wire time of a tree between nodes; libraries of 2021 send large messages round the ring instead. [1]
    """

    floor: Float[Array, ""] = eqx.field(converter=si, default=0.0)
    latency: Float[Array, ""] = eqx.field(converter=si, default=1.0)
    ramp: Float[Array, ""] = eqx.field(converter=si, default=1.0)
    wire: Float[Array, ""] = eqx.field(converter=si, default=1.0)
    tree: Float[Array, ""] = eqx.field(converter=si, default=1.0)


class CollectiveConstants(eqx.Module):
    """Everything that the time of a collective depends on beside its message and its group."""

    node: NodeConstants
    network: NetworkConstants
    source: SourceConstants = eqx.field(default_factory=SourceConstants)


def collective_time(
    operation: Operation,
    constants: CollectiveConstants,
    nbytes: Real[ArrayLike, ""],
    ranks: Real[ArrayLike, ""],
    ranks_per_node: Real[ArrayLike, ""],
    *,
    algorithm: Algorithm = "auto",
    temperature: Real[ArrayLike, ""] = 0.0,
) -> Float[Array, ""]:
    """Time of one collective.

    Args:
      operation: one of `OPERATIONS`.
      constants: of the links, the network and the source.
      nbytes: the larger of send and receive buffer, as nccl-tests' "size": the full buffer of all_gather and reduce_scatter, the buffer of
        one rank for the others; 0 costs the latency. [B]
      ranks: ranks of the group; 1 costs nothing. [1]
      ranks_per_node: ranks that share one domain of fast links, at most `ranks`. [1]
      algorithm: one of `ALGORITHMS` for all_reduce; "auto" takes the cheapest wire time. Others take their only one.
      temperature: 0 chooses exactly; above 0 the choice is a smooth minimum that errs low (`smooth.minimum`). [1]
    Returns:
      Time until the last rank is done. [s]
    Raises:
      ValueError: for an unknown operation or algorithm.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"collective_time: operation is {operation!r}; it should be one of {', '.join(OPERATIONS)}.")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"collective_time: algorithm is {algorithm!r}; it should be one of {', '.join(ALGORITHMS)}.")
    node, network, source = constants.node, constants.network, constants.source
    size, n = jnp.maximum(si(nbytes), 1.0), jnp.maximum(si(ranks), 1.0)
    p = jnp.clip(si(ranks_per_node), 1.0, n)
    nodes = n / p
    many = nodes > 1
    far, few = jnp.where(many, nodes, 2.0), jnp.where(n > 1, n, 2.0)  # harmless stand-ins for branches not taken

    latency = source.latency * _latency(operation, node, network, size, few, jnp.minimum(p, few), nodes)
    wire = source.wire * _wire(operation, algorithm, constants, size, few, jnp.minimum(p, few), far, many, temperature)
    ramp = source.ramp * jnp.where(many, network.ramp_ratio * latency / source.latency, node.ramp * _ramp_share(operation, node))
    half, power = (jnp.where(many, a, b) for a, b in ((network.ramp_half, node.ramp_half), (network.ramp_power, node.ramp_power)))
    time = latency + wire + saturating_ramp(wire, ramp, half, power)
    if operation == "all_to_all":
        share = size / few
        time = time + least(share / node.peer_bandwidth, node.peer_ceiling, 4.0)
    if operation in ("all_reduce", "all_gather", "reduce_scatter"):
        time = time + jnp.where(many, 0.0, _bump(node, size / few, _steps(operation, few), wire))
    return jnp.where(n > 1, smooth.pnorm(time, source.floor, FLOOR_POWER), 0.0)


def uneven_all_to_all_time(
    constants: CollectiveConstants, sent_bytes: Real[ArrayLike, " n"], received_bytes: Real[ArrayLike, " n"], ranks_per_node: Real[ArrayLike, ""]
) -> Float[Array, ""]:
    """All-to-all in which ranks send and receive different amounts: that of the busiest rank in its busier direction.

    Args:
      constants: of the links, the network and the source.
      sent_bytes, received_bytes: data that each rank sends and receives, its own share included. [B]
      ranks_per_node: ranks that share one domain of fast links. [1]
    References:
      Lin et al. 2024, arXiv:2404.12674: `max over ranks of max(sent, received)`.
    """
    sent, received = jnp.broadcast_arrays(si(sent_bytes), si(received_bytes))
    return collective_time("all_to_all", constants, jnp.maximum(jnp.max(sent), jnp.max(received)), sent.shape[-1], ranks_per_node)


def saturating_ramp(wire: Float[Array, ""], ramp: Float[Array, ""], half: Float[Array, ""], power: Float[Array, ""]) -> Float[Array, ""]:
    """Cost of filling the pipeline, `ramp (wire / (wire + half ramp))^power`: rises with `wire` from 0 and saturates at `ramp`. [s]"""
    return ramp * smooth.safe_power(smooth.safe_divide(wire, wire + half * ramp), power)


def _steps(operation: Operation, n: Float[Array, ""]) -> Float[Array, ""]:
    return (2.0 if operation == "all_reduce" else 1.0) * (n - 1)


def _ramp_share(operation: Operation, node: NodeConstants) -> Float[Array, ""]:
    shares = {"all_gather": node.gather_ramp, "reduce_scatter": node.scatter_ramp, "all_to_all": node.exchange_ramp}
    return shares.get(operation, si(1.0))


def _latency(operation: Operation, node: NodeConstants, network: NetworkConstants, size, n, p, nodes) -> Float[Array, ""]:
    between = jnp.maximum(nodes, 1.0)
    hop = node.hop * (1 + node.second_hop / (1 + (node.second_bytes / size) ** 2))
    if operation == "all_reduce":  # inside one node a ring; between nodes a tree above a chain in each node
        return node.launch + 2 * hop * (p - 1) + 2 * network.hop * jnp.log2(between)
    if operation in ("all_gather", "reduce_scatter"):
        return node.launch + hop * (n - between) + network.hop * (between - 1)
    if operation == "all_to_all":
        return node.exchange_launch + node.exchange_hop * (n - between) + network.hop * jnp.log2(between)
    # send_recv, broadcast, reduce: back-to-back iterations pipeline, so a chain shows its issue rate and one hop
    return node.launch + node.hop + jnp.where(nodes > 1, network.hop, 0.0)


def least(a: Float[Array, ""], b: Float[Array, ""], power: Float[Array, ""] | float = _SHARED) -> Float[Array, ""]:
    """`(a^-power + b^-power)^(-1/power)` of two positive numbers: at most the smaller, 9% below it where they are equal at power 8."""
    return a * (b / smooth.pnorm(a, b, power))


def _wire(operation: Operation, algorithm: Algorithm, constants: CollectiveConstants, size, n, p, nodes, many, temperature) -> Float[Array, ""]:
    node, network = constants.node, constants.network
    nic = network.bandwidth * network.efficiency
    if operation in ("send_recv", "broadcast", "reduce"):
        return size / jnp.where(many, least(node.bandwidth, nic), node.bandwidth)
    if operation == "all_to_all":
        rate = node.bandwidth * node.exchange_rate
        inside = size * (n - 1) / n / rate + size / n / node.local_exchange_bandwidth
        between = jnp.maximum(size * (p - 1) / n / rate, size * (n - p) / n * p / nic)
        return jnp.where(many, between, inside)
    if operation != "all_reduce":
        moved = size * (n - 1) / n
        local = node.local_gather_bandwidth if operation == "all_gather" else node.local_scatter_bandwidth
        inside = moved / node.bandwidth + size / n / local
        return jnp.where(many, moved / least(node.bandwidth, nic), inside)
    moved = 2 * size * (n - 1) / n
    has_nvls = node.nvls > 0
    multicast = jnp.where(has_nvls, node.nvls, 1.0) * node.bandwidth
    ring = moved / (node.bandwidth * node.reduce_rate) + size / n / node.local_reduce_bandwidth
    nvls = jnp.where(has_nvls, size * (1 + 1 / n) / multicast, jnp.inf)
    far_ring = moved / least(node.bandwidth, nic)
    lane = 2 * size / (network.tree_rate * node.bandwidth)
    tree_nvls = network.nvls > 0
    cast = (1 + 1 / p) / jnp.where(tree_nvls, network.nvls, 1.0)
    lane = jnp.where(tree_nvls, size / node.bandwidth * jnp.minimum(2 * (p - 1) / p, cast), lane)
    far_tree = constants.source.tree * smooth.pnorm(lane, 2 * size * (nodes - 1) / nodes / nic, 6.0)
    if algorithm == "ring":
        return jnp.where(many, far_ring, ring)
    if algorithm == "tree":
        return jnp.where(many, far_tree, ring)
    if algorithm == "nvls":
        return jnp.where(many, far_tree, jnp.where(has_nvls, nvls, ring))
    near = jnp.where(has_nvls, smooth.minimum(jnp.stack([ring, jnp.where(has_nvls, nvls, ring)]), temperature), ring)
    return jnp.where(many, smooth.minimum(jnp.stack([far_ring, far_tree]), temperature), near)


def _bump(node: NodeConstants, per_rank: Float[Array, ""], steps: Float[Array, ""], wire: Float[Array, ""]) -> Float[Array, ""]:
    """Cost of starting the bandwidth protocol, latency-bound at first and hidden by the wire time far above it.

    Groups of few steps change at `bump_bytes` per rank, before it pays: NCCL's tables give its bandwidth protocol the smaller base latency. Larger
    groups stay on the slower line of the latency protocol until the two cross.
    """
    some = node.bump_step > 0
    height = jnp.where(some, node.bump_step, 1.0) * steps
    early = 1 / (1 + (steps / node.bump_limit) ** 8)
    gate = jnp.clip(per_rank / node.bump_bytes, 1e-4, 1e4) ** 6
    rise = early * gate / (1 + gate)
    line = node.bump_line * wire / height
    rise = rise + (1 - rise) * line / (1 + line)
    return jnp.where(some, rise * height / (1 + (wire / (2 * height)) ** 2), 0.0)
