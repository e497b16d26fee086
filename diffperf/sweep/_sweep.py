"""Predictions over a grid of any numbers: one compilation, equal blocks, one block of results in memory at a time."""

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..estimate import BatchStep
from ..estimate._batch import BLOCK, BlockResult
from ..estimate._paths import path_names, slots_of
from ..hardware import System
from ..parallel import Plan
from ..stack import Stack
from ..workload import Transformer
from ._axes import Axis, read_axes

if TYPE_CHECKING:
    import pyarrow as pa

# Column -> how it is read from an estimate, and the factor into the unit that the name says.
_COLUMNS = {
    "step_time_s": ("step_time", 1.0),
    "tokens_per_s": ("tokens_per_s", 1.0),
    "tokens_per_s_per_device": ("tokens_per_s_per_device", 1.0),
    "mfu": ("mfu", 1.0),
    "hfu": ("hfu", 1.0),
    "peak_memory_gb": ("peak_memory", 1e-9),
    "peak_stage": ("peak_stage", 1.0),
    "energy_j": ("energy", 1.0),
    "cost_usd": ("cost", 1.0),
    "lower_bound_s": ("lower_bound", 1.0),
    "feasible": ("feasible", None),
}
QUANTITIES = ("step_time_s", "tokens_per_s", "mfu", "peak_memory_gb", "energy_j", "cost_usd", "feasible")
_ROWS_IN_MEMORY = 20_000_000
_ROW_GROUP = 2**17


def sweep(
    model: Transformer,
    system: System,
    plan: Plan,
    stack: Stack,
    axes: Mapping[str, Any],
    *,
    mode: Literal["product", "zip"] = "product",
    quantities: Sequence[str] = QUANTITIES,
    gradients: Sequence[str] = (),
    out: str | os.PathLike[str] | None = None,
    block: int = BLOCK,
) -> "pa.Table | Path":
    """Predicts one training step for every row of a grid.

    `sweep(model, system, plan, stack, {"plan.micro_batch_size": [1, 2, 4], "system.scale_out.bandwidth": np.geomspace(1e9, 1e11, 50)})` has 150 rows.
    A row changes what its axes name and nothing else: a swept `tensor_parallel` leaves `data_parallel` and `sequence_parallel` as they are, unless
    their axis is "auto", for all devices of the system and for on exactly when `tensor_parallel > 1`. Rows that cannot run have `feasible` false.

    Args:
      axes: values by dotted path: numbers of model, system, plan and stack in SI units, all kinds of layer at once where the path names none,
        or words of `make_plan` (`plan.recompute`, `plan.zero_stage`, `plan.precision`, `plan.schedule`).
      mode: "product" for all combinations, the last axis fastest; "zip" for axes of equal length, row by row.
      quantities: result columns; "breakdown" and "memory" stand for all their parts.
      gradients: paths for which a column `elasticity.PATH` holds d ln step time / d ln number.
      out: file to write, `.parquet` or `.csv`; replaced only when complete. None returns a table.
      block: rows evaluated at once; memory grows with it, not with the grid. More suits an accelerator.
    Returns:
      The table, or the path written.
    Raises:
      ValueError: for an unknown path or quantity, a value out of range, axes that do not fit each other, or a grid too large to hold without `out`.
    """
    names = path_names((model, system, plan, stack))
    found, automatic = read_axes(names, axes)
    rows = _count(found, mode)
    columns = _columns(quantities)
    slots = [slots_of(names, path) for path in dict.fromkeys(gradients)]
    gradients = tuple(dict.fromkeys(gradients))
    if sum(map(len, slots)) != len({slot for path in slots for slot in path}):
        raise ValueError(f"gradients holds paths that share numbers: {', '.join(gradients)}. Keep one of them.")
    writer = None if out is None else _Writer(Path(out))
    if writer is None and rows > _ROWS_IN_MEMORY:
        raise ValueError(f"the sweep has {rows:,} rows, too many for a table in memory. Pass out='FILE.parquet' to stream them.")
    if not block >= 1:
        raise ValueError(f"block is {block}; it should be at least 1.")
    batch = BatchStep(
        model, system, plan, stack, width=sum(len(axis.slots) for axis in found), block=int(block), elasticity_slots=slots,
        auto_data="plan.data_parallel" in automatic, auto_sequence="plan.sequence_parallel" in automatic,
    )  # fmt: skip
    tables = _tables(batch, found, mode, rows, columns, gradients, "plan.data_parallel" in automatic)
    if writer is not None:
        return writer.write(tables)
    import pyarrow as pa

    return pa.concat_tables(list(tables)).combine_chunks()


def _count(axes: Sequence[Axis], mode: str) -> int:
    lengths = {axis.path: len(axis.labels) for axis in axes}
    if mode == "product":
        return math.prod(lengths.values())
    if mode != "zip":
        raise ValueError(f"mode is {mode!r}; it should be 'product' or 'zip'.")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"mode 'zip' needs axes of equal length; these have {', '.join(f'{path}: {n}' for path, n in lengths.items())}.")
    return next(iter(lengths.values()))


def _columns(quantities: Sequence[str]) -> dict[str, tuple[str, float | None]]:
    from ..estimate import Breakdown
    from ..parallel import StageMemory

    groups = {
        "breakdown": {f"breakdown_{name}_s": (f"breakdown.{name}", 1.0) for name in Breakdown.__dataclass_fields__},
        "memory": {f"memory_{name}_gb": (f"memory.{name}", 1e-9) for name in StageMemory._fields},
    }
    known = _COLUMNS | {name: entry for group in groups.values() for name, entry in group.items()}
    columns = {}
    for name in (quantities,) if isinstance(quantities, str) else quantities:
        if name not in known and name not in groups:
            raise ValueError(f"quantities holds {name!r}; it should hold some of {', '.join([*_COLUMNS, *groups])}.")
        columns |= groups.get(name) or {name: known[name]}
    return columns


def _tables(batch: BatchStep, axes, mode, rows, columns, gradients, show_data) -> "Iterator[pa.Table]":
    """Results in order; the device works on one block while the one before it becomes a table."""
    pending: Any = None
    for start in range(0, rows, batch.block):
        index = np.arange(start, min(start + batch.block, rows))
        at = np.unravel_index(index, [len(axis.labels) for axis in axes]) if mode == "product" else [index] * len(axes)
        values = np.concatenate([axis.table[i].T for axis, i in zip(axes, at)])
        result = batch(np.concatenate([axis.slots for axis in axes]), values)
        if pending is not None:
            yield _table(axes, pending[0], pending[1], columns, gradients, show_data)
        pending = at, result
    yield _table(axes, pending[0], pending[1], columns, gradients, show_data)


def _table(axes: Sequence[Axis], at, result: BlockResult, columns, gradients, show_data: bool) -> "pa.Table":
    import pyarrow as pa

    rows = len(at[0])
    arrays = {axis.path: pa.array(axis.labels).take(pa.array(i)) for axis, i in zip(axes, at)}
    if show_data:
        arrays["plan.data_parallel"] = pa.array(np.asarray(result.data_parallel)[:rows])
    for name, (path, factor) in columns.items():
        leaf = result.estimate
        for part in path.split("."):
            leaf = getattr(leaf, part)
        values = np.asarray(leaf)[:rows]
        arrays[name] = pa.array(values if factor in (None, 1.0) else values * values.dtype.type(factor))
    slopes = np.asarray(result.elasticities)
    for row, path in enumerate(gradients):
        arrays[f"elasticity.{path}"] = pa.array(slopes[row, :rows])
    return pa.table(arrays)


class _Writer:
    """Streams tables into a temporary file beside the target and renames it when complete."""

    def __init__(self, path: Path):
        if path.suffix not in (".parquet", ".csv"):
            raise ValueError(f"out is {str(path)!r}; its name should end in .parquet or .csv.")
        if not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"out is {str(path)!r}; the folder {path.absolute().parent} does not exist. Create it first.")
        if path.is_dir():
            raise IsADirectoryError(f"out is {str(path)!r}, which is a folder; give the name of a file in it.")
        self._path = path

    def write(self, tables: "Iterator[pa.Table]") -> Path:
        import pyarrow as pa
        from pyarrow import csv, parquet

        make = {".parquet": parquet.ParquetWriter, ".csv": csv.CSVWriter}[self._path.suffix]
        target = Path(os.path.realpath(self._path))
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "xb") as file:
                sink: Any = None
                held, size = [], 0
                try:
                    for table in tables:
                        sink = sink or make(file, table.schema)
                        held, size = [*held, table], size + table.num_rows
                        if size >= _ROW_GROUP:
                            sink.write_table(pa.concat_tables(held).combine_chunks())
                            held, size = [], 0
                    if held:
                        sink.write_table(pa.concat_tables(held).combine_chunks())
                finally:
                    if sink is not None:
                        sink.close()
                if not file.closed:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return self._path
