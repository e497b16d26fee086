"""`measure kernels` and `measure collectives`: time operators and collectives of this machine, into tables that the calibration reads."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from ._show import JSON

BUDGET = Annotated[str, typer.Option("--budget", metavar="TIME", help="Wall-clock time to use: 120s, 2m, 1.5h.")]
OPS = Annotated[str | None, typer.Option("--ops", metavar="A,B", help="Only these operators. Default: all.")]
DATATYPES = Annotated[str | None, typer.Option("--datatypes", metavar="A,B", help="Only these datatypes. Default: those usual on the backend.")]
FORCE = Annotated[bool, typer.Option("--force-new", help="Drop the rows of FILE if another device or other versions measured them.")]


def measure_kernels(
    budget: BUDGET = "120s",
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Table to write, or to go on with.")] = "measured_kernels.csv",
    ops: OPS = None,
    datatypes: DATATYPES = None,
    seed: Annotated[int, typer.Option("--seed", help="Shifts the sizes.")] = 0,
    force_new: FORCE = False,
    as_json: JSON = False,
) -> None:
    """Time matmuls, attention, element-wise operators and a small transformer on this machine's device. Call again to add more rows."""
    from ..measure import parse_budget

    seconds = parse_budget(budget)
    _check_csv(out)
    from ..measure import measure_kernels as run

    words = dict(ops=_words(ops), datatypes=_words(datatypes), seed=seed, force_new=force_new)
    _measure(lambda tell: run(seconds, out, on_progress=tell, **words), seconds, out, as_json)


def measure_collectives(
    budget: BUDGET = "120s",
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Table to write, or to go on with.")] = "measured_collectives.csv",
    devices: Annotated[int | None, typer.Option("--devices", "-n", min=2, help="Ranks at most. A CPU is parted into so many. Default: all.")] = None,
    ops: OPS = None,
    datatypes: DATATYPES = None,
    interconnect: Annotated[str, typer.Option("--interconnect", help="What links the devices, for the table.")] = "",
    coordinator: Annotated[str | None, typer.Option("--coordinator", metavar="HOST:PORT", help="Of several processes: where process 0 listens.")] = None,
    process_id: Annotated[int | None, typer.Option("--process-id", min=0, help="Of several processes: which one this is.")] = None,
    num_processes: Annotated[int | None, typer.Option("--num-processes", min=1, help="Of several processes: how many.")] = None,
    processes_per_node: Annotated[int, typer.Option("--processes-per-node", min=1, help="Of several processes: how many share a node.")] = 1,
    force_new: FORCE = False,
    as_json: JSON = False,
) -> None:
    """Time all-reduce, all-gather, reduce-scatter, all-to-all and send/receive over the devices JAX has. Call again to add more rows."""
    from ..measure import parse_budget

    seconds = parse_budget(budget)
    _check_csv(out)
    _start_devices(devices, coordinator, process_id, num_processes)
    from ..measure import measure_collectives as run

    words = dict(devices=devices, ops=_words(ops), datatypes=_words(datatypes), interconnect=interconnect, force_new=force_new)
    _measure(lambda tell: run(seconds, out, processes_per_node=processes_per_node, on_progress=tell, **words), seconds, out, as_json)


def _start_devices(devices: int | None, coordinator: str | None, process_id: int | None, num_processes: int | None) -> None:
    """Parts the CPU into devices and joins the other processes. Accelerators are as many as there are."""
    given = (coordinator is not None, process_id is not None, num_processes is not None)
    if any(given) and not all(given):
        raise ValueError("--coordinator, --process-id and --num-processes belong together; give all three, or none for one process.")
    if process_id is not None and num_processes is not None and process_id >= num_processes:
        raise ValueError(f"--process-id is {process_id}; it should be below --num-processes, {num_processes}.")
    processes = num_processes or 1
    if devices is not None and devices % processes:
        raise ValueError(f"--devices is {devices}; it should be a multiple of --num-processes, {processes}.")
    import os

    import jax

    each = max(1 if processes > 1 else 2, min(os.cpu_count() or 1, 8)) if devices is None else devices // processes
    try:
        jax.config.update("jax_num_cpu_devices", each)  # of the CPU only; no other backend heeds it
    except RuntimeError:
        pass  # JAX has its devices already; measure_collectives says whether they are enough
    if coordinator is not None:
        try:
            jax.distributed.initialize(coordinator, num_processes, process_id)
        except Exception as error:
            raise ValueError(f"--coordinator is {coordinator}: {str(error).strip().splitlines()[0]}") from None


def _words(text: str | None) -> tuple[str, ...] | None:
    """Words between commas."""
    if text is None:
        return None
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ValueError(f"{text!r} names nothing; give names with commas between them, or leave the option out.")
    return words


def _check_csv(out: str) -> None:
    from ._fits import check_target

    check_target(out, ".csv")


def _measure(run: Callable[[Callable[[Any], None]], Any], budget: float, out: str, as_json: bool) -> None:
    """Runs it under a progress bar, and prints what came out."""
    from . import _output

    added = [0]
    try:
        with _bar(budget) as tell:

            def told(progress: Any) -> None:
                added[0] = progress.rows_added
                tell(progress)

            result = run(told)
    except KeyboardInterrupt:
        _output.note(f"stopped; {added[0]} new rows are in {out}. The same command goes on with them.")
        raise
    if result.repaired_bytes:
        _output.note(f"{out} ended in an unfinished row, which was cut off ({result.repaired_bytes} bytes).")
    for what, why in result.unavailable.items():
        _output.note(f"{what} does not run here: {why}")
    if as_json:
        _output.print_json(result._asdict() | {"device": result.device._asdict()})
        return
    from ..report._tables import table

    shown = table(f"{result.device.device}: rows measured")
    shown.add_column("operator", no_wrap=True)
    for name in ("rows in the file", "passed over as too large or slow"):
        shown.add_column(name, justify="right")
    for op in dict.fromkeys((*result.by_op, *result.passed_over)):
        shown.add_row(op, str(result.by_op.get(op, 0)), str(result.passed_over.get(op, "")))
    console = _output.out()
    console.print(shown)
    console.print(f"{result.rows_added} new rows in {result.seconds:.0f} s; {result.rows_before + result.rows_added} in {out}", markup=False)


@contextmanager
def _bar(budget: float) -> Any:
    """A progress bar on stderr over the time used; nothing where stderr is not a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from . import _output

    console = _output.err()
    columns = (TextColumn("{task.fields[rows]} rows"), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=budget, rows=0)
        yield lambda at: bar.update(task, completed=min(at.elapsed_s, budget), rows=at.rows_added, description=at.label[:60])
