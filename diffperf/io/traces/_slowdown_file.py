"""Overlap slowdowns as a CSV table: what `diffperf trace --measurements` writes to `overlap.csv` and `diffperf calibrate overlap` reads."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..._files import write_atomic
from .._tables import RunFileError, csv_bytes, read_csv
from ._slowdown import Slowdown

COLUMNS = ("kernel", "blocks", "threads", "overlapped_share", "time_alone_us", "time_with_us", "count_alone", "count_with", "collective", "channels",
           "channel_threads", "pairing", "rank", "gpu", "num_sms")  # fmt: skip
NEEDED = ("kernel", "blocks", "time_alone_us", "time_with_us", "channels", "channel_threads")
_NAMES = {"time_alone_us": "time_alone_s", "time_with_us": "time_with_s", "gpu": "accelerator"}
_DEFAULTS = dict(threads=0, overlapped_share=1.0, count_alone=1, count_with=1, collective="", pairing="position", rank=-1, accelerator="", num_sms=0)
_PAIRINGS = ("position", "name")


def write_slowdowns(path: str | os.PathLike[str], rows: Sequence[Slowdown]) -> None:
    """Writes pairs as CSV in `COLUMNS`, times in microseconds, whole or not at all."""
    cells = [(row.kernel, row.blocks, row.threads, round(row.overlapped_share, 4), round(row.time_alone_s * 1e6, 4), round(row.time_with_s * 1e6, 4),
              row.count_alone, row.count_with, row.collective, row.channels, row.channel_threads, row.pairing, row.rank, row.accelerator, row.num_sms)
             for row in rows]  # fmt: skip
    write_atomic(path, csv_bytes(COLUMNS, cells, compress=os.fspath(path).endswith(".gz")))


def read_slowdowns(path: str | os.PathLike[str]) -> list[Slowdown]:
    """Pairs of a CSV file as `write_slowdowns` writes it, gzipped or not; only `NEEDED` columns must be there.

    Raises:
      OSError: when the file cannot be read.
      RunFileError: for a file that is no such table, with the row, the column and the value of what is wrong.
    """
    name = os.fspath(path)
    header, rows = read_csv(name)
    missing = [column for column in NEEDED if column not in header]
    if missing:
        raise RunFileError([f"{name} has no column {', '.join(missing)}. `diffperf trace FILE... --measurements FOLDER` writes such a table: overlap.csv."])
    found, problems = [], []
    for number, cells in rows:
        if isinstance(cells, str):
            problems.append(f"{name}, line {number}: {cells}")
            continue
        try:
            found.append(_slowdown(cells))
        except ValueError as error:
            problems.append(f"{name}, line {number}: {error}")
    if problems:
        raise RunFileError(problems)
    return found


def _slowdown(cells: Mapping[str, Any]) -> Slowdown:
    values: dict[str, Any] = dict(_DEFAULTS)
    for column in COLUMNS:
        text = (cells.get(column) or "").strip()
        if not text and column in NEEDED:
            raise ValueError(f"{column} is empty.")
        if text:
            values[_NAMES.get(column, column)] = _PARSE[column](column, text)
    return Slowdown(**values)


def _number(column: str, text: str, least: float = 0.0, scale: float = 1.0, whole: bool = False) -> float | int:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}; it should be a number.") from None
    if not (math.isfinite(value) and value >= least) or (whole and value != int(value)):
        raise ValueError(f"{column} is {text}; it should be {'whole' if whole else 'finite'} and at least {least:g}.")
    return int(value) if whole else value * scale


def _time(column: str, text: str) -> float | int:
    value = _number(column, text, scale=1e-6)
    if value == 0:
        raise ValueError(f"{column} is {text}; it should be above 0.")
    return value


def _pairing(column: str, text: str) -> str:
    if text not in _PAIRINGS:
        raise ValueError(f"{column} is {text!r}; it should be one of {', '.join(_PAIRINGS)}.")
    return text


def _count(column: str, text: str) -> float | int:
    return _number(column, text, least=-1 if column == "rank" else 0, whole=True)


_PARSE: dict[str, Callable[[str, str], Any]] = {
    **{column: _count for column in ("blocks", "threads", "count_alone", "count_with", "channels", "channel_threads", "rank", "num_sms")},
    **{column: lambda column, text: text for column in ("kernel", "collective", "gpu")},
    "time_alone_us": _time, "time_with_us": _time, "overlapped_share": _number, "pairing": _pairing,
}  # fmt: skip
