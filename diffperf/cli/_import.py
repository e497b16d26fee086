"""`import aiconfigurator`: kernel timings of an installed package, as a file for `calibrate kernels` and `validate kernels`."""

import dataclasses
from collections import Counter
from typing import Annotated, Any

import typer

from ._fits import check_target
from ._show import JSON


def import_aiconfigurator(
    system: Annotated[str | None, typer.Option("--system", help="System in the package, such as h200_sxm; left out, the systems are listed.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the rows to a .parquet, .csv or .csv.gz file.")] = None,
    op: Annotated[list[str] | None, typer.Option("--op", help="Operator or table, such as gemm; repeat for several. Default: all that have a model.")] = None,
    library: Annotated[list[str] | None, typer.Option("--library", help="Library, such as vllm; repeat for several. Default: all.")] = None,
    as_json: JSON = False,
) -> None:
    """Read the kernel timings of an installed aiconfigurator-core package: what is there, or, with --out, a table in our columns."""
    from . import _output

    if out is not None:
        check_target(out)
        if system is None:
            raise ValueError("--out needs --system: one file holds the timings of one system. Leave both out to list the systems.")
    if system is None:
        _list_tables(as_json)
        return
    from ..io import read_aiconfigurator, write_kernels

    if out is not None and not out.lower().endswith((".csv", ".csv.gz", ".parquet")):
        raise ValueError(f"{out}: the ending should be .csv, .csv.gz or .parquet.")
    table = read_aiconfigurator(system, ops=op or (), libraries=library or ())
    if out is not None:
        write_kernels(out, table)
    if as_json:
        _output.print_json({"groups": _counts(table), "rejected": [dataclasses.asdict(item) for item in table.rejected], "remarks": table.remarks, "file": out})
        return
    console = _output.out()
    console.print(_counts_table(_counts(table)))
    for item in table.rejected:
        console.print(f"left out {item.count:,} rows of {item.op or 'no op'}: {item.reason} ({item.examples[0]})", markup=False, soft_wrap=True)
    console.print(f"{len(table):,} rows read, {table.num_rejected:,} left out", markup=False)
    if out is not None:
        console.print(f"wrote {out}", markup=False)


def _list_tables(as_json: bool) -> None:
    from ..io import aiconfigurator_tables
    from ..report._tables import table
    from . import _output

    versions: dict[tuple[str, str, str], list[str]] = {}
    for item in aiconfigurator_tables():
        versions.setdefault((item.system, item.op, item.library), []).append(item.version)
    if as_json:
        _output.print_json([dict(system=system, op=op, library=library, versions=found) for (system, op, library), found in versions.items()])
        return
    result = table("Kernel timings in the installed package")
    for name in ("system", "op", "library", "versions"):
        result.add_column(name, overflow="fold")
    for (system, op, library), found in versions.items():
        result.add_row(system, op, library, ", ".join(found))
    _output.out().print(result)


def _counts(kernels: Any) -> list[dict[str, Any]]:
    counts = Counter(zip(kernels.op.tolist(), kernels.datatype.tolist(), kernels.library.tolist()))
    return [dict(op=op, datatype=datatype, library=library, rows=count) for (op, datatype, library), count in sorted(counts.items())]


def _counts_table(groups: list[dict[str, Any]]) -> Any:
    from ..report._tables import table

    result = table("Rows by operator, datatype and library")
    for name in ("op", "datatype", "library"):
        result.add_column(name, overflow="fold")
    result.add_column("rows", justify="right")
    for group in groups:
        result.add_row(group["op"], group["datatype"], group["library"], f"{group['rows']:,}")
    return result
