"""`predict`: how long one step takes, and what it needs. `explain`: why."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ._options import Job, with_job
from ._show import JSON


@with_job
def predict(
    job: Job,
    days_for: Annotated[
        str | None, typer.Option("--days-for", metavar="TOKENS", help="Also time, money and energy for a run of so many tokens, as 15T.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Also write the step as a Perfetto (Chrome) trace, .json.gz, and print its critical path.")
    ] = None,
    allow_oom: Annotated[bool, typer.Option("--allow-oom", help="Print the prediction even if it does not fit into memory.")] = False,
    as_json: JSON = False,
) -> None:
    """Predict one training step: time with interval, throughput, MFU, communication, memory per stage, energy and cost."""
    from . import _inputs, _output, _timeline

    _timeline.check_trace(trace)
    tokens = None if days_for is None else token_count(days_for)
    _output.start()
    inputs = _inputs.prepare(job)
    prediction = _inputs.predict(inputs)
    refuse_overflow(inputs, prediction, allow_oom)
    from ..report import breakdown_table, headline_table, memory_by_stage, memory_table, whole_run

    stages = memory_by_stage(inputs.model, inputs.plan, inputs.stack)
    run = None if tokens is None else whole_run(prediction.estimate, tokens)
    facts = None if trace is None else _timeline.write_timeline(inputs, trace)
    if as_json:
        more = ({} if run is None else {"run": run}) | ({} if facts is None else {"timeline": facts})
        _output.print_json(describe(inputs, prediction) | {"memory_by_stage_bytes": stages} | more)
        return
    out = _output.out()
    out.print(title(inputs), style="bold", markup=False)
    out.print(headline_table(prediction.estimate, (prediction.low_s, prediction.high_s), run))
    out.print(breakdown_table(prediction.estimate))
    out.print(memory_table(stages, float(prediction.estimate.memory_capacity)))
    if facts is not None:
        out.print(_timeline.timeline_report(facts))
    for text in prediction.notes:
        _output.note(text)


@with_job
def explain(
    job: Job,
    top: Annotated[int, typer.Option("--top", min=1, help="Elasticities to print.")] = 15,
    allow_oom: Annotated[bool, typer.Option("--allow-oom", help="Explain even if it does not fit into memory.")] = False,
    as_json: JSON = False,
) -> None:
    """Explain one training step: where the time goes, what limits it, what it hangs on, and what 10% better would give."""
    from . import _inputs, _output

    _output.start()
    inputs = _inputs.prepare(job)
    prediction = _inputs.predict(inputs)
    refuse_overflow(inputs, prediction, allow_oom)
    from ..estimate import bottleneck, elasticities
    from ..report import better_by, better_table, breakdown_table, elasticity_table

    four = (inputs.model, inputs.system, inputs.plan, inputs.stack)
    rows = elasticities(*four)
    better = better_by(*four, rows[:16], step_time=float(prediction.estimate.step_time))
    sentence = bottleneck(prediction.estimate)
    if as_json:
        slopes = [row._asdict() for row in rows]
        what = [{**row._asdict(), "step_time_s": row.step_time} for row in better]
        _output.print_json(describe(inputs, prediction) | {"bottleneck": sentence, "elasticities": slopes, "ten_percent_better": what})
        return
    out = _output.out()
    out.print(title(inputs), style="bold", markup=False)
    out.print(sentence, markup=False)
    out.print(breakdown_table(prediction.estimate))
    out.print(elasticity_table(rows, top))
    out.print(better_table(better))
    for text in prediction.notes:
        _output.note(text)


def title(inputs: Any) -> str:
    """One line that names the job."""
    job, words = inputs.job, inputs.words
    short = (("tp", "tensor_parallel"), ("pp", "pipeline_parallel"), ("dp", "data_parallel"), ("cp", "context_parallel"), ("ep", "expert_parallel"))
    layout = " ".join(f"{name}{words[word]}" for name, word in short if words.get(word, 1) > 1) or "one device"
    return f"{inputs.model_name} on {job.devices} x {inputs.system_name}, {layout}, batch {job.gbs}, {words.get('precision', 'bf16')}, stack {job.stack}"


def describe(inputs: Any, prediction: Any) -> dict[str, Any]:
    """The job and its prediction for JSON."""
    from ..tune import describe_plan

    return {
        "model": inputs.model_name,
        "system": inputs.system_name,
        "num_devices": inputs.job.devices,
        "stack": inputs.job.stack,
        "plan": {"global_batch_size": inputs.job.gbs, **describe_plan(inputs.plan), "precision": inputs.words.get("precision", "bf16")},
        "seq_len": float(inputs.model.seq_len),
        "step_time_s": float(prediction.estimate.step_time),
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "interval": 0.8,
        "measured_like": prediction.measured_like,
        "estimate": prediction.estimate.to_dict(),
        "notes": list(prediction.notes),
    }


def token_count(text: str) -> float:
    """`15T`, `300B`, `1e12` as a number.

    Raises:
      ValueError: for anything else.
    """
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)\s*([kKmMbBgGtT]?)", text.strip())
    try:
        value = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}[found[2].lower()] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"--days-for is {text!r}; it should be a number of tokens, such as 300B, 15T or 1e12.")
    return value


def refuse_overflow(inputs: Any, prediction: Any, allow: bool) -> None:
    """Stops a job that does not fit into memory, saying what would.

    Raises:
      ValueError: unless `allow`, by how much, at which stage, and the smallest changes that fit.
    """
    e = prediction.estimate
    peak, capacity = float(e.peak_memory), float(e.memory_capacity)
    if peak <= capacity or allow:
        return
    from .._units import gigabytes

    changes = _changes_that_fit(inputs)
    fits = f"Smallest changes that fit: {'; or '.join(changes[:4])}." if changes else "No change of one number fits; `diffperf tune` searches all plans."
    raise ValueError(
        f"out of memory: pipeline stage {float(e.peak_stage):.0f} needs {gigabytes(peak)} GB, {gigabytes(peak - capacity)} GB more than the "
        f"{gigabytes(capacity)} GB of a device. {fits} Print it anyway with --allow-oom."
    )


def _changes_that_fit(inputs: Any) -> tuple[str, ...]:
    """Changes of one number, found by the search over all plans with everything else held as the user gave it."""
    from ..tune import NoFeasiblePlan, describe_plan, tune_plan

    words = dict(inputs.words)
    words.pop("data_parallel", None)  # follows from the others
    held = {k: v for k, v in describe_plan(inputs.plan).items() if k not in ("data_parallel", "sequence_parallel", "optimizer_offload", "activation_offload")}
    try:
        found = tune_plan(inputs.model, inputs.system, inputs.stack, num_devices=inputs.job.devices, global_batch_size=inputs.job.gbs, fixed=held | words,
                          top=1, refine=False)  # fmt: skip
    except NoFeasiblePlan as error:
        return error.changes
    except ValueError:
        return ()
    return (", ".join(f"{name} = {value}" for name, value in found.best.words.items() if words.get(name, value) != value),)
