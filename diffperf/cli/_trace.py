"""`trace`: where the time of recorded steps went, on one rank or several, beside a prediction if a plan is given; and what can be measured from it."""

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ._options import OPTIONS, Job

_UNLIKE = 3  # factor between recorded and predicted steps beyond which they are hardly of the same job
_PREDICTION = "Prediction to compare with (options of `diffperf predict`)"
_NEEDED = {"model": "--model", "system": "--system", "gbs": "--gbs"}


def _with_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command(job, ...)` the options of a job, none of them needed, behind its own; `job` is None where nothing was said."""
    kind, shared = inspect.Parameter.KEYWORD_ONLY, []
    for name, (annotation, default) in OPTIONS.items():
        if name in ("model", "system"):
            text = f"{annotation.__metadata__[0].help} Compares the trace with its prediction."
            annotation = Annotated[str | None, typer.Option(f"--{name}", help=text, rich_help_panel=_PREDICTION, show_default=False)]
        elif default is ...:
            annotation = Annotated[annotation.__origin__ | None, annotation.__metadata__[0]]
        shared.append(inspect.Parameter(name, kind, annotation=annotation, default=None if default is ... else default))
    own = [parameter.replace(kind=kind) for parameter in list(inspect.signature(command).parameters.values())[1:]]

    @functools.wraps(command)
    def run(**words: Any) -> None:
        said = {name: words.pop(name) for name in OPTIONS}
        given = [name for name, (_, default) in OPTIONS.items() if said[name] is not None and said[name] != default]
        missing = [flag for name, flag in _NEEDED.items() if said[name] is None]
        if given and missing:
            raise ValueError(f"--{given[0].replace('_', '-')} asks for a prediction, which needs {' and '.join(missing)} too.")
        command(Job(**said) if given else None, **words)

    del run.__wrapped__  # typer would follow it to the signature of `command`
    setattr(run, "__signature__", inspect.Signature([*own, *shared]))  # noqa: B010, typer reads it
    run.__annotations__ = {}
    return run


@_with_plan
def trace(
    job: Job | None,
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Traces of one job, one or more ranks: Kineto, JAX (XSpace, trace.json), Chakra.")],
    json_out: Annotated[str | None, typer.Option("--json", metavar="OUT", help="Write everything as one JSON document; - prints it and nothing else.")] = None,
    measurements: Annotated[str | None, typer.Option("--measurements", metavar="FOLDER", help="Write kernels.csv, collectives.csv, overlap.csv.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Kernels to print.")] = 12,
) -> None:
    """Read traces of a profiler: busy, idle, overlapped and exposed time, steps, stragglers, achieved rates; compare with a prediction.

    Times are over all steps, unrounded. HolisticTraceAnalysis by default leaves out the last step and rounds to whole microseconds: as_hta in --json has that.
    """
    from ..io.traces import RankTrace, left_out_dict, match_collectives, rank_dict, read_traces, stragglers
    from . import _output

    if json_out == "/dev/stdout":
        json_out = "-"
    _check_targets(None if json_out == "-" else json_out, measurements, files)
    found, left = read_traces(files)
    ranks = [item for item in found if isinstance(item, RankTrace)]
    matched, unmatched = match_collectives(ranks)
    late = stragglers(ranks, matched) if matched is not None else []
    compared = None if job is None else _compare(job, ranks)
    clocks = None if matched is None else dict(agree=matched.agree, offset_s=(matched.clock_s - matched.clock_s[0]).tolist(), spread_s=matched.spread_s)
    described = [rank_dict(item) for item in found]
    steps = _steps(ranks)
    with _writing(measurements):
        written, unmeasured = ({}, ()) if measurements is None else _measure(Path(measurements), ranks, matched)
    left = (*left, *unmatched, *unmeasured)
    document = {
        "ranks": described, "steps": steps, "left_out": left_out_dict(left), "stragglers": [dataclasses.asdict(item) for item in late],
        "clocks": clocks, "comparison": compared, "measurements": written,
    }  # fmt: skip
    if json_out == "-":
        _output.print_json(document)
        return
    if json_out is not None:
        from .._files import write_atomic

        with _writing(json_out):
            write_atomic(json_out, _output.json_text(document) + "\n")
    _print(document, ranks, top)
    if measurements is not None and not written:
        _output.note(f"nothing was written to {measurements}: no kernel that ran alone has recorded shapes, and no collective a recorded size")
    if json_out is not None:
        _output.out().print(f"wrote {json_out}", markup=False)


def _check_targets(json_out: str | None, measurements: str | None, files: Sequence[str]) -> None:
    """Refuses, before any work is done, a file or folder that could not be written, and one of the traces as a place to write to.

    Raises:
      ValueError: for such a one.
    """
    from ._fits import check_target

    check_target(json_out)
    if json_out is not None:
        if os.path.realpath(json_out) in map(os.path.realpath, files):
            raise ValueError(f"--json is {json_out}, which is one of the traces and would be lost. Give another name.")
        place = json_out if os.path.exists(json_out) and not os.path.isfile(json_out) else Path(json_out).absolute().parent
        if not os.access(place, os.W_OK):
            raise ValueError(f"--json is {json_out}, and {place} may not be written. Give another name, or the right to write there.")
    if measurements is None:
        return
    folder = Path(measurements)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--measurements is {measurements}, which is a file; it should be a folder, new or not. Give another name.")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{measurements}: the folder {parent} does not exist. Create it first.")
    if not os.access(folder if folder.exists() else parent, os.W_OK):
        raise ValueError(f"--measurements is {measurements}, which may not be written. Give another name, or the right to write there.")


@contextlib.contextmanager
def _writing(target: str | None) -> Iterator[None]:
    """Names the target when it cannot be written after all, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror or error}. Give another name, or make room.") from None


def _steps(ranks: Sequence[Any]) -> list[dict[str, Any]]:
    from ..io.traces import step_times

    return [{"rank": rank.rank if rank.rank >= 0 else None, "device": rank.device if rank.device >= 0 else None,
             **{key: value for key, value in dataclasses.asdict(step).items() if key != "times"}, **dataclasses.asdict(step.times)}
            for rank in ranks for step in step_times(rank)]  # fmt: skip


def _measure(folder: Path, ranks: Sequence[Any], matched: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Writes what the traces measure; file -> rows, and what was not used."""
    from ..io import write_collectives, write_kernels
    from ..io.traces import collective_measurements, kernel_measurements, overlap_slowdowns, write_slowdowns

    kernels, left_kernels = kernel_measurements(ranks)
    collectives, left_collectives = collective_measurements(ranks, matched)
    pairs = [pair for rank in ranks for pair in overlap_slowdowns(rank)]
    folder.mkdir(exist_ok=True)
    written: dict[str, Any] = {}
    for name, table, write in (("kernels.csv", kernels, write_kernels), ("collectives.csv", collectives, write_collectives),
                               ("overlap.csv", pairs, write_slowdowns)):  # fmt: skip
        if table is not None and len(table):
            write(folder / name, table)
            written[str(folder / name)] = len(table)
    return written, (*left_kernels, *left_collectives)


def _compare(job: Job, ranks: Sequence[Any]) -> dict[str, Any]:
    """A step as recorded beside the predicted one.

    Raises:
      ValueError: no device times, or a plan that cannot be.
    """
    import numpy as np

    from ..io.traces import step_times, times_of
    from ..report._tables import kind_of
    from . import _inputs, _output

    if not ranks:
        raise ValueError("an execution graph without times cannot be compared with a prediction. Give a trace of a profiler.")
    world = max(rank.world_size for rank in ranks)
    if job.devices is None:
        if world < 1:
            raise ValueError(f"{ranks[0].file} does not say how many devices the job had. Give --devices.")
        job.devices = world
    if 0 < world != job.devices:
        raise ValueError(f"--devices is {job.devices}; {ranks[0].file} is of a job of {world} devices. Use --devices {world}, or the traces of that job.")
    _output.start()
    inputs = _inputs.prepare(job)
    prediction = _inputs.predict(inputs)
    steps = [step_times(rank) for rank in ranks]
    whole = [step for of_rank in steps for step in (of_rank[:-1] or of_rank)]  # the last step has no next one to end it
    times = [step.times for step in whole] or [times_of(rank) for rank in ranks]
    measured = float(np.median([step.period_s for step in whole] or [item.span_s for item in times]))
    middle = lambda name: float(np.median([getattr(item, name) for item in times]))
    compute, exposed = middle("compute_time_s"), middle("exposed_communication_time_s")
    parts = {name: float(getattr(prediction.estimate.breakdown, name)) for name in prediction.estimate.breakdown.__dataclass_fields__}
    predicted = dict.fromkeys(("compute", "communication", "idle and overhead"), 0.0)
    for name, value in parts.items():
        predicted[kind_of(name)] += value
    notes = [*prediction.notes]
    if not bool(prediction.estimate.feasible):
        notes.append("the plan does not fit into memory")
    if not whole:
        notes.append("the trace marks no steps; its whole span was taken as one")
    if not 1 / _UNLIKE < measured / float(prediction.estimate.step_time) < _UNLIKE:
        notes.append(f"recorded and predicted step differ by more than a factor of {_UNLIKE}: are model, batch and plan those of the trace?")
    return {
        "model": inputs.model_name, "system": inputs.system_name, "num_devices": job.devices, "steps": len(whole),
        "recorded_on": ", ".join(sorted({rank.accelerator for rank in ranks if rank.accelerator})),
        "measured": {"step_time_s": measured, "compute_s": compute, "exposed_communication_s": exposed, "idle_and_overhead_s": measured - compute - exposed},
        "predicted": {"step_time_s": float(prediction.estimate.step_time), "low_s": prediction.low_s, "high_s": prediction.high_s,
                      "compute_s": predicted["compute"], "exposed_communication_s": predicted["communication"],
                      "idle_and_overhead_s": predicted["idle and overhead"]},
        "notes": notes,
    }  # fmt: skip


def _print(document: dict[str, Any], ranks: Sequence[Any], top: int) -> None:
    from .._units import time_text
    from . import _output, _trace_tables

    console = _output.out()
    for item in document["ranks"]:
        if "nodes" in item:
            timed = "no times" if item["compute_time_s"] is None else f"compute {time_text(item['compute_time_s'])} in sum on the device, no start times"
            console.print(f"{item['file']}: {item['format']}, {item['nodes']:,} nodes, {item['dependencies']:,} dependencies, {timed}", markup=False)
    if ranks:
        for table in _trace_tables.tables(document, top, console.width):
            console.print(table)
    clocks = document["clocks"]
    if clocks is not None and not clocks["agree"]:
        console.print(f"The hosts' clocks differ by up to {time_text(max(map(abs, clocks['offset_s'])))}; ranks were aligned by the ends of their collectives, "
                      f"which then agree within {time_text(clocks['spread_s'])}.", markup=False)  # fmt: skip
    for reason, item in document["left_out"].items():
        console.print(f"{item['count']:,} x {reason}" + (f" ({item['examples'][0]})" if item["examples"] else ""), markup=False, soft_wrap=True)
    for name, rows in document["measurements"].items():
        console.print(f"wrote {name}, {rows:,} rows", markup=False)
    for text in (document["comparison"] or {}).get("notes", ()):
        _output.note(text)
