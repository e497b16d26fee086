"""`demo`: fit to published runs, predict, explain and tune one that the fit has not seen, and write one HTML report."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ._show import JSON

ROW = "tr3477"
"""Llama 3.1 405B on 8,192 H100, MLPerf Training v5.0, NVIDIA: the largest run of that model in the table."""
STACK = "mlperf-nvidia"


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
    result, page = _tour(as_json, begin)
    folder.mkdir(exist_ok=True)
    from ..io import write_atomic

    target = folder / "report.html"
    write_atomic(target, page)
    result |= {"report": str(target), "seconds": time.perf_counter() - begin}
    if as_json:
        _output.print_json(result)
        return
    _output.out().print(f"\nReport: {target}  (open it in a browser). Took {result['seconds']:.0f} s.", markup=False, style="bold")
