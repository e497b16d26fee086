"""Memory constants of stacks, fitted to measured peaks: few numbers per stack, each with a narrow prior, by Gauss-Newton on log peak.

Constants of a stack are those of all stacks plus an offset of its own, as for step times. The peak is the larger of several stages and of
two moments, so it has kinks; Gauss-Newton with finite damping passes over them.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from ..parallel._memory import peak_memory
from ..stack import Stack
from ._constants import HARDWARE, MEMORY_DEFAULTS, NAMES
from ._rows import Rows

FITTED = {
    # name: prior width of the shared value, and between stacks [log]
    "activation_memory": (0.05, 0.10),
    "selective_memory": (0.2, 0.3),
    "logit_bytes": (0.2, 0.4),
    "working_layers": (0.2, 0.3),
    "memory_fixed": (0.3, 0.7),
}
NARROW_STORAGE = ("mcore",)
"""Families whose 8-bit matmuls keep 8-bit operands (Transformer Engine); compiled FSDP keeps 16-bit ones."""
MEMORY_NOISE = 0.05


def default_memory(family: str, stack: str) -> dict[str, float]:
    """Memory constants of a stack without measured peaks."""
    narrow = 1.0 if family in NARROW_STORAGE or stack == "simumax" else 1e-3
    return MEMORY_DEFAULTS | dict(low_precision_storage=narrow)


def _stack(memory: dict) -> Stack:
    return Stack(**{name: 1.0 for name in NAMES if name not in HARDWARE} | memory)


@lru_cache(maxsize=1)
def _compiled():
    def log_peak(log_values, narrow, model, plan):
        values = dict(zip(FITTED, jnp.exp(log_values), strict=True))
        memory = MEMORY_DEFAULTS | values | dict(low_precision_storage=narrow)
        return jnp.log(sum(peak_memory(model, plan, _stack(memory))[0]))

    return jax.jit(jax.vmap(jax.value_and_grad(log_peak)))


def log_peak(rows: Rows, memory: dict[str, dict[str, float]]) -> np.ndarray:
    """Predicted log peak memory of each row with its stack's constants. [log B]"""
    constants = [memory.get(stack) or default_memory(family, stack) for stack, family in zip(rows.stack, rows.family, strict=True)]
    values = np.log([[c[name] for name in FITTED] for c in constants])
    with jax.enable_x64(True):
        pick = lambda tree: jax.tree.map(lambda x: np.asarray(x, float), tree)
        return np.asarray(_compiled()(values, np.array([c["low_precision_storage"] for c in constants]), pick(rows.model), pick(rows.plan))[0])


def fit_memory(rows: Rows, *, passes: int = 12) -> dict[str, dict[str, float]]:
    """Memory constants of every stack of the rows, and under "" those of any other; stacks without a measured peak get the shared values.

    Args:
      rows: runs; those without `peak_mem_gb` only name their stacks.
    """
    measured = np.array([run.peak_mem_gb is not None and weight > 0 for run, weight in zip(rows.runs, rows.weight, strict=True)])
    families = dict(zip(rows.stack, rows.family, strict=True))
    start = {stack: default_memory(family, stack) for stack, family in families.items()}
    if not measured.any():
        return start
    some = rows.take(measured)
    target = np.log([(run.peak_mem_gb or np.nan) * 1e9 for run in some.runs])
    stacks = sorted(set(some.stack))
    names = list(FITTED)
    base = np.log([MEMORY_DEFAULTS[name] for name in names])
    count = len(names) * (1 + len(stacks))
    width = np.concatenate([[FITTED[n][0] for n in names]] + [[FITTED[n][1] for n in names]] * len(stacks))
    matrix = np.zeros((len(some), len(names), count))
    for r, stack in enumerate(some.stack):
        own = len(names) * (1 + stacks.index(stack))
        matrix[r] = np.eye(len(names), count) + np.eye(len(names), count, own)
    theta = np.zeros(count)
    sizes = np.array([some.stack.count(stack) for stack in some.stack])
    weight = some.weight * np.minimum(1.0, np.sqrt(20 / sizes))
    for _ in range(passes):
        values = base + matrix @ theta
        memory = {stack: start[stack] | dict(zip(names, np.exp(values[some.stack.index(stack)]), strict=True)) for stack in stacks}
        predicted, gradient = _peaks(some, memory)
        residual = target - predicted
        robust = weight * 4 / (3 + (residual / MEMORY_NOISE) ** 2) / MEMORY_NOISE**2
        jacobian = np.einsum("rn,rnp->rp", gradient, matrix)
        precision = (jacobian * robust[:, None]).T @ jacobian + np.diag(1 / width**2)
        theta = theta + np.clip(np.linalg.solve(1.2 * precision, jacobian.T @ (robust * residual) - theta / width**2), -0.5, 0.5)
    shared = dict(zip(names, np.exp(base + theta[: len(names)]), strict=True))
    out = {stack: memory | shared for stack, memory in start.items()}
    out[""] = default_memory("", "") | shared  # of a stack not among these
    for i, stack in enumerate(stacks):
        own = theta[len(names) * (1 + i) : len(names) * (2 + i)]
        out[stack] = start[stack] | dict(zip(names, np.exp(base + theta[: len(names)] + own), strict=True))
    return {stack: {name: float(value) for name, value in memory.items()} for stack, memory in out.items()}


def _peaks(rows: Rows, memory: dict[str, dict[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    values = np.log([[memory[stack][name] for name in FITTED] for stack in rows.stack])
    narrow = np.array([memory[stack]["low_precision_storage"] for stack in rows.stack])
    with jax.enable_x64(True):
        pick = lambda tree: jax.tree.map(lambda x: np.asarray(x, float), tree)
        predicted, gradient = _compiled()(values, narrow, pick(rows.model), pick(rows.plan))
    return np.asarray(predicted), np.asarray(gradient)
