"""NCCL's tuning model: latency, bandwidth and time of each (algorithm, protocol), and the choice.

Reproduces `ncclTopoTuneModel` and `ncclTopoGetAlgoTime` of NCCL's `src/graph/tuning.cc`, by version (`_tables.py`). At temperature 0 it is the
library's own arithmetic (in float64 where the library uses float32). Above it, the steps in bytes and nodes become ramps: the correction of the
tree is interpolated in log2 bytes, floors become smooth, and the choice is a relaxed minimum. Leaves out collectives grouped into one launch,
environment variables, and the penalty of 8-bit sums on long rings (2.30). It is a model of what NCCL believes, not of what a machine does: its
constants were measured by NVIDIA on reference machines.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Real

from .... import smooth
from ...._arrays import si
from ._check import check_bytes, check_channels, check_group
from ._tables import (
    ALGORITHMS,
    COLLECTIVES,
    COLLNET_CHAIN,
    COLLNET_DIRECT,
    LL128,
    NET,
    NVLINK,
    NVLS,
    NVLS_TREE,
    PAT,
    PCI,
    PROTOCOLS,
    RING,
    SIMPLE,
    TREE,
    Tuning,
    index_of,
    tuning_of,
)
from ._topology import NcclTopology

_GATHERS = ("all_gather", "reduce_scatter")
_FAR = 1e12  # a disabled pair counts as this many times the slowest enabled one in a relaxed minimum: finite, so that gradients are


class NcclCosts(NamedTuple):
    """Attributes:
    latency: per algorithm and protocol, shape (7, 3). [s]
    bandwidth: algorithm bandwidth (bytes of the buffer over time), shape (7, 3); 0 where the pair is disabled. [B/s]
    """

    latency: Float[Array, "algorithms protocols"]
    bandwidth: Float[Array, "algorithms protocols"]


class NcclChoice(NamedTuple):
    """Attributes:
    time: of the chosen pair; the relaxed minimum above temperature 0. [s]
    algorithm: place in `ALGORITHMS`. [1]
    protocol: place in `PROTOCOLS`. [1]
    weights: of each pair, sum 1, shape (7, 3); one-hot at temperature 0. [1]
    """

    time: Float[Array, ""]
    algorithm: Int[Array, ""]
    protocol: Int[Array, ""]
    weights: Float[Array, "algorithms protocols"]

    @property
    def names(self) -> tuple[str, str]:
        """Names of algorithm and protocol; not under a transformation."""
        return ALGORITHMS[int(self.algorithm)], PROTOCOLS[int(self.protocol)]


def smooth_floor(x, temperature):
    """Floor; exact at temperature 0, towards `x` as temperature grows."""
    return -smooth.ceil(-si(x), temperature)


class _Group(NamedTuple):
    """A communicator, with what several formulas need of it: ranks, nodes, ranks per node, whole ranks per node, log2 of nodes, places in tables."""

    ranks: Array
    nodes: Array
    per_node: Array
    local: Array
    depth: Array
    generation: Array
    scale: Array


def _group(topology: NcclTopology, ranks, nodes, temperature) -> _Group:
    ranks, nodes = jnp.maximum(si(ranks), 2.0), jnp.maximum(si(nodes), 1.0)  # a safe group where there is none
    capability = topology.compute_capability
    generation = sum((capability >= limit).astype(int) for limit in (80, 90, 100))
    scale = (nodes > 1).astype(int) + (nodes > 2).astype(int)
    local = jnp.maximum(smooth_floor(ranks / nodes + 1e-9, temperature), 1.0)
    depth = smooth_floor(jnp.log2(nodes) + 1e-9, temperature)
    return _Group(ranks, nodes, ranks / nodes, local, depth, generation, scale)


def _steps(collective: str, group: _Group) -> Array:
    return {"all_reduce": 2 * (group.ranks - 1)}.get(collective, group.ranks - 1 if collective in _GATHERS else group.ranks)


def _rates(tuning: Tuning, topology: NcclTopology, collective: str, group: _Group) -> Array:
    """Algorithm bandwidth of every pair before anything is switched off, shape (7, 3). [B/s]"""
    take = lambda table: si(table)[group.generation, group.scale]
    many = group.nodes > 1
    channels, intra, inter = topology.channels, topology.bandwidth_intra, topology.bandwidth_inter
    bus = channels * jnp.where(group.nodes <= 2, intra, inter)
    ratio = group.ranks / _steps(collective, group)
    ll_max = si(tuning.ll_max)[jnp.where(many, (topology.amd_host > 0).astype(int), group.generation), group.scale]
    none = jnp.zeros_like(ll_max)
    rates = [[none] * len(PROTOCOLS) for _ in ALGORITHMS]

    ring = bus[RING]
    share = 0.5 if tuning.ring_ll_half else 0.25 if collective in ("all_reduce", "reduce") else jnp.where(many, 1 / 4, 1 / 3)
    wide = jnp.where(group.per_node < 2, tuning.ring_ll128_alone, 0.92)
    ring_ll128 = jnp.minimum(ring * wide, channels[RING] * take(tuning.ring_ll128_max))
    rates[RING] = [jnp.minimum(ll_max, ring * share) * ratio, ring_ll128 * ratio, ring * ratio]
    if collective == "all_reduce":
        tree = jnp.minimum(0.92 * bus[TREE], channels[TREE] * take(tuning.tree_max))
        tree_ll128 = jnp.minimum(tree * jnp.where(many, 120 / 128, 7 / 9), channels[TREE] * take(tuning.tree_ll128_max))
        half = jnp.where(topology.plain_tree > 0, 0.85, 1.0) / 2
        rates[TREE] = [jnp.minimum(tree / 3.8, ll_max) * half, tree_ll128 * half, tree * half]
        factor = group.per_node / channels[COLLNET_DIRECT]
        direct = channels[COLLNET_DIRECT] * intra[COLLNET_DIRECT] / (factor - (factor - 1) / 2)
        rates[COLLNET_DIRECT][SIMPLE] = direct * jnp.where(topology.compute_capability >= 90, 0.85, 1.0) / 2
        rates[COLLNET_CHAIN][SIMPLE] = channels[COLLNET_CHAIN] * intra[COLLNET_CHAIN] / 2
        rates[NVLS_TREE][SIMPLE] = _nvls_rate(tuning, topology, group, NVLS_TREE, True, ratio, take)
    if collective in _GATHERS:
        weight = (group.per_node - 1) / (8 - 1)
        if tuning.gather_capped:
            rates[COLLNET_DIRECT][SIMPLE] = group.per_node * jnp.minimum(intra[COLLNET_DIRECT], 0.9 * inter[COLLNET_DIRECT])
        elif tuning.gather_by_collnet:
            rates[COLLNET_DIRECT][SIMPLE] = group.per_node * intra[COLLNET_DIRECT] * (0.85 * weight + 0.95 * (1 - weight))
        if tuning.pat:
            rates[PAT][SIMPLE] = 0.75 * bus[PAT]
    if collective == "all_reduce" or collective in _GATHERS:
        rates[NVLS][SIMPLE] = _nvls_rate(tuning, topology, group, NVLS, collective == "all_reduce", ratio, take)
    return jnp.stack([jnp.stack(row) for row in rates])


def _nvls_rate(tuning, topology, group, algorithm, reduces, ratio, take):
    channels, intra, inter = topology.channels[algorithm], topology.bandwidth_intra[algorithm], topology.bandwidth_inter[algorithm]
    tree, few = algorithm == NVLS_TREE, group.nodes <= 2
    others = (group.per_node - 1) / group.per_node
    if not np.isnan(tuning.nvls_efficiency[0]):
        inside = intra * si(tuning.nvls_efficiency)[group.generation] * (channels - 1) / channels * (2 if reduces else others)
        rate = jnp.minimum(inside, inter * jnp.where(few, 2.0, 1.0) if tree else inter)
        return channels * (jnp.minimum(rate, take(tuning.nvls_tree_max)) if tree else rate) * ratio
    if tree:
        return channels * jnp.minimum(intra, jnp.where(few, inter, inter / 2)) * 5 / 6
    if tuning.gather_capped and not reduces:
        return channels * jnp.minimum(intra * others, 0.9 * inter)
    return channels * jnp.minimum(intra, inter) * 5 / 6


def _latencies(tuning: Tuning, topology: NcclTopology, collective: str, group: _Group) -> Array:
    """Latency of every pair, shape (7, 3). [s]"""
    many, hops, base = group.nodes > 1, si(tuning.hop_latency), si(tuning.base_latency)
    intra = jnp.where((topology.nvlink > 0)[:, None], hops[NVLINK], hops[PCI])
    net = jnp.where(group.per_node == 1, hops[NET, TREE], hops[NET]) if tuning.tree_hop_alone else hops[NET]
    inter = net + topology.latency_inter[:, None] * si([1, 1, 2])  # once more for the flush of Simple
    inside = group.local - 1
    rows = [base[a] for a in range(len(ALGORITHMS))]
    if collective in ("broadcast", "reduce"):
        hop = jnp.where(many, hops[NET], intra)
        chunk = jnp.where(jnp.arange(len(PROTOCOLS)) == SIMPLE, hop[TREE], hop[RING])
        rows[RING] += jnp.where(topology.same_channels > 0, hop[RING], group.ranks * chunk)
    else:
        twice = 2 if collective == "all_reduce" else 1
        crossings = group.nodes if twice == 2 and not tuning.inter_steps_less else group.nodes - 1
        crossings = jnp.where(many, crossings * twice, 0.0)
        overhead = jnp.where(many, topology.network_overhead, 0.0) * si([1, 1, 3])
        rows[RING] += (_steps(collective, group) - crossings) * jnp.maximum(intra[RING], overhead) + crossings * inter[RING]
    rows[TREE] += 2 * (inside * intra[TREE] + group.depth * inter[TREE])
    rows[COLLNET_DIRECT] += 2 * (jnp.minimum(1.0, inside) * intra[COLLNET_DIRECT] + inside * 0.4e-6) + inter[COLLNET_DIRECT]
    rows[COLLNET_CHAIN] += 2 * inside * intra[COLLNET_CHAIN] + inter[COLLNET_CHAIN]
    rows[NVLS] = intra[NVLS] + jnp.where(many, inter[NVLS], 0.0)
    rows[NVLS_TREE] += intra[NVLS_TREE] + 2 * group.depth * inter[NVLS_TREE]
    rows[PAT] += group.depth * inter[PAT] / 3.5 + 2.8e-6 * group.ranks
    return jnp.stack(rows)


def _enabled(tuning: Tuning, topology: NcclTopology, collective: str, group: _Group) -> Array:
    """Whether each pair may be chosen, apart from a bandwidth of 0, shape (7, 3)."""
    many, capability = group.nodes > 1, topology.compute_capability
    on = tuning.ll128_only_on
    known = jnp.any(capability == si(on)) if on else capability >= 70
    collnet = (topology.collnet > 0) & many
    heads = collnet & (topology.collnet_heads >= group.per_node) if collective in _GATHERS else collnet
    nvls = topology.nvls > 0
    efficient = not np.isnan(tuning.nvls_efficiency[0])
    wide = topology.channels >= (2 if efficient else 1)
    always = jnp.asarray(True)
    algorithms = [always, always, heads & (topology.nvswitch > 0), collnet, nvls & wide[NVLS] & (~many | heads), nvls & wide[NVLS_TREE] & many]
    algorithms.append((group.per_node == 1) & many)
    ll128 = (jnp.arange(len(PROTOCOLS)) != LL128) | (known & (topology.ll128 > 0))[:, None]
    return jnp.stack(algorithms)[:, None] & ll128


def nccl_costs(
    topology: NcclTopology,
    collective: str,
    ranks: Real[ArrayLike, ""],
    nodes: Real[ArrayLike, ""] = 1,
    version: str = "2.30",
    temperature: Real[ArrayLike, ""] = 0.0,
) -> NcclCosts:
    """Latency and algorithm bandwidth of every (algorithm, protocol), as NCCL prints them with `NCCL_DEBUG_SUBSYS=TUNING`.

    Args:
      topology: what the search found.
      collective: one of `COLLECTIVES`.
      ranks: at least 2. [1]
      nodes: at most `ranks`. [1]
      version: of NCCL, `major.minor`, one of `VERSIONS`; a patch number is ignored.
      temperature: above 0, floors of ranks per node and log2 of nodes are smooth. [1]
    Raises:
      ValueError: for an unknown version or collective, fewer than two ranks, or more nodes than ranks.
    References:
      NVIDIA NCCL, `src/graph/tuning.cc`, `ncclTopoTuneModel`.
    """
    tuning = tuning_of(version)
    index_of(collective, COLLECTIVES, "collective")
    check_group(ranks, nodes)
    group = _group(topology, ranks, nodes, temperature)
    rates = jnp.where(_enabled(tuning, topology, collective, group), _rates(tuning, topology, collective, group), 0.0)
    return NcclCosts(_latencies(tuning, topology, collective, group), rates)


def _correction(tuning: Tuning, nbytes, temperature) -> Array:
    """Factor on the tree's bandwidth per protocol, shape (3,)."""
    place = jnp.log2(jnp.maximum(nbytes, 1.0) / 64)
    last = tuning.tree_correction.shape[1] - 1
    step = smooth_floor(place + 1e-9, temperature)
    inside = (step >= 0) & (step < last + 1)
    at = jnp.clip(step, 0.0, last)
    low = jnp.minimum(jnp.floor(at), last - 1).astype(int)
    table = si(tuning.tree_correction)
    factor = table[:, low] + (at - low) * (table[:, low + 1] - table[:, low])
    return jnp.where(inside, factor, 1.0)


def nccl_times(
    topology: NcclTopology,
    collective: str,
    nbytes: Real[ArrayLike, ""],
    ranks: Real[ArrayLike, ""],
    nodes: Real[ArrayLike, ""] = 1,
    version: str = "2.30",
    *,
    used_channels: Real[ArrayLike, ""] | None = None,
    temperature: Real[ArrayLike, ""] = 0.0,
) -> Float[Array, "algorithms protocols"]:
    """Time that NCCL predicts for every (algorithm, protocol), `latency + nbytes / bandwidth`; infinite where the pair is disabled.

    The bandwidth of a tree all-reduce is corrected by message size; a ring all-reduce with Simple over several nodes pays 1.4 of its latency
    (1.9 before Ampere) once a rank's share of a channel reaches 64 bytes.

    Args:
      topology: what the search found.
      collective: one of `COLLECTIVES`.
      nbytes: size as nccl-tests counts it: the full buffer, also for all-gather and reduce-scatter. [B]
      ranks: at least 2. [1]
      nodes: at most `ranks`. [1]
      version: of NCCL, `major.minor`, one of `VERSIONS`; a patch number is ignored.
      used_channels: where the caller fixes a number of channels, bandwidth scales by it over the communicator's. [1]
      temperature: 0 for NCCL's own numbers; above, steps become ramps. [1]
    Returns:
      Times, shape (7, 3), in the order of `ALGORITHMS` and `PROTOCOLS`. Under `jit`, where values cannot be refused, 0 bytes cost the
      latency alone and one rank takes no time. [s]
    Raises:
      ValueError: for an unknown version or collective, fewer than two ranks, more nodes than ranks, no bytes or no channel.
    References:
      NVIDIA NCCL, `src/graph/tuning.cc`, `ncclTopoGetAlgoTime`.
    """
    tuning = tuning_of(version)
    check_bytes(nbytes)
    check_channels(1.0 if used_channels is None else used_channels)
    latency, bandwidth = nccl_costs(topology, collective, ranks, nodes, version, temperature)
    nbytes, nodes, size = si(nbytes), si(nodes), jnp.maximum(si(ranks), 2.0)
    enabled = bandwidth > 0
    if collective == "all_reduce":
        bandwidth = bandwidth.at[TREE].multiply(_correction(tuning, nbytes, temperature))
        share = nbytes / (topology.channels[RING] * size)
        margin = jnp.log2(jnp.maximum(share, 1e-3) / 64)
        plateau = smooth.where(margin + 1e-12, jnp.where(topology.compute_capability < 80, 1.9, 1.4), 1.0, temperature)
        latency = latency.at[RING, SIMPLE].multiply(jnp.where(nodes > 1, plateau, 1.0))
    if used_channels is not None:
        bandwidth = bandwidth * (si(used_channels) / topology.channels)[:, None]
    times = latency + nbytes / jnp.where(enabled, bandwidth, 1.0)
    return jnp.where(enabled, jnp.where(si(ranks) > 1, times, 0.0), jnp.inf)


def nccl_choice(
    topology: NcclTopology,
    collective: str,
    nbytes: Real[ArrayLike, ""],
    ranks: Real[ArrayLike, ""],
    nodes: Real[ArrayLike, ""] = 1,
    version: str = "2.30",
    *,
    used_channels: Real[ArrayLike, ""] | None = None,
    temperature: Real[ArrayLike, ""] = 0.0,
) -> NcclChoice:
    """The pair that NCCL takes: the smallest of `nccl_times`, the first of equals. Arguments and errors are those of `nccl_times`.

    Above temperature 0 the time is a relaxed minimum (it errs low, never below `21**-temperature` of the smallest), and the weights are a
    softmax of the negative log times.
    """
    times = nccl_times(topology, collective, nbytes, ranks, nodes, version, used_channels=used_channels, temperature=temperature)
    flat = times.reshape(-1)
    best = jnp.argmin(flat)
    finite = jnp.isfinite(flat)
    far = lax.stop_gradient(_FAR * jnp.max(jnp.where(finite, flat, 0.0)))
    safe = jnp.where(finite, flat, jnp.maximum(far, 1e-30))
    time = smooth.minimum(safe, temperature)
    return NcclChoice(time, best // len(PROTOCOLS), best % len(PROTOCOLS), smooth.choice(safe, temperature).reshape(times.shape))
