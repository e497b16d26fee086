"""Numbers behind the tables that an `Estimate` does not carry: memory of every stage, a whole training run, and what better hardware would give."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..estimate import Elasticity, Estimate, bind_step
from ..estimate._paths import layout_of, pack, path_names, unpack
from ..hardware import System
from ..parallel import Plan
from ..parallel._memory import stage_memory
from ..stack import Stack
from ..workload import Transformer

_UNITS = {
    "peak_flops_per_s": "FLOP/s", "memory_bandwidth": "B/s", "memory_capacity": "B", "link_bandwidth": "B/s", "bandwidth": "B/s", "latency": "s",
    "power": "W", "idle_power": "W", "l2_capacity": "B", "price_per_hour": "USD/h", "launch_time": "s", "collective_latency": "s",
    "step_overhead": "s", "memory_fixed": "B", "elementwise_bytes": "B", "cast_bytes": "B", "permute_bytes": "B", "score_bytes": "B",
}  # fmt: skip


class What(NamedTuple):
    """What the step time becomes when one number is better.

    Attributes:
      path: dotted name of the number.
      value: what it is. [SI]
      better: what it would be. [SI]
      step_time: predicted then. [s]
      gain: relative decrease of the step time. [1]
    """

    path: str
    value: float
    better: float
    step_time: float
    gain: float


def unit_of(path: str) -> str:
    """SI unit of a number by its dotted path; "1" for ratios and counts."""
    return next((_UNITS[part] for part in reversed(path.split(".")) if part in _UNITS), "1")


@functools.lru_cache(maxsize=8)
def _all_stages(count: int):
    return jax.jit(lambda model, plan, stack: jax.vmap(lambda stage: stage_memory(model, plan, stack, stage))(jnp.arange(count) * 1.0))


def memory_by_stage(model: Transformer, plan: Plan, stack: Stack) -> list[dict[str, float]]:
    """Memory of one device of each pipeline stage, part by part. [B]"""
    count = int(round(float(plan.pipeline_parallel)))
    memory = jax.tree.map(np.asarray, _all_stages(count)(model, plan, stack))
    return [{name: float(part[stage]) for name, part in memory._asdict().items()} for stage in range(count)]


def whole_run(estimate: Estimate, tokens: float) -> dict[str, float]:
    """Time, steps, energy and price of training on so many tokens at this speed, without interruptions."""
    seconds = tokens / float(estimate.tokens_per_s)
    steps = seconds / float(estimate.step_time)
    return {
        "tokens": tokens,
        "steps": steps,
        "days": seconds / 86400,
        "energy_kwh": steps * float(estimate.energy) / 3.6e6,
        "cost_usd": steps * float(estimate.cost),
    }


def better_by(
    model: Transformer, system: System, plan: Plan, stack: Stack, rows: Iterable[Elasticity], factor: float = 1.1, step_time: float | None = None
) -> list[What]:
    """Exact predictions with one number better by `factor` at a time: larger where more of it is faster, smaller where less is.

    Shares of a peak and fractions stop at 1. Numbers whose better value is the old one are left out.

    Args:
      step_time: calibrated time of the job as it is, to which all are scaled; None for the plain prediction. [s]
    """
    inputs = (model, system, plan, stack)
    packed, names, layout = pack(inputs), path_names(inputs), layout_of(inputs)
    now = float(bind_step(model, system, stack)(plan).step_time)
    scale = 1.0 if step_time is None else step_time / now
    found = []
    for row in rows:
        slot = names.index(row.path)
        value = float(packed[slot])
        better = value * factor if row.elasticity < 0 else value / factor
        if value <= 1 and _is_share(row.path):
            better = min(better, 1.0)
        if better == value:
            continue
        changed = packed.copy()
        changed[slot] = better
        m, s, p, k = unpack(layout, changed)
        step = float(bind_step(m, s, k)(p).step_time)
        found.append(What(row.path, value, better, step * scale, 1 - step / now))
    return sorted(found, key=lambda what: -what.gain)


def _is_share(path: str) -> bool:
    last = path.split(".")
    return any(part.endswith("efficiency") or part.endswith(("_exposed", "_overlap", "_share")) for part in last)
