"""Settings as unbounded numbers, on which Adam descends: knobs as logits in the box of the grid's logs, choices as softmax weights, so one rate suits all."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...cost.contention import Setting, Settings, make_settings
from ._space import Grid

TEMPERATURE = 0.3  # of waves: errs low by about 1%, and gives kernels a slope between two waves
_INSIDE = 0.02  # random starts lie this far inside the box
_EDGE = 1e-3  # and settings at its edge this far, as a logit has to be finite


class Box:
    """The box of a grid, as arrays: lowest log and width of each knob, and which choices a collective has."""

    def __init__(self, grid: Grid):
        logs = [np.log(axis) for axis in grid.axes]
        self.low = np.array([values[0] for values in logs])
        self.width = np.array([values[-1] - values[0] for values in logs])
        self.allowed = (np.arange(grid.width) < grid.sizes[:, 3:]).astype(float)

    def arrays(self) -> tuple[Array, Array, Array]:
        return jnp.asarray(self.low), jnp.asarray(self.width), jnp.asarray(self.allowed)

    def logits(self, settings: Settings) -> np.ndarray:
        """Inverse of `unbox`, for settings inside the box; shape (collectives, 3 + choices)."""
        logs = np.log(np.stack([np.asarray(column) for column in settings[:3]], axis=-1))
        share = np.clip((logs - self.low) / np.where(self.width > 0, self.width, 1.0), _EDGE, 1 - _EDGE)
        return np.concatenate([np.log(share / (1 - share)), 2 * np.asarray(settings.weights)], axis=-1)


def unbox(logits: Float[Array, "m k"], box: tuple[Array, Array, Array]) -> Settings:
    """Settings of logits."""
    low, width, allowed = box
    knobs = jnp.exp(low + width * jax.nn.sigmoid(logits[..., :3]))
    weights = jax.nn.softmax(jnp.where(allowed > 0, logits[..., 3:], -1e9), axis=-1)
    return Settings(knobs[..., 0], knobs[..., 1], knobs[..., 2], weights)


def starting_logits(grid: Grid, box: Box, default: tuple[Setting, ...], starts: int, seed: int) -> np.ndarray:
    """One start at the default, half of the others with one setting for all collectives, the rest with one for each."""
    rng = np.random.default_rng(seed)
    shape = (grid.count, 3 + grid.width)
    logits = np.empty((starts, *shape))
    for k in range(starts):
        uniform = rng.uniform(_INSIDE, 1 - _INSIDE, shape)
        uniform = np.broadcast_to(uniform[:1], shape) if k % 2 else uniform
        logits[k] = np.log(uniform / (1 - uniform))
    logits[0] = box.logits(make_settings(grid.region, default))
    return logits


def descend(loss: Callable, logits: Float[Array, "m k"], steps: int) -> Float[Array, "m k"]:
    """`steps` of Adam on `loss(logits)`, at a rate that falls from 0.15 to 0.02: optima often lie on a kink, where steps bounce."""
    import optax  # takes as long to import as all of diffperf

    optimizer = optax.adam(optax.exponential_decay(0.15, steps, 0.02 / 0.15), b1=0.9, b2=0.97)

    def step(carry, _):
        logits, state = carry
        updates, state = optimizer.update(jax.grad(loss)(logits), state)
        return (optax.apply_updates(logits, updates), state), None

    (end, _), _ = jax.lax.scan(step, (logits, optimizer.init(logits)), length=steps)
    return end
