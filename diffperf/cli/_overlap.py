"""`calibrate overlap`: fit the law of lost processors to kernels that a trace shows alone and under a collective."""

from typing import Annotated, Any

import typer

from ._fits import check_target, note_left_out
from ._show import JSON

_MOST = 12
_NUMBERS = 44  # characters that the columns of numbers take


def calibrate_overlap(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="overlap.csv of `trace --measurements`, .csv or .csv.gz.", show_default=False)],
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Take only rows of this GPU.")] = None,
    processors: Annotated[int | None, typer.Option("--processors", min=1, help="Streaming multiprocessors, where the rows do not say.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="JSON", help="Write the fit, for `load_overlap_fit` and robust tuning.")] = None,
    as_json: JSON = False,
) -> None:
    """Fit how much collectives slow the kernels beside them: processors per channel, with the error on kernels left out of the fit."""
    from . import _output

    check_target(out, ".json")
    _output.start()
    from .. import calibrate
    from ..io.traces import read_slowdowns

    rows = [row for file in files for row in read_slowdowns(file)]
    fit = calibrate.calibrate_overlap(rows, chip=gpu, processors=processors)
    if out is not None:
        fit.write(out)
    if as_json:
        _output.print_json(fit.document() | {"file": out})
        return
    _print(fit)
    if out is not None:
        _output.out().print(f"wrote {out}; use it with diffperf.calibrate.load_overlap_fit", markup=False)


def _print(fit: Any) -> None:
    from ..calibrate._overlap import FITTED
    from ..cost.contention import CONTENTION_SD, NOMINAL_CONTENTION
    from ..report._tables import percent_of, table
    from . import _output

    console = _output.out()
    title = f"{fit.rows} matmul and convolution kernels of {fit.chip or 'one GPU'} with {fit.processors} processors"
    constants = table(title)
    for name in ("constant", "before", "after", "known to (log sd)"):
        constants.add_column(name, justify="left" if name == "constant" else "right", no_wrap=True)
    for name in FITTED:
        before, after = getattr(NOMINAL_CONTENTION, name), getattr(fit.constants, name)
        constants.add_row(name, f"{before:.2f}", f"{after:.2f}", f"{getattr(CONTENTION_SD, name):.2f} -> {getattr(fit.sd, name):.2f}")
    console.print(constants)
    kernels = table("Ratio of the time under a collective to the time alone; predicted without the kernel itself")
    kernels.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=max(console.width - _NUMBERS, 12))
    for name in ("blocks", "channels", "measured", "predicted"):
        kernels.add_column(name, justify="right", no_wrap=True)
    slowed = lambda row: row.time_with_s / row.time_alone_s
    slowed_most = sorted(zip(fit.used, fit.predicted), key=lambda pair: -slowed(pair[0]))[:_MOST]
    for row, predicted in slowed_most:
        kernels.add_row(row.kernel, str(row.blocks), str(row.channels), f"{slowed(row):.2f}", f"{predicted:.2f}")
    console.print(kernels)
    if fit.rows > len(slowed_most):
        console.print(f"... the {len(slowed_most)} slowed most of {fit.rows}", style="dim")
    console.print(
        f"mean error {percent_of(fit.held_out)} with each kernel left out, {percent_of(fit.error)} with all; {percent_of(fit.before)} before the fit, "
        f"{percent_of(fit.constant)} for one ratio for all", markup=False,
    )  # fmt: skip
    if fit.held_out >= fit.before:
        _output.note("the constants before the fit predict these kernels as well; more pairs, best of other grids, would tell")
    if fit.others["count"]:
        console.print(f"{fit.others['count']} other kernels: ratio {fit.others['median']:.2f} in the median, {fit.others['p90']:.2f} at the 90th percentile",
                      markup=False)  # fmt: skip
    note_left_out(fit.left_out)
