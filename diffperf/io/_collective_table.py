"""Measured times of collectives as one table: a row per measurement, numpy columns in SI units, no model.

The conventions are those of nccl-tests (NVIDIA, nccl-tests, doc/PERFORMANCE.md). Leaves out what a row should have taken: that is a matter of the
models that are fitted to it.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv", "gather", "scatter")
EXPERT_OPS = ("moe_prepare", "moe_dispatch", "moe_combine")
TEXT, NUMBER, COUNT, FLAG = "text", "number", "count", "flag"

_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "alltoall": "all_to_all", "alltoallv": "all_to_all",
    "bcast": "broadcast", "sendrecv": "send_recv", "sendreceive": "send_recv",
}  # fmt: skip
_DATATYPES = {
    "float": "fp32", "float32": "fp32", "f32": "fp32", "half": "fp16", "float16": "fp16", "f16": "fp16", "bfloat16": "bf16", "double": "fp64",
    "float64": "fp64", "f8e4m3": "fp8", "f8e5m2": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "char": "int8", "int": "int32",
}  # fmt: skip
_ELEMENT_BYTES = {
    "fp64": 8.0, "int64": 8.0, "uint64": 8.0, "fp32": 4.0, "int32": 4.0, "uint32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "uint8": 1.0,
}  # fmt: skip


class CollectiveFileError(ValueError):
    """A file of collective times that cannot be used as it is.

    Attributes:
      problems: every problem found, one sentence or two each; the message shows the first five.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems = tuple(str(problem) for problem in problems)
        rest = len(self.problems) - 5
        shown = "\n".join(self.problems[:5])
        super().__init__(shown + (f"\n... and {rest} more problem{'s' * (rest > 1)} like these." if rest > 0 else ""))


@dataclasses.dataclass(frozen=True)
class LogProblem:
    """Something wrong in a file.

    Attributes:
      file: its name.
      line: counted from 1; 0 for the file as a whole.
      kind: `row left out` (not in the table), `row kept` (in the table, with a flag), `table left out`, or `note` (nothing was lost).
      text: what is wrong, the value, and what was done about it.
    """

    file: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.text}"


@dataclasses.dataclass(frozen=True)
class LogHeader:
    """What a log says about one run of a test. Text is "" and a number None where the log does not say.

    Attributes:
      file, line: where the run begins.
      op: collective, one of `OPS`; by its name in the log, else inferred (see `inferred`).
      library: "NCCL" or "RCCL".
      library_version: such as "2.29.3".
      tests_version: of nccl-tests, such as "2.17.9".
      devices: name of the device of each listed rank, in order; pasted headers often list a few ranks only.
      hosts: distinct hosts in order of appearance.
      ranks, nodes: numbers of ranks and hosts. [1]
      threads, devices_per_thread: nThread and nGpus. [1]
      min_bytes, max_bytes: requested sizes. [B]
      warmup, iterations, aggregated: iterations before, in, and per measurement. [1]
      graph: launches per CUDA graph; 0 for none. Times without a graph hold the host's launch time.
      average_bus_bandwidth: as printed at the end. [B/s]
      out_of_bounds: number of wrong values as printed at the end. [1]
      inferred: which of "op", "ranks" and "nodes" the log does not state, but follow from its columns (see `read_nccl_tests`).
      notes: lines of the library (NCCL INFO, NCCL WARN) as (line, text), up to 2000 of them: they name transports, NICs and what was not available.
    """

    file: str = ""
    line: int = 0
    op: str = ""
    library: str = ""
    library_version: str = ""
    tests_version: str = ""
    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    ranks: float | None = None
    nodes: float | None = None
    threads: float | None = None
    devices_per_thread: float | None = None
    min_bytes: float | None = None
    max_bytes: float | None = None
    warmup: float | None = None
    iterations: float | None = None
    aggregated: float | None = None
    graph: float | None = None
    average_bus_bandwidth: float | None = None
    out_of_bounds: float | None = None
    inferred: tuple[str, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()


def _column(kind: str) -> Any:
    return dataclasses.field(metadata={"kind": kind})


@dataclasses.dataclass(frozen=True, eq=False)
class CollectiveTable:
    """Measured times, one row per measurement; every column is a numpy array of the table's length.

    Text is "" where not known, a number NaN, a line -1. `len(table)` counts rows. Rows of 0 bytes measure no transfer: they stand apart, in `zero_byte`.

    Attributes:
      op: one of `OPS`, of `EXPERT_OPS`, or "" where neither stated nor inferred.
      datatype: "fp32", "fp16", "bf16", "fp8", "int8", "nvfp4", "int32", ...
      nbytes: nccl-tests' size: the larger of send and receive buffer of a rank. The whole buffer for all-gather and reduce-scatter, all data of one
        rank for all-to-all. For expert exchanges tokens x hidden x element size, before any copy is made. [B]
      ranks, nodes: size of the group and hosts it spans. [1]
      time_s: of one operation. [s]
      algorithm, protocol: as the source states them ("Ring", "LL128", "auto" for the library's choice, "" where it does not say).
      algorithm_bandwidth, bus_bandwidth: as printed, with two decimals of GB/s in a log; prefer `rate` and `bus_rate`, which follow from the time. [B/s]
      in_place: whether send and receive buffer are one.
      reduce_op: "sum", ..., "none" or "".
      root: rank of the root, -1 for none.
      graph: 1 where launched from a CUDA graph, 0 where not. [1]
      accelerator, interconnect: as the source writes them.
      library: what ran it: "NCCL 2.29.3", "custom_allreduce vllm 0.24", "trtllm 1.3.0rc11", ...
      kernel: of an expert exchange, such as "trtllm_deepep_ll"; for the others "".
      tokens, hidden, experts_per_token, num_experts, sms: of an expert exchange: tokens per rank, width, k, experts in all, processors given. [1]
      time_min_s, time_max_s: over the repeats, where the source gives them. [s]
      health: the source's label: "healthy", "unhealthy", "invalid" or "".
      flag: remarks of the source and of the reader, joined by "|"; "" for none.
      source: who published it.
      log: the table the row belongs to: rows of one log share machine, library and day. Split data by it.
      file, line: where the row stands.
      header: index into `headers`, -1 for none.
      headers: what logs say about each run.
      problems: what was wrong, in order of lines.
      zero_byte: the rows of 0 bytes as a table of their own; None inside it.
    """

    op: np.ndarray = _column(TEXT)
    datatype: np.ndarray = _column(TEXT)
    nbytes: np.ndarray = _column(NUMBER)
    ranks: np.ndarray = _column(NUMBER)
    nodes: np.ndarray = _column(NUMBER)
    time_s: np.ndarray = _column(NUMBER)
    algorithm: np.ndarray = _column(TEXT)
    protocol: np.ndarray = _column(TEXT)
    algorithm_bandwidth: np.ndarray = _column(NUMBER)
    bus_bandwidth: np.ndarray = _column(NUMBER)
    in_place: np.ndarray = _column(FLAG)
    reduce_op: np.ndarray = _column(TEXT)
    root: np.ndarray = _column(COUNT)
    graph: np.ndarray = _column(NUMBER)
    accelerator: np.ndarray = _column(TEXT)
    interconnect: np.ndarray = _column(TEXT)
    library: np.ndarray = _column(TEXT)
    kernel: np.ndarray = _column(TEXT)
    tokens: np.ndarray = _column(NUMBER)
    hidden: np.ndarray = _column(NUMBER)
    experts_per_token: np.ndarray = _column(NUMBER)
    num_experts: np.ndarray = _column(NUMBER)
    sms: np.ndarray = _column(NUMBER)
    time_min_s: np.ndarray = _column(NUMBER)
    time_max_s: np.ndarray = _column(NUMBER)
    health: np.ndarray = _column(TEXT)
    flag: np.ndarray = _column(TEXT)
    source: np.ndarray = _column(TEXT)
    log: np.ndarray = _column(TEXT)
    file: np.ndarray = _column(TEXT)
    line: np.ndarray = _column(COUNT)
    header: np.ndarray = _column(COUNT)
    headers: tuple[LogHeader, ...] = ()
    problems: tuple[LogProblem, ...] = ()
    zero_byte: "CollectiveTable | None" = None

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def rate(self) -> np.ndarray:
        """Bytes per time, nccl-tests' algbw without its rounding. [B/s]"""
        return self.nbytes / self.time_s

    @property
    def bus_rate(self) -> np.ndarray:
        """`rate` times `bus_factor`, nccl-tests' busbw without its rounding; NaN where op or ranks are not known. [B/s]"""
        return self.rate * np.array([bus_factor(op, n) for op, n in zip(self.op, self.ranks, strict=True)], float)

    def take(self, at: Any) -> "CollectiveTable":
        """The rows at `at` (indices or a mask), with all headers; `zero_byte` and `problems` stay."""
        return dataclasses.replace(self, **{name: getattr(self, name)[at] for name in COLUMN_KINDS})


COLUMN_KINDS = {field.name: field.metadata["kind"] for field in dataclasses.fields(CollectiveTable) if field.metadata}
_DEFAULTS = {TEXT: "", NUMBER: np.nan, COUNT: -1, FLAG: False}
_TYPES = {TEXT: str, NUMBER: float, COUNT: int, FLAG: bool}


def table_of(
    rows: Sequence[Mapping[str, Any]], headers: Sequence[LogHeader] = (), problems: Sequence[LogProblem] = (), apart: bool = True
) -> CollectiveTable:
    """A table of rows given as dicts by column; what a row lacks is not known. Rows of 0 bytes are set apart."""
    zero = [row for row in rows if row["nbytes"] == 0] if apart else []
    kept = [row for row in rows if row["nbytes"] != 0] if apart else rows
    columns = {name: np.array([row.get(name, _DEFAULTS[kind]) for row in kept], _TYPES[kind]) for name, kind in COLUMN_KINDS.items()}
    return CollectiveTable(**columns, headers=tuple(headers), problems=tuple(problems), zero_byte=table_of(zero, headers, apart=False) if apart else None)


def concatenate(tables: Sequence[CollectiveTable]) -> CollectiveTable:
    """One table of several, in order."""
    offsets = np.cumsum([0] + [len(table.headers) for table in tables])
    columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in COLUMN_KINDS}
    columns["header"] = np.concatenate([np.where(table.header >= 0, table.header + k, -1) for table, k in zip(tables, offsets[:-1], strict=True)])
    zero = [table.zero_byte for table in tables if table.zero_byte is not None]
    return CollectiveTable(
        **columns,
        headers=tuple(header for table in tables for header in table.headers),
        problems=tuple(problem for table in tables for problem in table.problems),
        zero_byte=concatenate([dataclasses.replace(part, headers=table.headers) for part, table in zip(zero, tables, strict=True)]) if zero else None,
    )


def bus_factor(op: str, ranks: float) -> float:
    """busbw over algbw (NVIDIA, nccl-tests, doc/PERFORMANCE.md); NaN where the operation or the number of ranks is not known. [1]"""
    if op in ("broadcast", "reduce", "send_recv"):
        return 1.0
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter") else float("nan")


def op_name(text: str) -> str:
    """The name in `OPS` of a collective as written elsewhere (`allreduce`, `sendrecv`, `AllToAll`); "" for a stranger."""
    plain = text.strip().lower().replace("-", "_")
    name = _NAMES.get(plain.replace("_", ""), plain)
    return name if name in OPS + EXPERT_OPS else ""


def datatype_name(text: str) -> str:
    """The name used here of a datatype as written elsewhere (`float`, `half`); others stay as they are, in lower case."""
    plain = text.strip().lower()
    return _DATATYPES.get(plain, plain)


def element_bytes(datatype: str) -> float:
    """Bytes of one element; NaN for a datatype without a plain size. [B]"""
    return _ELEMENT_BYTES.get(datatype, float("nan"))
