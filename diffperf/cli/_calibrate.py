"""`calibrate runs`: adapt a stack to the user's own runs. `validate runs`: compare the shipped fit with measured runs, refitting nothing."""

import math
from typing import Annotated, Any

import typer

from ._fits import JSON_OUT, check_json_out, check_target, constants_table, deliver, groups_table, notes, validation_document
from ._show import JSON

_MOST = 8  # constants to print where there is no better measure


def calibrate_runs(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Measured runs, .csv, .csv.gz or .parquet, one row or more.", show_default=False)],
    family: Annotated[str, typer.Option("--family", help="Code base whose constants come first: mcore, fsdp, maxtext, ... or none.")],
    stack: Annotated[str, typer.Option("--stack", help="Name of the software stack to make.")],
    candidates: Annotated[str | None, typer.Option("--candidates", metavar="FILE", help="Runs you could do next, without step times.")] = None,
    propose: Annotated[int, typer.Option("--propose", min=0, help="How many of them to propose.")] = 3,
    out: Annotated[str | None, typer.Option("--out", metavar="TOML", help="Write the stack, for `--stack TOML`.")] = None,
    as_json: JSON = False,
) -> None:
    """Adapt a software stack to runs of your own cluster: before and after for every row, what was learned, and what to run next."""
    from . import _output

    check_target(out, ".toml")
    _output.start()
    from ..io import read_runs

    table = read_runs(file)
    notes(f"{file}: {hint}" for hint in table.hints)
    wished = () if candidates is None else tuple(read_runs(candidates))
    from .. import calibrate

    report = calibrate.calibrate_runs(table, family="" if family == "none" else family, stack=stack, candidates=wished, propose=propose)
    if out is not None:
        report.write(out)
    if as_json:
        names = ("rows", "constants", "unidentified", "proposals", "summary", "meta")
        _output.print_json({name: getattr(report, name) for name in names} | {"file": out})
        return
    console = _output.out()
    console.print(_rows_table(report.rows))
    console.print(_constants_table(report.constants))
    if report.unidentified:
        named = ", ".join(report.unidentified[:_MOST]) + (", ... (--json lists all)" if len(report.unidentified) > _MOST else "")
        console.print(f"{len(report.unidentified)} of {len(report.constants)} are not determined by these runs: {named}", markup=False, style="dim")
    if report.proposals:
        console.print(_proposals_table(report.proposals))
    for line in report.summary:
        console.print(line, markup=False)
    if out is not None:
        console.print(f"wrote {out}; use it with --stack {out}", markup=False)


def validate_runs(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Measured runs, .csv, .csv.gz or .parquet.", show_default=False)],
    json_out: JSON_OUT = None,
) -> None:
    """Score the shipped fit on measured runs: errors beside those of a constant-efficiency roofline; nothing is refitted."""
    from . import _output

    check_json_out(json_out)
    _output.start()
    from .. import calibrate

    result = calibrate.validate_runs(file)
    deliver(validation_document(result, ("error", "baseline", "memory")), json_out, lambda: _print_validation(result))


def _interval(row: Any, stem: str) -> str:
    from .._units import time_text

    low, high = row.get(f"{stem}_low_s"), row.get(f"{stem}_high_s")
    if row.get(f"{stem}_s") is None:
        return "-"
    between = "" if low is None or high is None else f" ({time_text(low)} - {time_text(high)})"
    return time_text(row[f"{stem}_s"]) + between


def _rows_table(rows: Any) -> Any:
    from .._units import time_text
    from ..report._tables import table

    result = table("Your runs: measured, predicted before and after (80% interval)")
    result.add_column("run", overflow="fold")
    result.add_column("measured", justify="right", no_wrap=True)
    for name in ("before", "after"):
        result.add_column(name, justify="right", overflow="fold")
    for name in ("error", "sigma", "weight"):
        result.add_column(name, justify="right", no_wrap=True)
    result.add_column("note", overflow="fold", style="dim")
    for row in rows:
        measured, after = row.get("measured_s"), row.get("after_s")
        error = f"{after / measured - 1:+.1%}" if measured and after else "-"
        numbers = ["-" if row.get(key) is None else f"{row[key]:{form}}" for key, form in (("standardised_residual", "+.1f"), ("weight", ".2f"))]
        shown = time_text(measured) if measured else "-"
        result.add_row(str(row.get("id", "")), shown, _interval(row, "before"), _interval(row, "after"), error, *numbers, str(row.get("note") or ""))
    return result


def _constants_table(rows: Any) -> Any:
    from .._units import quantity
    from ..report import unit_of

    moved = lambda row: abs(math.log(row["value"] / row["prior"])) if row["value"] > 0 and row["prior"] > 0 else 0.0
    learned = [row for row in rows if row.get("learned")]
    shown = sorted(learned or rows, key=lambda row: -moved(row))[: max(len(learned), _MOST)]
    title = "Constants that these runs narrowed" if learned else "No single constant is narrowed by these runs; those that moved most"
    return constants_table(title, shown, lambda name, value: quantity(value, unit_of(f"stack.{name}")))


def _proposals_table(rows: Any) -> Any:
    from ..report._tables import percent_of, table

    result = table("Run next, to learn most")
    result.add_column("run", overflow="fold")
    result.add_column("error now", justify="right")
    result.add_column("error after", justify="right")
    result.add_column("why", overflow="fold")
    for row in rows:
        result.add_row(str(row.get("id")), percent_of(row.get("expected_error_now")), percent_of(row.get("expected_error_after")), str(row.get("reason", "")))
    return result


def _print_validation(result: dict[str, Any]) -> None:
    from ..report import accuracy_table
    from ..report._tables import percent_of
    from . import _output

    console = _output.out()
    console.print(f"{result['n_rows']:,} rows, {result['n_modelled']:,} modelled", markup=False)
    for reason, count in sorted(result["skipped"].items(), key=lambda item: -item[1]):
        console.print(f"  skipped {count:,}: {reason}", markup=False)
    if not result["n_modelled"]:
        return
    console.print(accuracy_table([("step time", result["n_modelled"], result["error"], result["baseline"])], "Error of the step time"))
    memory = result.get("memory") or {}
    if memory.get("n", 1) and memory.get("median") is not None:
        console.print("peak memory: " + ", ".join(f"{key} {percent_of(memory.get(key))}" for key in ("median", "mean", "p90", "bias")), markup=False)
    console.print(groups_table(result["groups"]))
