"""Gradient search: Adam on the log of the relaxed makespan from many starts at once, in two rounds, then rounding, exact evaluation, polishing.

After the first round channels and choices are made whole, which costs most of what rounding costs, and chunks and threads descend once more around them. The
relaxed makespan only decides where to look.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ...cost.contention import Contention, OverlapRegion, Setting, Settings, overlap_makespan
from ._evaluate import Evaluator
from ._relaxed import TEMPERATURE, Box, descend, starting_logits, unbox
from ._search import polish
from ._space import Grid

STARTS = 64
STEPS = 60
EVALUATIONS = 340
"""Exact evaluations that the search may spend, rounded starts included."""

_COLD = 0.05  # once channels are whole: what chunks and threads change has no waves to cross
_FEWER_CHANNELS = 1e-3  # weight of log channels: of settings that are equally good, the one that takes least
_ROUNDED = 8  # ends that are rounded and evaluated exactly, the best first
_POLISHED = 4  # of those, how many are polished at least; more while a quarter of the evaluations is left
_CERTAIN = 20.0  # times 2: logit of a choice that is made


@eqx.filter_jit
def _descend_makespan(
    region: OverlapRegion, constants: Contention, box: tuple[Array, Array, Array], logits: Float[Array, "starts m k"], free: Bool[Array, " k"],
    temperature: float, steps: int,
):  # fmt: skip
    """Ends of the descents in the `free` columns, and log makespans there."""

    def loss(logits):
        settings = unbox(logits, box)
        return jnp.log(overlap_makespan(region, settings, constants, temperature)) + _FEWER_CHANNELS * jnp.mean(jnp.log(settings.channels))

    ends = jax.vmap(lambda one: descend(lambda moved: loss(jnp.where(free, moved, one)), one, steps))(logits)
    ends = jnp.where(free, ends, logits)
    return jax.vmap(lambda one: unbox(one, box))(ends), jax.vmap(loss)(ends)


def _settle(grid: Grid, box: Box, ends: Settings, seed: int) -> np.ndarray:
    """Logits of ends whose channels and choices are those of a point; half of the ends take the nearest channels, the others the next ones up or down at
    random, the nearer the likelier, so that the total over the collectives stays about that of the end."""
    places = grid.nearest(ends)
    axis, at = np.log(grid.axes[0]), np.log(np.asarray(ends.channels))
    low = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, max(len(axis) - 2, 0))
    high = np.minimum(low + 1, len(axis) - 1)
    up = (at - axis[low]) / np.where(high > low, axis[high] - axis[low], 1.0)
    drawn = np.where(np.random.default_rng(seed + 1).uniform(size=at.shape) < up, high, low)
    places[1::2, :, 0] = drawn[1::2]
    settled = grid.settings(places)
    return box.logits(settled._replace(chunk_bytes=ends.chunk_bytes, threads=ends.threads, weights=_CERTAIN * np.asarray(settled.weights)))


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
    run = lambda logits, free, temperature: _descend_makespan(
        evaluator.region, evaluator.constants, box.arrays(), jnp.asarray(logits), jnp.asarray(free), temperature, steps)  # fmt: skip
    columns = np.arange(logits.shape[-1])
    ends, _ = run(logits, columns >= 0, TEMPERATURE)
    ends, losses = run(_settle(grid, box, ends, seed), (columns == 1) | (columns == 2), _COLD)
    best = np.argsort(np.asarray(losses), kind="stable")[:_ROUNDED]
    before = evaluator.evaluations
    fastest_alone = np.concatenate([np.broadcast_to([len(axis) - 1 for axis in grid.axes], (grid.count, 3)), grid.place(default)[:, 3:]], axis=1)
    rounded = np.unique(np.concatenate([grid.nearest(ends)[best], grid.place(default)[None], fastest_alone[None]]), axis=0)
    left = lambda: budget - (evaluator.evaluations - before)
    ends = []
    for k in np.argsort(evaluator.values(rounded), kind="stable"):
        ends.append(polish(grid, evaluator.values, rounded[k], left))
        if len(ends) >= _POLISHED and 4 * left() < budget:
            break
    return ends[int(np.argmin(evaluator.values(np.stack(ends))))]
