"""Kernel timings out of an installed `aiconfigurator-core` package (or the older `aiconfigurator`), as a `KernelTable`.

The package keeps one table per system, library, version and operator, `systems/data/<system>/.../<library>/<version>/<table>_perf.parquet` (older ones:
`.txt` with CSV inside), with `latency` in milliseconds. Only its files are read; nothing of it is imported or run. Leaves out its collectives.
"""

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ._kernels import KernelTable, _arrow_columns, _csv_columns, read_kernels
from ._tables import RunFileError

_PACKAGES = ("aiconfigurator_core", "aiconfigurator")
_INSTALL = "Install it with `pip install aiconfigurator-core`"
# Table of the package -> its operator here. Any other kernel table can be asked for by its own name, and keeps it as the name of its operator.
_TABLES = {
    "gemm": "matmul",
    "context_attention": "attention_prefill",
    "generation_attention": "attention_decode",
    "encoder_attention": "encoder_attention",
    "context_mla": "mla_prefill",
    "generation_mla": "mla_decode",
    "mla_bmm": "mla_bmm",
    "moe": "moe_ffn",
    "computescale": "quantize_computescale",
    "scale_matrix": "quantize_scale_matrix",
}
_COLLECTIVES = ("nccl", "oneccl", "custom_allreduce", "moe_a2a", "trtllm_alltoall", "wideep_deepep_ll", "wideep_deepep_normal")


@dataclasses.dataclass(frozen=True)
class AiconfiguratorTable:
    """One table of the package.

    Attributes:
      system: such as "h200_sxm".
      table: the package's name of the table, such as "gemm".
      op: the operator it becomes, as `--op` takes it.
      library, version: what was timed, such as "vllm" and "0.24.0".
      path: the file.
    """

    system: str
    table: str
    op: str
    library: str
    version: str
    path: Path


def aiconfigurator_tables(system: str | None = None) -> list[AiconfiguratorTable]:
    """The kernel tables of the installed package, of one system or of all, sorted.

    Raises:
      ValueError: the package is not installed, holds no data, or has none for this system; the message lists the systems it has.
    """
    data, package = _data_directory()
    systems = sorted(folder.name for folder in data.iterdir() if folder.is_dir() and any(_files(folder)))
    if system is not None and system not in systems:
        raise ValueError(f"system is {system!r}; {package} has no kernel timings of it. It has {', '.join(systems) or 'none at all'}.")
    found = []
    for name in systems if system is None else [system]:
        for path in _files(data / name):
            table = path.stem.removesuffix("_perf")
            if table not in _COLLECTIVES:
                found.append(AiconfiguratorTable(name, table, _TABLES.get(table, table), path.parent.parent.name, path.parent.name, path))
    return sorted(found, key=lambda item: (item.system, item.table, item.library, item.version))


def read_aiconfigurator(system: str, *, ops: Iterable[str] = (), libraries: Iterable[str] = ()) -> KernelTable:
    """Kernel timings of one system from the installed package.

    Args:
      system: the package's name of it, such as "h200_sxm"; `aiconfigurator_tables()` lists all.
      ops: operators as in `AiconfiguratorTable.op`, or names of tables; none means matmul, attention, MLA, MoE and quantisation.
      libraries: such as "vllm"; none means all.
    Returns:
      The rows; `gpu` is the name of the system, and `files` are named by their place in the package.
    Raises:
      ValueError: the package is not installed or lacks the system, operator or library; the message lists what there is.
      RunFileError: a table of the package cannot be read.
    """
    tables = aiconfigurator_tables(system)
    ops, libraries = tuple(ops), tuple(libraries)
    known_ops, known_libraries = {name for item in tables for name in (item.op, item.table)}, {item.library for item in tables}
    for what, wanted, there in (("op", ops, known_ops), ("library", libraries, known_libraries)):
        unknown = [word for word in wanted if word not in there]
        if unknown:
            raise ValueError(f"{what} is {unknown[0]!r}; the tables of {system} have {', '.join(sorted(there))}.")
    chosen = [item for item in tables if (item.op in ops or item.table in ops) or (not ops and item.table in _TABLES)]
    chosen = [item for item in chosen if not libraries or item.library in libraries]
    if not chosen:
        raise ValueError(f"{system} has no table of {', '.join(ops) or 'any known operator'} by {', '.join(libraries) or 'any library'}.")
    return KernelTable.concat([_read(item) for item in chosen])


def _read(item: AiconfiguratorTable) -> KernelTable:
    import pyarrow
    import pyarrow.parquet

    name = f"{item.system}/{item.table}/{item.library}/{item.version}"
    if item.path.suffix == ".parquet":
        try:
            columns = _arrow_columns(pyarrow.parquet.read_table(item.path), name)
        except (pyarrow.ArrowException, OSError) as error:
            raise RunFileError([f"{item.path} is not a readable Parquet file: {error}. {_INSTALL} anew."]) from None
    else:
        columns, _ = _csv_columns(str(item.path))
    count = len(next(iter(columns.values())))
    if "latency" not in columns:
        raise RunFileError([f"{item.path}: no column `latency`; columns there: {', '.join(columns)}. This version of the package is not known here."])
    columns["time_ms"] = columns.pop("latency")
    for column, value in (("gpu", item.system), ("op", item.op), ("framework", item.library), ("version", item.version)):
        columns[column] = pyarrow.repeat(pyarrow.scalar(value), count)
    return read_kernels(pyarrow.table(columns), name=name)


def _files(folder: Path) -> list[Path]:
    return [path for ending in ("parquet", "txt") for path in folder.rglob(f"*_perf.{ending}")]


def _data_directory() -> tuple[Path, str]:
    """The folder of the tables, and what the package calls itself; found without importing the package."""
    seen = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            data, shown = Path(place) / "systems" / "data", package.replace("_", "-")
            try:
                shown += f" {importlib.metadata.version(shown)}"
            except importlib.metadata.PackageNotFoundError:
                pass
            if data.is_dir():
                return data, shown
            seen.append(f"{shown} at {place}")
    if seen:
        raise ValueError(f"{' and '.join(seen)} has no folder systems/data with kernel timings. {_INSTALL}.")
    raise ValueError(f"neither of the packages aiconfigurator-core and aiconfigurator is installed in this Python. {_INSTALL} and run this again.")
