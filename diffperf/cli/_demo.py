"""`demo`: fit to published runs, predict, explain and tune one that the fit has not seen, and write one HTML report."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ._show import JSON


def demo(
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the report; made if it is not there.")] = "diffperf-demo",
    as_json: JSON = False,
) -> None:
    """The whole tour on published training runs: fit, held-out accuracy, predict, explain and tune one known run, HTML report. About 2 minutes."""
    from . import _output

    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out is {out}, which is a file. Give the name of a folder.")
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"--out is {out}; the folder {folder.absolute().parent} does not exist. Create it first.")
    begin = time.perf_counter()
    _output.start()
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..io import write_atomic
    from ..report import html_report
    from . import _tour

    columns = (TextColumn("{task.description:<44}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    console = _output.err()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=1.0)
        shown = ""

        def tell(text: str, share: float) -> None:
            nonlocal shown
            if not console.is_terminal and text != shown:
                _output.note(f"{text} ({time.perf_counter() - begin:.0f} s)")
            shown = text
            bar.update(task, description=text, completed=share)

        tour = _tour.run(tell)
        tell("writing the report", 0.98)
        page = html_report(_tour.report_of(tour))
        folder.mkdir(exist_ok=True)
        write_atomic(folder / "report.html", page)
        tell("done", 1.0)
    seconds = time.perf_counter() - begin
    target = str(folder / "report.html")
    if as_json:
        _output.print_json(_tour.describe(tour) | {"report": target, "seconds": seconds})
        return
    _print(tour)
    _output.out().print(f"Report: {target}, to open in a browser. Took {seconds:.0f} s.", markup=False, style="bold")


def _print(tour: Any) -> None:
    from ..estimate import bottleneck
    from ..report import accuracy_table, better_table, breakdown_table, elasticity_table, headline_table, memory_table, plans_table
    from . import _output
    from ._search import counts

    out = _output.out()
    out.print(accuracy_table(tour.accuracy, "1. Held-out accuracy, beside a roofline with one efficiency for all"))
    out.print(tour.accuracy_note, markup=False, style="dim")
    e, measured = tour.estimate, tour.run.step_time_s
    out.print(f"\n2. Predict a run that the fit has not seen: {tour.title}", markup=False, style="bold")
    out.print(f"row {tour.run.id} of the published runs: {tour.run.source}", markup=False)
    out.print(tour.layout, markup=False)
    out.print(f"measured {measured:.3f} s, predicted {float(e.step_time):.3f} s: {float(e.step_time) / measured - 1:+.1%}", markup=False, style="bold green")
    out.print(headline_table(e, tour.interval))
    out.print(_siblings_table(tour))
    out.print("\n3. Explain it", style="bold")
    out.print(bottleneck(e), markup=False)
    out.print(breakdown_table(e))
    out.print(elasticity_table(tour.elasticities, 10))
    out.print(better_table(tour.better, 6))
    out.print(memory_table(tour.stages, float(e.memory_capacity)))
    out.print("4. Tune it for the same devices and batch", style="bold")
    out.print(counts(tour.tuned), markup=False)
    out.print(tour.tuned_note, markup=False)
    out.print(plans_table(tour.tuned.ranked, tour.tuned.refined, tour.reference))


def _siblings_table(tour: Any) -> Any:
    from .._units import time_text
    from ..report._tables import table

    result = table("Other runs of the same model, by the same fit, which has seen none of them")
    result.add_column("run", overflow="fold")
    for name in ("measured", "predicted", "80% interval", "error"):
        result.add_column(name, justify="right", no_wrap=True)
    for name, measured, predicted, low, high in tour.siblings:
        result.add_row(name, time_text(measured), time_text(predicted), f"{time_text(low)} - {time_text(high)}", f"{predicted / measured - 1:+.1%}")
    return result
