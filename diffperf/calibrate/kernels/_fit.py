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

from ...cost.kernel._constants import constrain
from ...cost.kernel._correction import bounded, log_factor, start_weights, weight_spreads
from ._families import Family

SCALE = 0.05
"""Log error beyond which the loss turns from squared to linear; also the noise that the prior is weighed against."""
SCOUT_ROWS = 768
CORRECTION_STARTS = 3
FROZEN = 0.02
"""Spread of the constants while the correction is fitted: they stay those of the closed form, which must stand alone and carry over to other chips."""
SIZES = (64, 256, 768, 1536, 3072)
"""Rows are filled up to one of these, or to a multiple of the last."""


@dataclasses.dataclass(frozen=True)
class KernelFit:
    """A fitted library.

    Attributes:
      family: which kernels.
      free: unconstrained constants at the mode, shape (constants,).
      weights: of the correction, shape (weights,); empty for none.
      precision: Gauss-Newton Hessian of the negative log posterior of the closed form, shape (constants, constants).
      loss: negative log posterior at the mode, robust.
      noise: robust standard deviation of the residuals, in log time.
    """

    family: Family
    free: np.ndarray
    weights: np.ndarray
    precision: np.ndarray
    loss: float
    noise: float

    def constants(self) -> Any:
        """The constants as the family's NamedTuple."""
        return constrain(self.family.constants, self.family.priors, jnp.asarray(self.free))


def predict_log_time(family: Family, vector: Any, shape: Any, device: Any) -> Any:
    """Log time of rows from the vector of unconstrained constants and, after them, weights of the correction."""
    count = family.size
    constants = constrain(family.constants, family.priors, vector[:count])
    time = family.time(shape, device, constants)
    if vector.shape[0] > count:
        time = bounded(time, log_factor(vector[count:], family.features(shape, device)), family.bound(shape, device, constants))
    return jnp.log(time)


def _loss(residual, weight, move):
    return jnp.sum(weight * 2 * (jnp.sqrt(1 + (residual / SCALE) ** 2) - 1)) / 2 + jnp.sum(move**2) / 2


@cache
def _solver(family: Family, passes: int) -> tuple[Callable, Callable]:
    def run(vector, mean, sd, shape, device, log_time, weight):
        residual_of = lambda v: predict_log_time(family, v, shape, device) - log_time
        slopes = jax.vmap(jax.grad(partial(predict_log_time, family)), in_axes=(None, 0, 0))  # a row's time depends on that row alone
        loss_of = lambda v, r: _loss(r, weight, (v - mean) / sd)

        def step(state, _):
            v, r, loss, damping = state
            jacobian = slopes(v, shape, device)
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
        jacobian = slopes(v, shape, device)
        robust = weight / jnp.sqrt(1 + (r / SCALE) ** 2) / SCALE**2
        return v, loss, (jacobian * robust[:, None]).T @ jacobian + jnp.diag(1 / sd**2)

    return jax.jit(jax.vmap(run, in_axes=(0,) + (None,) * 6)), jax.jit(run)


def _padded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers filled up to one of few sizes, so that fits share compilations, and weights that are 0 on the filling."""
    size = next((size for size in SIZES if size >= len(rows)), -(-len(rows) // SIZES[-1]) * SIZES[-1])
    index = np.concatenate([rows, np.repeat(rows[:1], size - len(rows))])
    return index, (np.arange(size) < len(rows)) * 1.0


def fit_kernels(
    family: Family, shape: Any, device: Any, log_time: np.ndarray, *, weight: np.ndarray | None = None, mean: np.ndarray | None = None,
    sd: np.ndarray | None = None, correction: bool = False, starts: int = 4, passes: int = 30, most: int = 3072, start: KernelFit | None = None, seed: int = 0,
) -> KernelFit:  # fmt: skip
    """Fits one library on one chip.

    Args:
      family: which kernels.
      shape: the family's shape, every field of shape () or (rows,).
      device: the chip, every field of shape () or (rows,).
      log_time: log of measured seconds, shape (rows,).
      weight: of each row; 1 by default.
      mean: prior mean of the unconstrained constants; 0 by default.
      sd: prior standard deviations; by default the family's spreads.
      correction: fit the network too.
      starts: random starts beside the prior's mean.
      passes: Levenberg-Marquardt steps after the starts; the correction takes twice as many.
      most: rows to use at most, drawn at random: more of them cost time and say little.
      start: a fit to the same rows to go on from, in place of random starts.
    Raises:
      ValueError: for no rows.
    """
    if len(log_time) == 0:
        raise ValueError("no rows to fit. Give at least one measured kernel.")
    rng = np.random.default_rng(seed)
    mean = np.zeros(family.size) if mean is None else mean
    sd = family.spreads() if sd is None else sd
    weight = np.ones(len(log_time)) if weight is None else weight
    everything = np.arange(len(log_time)) if len(log_time) <= most else np.sort(rng.choice(len(log_time), most, replace=False))
    scout = everything if len(everything) <= SCOUT_ROWS else rng.choice(everything, SCOUT_ROWS, replace=False)
    with jax.enable_x64(True):
        full = lambda tree: type(tree)(*(np.broadcast_to(np.asarray(x, float), len(log_time)) for x in tree))
        pick = lambda tree, index: type(tree)(*(x[index] for x in tree))
        shape, device = full(shape), full(device)

        def solve(vectors, mean, sd, rows, passes):
            """Of several starts, the one that ends lowest."""
            index, real = _padded(rows)
            many, one = _solver(family, passes)
            run: Any = many if vectors.ndim == 2 else one
            args = (pick(shape, index), pick(device, index), log_time[index], real * weight[index])
            vector, loss, precision = (np.asarray(x) for x in run(vectors, mean, sd, *args))
            if vectors.ndim == 1:
                return vector, float(loss), precision
            best = int(np.nanargmin(loss))
            return vector[best], float(loss[best]), precision[best]

        vector = mean if start is None else start.free
        if starts and start is None:
            noise = rng.normal(size=(starts, family.size)) * np.minimum(sd, 0.7)
            vector = solve(mean + np.concatenate([np.zeros((1, family.size)), noise]), mean, sd, scout, 20)[0]
        if start is None or not correction:
            vector, loss, precision = solve(vector, mean, sd, everything, passes)
        else:
            loss, precision = start.loss, start.precision
        if correction:
            features = family.features(pick(shape, everything[:1]), pick(device, everything[:1])).shape[-1]
            mean = np.concatenate([vector, np.zeros(len(weight_spreads(features)))])
            sd = np.concatenate([np.full(family.size, FROZEN), weight_spreads(features)])
            wide = [np.concatenate([vector, start_weights(features, seed + i)]) for i in range(CORRECTION_STARTS)]
            vector = solve(np.stack(wide), mean, sd, scout, 20)[0]
            vector, loss, _ = solve(vector, mean, sd, everything, 2 * passes)
    fit = KernelFit(family, vector[: family.size], vector[family.size :], precision, loss, 0.0)
    residual = predict_rows(fit, pick(shape, everything), pick(device, everything)) - log_time[everything]
    return dataclasses.replace(fit, noise=max(1.48 * float(np.median(np.abs(residual))), 1e-3))


@partial(jax.jit, static_argnums=0)
def _predict(family, vector, shape, device):
    return predict_log_time(family, vector, shape, device)


@partial(jax.jit, static_argnums=0)
def _slopes(family, vector, shape, device):
    return jax.vmap(jax.grad(partial(predict_log_time, family)), in_axes=(None, 0, 0))(vector, shape, device)


@partial(jax.jit, static_argnums=0)
def _least(family, vector, shape, device):
    return family.bound(shape, device, constrain(family.constants, family.priors, vector))


@partial(jax.jit, static_argnums=0)
def _roofline(family, vector, shape, device):
    return family.roofline(shape, device)


def _in_blocks(compiled: Callable, family: Family, vector: np.ndarray, shape: Any, device: Any) -> np.ndarray:
    """Applies a function of rows block by block, so that tables of any length share few compilations."""
    fields = np.broadcast_arrays(*(np.asarray(x, float) for x in (*shape, *device)))
    rows, out = len(fields[0]), []
    with jax.enable_x64(True):
        for start in range(0, rows, SIZES[-1]):
            index, _ = _padded(np.arange(start, min(start + SIZES[-1], rows)))
            part = [x[index] for x in fields]
            result = compiled(family, vector, type(shape)(*part[: len(shape)]), type(device)(*part[len(shape) :]))
            out.append(np.broadcast_to(np.asarray(result), (len(index), *np.shape(result)[1:]))[: rows - start])
    return np.concatenate(out)


def predict_rows(fit: KernelFit, shape: Any, device: Any) -> np.ndarray:
    """Predicted log seconds of rows, shape (rows,); float64."""
    return _in_blocks(_predict, fit.family, np.concatenate([fit.free, fit.weights]), shape, device)


def slopes_of_rows(fit: KernelFit, shape: Any, device: Any) -> np.ndarray:
    """Gradient of each row's log time in the unconstrained constants, shape (rows, constants); float64."""
    return _in_blocks(_slopes, fit.family, np.concatenate([fit.free, fit.weights]), shape, device)[:, : fit.family.size]


def least_time(family: Family, shape: Any, device: Any) -> np.ndarray:
    """What no kernel of the family can beat, with the prior's constants, per row. [s]"""
    return _in_blocks(_least, family, np.zeros(family.size), shape, device)


def roofline_time(family: Family, shape: Any, device: Any) -> np.ndarray:
    """Plain roofline of each row. [s]"""
    return _in_blocks(_roofline, family, np.zeros(0), shape, device)
