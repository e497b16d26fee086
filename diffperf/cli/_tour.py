"""The numbers of the demo, apart from how they are shown."""

import dataclasses
import datetime
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ..calibrate import build_posterior, fit_runs, prepare
from ..calibrate._constants import apply_to_system, stack_from
from ..calibrate._evaluate import held_out, partition
from ..calibrate._posterior import Z80
from ..calibrate._published import accuracy, calibrate_published, published_runs
from ..estimate import Elasticity, Estimate, bind_step, bottleneck, elasticities
from ..hardware import DATATYPES, System
from ..io import Run
from ..parallel import Plan
from ..report import Report, better_by, memory_by_stage
from ..report._facts import What
from ..report._figures import Point
from ..stack import Stack
from ..tune import RankedPlan, TuneResult, describe_plan, tune_plan
from ..workload import Transformer
from ._inputs import at_step_time

ROW = "tr3477"
"""Llama 3.1 405B on 8,192 H100 in MLPerf Training v5.0: the largest run of that model among the published ones."""


@dataclasses.dataclass(frozen=True)
class Tour:
    """What the demo found.

    Attributes:
      run: the published run that is predicted.
      title, layout: it in words.
      model, system, plan, stack: its inputs, system and stack from a fit without the run's group.
      estimate, interval: held-out prediction and its 80% interval. [s]
      elasticities, better, stages: why, and memory.
      siblings: other runs of the group: name, measured, held-out prediction with interval. [s]
      tuned, tuned_note, reference: the search for the same devices and batch, and the layout measured.
      accuracy: rows of `accuracy_table`; `points` what they are made of.
    """

    run: Run
    title: str
    layout: str
    model: Transformer
    system: System
    plan: Plan
    stack: Stack
    estimate: Estimate
    interval: tuple[float, float]
    elasticities: list[Elasticity]
    better: list[What]
    stages: list[dict[str, float]]
    siblings: list[tuple[str, float, float, float, float]]
    tuned: TuneResult
    tuned_note: str
    reference: RankedPlan
    accuracy: list[tuple[str, int, Mapping[str, float], Mapping[str, float]]]
    accuracy_note: str
    points: list[Point]
    held_out_rows: int
    meta: dict[str, Any]


def run(tell: Callable[[str, float], None]) -> Tour:
    """The whole tour.

    Args:
      tell: called with what is being done and how far along it is, in [0, 1].
    """
    tell("reading the published runs", 0.0)
    rows = prepare(published_runs())
    tell(f"fitting {len(rows):,} runs", 0.03)
    calibration, fit, _ = calibrate_published(rows, progress=lambda step, error: tell(f"fit, pass {step + 1}: rms log error {error:.3f}", 0.03 + 0.012 * step))
    fold = partition(rows, 0)
    tell("held-out fold 1 of 5", 0.2)
    prediction, baseline = held_out(
        rows, fold, start=fit, progress=lambda done, parts: tell(f"held-out fold {min(done + 1, parts)} of {parts}", 0.2 + 0.4 * done / parts)
    )
    scores = accuracy(rows, prediction.mean, prediction.sd, baseline)

    at = next(i for i, candidate in enumerate(rows.runs) if candidate.id == ROW)
    same = np.array([group == rows.groups[at] for group in rows.groups])
    group, own = rows.take(same), int(np.sum(same[:at]))
    chosen = rows.take(np.array([at]))
    tell("fit without the run to predict", 0.62)
    known = rows.take(~same)
    without = fit_runs(known, start=fit, passes=8)
    found = build_posterior(without, known).predict(group)
    mean, sd = float(found.mean[own]), float(found.sd[own])
    constants = without.constants(chosen)[0]
    first = lambda tree: jax.tree.map(lambda x: jax.numpy.asarray(x[0], float), tree)
    model, plan = first(chosen.model), first(chosen.plan)
    system = apply_to_system(first(chosen.system), constants)
    system = eqx.tree_at(lambda s: s.num_devices, system, jax.numpy.asarray(rows.runs[at].num_devices, float))
    stack = stack_from(constants, calibration.memory_of(chosen.stack[0], chosen.family[0]))

    tell("predicting and explaining", 0.7)
    estimate = at_step_time(bind_step(model, system, stack)(plan), float(np.exp(mean)))
    slopes = elasticities(model, system, plan, stack)
    better = better_by(model, system, plan, stack, slopes[:12], step_time=float(estimate.step_time))
    stages = memory_by_stage(model, plan, stack)
    tell("tuning: every legal plan", 0.85)
    measured = rows.runs[at]
    devices, batch = int(measured.num_devices or 0), int(measured.global_batch or 0)
    datatype = DATATYPES[int(np.argmax(np.asarray(plan.precision)))]
    tuned = tune_plan(model, system, stack, num_devices=devices, global_batch_size=batch, fixed=_kept(plan, datatype), top=8)
    physics = bind_step(model, system, stack)(plan)
    raw = float(physics.step_time)
    best = float(tuned.best.estimate.step_time)
    note = (
        f"By the same physics the submitted layout takes {raw:.2f} s and the best plan {best:.2f} s ({best / raw - 1:+.1%}). "
        f"The physics part alone, without what measured neighbours add, is {raw / float(np.exp(mean)) - 1:+.1%} off the prediction above."
    )
    return Tour(
        run=measured,
        title=f"{measured.model_name} on {devices:,} {measured.accelerator}",
        layout=_layout(plan, batch, datatype),
        model=model,
        system=system,
        plan=plan,
        stack=stack,
        estimate=estimate,
        interval=(float(np.exp(mean - Z80 * sd)), float(np.exp(mean + Z80 * sd))),
        elasticities=slopes,
        better=better,
        stages=stages,
        siblings=[_sibling(run, float(m), float(s)) for i, (run, m, s) in enumerate(zip(group.runs, found.mean, found.sd)) if i != own],
        tuned=tuned,
        reference=RankedPlan(plan, physics, raw, describe_plan(plan)),
        tuned_note=note,
        accuracy=[(name.replace("mixture of experts", "MoE"), kind["n"], kind["error"], kind["baseline"]) for name, kind in scores["by_kind"].items()],
        accuracy_note=_accuracy_note(scores),
        points=[_point(row) for row in scores["rows"] if row["used"]],
        held_out_rows=len(rows) - len(known),
        meta=dict(calibration.meta),
    )


def report_of(tour: Tour) -> Report:
    """The tour as the parts of a report."""
    e, measured = tour.estimate, tour.run.step_time_s or 0.0
    lead = (
        f"Predicted from a fit that has seen no run of this model from this source ({tour.held_out_rows} rows left out), "
        f"then explained and tuned for the same devices and batch."
    )
    return Report(
        title=tour.title,
        lead=lead,
        facts=[
            ("layout", tour.layout),
            ("system", f"{tour.run.accelerator}, {tour.run.inter_node_net or 'network of the catalog'}"),
            ("software", tour.run.framework),
            ("measured by", f"row {tour.run.id}: {tour.run.source}"),
        ],
        estimate=e,
        interval=tour.interval,
        measured_s=measured,
        bottleneck=bottleneck(e),
        elasticities=tour.elasticities,
        better=tour.better,
        stages=tour.stages,
        points=tour.points,
        accuracy=tour.accuracy,
        accuracy_note=tour.accuracy_note,
        siblings=tour.siblings,
        plans=tour.tuned.ranked,
        refined=tour.tuned.refined,
        reference=tour.reference,
        plans_note=f"{tour.tuned.num_legal:,} legal plans evaluated, {tour.tuned.num_feasible:,} fit into memory. {tour.tuned_note}",
        provenance=[
            ("made by", f"diffperf {version('diffperf')}, {datetime.datetime.now().astimezone().isoformat(timespec='minutes')}"),
            ("fitted on", f"{tour.meta.get('data', '')}, {tour.meta.get('date', '')}"),
            ("versions", f"Python {platform.python_version()}, jax {version('jax')}, numpy {np.__version__}, {jax.devices()[0].device_kind}"),
        ],
    )


def describe(tour: Tour) -> dict[str, Any]:
    """The tour for JSON."""
    from ._search import describe_result

    return {
        "accuracy": [{"rows_of": name, "n": n, "error": ours, "baseline": baseline} for name, n, ours, baseline in tour.accuracy],
        "run": {"id": tour.run.id, "title": tour.title, "source": tour.run.source, "measured_s": tour.run.step_time_s},
        "plan": describe_plan(tour.plan),
        "prediction": {"step_time_s": float(tour.estimate.step_time), "low_s": tour.interval[0], "high_s": tour.interval[1]},
        "estimate": tour.estimate.to_dict(),
        "bottleneck": bottleneck(tour.estimate),
        "elasticities": [row._asdict() for row in tour.elasticities],
        "ten_percent_better": [row._asdict() for row in tour.better],
        "memory_by_stage_bytes": tour.stages,
        "tune": describe_result(tour.tuned),
    }


def _sibling(run: Run, mean: float, sd: float) -> tuple[str, float, float, float, float]:
    name = f"{run.id}: {run.num_devices or 0:,.0f} {run.accelerator}, batch {run.global_batch or 0:,.0f}"
    return (name, run.step_time_s or float("nan"), *(float(np.exp(mean + k * sd)) for k in (0.0, -Z80, Z80)))


def _kept(plan: Plan, datatype: str) -> dict[str, Any]:
    """What the search holds as it was: datatypes and their bytes, and overlap."""
    names = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "trainable", "fused_attention", "overlap_gradient", "overlap_parameter", "overlap_tensor",
             "overlap_pipeline")  # fmt: skip
    return {"precision": datatype} | {name: float(getattr(plan, name)) for name in names}


def _accuracy_note(scores: Mapping[str, Any]) -> str:
    return (
        f"{scores['n']:,} published runs in five parts, whole source and model groups together; each part is predicted by a fit to the other "
        f"four. The 80% intervals hold {scores['coverage']:.0%} of the runs."
    )


def _point(row: Mapping[str, Any]) -> Point:
    return Point(row["id"], f"{row['model']}, {row['source']}", row["family"] or "other", row["measured_s"], row["predicted_s"], row["baseline_s"])


def _layout(plan: Plan, batch: int, datatype: str) -> str:
    words = describe_plan(plan)
    names = (("tensor_parallel", "tensor"), ("pipeline_parallel", "pipeline"), ("data_parallel", "data"), ("context_parallel", "context"),
             ("expert_parallel", "expert"), ("virtual_stages", "chunks per stage"))  # fmt: skip
    degrees = ", ".join(f"{text} {words[name]}" for name, text in names if words[name] != 1)
    return (
        f"{degrees}; micro-batch {words['micro_batch_size']:g}, global batch {batch:,}; {datatype}; recompute {words['recompute']}; ZeRO {words['zero_stage']}"
    )
