"""From the words of a log to a setting: which accelerator, how many NICs of what rate, which network, how old a library."""

import dataclasses
import re

from ...hardware import UnknownNameError, load_system, resolve_name

_TOKENS = (  # parts of names as people write them, most special first
    ("GB300", "gb300_nvl72"), ("GB200", "gb200_nvl72"), ("GH200", "gh200"), ("B300", "b300_sxm"), ("B200", "b200_sxm"), ("H200", "h200_sxm"),
    ("H800", "h800_sxm"),
    ("H100 NVL", "h100_nvl"), ("H100 PCIE", "h100_pcie"), ("H100", "h100_sxm"), ("A800", "a800_sxm"), ("A100 PCIE", "a100_pcie_80"), ("A100", "a100_sxm_80"),
    ("V100 SXM3", "v100_sxm3_dgx2"), ("V100", "v100_sxm2_32"), ("P100", "p100_pcie"), ("MI250", "mi250x_gcd"), ("MI300X", "mi300x"), ("MI325", "mi325x"),
    ("MI350", "mi350x"), ("MI355", "mi355x"), ("L40S", "l40s"), ("L40", "l40"), ("A40", "a40"), ("A10G", "a10g"), ("T4", "t4"), ("H20", "h20_sxm"),
)  # fmt: skip
_NICS = re.compile(r"(\d+)\s*x\s*(\d+)\s*G(?!B)", re.I)
_COUNT = re.compile(r"(\d+)\s*NICs?\b", re.I)
_FABRICS = (
    ("slingshot", r"slingshot|\bcxi\b"), ("efa", r"\befa\b"), ("tcpx", r"tcpx|gpudirect-tcp|fastrak"), ("roce", r"\broce|ethernet|gpudirect-rdma|a3 ultra"),
    ("ib", r"infiniband|\bib\b|\bhdr\b|\bndr\b|\bedr\b"),
)  # fmt: skip
FABRICS = ("ib", "roce", "efa", "efa2", "slingshot", "tcpx", "unknown")
OLD_VERSION = (2, 10)
"""NCCL before this is old: large messages between nodes went round the ring, and the middle band took 1.4-1.9 times as long."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the prediction of a collective needs to know of where it ran.

    Attributes:
      system: canonical name in the catalog of hardware.
      ranks_per_node: ranks that share one domain of fast links. [1]
      nic_bandwidth: all NICs of a node, one direction. [B/s]
      fabric: one of `FABRICS`.
      bridge: rate of a bridge or bus that stands in for the catalog's scale-up link, 0 for none. [B/s]
      old: 1 for a library before 2.10, 0 for a newer one, 0 with `unknown_version` where not stated.
      unknown_version: True where the library's version is not stated; widens intervals.
      nics: NICs of a node, 0 where not known. [1]
    """

    system: str
    ranks_per_node: float
    nic_bandwidth: float
    fabric: str
    bridge: float = 0.0
    old: bool = False
    unknown_version: bool = True
    nics: int = 0


def system_of(accelerator: str) -> str:
    """Catalog name of an accelerator as a log writes it; "" for a stranger."""
    text = accelerator.strip()
    if not text or text.lower().startswith("unstated"):
        return ""
    try:
        return resolve_name(text)
    except UnknownNameError:
        plain = re.sub(r"[-_ ]+", " ", text).upper()
        return next((name for token, name in _TOKENS if token in plain), "")


def library_age(library: str) -> tuple[bool, bool]:
    """Whether a library such as "NCCL 2.8.4" is old, and whether its version is unknown."""
    found = re.search(r"(?:nccl|rccl)\D{0,10}(\d+)\.(\d+)", library, re.I)
    if not found:
        return False, True
    return (int(found[1]), int(found[2])) < OLD_VERSION, False


def setting_of(accelerator: str, interconnect: str, ranks: float, nodes: float, library: str = "", system: str = "") -> Setting:
    """The setting of a log.

    Args:
      accelerator, interconnect, library: as the log or its source writes them; may be "".
      ranks, nodes: of the group. [1]
      system: catalog name that overrides `accelerator`.
    Raises:
      ValueError: where the accelerator is not in the catalog, or the ranks do not fit the system.
    """
    name = resolve_name(system) if system else system_of(accelerator)
    if not name:
        raise ValueError(f"the accelerator {accelerator or 'is not stated and'!r} is not in the catalog. Name a system, as `diffperf show` lists them.")
    hardware = load_system(name)
    domain = float(hardware.scale_up.domain)
    rack = domain > 16 and bool(re.search(r"mnnvl|nvl\d+", interconnect, re.I))
    per_node = ranks if rack else ranks / max(nodes, 1.0)
    if per_node > max(domain, 16.0):
        raise ValueError(f"{per_node:g} ranks in one node of {name}, whose fast links join {domain:g}. State the number of nodes.")
    found = _NICS.search(interconnect)
    default = float(hardware.scale_out.bandwidth)
    counted = _COUNT.search(interconnect)
    rate = float(found[1]) * float(found[2]) * 1e9 / 8 if found else (float(counted[1]) if counted else per_node) * default
    fabric = next((key for key, pattern in _FABRICS if re.search(pattern, interconnect, re.I)), "unknown")
    if fabric == "efa" and rate > 100e9:
        fabric = "efa2"
    old, unknown = library_age(library)
    nics = int(found[1] if found else counted[1] if counted else 0)
    return Setting(name, per_node, rate, fabric, _bridge(interconnect, per_node), old, unknown, nics)


def _bridge(interconnect: str, per_node: float) -> float:
    """Rate of a link that a source names in place of the system's own. [B/s]"""
    if re.search(r"nvlink2 .*dgx-1\b", interconnect, re.I) and per_node <= 4:
        return 25e9 if per_node <= 2 else 100e9  # NVLink 2 of the hybrid cube mesh: one link between neighbours, four inside a quad (NVIDIA, DGX-1 white paper)
    if re.search(r"nvlink bridge pair \(|bridge pair.*gen5", interconnect, re.I):
        return 150e9  # 24 lanes of NVLink in one direction, half of H100 PCIe's 600 GB/s pair: both directions of three bridges (NVIDIA, H100 PCIe brief)
    if re.search(r"nvlink bridge", interconnect, re.I):
        return 56.25e9  # NVLink 3 bridge of four links, 112.5 GB/s both directions (NVIDIA, RTX A6000 datasheet)
    if re.search(r"pcie across|pcie (?:only|host)$", interconnect, re.I):
        return 16e9  # PCIe 3.0 x16, the slowest still in use
    return 0.0
