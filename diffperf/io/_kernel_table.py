"""The table that measured kernel times are read into, and its writer. A set of columns of one length, with where each row came from."""

import dataclasses
import gzip
import io
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .._files import write_atomic
from ._kernel_names import SIZES, TEXTS

KERNEL_SIZES = tuple(SIZES)
KERNEL_TEXTS = ("op_name", *(name for name in TEXTS if name not in ("gpu", "datatype", "library", "kernel_source", "flag")))
TEXT_FIELDS = ("gpu", "op", "datatype", "library", "kernel_source", "flag")


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Rows left out for one reason.

    Attributes:
      reason: why, in words.
      op: operator of these rows, canonical.
      gpu: device of these rows, as the file writes it.
      count: how many.
      examples: up to three of them, as `file:line: column is value`.
    """

    reason: str
    op: str
    gpu: str
    count: int
    examples: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class KernelTable:
    """Kernel timings in columns of one length n. `table["m"]` gives any column; a size or a text that no row has is NaN or "" throughout.

    Attributes:
      gpu: device as the file writes it, object array of str, shape (n,). `diffperf.hardware.resolve_name` knows it.
      op: operator, canonical: matmul, batched_matmul, attention_prefill, ..., shape (n,). The file's own word is `table["op_name"]`.
      datatype: of the inputs: fp32, tf32, fp16, bf16, fp8, fp8_block, nvfp4, int8, int8_weight_only, ..., shape (n,).
      library: framework without its version, lower case, shape (n,).
      kernel_source: kernel or code path that ran, shape (n,).
      time_s: measured time, shape (n,). [s]
      flag: remarks of the file, "" for none, shape (n,).
      sizes: further numbers by name (`KERNEL_SIZES`), float64, shape (n,), NaN where a row has none. [1], except flops [FLOP] and bytes_min [B]
      texts: further texts by name (`KERNEL_TEXTS`), object arrays of str, shape (n,), "" where a row has none.
      file: index into `files`, shape (n,).
      line: line of a CSV file, its header being line 1, or row of another table, the first being 1, shape (n,).
      files: names of the tables read.
      rejected: rows left out, with the reason.
      remarks: what was done to the rows, one sentence each.
    """

    gpu: np.ndarray
    op: np.ndarray
    datatype: np.ndarray
    library: np.ndarray
    kernel_source: np.ndarray
    time_s: np.ndarray
    flag: np.ndarray
    sizes: Mapping[str, np.ndarray]
    texts: Mapping[str, np.ndarray]
    file: np.ndarray
    line: np.ndarray
    files: tuple[str, ...]
    rejected: tuple[Rejection, ...] = ()
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.time_s)

    def __getitem__(self, name: str) -> np.ndarray:
        if name in TEXT_FIELDS or name == "time_s":
            return getattr(self, name)
        if name in self.sizes:
            return self.sizes[name]
        if name in self.texts:
            return self.texts[name]
        if name in KERNEL_SIZES:
            return np.full(len(self), np.nan)
        if name in KERNEL_TEXTS:
            return np.full(len(self), "", object)
        raise KeyError(f"{name!r} is not a column of kernel tables. Columns: {', '.join((*TEXT_FIELDS, 'time_s', *KERNEL_SIZES, *KERNEL_TEXTS))}.")

    @property
    def source_row(self) -> tuple[str, ...]:
        """`file:line` of every row, for messages."""
        return tuple(f"{self.files[i]}:{line}" for i, line in zip(self.file, self.line))

    @property
    def num_rejected(self) -> int:
        """Rows left out, of whatever reason."""
        return sum(item.count for item in self.rejected)

    def take(self, rows: np.ndarray) -> "KernelTable":
        """The rows of a boolean mask or an index array, in its order; `rejected` and `remarks` stay."""
        at = np.asarray(rows)
        if at.dtype == bool and at.shape != (len(self),):
            raise ValueError(f"the mask has shape {at.shape}; it should be ({len(self)},), one entry per row.")
        at = at if at.dtype == bool else at.astype(np.intp)  # an empty list is float64
        mappings = {name: {key: column[at] for key, column in getattr(self, name).items()} for name in ("sizes", "texts")}
        return dataclasses.replace(self, **{name: getattr(self, name)[at] for name in (*TEXT_FIELDS, "time_s", "file", "line")}, **mappings)

    def select(self, **wanted: str | Iterable[str]) -> "KernelTable":
        """The rows whose text columns have the given values: `select(op="matmul", datatype=("bf16", "fp16"))`."""
        mask = np.ones(len(self), bool)
        for name, values in wanted.items():
            column, found = self[name], np.zeros(len(self), bool)
            for value in (values,) if isinstance(values, str) else values:
                found |= column == value
            mask &= found
        return self.take(mask)

    @staticmethod
    def concat(tables: Sequence["KernelTable"]) -> "KernelTable":
        """The rows of all tables, in order.

        Raises:
          ValueError: no table given.
        """
        if not tables:
            raise ValueError("concat got no tables; give at least one.")
        if len(tables) == 1:
            return tables[0]
        offsets = np.cumsum([0] + [len(table.files) for table in tables])
        columns = {name: np.concatenate([getattr(table, name) for table in tables]) for name in (*TEXT_FIELDS, "time_s", "line")}
        joined = {
            kind: {name: np.concatenate([table[name] for table in tables]) for name in names if any(name in getattr(table, kind) for table in tables)}
            for kind, names in (("sizes", KERNEL_SIZES), ("texts", KERNEL_TEXTS))
        }
        return KernelTable(
            **columns,
            **joined,
            file=np.concatenate([table.file + offset for table, offset in zip(tables, offsets)]),
            files=tuple(name for table in tables for name in table.files),
            rejected=tuple(item for table in tables for item in table.rejected),
            remarks=tuple(line for table in tables for line in table.remarks),
        )


def write_kernels(path: str | os.PathLike[str], table: KernelTable) -> None:
    """Write kernel timings to `.csv`, `.csv.gz` or `.parquet`, whole or not at all, under the names that `read_kernels` prefers; time in `time_us`.

    Args:
      path: the file to create or replace; its ending chooses the format.
      table: the rows; `read_kernels` gives them back. `rejected` and `remarks` are not written.
    Raises:
      ValueError: unknown ending.
    """
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    target = os.fspath(path)
    if not target.lower().endswith((".csv", ".csv.gz", ".parquet")):
        raise ValueError(f"{target}: the ending should be .csv, .csv.gz or .parquet.")
    used = lambda column: bool((~np.isnan(column)).any()) if column.dtype == float else bool((column != "").any())
    names = ("gpu", "op", "op_name", "datatype", "library", "library_version", "kernel_source")
    names = (*names, *KERNEL_SIZES, *(name for name in KERNEL_TEXTS if name not in names), "flag")
    columns = {name: table[name] for name in names if name in ("gpu", "op", "datatype") or used(table[name])}
    columns["time_us"] = table.time_s * 1e6
    arrow = pyarrow.table({name: pyarrow.array(column, from_pandas=column.dtype == float) for name, column in columns.items()})
    sink = io.BytesIO()
    if target.lower().endswith(".parquet"):
        pyarrow.parquet.write_table(arrow, sink)
    else:
        pyarrow.csv.write_csv(arrow, sink)
    data = sink.getvalue()
    write_atomic(path, gzip.compress(data, mtime=0) if target.lower().endswith(".gz") else data)
