"""Constants and rules of NCCL's tuning model, keyed by version: data only, in SI units.

Source of each table: NVIDIA NCCL, `src/graph/tuning.cc` of the version named (`baseLat`, `hwLat`, `llMaxBws`, `perChMax*Bws`, `treeCorrectionFactor`),
which writes microseconds and GB/s; the two converters below turn them into seconds and B/s. Constants moved between versions (the hop of
Tree with Simple went from 28 to 4 us on NVLink), so that they are effects of the library, not of the hardware. What the tables leave out:
environment variables (`NCCL_ALGO`, `NCCL_PROTO`, `NCCL_NTHREADS`), tuner plugins, POWER hosts, and the copy-engine and symmetric kernels.
"""

import difflib
import re
from dataclasses import dataclass, replace

import numpy as np

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
"""Order of the algorithm axis, as in NCCL."""

PROTOCOLS = ("LL", "LL128", "Simple")
"""Order of the protocol axis, as in NCCL."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
"""Collectives that NCCL's tuner chooses for; send/recv and what is built on it have no algorithm."""

TREE, RING, COLLNET_DIRECT, COLLNET_CHAIN, NVLS, NVLS_TREE, PAT = range(7)
LL, LL128, SIMPLE = range(3)
NVLINK, PCI, NET = range(3)


def _us(rows) -> np.ndarray:
    return np.asarray(rows, float) * 1e-6


def _gb(rows) -> np.ndarray:
    return np.asarray(rows, float) * 1e9


@dataclass(frozen=True)
class Tuning:
    """The model of one version. Rows of a chip generation are Volta, Ampere, Hopper, Blackwell; columns of a scale 1, 2, more nodes.

    Attributes:
      base_latency: per algorithm and protocol, shape (7, 3). [s]
      hop_latency: per link class (NVLink, PCI, network), algorithm and protocol, shape (3, 7, 3). [s]
      ll_max: cap of LL; the row is the chip's on one node, and Intel (0) or AMD (1) hosts beyond, shape (4, 3). [B/s]
      ring_ll128_max: cap of one channel, shape (4, 3). [B/s]
      tree_ll128_max: cap of one channel, shape (4, 3). [B/s]
      tree_max: cap of one channel of a tree with any protocol, shape (4, 3). [B/s]
      nvls_tree_max: cap of one channel, shape (4, 3); infinite where the version has none. [B/s]
      nvls_efficiency: share of the link that NVLS reaches, shape (4,); NaN where the version takes a fixed 5/6 instead. [1]
      tree_correction: factor on the tree's bandwidth per protocol at 64 B, 128 B, ... 256 MiB, shape (3, 23). [1]
      ring_ll_half: Ring with LL reaches 1/2 of the bus; else 1/4, and 1/3 for what only moves data inside a node.
      ring_ll128_alone: share of Ring with LL128 where each node has one rank; 0.92 otherwise. [1]
      inter_steps_less: an all-reduce crosses nodes 2 (N - 1) times; else 2 N.
      tree_hop_alone: with one rank per node, every algorithm takes the network hop of Tree.
      gather_by_collnet: CollNetDirect serves all-gather and reduce-scatter.
      gather_capped: all-gather and reduce-scatter over CollNetDirect or NVLS are capped by 0.9 of the NIC; NVLS has no 5/6 then.
      pat: the version has PAT.
      ll128_only_on: compute capabilities with LL128; () for every one from 70 on.
      nvlink_rate: rate of one NVLink over its datasheet rate, per generation, shape (4,). [1]
    """

    base_latency: np.ndarray
    hop_latency: np.ndarray
    ll_max: np.ndarray
    ring_ll128_max: np.ndarray
    tree_ll128_max: np.ndarray
    tree_max: np.ndarray
    nvls_tree_max: np.ndarray
    nvls_efficiency: np.ndarray
    tree_correction: np.ndarray
    ring_ll_half: bool
    ring_ll128_alone: float
    inter_steps_less: bool
    tree_hop_alone: bool
    gather_by_collnet: bool
    gather_capped: bool
    pat: bool
    ll128_only_on: tuple[int, ...]
    nvlink_rate: np.ndarray


# src/graph/tuning.cc, treeCorrectionFactor: the same in every version here
_CORRECTION = np.array([
    [1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1],
    [1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1],
    [0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9],
])  # fmt: skip


def _simple(direct, chain, nvls, nvls_tree, pat=0.0) -> list[list[float]]:
    """Rows of the five algorithms that have only Simple."""
    return [[0, 0, value] for value in (direct, chain, nvls, nvls_tree, pat)]


def _base(tree_simple: float) -> np.ndarray:
    return _us([[6.8, 14.0, tree_simple], [6.6, 14.0, 8.4], *[[0, 0, 0]] * 4, [8, 8, 8]])


def _hops(tree_intra: float, tree_net: float, nvls: float, nvls_tree_net: float) -> np.ndarray:
    """`hwLat`: what differs between versions is the tree with Simple and NVLS. PAT is used from 2.27 on only."""
    return _us([
        [[0.6, 1.25, tree_intra], [0.6, 1.9, 3.4], *_simple(3.7, 2.8, nvls, nvls, 4.0)],
        [[1.0, 1.9, tree_intra], [1.0, 2.5, 5.7], *_simple(3.7, 2.8, 0, 0, 4.0)],
        [[5.0, 8.5, tree_net], [2.7, 4.0, 14.0], *_simple(31, 30, 18, nvls_tree_net, 14.0)],
    ])  # fmt: skip


_UNKNOWN = np.full(4, np.nan)  # the version has one number, 5/6, for every generation
_LL_OLD = [[39, 39, 20.4], [87.7, 22.5, 19], [87.7, 22.5, 19], [87.7, 22.5, 19]]
_LL_NEW = [[39, 39, 20.4], [87.7, 22.5, 19], [141, 45, 35], [282, 90, 70]]
_TREE_LL128 = [[20, 20, 20], [20, 20, 20], [36.7, 36.7, 29]]
_TREE = [[26.5, 18.5, 10], [24, 23.6, 17.8], [38.7, 41.4, 36]]

# v2.19.1 src/graph/tuning.cc. It knows no Blackwell: such a chip takes the row of Hopper, as its code does.
_2_19 = Tuning(
    base_latency=_base(0.0),
    hop_latency=_hops(28, 28, 23, 14),
    ll_max=_gb(_LL_OLD),
    ring_ll128_max=_gb([[20] * 3, [20] * 3, [36.7] * 3, [36.7] * 3]),
    tree_ll128_max=_gb([*_TREE_LL128, _TREE_LL128[2]]),
    tree_max=_gb([*_TREE, _TREE[2]]),
    nvls_tree_max=np.full((4, 3), np.inf),
    nvls_efficiency=_UNKNOWN,
    tree_correction=_CORRECTION,
    ring_ll_half=False,
    ring_ll128_alone=0.7,
    inter_steps_less=False,
    tree_hop_alone=False,
    gather_by_collnet=False,
    gather_capped=False,
    pat=False,
    ll128_only_on=(70, 80, 90),
    nvlink_rate=np.array([20 / 25, 20 / 25, 20 / 25, 20 / 25]),  # src/graph/topo.h: 20 GB/s for SM70, SM80, SM90
)
# v2.18.3 src/graph/tuning.cc
_2_18 = replace(_2_19, hop_latency=_hops(28, 14, 23, 14))
# v2.20.5 src/graph/tuning.cc
_2_20 = replace(_2_19, gather_by_collnet=True)
# v2.22.3 src/graph/tuning.cc
_2_22 = replace(_2_20, hop_latency=_hops(28, 28, 25, 14), ll_max=_gb([*_LL_NEW[:3], _LL_NEW[2]]), ring_ll_half=True)
# v2.27.3 src/graph/tuning.cc; Blackwell is twice Hopper
_2_27 = replace(
    _2_22,
    base_latency=_base(8.4),
    hop_latency=_hops(4, 14, 25, 14),
    ll_max=_gb(_LL_NEW),
    ring_ll128_max=_gb([[20] * 3, [20] * 3, [36.7] * 3, [73.4] * 3]),
    tree_ll128_max=_gb([*_TREE_LL128, [73.4, 73.4, 58]]),
    tree_max=_gb([*_TREE, [77.4, 82.8, 72]]),
    ring_ll128_alone=0.92,
    inter_steps_less=True,
    tree_hop_alone=True,
    gather_capped=True,
    pat=True,
    ll128_only_on=(),
    nvlink_rate=np.array([20 / 25, 20 / 25, 20.6 / 25, 40.1 / 50]),  # src/graph/topo.h: 20.6 for SM90, 40.1 for SM100
)
# 2.30.7 src/graph/tuning.cc
_2_30 = replace(
    _2_27,
    hop_latency=_hops(4, 14, 25, 20.9),
    ring_ll128_max=_gb([[20] * 3, [20] * 3, [36.7] * 3, [40] * 3]),
    tree_ll128_max=_gb([*_TREE_LL128, [55.6, 31.67, 20]]),
    tree_max=_gb([*_TREE, [70, 42.8, 24]]),
    nvls_tree_max=_gb([_TREE[0], _TREE[1], [0, 57.7, 45.5], [0, 96, 80]]),
    nvls_efficiency=np.array([0.0, 0.0, 0.85, 0.74]),
)

TUNINGS = {"2.18": _2_18, "2.19": _2_19, "2.20": _2_20, "2.22": _2_22, "2.27": _2_27, "2.30": _2_30}
VERSIONS = tuple(TUNINGS)
"""Versions of NCCL whose tuning model is known, as `major.minor`."""


def tuning_of(version: str) -> Tuning:
    """The model of a version such as "2.19" or "2.19.1".

    Raises:
      ValueError: for a version that is not known; the message names the nearest one that is.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:[.-].*)?", str(version).strip())
    if match and f"{match[1]}.{match[2]}" in TUNINGS:
        return TUNINGS[f"{match[1]}.{match[2]}"]
    known = ", ".join(VERSIONS)
    if not match:
        raise ValueError(f"version is {version!r}; it should be major.minor, one of {known}.")
    place = lambda text: tuple(map(int, text.split(".")))
    asked = (int(match[1]), int(match[2]))
    older = [text for text in VERSIONS if place(text) <= asked]
    nearest = min(VERSIONS, key=lambda text: abs(1000 * (place(text)[0] - asked[0]) + place(text)[1] - asked[1]))
    below = f" The last one not after it is {older[-1]}." if older else ""
    raise ValueError(f"version is {version!r}; NCCL's tuning model is known for {known}. The nearest is {nearest}.{below} Pass one of them.")


def index_of(name: str, names: tuple[str, ...], what: str) -> int:
    """Place of a name on its axis, or a ValueError that lists the names."""
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    raise ValueError(f"{what} is {name!r}; it should be one of {', '.join(names)}.{f' Did you mean {near[0]}?' if near else ''}")
