"""Gradient search: Adam on the log of the relaxed makespan from many starts at once, rounding to the grid, exact evaluation, polishing.

Knobs move as logits in the box of the grid's logs, choices as softmax weights, so one rate suits all. The relaxed makespan only decides where to look.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...cost.contention import Contention, OverlapRegion, Setting, Settings, make_settings, overlap_makespan
from ._evaluate import Evaluator
from ._search import polish
from ._space import Grid

STARTS = 16
STEPS = 60
EVALUATIONS = 340
"""Exact evaluations that the search may spend, rounded starts included."""

TEMPERATURE = 0.3  # of waves: errs low by about 1%, and gives kernels a slope between two waves
_FEWER_CHANNELS = 1e-3  # weight of log channels: of settings that are equally good, the one that takes least
_POLISHED = 4  # rounded starts that are polished, the best first
_INSIDE = 0.02  # starts lie this far inside the box


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
        share = np.clip((logs - self.low) / np.where(self.width > 0, self.width, 1.0), _INSIDE, 1 - _INSIDE)
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


@eqx.filter_jit
def _descend_makespan(region: OverlapRegion, constants: Contention, box: tuple[Array, Array, Array], logits: Float[Array, "starts m k"], steps: int):
    def loss(logits):
        settings = unbox(logits, box)
        return jnp.log(overlap_makespan(region, settings, constants, TEMPERATURE)) + _FEWER_CHANNELS * jnp.mean(jnp.log(settings.channels))

    return jax.vmap(lambda one: unbox(descend(loss, one, steps), box))(logits)


def gradient(
    evaluator: Evaluator, default: tuple[Setting, ...], *, starts: int = STARTS, steps: int = STEPS, budget: int = EVALUATIONS, seed: int = 0
) -> np.ndarray:
    """The best point that the search finds, never worse than `default`.

    Args:
      evaluator: exact makespans.
      default: settings that start the search.
      starts, steps: of the descents.
      budget: distinct exact evaluations, besides what the evaluator has seen.
      seed: of the starts.
    """
    grid, box = evaluator.grid, Box(evaluator.grid)
    logits = starting_logits(grid, box, default, starts, seed)
    ends = _descend_makespan(evaluator.region, evaluator.constants, box.arrays(), jnp.asarray(logits), steps)
    before = evaluator.evaluations
    fastest_alone = np.concatenate([np.broadcast_to([len(axis) - 1 for axis in grid.axes], (grid.count, 3)), grid.place(default)[:, 3:]], axis=1)
    rounded = np.unique(np.concatenate([grid.nearest(ends), grid.place(default)[None], fastest_alone[None]]), axis=0)
    left = lambda: budget - (evaluator.evaluations - before)
    order = np.argsort(evaluator.values(rounded), kind="stable")[:_POLISHED]
    ends = [polish(grid, evaluator.values, rounded[k], left) for k in order]
    return ends[int(np.argmin(evaluator.values(np.stack(ends))))]
