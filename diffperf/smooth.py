"""Maximum, minimum, ceiling, choice and path split: exact at `temperature=0`, smooth above it.

Temperatures are dimensionless, so the same value suits microseconds and hours. Every function is safe under `jit`, `vmap` and
`grad` at its edges (all zero, ties, one path): inputs of the branch not taken are made harmless before the branch is chosen.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ._arrays import si


def safe_divide(numerator: Real[ArrayLike, "..."], denominator: Real[ArrayLike, "..."], otherwise: Real[ArrayLike, "..."] = 0.0) -> Float[Array, "..."]:
    """`numerator / denominator`, and `otherwise` where the denominator is 0; its gradient there is that of `otherwise`."""
    numerator, denominator = si(numerator), si(denominator)
    zero = denominator == 0
    return jnp.where(zero, otherwise, numerator / jnp.where(zero, 1.0, denominator))


def safe_power(base: Real[ArrayLike, "..."], exponent: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
    """`base ** exponent` for a non-negative base; 0, with gradient 0, at base 0 (a bare power has an infinite or NaN gradient there)."""
    base = si(base)
    positive = base > 0
    return jnp.where(positive, jnp.where(positive, base, 1.0) ** exponent, 0.0)


def pnorm(a: Real[ArrayLike, "..."], b: Real[ArrayLike, "..."], power: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
    """`(a**power + b**power) ** (1/power)` of two non-negative numbers.

    Lies between `max(a, b)` (power to infinity) and `a + b` (power 1). Its gradient is finite everywhere; where both are 0 the value is
    0 and the gradient is 1 for each (the sub-gradient of the sum).
    """
    a, b = jnp.broadcast_arrays(si(a), si(b))
    peak = jnp.maximum(a, b)
    some = peak > 0
    scale = lax.stop_gradient(jnp.where(some, peak, 1.0))  # scales only; the value does not depend on it
    a_safe, b_safe = jnp.where(some, a / scale, 1.0), jnp.where(some, b / scale, 1.0)
    return jnp.where(some, scale * (safe_power(a_safe, power) + safe_power(b_safe, power)) ** (1 / si(power)), a + b)


def maximum(values: Real[ArrayLike, "*batch n"], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, "*batch"]:
    """Maximum of non-negative `values` over the last axis; exact at temperature 0.

    Above 0 it is the norm of power `1/temperature`: it errs high, never above `n**temperature * max`, towards the sum at temperature 1.
    """
    values, temperature = si(values), si(temperature)
    some = jnp.any(values > 0, axis=-1, keepdims=True)
    safe = jnp.where(some, values, 1.0)
    peak = lax.stop_gradient(jnp.max(safe, axis=-1, keepdims=True))
    power = 1 / jnp.where(temperature > 0, temperature, 1.0)
    smooth = peak[..., 0] * jnp.sum(safe_power(safe / peak, power), axis=-1) ** (1 / power)
    return jnp.where(some[..., 0] & (temperature > 0), smooth, jnp.max(values, axis=-1))


def minimum(values: Real[ArrayLike, "*batch n"], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, "*batch"]:
    """Minimum of non-negative `values` over the last axis; exact at temperature 0.

    Above 0 it is the norm of power `-1/temperature`: it errs low, never below `n**-temperature * min`. 0 where any value is 0.
    """
    values, temperature = si(values), si(temperature)
    positive = jnp.all(values > 0, axis=-1, keepdims=True)
    safe = jnp.where(positive, values, 1.0)
    low = lax.stop_gradient(jnp.min(safe, axis=-1, keepdims=True))
    power = 1 / jnp.where(temperature > 0, temperature, 1.0)
    smooth = low[..., 0] * jnp.sum((low / safe) ** power, axis=-1) ** (-1 / power)
    return jnp.where(positive[..., 0] & (temperature > 0), smooth, jnp.min(values, axis=-1))


def ceil(x: Real[ArrayLike, "..."], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, "..."]:
    """Ceiling; exact at temperature 0 and at every integer. Above 0 it errs low, between `x` and `ceil(x)`, towards `x` as temperature grows."""
    x, temperature = si(x), si(temperature)
    whole = jnp.floor(x)
    scale = jnp.where(temperature > 0, temperature, 1.0)
    rise = jnp.expm1(-(x - whole) / scale) / jnp.expm1(-1 / scale)
    return jnp.where(temperature > 0, whole + rise, jnp.ceil(x))


def where(
    margin: Real[ArrayLike, "..."], above: Real[ArrayLike, "..."], below: Real[ArrayLike, "..."], temperature: Real[ArrayLike, ""] = 0.0
) -> Float[Array, "..."]:
    """`above` where the dimensionless `margin` is at least 0, else `below`; exact at temperature 0.

    Above 0 the two are blended by `sigmoid(margin / temperature)`, so the result lies between them.
    """
    margin, above, below, temperature = si(margin), si(above), si(below), si(temperature)
    share = jax.nn.sigmoid(margin / jnp.where(temperature > 0, temperature, 1.0))
    return jnp.where(temperature > 0, below + share * (above - below), jnp.where(margin >= 0, above, below))


def choice(costs: Real[ArrayLike, " n"], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, " n"]:
    """Weights (sum 1) that pick the cheapest of `n` positive costs; one-hot at temperature 0 (the first of equals).

    Above 0 they are a softmax of `-log(cost) / temperature`, so scaling all costs changes nothing. Expected cost errs high, at most
    `max(costs)`.
    """
    costs, temperature = si(costs), si(temperature)
    safe = jnp.where(costs > 0, costs, jnp.finfo(costs.dtype).tiny)  # a zero cost wins, with gradient 0
    soft = jax.nn.softmax(-jnp.log(safe) / jnp.where(temperature > 0, temperature, 1.0))
    hard = jax.nn.one_hot(jnp.argmin(costs), costs.shape[-1], dtype=costs.dtype)
    return jnp.where(temperature > 0, soft, hard)


def path_split(latency: Real[ArrayLike, " n"], time_per_share: Real[ArrayLike, " n"]) -> tuple[Float[Array, ""], Float[Array, " n"]]:
    """Splits one job over `n` paths so that the last to finish is as early as possible.

    Solves `min over f >= 0, sum f = 1 of max over used l of (latency[l] + time_per_share[l] * f[l])` in closed form: all used paths
    finish together, and a path whose latency alone exceeds that finish is left out. The finish time is differentiable in both
    arguments (the multiplier of the linear programme); at ties of entry it has the one-sided gradient of the path left out.

    Args:
      latency: fixed time of each path. [s]
      time_per_share: time to move the whole job over each path, positive. [s]
    Returns:
      Finish time [s] and the shares, sum 1.
    """
    latency, time_per_share = jnp.broadcast_arrays(si(latency), si(time_per_share))
    start = lax.stop_gradient(jnp.min(latency))  # times count from here, else a short transfer drowns in a long latency (float32)
    order = jnp.argsort(latency)
    a, rate = latency[order] - start, 1 / time_per_share[order]
    finish_with = (1 + jnp.cumsum(a * rate)) / jnp.cumsum(rate)  # finish when the first k paths are used
    used = finish_with > a  # the k-th path pays only while its latency is below the finish
    last = jnp.sum(jnp.cumprod(used)) - 1
    finish = finish_with[jnp.maximum(last, 0)]
    shares = jnp.maximum(finish - (latency - start), 0.0) / time_per_share
    return start + finish, shares / jnp.sum(shares)
