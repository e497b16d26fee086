"""Measured training runs as a table: one row per run, plain cells, every cell checked, no model.

A run says what was trained (a model name or an architecture), on what (accelerator, number of devices), how (parallelism,
precision, batch) and what was measured (seconds per step, memory). `calibration/published/README.md` describes each column;
only `num_devices`, `accelerator` and the model are required, an empty cell means "not known" and is read as None.
What a missing value should be taken as is decided by whoever models the run, not here.
"""
import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .._files import write_atomic
from ._tables import Row, RunFileError, csv_bytes, from_records, parquet_bytes, read_csv, read_parquet

_Cell = str | float | bool | None


def _column(kind: str, should_be: str, default: _Cell = None) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "should_be": should_be})


def _text() -> Any:
    return _column("text", "text", "")


def _count(what: str) -> Any:
    return _column("count", f"a whole number of {what}, 1 or more")


def _amount(what: str) -> Any:
    return _column("amount", f"a positive number of {what}")


def _flag(what: str) -> Any:
    return _column("flag", f"1 ({what}), 0 (not) or empty")


@dataclasses.dataclass(frozen=True)
class Run:
    """One measured training run. Numbers are floats in the unit of the name, None where not known; text is "" then.

    Attributes:
      id: name of the row, unique in its table.
      source: where the figure was published; its first word (or the authors of a paper) is the repository.
      global_batch: sequences per optimizer step. [1]
      micro_batch: sequences per device and forward pass; below 1 where context parallelism splits one. [1]
      seq_len: positions per sequence, padding included. [1]
      ffn_hidden: width of the feed-forward block; of one expert where `experts` is given. [1]
      dp: total data-parallel size, `num_devices / (tp * pp * cp)`; expert parallelism lies inside it. [1]
      step_time_s: one optimizer step. [s]
      tokens_per_s_per_device: all positions, often derived from the step time: do not fit both. [1/s]
      tflops_per_device, mfu_pct: as printed, in the source's own convention; not comparable between sources.
      peak_mem_gb: largest memory of a device, 1e9 B where the source is clear about it.
      notes: free text and the markers read by `left_out`, `weight`, `repairs` and `treat_as`.
    """
    id: str = _text()
    source: str = _text()
    year: float | None = _count("years")
    model_name: str = _text()
    family: str = _text()
    params_b: float | None = _amount("1e9 parameters")
    active_params_b: float | None = _amount("1e9 parameters")
    layers: float | None = _count("layers")
    hidden: float | None = _count("channels")
    heads: float | None = _count("heads")
    kv_heads: float | None = _count("key-value heads")
    ffn_hidden: float | None = _count("channels")
    vocab: float | None = _count("tokens")
    seq_len: float | None = _count("positions")
    gated_mlp: bool | None = _flag("gated, such as SwiGLU")
    experts: float | None = _column("count or 0", "a whole number of experts, 0 for a dense model")
    topk: float | None = _column("count or 0", "a whole number of experts per token, 0 for a dense model")
    accelerator: str = _text()
    gpus_per_node: float | None = _count("devices")
    num_devices: float | None = _count("devices")
    intra_node_net: str = _text()
    inter_node_net: str = _text()
    precision: str = _text()
    global_batch: float | None = _count("sequences")
    micro_batch: float | None = _amount("sequences")
    dp: float | None = _count("data-parallel ranks")
    tp: float | None = _count("tensor-parallel ranks")
    pp: float | None = _count("pipeline stages")
    vpp: float | None = _count("chunks per pipeline stage")
    cp: float | None = _count("context-parallel ranks")
    ep: float | None = _count("expert-parallel ranks")
    sp: bool | None = _flag("sequence parallel")
    zero_stage_or_fsdp: str = _text()
    recompute: str = _text()
    flash_attention: bool | None = _flag("fused attention")
    framework: str = _text()
    step_time_s: float | None = _amount("seconds")
    tokens_per_s_per_device: float | None = _amount("tokens per second")
    tflops_per_device: float | None = _amount("TFLOP/s")
    mfu_pct: float | None = _column("percentage", "a percentage above 0, at most 100")
    peak_mem_gb: float | None = _amount("gigabytes")
    notes: str = _text()

    @property
    def group(self) -> tuple[str, str]:
        """(source repository, model name): rows of one group are kept together when data are split."""
        return source_repository(self.source), self.model_name

    @property
    def left_out(self) -> str | None:
        """Why the row is not for fitting or scoring, from `LEFT OUT: reason` in the notes; None if it is."""
        return next(iter(_markers(self.notes, "LEFT OUT")), None)

    @property
    def weight(self) -> float:
        """Weight of the row in a fit: 0 if left out, w from `WEIGHT w: reason` in the notes, else 1. [1]"""
        if self.left_out is not None:
            return 0.0
        found = re.search(r"(?:^|; )WEIGHT ([0-9.]+): ", self.notes)
        return float(found[1]) if found else 1.0

    @property
    def repairs(self) -> tuple[str, ...]:
        """Repairs of the row, each as `column old->new: reason`."""
        return _markers(self.notes, "REPAIRED")

    @property
    def treat_as(self) -> dict[str, str]:
        """Columns whose printed value a model should replace, from `TREAT AS column value: reason` in the notes."""
        return dict(text.split(":", 1)[0].split(" ", 1) for text in _markers(self.notes, "TREAT AS"))


_FIELDS = {field.name: field for field in dataclasses.fields(Run)}
COLUMNS = tuple(_FIELDS)
ARCHITECTURE_COLUMNS = ("layers", "hidden", "heads", "ffn_hidden", "vocab")
_REQUIRED = ("num_devices", "accelerator")


@dataclasses.dataclass(frozen=True)
class RunTable:
    """Runs in file order, and what was not used. A sequence of `Run`.

    Attributes:
      runs: the rows that passed every check.
      rejected: (row number, id, reason) of the others; empty when read with `strict=True`.
      ignored_columns: columns of the file that no run has.
      hints: one sentence per ignored column that looks like a known one misspelt.
    """
    runs: tuple[Run, ...]
    rejected: tuple[tuple[int, str, str], ...] = ()
    ignored_columns: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, index):
        return self.runs[index]


def read_runs(path: str | os.PathLike, strict: bool = True) -> RunTable:
    """Read measured runs from `.csv`, `.csv.gz` or `.parquet`.

    Args:
      path: the file. A CSV file is UTF-8, comma-separated, with column names in its first row.
      strict: True refuses the whole file for one bad cell; False leaves bad rows out and lists them in `rejected`.
    Returns:
      The runs. Row numbers in messages count as a spreadsheet does: the header is row 1 (Parquet: the first row is 1).
    Raises:
      FileNotFoundError: no such file.
      RunFileError: the file cannot be read as a table, lacks a required column, or, if strict, has a bad row.
    """
    name = os.fspath(path)
    if not os.path.exists(name):
        raise FileNotFoundError(f"{name}: no such file (looked in {os.path.abspath(os.path.dirname(name) or '.')}).")
    if os.path.isdir(name):
        raise RunFileError([f"{name} is a folder; give one .csv, .csv.gz or .parquet file in it."])
    if name.lower().endswith(".parquet"):
        return _checked(*read_parquet(name), name, strict)
    if name.lower().endswith((".csv", ".csv.gz")):
        return _checked(*read_csv(name), name, strict)
    raise RunFileError([f"{name}: the ending {Path(name).suffix!r} is not known; it should be .csv, .csv.gz or .parquet. "
                        "Rename the file, or save the table as CSV."])


def runs_from_records(records: Any, strict: bool = True, name: str = "records") -> RunTable:
    """Runs from a list of dicts, a pandas DataFrame or a pyarrow Table, checked as `read_runs` does.

    Args:
      records: the rows. A dict may leave out what it does not know. NaN in a DataFrame is an empty cell, as pandas means it.
      strict: as in `read_runs`.
      name: what messages call the table. Row numbers start at 1.
    Raises:
      TypeError: `records` is none of these.
      RunFileError: as in `read_runs`.
    """
    return _checked(*from_records(records, name), name, strict)


def write_runs(path: str | os.PathLike, runs: Iterable[Run]) -> None:
    """Write runs to `.csv`, `.csv.gz` or `.parquet`, whole or not at all. `read_runs` gives the same runs back.

    Args:
      path: the file to create or replace; its ending chooses the format.
      runs: a `RunTable` or any runs.
    Raises:
      ValueError: unknown ending.
      TypeError: an item is not a `Run`.
    """
    name, rows = os.fspath(path), list(runs)
    stranger = next((row for row in rows if not isinstance(row, Run)), None)
    if stranger is not None:
        raise TypeError(f"write_runs: got a {type(stranger).__name__}; every item should be a Run. Make runs from dicts with "
                        "runs_from_records.")
    table = [tuple(getattr(row, column) for column in COLUMNS) for row in rows]
    if name.lower().endswith(".parquet"):
        kinds = [_FIELDS[column].metadata["kind"] for column in COLUMNS]
        write_atomic(path, parquet_bytes(COLUMNS, kinds, table))
    elif name.lower().endswith((".csv", ".csv.gz")):
        write_atomic(path, csv_bytes(COLUMNS, table, compress=name.lower().endswith(".gz")))
    else:
        raise ValueError(f"{name}: the ending should be .csv, .csv.gz or .parquet.")


def source_repository(source: str) -> str:
    """The repository a `source` cell names: its first word, or `Author et al.` of a paper.

    All rounds `mlcommons/training_results_v*` are one repository, and so are the two spellings of NVIDIA/Megatron-LM, because
    the same software stands behind them.
    """
    paper = re.match(r"\S+ et al\.?", source)
    if paper:
        return paper[0].rstrip(".") + "."
    first = source.split(maxsplit=1)[0].rstrip(",;:") if source.strip() else ""
    first = re.sub(r"^(mlcommons/training_results)_v.*", r"\1", first)
    return "NVIDIA/Megatron-LM" if first == "Megatron-LM" else first


def _markers(notes: str, word: str) -> tuple[str, ...]:
    return tuple(re.findall(rf"(?:^|; ){word}:? (.*?)(?=; |$)", notes, flags=re.DOTALL))


def _checked(header: list[str], rows: list[Row], name: str, strict: bool) -> RunTable:
    """Check header and rows; a row given as text is one that could not be split into cells, and why."""
    ignored, hints = _check_header(header, name)
    used = [column for column in header if column in _FIELDS]
    runs, rejected, where = [], [], {}
    for number, row in rows:
        if isinstance(row, str):
            rejected.append((number, "", [row]))
            continue
        values, problems = _check_row(row, used)
        label = values.get("id") or f"row {number}"
        if label in where:
            if strict:
                problems.append(f"id {label!r} is also in row {where[label]}. Ids should be unique: change one, or leave the "
                                "column out.")
            else:
                label = next(f"{label}#{k}" for k in range(2, 10**9) if f"{label}#{k}" not in where)
        where.setdefault(label, number)
        if problems:
            rejected.append((number, label, problems))
        else:
            runs.append(Run(**(values | {"id": label})))
    if strict and rejected:
        raise RunFileError(f"{name}:row {number}{f' (id {label})' if label and label != f'row {number}' else ''}: {problem}"
                           for number, label, problems in rejected for problem in problems)
    if not runs and not rejected:
        raise RunFileError([f"{name} has column names but no rows. Add one row per run."])
    return RunTable(tuple(runs), tuple((number, label, " ".join(problems)) for number, label, problems in rejected),
                    tuple(ignored), tuple(hints))


def _check_header(header: list[str], name: str) -> tuple[list[str], list[str]]:
    """Ignored columns and hints about them; raises if a required column is missing."""
    ignored = [column for column in header if column not in _FIELDS]
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice:
        raise RunFileError(f"{name}: the column {column!r} appears twice in the header. Remove or rename one."
                           for column in twice)
    missing = [column for column in _REQUIRED if column not in header]
    problems = [f"{name}: the column {column!r} is missing. {_nearest(column, ignored)}" for column in missing]
    without = [column for column in ARCHITECTURE_COLUMNS if column not in header]
    if "model_name" not in header and without:
        problems.append(f"{name}: neither 'model_name' nor the architecture is there: {', '.join(without)} missing as well. "
                        f"{_nearest('model_name', ignored)}")
    if problems:
        raise RunFileError(problems)
    return ignored, [hint for column in ignored if (hint := _hint(column, header))]


def _nearest(column: str, candidates: list[str]) -> str:
    from rapidfuzz import fuzz, process, utils
    close = process.extract(column, candidates, scorer=fuzz.WRatio, processor=utils.default_process, limit=2, score_cutoff=60)
    if close:
        return f"Closest columns in the file: {', '.join(repr(text) for text, _, _ in close)}. Rename the right one {column!r}."
    return f"Add it; columns in the file: {', '.join(candidates[:8]) or 'none unknown'}{' ...' * (len(candidates) > 8)}."


def _hint(column: str, header: list[str]) -> str | None:
    from rapidfuzz import fuzz, process, utils
    close = process.extractOne(column, [known for known in COLUMNS if known not in header], scorer=fuzz.ratio,
                               processor=utils.default_process, score_cutoff=75)
    return close and f"The column {column!r} was ignored; if it means {close[0]!r}, rename it so."


def _check_row(row: Mapping[str, Any], used: list[str]) -> tuple[dict[str, _Cell], list[str]]:
    """Values by column, and what is wrong with them."""
    values, problems = {}, []
    for column in used:
        kind, should_be = _FIELDS[column].metadata["kind"], _FIELDS[column].metadata["should_be"]
        cell = row.get(column)
        cell = cell.strip() if isinstance(cell, str) else cell
        if kind == "text":
            values[column] = "" if cell is None else str(cell)
            continue
        if cell is None or cell == "":
            values[column] = None
            continue
        value = _flag_value(cell) if kind == "flag" else _number(cell)
        wrong = value is None or (kind != "flag" and not _fits(value, kind))
        if wrong:
            problems.append(f"{column} is {cell!r}; it should be {should_be}.{_advice(cell, kind)}")
        values[column] = None if wrong else value
    seen = {problem.split(" ", 1)[0] for problem in problems}
    problems += [f"{column} is empty; it should be {_FIELDS[column].metadata['should_be']}." for column in _REQUIRED
                 if column not in seen and values.get(column) in (None, "")]
    without = [column for column in ARCHITECTURE_COLUMNS if values.get(column) is None and column not in seen]
    if not values.get("model_name") and without:
        problems.append(f"model_name is empty and so is {', '.join(without)}. Name a model, or fill the architecture.")
    return values, problems


def _number(cell: Any) -> float | None:
    if isinstance(cell, bool):
        return None
    if isinstance(cell, str) and not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", cell, flags=re.ASCII):
        return None
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _fits(value: float, kind: str) -> bool:
    if kind in ("count", "count or 0"):
        return value.is_integer() and value >= (1 if kind == "count" else 0)
    return value > 0 and (kind != "percentage" or value <= 100)


def _flag_value(cell: Any) -> bool | None:
    text = str(cell).lower()
    return True if text in ("1", "1.0", "true", "yes") else False if text in ("0", "0.0", "false", "no") else None


def _advice(cell: Any, kind: str) -> str:
    """How to mend a cell that is not a number; empty when the expectation says it all."""
    text = str(cell)
    if kind == "flag":
        return ""
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        return " Write it without thousands separators."
    if re.fullmatch(r"[+-]?\d+,\d+", text):
        return " Write a decimal point, not a comma."
    if re.fullmatch(r"[+-]?[\d.]+ ?[%A-Za-z/]+", text):
        return " Write the number alone; the unit is in the column name."
    if text.lower() in ("nan", "na", "n/a", "none", "null", "-", "?", "unknown", "inf", "-inf", "infinity"):
        return " Leave the cell empty if it is not known."
    return ""
