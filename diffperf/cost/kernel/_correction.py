"""A small network for what the closed forms leave: bounded, so that it can never make a kernel faster than the chip allows.

One hidden layer of `WIDTH` units over a family's dimensionless features (log sizes, wave fraction, arithmetic intensity over the ridge
point), a factor of at most `exp(+-LIMIT)` on time, and then the physical bound as a floor. Weights are per kernel library, chip and datatype,
or shared; no weights, no correction.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

WIDTH = 12
LIMIT = 0.3
INNER_SPREAD, OUTER_SPREAD = 1.0, 0.3  # prior standard deviations of the weights into and out of the hidden layer


class Correction(nn.Module):
    """Log factor of a kernel's time from its features, between -LIMIT and LIMIT; 0 where all weights are."""

    @nn.compact
    def __call__(self, features: Float[Array, "*batch features"]) -> Float[Array, " *batch"]:
        hidden = jnp.tanh(nn.Dense(WIDTH)(features))
        return LIMIT * jnp.tanh(nn.Dense(1, use_bias=False)(hidden)[..., 0])


def num_weights(num_features: int) -> int:
    """Weights of the network for so many features."""
    return num_features * WIDTH + 2 * WIDTH


def start_weights(num_features: int, seed: int) -> np.ndarray:
    """Weights to start a fit from: random inside, almost no effect outside."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(0, INNER_SPREAD, num_features * WIDTH + WIDTH), rng.normal(0, 0.01, WIDTH)])


def weight_spreads(num_features: int) -> np.ndarray:
    """Prior standard deviation of every weight, whose prior mean is 0."""
    return np.concatenate([np.full(num_features * WIDTH + WIDTH, INNER_SPREAD), np.full(WIDTH, OUTER_SPREAD)])


def log_factor(weights: Float[Array, " weights"], features: Float[Array, "*batch features"]) -> Float[Array, " *batch"]:
    """What the network adds to log time."""
    n = features.shape[-1]
    kernel, bias, out = jnp.split(weights, [n * WIDTH, n * WIDTH + WIDTH])
    tree = {"params": {"Dense_0": {"kernel": kernel.reshape(n, WIDTH), "bias": bias}, "Dense_1": {"kernel": out[:, None]}}}
    return Correction().apply(tree, features)


def bounded(time: Float[Array, "*batch"], factor: Float[Array, "*batch"], least: Float[Array, "*batch"]) -> Float[Array, " *batch"]:
    """`time * exp(factor)`, but never below the bound `least` (nor below `time`, should that be less). [s]

    The floor is the 16-norm of both, by products and roots: a time of 1.25 bounds moves by 0.2%.
    """
    moved = time * jnp.exp(factor)
    floor = jnp.minimum(least, time)
    peak, low = jnp.maximum(moved, floor), jnp.minimum(moved, floor)
    ratio = low / jnp.where(peak > 0, peak, 1.0)
    for _ in range(4):
        ratio = ratio * ratio
    root = 1 + ratio
    for _ in range(4):
        root = jnp.sqrt(root)
    return peak * jnp.where(factor == 0, 1.0, root)
