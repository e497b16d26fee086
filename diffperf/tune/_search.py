"""Exhaustive search over legal plans, one batched evaluation; gradients then refine what is continuous."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..estimate import BatchStep, Estimate
from ..hardware import System
from ..parallel import Plan
from ..parallel._plan import plan_numbers
from ..stack import Stack
from ..workload import Transformer
from ._evaluate import OBJECTIVES, Objective, apply_objective, column_slots, estimate_rows, objective_function, plan_batch, score_plans
from ._refine import refine_plans
from ._result import NoFeasiblePlan, RankedPlan, TuneResult
from ._space import KNOBS, Plans, PlanSpace, describe_plan, legal_plans

_DEVICE_FACTORS = (2, 4, 8, 16, 32, 64)


def tune_plan(
    model: Transformer,
    system: System,
    stack: Stack,
    *,
    num_devices: int,
    global_batch_size: int,
    objective: Objective = "step_time",
    space: PlanSpace | None = None,
    fixed: Mapping[str, Any] | None = None,
    top: int = 10,
    refine: bool = True,
) -> TuneResult:
    """The best plans for a model on `num_devices` of a system.

    Every legal plan is evaluated; of plans with equal objectives the one with less sharding comes first. The continuous knobs (part of the
    layers recomputed, parts of optimizer states and activations kept in host memory) are then refined from the best few by gradients, rounded
    to what can run, and evaluated exactly; the result is never worse than the best plan of the exhaustive search.

    Args:
      global_batch_size: sequences per step. [1]
      objective: "step_time", "energy", "cost" or "peak_memory" of a step, or a function of an `Estimate` to minimise, written with jax.numpy.
      space: values per knob; None for `PlanSpace()`.
      fixed: restrictions by name, as in `enumerate_plans`.
      top: plans to return.
    Raises:
      NoFeasiblePlan: when no legal plan fits into memory.
      ValueError: for a bad restriction or objective, or when no plan is legal.
    """
    score = objective_function(objective)
    if not top >= 1:
        raise ValueError(f"top is {top}; it should be at least 1.")
    start = time.perf_counter()
    plans = legal_plans(model, system, space, num_devices=num_devices, global_batch_size=global_batch_size, fixed=fixed)
    batch = plan_batch(model, system, plans, stack)
    values, feasible, memory = score_plans(batch, plans, score)
    if not feasible.any():
        raise _no_feasible(model, system, stack, plans, memory, space, fixed, num_devices, global_batch_size)
    order = np.argsort(np.where(feasible, values, np.inf), kind="stable")[: min(top, int(feasible.sum()))]
    ranked = _ranked(batch, plans, order, score)
    compiling, refined, gain = batch.compile_seconds, None, 0.0
    if refine:
        movable = tuple(name not in (fixed or {}) and not (name == "recompute" and _asked(space).recompute != PlanSpace().recompute)
                        for name in ("recompute", "activation_offload", "optimizer_offload"))  # fmt: skip
        found, seconds = refine_plans(model, system, stack, batch, [r.plan for r in ranked[:4]], tuple(plans.columns), score, movable)
        compiling += seconds
        if found is not None and found[2] < ranked[0].objective:
            refined = RankedPlan(found[0], found[1], found[2], describe_plan(found[0]))
            gain = 1 - found[2] / ranked[0].objective
    name = objective if isinstance(objective, str) else getattr(objective, "__name__", "objective")
    total = time.perf_counter() - start
    return TuneResult(ranked, refined, gain, name, plans.tried, plans.count, int(feasible.sum()), compiling, total - compiling)


def evaluate_plans(model: Transformer, system: System, plans: Plan, stack: Stack) -> Estimate:
    """Estimates of batched plans, as NumPy arrays with the same leading axis; in blocks, with one compilation for any number of them."""
    leaves = {name: np.asarray(getattr(plans, name)) for name in plan_numbers(global_batch_size=1)}
    base = {name: leaf[0] for name, leaf in leaves.items()}
    columns = {name: leaf for name, leaf in leaves.items() if name == "tensor_parallel" or (leaf != leaf[0]).any()}
    count = len(leaves["tensor_parallel"])
    batch = plan_batch(model, system, Plans(base, columns, count), stack)
    slots = column_slots(batch, columns)
    blocks = [estimate_rows(batch, slots, columns, start, min(start + batch.block, count)) for start in range(0, count, batch.block)]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *blocks)


def _asked(space: PlanSpace | None) -> PlanSpace:
    return space or PlanSpace()


def _ranked(batch: BatchStep, plans: Plans, order: np.ndarray, score: Callable[[Estimate], Any]) -> tuple[RankedPlan, ...]:
    chosen = {name: column[order] for name, column in plans.columns.items()}
    result = []
    for start in range(0, len(order), batch.block):
        stop = min(start + batch.block, len(order))
        estimates = estimate_rows(batch, column_slots(batch, chosen), chosen, start, stop)
        values = apply_objective(score, estimates)
        for row in range(stop - start):
            plan = Plan(**plans.base | {name: column[start + row] for name, column in chosen.items()})
            estimate = jax.tree.map(lambda leaf, row=row: leaf[row], estimates)
            result.append(RankedPlan(plan, estimate, float(values[row]), describe_plan(plan)))
    return tuple(result)


def _no_feasible(model, system, stack, plans, memory, space, fixed, num_devices, global_batch_size) -> NoFeasiblePlan:
    """The error, with the changes that would fit, each evaluated over the whole space."""
    leanest = int(np.argmin(memory))
    best = _ranked(plan_batch(model, system, plans, stack), plans, np.array([leanest]), OBJECTIVES["peak_memory"])[0]
    peak, capacity = float(best.estimate.peak_memory), float(best.estimate.memory_capacity)
    space, fixed = _asked(space), dict(fixed or {})

    def fitting(change: Mapping[str, Any], space=space, factor=1):
        """The fastest plan that fits after a change, or None."""
        larger = eqx.tree_at(lambda s: s.num_devices, system, jnp.asarray(max(float(system.num_devices), num_devices * factor), float))
        try:
            tried = legal_plans(model, larger, space, num_devices=num_devices * factor, global_batch_size=global_batch_size, fixed=change)
        except ValueError:
            return None
        batch = plan_batch(model, larger, tried, stack)
        values, feasible, _ = score_plans(batch, tried, OBJECTIVES["step_time"])
        if not feasible.any():
            return None
        return _ranked(batch, tried, np.array([np.argmin(np.where(feasible, values, np.inf))]), OBJECTIVES["step_time"])[0]

    changes, default = [], PlanSpace()
    lifted = [name for name in KNOBS if name in fixed or getattr(space, name) != getattr(default, name)]
    for name in lifted:
        without = {key: value for key, value in fixed.items() if key != name}
        if fit := fitting(without, _with(space, name)):
            changes.append(f"{name} = {fit.words.get(name)}")
    if not changes and len(lifted) > 1:
        if fit := fitting({key: value for key, value in fixed.items() if key not in lifted}, default):
            changes.append(", ".join(f"{name} = {fit.words.get(name)}" for name in lifted))
    for name in ("optimizer_offload", "activation_offload"):
        fit = None if name in fixed else fitting(fixed | {name: 1.0})
        if fit and _on_host(model, system, stack, fit, name) <= float(system.host.memory_capacity):
            changes.append(f"{name} = 1")
    for factor in _DEVICE_FACTORS:
        if fitting(fixed, space, factor):
            changes.append(f"{num_devices * factor} devices")
            break
    words = ", ".join(f"{name} = {value}" for name, value in best.words.items())
    fits = f"What would fit: {'; or '.join(changes)}" if changes else "No change of one restriction, offloading or 64 times the devices fits"
    return NoFeasiblePlan(
        f"none of {plans.count} legal plans for {num_devices} devices fits into memory. The leanest ({words}) needs {peak / 1e9:.1f} GB on pipeline "
        f"stage {float(best.estimate.peak_stage):.0f}, {(peak - capacity) / 1e9:.1f} GB more than the {capacity / 1e9:.1f} GB of a device. "
        f"{fits}; or devices with at least {peak / 1e9:.0f} GB.",
        peak - capacity,
        tuple(changes),
    )


def _on_host(model: Transformer, system: System, stack: Stack, ranked: RankedPlan, name: str) -> float:
    """Host memory that an offload of a plan takes, per device. [B]"""
    at_home = evaluate_plans(model, system, jax.tree.map(lambda x: np.asarray(x)[None], dataclasses.replace(ranked.plan, **{name: 0.0})), stack)
    part = name.split("_")[0].replace("activation", "activations")
    return float(getattr(at_home.memory, part)[0] - getattr(ranked.estimate.memory, part))


def _with(space: PlanSpace, name: str) -> PlanSpace:
    return dataclasses.replace(space, **{name: getattr(PlanSpace(), name)})
