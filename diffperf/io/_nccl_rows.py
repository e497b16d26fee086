"""One line of nccl-tests output: freed from what it was pasted with, and read as columns whose layout changed over the years.

A row is `size count type [redop] [root]` and, for the out-of-place and the in-place buffer, `time algbw busbw [error]`. Old versions print no redop or
no root, `error` for `#wrong`, and both may be `N/A`. So columns are told by the header if the row fits it, else by counting, and of several readings the
one is taken whose algbw is size over time. Leaves out everything that spans rows (see `_nccl_tests`).
"""

import dataclasses
import html
import math
import re

from ._collective_table import datatype_name

DATATYPES = (
    "int8", "char", "uint8", "int32", "int", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16", "f8e4m3", "f8e5m2", "fp8_e4m3",
    "fp8_e5m2", "float16", "float32", "float64",
)  # fmt: skip
COLUMNS = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "error")
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "usec": 1e-6, "ns": 1e-9}
BANDWIDTH_UNITS = {"GB/s": 1e9, "MB/s": 1e6, "TB/s": 1e12, "GiB/s": 2.0**30, "MiB/s": 2.0**20, "Gb/s": 1.25e8, "Gbps": 1.25e8}
SIZE_UNITS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}

_PREFIXES = re.compile(
    r"""^\s*(?:
      \[\d+,\d+\]<std(?:out|err)>:                                            # mpirun --tag-output
    | \[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?=\s)  # time stamps
    | \[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]?(?=\s)
    | \([^()]*pid=[^()]*\)                                                    # Ray
    | \[[\w.,:/+-]+\]:?(?=\s)                                                 # [node0]
    | \d+:(?=\s)                                                              # srun --label
    | [A-Za-z][\w.-]*:(?=\s)                                                  # node0:
    | [A-Za-z][\w.-]*\s+\|(?=\s)                                              # docker compose
    | >(?=\s)                                                                 # a quoted mail
    )""",
    re.VERBOSE,
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_ROW_ENDS = re.compile(r"<br\s*/?>|</tr>", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf)|N/A", re.IGNORECASE)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")


def clean(line: str) -> list[str]:
    """What a pasted line says: without prefixes, colours, Markdown bars and HTML; several lines where HTML held several rows."""
    line = _ANSI.sub("", html.unescape(line))
    while (shorter := _PREFIXES.sub("", line, count=1)) != line:
        line = shorter
    parts = (_TAG.sub(" ", part).replace("|", " ").replace("`", " ").strip() for part in _ROW_ENDS.split(line))
    return [part.lstrip("#").strip() for part in parts]


def split(text: str) -> list[str]:
    """Tokens of a line, thousands separators taken out."""
    return [token.replace(",", "") if _THOUSANDS.fullmatch(token) else token for token in text.split()]


def is_number(token: str) -> bool:
    """Whether a token may stand in a numeric column; `N/A` and `nan` may."""
    return _NUMBER.fullmatch(token) is not None


def starts_row(tokens: list[str]) -> bool:
    """Whether a line begins `size count type`."""
    return len(tokens) >= 3 and tokens[0].isdigit() and tokens[1].isdigit() and tokens[2].lower() in DATATYPES


@dataclasses.dataclass(frozen=True)
class Layout:
    """Columns of one table and their units; `columns` is empty where the paste has no header.

    Attributes:
      columns: names as printed.
      time, bandwidth, size: value of one unit. [s], [B/s], [B]
      in_place: of each group of columns, in order.
    """

    columns: tuple[str, ...] = ()
    time: float = 1e-6
    bandwidth: float = 1e9
    size: float = 1.0
    in_place: tuple[bool, ...] = (False, True)


@dataclasses.dataclass(frozen=True)
class Group:
    """Times of one buffer. `nan` where printed so or not at all; `slack` is how far `algorithm_bandwidth` may be from size / time by rounding. [B/s]"""

    time: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    error: str
    slack: float
    bus_slack: float
    in_place: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """One row; count 0, type "" and redop "" where its table has no such column, root None."""

    nbytes: float
    count: float
    datatype: str
    reduce_op: str
    root: int | None
    groups: tuple[Group, ...]


def read_row(tokens: list[str], layout: Layout) -> Row | str:
    """A row, or why the tokens are none."""
    names = layout.columns
    if names and len(tokens) == len(names):
        row = _by_header(tokens, layout)
        if not isinstance(row, str):
            return row
    if not starts_row(tokens):
        return f"{len(tokens)} values where the header has {len(names)} columns" if names else "it does not begin with size, count and type"
    rest = tokens[3:]
    reduce_op = rest.pop(0) if rest and not is_number(rest[0]) else ""
    if not all(is_number(token) for token in rest):
        return f"{next(token for token in rest if not is_number(token))!r} is not a number"
    readings = []
    for groups, size, rooted in ((2, 4, 1), (2, 4, 0), (2, 3, 1), (2, 3, 0), (1, 4, 1), (1, 4, 0), (1, 3, 1), (1, 3, 0)):
        if groups * size + rooted == len(rest) and (not rooted or re.fullmatch(r"-?\d+", rest[0])):
            values = rest[rooted:]
            cells = [values[k * size : (k + 1) * size] for k in range(groups)]
            row = _row(tokens[0], tokens[1], tokens[2], reduce_op, rest[0] if rooted else None, cells, layout)
            if not isinstance(row, str):
                readings.append(row)
    if not readings:
        return f"{len(rest)} numbers after its type; expected time, algbw, busbw and perhaps the number of errors, for one or two buffers"
    return next((row for row in readings if not any(disagreement(row, group) for group in row.groups)), readings[0])


def disagreement(row: Row, group: Group) -> str:
    """How the algbw of a row contradicts its size and time; "" if it does not, or is not printed."""
    expected = row.nbytes / group.time if group.time > 0 else math.nan
    if math.isnan(expected) or not math.isfinite(group.algorithm_bandwidth) or abs(group.algorithm_bandwidth - expected) <= group.slack:
        return ""
    ratio = group.algorithm_bandwidth / expected
    near = next((f"{what}" for value, what in _UNIT_RATIOS if abs(math.log(max(ratio, 1e-300) / value)) < 0.02), "")
    said = f"algbw is {group.algorithm_bandwidth / 1e9:.4g} GB/s, but size over time is {expected / 1e9:.4g} GB/s"
    return f"{said}: units are mixed ({near})" if near else said


_UNIT_RATIOS = (
    (1e3, "a factor of 1000: ms against us, or MB/s against GB/s"), (1e-3, "a factor of 1000: ms against us, or MB/s against GB/s"),
    (1e6, "a factor of 1e6: s against us"), (1e-6, "a factor of 1e6: s against us"),
    (8.0, "a factor of 8: Gbit/s against GB/s"), (1 / 8, "a factor of 8: Gbit/s against GB/s"),
    (1024 / 1000, "a factor of 1.024"), (2.0**30 / 1e9, "GiB/s against GB/s"), (1e9 / 2.0**30, "GiB/s against GB/s"),
)  # fmt: skip


def _by_header(tokens: list[str], layout: Layout) -> Row | str:
    cells: dict[str, str] = {}
    groups: list[list[str]] = []
    for name, token in zip(layout.columns, tokens, strict=True):
        if name == "time":
            groups.append([token, "nan", "nan", ""])
        elif name in ("algbw", "busbw", "#wrong", "error"):
            if groups:
                groups[-1][{"algbw": 1, "busbw": 2}.get(name, 3)] = token
        else:
            cells[name] = token
    return _row(cells.get("size", ""), cells.get("count", "0"), cells.get("type", ""), cells.get("redop", ""), cells.get("root"), groups, layout)


def _row(size: str, count: str, datatype: str, reduce_op: str, root: str | None, cells: list[list[str]], layout: Layout) -> Row | str:
    if not re.fullmatch(r"\d+(\.\d+)?", size) or not re.fullmatch(r"\d+", count):
        return f"size is {size!r} and count {count!r}; they should be whole numbers"
    if datatype and datatype.lower() not in DATATYPES:
        return f"type is {datatype!r}; known are {', '.join(DATATYPES[:12])} ..."
    if root is not None and not re.fullmatch(r"-?\d+", root):
        return f"root is {root!r}; it should be a rank or -1"
    if is_number(reduce_op):
        return f"redop is {reduce_op!r}; it should be a word"
    groups = []
    for k, (time, algorithm, bus, *error) in enumerate(cells):
        values = [_value(token) for token in (time, algorithm, bus)]
        if None in values:
            return f"time, algbw and busbw are {time!r}, {algorithm!r} and {bus!r}; they should be numbers"
        t, a, b = (value or 0.0 for value in values)
        seconds = t * layout.time
        expected = float(size) * layout.size / seconds if seconds > 0 else 0.0
        slack = 0.55 * _unit(algorithm) * layout.bandwidth + expected * (0.55 * _unit(time) / t if t > 0 else 0.0) + 1e-3 * expected
        in_place = layout.in_place[min(k, len(layout.in_place) - 1)]
        bus_slack = 0.55 * _unit(bus) * layout.bandwidth
        groups.append(Group(seconds, a * layout.bandwidth, b * layout.bandwidth, error[0] if error else "", slack, bus_slack, in_place))
    found = int(root) if root is not None else None
    return Row(float(size) * layout.size, float(count), datatype_name(datatype), reduce_op, found, tuple(groups)) if groups else "there is no time"


def _value(token: str) -> float | None:
    if token.upper() == "N/A":
        return math.nan
    return float(token) if is_number(token) else None


def _unit(token: str) -> float:
    """Value of the last digit printed, 0.01 of "3.14"."""
    match = re.fullmatch(r"[+-]?\d*\.?(\d*)(?:[eE]([+-]?\d+))?", token)
    return 10.0 ** (int(match[2] or 0) - len(match[1])) if match else 0.0
