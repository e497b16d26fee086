"""Measured times of collectives from CSV tables and raw logs, told apart by content, into one `CollectiveTable`; and such a table back into CSV.

CSV columns carry their unit: `op, dtype, bytes, n_ranks, n_nodes, algo, proto, time_us, algbw_GBps, busbw_GBps, gpu, interconnect, source` and, where
there are any, `impl, buffer, health, log_id, flag, time_min_us, time_max_us`. Only `op, bytes, n_ranks` and a time are needed. Tables of expert exchanges
(dispatch and combine of a mixture of experts) have columns of their own. Leaves out sampling, outlier removal and the definition of latency, which
differ between sources.
"""

import csv
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._files import write_atomic
from ._collective_table import (
    CollectiveFileError,
    CollectiveTable,
    LogProblem,
    concatenate,
    datatype_name,
    element_bytes,
    op_name,
    table_of,
)
from ._nccl_tests import read_nccl_tests
from ._tables import RunFileError, csv_bytes, read_csv

TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
DEVICES_PER_NODE = {"h100_sxm": 8, "h200_sxm": 8, "b200_sxm": 8, "b300_sxm": 8, "gb200": 4, "gb300": 4}  # where a table counts nodes only: datasheets
# Bytes per element as sent to experts: fp8 with one float32 scale per 128 (DeepSeek-AI, DeepEP), nvfp4 with one 8-bit scale per 16 (NVIDIA).
EXPERT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1 + 4 / 128, "nvfp4": 0.5 + 1 / 16}
_UNSTATED = ("", "unstated", "unknown", "n/a", "none")
_WRITTEN = (
    "op", "dtype", "bytes", "n_ranks", "n_nodes", "algo", "proto", "time_us", "algbw_GBps", "busbw_GBps", "gpu", "interconnect", "source", "impl",
    "buffer", "health", "log_id", "flag",
)  # fmt: skip

Records = Iterable[tuple[int, Mapping[str, str]]]
Report = Callable[[int, str, str], None]
Phases = Callable[[Mapping[str, str]], Iterable[tuple[str, str, str, str, str]]]


def read_collectives(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> CollectiveTable:
    """Times in one or several files: CSV tables (gzipped or not) in the columns above, tables of expert exchanges, and nccl-tests logs.

    Returns:
      All rows in order of files. A row that cannot be used is left out and named in `problems` with its line; remarks of the source stay in `flag`.
      Rows of a CSV table belong to the log that its column `log_id` names, else to that of its file name and `impl`.

    Raises:
      CollectiveFileError: a file has none of the layouts, lacks a column, has its times in another unit than the column says, or no usable row.
      OSError: a file cannot be read.
    """
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not several:
        raise CollectiveFileError(["no file of collective times was given. Give at least one."])
    tables = [_read(os.fspath(path)) for path in several]
    return tables[0] if len(tables) == 1 else concatenate(tables)


def write_collectives(path: str | os.PathLike[str], table: CollectiveTable) -> None:
    """Writes the rows of `table` as CSV in the columns above (`.csv` or `.csv.gz`), which `read_collectives` reads back; nothing is left half-written.

    Bandwidths are written as they follow from the times. Expert exchanges have no place in these columns.
    """
    name = os.fspath(path)
    if not name.endswith((".csv", ".csv.gz")):
        raise ValueError(f"{name}: the ending should be .csv or .csv.gz.")
    if np.any(~np.isnan(table.tokens)):
        raise ValueError("the table holds expert exchanges, which these columns cannot; leave them out with `take`.")
    number = lambda values: ["" if np.isnan(x) else float(f"{x:.9g}") for x in values.tolist() for x in [float(x)]]
    columns = (
        table.op, table.datatype, number(table.nbytes), number(table.ranks), number(table.nodes), table.algorithm, table.protocol,
        number(table.time_s / 1e-6), number(table.rate / 1e9), number(table.bus_rate / 1e9), table.accelerator, table.interconnect, table.source,
        table.library, np.where(table.in_place, "in_place", "out_of_place"), table.health, table.log, table.flag,
    )  # fmt: skip
    rows = zip(*(column.tolist() if isinstance(column, np.ndarray) else column for column in columns), strict=True)
    write_atomic(name, csv_bytes(_WRITTEN, rows, compress=name.endswith(".gz")))


def _read(name: str) -> CollectiveTable:
    if not _is_csv(name):
        return read_nccl_tests(name)
    try:
        header, numbered = read_csv(name)
    except RunFileError as error:
        raise CollectiveFileError(error.problems) from None
    problems: list[LogProblem] = []
    report = lambda line, kind, text: problems.append(LogProblem(name, line, kind, text))
    records = []
    for line, cells in numbered:
        if isinstance(cells, str):
            report(line, "row left out", cells)
        else:
            records.append((line, cells))
    reader = next((reader for needed, reader in _LAYOUTS if needed <= set(header)), None)
    rows = reader(name, records, report) if reader else _uniform(name, header, records, report)
    if not rows:
        raise CollectiveFileError(problems or [f"{name} has column names but no rows. Add one per measurement."])
    for row in rows:
        row["file"] = name
    return table_of(rows, (), sorted(problems, key=lambda problem: problem.line))


def _is_csv(name: str) -> bool:
    """Whether the first line names columns. A log's first line has no commas, or no name that a table has."""
    import gzip

    with open(name, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(name) if packed else open(name, "rb") as file:
            first = file.read(4096).decode("utf-8-sig", errors="replace").lstrip().splitlines()
    except (EOFError, OSError) as error:
        raise CollectiveFileError([f"{name} is not a complete gzip file: {error}. Copy it again."]) from None
    names = {cell.strip() for cell in next(csv.reader(io.StringIO(first[0]), delimiter=","))} if first else set()
    return len(names) > 2 and bool(names & {"op", "op_name", "bytes", "n_ranks", "busbw_GBps", "num_token", "num_tokens"})


def _uniform(name: str, header: Sequence[str], records: Records, report: Report) -> list[dict[str, Any]]:
    """Rows of the uniform columns."""
    times = {column: TIME_UNITS[found[1]] for column in header if (found := re.fullmatch(r"time_(us|ms|s)", column))}
    missing = [column for column in ("op", "bytes", "n_ranks") if column not in header]
    problems = [f"{name}: the column {column!r} is missing. Columns in the file: {', '.join(header)}." for column in missing]
    if len(times) > 1:
        problems.append(f"{name}: mixed units: the columns {' and '.join(times)} both hold the time. Keep one.")
    if not times:
        vague = next((column for column in header if column.startswith("time")), None)
        advice = f" If {vague!r} is the time, put its unit into the name." if vague else ""
        problems.append(f"{name}: there is no column 'time_us', 'time_ms' or 'time_s'.{advice}")
    if problems:
        raise CollectiveFileError(problems)
    (column, second), stem, rows, ratios = next(iter(times.items())), Path(name).name.split(".", 1)[0], [], []
    for line, cells in records:
        row = _uniform_row(line, cells, column, second, stem, report)
        if row is None:
            continue
        rows.append(row)
        bandwidth = row["algorithm_bandwidth"]
        if bandwidth > 0 and row["nbytes"] > 0:
            ratios.append(bandwidth * row["time_s"] / row["nbytes"])
            if abs(math.log(ratios[-1])) > 0.1 and bandwidth > 1e9:
                row["flag"] = _joined(row["flag"], "algbw_mismatch")
                rate = row["nbytes"] / row["time_s"]
                report(line, "row kept", f"algbw is {bandwidth / 1e9:.4g} GB/s, but bytes over time is {rate / 1e9:.4g} GB/s; the time was taken.")
        if inplace := _float(cells.get("time_inplace_us", "")):
            bus = _float(cells.get("busbw_inplace_GBps", ""))
            rows.append(row | dict(time_s=inplace * 1e-6, in_place=True, algorithm_bandwidth=math.nan, bus_bandwidth=math.nan if bus is None else bus * 1e9))
    if ratios and abs(math.log(np.median(ratios))) > math.log(100):
        raise CollectiveFileError([f"{name}: wrong units: algbw_GBps is {np.median(ratios):.3g} times bytes over {column}. {column} should be in "
                                   f"{column.split('_')[1]} and algbw_GBps in 1e9 B/s."])  # fmt: skip
    return rows


def _uniform_row(line: int, cells: Mapping[str, str], column: str, second: float, stem: str, report: Report) -> dict[str, Any] | None:
    nbytes, ranks, time = (_float(cells.get(name, "")) for name in ("bytes", "n_ranks", column))
    op = op_name(cells["op"])
    wrong = (
        f"op is {cells['op']!r}; it should be a collective such as all_reduce" if not op
        else f"bytes is {cells['bytes']!r}; it should be a number of bytes, 0 or more" if nbytes is None or nbytes < 0
        else f"n_ranks is {cells['n_ranks']!r}; it should be a whole number" if ranks is None or ranks < 1 or not ranks.is_integer()
        else "n_ranks is 1: nothing is sent" if ranks == 1
        else f"{column} is {cells[column]!r}; it should be a positive number" if time is None or time <= 0
        else ""
    )  # fmt: skip
    if wrong:
        report(line, "row left out", wrong + ".")
        return None
    assert nbytes is not None and ranks is not None and time is not None
    impl = cells.get("impl", "").strip()
    bandwidths = (("algorithm_bandwidth", "algbw_GBps"), ("bus_bandwidth", "busbw_GBps"))
    row: dict[str, Any] = {key: math.nan if (value := _float(cells.get(cell, ""))) is None else value * 1e9 for key, cell in bandwidths}
    row |= {key: _stated(cells.get(cell, "")) for key, cell in (("algorithm", "algo"), ("protocol", "proto"), ("accelerator", "gpu"))}
    row |= {key: cells.get(key, "").strip() for key in ("interconnect", "source", "health", "flag")}
    row |= {key: (_float(cells.get(cell, "")) or math.nan) * 1e-6 for key, cell in (("time_min_s", "time_min_us"), ("time_max_s", "time_max_us"))}
    log = cells.get("log_id", "").strip() or (f"{stem}: {impl}" if impl else stem)
    return row | dict(
        op=op,
        datatype=datatype_name(_stated(cells.get("dtype", ""))),
        nbytes=nbytes,
        ranks=ranks,
        nodes=_float(cells.get("n_nodes", "")) or math.nan,
        time_s=time * second,
        in_place=cells.get("buffer", "").strip() == "in_place",
        library=impl,
        log=log,
        line=line,
    )


def _expert_rows(name: str, records: Records, report: Report, phases: Phases, keys: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of an expert table: `phases` gives (phase, datatype, time in us as text, sms, flag) of a record, `keys` the columns of what all tables have."""
    stem, rows = Path(name).name.split(".", 1)[0], []
    for line, cells in records:
        sizes = {key: _float(cells.get(keys[key], "")) for key in ("tokens", "hidden", "experts_per_token", "num_experts")}
        if any(value is None or value <= 0 for value in sizes.values()):
            key = next(key for key, value in sizes.items() if value is None or value <= 0)
            report(line, "row left out", f"{keys[key]} is {cells.get(keys[key], '')!r}; it should be a positive number.")
            continue
        nodes, gpu = _float(cells.get("node_num", "")), cells.get("gpu", "").strip()
        ranks = _float(cells.get(keys.get("ranks", ""), "")) or (nodes or math.nan) * DEVICES_PER_NODE.get(gpu, math.nan)
        for phase, datatype, time, sms, flag in phases(cells):
            microseconds = _float(time)
            if microseconds is None or microseconds <= 0:
                report(line, "row left out", f"the time of {phase} is {time!r} us; it should be a positive number.")
                continue
            datatype = "" if datatype == "default" else datatype_name(datatype)
            tokens, hidden = sizes["tokens"] or math.nan, sizes["hidden"] or math.nan
            rows.append(sizes | dict(
                op=f"moe_{phase}", datatype=datatype, nbytes=tokens * hidden * EXPERT_BYTES.get(datatype, element_bytes(datatype)), ranks=ranks,
                nodes=nodes or math.nan, time_s=microseconds * 1e-6, accelerator=gpu, library=cells.get("framework", "").strip(),
                kernel=_kernel(cells, keys), sms=_float(sms) or math.nan, flag=flag, line=line, log=f"{stem}: {cells.get('framework', '').strip()}",
            ))  # fmt: skip
    return rows


def _kernel(cells: Mapping[str, str], keys: Mapping[str, str]) -> str:
    return " ".join(cells.get(name, "").strip() for name in keys["kernel"].split())


def _exchange(name: str, records: Records, report: Report) -> list[dict[str, Any]]:
    keys = dict(tokens="num_tokens", hidden="hidden_size", experts_per_token="topk", num_experts="num_experts", ranks="ep_size", kernel="comm_backend")
    return _expert_rows(name, records, report, lambda c: [(c["phase"], c["comm_dtype"], c["latency_us"], c.get("sms", ""), "")], keys)


def _all_to_all(name: str, records: Records, report: Report) -> list[dict[str, Any]]:
    """The datatype is that of the experts, in which tokens are dispatched. Combining takes the same time whatever it is: it sends bf16, but for the
    low-precision variant, whose format is not stated. Preparing exchanges indices only."""
    keys = dict(tokens="num_tokens", hidden="hidden_size", experts_per_token="topk", num_experts="num_experts", ranks="moe_ep_size", kernel="kernel_source")

    def phases(c: Mapping[str, str]):
        phase = c["op_name"].removeprefix("alltoall_")
        low = phase.endswith("_low_precision")
        datatype = c["moe_dtype"] if phase == "dispatch" else "bf16" if phase == "combine" else ""
        yield phase.removesuffix("_low_precision"), datatype, c["latency_us"], "", "low_precision" if low else ""

    return _expert_rows(name, records, report, phases, keys)


_DEEPEP = dict(tokens="num_token", hidden="hidden_size", experts_per_token="num_topk", num_experts="num_experts", kernel="kernel_source op_name")


def _low_latency(name: str, records: Records, report: Report) -> list[dict[str, Any]]:
    """Dispatch sends fp8 with scales, combine bf16: the bandwidths beside the times say so (bandwidth x time / tokens / k / hidden is 1.04 and 2)."""
    phases = lambda c: [("dispatch", "fp8", c["dispatch_avg_t_us"], "", ""), ("combine", "bf16", c["combine_avg_t_us"], "", "")]
    return _expert_rows(name, records, report, phases, _DEEPEP)


def _normal(name: str, records: Records, report: Report) -> list[dict[str, Any]]:
    """Transmit and notify times added; the datatype is not stated."""

    def phases(c: Mapping[str, str]):
        for phase in ("dispatch", "combine"):
            parts = [_float(c[f"{phase}_{part}_us"]) for part in ("transmit", "notify")]
            yield phase, "", "" if None in parts else str(sum(part or 0.0 for part in parts)), c[f"{phase}_sms"], ""

    return _expert_rows(name, records, report, phases, _DEEPEP)


_LAYOUTS = (
    ({"phase", "comm_dtype", "ep_size", "latency_us", "num_tokens"}, _exchange),
    ({"op_name", "moe_dtype", "moe_ep_size", "latency_us", "num_tokens"}, _all_to_all),
    ({"dispatch_avg_t_us", "combine_avg_t_us", "num_token"}, _low_latency),
    ({"dispatch_transmit_us", "dispatch_notify_us", "dispatch_sms", "combine_transmit_us", "combine_notify_us", "combine_sms", "num_token"}, _normal),
)


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _stated(text: str) -> str:
    return "" if text.strip().lower() in _UNSTATED else text.strip()


def _joined(*flags: str) -> str:
    return "|".join(flag for flag in flags if flag)
