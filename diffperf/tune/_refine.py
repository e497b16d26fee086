"""Gradients on the continuous knobs of a few good plans: part of the layers recomputed, parts of activations and optimizer states on the host.

Adam on logits from many starts at once, with a hinge on the memory that overflows, then rounding: recomputation to whole layers of a stage, small
offloads to none. Every rounded plan is evaluated exactly, so smoothing and penalty decide only where to look.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..estimate import BatchStep, Estimate, train_step
from ..estimate._paths import Layout, layout_of
from ..hardware import System
from ..parallel import Plan
from ..stack import Stack
from ..workload import Transformer, num_layers
from ._evaluate import apply_objective, column_slots, estimate_rows

KNOBS = ("recompute_full", "activation_offload", "optimizer_offload")
_STARTS = 16
_STEPS = 100
_LEARNING_RATE = 0.15  # logits travel 15 in all, from one corner to the other
_OVERFLOW_WEIGHT = 10.0  # 1% too much memory weighs as much as 10% of time
_NO_OFFLOAD = 0.03  # less than this is rounded to none: not worth a stream of its own


def refine_plans(
    model: Transformer,
    system: System,
    stack: Stack,
    batch: BatchStep,
    plans: Sequence[Plan],
    columns: Sequence[str],
    score: Callable[[Estimate], Any],
    movable: tuple[bool, bool, bool],
) -> tuple[tuple[Plan, Estimate, float] | None, float]:
    """The best feasible plan that differs from `plans` in `KNOBS` only, with estimate and objective, and the seconds spent compiling.

    Args:
      batch: evaluates rows exactly, around a plan that differs from each of `plans` in `columns` only.
      movable: which of `KNOBS` may change.
    Returns:
      None in place of the plan when no rounded plan is feasible.
    """
    if not any(movable):
        return None, 0.0
    stacked = jax.tree.map(lambda *leaves: np.repeat(np.stack(leaves), _STARTS, axis=0), *[_padded(plans, i) for i in range(4)])
    held = np.stack([np.asarray(getattr(stacked, name)) for name in KNOBS], axis=1)
    rng = np.random.default_rng(0)
    start = np.where(movable, rng.uniform(0.02, 0.98, held.shape), held)
    start[::_STARTS] = np.clip(held[::_STARTS], 0.02, 0.98)  # one start at the plan itself
    begin, before = time.perf_counter(), _descent.cache_info().misses
    descend = _descent(layout_of((model, system, plans[0], stack)), score, len(start), held.dtype.name)
    seconds = time.perf_counter() - begin if _descent.cache_info().misses > before else 0.0
    logits = np.log(start / (1 - start), dtype=held.dtype, where=np.array(movable), out=np.zeros_like(held))
    ends = np.asarray(descend(model, system, stacked, stack, logits, held, np.asarray(movable, held.dtype)))
    rows, shares = _rounded(model, stacked, np.where(movable, ends, held), movable)
    return _best(system, batch, columns, jax.tree.map(lambda leaf: leaf[rows], stacked), shares, score), seconds


def _padded(plans: Sequence[Plan], i: int) -> Plan:
    return jax.tree.map(np.asarray, plans[min(i, len(plans) - 1)])


@functools.lru_cache(maxsize=8)
def _descent(layout: Layout, score: Callable[[Estimate], Any], rows: int, dtype: str):
    """The compiled descent for one structure of inputs and one objective."""
    import optax  # takes as long to import as all of diffperf

    def run(model, system, plan, stack, logits, held, moving):
        optimizer = optax.adam(_LEARNING_RATE)

        def loss(logits: Float[Array, " knobs"]) -> Float[Array, ""]:
            shares = jnp.where(moving > 0, jax.nn.sigmoid(logits), held)
            estimate = train_step(model, system, with_shares(plan, shares), stack)
            overflow = jnp.maximum(jnp.log(estimate.peak_memory / estimate.memory_capacity), 0.0)
            return jnp.log(jnp.maximum(score(estimate), 1e-30)) + _OVERFLOW_WEIGHT * overflow

        def step(carry, _):
            logits, state = carry
            updates, state = optimizer.update(jax.grad(loss)(logits), state)
            return (optax.apply_updates(logits, updates), state), None

        (logits, _), _ = jax.lax.scan(step, (logits, optimizer.init(logits)), length=_STEPS)
        return jax.nn.sigmoid(logits)

    number = lambda *shape: jax.ShapeDtypeStruct(shape, np.dtype(dtype))
    model, system, plan, stack = jax.tree.unflatten(layout.tree, [number(*shape) for shape in layout.shapes])
    plans = jax.tree.map(lambda leaf: number(rows, *leaf.shape), plan)
    knobs = (number(rows, len(KNOBS)), number(rows, len(KNOBS)), number(len(KNOBS)))
    return jax.jit(jax.vmap(run, in_axes=(None, None, 0, None, 0, 0, None))).lower(model, system, plans, stack, *knobs).compile()


def with_shares(plan: Plan, shares: Float[Array, " knobs"]) -> Plan:
    """A plan with its continuous knobs set."""
    return dataclasses.replace(plan, **{name: shares[..., i] for i, name in enumerate(KNOBS)})


def _rounded(model: Transformer, plans: Plan, ends: np.ndarray, movable) -> tuple[np.ndarray, np.ndarray]:
    """Shares that can run near each end of the descent, and the row of `plans` each belongs to."""
    layers = np.maximum(np.floor(float(num_layers(model)) / np.asarray(plans.pipeline_parallel)), 1.0)
    full, activation, optimizer = ends.T
    whole = [np.floor(full * layers) / layers, np.minimum(np.ceil(full * layers) / layers, 1.0)] if movable[0] else [full]
    part = lambda x, moves: [np.where(x < _NO_OFFLOAD, 0.0, x), np.zeros_like(x)] if moves else [x]
    shares = [np.stack([f, a, o], axis=1) for f in whole for a in part(activation, movable[1]) for o in part(optimizer, movable[2])]
    return np.tile(np.arange(len(ends)), len(shares)), np.concatenate(shares)


def _best(system: System, batch: BatchStep, names: Sequence[str], plans: Plan, shares: np.ndarray, score) -> tuple[Plan, Estimate, float] | None:
    columns = {name: np.asarray(getattr(plans, name)) for name in names} | {name: shares[:, i] for i, name in enumerate(KNOBS)}
    count, slots = len(shares), column_slots(batch, columns)
    estimate = estimate_rows(batch, slots, columns, 0, count)
    at_home = estimate_rows(batch, slots, columns | {name: np.zeros(count) for name in KNOBS[1:]}, 0, count)
    moved = at_home.memory.optimizer * shares[:, 2] + at_home.memory.activations - estimate.memory.activations
    values = np.where(estimate.feasible & (moved <= float(system.host.memory_capacity)), apply_objective(score, estimate), np.inf)
    row = int(np.argmin(values))
    if not np.isfinite(values[row]):
        return None
    plan = with_shares(jax.tree.map(lambda leaf: leaf[row], plans), shares[row])
    return plan, jax.tree.map(lambda leaf: leaf[row], estimate), float(values[row])
