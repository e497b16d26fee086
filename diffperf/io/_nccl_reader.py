"""The lines of nccl-tests output in order: runs, their header facts and their rows, put together again where a terminal or a message tore them.

Knows the words and layouts that the programs print, and nothing of what the numbers mean (see `_nccl_tests`).
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ._collective_table import LogProblem, element_bytes, op_name
from ._nccl_rows import (
    BANDWIDTH_UNITS,
    COLUMNS,
    DATATYPES,
    SIZE_UNITS,
    TIME_UNITS,
    Layout,
    Row,
    disagreement,
    is_number,
    read_row,
    split,
    starts_row,
)

_MAX_NOTES = 2000
_MAX_SEAMS = 8  # 256 readings
_WORDS = ("sum", "prod", "max", "min", "avg", "mulsum", "none", *DATATYPES)
_MOST_COLUMNS = 13
_LIBRARY_LINE = re.compile(r"(?:\S+:\d+:\d+\s+\[\S*\]\s+)?(?:NCCL|RCCL) (?:INFO|WARN|TRACE)\b.*")
_VERSION = re.compile(r"\b(NCCL|RCCL) version\s*:?\s*(\d+\.\d+(?:\.\d+)?)")
_TESTS_VERSION = re.compile(r"nccl-tests version (\S+)(?:.*?nccl-library=(\d+))?")
_STARTING = re.compile(r"Collective test starting:\s*(\w+?)(?:_perf)?\s*$")
_CONCLUDED = re.compile(r"Collective test concluded")
_COMMAND = re.compile(r"\b(\w+)_perf\b")
_OPTIONS = re.compile(r"\b(nThread|nGpus|minBytes|maxBytes|warmup iters|agg iters|iters|graph):?\s*(\d+)")
_RANK = re.compile(r"Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s*(?:\[[^\]]*\])?\s*(.*)")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*(\S+)")
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)")
_OPTION_FIELDS = {
    "nThread": "threads", "nGpus": "devices_per_thread", "minBytes": "min_bytes", "maxBytes": "max_bytes", "warmup iters": "warmup",
    "iters": "iterations", "agg iters": "aggregated", "graph": "graph",
}  # fmt: skip


@dataclasses.dataclass
class Run:
    """One run while it is read."""

    line: int
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    listed: dict[int, tuple[str, int, str]] = dataclasses.field(default_factory=dict)
    notes: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    rows: list[tuple[int, Row]] = dataclasses.field(default_factory=list)
    over: bool = False


class Reader:
    """Takes lines in order; gathers runs, their rows and problems."""

    def __init__(self, name: str):
        self.name = name
        self.problems: list[LogProblem] = []
        self.runs = [Run(1)]
        self.layout: Layout | None = Layout()
        self.torn: list[str] = []  # the parts of a row that is not complete yet
        self.torn_at = 0
        self.command_op = ""

    def report(self, line: int, kind: str, text: str) -> None:
        self.problems.append(LogProblem(self.name, line, kind, text))

    def feed(self, number: int, text: str) -> None:
        """One cleaned line."""
        if found := _LIBRARY_LINE.search(text):
            self._facts(number, found[0], self.runs[-1])
            if len(self.runs[-1].notes) < _MAX_NOTES:
                self.runs[-1].notes.append((number, found[0]))
            text = text[: found.start()].strip()
        if not text:
            return
        tokens = split(text)
        if self._row_part(number, tokens):
            return
        if self._header_line(number, tokens):
            return
        self._facts(number, text, None)

    def close_row(self) -> None:
        """Gives up on a row that never became complete; keeps a buffer that did."""
        if len(self.torn) > 1 or (self.torn and starts_row(self.torn[0].split())):
            tokens = split(" ".join(self.torn))
            row = read_row(tokens, self.layout or Layout())
            if isinstance(row, Row) and (len(row.groups) == 2 or _agrees(row)):
                self._accept(row)
                if len(row.groups) < self._times():
                    self.report(self.torn_at, "row left out", f"{row.nbytes:.0f} B: the row ends after its first buffer.")
            else:
                why = row if isinstance(row, str) else "it ends early, or its numbers contradict each other"
                self.report(self.torn_at, "row left out", f"the row {' '.join(tokens)[:70]!r} cannot be read: {why}.")
        self.torn = []

    def _row_part(self, number: int, tokens: list[str]) -> bool:
        """Whether the line was a row or part of one."""
        begins, line = starts_row(tokens), " ".join(tokens)
        columns = (self.layout or Layout()).columns
        numeric = all(is_number(token) for token in tokens)
        if self.torn and (begins or all(is_number(token) or token.isalpha() for token in tokens)):
            for text in _joined([*self.torn, line]):
                if self._completes(text):
                    return True
        if begins or (numeric and len(tokens) == len(columns) > 1):
            self.close_row()
            self.torn, self.torn_at = [line], number
            self._completes(line)
            return True
        if self.torn and all(is_number(token) or token in _WORDS for token in tokens):
            self.torn.append(line)
            if sum(len(part.split()) for part in self.torn) > _MOST_COLUMNS + _MAX_SEAMS:
                self.close_row()
            return True
        if not self.torn and columns and len(tokens) <= 2 and all(token.isdigit() for token in tokens):
            self.torn, self.torn_at = [line], number  # a row that the terminal wrapped after its first columns
            return True
        return False

    def _completes(self, text: str) -> bool:
        """Whether `text` is a whole row, which is then taken: it has the columns of the header, or without one two buffers that make sense."""
        layout, tokens = self.layout or Layout(), split(text)
        row = read_row(tokens, layout)
        if isinstance(row, str):
            return False
        size = row.count * element_bytes(row.datatype)
        fits = not size > 0 or not row.nbytes or (row.nbytes / size).is_integer()
        full = len(tokens) == len(layout.columns) if layout.columns else len(row.groups) == 2 and _agrees(row)
        sure = len(self.torn) == 1 and self.torn[0] == text  # a row on a line of its own may contradict itself; of torn ones the consistent reading is taken
        if not (full and fits and (sure or _agrees(row))):
            return False
        self.torn = []
        self._accept(row)
        return True

    def _times(self) -> int:
        return (self.layout or Layout()).columns.count("time") or 2

    def _accept(self, row: Row) -> None:
        if self.layout is None:
            return  # its table was left out as a whole
        self._run_with(self.torn_at)
        self.runs[-1].rows.append((self.torn_at, row))

    def _run_with(self, line: int) -> None:
        if self.runs[-1].over:
            self._begin(line)

    def _begin(self, line: int) -> Run:
        """The run that a header line belongs to: a new one if the last has rows."""
        self.close_row()
        if self.runs[-1].rows or self.runs[-1].over:
            self.runs.append(Run(line))
            self.layout = Layout()
        if not self.runs[-1].facts and not self.runs[-1].listed:
            self.runs[-1].line = line
        if self.command_op:
            self.runs[-1].facts.setdefault("op", self.command_op)
        return self.runs[-1]

    def _header_line(self, number: int, tokens: list[str]) -> bool:
        names = [re.sub(r"\(.*\)$", "", token.lower()) for token in tokens]
        names = ["#wrong" if name == "wrong" else name for name in names]
        inline = [unit[1] for token in tokens if (unit := re.fullmatch(r"\w+\((.*)\)", token))]
        if "size" in names and ("time" in names or "count" in names) and all(name in COLUMNS for name in names):
            self._begin(number)
            self.layout = Layout(tuple(names), in_place=self.layout.in_place if self.layout else (False, True))
            if inline:
                self._units(number, inline)
            return True
        if self.layout and self.layout.columns and not self.runs[-1].rows and set(names) <= set(COLUMNS[5:]):
            self.layout = dataclasses.replace(self.layout, columns=self.layout.columns + tuple(names))  # a wrapped header
            return True
        if tokens and all(re.fullmatch(r"\([\w/]+\)", token) for token in tokens):
            self._units(number, [token[1:-1] for token in tokens])
            return True
        placed = [token for token in names if token in ("out-of-place", "in-place")]
        if placed and len(placed) == len(names):
            self._begin(number)
            self.layout = Layout(in_place=tuple(name == "in-place" for name in placed))
            return True
        return False

    def _units(self, number: int, units: Sequence[str]) -> None:
        """Units of the columns; a table whose units are mixed or unknown is left out, as its numbers could be anything."""
        if self.layout is None:
            return
        values = {}
        for what, known in (("time", TIME_UNITS), ("bandwidth", BANDWIDTH_UNITS), ("size", SIZE_UNITS)):
            found = sorted({unit for unit in units if unit in known})
            if len(found) > 1:
                self.report(number, "table left out", f"mixed units: the {what} columns are in {' and in '.join(found)}. Print one unit for both buffers.")
                self.layout = None
                return
            values |= {what: known[found[0]]} if found else {}
        strange = [unit for unit in units if unit != "elements" and not any(unit in known for known in (TIME_UNITS, BANDWIDTH_UNITS, SIZE_UNITS))]
        if strange:
            accepted = ", ".join((*TIME_UNITS, *BANDWIDTH_UNITS, *SIZE_UNITS))
            self.report(number, "table left out", f"the unit {strange[0]!r} is not known. Accepted are {accepted}.")
            self.layout = None
            return
        self.layout = dataclasses.replace(self.layout, **values)

    def _facts(self, number: int, text: str, run: Run | None) -> None:
        """What a line that is neither row nor header says; `run` where the line cannot begin one."""
        if found := _VERSION.search(text):
            (run or self.runs[-1]).facts |= dict(library=found[1], library_version=found[2])
            return
        if run is not None:
            return
        if found := _AVERAGE.match(text):
            self.close_row()
            self.runs[-1].facts["average_bus_bandwidth"] = float(found[1]) * 1e9 if is_number(found[1]) and found[1] != "N/A" else None
            self.runs[-1].over = True
        elif found := _OUT_OF_BOUNDS.match(text):
            self.close_row()
            self.runs[-1].facts["out_of_bounds"] = float(found[1])
        elif _CONCLUDED.match(text):
            self.close_row()
            self.runs[-1].over = bool(self.runs[-1].rows)
        elif found := _RANK.match(text):
            self._begin(number).listed[int(found[1])] = (found[2], int(found[3]), found[4].strip())
        elif found := _TESTS_VERSION.search(text):
            facts = self._begin(number).facts
            facts["tests_version"] = found[1]
            if found[2]:
                facts |= dict(library="NCCL", library_version=_version(int(found[2])))
        elif len(found := _OPTIONS.findall(text)) >= 2:
            self._begin(number).facts |= {_OPTION_FIELDS[name]: float(value) for name, value in found}
        elif text.startswith("Using devices"):
            self._begin(number)
        elif (found := _STARTING.search(text) or _COMMAND.search(text)) and op_name(found[1]):
            self.command_op = op_name(found[1])
            self._begin(number).facts["op"] = self.command_op


def _agrees(row: Row) -> bool:
    return not any(disagreement(row, group) for group in row.groups)


def _joined(parts: Sequence[str]) -> Iterator[str]:
    """Ways to put a torn row together: words apart first; then with some seams inside a number, unless there are too many."""
    seams = len(parts) - 1
    glues = itertools.product((" ", ""), repeat=seams) if seams <= _MAX_SEAMS else ((" ",) * seams, ("",) * seams)
    for glue in glues:
        yield parts[0] + "".join(g + part for g, part in zip(glue, parts[1:], strict=True))


def _version(code: int) -> str:
    """NCCL_VERSION_CODE as text: 10000 a + 100 b + c since 2.9, 1000 a + 100 b + c before (NVIDIA, nccl, src/nccl.h.in)."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
