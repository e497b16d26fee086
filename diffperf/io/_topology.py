"""Topologies of one node as a plain graph: NCCL and RCCL topology XML, and the text of `nvidia-smi topo -m`.

XML nests PCI devices in their CPUs and names NVLink and xGMI links by target; the text gives a matrix of relations (NV#, PIX, PXB, PHB, NODE, SYS).
What a file lacks is reported, not made up: a link without a stated speed has bandwidth NaN. Leaves out search of rings and trees, and routing.
"""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from xml.parsers import expat

import numpy as np

from ._nccl_rows import clean
from ._nccl_tests import log_text

RELATIONS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
# One direction of one link, datasheets. NVLink by compute capability: P100 20, V100 and A100 25, A40 14, H100 25, B200 50.
_NVLINK = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14.06e9, 90: 25e9, 100: 50e9, 103: 50e9}
# xGMI by GCN architecture: MI50 and MI100 46, MI250X 50, MI300X 64 (AMD Instinct datasheets, half of the bidirectional figure).
_XGMI = {"906": 46e9, "908": 46e9, "910": 50e9, "90a": 50e9, "940": 64e9, "941": 64e9, "942": 64e9}
# PCIe: share of the raw rate that the line code leaves, PCI Express base specification: 8b/10b to 5 GT/s, 128b/130b to 32, 242B of 256B at 64.
_PCIE_CODE = ((5.0, 8 / 10), (32.0, 128 / 130), (math.inf, 242 / 256))
_MOST_NVLINKS = 18  # of one GPU, H100 to B200; a matrix that shows more must count the same links to a switch for each peer
_KINDS = {"0x03": "gpu", "0x02": "nic", "0x0604": "pci_switch", "0x0680": "nvswitch", "0x12": "gpu"}


class TopologyError(ValueError):
    """A topology file that cannot be used; the message names file, line and mending."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A node of the graph.

    Attributes:
      name: PCI address, `cpu0`, `GPU0` or the NIC's name; unique.
      kind: "gpu", "nic", "cpu", "pci_switch", "nvswitch" or "pci" (class not stated).
      rate: of a NIC's port in one direction, NaN where not stated. [B/s]
      rank: of a GPU, -1 where not stated.
      parent: name of the device above it in the PCI tree, "" for none.
      line: where it stands.
    """

    name: str
    kind: str
    rate: float = math.nan
    rank: int = -1
    parent: str = ""
    line: int = 0


@dataclasses.dataclass(frozen=True)
class Link:
    """A pair of directions between two devices.

    Attributes:
      ends: names of both.
      kind: "nvlink", "xgmi" or "pcie".
      count: links side by side. [1]
      bandwidth: of all of them in one direction, by the line rate; NaN where not stated. [B/s]
      line: where it stands.
    """

    ends: tuple[str, str]
    kind: str
    count: int
    bandwidth: float
    line: int = 0


@dataclasses.dataclass(frozen=True)
class Topology:
    """A node as a graph.

    Attributes:
      file: its name.
      devices, links: in order of the file.
      relations: how two GPUs or a GPU and a NIC reach each other, by both names in either order: "NV" with the number of links ("NV12"), one PCI
        switch ("PIX"), several ("PXB"), the CPU ("PHB"), CPUs of one socket ("NODE") or of two ("SYS").
      problems: what is missing or contradicts itself, with line numbers.
    """

    file: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    relations: Mapping[tuple[str, str], str]
    problems: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == "gpu")

    @property
    def nics(self) -> tuple[Device, ...]:
        """One for each port that the file lists."""
        return tuple(device for device in self.devices if device.kind == "nic")

    @property
    def nic_rates(self) -> np.ndarray:
        """Rate of each NIC in one direction, shape (NICs,). [B/s]"""
        return np.array([nic.rate for nic in self.nics], float)

    def links_per_pair(self) -> np.ndarray:
        """NVLink or xGMI links between each two GPUs, shape (GPUs, GPUs), 0 on the diagonal.

        GPUs joined by switches have as many as each has to the switches; those links serve all pairs at once, not each pair alone. [1]
        """
        names = [gpu.name for gpu in self.gpus]
        counts, out = self._counts(), np.zeros((len(names), len(names)), int)
        kinds = {device.name: device.kind for device in self.devices}
        to_switches = [sum(n for (a, b), n in counts.items() if a == name and kinds[b] == "nvswitch") for name in names]
        for i, j in itertools.permutations(range(len(names)), 2):
            out[i, j] = counts.get((names[i], names[j]), 0) + min(to_switches[i], to_switches[j])
        return out

    def capacity(self, kinds: tuple[str, ...] = ("nvlink", "xgmi")) -> tuple[tuple[str, ...], np.ndarray]:
        """Devices joined by links of `kinds`, GPUs first, and the rate from each to each in one direction, shape (devices, devices). [B/s]

        Raises:
          TopologyError: such a link has no stated bandwidth.
        """
        used = [link for link in self.links if link.kind in kinds]
        unknown = next((link for link in used if math.isnan(link.bandwidth)), None)
        if unknown:
            raise TopologyError(f"{self.file}:{unknown.line}: the {unknown.kind} link between {unknown.ends[0]} and {unknown.ends[1]} has no stated bandwidth. "
                                "Give `link_bandwidth` when reading the file.")  # fmt: skip
        ends = {end for link in used for end in link.ends}
        names = [gpu.name for gpu in self.gpus] + [device.name for device in self.devices if device.kind != "gpu" and device.name in ends]
        at, out = {name: k for k, name in enumerate(names)}, np.zeros((len(names), len(names)))
        for link in used:
            a, b = (at[end] for end in link.ends)
            out[a, b] += link.bandwidth
            out[b, a] += link.bandwidth
        return tuple(names), out

    def _counts(self) -> dict[tuple[str, str], int]:
        counts: dict[tuple[str, str], int] = {}
        for link in self.links:
            if link.kind != "pcie":
                a, b = link.ends
                for ends in ((a, b), (b, a)):
                    counts[ends] = counts.get(ends, 0) + link.count
        return counts


def read_topology(path: str | os.PathLike[str], link_bandwidth: float | None = None) -> Topology:
    """The topology in a file, NCCL or RCCL XML or the text of `nvidia-smi topo -m`, told apart by content.

    Args:
      path: the file. XML that ends early is read as far as it goes, and the topology says so in `problems`.
      link_bandwidth: of one NVLink or xGMI link in one direction, for files that do not tell the generation. [B/s]

    Raises:
      TopologyError: not a topology, broken XML, a device inside itself (a cycle), a cell or number that is none, or no device at all.
      OSError: the file cannot be read.
    """
    text, name = log_text(Path(path).read_bytes()), str(path)
    if not text.strip():
        raise TopologyError(f"{name} is empty. It should hold NCCL topology XML (NCCL_TOPO_DUMP_FILE) or the output of nvidia-smi topo -m.")
    return _from_xml(text, name, link_bandwidth) if text.lstrip().startswith("<") else _from_matrix(text, name, link_bandwidth)


class _Tree:
    """Devices and links while XML is read."""

    def __init__(self, name: str, link_bandwidth: float | None):
        self.name, self.link_bandwidth = name, link_bandwidth
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end
        self.parser.EntityDeclHandler = self.entity  # topologies have none; expanding them could fill the memory
        self.devices: dict[str, Device] = {}
        self.pcie: list[Link] = []
        self.targets: dict[tuple[str, str, str], list[tuple[int, float, int, str]]] = {}
        self.open: list[tuple[str, str, int]] = []  # tag, device, line
        self.problems: list[str] = []
        self.per_link = math.nan  # bandwidth of a link of the GPU being read

    def fail(self, text: str, line: int | None = None) -> TopologyError:
        return TopologyError(f"{self.name}:{line or self.parser.CurrentLineNumber}: {text}")

    def report(self, text: str, line: int | None = None) -> None:
        self.problems.append(f"{self.name}:{line or self.parser.CurrentLineNumber}: {text}")

    def entity(self, *_: object) -> None:
        raise self.fail("the file declares an XML entity, which no topology needs. Remove it.")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self.open and tag != "system":
            raise self.fail(f"the outermost element is <{tag}>; a topology begins with <system>.")
        handler = {"cpu": self.cpu, "pci": self.pci, "net": self.net, "gpu": self.gpu, "nvlink": self.link, "xgmi": self.link}.get(tag)
        device = handler(tag, attributes) if handler else self.inside()
        self.open.append((tag, device, self.parser.CurrentLineNumber))

    def end(self, tag: str) -> None:
        self.open.pop()

    def inside(self) -> str:
        return next((device for _, device, _ in reversed(self.open) if device), "")

    def add(self, name: str, kind: str, rate: float = math.nan) -> str:
        line = self.parser.CurrentLineNumber
        if name in {device for _, device, _ in self.open}:
            raise self.fail(f"{name} lies inside itself: a cycle. A device should stand once in the tree.")
        if name in self.devices:
            self.report(f"{name} stands a second time (first in line {self.devices[name].line}); the first was taken.")
            return name
        self.devices[name] = Device(name, kind, rate, parent=self.inside(), line=line)
        return name

    def cpu(self, tag: str, attributes: dict[str, str]) -> str:
        return self.add(f"cpu{attributes.get('numaid', sum(d.kind == 'cpu' for d in self.devices.values()))}", "cpu")

    def pci(self, tag: str, attributes: dict[str, str]) -> str:
        name, code = attributes.get("busid", ""), attributes.get("class", "")
        if not name:
            raise self.fail("a <pci> element has no busid.")
        kind = next((kind for prefix, kind in _KINDS.items() if code.lower().startswith(prefix)), "pci")
        if not code:
            self.report(f"{name} has no class: what it is is not known.")
        above, new = self.inside(), name not in self.devices
        self.add(name, kind)
        if above and new:
            self.pcie.append(Link((above, name), "pcie", 1, self.pcie_rate(name, attributes), self.parser.CurrentLineNumber))
        return name

    def pcie_rate(self, name: str, attributes: dict[str, str]) -> float:
        speed = re.match(r"\s*([\d.]+)\s*GT/s", attributes.get("link_speed", ""))
        width = self.number("link_width", attributes.get("link_width", "0"))
        if not speed or width <= 0:
            if "link_speed" in attributes:
                stated = f"link_speed {attributes['link_speed']!r} and link_width {attributes.get('link_width', '')!r}"
                self.report(f"{name} has {stated}; its PCIe bandwidth is not known.")
            return math.nan
        gigatransfers = float(speed[1])
        return gigatransfers * 1e9 * width / 8 * next(share for limit, share in _PCIE_CODE if gigatransfers <= limit)

    def net(self, tag: str, attributes: dict[str, str]) -> str:
        megabits = self.number("speed", attributes.get("speed", "0"))
        if megabits <= 0:
            self.report(f"the NIC {attributes.get('name', '')} has no speed.")
        name = attributes.get("name", "") or f"net{attributes.get('dev', '')}"
        return self.add(name, "nic", megabits * 1e6 / 8 if megabits > 0 else math.nan)

    def gpu(self, tag: str, attributes: dict[str, str]) -> str:
        at = self.inside()
        if not at or self.devices[at].kind == "cpu":
            raise self.fail("a <gpu> element lies in no <pci> element.")
        sm = self.number("sm", attributes.get("sm", "0"))
        per_link = _XGMI.get(attributes.get("gcn", "").lower().removeprefix("gfx"), math.nan) if "gcn" in attributes else _NVLINK.get(int(sm), math.nan)
        self.per_link = self.link_bandwidth or per_link
        self.devices[at] = dataclasses.replace(self.devices[at], kind="gpu", rank=int(self.number("rank", attributes.get("rank", "-1"))))
        return at

    def link(self, tag: str, attributes: dict[str, str]) -> str:
        at, line = self.inside(), self.parser.CurrentLineNumber
        if "gpu" not in {tag for tag, _, _ in self.open}:
            raise self.fail(f"an <{tag}> element lies in no <gpu> element.")
        target, count = attributes.get("target", ""), int(self.number("count", attributes.get("count", "0")))
        if not target or count <= 0:
            self.report(f"a link of {at} has target {target!r} and count {attributes.get('count', '')!r}; it was left out.")
        elif target == at:
            self.report(f"{at} has {count} links to itself; they were left out.")
        else:
            self.targets.setdefault((tag, at, target), []).append((count, self.per_link, line, attributes.get("tclass", "")))
        return ""

    def number(self, name: str, text: str) -> float:
        try:
            return float(text or "0")
        except ValueError:
            raise self.fail(f"{name} is {text!r}; it should be a number.") from None


def _from_xml(text: str, name: str, link_bandwidth: float | None) -> Topology:
    tree = _Tree(name, link_bandwidth)
    try:
        tree.parser.Parse(re.sub(r"^\s*<\?xml[^>]*\?>", "", text.lstrip("\ufeff")), True)
    except expat.ExpatError as error:
        what = expat.errors.messages[error.code]
        if not tree.open or what not in (expat.errors.XML_ERROR_NO_ELEMENTS, expat.errors.XML_ERROR_UNCLOSED_TOKEN):
            raise TopologyError(f"{name}:{error.lineno}: the XML is broken: {what}. Dump it again with NCCL_TOPO_DUMP_FILE.") from None
        tag, device, line = tree.open[-1]
        tree.report(f"the file ends early, inside <{tag}> of line {line}{f' ({device})' if device else ''}: what came after is missing.", error.lineno)
    links = tree.pcie + _matched(tree)
    _merge_ports(tree)
    if not any(device.kind in ("gpu", "pci") for device in tree.devices.values()):
        raise TopologyError(f"{name}:{text.count(chr(10)) + 1}: the topology has no GPU. {' '.join(tree.problems)}".strip())
    links = [link for link in links if all(end in tree.devices for end in link.ends)]
    topology = Topology(name, tuple(tree.devices.values()), tuple(links), {}, tuple(tree.problems))
    return dataclasses.replace(topology, relations=_relations(topology))


def _matched(tree: _Tree) -> list[Link]:
    """The two directions of each link as one; a direction that is missing or differs is reported."""
    links, seen = [], set()
    for (tag, a, b), given in tree.targets.items():
        if (tag, b, a) in seen:
            continue
        seen.add((tag, a, b))
        count, per_link, line = sum(n for n, _, _, _ in given), given[0][1], given[0][2]
        if b not in tree.devices:
            if given[0][3].lower().startswith("0x0680"):
                tree.devices[b] = Device(b, "nvswitch", line=line)
            else:
                tree.report(f"{a} has {count} links to {b}, which is not in the file; they were left out.", line)
                continue
        elif tree.devices[b].kind == "gpu":
            back = sum(n for n, _, _, _ in tree.targets.get((tag, b, a), []))
            if back != count:
                tree.report(f"{a} has {count} links to {b}, which has {back} back; the smaller number other than 0 was taken.", line)
                count = min(count, back) or max(count, back)
        if math.isnan(per_link):
            tree.report(f"the generation of {a} is not known, so the bandwidth of its links is not either. Give `link_bandwidth`.", line)
        links.append(Link((a, b), tag, count, per_link * count, line))
    return links


def _merge_ports(tree: _Tree) -> None:
    """A PCI device whose ports are listed is what joins them, not a NIC more."""
    parents = {device.parent for device in tree.devices.values() if device.kind == "nic"}
    for name in parents & {device.name for device in tree.devices.values() if device.kind == "nic"}:
        tree.devices[name] = dataclasses.replace(tree.devices[name], kind="pci")


def _relations(topology: Topology) -> dict[tuple[str, str], str]:
    devices, counts = {device.name: device for device in topology.devices}, topology.links_per_pair()
    above = {}
    for name in devices:
        path, at = [], name
        while at := devices[at].parent if at in devices else "":
            path.append(at)
        above[name] = path
    ends, out = [*topology.gpus, *topology.nics], {}
    for (i, a), (j, b) in itertools.combinations(enumerate(ends), 2):
        if a.kind == b.kind == "gpu" and counts[i, j]:
            relation = f"NV{counts[i, j]}"
        else:
            common = next((name for name in above[a.name] if name in above[b.name]), "")
            switches = above[a.name][: above[a.name].index(common)] + above[b.name][: above[b.name].index(common)] if common else []
            bridges = sum(devices[name].kind == "pci_switch" for name in switches)
            relation = "SYS" if not common else "PHB" if devices[common].kind == "cpu" else "PIX" if bridges == 0 else "PXB"
        out[a.name, b.name] = out[b.name, a.name] = relation
    return out


def _from_matrix(text: str, name: str, link_bandwidth: float | None) -> Topology:
    lines = [(number, part) for number, line in enumerate(text.splitlines(), 1) for part in clean(line)]
    header = next(((number, part.split()) for number, part in lines if re.match(r"(GPU\d+)\s+(?!X\b)(GPU\d+|\S*\d+\s|CPU|$)", part)), None)
    if header is None:
        first = next((number, part) for number, part in lines if part) if any(part for _, part in lines) else (1, "")
        raise TopologyError(f"{name}:{first[0]}: neither topology XML nor the output of nvidia-smi topo -m: the line reads {first[1][:60]!r}. A matrix "
                            "begins with a line of names, 'GPU0 GPU1 ...'.")  # fmt: skip
    columns = list(itertools.takewhile(lambda token: token not in ("CPU", "NUMA"), header[1]))
    problems, rows = [], {}
    for number, part in lines:
        tokens = part.split()
        if number <= header[0] or not tokens or tokens[0] not in columns:
            continue
        cells = tokens[1 : len(columns) + 1]
        if len(cells) < len(columns):
            problems.append(f"{name}:{number}: the row of {tokens[0]} has {len(cells)} of {len(columns)} cells; the rest was taken from the other rows.")
        for column, cell in zip(columns, cells, strict=False):
            if not re.fullmatch(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC", cell):
                raise TopologyError(f"{name}:{number}: the relation of {tokens[0]} to {column} is {cell!r}; it should be X, NV#, PIX, PXB, PHB, NODE or SYS.")
            if (cell == "X") != (column == tokens[0]):
                raise TopologyError(f"{name}:{number}: {tokens[0]} to {column} is {cell!r}: X should stand where a device meets itself, and only there.")
            rows[tokens[0], column] = (cell.replace("SOC", "SYS"), number)
    problems += [f"{name}:{header[0]}: the row of {column} is missing; its relations were taken from the others." for column in columns
                 if not any(row == column for row, _ in rows)]  # fmt: skip
    relations, links = {}, []
    for a, b in itertools.combinations(columns, 2):
        there, back = rows.get((a, b)), rows.get((b, a))
        if there is None and back is None:
            problems.append(f"{name}:{header[0]}: how {a} reaches {b} is missing.")
            continue
        cell, number = there or back or ("", 0)
        if there and back and there[0] != back[0]:
            problems.append(f"{name}:{back[1]}: {a} to {b} is {there[0]} and back {back[0]}; the first was taken.")
        relations[a, b] = relations[b, a] = cell
        if cell.startswith("NV"):
            count = int(cell[2:])
            links.append(Link((a, b), "nvlink", count, count * (link_bandwidth or math.nan), number))
    devices = tuple(Device(column, "gpu" if column.startswith("GPU") else "nic", line=header[0]) for column in columns)
    counts = {device.name: [link.count for link in links if device.name in link.ends] for device in devices}
    if max((sum(of) for of in counts.values()), default=0) > _MOST_NVLINKS:
        devices += (Device("nvswitch", "nvswitch", line=header[0]),)
        links = [Link((gpu, "nvswitch"), "nvlink", max(of), max(of) * (link_bandwidth or math.nan), header[0]) for gpu, of in counts.items() if of]
    return Topology(name, devices, tuple(links), relations, tuple(problems))
