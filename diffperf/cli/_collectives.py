"""`calibrate collectives`, `validate collectives`, and `nccl-tests`: fit links, compare the shipped fit with measurements, judge a log."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ._fits import JSON_OUT, check_json_out, check_target, constants_table, deliver, groups_table, notes, validation_document
from ._show import JSON

Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="nccl-tests or rccl-tests output, or CSV tables of collectives.", show_default=False)]
SystemName = Annotated[str, typer.Option("--system", metavar="NAME", help="Accelerator, where the file does not name it; see `diffperf show`.")]
Library = Annotated[str, typer.Option("--library", metavar="NAME", help='Library and version, such as "NCCL 2.8.4", where the file does not say.')]


def calibrate_collectives(
    files: Files,
    system: SystemName = "",
    library: Library = "",
    out: Annotated[str | None, typer.Option("--out", metavar="JSON", help="Write the constants, for `validate collectives --fit JSON`.")] = None,
    as_json: JSON = False,
) -> None:
    """Fit links, network and host to your own collectives: each constant with its interval, and the error before and after."""
    from . import _output

    check_target(out, ".json")
    _output.start()
    table = _read(files)
    from ..calibrate.collectives import calibrate_collectives as run

    result = run(table, system=system, library=library)
    if out is not None:
        result.write(out)
    if as_json:
        import dataclasses

        fits, engines = ([dataclasses.asdict(fit) for fit in found] for found in (result.fits, result.engines))
        _output.print_json({"fits": fits, "engines": engines, "skipped": result.skipped, "file": out})
        return
    for fit in result.fits:
        _print_fit(fit)
    if result.engines:
        _print_engines(result.engines)
    _note_skipped(result.skipped)
    if out is not None:
        _output.out().print(f"wrote {out}; use it with --fit {out}", markup=False)


def validate_collectives(
    files: Files,
    json_out: JSON_OUT = None,
    system: SystemName = "",
    library: Library = "",
    fit: Annotated[str | None, typer.Option("--fit", metavar="JSON", help="Constants that `calibrate collectives --out` wrote.")] = None,
) -> None:
    """Score the shipped fit on measured collectives beside plain alpha-beta; only one floor per source is found, and reported."""
    from . import _output

    check_json_out(json_out)
    constants = None if fit is None else _constants(fit)
    _output.start()
    table = _read(files)
    from ..calibrate.collectives import validate_collectives as run

    result = run(table, system=system, library=library, fit=constants)
    deliver(validation_document(result) | {"offsets": result["offsets"]}, json_out, lambda: _print_validation(result))


def nccl_tests(
    log: Annotated[str, typer.Argument(metavar="LOG", help="Output of nccl-tests or rccl-tests, as pasted.", show_default=False)],
    system: SystemName = "",
    library: Library = "",
    interconnect: Annotated[str, typer.Option("--interconnect", metavar="TEXT", help='NICs and network, such as "EFA 4x100G".')] = "",
    nodes: Annotated[float | None, typer.Option("--nodes", min=1, help="Hosts, where the log does not say.")] = None,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write the plot as one HTML file.")] = None,
    json_out: Annotated[str | None, typer.Option("--json", metavar="OUT", help="Write everything as JSON to OUT; - for stdout.")] = None,
) -> None:
    """Read an nccl-tests log: fitted links, expected against measured time of every size, and whether it is healthy."""
    from . import _output

    check_target(html, ".html")
    check_json_out(json_out)
    _output.start()
    import dataclasses

    import numpy as np

    from ..io import read_nccl_tests, write_atomic

    table = read_nccl_tests(log, nodes=nodes)
    notes(map(str, table.problems))
    if interconnect:
        table = dataclasses.replace(table, interconnect=np.array([interconnect] * len(table)))
    from ..calibrate.collectives import calibrate_collectives as fit_links
    from ..calibrate.collectives import judge_collectives

    verdicts = judge_collectives(table, system, library)
    fits = fit_links(table, system=system, library=library).fits
    document = {"fits": [dataclasses.asdict(fit) for fit in fits], "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts]}

    def show() -> None:
        for fit in fits:
            _print_fit(fit)
        for verdict in verdicts:
            _print_verdict(verdict)

    deliver(document, json_out, show)
    if html is not None:
        from ..report._collectives import verdict_page

        write_atomic(html, verdict_page(verdicts))
        _output.note(f"wrote {html}")


def _read(files: list[str]) -> Any:
    from ..io import read_collectives

    table = read_collectives(files)
    notes(map(str, table.problems), most=5)
    return table


def _constants(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}. Give a file that `calibrate collectives --out` wrote.") from None
    if not isinstance(found, dict) or not {"systems", "network"} <= set(found):
        raise ValueError(f"{path} holds no constants of collectives. Give a file that `calibrate collectives --out` wrote.")
    return found


def _note_skipped(skipped: Mapping[str, int]) -> None:
    notes(f"skipped {count:,}: {reason}" for reason, count in skipped.items())


def _print_fit(fit: Any) -> None:
    from .._units import time_text
    from ..report._tables import percent_of
    from . import _output

    console = _output.out()
    place = f"{fit.setting.system}, {fit.setting.nic_bandwidth / 1e9:.4g} GB/s of NICs per node, network {fit.setting.fabric}"
    learned = [row for row in fit.constants if row["learned"]]
    title = f"Fitted to {fit.rows} rows: {place}" if learned else f"No constant of {place} is narrowed by these rows"
    console.print(constants_table(title, learned, _quantity))
    before, after = percent_of(fit.before["median"]), percent_of(fit.after["median"])
    console.print(f"median error {before} with the shipped constants, {after} with these (on the rows they have seen)", markup=False)
    for name, floor in fit.floors.items():
        console.print(f"{name}: the host needs at least {time_text(floor)} per collective", markup=False)


def _print_engines(fits: Any) -> None:
    from ..report._tables import percent_of, table
    from . import _output

    shown = table("Kernels of engines: median error with the shipped constants and with these")
    shown.add_column("kernel", overflow="fold")
    for name in ("rows", "before", "after"):
        shown.add_column(name, justify="right", no_wrap=True)
    for fit in fits:
        shown.add_row(fit.name, f"{fit.rows:,}", percent_of(fit.before["median"]), percent_of(fit.after["median"]))
    _output.out().print(shown)


def _quantity(name: str, value: float) -> str:
    from .._units import quantity
    from ..calibrate.collectives._vector import SECONDS

    leaf = name.rsplit(".", 1)[-1].rsplit(": ", 1)[-1]
    if name in SECONDS or leaf == "floor":
        return quantity(value, "s")
    if leaf.endswith("bandwidth"):
        return quantity(value, "B/s")
    return quantity(value, "B" if leaf.endswith("bytes") else "1")


def _print_validation(result: dict[str, Any]) -> None:
    from .._units import time_text
    from ..report import accuracy_table
    from . import _output

    console = _output.out()
    console.print(f"{result['n_rows']:,} rows, {result['n_modelled']:,} modelled", markup=False)
    _note_skipped(result["skipped"])
    if not result["n_modelled"]:
        return
    title = "Error of the time; the baseline is alpha-beta through the smallest and largest size of each series"
    console.print(accuracy_table([("collectives", result["n_modelled"], result["error"], result["baseline"])], title))
    console.print(groups_table(result["groups"]))
    for source, floor in result["offsets"].items():
        if floor > 0:
            console.print(f"floor of the host found in {source}: {time_text(floor)}", markup=False)


def _print_verdict(verdict: Any) -> None:
    from .._units import bytes_text, time_text
    from ..report._collectives import terminal_plot
    from ..report._tables import table
    from . import _output

    console = _output.out()
    shown = table(f"{verdict.operation} of {verdict.name}: the link carries {verdict.link_peak / 1e9:.4g} GB/s")
    for name in ("size", "measured", "expected", "busbw", "of peak"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict", overflow="fold")
    for row in verdict.rows:
        share = f"{row.bus_rate / verdict.link_peak:.0%}"
        cells = (bytes_text(row.nbytes), time_text(row.measured_s), time_text(row.expected_s), f"{row.bus_rate / 1e9:.3g}", share, row.text)
        shown.add_row(*cells, style="red" if row.state in ("slow", "fast") else None)
    console.print(shown)
    console.print(terminal_plot(verdict), markup=False, no_wrap=True, crop=False)
    if verdict.setting.unknown_version:
        advice = "The library's version is not known: before NCCL 2.10 the middle sizes take 1.4 to 1.9 times as long (--library)."
        console.print(advice, markup=False, style="dim")
    line = f"{verdict.state}: large messages take {verdict.ratio:.2f} times as long as expected"
    console.print(line + (f". Likely cause: {verdict.cause}. Evidence: {verdict.evidence}." if verdict.cause else "."), markup=False, style="bold")
