"""Plans in columns, evaluated in blocks that share one compilation, and what to minimise of an estimate."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..estimate import BatchStep, Estimate
from ..hardware import System
from ..parallel import Plan
from ..stack import Stack
from ..workload import Transformer
from ._space import Plans

BLOCK = 8192
Objective = str | Callable[[Estimate], Any]
OBJECTIVES: dict[str, Callable[[Estimate], Any]] = {
    "step_time": lambda estimate: estimate.step_time,
    "energy": lambda estimate: estimate.energy,
    "cost": lambda estimate: estimate.cost,
    "peak_memory": lambda estimate: estimate.peak_memory,
}


def objective_function(objective: Objective) -> Callable[[Estimate], Any]:
    if callable(objective):
        return objective
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; it should be one of {', '.join(OBJECTIVES)}, or a function of an Estimate.")
    return OBJECTIVES[objective]


def plan_batch(model: Transformer, system: System, plans: Plans, stack: Stack) -> BatchStep:
    width = sum(column[0].size for column in plans.columns.values())
    return BatchStep(model, system, Plan(**plans.base), stack, width=width, block=BLOCK)


def column_slots(batch: BatchStep, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Positions of the columns among the packed inputs, those of a table in order."""
    found = []
    for name, column in columns.items():
        prefix = f"plan.{name}" if column.ndim == 1 else f"plan.{name}."
        found += [i for i, path in enumerate(batch.names) if path == prefix or (column.ndim > 1 and path.startswith(prefix))]
    return np.array(found)


def estimate_rows(batch: BatchStep, slots: np.ndarray, columns: Mapping[str, np.ndarray], start: int, stop: int) -> Estimate:
    values = np.concatenate([column[start:stop].reshape(stop - start, -1).T for column in columns.values()])
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: stop - start], batch(slots, values).estimate)


def score_plans(batch: BatchStep, plans: Plans, score: Callable[[Estimate], Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Objective, feasibility and share of the memory in use, of all plans; one block of full estimates at a time."""
    slots = column_slots(batch, plans.columns)
    values, feasible, memory = (np.empty(plans.count) for _ in range(3))
    for start in range(0, plans.count, batch.block):
        rows = slice(start, min(start + batch.block, plans.count))
        estimate = estimate_rows(batch, slots, plans.columns, rows.start, rows.stop)
        values[rows] = apply_objective(score, estimate)
        feasible[rows] = estimate.feasible
        memory[rows] = estimate.peak_memory / estimate.memory_capacity
    return values, (feasible > 0) & np.isfinite(values), memory


def apply_objective(score: Callable[[Estimate], Any], estimate: Estimate) -> np.ndarray:
    """The objective of each row; built-in ones need no compilation."""
    if score in OBJECTIVES.values():
        return np.asarray(score(estimate))
    return np.asarray(jax.vmap(score)(jax.tree.map(jnp.asarray, estimate)))
