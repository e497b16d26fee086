"""`tune`: the best plans for a model on so many devices. `sweep`: a grid of what-ifs to a file."""

import math
from typing import Annotated, Any

import typer

from ._options import Job, with_job
from ._show import JSON

MOST_VALUES = 10_000_000  # of one axis of a sweep; they are held in memory, its rows are not


@with_job
def tune(
    job: Job,
    objective: Annotated[str, typer.Option("--objective", help="step_time, energy, cost or peak_memory.")] = "step_time",
    top: Annotated[int, typer.Option("--top", min=1, help="Plans to print.")] = 10,
    refine: Annotated[bool, typer.Option("--refine/--no-refine", help="Refine the continuous knobs by gradients.")] = True,
    as_json: JSON = False,
) -> None:
    """Find the best plans: every legal one in a batched evaluation, ranked, the best refined by gradients. A layout option, --tp 8, restricts."""
    from . import _inputs, _output

    _output.start()
    model, model_name = _inputs.load_network(job)
    system, system_name = _inputs.load_cluster(job)
    from ..stack import load_stack
    from ..tune import tune_plan

    stack = load_stack(job.stack)
    _output.note(f"searching all legal plans of {model_name} for {job.devices} x {system_name}, batch {job.gbs}")
    found = tune_plan(model, system, stack, num_devices=job.devices, global_batch_size=job.gbs, objective=objective, fixed=job.plan_words(), top=top,
                      refine=refine)  # fmt: skip
    if as_json:
        _output.print_json({"model": model_name, "system": system_name, "num_devices": job.devices, "global_batch_size": job.gbs, "stack": job.stack,
                            **describe_result(found)})  # fmt: skip
        return
    from ..estimate import bottleneck
    from ..report import breakdown_table, plans_table
    from ..tune import describe_plan

    out = _output.out()
    out.print(f"{model_name} on {job.devices} x {system_name}, batch {job.gbs}, stack {job.stack}", style="bold", markup=False)
    out.print(counts(found), markup=False)
    out.print(plans_table(found.ranked, found.refined))
    out.print("Best: " + bottleneck(found.best.estimate), markup=False)
    out.print(breakdown_table(found.best.estimate))
    out.print("All about the best plan, with measured neighbours: " + job.line("predict", describe_plan(found.best.plan)), markup=False, soft_wrap=True)


@with_job
def sweep(
    job: Job,
    over: Annotated[list[str], typer.Option("--over", metavar="PATH=VALUES", help="An axis: 1,2,4 or FROM:TO:COUNT or FROM:TO:COUNT:log. Repeat for a grid.")],
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write a .parquet or .csv file instead of printing.")] = None,
    quantities: Annotated[str | None, typer.Option("--quantities", help="Result columns, comma-separated; breakdown and memory stand for all parts.")] = None,
    gradients: Annotated[str | None, typer.Option("--gradients", help="Paths whose elasticity is a column, comma-separated.")] = None,
    together: Annotated[bool, typer.Option("--zip", help="Take the axes row by row instead of all combinations.")] = False,
    as_json: JSON = False,
) -> None:
    """Predict a grid over any numbers of plan, model, system and stack: --over plan.micro_batch_size=1,2 --over system.scale_out.bandwidth=25e9:100e9:8:log."""
    from . import _inputs, _output

    axes: dict[str, Any] = {}
    for text in over:
        path, values = read_axis(text)
        if path in axes:
            raise ValueError(f"--over names {path} twice. Keep one.")
        axes[path] = values
    _output.start()
    inputs = _inputs.prepare(job)
    from ..sweep import sweep as run_sweep

    chosen = {} if quantities is None else {"quantities": [name.strip() for name in quantities.split(",") if name.strip()]}
    slopes = [] if gradients is None else [name.strip() for name in gradients.split(",") if name.strip()]
    rows = math.prod(len(values) for values in axes.values()) if not together else max(len(values) for values in axes.values())
    _output.note(f"{rows:,} rows")
    result = run_sweep(inputs.model, inputs.system, inputs.plan, inputs.stack, axes, mode="zip" if together else "product", gradients=slopes, out=out, **chosen)
    if out is not None:
        if as_json:
            _output.print_json({"file": str(result), "rows": rows, "axes": {path: len(values) for path, values in axes.items()}})
        else:
            _output.out().print(f"wrote {rows:,} rows to {result}", markup=False)
        return
    records: list[dict[str, Any]] = result.to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
    if as_json:
        _output.print_json({"rows": records})
        return
    from .._units import digits
    from ..report._tables import table

    shown = table(f"{rows:,} rows" + (", the first 50" if rows > 50 else ""))
    for name in records[0]:
        shown.add_column(name, justify="right", overflow="fold")
    for record in records[:50]:
        shown.add_row(*(digits(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else str(x) for x in record.values()))
    _output.out().print(shown)


def counts(found: Any) -> str:
    """How much was searched, and how fast."""
    gain = f"; gradients made the best {found.gain:.2%} better" if found.refined is not None else ""
    return (
        f"{found.num_tried:,} combinations use all devices, {found.num_legal:,} are legal, {found.num_feasible:,} fit into memory; "
        f"{found.run_seconds:.1f} s after {found.compile_seconds:.1f} s of compiling{gain}."
    )


def describe_result(found: Any) -> dict[str, Any]:
    """A search for JSON."""
    one = lambda ranked: {"plan": dict(ranked.words), "objective": ranked.objective, "estimate": ranked.estimate.to_dict()}
    return {
        "objective": found.objective,
        "num_tried": found.num_tried,
        "num_legal": found.num_legal,
        "num_feasible": found.num_feasible,
        "compile_seconds": found.compile_seconds,
        "run_seconds": found.run_seconds,
        "refinement_gain": found.gain,
        "refined": None if found.refined is None else one(found.refined),
        "plans": [one(ranked) for ranked in found.ranked],
    }


def read_axis(text: str) -> tuple[str, list[Any]]:
    """`PATH=VALUES` as a path and its values.

    Raises:
      ValueError: when it cannot be read so.
    """
    path, equals, right = text.partition("=")
    form = "write PATH=1,2,4 or PATH=FROM:TO:COUNT or PATH=FROM:TO:COUNT:log"
    if not equals or not path.strip() or not right.strip():
        raise ValueError(f"--over is {text!r}; {form}.")
    if ":" not in right:
        return path.strip(), [_value(word.strip()) for word in right.split(",") if word.strip()]
    parts = right.split(":")
    try:
        start, stop, count = float(parts[0]), float(parts[1]), int(parts[2])
        log = parts[3:] == ["log"]
    except (ValueError, IndexError):
        raise ValueError(f"--over is {text!r}; {form}.") from None
    if (parts[3:] and not log) or count < 1 or not (math.isfinite(start) and math.isfinite(stop)) or (log and not (start > 0 and stop > 0)):
        raise ValueError(f"--over is {text!r}; COUNT should be at least 1, FROM and TO finite, and positive for log: {form}.")
    if count > MOST_VALUES:
        raise ValueError(f"--over is {text!r}; COUNT should be at most {MOST_VALUES:,}.")
    share = [i / max(count - 1, 1) for i in range(count)]
    if log:
        return path.strip(), [start * (stop / start) ** x for x in share]
    return path.strip(), [start + (stop - start) * x for x in share]


def _value(word: str) -> Any:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        return {"true": True, "false": False}.get(word.lower(), word)
