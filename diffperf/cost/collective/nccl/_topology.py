"""What NCCL's tuner knows of a machine, as a pytree, and a rule that makes it from a `diffperf.hardware.System`.

NCCL searches rings and trees through the topology and hands the tuner one graph per algorithm: channels and bandwidth per channel. The rule
here stands for that search on a switched, symmetric machine; a machine with an NVLink mesh, or fewer NICs than GPUs, wants the numbers of its
own `NCCL_DEBUG_SUBSYS=GRAPH` output instead.
"""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ...._arrays import si
from ....hardware import System
from ._check import check_group
from ._tables import ALGORITHMS, index_of, tuning_of

HOSTS = ("intel", "amd", "other")
_INTRA_OLD = (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3)
_INTER_OLD = (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12)
_INTRA_HOPPER = (60, 50, 40, 30, 24, 20, 15, 12, 6, 3)
_INTER_HOPPER = (48, 45, 42, 40, 30, 24, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12)
_MAX_CHANNELS = 32


def _per_algorithm(x) -> Array:
    return jnp.broadcast_to(si(x), (len(ALGORITHMS),))


class NcclTopology(eqx.Module):
    """The tuner's view of a communicator. A number given where an axis of algorithms is meant holds for all of them. Flags are 0 or 1.

    Attributes:
      channels: channels of the algorithm's graph, shape (7,). [1]
      bandwidth_intra: of one channel inside a node, shape (7,). [B/s]
      bandwidth_inter: of one channel between nodes, shape (7,); the search leaves it equal to `bandwidth_intra` on one node. [B/s]
      compute_capability: lowest of all ranks, such as 80. [1]
      nvlink: flag, ranks of a node are joined by NVLink, shape (7,); PCI otherwise.
      ll128: flag, path types and equal chips allow LL128, shape (7,).
      latency_inter: reported by the NIC, shape (7,). [s]
      amd_host: flag, x86 hosts by AMD, which decides the cap of LL between nodes.
      network_overhead: host time to post one message. [s]
      nvls: flag, NVLink SHARP works.
      collnet: flag, in-network reduction works (SHARP plugin).
      collnet_heads: NICs per node that reduce; all-gather over CollNet needs one for each rank of a node. [1]
      nvswitch: flag, the node has NVSwitches, without which CollNetDirect is off.
      plain_tree: flag, the tree is the plain pattern (neither balanced nor split), which costs 15%.
      same_channels: flag, every channel has the same ring.
    """

    channels: Float[Array, " algorithms"] = eqx.field(converter=_per_algorithm)
    bandwidth_intra: Float[Array, " algorithms"] = eqx.field(converter=_per_algorithm)
    bandwidth_inter: Float[Array, " algorithms"] = eqx.field(converter=_per_algorithm)
    compute_capability: Float[Array, ""] = eqx.field(converter=si)
    nvlink: Float[Array, " algorithms"] = eqx.field(converter=_per_algorithm, default=1.0)
    ll128: Float[Array, " algorithms"] = eqx.field(converter=_per_algorithm, default=1.0)
    latency_inter: Float[Array, " algorithms"] = eqx.field(converter=_per_algorithm, default=0.0)
    amd_host: Float[Array, ""] = eqx.field(converter=si, default=0.0)
    network_overhead: Float[Array, ""] = eqx.field(converter=si, default=1e-6)
    nvls: Float[Array, ""] = eqx.field(converter=si, default=0.0)
    collnet: Float[Array, ""] = eqx.field(converter=si, default=0.0)
    collnet_heads: Float[Array, ""] = eqx.field(converter=si, default=8.0)
    nvswitch: Float[Array, ""] = eqx.field(converter=si, default=1.0)
    plain_tree: Float[Array, ""] = eqx.field(converter=si, default=0.0)
    same_channels: Float[Array, ""] = eqx.field(converter=si, default=1.0)


def nccl_topology(
    system: System,
    ranks: Real[ArrayLike, ""],
    nodes: Real[ArrayLike, ""],
    compute_capability: int,
    *,
    version: str = "2.30",
    host: str = "intel",
    nvlink: bool = True,
    collnet: bool = False,
) -> NcclTopology:
    """The graph that NCCL finds on `nodes` equal nodes of a switched machine.

    Rules (NCCL `src/graph/topo.h`, `src/graph/search.cc`): a link counts less than its datasheet says (NVLink 20 of 25 GB/s up to Hopper, 20.6
    for Hopper from 2.27 on, 40.1 of 50 for Blackwell; PCIe 12 GB/s). On one node, the first of the candidate speeds that fills the link
    with whole channels is taken, else the one that fills it most; channels of 25 GB/s or more are then split in two, except more than four
    channels below 50 GB/s from Hopper on. Between nodes, each rank's NIC carries one channel at the largest candidate that the NIC and the rank's
    share of the link allow, inside a node too. NVLS needs Hopper or later on NVLink.

    A search is a step function: its result has gradient 0 in the numbers of `system`. Differentiate in the leaves of the topology.

    Args:
      system: its `scale_up.bandwidth` and `scale_out.bandwidth` are read. [B/s]
      ranks: at least 2. [1]
      nodes: divides `ranks`. [1]
      compute_capability: 70 (V100), 80 (A100), 90 (H100), 100 (B200).
      host: "intel", "amd" or "other".
      nvlink: False where GPUs of a node are joined by PCIe.
      collnet: the SHARP plugin is loaded.
    Raises:
      ValueError: for a host, version or group that cannot be.
    """
    tuning = tuning_of(version)
    index_of(host, HOSTS, "host")
    if compute_capability < 60:
        raise ValueError(f"compute_capability is {compute_capability}; it should be two digits or three, such as 80 for A100 or 90 for H100.")
    check_group(ranks, nodes)
    ranks, nodes = si(ranks), si(nodes)
    hopper = compute_capability >= 90
    generation = sum(compute_capability >= limit for limit in (80, 90, 100))
    total = system.scale_up.bandwidth * float(tuning.nvlink_rate[generation]) if nvlink else si(12e9)
    # one node: first candidate that fills the link, else the best one
    candidates = 1e9 * si(_INTRA_HOPPER if hopper else _INTRA_OLD)
    count = jnp.minimum(jnp.floor(total / candidates + 1e-6), _MAX_CHANNELS / 2)
    best = jnp.argmax(count * candidates)  # the first of equals is the fastest
    speed, one = candidates[best], jnp.maximum(count[best], 1.0)
    split = (speed >= 25e9) & ~(hopper & (speed < 50e9) & (one > 4))
    one, speed = jnp.where(split, 2 * one, one), jnp.where(split, speed / 2, speed)
    # several nodes: one channel per rank of the node
    local = jnp.maximum(ranks / nodes, 1.0)
    candidates = 1e9 * si(_INTER_HOPPER if hopper else _INTER_OLD)
    room = jnp.minimum(system.scale_out.bandwidth, jnp.where(local > 1, total / local, jnp.inf))
    fits = candidates <= room * (1 + 1e-6)
    rail = jnp.where(jnp.any(fits), candidates[jnp.argmax(fits)], room)
    single = nodes <= 1
    rate = jnp.where(single, speed, rail)
    return NcclTopology(
        channels=jnp.where(single, one, local),
        bandwidth_intra=rate,
        bandwidth_inter=rate,
        compute_capability=compute_capability,
        nvlink=float(nvlink),
        ll128=float(nvlink),
        amd_host=float(host == "amd"),
        network_overhead=2e-6 if host == "amd" else 1e-6,
        nvls=float(hopper and nvlink),
        collnet=float(collnet),
        collnet_heads=local,
        nvswitch=float(nvlink),
    )
