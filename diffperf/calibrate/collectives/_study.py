"""The measurements that the shipped fit is made of, from a folder laid out as `collectives/` and `nccl_tests_logs/`: what is used, what is dropped, and why.

Single node: NCCL tables of aiconfigurator, one library version and the half type per system, timed in CUDA graphs. Several nodes: published
nccl-tests logs, the better of both buffers per size. Each remark on a log (library version, forced algorithm) is read from `INDEX.csv` beside the logs.
"""

import csv
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...io import CollectiveTable, read_collectives
from ._design import CollectiveRows
from ._settings import Setting, setting_of

NODE_TABLES = {  # catalog name: file, library; the newest library with every rank count and size
    "a100_sxm_80": ("a100_sxm", "2.27.3"), "h100_sxm": ("h100_sxm", "2.29.2"), "b200_sxm": ("b200_sxm", "2.29.2"), "b300_sxm": ("b300_sxm", "2.29.2"),
    "gb200_nvl72": ("gb200", "2.29.2"),
}  # fmt: skip
SLOW_REPEATS = ("mlperf50_google_h200_8n_run0_allreduce", "mlperf50_google_h200_8n_run4_allreduce")
"""Repeats 38% slower than the three others of the same job: the slow mode, labelled healthy."""
REMARKS = {"gist_p3dn": "NCCL 2.4, of 2019"}  # what the source states elsewhere
UNSTATED = {"issue_ncclt252": "h100_sxm"}  # four 200 Gbit/s NICs and 4 GPUs per node; bound by the NICs, so that any NVLink GPU will do
DROPPED = ("issue_nccl812",)
"""Ring forced at 8 to 256 B only, with unstated NICs: a latency of another algorithm than any other log shows."""
POINTS = 12.0
"""Rows of one log beyond this many share their weight: no long log may rule."""


def node_rows(folder: Path, system: str, only: str = "") -> CollectiveRows:
    """The NCCL rows of one system, the median of repeats; `only` picks another library version."""
    stem, library = NODE_TABLES[system]
    table = read_collectives(folder / "collectives" / f"aic_nccl_and_custom_ar_{stem}.csv.gz")
    keep = (table.library == f"nccl {only or library}") & (table.datatype == "fp16")
    repeats: dict[tuple[str, float, float], list[float]] = defaultdict(list)
    for op, size, n, t in zip(table.op[keep], table.nbytes[keep], table.ranks[keep], table.time_s[keep], strict=True):
        repeats[str(op), float(size), float(n)].append(float(t))
    keys = sorted(repeats)
    columns = lambda at: np.array([key[at] for key in keys])
    ranks = columns(2)
    return CollectiveRows(
        np.array([f"{key[0]}|auto" for key in keys]), columns(1), ranks, ranks, np.zeros(len(keys), int),
        np.log([np.median(repeats[key]) for key in keys]), np.ones(len(keys)),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PublishedLog:
    """One published nccl-tests log.

    Attributes:
      name: its file without ending.
      setting: where it ran.
      health: "healthy", "unhealthy" or "invalid", as labelled.
      table: its rows, both buffers.
      nodes: hosts. [1]
    """

    name: str
    setting: Setting
    health: str
    table: CollectiveTable
    nodes: float


def published_logs(folder: Path) -> list[PublishedLog]:
    """All logs of the folder, with the settings that `INDEX.csv` states."""
    table = read_collectives(folder / "collectives" / "nccl_tests_parsed.csv")
    out = []
    with open(folder / "nccl_tests_logs" / "INDEX.csv", encoding="utf-8", newline="") as file:
        for entry in csv.DictReader(file):
            name = entry["file"].removesuffix(".txt")
            stem = next((key for key in (*REMARKS, *UNSTATED) if name.startswith(key)), "")
            bridge = "" if not entry["gpu"].startswith("unstated (PCIe") else "a40"
            ranks, nodes = float(entry["n_ranks"]), float(entry["n_nodes"])
            note = f"{entry['note']} {REMARKS.get(stem, '')}"
            setting = setting_of(entry["gpu"], entry["interconnect"], ranks, nodes, note, UNSTATED.get(stem, bridge))
            out.append(PublishedLog(name, setting, entry["health"], table.take(table.log == name), nodes))
    return out


def network_logs(logs: Sequence[PublishedLog]) -> list[PublishedLog]:
    """The healthy logs over several nodes that the network is fitted to, repeats of one job merged."""
    chosen = [
        log for log in logs
        if log.nodes > 1 and log.health == "healthy" and log.setting.ranks_per_node < 32 and len(log.table)
        and set(log.table.op) & {"all_reduce", "all_gather", "reduce_scatter"} and log.name not in SLOW_REPEATS and not log.name.startswith(DROPPED)
    ]  # fmt: skip
    return [log for log in chosen if not (log.name.startswith("mlperf50_google_h200_8n") and "run2" not in log.name)]


def log_rows(logs: Sequence[PublishedLog]) -> CollectiveRows:
    """The better of both buffers per size, log by log."""
    columns: dict[str, list] = defaultdict(list)
    for k, log in enumerate(logs):
        best: dict[tuple[str, float], float] = {}
        for op, size, t in zip(log.table.op, log.table.nbytes, log.table.time_s, strict=True):
            best[op, size] = min(t, best.get((op, size), np.inf))
        algorithm = next((a for a in ("ring", "tree") if set(np.char.lower(log.table.algorithm.astype(str))) == {a}), "auto")
        n = float(log.table.ranks[0])
        for (op, size), t in sorted(best.items()):
            row = dict(kind=f"{op}|{algorithm if op == 'all_reduce' else 'auto'}", nbytes=size, ranks=n, ranks_per_node=log.setting.ranks_per_node, log=k)
            row |= dict(log_time=np.log(t), weight=min(1.0, POINTS / len(best)))
            for key, value in row.items():
                columns[key].append(value)
    return CollectiveRows(**{key: np.array(value) for key, value in columns.items()})
