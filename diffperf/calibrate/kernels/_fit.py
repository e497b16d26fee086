"""MAP fit of a kernel library's constants to measured times: Levenberg-Marquardt on log time with a soft-L1 loss and several starts at once.

The residual of a row is `log(predicted) - log(measured)`; beyond `SCALE` it counts by its size, not its square. A Gaussian prior holds what the
rows do not say. All starts run as one vmapped program: first on a subsample, then the best alone on all rows. float64 throughout.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cost.kernel._constants import constrain, spreads
from ...cost.kernel._correction import WEIGHT_SPREAD, bounded, log_factor, num_weights, start_weights
from ._families import Family

SCALE = 0.05
"""Log error beyond which the loss turns from squared to linear; also the noise that the prior is weighed against."""
SCOUT_ROWS = 700
BLOCK = 512


@dataclasses.dataclass(frozen=True)
class KernelFit:
    """A fitted library.

    Attributes:
      family: name of the family of kernels.
      free: unconstrained constants at the mode, shape (constants,).
      weights: of the correction, shape (weights,); empty for none.
      precision: Gauss-Newton Hessian of the negative log posterior over constants and weights.
      loss: negative log posterior at the mode, robust.
    """

    family: Family
    free: np.ndarray
    weights: np.ndarray
    precision: np.ndarray
    loss: float

    def constants(self) -> Any:
        """The constants as the family's NamedTuple."""
        return constrain(self.family.constants, self.family.priors, jnp.asarray(self.free))


def predict_log_time(family: Family, vector: Any, shape: Any, device: Any) -> Any:
    """Log time of rows from the vector of unconstrained constants and, after them, weights of the correction."""
    count = len(family.constants._fields)
    constants = constrain(family.constants, family.priors, vector[:count])
    time = family.time(shape, device, constants)
    if vector.shape[0] > count:
        time = bounded(time, log_factor(vector[count:], family.features(shape, device)), family.bound(shape, device, constants))
    return jnp.log(time)


def _loss(residual, weight, move):
    return jnp.sum(weight * 2 * (jnp.sqrt(1 + (residual / SCALE) ** 2) - 1)) / 2 + jnp.sum(move**2) / 2


@cache
def _solver(family: Family, passes: int) -> Callable:
    def run(vector, mean, sd, shape, device, log_time, weight):
        predict = lambda v: predict_log_time(family, v, shape, device)
        residual_of = lambda v: predict(v) - log_time
        loss_of = lambda v, r: _loss(r, weight, (v - mean) / sd)

        def step(state, _):
            v, r, loss, damping = state
            jacobian = jax.jacfwd(predict)(v)
            robust = weight / jnp.sqrt(1 + (r / SCALE) ** 2) / SCALE**2
            precision = (jacobian * robust[:, None]).T @ jacobian + jnp.diag(1 / sd**2)
            slope = jacobian.T @ (robust * r) + (v - mean) / sd**2
            move = -jnp.linalg.solve(precision + damping * jnp.diag(jnp.diag(precision)), slope)
            new = v + jnp.clip(move, -1.5, 1.5)
            new_r = residual_of(new)
            new_loss = loss_of(new, new_r)
            better = new_loss < loss
            pick = lambda a, b: jnp.where(better, a, b)
            return (pick(new, v), pick(new_r, r), pick(new_loss, loss), jnp.clip(jnp.where(better, damping / 3, damping * 4), 1e-7, 1e4)), None

        r = residual_of(vector)
        (v, r, loss, _), _ = jax.lax.scan(step, (vector, r, loss_of(vector, r), jnp.asarray(1e-2)), None, length=passes)
        jacobian = jax.jacfwd(predict)(v)
        robust = weight / jnp.sqrt(1 + (r / SCALE) ** 2) / SCALE**2
        return v, loss, (jacobian * robust[:, None]).T @ jacobian + jnp.diag(1 / sd**2)

    return jax.jit(jax.vmap(run, in_axes=(0,) + (None,) * 6)), jax.jit(run)


def _padded(rows: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers filled up to a multiple of `block`, and weights that are 0 on the filling."""
    size = -(-len(rows) // block) * block
    index = np.concatenate([rows, np.repeat(rows[:1], size - len(rows))])
    return index, (np.arange(size) < len(rows)) * 1.0


def fit_kernels(
    family: Family, shape: Any, device: Any, log_time: np.ndarray, *, weight: np.ndarray | None = None, mean: np.ndarray | None = None,
    sd: np.ndarray | None = None, correction: bool = False, starts: int = 4, passes: int = 30, seed: int = 0,
) -> KernelFit:  # fmt: skip
    """Fits one library on one chip.

    Args:
      family: which kernels.
      shape: the family's shape, every field of shape (rows,).
      device: the chip, every field of shape () or (rows,).
      log_time: log of measured seconds, shape (rows,).
      weight: of each row; 1 by default.
      mean: prior mean of the unconstrained constants; 0 by default.
      sd: prior standard deviations; by default the family's spreads.
      correction: fit the network too.
      starts: random starts beside the prior's mean.
      passes: Levenberg-Marquardt steps on all rows.
    Raises:
      ValueError: for no rows.
    """
    if len(log_time) == 0:
        raise ValueError("no rows to fit. Give at least one measured kernel.")
    count, rng = len(family.constants._fields), np.random.default_rng(seed)
    mean = np.zeros(count) if mean is None else mean
    sd = spreads(family.constants, family.priors) if sd is None else sd
    weight = np.ones(len(log_time)) if weight is None else weight
    with jax.enable_x64(True):
        device = type(device)(*(np.broadcast_to(np.asarray(x, float), len(log_time)) for x in device))
        shape = type(shape)(*(np.broadcast_to(np.asarray(x, float), len(log_time)) for x in shape))
        pick = lambda tree, index: type(tree)(*(x[index] for x in tree))

        def solve(vectors, mean, sd, rows, passes):
            index, real = _padded(rows, BLOCK)
            args = (mean, sd, pick(shape, index), pick(device, index), log_time[index], real * weight[index])
            many, one = _solver(family, passes)
            return [np.asarray(x) for x in (many(vectors, *args) if vectors.ndim == 2 else one(vectors, *args))]

        everything = np.arange(len(log_time))
        vector = mean
        if starts:
            scout = everything if len(everything) <= SCOUT_ROWS else rng.choice(everything, SCOUT_ROWS, replace=False)
            noise = rng.normal(size=(starts, count)) * np.minimum(sd, 0.7)
            vectors, losses, _ = solve(mean + np.concatenate([np.zeros((1, count)), noise]), mean, sd, scout, 20)
            vector = vectors[int(np.nanargmin(losses))]
        vector, loss, precision = solve(vector, mean, sd, everything, passes)
        if correction:
            features = family.features(pick(shape, everything[:1]), pick(device, everything[:1])).shape[-1]
            wide = np.concatenate([vector, start_weights(features, seed)])
            mean = np.concatenate([mean, np.zeros(num_weights(features))])
            sd = np.concatenate([sd, np.full(num_weights(features), WEIGHT_SPREAD)])
            vector, loss, precision = solve(wide, mean, sd, everything, passes)
    return KernelFit(family, vector[:count], vector[count:], precision, float(loss))


@partial(jax.jit, static_argnums=0)
def _predict(family, vector, shape, device):
    return predict_log_time(family, vector, shape, device)


def predict_rows(fit: KernelFit, shape: Any, device: Any) -> np.ndarray:
    """Predicted log seconds of rows, shape (rows,); float64."""
    with jax.enable_x64(True):
        tidy = lambda tree: type(tree)(*(np.asarray(x, float) for x in tree))
        return np.asarray(_predict(fit.family, np.concatenate([fit.free, fit.weights]), tidy(shape), tidy(device)))
