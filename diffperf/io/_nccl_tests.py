"""Output of nccl-tests and rccl-tests, as people paste it, into a `CollectiveTable`.

A paste may hold several runs, each with its own header, and lacks parts at will: prefixes of launchers, time stamps, Markdown and HTML, rows wrapped by a
terminal or torn by a warning, library messages between rows. What the log does not state (which collective, how many ranks) follows from its columns where
they determine it. One bad row never loses the rest: it is left out and named with its line. Leaves out JSON output of newer versions.
"""

import collections
import gzip
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._collective_table import CollectiveFileError, CollectiveTable, LogHeader, bus_factor, element_bytes, op_name, table_of
from ._nccl_reader import Reader, Run
from ._nccl_rows import Group, Row, clean, disagreement


def read_nccl_tests(path: str | os.PathLike[str], op: str = "", ranks: float | None = None, nodes: float | None = None) -> CollectiveTable:
    """Times in a file of nccl-tests or rccl-tests output, gzipped or not.

    Args:
      path: the log. It may hold several runs, of several collectives.
      op, ranks, nodes: what you know and the log does not say; where it does, the log counts and the contradiction is a problem of the table.

    Returns:
      One row per buffer and size, in order, out-of-place before in-place. `headers` holds what the log says about each run, `problems` every row left
      out and every contradiction, with its line. Where the log does not name its collective it follows from redop, root and count (all-gather and
      all-to-all print alike but for the in-place errors, which all-to-all has not); ranks follow from size over count or from busbw over algbw; nodes from
      listed hosts or devices per host. What was inferred is named in `LogHeader.inferred`; what cannot be is "" or NaN.
      Flags: "busbw_factor_mismatch" (busbw contradicts algbw), "busbw_not_a_number", "wrong_results" (the test found wrong values).

    Raises:
      CollectiveFileError: no row can be used: not an nccl-tests log, a single rank, mixed units. The message names lines.
      OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError) as error:
            raise CollectiveFileError([f"{path} is not a complete gzip file: {error}. Copy it again."]) from None
    return parse_nccl_tests(log_text(data), str(path), op, ranks, nodes)


def log_text(data: bytes) -> str:
    """Text of a log; a byte that is none becomes a mark, as a stray one should not lose the rest."""
    return data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig", errors="replace")


def parse_nccl_tests(text: str, name: str = "log", op: str = "", ranks: float | None = None, nodes: float | None = None) -> CollectiveTable:
    """As `read_nccl_tests`, from text; `name` stands for the file in messages."""
    if op and not op_name(op):
        raise ValueError(f"op is {op!r}; it should be a collective such as all_reduce.")
    given = dict(op=op_name(op), ranks=ranks, nodes=nodes)
    reader = Reader(name)
    for number, line in enumerate(text.splitlines(), 1):
        for part in clean(line):
            reader.feed(number, part)
    reader.close_row()
    rows, headers, known = [], [], None
    log = Path(name).name.split(".", 1)[0]
    runs = [run for run in reader.runs if run.rows]
    for k, run in enumerate(runs):
        header = _settled(run, given, known, reader)
        known = header.ranks or known
        headers.append(header)
        rows += [row | dict(header=k, log=log if len(runs) == 1 else f"{log}#{k + 1}") for row in _checked(run, header, reader)]
    problems = sorted(reader.problems, key=lambda problem: problem.line)
    if not rows:
        raise CollectiveFileError(problems or [_stranger(text, name)])
    return table_of(rows, headers, problems)


def _stranger(text: str, name: str) -> str:
    first = next(((number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()), None)
    if first is None:
        return f"{name} is empty. It should hold the output of an nccl-tests or rccl-tests program."
    return (f"{name} is not an nccl-tests log: none of its lines is a row of sizes and times. Line {first[0]} reads {first[1][:60]!r}. A row reads "
            "'1048576  262144  float  sum  -1  45.21  23.19  40.59  0  ...'; paste the program's whole output.")  # fmt: skip


def _settled(run: Run, given: dict[str, Any], known: float | None, reader: Reader) -> LogHeader:
    """The header of a run, with op, ranks and nodes from the log, from what the caller knows, or from the columns."""
    facts, inferred = dict(run.facts), []
    for name, value in (("op", facts.get("op", "")), ("ranks", max(run.listed, default=-1) + 1 or None)):
        if value and given[name] and value != given[name]:
            reader.report(run.line, "note", f"{name} was given as {given[name]}, but the log says {value}, which was taken.")
        facts[name] = value or given[name]
    if not facts["op"]:
        facts["op"] = _inferred_op([row for _, row in run.rows])
        inferred += ["op"] if facts["op"] else []
    if not facts["ranks"]:
        facts["ranks"], between = _inferred_ranks(facts["op"], [row for _, row in run.rows])
        inferred += ["ranks"] if facts["ranks"] else []
        if not facts["ranks"] and known:
            facts["ranks"] = known
        elif not facts["ranks"]:
            missing = f"the number of ranks is neither listed nor in the columns{between}"
            reader.report(run.line, "note", f"{missing}. Give it, or keep the list of devices in the log.")
    facts["nodes"], certain = _nodes(run.listed, facts["ranks"])
    if facts["nodes"] and given["nodes"] and facts["nodes"] != given["nodes"]:
        reader.report(run.line, "note", f"nodes was given as {given['nodes']:g}, but the listed devices stand on {facts['nodes']:g}, which was taken.")
    elif facts["nodes"] and not certain:
        inferred.append("nodes")
    facts["nodes"] = facts["nodes"] or given["nodes"]
    listed = [run.listed[rank] for rank in sorted(run.listed)]
    return LogHeader(
        file=reader.name,
        line=run.line,
        devices=tuple(device for _, _, device in listed if device),
        hosts=tuple(dict.fromkeys(host for host, _, _ in listed)),
        inferred=tuple(inferred),
        notes=tuple(run.notes),
        **facts,
    )


def _nodes(listed: dict[int, tuple[str, int, str]], ranks: float | None) -> tuple[float | None, bool]:
    """Hosts of a run, and whether every rank is listed; from the highest device number if not, as ranks fill hosts evenly."""
    if not listed or not ranks:
        return None, False
    hosts = len({host for host, _, _ in listed.values()})
    if len(listed) == ranks:
        return float(hosts), True
    per_host = max(device for _, device, _ in listed.values()) + 1
    return (ranks / per_host, False) if per_host > 1 and ranks % per_host == 0 and ranks / per_host >= hosts else (None, False)


def _copies(rows: Sequence[Row]) -> float | None:
    """Size over count: 1 for all-reduce, broadcast, reduce and send/recv; the number of ranks for the others."""
    found = collections.Counter(row.nbytes / (row.count * element_bytes(row.datatype)) for row in rows if row.nbytes and row.count and row.datatype)
    best = found.most_common(1)
    return best[0][0] if best and math.isfinite(best[0][0]) and best[0][0].is_integer() else None


def _factor_range(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Least and largest busbw over algbw that the printed digits of all rows allow, each row by itself where they contradict; None without one."""
    spans = []
    for row in rows:
        for group in row.groups:
            a, b = group.algorithm_bandwidth, group.bus_bandwidth
            if math.isfinite(a) and math.isfinite(b) and a > 50 * group.bus_slack > 0:
                spans.append(((b - group.bus_slack) / (a + group.bus_slack), (b + group.bus_slack) / (a - group.bus_slack)))
    if not spans:
        return None
    low, high = max(span[0] for span in spans), min(span[1] for span in spans)
    return (low, high) if low <= high else min(spans, key=lambda span: span[1] - span[0])


def _inferred_op(rows: Sequence[Row]) -> str:
    """The collective that the columns tell; "" where they do not."""
    first = next((row for row in rows if row.nbytes), rows[0])
    reduces, rooted = first.reduce_op not in ("", "none"), first.root is not None and first.root >= 0
    errors = {group.in_place: group.error for group in first.groups}
    out_of_place_only = errors.get(True, "").upper() == "N/A" and errors.get(False, "").upper() not in ("N/A", "")
    copies, factor = _copies(rows), _factor_range(rows)
    if copies is None:
        return "all_reduce" if factor and factor[0] > 1.01 else ""  # no other factor exceeds 1
    if copies > 1:
        if rooted:
            return ""  # gather or scatter
        return "reduce_scatter" if reduces else "all_to_all" if out_of_place_only else "all_gather"
    if rooted:
        return "reduce" if reduces else "broadcast"
    if factor and factor[0] > 1.01:
        return "all_reduce"
    if out_of_place_only or (factor and factor[0] <= 1 <= factor[1] and not reduces):
        return "send_recv"  # prints a redop too, but checks no in-place result
    return "all_reduce" if reduces else ""


def _inferred_ranks(op: str, rows: Sequence[Row]) -> tuple[float | None, str]:
    """The only number of ranks that fits the columns, else None and what they allow."""
    copies, factor = _copies(rows), _factor_range(rows)
    if copies and copies > 1:
        return copies, ""
    if op == "all_reduce" and factor:
        low, high = (2 / (2 - min(max(f, 0.0), 2 - 1e-9)) for f in factor)
        if math.ceil(low - 1e-9) == math.floor(high + 1e-9):
            return float(math.floor(high + 1e-9)), ""
        return None, f"; busbw over algbw allows {low:.0f} to {high:.0f}"
    return None, ""


def _checked(run: Run, header: LogHeader, reader: Reader) -> list[dict[str, Any]]:
    """Rows of a run as dicts by column; each contradiction is reported."""
    if header.ranks == 1:
        reader.report(run.line, "table left out", f"{len(run.rows)} rows of a single rank: nothing is sent. Programs built without MPI=1 do not see each "
                      "other; build with MPI=1, or ask for several devices with -g.")  # fmt: skip
        return []
    rows, mismatched = [], []
    for line, row in run.rows:
        for group in row.groups:
            if why := _unusable(row, group):
                reader.report(line, "row left out", f"{_place(row, group)}: {why}.")
                continue
            flags = []
            if math.isnan(group.bus_bandwidth):
                flags.append("busbw_not_a_number")
                reader.report(line, "row kept", f"{_place(row, group)}: busbw is not a number; the time was taken.")
            elif not _factor_fits(header, group):
                flags.append("busbw_factor_mismatch")
                mismatched.append((line, row, group))
            if re.fullmatch(r"[1-9]\d*", group.error):
                flags.append("wrong_results")
                reader.report(line, "row kept", f"{_place(row, group)}: the test found {group.error} wrong values.")
            rows.append(_columns(line, row, group, header) | dict(flag="|".join(flags)))
    expected = bus_factor(header.op, header.ranks or math.nan)
    if len(mismatched) > max(2, len(rows) // 2):
        line, row, group = max(mismatched, key=lambda item: item[2].bus_bandwidth)
        reader.report(line, "row kept", f"busbw is {_ratio(group):.4g} times algbw here and in {len(mismatched)} of {len(rows)} rows; {header.op} over "
                      f"{header.ranks or 2:g} ranks gives {expected:.4g}. Either the collective or the number of ranks is another one.")  # fmt: skip
    else:
        for line, row, group in mismatched:
            rule = f"{header.op} over {header.ranks or 2:g} ranks gives {expected:.4g}"
            reader.report(line, "row kept", f"{_place(row, group)}: busbw is {_ratio(group):.4g} times algbw; {rule}.")
    return rows


def _ratio(group: Group) -> float:
    return group.bus_bandwidth / group.algorithm_bandwidth if group.algorithm_bandwidth else math.inf


def _place(row: Row, group: Group) -> str:
    return f"{row.nbytes:.0f} B, {'in-place' if group.in_place else 'out-of-place'}"


def _unusable(row: Row, group: Group) -> str:
    if not (math.isfinite(group.time) and group.time > 0):
        return f"the time is {group.time:g} s; it should be positive"
    return disagreement(row, group)


def _factor_fits(header: LogHeader, group: Group) -> bool:
    """Whether busbw is algbw times the factor of the collective, within the digits printed."""
    factor = bus_factor(header.op, header.ranks or math.nan)
    if math.isnan(factor) or math.isnan(group.algorithm_bandwidth):
        return True
    return abs(group.bus_bandwidth - factor * group.algorithm_bandwidth) <= (1 + factor) * group.bus_slack + 2e-3 * group.bus_bandwidth


def _columns(line: int, row: Row, group: Group, header: LogHeader) -> dict[str, Any]:
    unknown = math.nan
    device = collections.Counter(header.devices).most_common(1)
    return dict(
        op=header.op,
        datatype=row.datatype,
        nbytes=row.nbytes,
        ranks=header.ranks or unknown,
        nodes=header.nodes or unknown,
        time_s=group.time,
        algorithm_bandwidth=group.algorithm_bandwidth,
        bus_bandwidth=group.bus_bandwidth,
        in_place=group.in_place,
        reduce_op=row.reduce_op,
        root=-1 if row.root is None else row.root,
        graph=unknown if header.graph is None else header.graph,
        accelerator=device[0][0] if device else "",
        library=f"{header.library} {header.library_version}".strip(),
        file=header.file,
        line=line,
    )
