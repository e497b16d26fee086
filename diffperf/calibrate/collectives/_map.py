"""Maximum a posteriori fit of logarithms of constants to logarithms of times: damped Gauss-Newton with a robust loss.

Residuals pass through a soft absolute value (pseudo-Huber), so that a hiccup pulls like its size and not like its square; priors are normal in the
logarithm. All of it is one compiled loop that `jax.vmap` runs for many folds at once: a fold is a set of weights.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

NOISE = 0.05
"""Scale of a row's log error, beyond which the loss grows like the error itself."""


class Mode(NamedTuple):
    """Where the posterior is highest, and how sharp it is there.

    Attributes:
      parameters: the mode, shape (parameters,).
      precision: Gauss-Newton Hessian of the negative log posterior, shape (parameters, parameters).
      loss: negative log posterior, up to a constant.
    """

    parameters: Float[Array, " parameters"]
    precision: Float[Array, "parameters parameters"]
    loss: Float[Array, ""]


def cpu_options() -> dict[str, int] | None:
    """A fit runs a few hundred rows a few dozen times: on a CPU compiling quickly matters more than running quickly."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


@lru_cache(maxsize=1)
def _compiled() -> Callable:
    return jax.jit(_fit, static_argnames=("log_time", "steps"), compiler_options=cpu_options())


def fit_map(
    log_time: Callable, inputs, log_measured: Float[Array, " rows"], weight: Float[Array, " rows"], mean: Float[Array, " parameters"],
    width: Float[Array, " parameters"], *, noise: float = NOISE, steps: int = 30,
) -> Mode:  # fmt: skip
    """Fits parameters.

    Args:
      log_time: `(parameters, inputs)` to the predicted log time of each row; compiled once per function.
      inputs: what `log_time` reads beside the parameters.
      log_measured: measured log time.
      weight: weight of each row; 0 leaves it out.
      mean: prior mean and start.
      width: prior standard deviation; a tiny one holds a parameter.
      noise: scale of a row's log error.
      steps: Levenberg-Marquardt steps, accepted or not.
    """
    return _compiled()(log_time, inputs, log_measured, weight, mean, width, noise, steps=steps)


def _fit(log_time: Callable, inputs, log_measured, weight, mean, width, noise, steps: int) -> Mode:
    predict = lambda theta: log_time(theta, inputs)
    rho = lambda r: 2 * (jnp.sqrt(1 + (r / noise) ** 2) - 1)

    def loss(theta):
        return 0.5 * jnp.sum(weight * rho(log_measured - predict(theta))) + 0.5 * jnp.sum(((theta - mean) / width) ** 2)

    def normal(theta):
        residual = log_measured - predict(theta)
        jacobian = jax.jacfwd(predict)(theta)
        robust = weight / jnp.sqrt(1 + (residual / noise) ** 2) / noise**2
        precision = (jacobian * robust[:, None]).T @ jacobian + jnp.diag(1 / width**2)
        return precision, jacobian.T @ (robust * residual) - (theta - mean) / width**2

    def step(state, _):
        theta, value, damping = state
        precision, slope = normal(theta)
        scale = jnp.sqrt(jnp.diag(precision))
        scaled = precision / scale[:, None] / scale[None, :] + damping * jnp.eye(len(mean))
        move = jnp.clip(jnp.linalg.solve(scaled, slope / scale) / scale, -1.0, 1.0)
        new = loss(theta + move)
        better = new < value
        damping = jnp.clip(jnp.where(better, damping * 0.3, damping * 4.0), 1e-9, 1e6)
        return (jnp.where(better, theta + move, theta), jnp.where(better, new, value), damping), None

    (theta, value, _), _ = lax.scan(step, (mean, loss(mean), jnp.asarray(1e-3)), length=steps)
    return Mode(theta, normal(theta)[0], value)
