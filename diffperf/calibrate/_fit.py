"""MAP fit of all constants to measured step times: Gauss-Newton on log time with a Student-t loss, exact Jacobians by reverse mode.

A row's log time depends on its constants alone, and these are linear in the parameters (`_design.py`), so one vmapped gradient of
`train_step` per pass gives the whole Jacobian, and the normal equations are small. Clipped steps keep the first passes safe. The
posterior is the Laplace approximation at the mode.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from ..estimate import train_step
from ._constants import apply_to_system, stack_from
from ._design import Design, build_design
from ._rows import Rows

NOISE = 0.06
"""Scale of a row's log error; a perfect configuration-only model would still see about this much between repeats."""
DEGREES_OF_FREEDOM = 3.0
GROUP_ROWS = 25.0
"""Rows of one (source, model) group beyond this many count by the square root: no one table may rule."""
BLOCK = 1024
"""Rows are padded to a multiple of this, so that folds share one compilation."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted model.

    Attributes:
      design: its parameters and priors.
      parameters: the mode, shape (parameters,).
      precision: Gauss-Newton Hessian of the negative log posterior, shape (parameters, parameters).
    """

    design: Design
    parameters: np.ndarray
    precision: np.ndarray

    def covariance(self) -> np.ndarray:
        """Laplace covariance of the parameters."""
        return np.linalg.inv(self.precision)

    def constants(self, rows: Rows) -> np.ndarray:
        """Constants of each row on the scale of the fit, shape (rows, constants)."""
        return self.design.constants(rows, self.parameters)


@lru_cache(maxsize=1)
def _compiled() -> Callable:
    def log_time(constants, model, system, plan):
        return jnp.log(train_step(model, apply_to_system(system, constants), plan, stack_from(constants)).step_time)

    # These run a few blocks of rows: on a CPU compiling quickly matters more than running quickly (5 s against 9, 9 ms a block against 3).
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(jax.vmap(jax.value_and_grad(log_time)), compiler_options=options)


def log_time_and_gradient(rows: Rows, constants: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predicted log time of each row, shape (rows,), and its gradient in the row's constants, shape (rows, constants); float64."""
    n = len(rows)
    index = np.minimum(np.arange(-(-n // BLOCK) * BLOCK), n - 1)
    with jax.enable_x64(True):
        pick = lambda tree: jax.tree.map(lambda x: np.asarray(x, float)[index], tree)
        inputs = (constants[index], pick(rows.model), pick(rows.system), pick(rows.plan))
        values, gradients = [], []
        for start in range(0, len(index), BLOCK):
            block = slice(start, start + BLOCK)
            value, gradient = _compiled()(*jax.tree.map(lambda x, block=block: x[block], inputs))
            values.append(np.asarray(value))
            gradients.append(np.asarray(gradient))
    return np.concatenate(values)[:n], np.concatenate(gradients)[:n]


def balanced_weights(rows: Rows) -> np.ndarray:
    """Row weights: the row's own, down for large (source, model) groups, down again for sources above the median total."""
    weight = rows.weight.copy()
    used = Counter(g for g, w in zip(rows.groups, weight) if w > 0)
    weight *= np.array([min(1.0, np.sqrt(GROUP_ROWS / max(used[g], 1))) for g in rows.groups])
    totals: Counter = Counter()
    for group, w in zip(rows.groups, weight):
        totals[group[0]] += w
    if not any(totals.values()):
        return weight
    median = np.median([t for t in totals.values() if t > 0])
    return weight * np.array([min(1.0, np.sqrt(median / totals[g[0]])) if totals[g[0]] > 0 else 1.0 for g in rows.groups])


def fit_runs(rows: Rows, *, start: Fit | None = None, passes: int = 14, balance: bool = True, progress: Callable[[int, float], None] | None = None) -> Fit:
    """Fits every constant to the rows.

    Args:
      rows: measured rows; those of weight 0 are ignored.
      start: warm start from a fit whose keys are carried over.
      passes: Gauss-Newton passes at most; stops when the largest step falls below 1e-3.
      balance: weight rows by `balanced_weights`, else by their own weight.
      progress: called with the pass and the weighted root mean square log error.
    Returns:
      The fit.
    Raises:
      ValueError: when no row has a positive weight and a finite time.
    """
    weight = balanced_weights(rows) if balance else rows.weight
    use = (weight > 0) & np.isfinite(rows.log_time)
    if not use.any():
        raise ValueError("fit_runs: no row has a measured time and a positive weight. Give at least one measured row.")
    rows, weight = rows.take(use), weight[use]
    design = build_design(rows)
    theta = design.mean.copy()
    if start is not None:
        known = start.design.index
        theta = np.array([start.parameters[known[k]] if k in known else m for k, m in zip(design.keys, design.mean)])
    prior = 1 / design.width**2
    precision = np.diag(prior)
    for step in range(passes):
        predicted, gradient = log_time_and_gradient(rows, design.constants(rows, theta))
        residual = rows.log_time - predicted
        robust = weight * (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + (residual / NOISE) ** 2) / NOISE**2
        jacobian = design.jacobian(rows, gradient)
        precision = (jacobian * robust[:, None]).T @ jacobian + np.diag(prior)
        slope = jacobian.T @ (robust * residual) - prior * (theta - design.mean)
        move = np.linalg.solve(precision, slope)
        move = np.clip(move, -1.0, 1.0)
        theta = theta + move
        if progress:
            progress(step, float(np.sqrt(np.average(residual**2, weights=weight))))
        if np.abs(move).max() < 1e-3:
            break
    return Fit(design, theta, precision)
