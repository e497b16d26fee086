"""Measured kernel times as a table of columns: one row per timed kernel call, names and units made one, every row checked, no model.

Reads CSV, gzipped CSV and Parquet files, data frames, Arrow tables and dicts, whatever their spelling (`_kernel_names.py`). Rows that cannot be used are
left out and counted with examples; a file whose times are in another unit than its header says is refused. Which flagged rows to fit is decided elsewhere.
"""

import dataclasses
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ._kernel_names import DERIVED, MAY_BE_ZERO, NEEDS, OP_COLUMNS, SIZES, TEXTS, TIMES, UNCHECKED, canonical_datatype, canonical_library, canonical_op
from ._kernel_table import TEXT_FIELDS, KernelTable, Rejection
from ._kernel_units import unit_problem, work
from ._tables import RunFileError, read_csv

_HIGHEST_FP32 = 1.65e14  # FLOP/s; AMD Instinct MI300X datasheet: 163.4 TFLOP/s in its matrix units, more than any other chip of the catalog
_EXAMPLES = 3


def read_kernels(source: Any, *, strict: bool = False, name: str = "records") -> KernelTable:
    """Read kernel timings.

    Args:
      source: the path of a `.csv`, `.csv.gz` or `.parquet` file; a list of paths, which are read and joined; a pandas DataFrame; a pyarrow Table; a
        mapping of columns; or a list of dicts. Needed are the columns gpu, op, a datatype, a time such as `time_us`, and the sizes of each operator.
      strict: True refuses the whole table for one bad row; False leaves bad rows out and lists them in `rejected`.
      name: what messages call a table that is not a file.
    Returns:
      The rows that passed every check. Rows equal in every column, time included, are counted and kept once; equal rows with other times are repeats.
    Raises:
      FileNotFoundError: no such file.
      TypeError: `source` is none of these.
      RunFileError: not a readable table, a column missing for an operator, times in another unit than the header says, or, if strict, a bad row.
    """
    if isinstance(source, (str, os.PathLike)):
        return _read_file(os.fspath(source), strict)
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, (str, os.PathLike)) for item in source):
        return KernelTable.concat([_read_file(os.fspath(item), strict) for item in source])
    columns = _arrow_columns(source, name)
    return _normalised(columns, np.arange(1, 1 + len(next(iter(columns.values())))), name, strict)


def _read_file(name: str, strict: bool) -> KernelTable:
    import pyarrow
    import pyarrow.parquet

    if not os.path.exists(name):
        raise FileNotFoundError(f"{name}: no such file (looked in {os.path.abspath(os.path.dirname(name) or '.')}).")
    if os.path.isdir(name):
        raise RunFileError([f"{name} is a folder; give the .csv, .csv.gz or .parquet files in it."])
    if name.lower().endswith(".parquet"):
        try:
            columns = _arrow_columns(pyarrow.parquet.read_table(name), name)
        except (pyarrow.ArrowException, OSError) as error:
            raise RunFileError([f"{name} is not a readable Parquet file: {error}."]) from None
        return _normalised(columns, np.arange(1, 1 + len(next(iter(columns.values())))), name, strict)
    if name.lower().endswith((".csv", ".csv.gz")):
        return _normalised(*_csv_columns(name), name, strict)
    raise RunFileError([f"{name}: the ending {Path(name).suffix!r} is not known; it should be .csv, .csv.gz or .parquet."])


def _csv_columns(name: str) -> tuple[dict[str, Any], np.ndarray]:
    """Columns and line numbers of a CSV file. The fast reader takes what is plain; the rest goes to the one that names each mistake."""
    import pyarrow
    import pyarrow.csv

    try:
        with gzip.open(name) if name.lower().endswith(".gz") else open(name, "rb") as file:
            data = file.read()
        # One block: column types are guessed from the first block, and must hold for the rest.
        table = pyarrow.csv.read_csv(io.BytesIO(data), pyarrow.csv.ReadOptions(block_size=max(len(data) + 1, 1024)))
        plain = data.count(b"\n") + (not data.endswith(b"\n")) == table.num_rows + 1 and table.num_columns > 1
    except (pyarrow.ArrowException, gzip.BadGzipFile, EOFError, zlib.error, OverflowError):
        plain = False
    if plain:
        return _arrow_columns(table, name), np.arange(2, table.num_rows + 2)
    header, rows = read_csv(name)
    broken = [f"{name}:{number}: {row}" for number, row in rows if isinstance(row, str)]
    if broken:
        raise RunFileError(broken)
    if not rows:
        raise RunFileError([f"{name} has column names but no rows."])
    cells = pyarrow.table({column: [row[column] for _, row in rows] for column in header})
    return _arrow_columns(cells, name), np.array([number for number, _ in rows])


def _arrow_columns(source: Any, name: str) -> dict[str, Any]:
    """Lower-case column name -> Arrow array, from whatever holds a table."""
    import pyarrow

    try:
        if isinstance(source, pyarrow.Table):
            table = source
        elif hasattr(source, "to_dict") and hasattr(source, "columns") and hasattr(source, "iloc"):  # pandas
            table = pyarrow.table({str(key): pyarrow.array(source[key], from_pandas=True) for key in source.columns})
        elif isinstance(source, Mapping):
            table = pyarrow.table({str(key): pyarrow.array(value, from_pandas=True) for key, value in source.items()})
        elif isinstance(source, (list, tuple)) and all(isinstance(row, Mapping) for row in source):
            keys = dict.fromkeys(key for row in source for key in row)
            table = pyarrow.table({str(key): pyarrow.array([row.get(key) for row in source], from_pandas=True) for key in keys})
        else:
            raise TypeError(
                f"{name} is a {type(source).__name__}; it should be a path, a list of paths, a pandas DataFrame, a pyarrow Table, a mapping of columns or a "
                "list of dicts."
            )
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise RunFileError([f"{name} is not a table of plain columns: {error}"]) from None
    columns: dict[str, Any] = {}
    for header, column in zip(table.column_names, table.columns):
        key = header.strip().lower()
        if key in columns:
            raise RunFileError([f"{name}: the column {key!r} appears twice (case does not matter). Remove or rename one."])
        columns[key] = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if not columns or not table.num_rows:
        raise RunFileError([f"{name} has no rows. Give one per timed kernel."])
    return columns


class _Rejected:
    """Which rows are out and why; the first reason counts."""

    def __init__(self, count: int):
        self.out = np.zeros(count, bool)
        self.reasons: list[tuple[str, np.ndarray, str, Any]] = []

    def add(self, mask: np.ndarray, reason: str, column: str, values: Any) -> None:
        new = np.flatnonzero(mask & ~self.out)
        if len(new):
            self.out[new] = True
            self.reasons.append((reason, new, column, values))

    def report(self, name: str, lines: np.ndarray, op: np.ndarray, gpu: np.ndarray) -> Iterator[Rejection]:
        for reason, rows, column, values in self.reasons:
            pairs: dict[tuple[str, str], list[int]] = {}
            for i in rows:
                pairs.setdefault((op[i], gpu[i]), []).append(i)
            for (of_op, of_gpu), at in pairs.items():
                shown = (f"{name}:{lines[i]}: {column} is {_shown(values[i])}" for i in at[:_EXAMPLES])
                yield Rejection(reason, of_op, of_gpu, len(at), tuple(shown))


def _shown(value: Any) -> str:
    """A cell as it reads in the file."""
    if hasattr(value, "as_py"):
        value = value.as_py()
    return "empty" if value is None or value == "" or value != value else repr(value) if isinstance(value, str) else f"{value:g}"


def _normalised(columns: dict[str, Any], lines: np.ndarray, name: str, strict: bool) -> KernelTable:
    count = len(lines)
    missing = [wanted for wanted in ("gpu", "datatype") if not any(alias in columns for alias in TEXTS[wanted])]
    if not any(column in columns for column in TIMES):
        missing.append("time_us")
    if not any(column in columns for column in OP_COLUMNS) and not {"m", "n", "k"} <= set(columns):
        missing.append("op")
    if missing:
        there = ", ".join(columns)
        raise RunFileError(f"{name}: the column {column!r} is missing; columns there: {there}. Add it or rename the right one." for column in missing)
    remarks: list[str] = []
    rejected = _Rejected(count)

    raw = {wanted: _text(columns, aliases, count) for wanted, aliases in TEXTS.items()}
    op, op_name = _operators(columns, count, name, remarks)
    sizes, unreadable = {}, []
    for size, aliases in SIZES.items():
        if any(alias in columns for alias in aliases):
            sizes[size], bad, cells = _number(columns, aliases, count)
            if bad.any():
                unreadable.append((size, bad, cells))
    batches = sizes.get("batch", np.full(count, np.nan))
    op = np.where((op == "matmul") & (batches > 1), "batched_matmul", op)
    _fill_sizes(op, sizes, columns, raw["config"], count)

    time_column = next(column for column in TIMES if column in columns)
    value, bad, cells = _number(columns, (time_column,), count)
    time_s = value * TIMES[time_column]
    rejected.add(bad, "the time is not a number", time_column, cells)
    rejected.add(np.isnan(value), "no time", time_column, value)
    rejected.add(~(np.isfinite(value) & (value > 0)), "the time is not positive and finite", time_column, value)
    for wanted in ("gpu", "datatype"):
        rejected.add(raw[wanted] == "", f"no {wanted}", wanted, raw[wanted])
    rejected.add(op == "", "no op", "op", op)
    for size, bad, cells in unreadable:
        rejected.add(bad, "a size is not a number", size, cells)
    _check_sizes(op, sizes, rejected, columns, name, count)

    datatype, output = _mapped(raw["datatype"], canonical_datatype)
    library, version = _mapped(raw["library"], canonical_library)
    if not any(alias in columns for alias in TEXTS["library"]) and (stem := re.match(r"[a-z]+", Path(name).name.lower())) and name.lower() != "records":
        library[:] = "torch" if "torch" in columns else stem[0]
        remarks.append(f"{name}: no column names the library; taken as {library[0]!r}.")
    texts = {key: column for key, column in raw.items() if key not in TEXT_FIELDS and (column != "").any()}
    texts["datatype_name"] = np.where(raw["datatype_name"] != "", raw["datatype_name"], np.where(raw["datatype"] != datatype, raw["datatype"], ""))
    texts["library_version"] = np.where(version != "", version, _mapped(raw["library_version"], lambda text: (re.sub(r"^[pv](?=\d)", "", text), ""))[0])
    texts["out_datatype"] = np.where(output != "", output, _mapped(raw["out_datatype"], canonical_datatype)[0])
    for key in ("kv_cache_datatype", "quant_datatype", "gemm_datatype"):
        if key in texts:
            texts[key] = _mapped(texts[key], canonical_datatype)[0]
    texts = {key: column for key, column in {"op_name": op_name, **texts}.items() if (column != "").any()}

    kept = ~rejected.out
    flops, nbytes = work(sizes, op)
    timed = kept & (op != "quantize_computescale")  # published as the difference of two times, down to nothing
    problem = unit_problem(time_s[timed], flops[timed], nbytes[timed], raw["gpu"][timed], datatype[timed])
    if problem is not None:
        raise RunFileError([
            f"{name}: the times of the column {time_column!r} cannot be in its unit: {problem}. Rename the column after its unit (time_s, time_ms, time_us or "
            "time_ns), or convert the values."
        ])  # fmt: skip
    _name_tf32(datatype, library, raw["gpu"], flops, time_s, kept, name, remarks)

    report = tuple(rejected.report(name, lines, op, raw["gpu"]))
    if strict and report:
        raise RunFileError(f"{item.examples[0]} ({item.reason}; {item.count} such rows of {item.op or 'no op'})." for item in report)
    strangers = [column for column in columns if column not in _known_columns()]
    if strangers:
        remarks.append(f"{name}: columns not used: {', '.join(strangers)}.")
    table = KernelTable(raw["gpu"], op, datatype, library, raw["kernel_source"], time_s, raw["flag"], sizes, texts, np.zeros(count, np.int64), lines, (name,))
    table = table.take(kept)
    sizes = {key: column for key, column in table.sizes.items() if not np.isnan(column).all()}
    table = dataclasses.replace(table, sizes=sizes, rejected=report, remarks=tuple(remarks))
    for item in report:
        remarks.append(f"{name}: {item.count} rows of {item.op or 'no op'} left out: {item.reason} ({item.examples[0]}).")
    return _without_duplicates(dataclasses.replace(table, remarks=tuple(remarks)))


def _known_columns() -> set[str]:
    return {*OP_COLUMNS, *TIMES, *DERIVED, "h", *(alias for table in (SIZES, TEXTS) for aliases in table.values() for alias in aliases)}


def _text(columns: dict[str, Any], aliases: Iterable[str], count: int) -> np.ndarray:
    """The first non-empty text of each row among these columns; objects shared between equal cells."""
    import pyarrow

    result = np.full(count, "", object)
    for alias in aliases:
        if alias in columns and (result == "").any():
            coded = columns[alias].cast(pyarrow.string()).dictionary_encode()
            words = np.array([*(word.strip() for word in coded.dictionary.to_pylist()), ""], object)
            found = words[coded.indices.fill_null(len(words) - 1).to_numpy(zero_copy_only=False)]
            result = np.where(result == "", found, result)
    return result


def _mapped(column: np.ndarray, function: Any) -> tuple[np.ndarray, np.ndarray]:
    """`function`, which gives two words, of each word; called once per distinct word."""
    words, code = _codes(column)
    pairs = np.array([function(word) for word in words], object).reshape(-1, 2)
    return pairs[code, 0], pairs[code, 1]


def _codes(column: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The distinct words of a column, and the index of each row's word among them."""
    import pyarrow

    coded = pyarrow.array(column, pyarrow.string()).dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _membership(op: np.ndarray) -> Any:
    """A function of operator names: which rows have one of them."""
    words, code = _codes(op)
    return lambda *names: np.array([word in names for word in words], bool)[code]


def _number(columns: dict[str, Any], aliases: Iterable[str], count: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """The first number of each row among these columns, NaN for none; where a cell is not a number; and the cells, for messages."""
    import pyarrow

    result, bad, cells = np.full(count, np.nan), np.zeros(count, bool), None
    for alias in aliases:
        if alias not in columns:
            continue
        column = columns[alias]
        if pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type):
            found = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
        else:
            texts = _text(columns, (alias,), count)
            first, second = _mapped(texts, _parsed)
            found, wrong = first.astype(float), second == "bad"
            bad, cells = bad | wrong, texts
        result = np.where(np.isnan(result), found, result)
    return result, bad, cells


def _parsed(text: str) -> tuple[Any, str]:
    if text == "":
        return np.nan, ""
    try:
        return float(text), ""
    except ValueError:
        return np.nan, "bad"


def _operators(columns: dict[str, Any], count: int, name: str, remarks: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Canonical operator, and the file's own word: the component where a table calls all small kernels `memory_bound`."""
    own, fine = _text(columns, ("op", "op_name"), count), _text(columns, ("op_name", "component"), count)
    if not any(column in columns for column in ("op", "op_name")):
        own[:] = "matmul"
        remarks.append(f"{name}: no column names the operator; rows with m, n and k are taken as matmul.")
    op = _mapped(own, lambda word: (canonical_op(word), ""))[0]
    small = own == "memory_bound"
    if small.any():
        known = _mapped(fine, lambda word: (canonical_op(word), ""))[0]
        op = np.where(small & _membership(known)(*NEEDS), known, op)
    return op, np.where(fine != "", fine, own)


def _fill_sizes(op: np.ndarray, sizes: dict[str, np.ndarray], columns: dict[str, Any], config: np.ndarray, count: int) -> None:
    """Sizes that a table implies or keeps under another name; then blanks those that an operator does not have."""
    get = lambda name: sizes.setdefault(name, np.full(count, np.nan))

    def fill(name: str, rows: np.ndarray, values: Any) -> None:
        if rows.any():
            sizes[name] = np.where(rows & np.isnan(get(name)), values, get(name))

    is_in = _membership(op)
    rowwise = is_in("elementwise", "layernorm", "rmsnorm", "softmax", "reduction")
    if "h" in columns:  # rows x channels, as B and H
        fill("m", rowwise, get("batch"))
        fill("n", rowwise, _number(columns, ("h",), count)[0])
    attention, mla = is_in("attention_prefill", "attention_decode", "attention_backward", "encoder_attention"), is_in("mla_prefill", "mla_decode")
    if (config != "").any() and (attention | mla).any():  # query heads - key-value heads - width, or heads - rank - rotary width
        for word in dict.fromkeys(config[attention | mla].tolist()):
            if found := re.fullmatch(r"(\d+)-(\d+)-(\d+)", word):
                numbers, here = [float(number) for number in found.groups()], config == word
                for size, value in zip(("n_q_heads", "n_kv_heads", "head_dim"), numbers):
                    fill(size, here & attention, value)
                fill("num_heads", here & mla, numbers[0])
    if (attention | mla).any():
        fill("n_q_heads", attention, get("num_heads"))
        fill("n_kv_heads", is_in("encoder_attention"), get("num_heads"))
        fill("q_len", is_in("attention_decode", "mla_decode"), 1.0)
        fill("kv_len", attention | mla, get("q_len") + np.nan_to_num(get("step")))
        fill("batch_size", is_in("mla_prefill"), 1.0)
    for name in sizes:
        if name not in UNCHECKED:
            foreign = is_in(*(known for known, (needed, extra) in NEEDS.items() if name not in (*needed, *extra)))
            sizes[name] = np.where(foreign, np.nan, sizes[name])


def _check_sizes(op: np.ndarray, sizes: dict[str, np.ndarray], rejected: _Rejected, columns: dict[str, Any], name: str, count: int) -> None:
    """Rejects rows without a size that their operator needs, and sizes that are not whole numbers of at least 1.

    Raises:
      RunFileError: no row of an operator has a size that it needs.
    """
    absent = []
    for known in dict.fromkeys(op[~rejected.out].tolist()):
        rows = (op == known) & ~rejected.out
        needed = NEEDS.get(known, ((), ()))[0]
        without = [size for size in needed if size not in sizes or np.isnan(sizes[size][rows]).all()]
        if without:
            absent.append(
                f"{name}: {known} needs {', '.join(needed)}; no row of it has {', '.join(without)}. Columns there: {', '.join(columns)}. Add "
                f"{'it' if len(without) == 1 else 'them'}, or rename the right column."
            )
        for size in needed:
            if size not in without:
                rejected.add(rows & np.isnan(sizes[size]), "a size is missing", size, sizes[size])
    if absent:
        raise RunFileError(absent)
    for size, values in sizes.items():
        if size not in UNCHECKED:
            least = 0 if size in MAY_BE_ZERO else 1
            with np.errstate(invalid="ignore"):
                rejected.add(~np.isnan(values) & ~(np.isfinite(values) & (values >= least)), f"a size is below {least} or infinite", size, values)
                rejected.add(~np.isnan(values) & (values != np.floor(values)), "a size is not a whole number", size, values)


def _name_tf32(datatype: Any, library: Any, gpu: Any, flops: Any, time_s: Any, kept: Any, name: str, remarks: list[str]) -> None:
    """32-bit inputs multiplied faster than any chip's fp32 units can were rounded first: tf32, or bf16 passes on a TPU. Changes `datatype`."""
    single = kept & (datatype == "fp32") & (flops > 0)
    for g, of in dict.fromkeys(zip(gpu[single].tolist(), library[single].tolist())):
        rows = single & (gpu == g) & (library == of)
        best = float(np.quantile(flops[rows] / time_s[rows], 0.95))
        if best > _HIGHEST_FP32:
            datatype[rows] = "tf32"
            reach = f"{best / 1e12:.0f} TFLOP/s, more than any fp32 unit"
            remarks.append(f"{name}: {int(rows.sum())} rows of {of} on {g} called fp32 reach {reach}; taken as tf32.")


def _without_duplicates(table: KernelTable) -> KernelTable:
    """Drops all but the first of rows equal in every column; counts them and the repeats, whose times differ."""
    key = np.column_stack([
        *(_codes(column)[1] for column in (*(getattr(table, name) for name in TEXT_FIELDS), *table.texts.values())),
        *(np.nan_to_num(column, nan=-1.0).view(np.int64) for size, column in table.sizes.items() if size not in UNCHECKED),
        table.time_s.view(np.int64),
    ])  # fmt: skip
    void = lambda block: np.ascontiguousarray(block).view(np.dtype((np.void, block.shape[1] * 8))).ravel()
    _, first = np.unique(void(key), return_index=True)
    dropped = len(table) - len(first)
    first = np.sort(first)
    repeats = len(first) - len(np.unique(void(key[first, :-1])))
    lines = []
    if dropped:
        again = np.setdiff1d(np.arange(len(table)), first)[0]
        lines.append(f"{table.files[0]}: {dropped} exact duplicates dropped (the first is line {table.line[again]}).")
    if repeats:
        lines.append(f"{table.files[0]}: {repeats} rows repeat a kernel with another time; kept.")
    if not lines:
        return table
    return dataclasses.replace(table.take(first) if dropped else table, remarks=(*table.remarks, *lines))
