"""`calibrate kernels`: fit measured kernels of a chip. `validate kernels`: compare kernel libraries with measured kernels, refitting nothing."""

from typing import Annotated, Any

import typer

from ._fits import JSON_OUT, check_json_out, check_target, deliver, note_left_out, notes, score, validation_document
from ._show import JSON

FILES = Annotated[list[str], typer.Argument(metavar="FILE...", help="Measured kernels, .csv, .csv.gz or .parquet.", show_default=False)]
SYSTEM = Annotated[str | None, typer.Option("--system", metavar="TOML", help="The chip, for GPUs that are not in the catalog.")]
NO_CORRECTION = Annotated[bool, typer.Option("--no-correction", help="Closed forms only, without the fitted networks.")]


def calibrate_kernels(
    files: FILES,
    system: SYSTEM = None,
    no_correction: NO_CORRECTION = False,
    out: Annotated[str | None, typer.Option("--out", metavar="JSON", help="Write the fitted libraries, for `validate kernels --kernels JSON`.")] = None,
    system_out: Annotated[str | None, typer.Option("--system-out", metavar="TOML", help="Write the machine as a system, for `--system TOML`.")] = None,
    as_json: JSON = False,
) -> None:
    """Fit kernel libraries to your own measurements: error on shapes held out, before and after, and what was learned."""
    from rich.progress import Progress

    from . import _output

    check_target(out, ".json")
    check_target(system_out, ".toml")
    _output.start()
    from ..io import read_kernels

    table = read_kernels(list(files))
    notes(table.remarks)
    from ..calibrate import kernels

    with Progress(console=_output.err(), transient=True) as bar:
        task = bar.add_task("fitting", total=None)
        report = kernels.calibrate_kernels(
            table, system=system, system_out=system_out, correction=not no_correction,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if out is not None:
        report.write(out)
    if as_json:
        _output.print_json({"sets": report.sets, "skipped": report.skipped, "file": out, "system": system_out})
        return
    console = _output.out()
    console.print(_sets_table(report.sets))
    for one in report.sets[:3]:
        learned = sorted(one["determined"], key=lambda name: -one["determined"][name])
        text = ", ".join(f"{name} {one['constants'][name]:.3g}" for name in learned if one["determined"][name] > 0.5)
        console.print(f"{one['library']} {one['datatype']} {'/'.join(one['ops'])} determine: {text or 'no constant alone'}", markup=False, style="dim")
    note_left_out(report.skipped)
    if out is not None:
        console.print(f"wrote {out}; use it with validate kernels --kernels {out}" + (f" --system {system_out}" if system_out else ""), markup=False)
    if system_out is not None:
        console.print(f"wrote {system_out} and its efficiencies beside it; use it with --system {system_out}", markup=False)


def validate_kernels(
    files: FILES,
    json_out: JSON_OUT = None,
    kernels: Annotated[str | None, typer.Option("--kernels", metavar="JSON", help="Libraries written by `calibrate kernels`, in place of the shipped.")] = None,
    system: SYSTEM = None,
    no_correction: NO_CORRECTION = False,
) -> None:
    """Score kernel libraries on measured kernels, beside the plain roofline; nothing is refitted."""
    from . import _output

    check_json_out(json_out)
    _output.start()
    from ..io import read_kernels

    table = read_kernels(list(files))
    notes(table.remarks)
    from ..calibrate.kernels import validate_kernels as validate

    result = validate(table, fitted=kernels, system=system, correction=not no_correction)
    deliver(as_document(result), json_out, lambda: _print_validation(result))


def as_document(result: dict[str, Any]) -> dict[str, Any]:
    """The agreed keys of a validation, its groups with their baselines."""
    groups = [{"group": g["group"], "n": g["n"], **score(g), "baseline": score(g["baseline"])} for g in result["groups"]]
    return validation_document(result) | {"groups": groups}


def _sets_table(sets: Any) -> Any:
    from ..report._tables import percent_of, table

    result = table("Mean error on shapes held out")
    result.add_column("kernels", overflow="fold")
    for name in ("rows", "held", "roofline", "before", "after", "median", "p90", "bias"):
        result.add_column(name, justify="right", no_wrap=True)
    for one in sets:
        after = one["after"]
        numbers = [percent_of(x) for x in (one["roofline"]["mean"], one["before"]["mean"], after["mean"], after["median"], after["p90"], after["bias"])]
        held = str(one["held_out"]) if one["held_out"] else "none"
        label = " ".join((one["chip"], ", ".join(one["ops"]), one["datatype"], one["library"]))
        result.add_row(label, str(one["rows"]), held, *numbers)
    return result


def _print_validation(result: dict[str, Any]) -> None:
    from ..report._tables import percent_of, table
    from . import _output

    console = _output.out()
    console.print(f"{result['n_modelled']} of {result['n_rows']} rows modelled", markup=False)
    scores = table("Error against measured kernels; bias is signed, other errors are absolute")
    for name in ("", "rows", "median", "mean", "p90", "bias", "roofline mean"):
        scores.add_column(name, justify="left" if name == "" else "right", overflow="fold")
    cells = lambda item: [percent_of(item[name]) for name in ("median", "mean", "p90", "bias")]
    scores.add_row("all", str(result["n_modelled"]), *cells(result["error"]), percent_of(result["baseline"]["mean"]))
    for group in result["groups"]:
        label = " ".join(str(value) for value in group["group"].values())
        scores.add_row(label, str(group["n"]), *cells(group), percent_of(group["baseline"]["mean"]))
    console.print(scores)
    note_left_out(result["skipped"])
    unmeasured = sum(g["n"] for g in result["groups"] if not g["source"].startswith("fit"))
    if unmeasured:
        _output.note(f"{unmeasured} rows are of libraries that were not measured on that chip: predicted from those like them")
