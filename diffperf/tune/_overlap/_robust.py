"""Robust tuning: the settings with the smallest expected log makespan over draws of the constants, among those that are hardly ever worse than the default.

The nominal optimum lies where communication just hides behind compute: a slightly slower link than assumed exposes it. Each draw is compared with the
default under the same draw. Descents weigh the expectation against the losing tail in several ways; what they find is rounded, and judged on all draws.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...cost.contention import Contention, OverlapRegion, Setting, Settings, make_settings, overlap_makespan
from ._descent import STARTS, STEPS, TEMPERATURE, Box, descend, starting_logits, unbox
from ._evaluate import anonymous
from ._search import polish
from ._space import Grid

EVALUATIONS = 240
"""Points that robust tuning may judge, each on all draws."""

_DESCENT_DRAWS = 16
_TAILS = (0.0, 3.0, 10.0, 30.0)  # weights of the losing tail, start by start
_MARGIN = 0.01  # the tail starts this much before a loss
_POLISHED = 2
_ROWS = 8
_EQUAL = 1e-9  # relative: rounding of equal makespans is no loss


class Judgement(NamedTuple):
    """Of points, shape (points,).

    Attributes:
      expected: mean of log makespan over that of the default. [1]
      risk: share of draws that are worse than the default. [1]
    """

    expected: np.ndarray
    risk: np.ndarray


@eqx.filter_jit
def _log_makespans(region: OverlapRegion, settings: Settings, draws: Contention) -> Float[Array, "points draws"]:
    one = lambda settings, constants: jnp.log(overlap_makespan(region, settings, constants))
    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(settings, draws)


@eqx.filter_jit
def _descend_expected(region: OverlapRegion, draws: Contention, default: Settings, box: tuple[Array, Array, Array], logits: Array, tails: Array, steps: int):
    log = lambda settings: jax.vmap(lambda constants: jnp.log(overlap_makespan(region, settings, constants, TEMPERATURE)))(draws)
    of_default = log(default)

    def run(logits, tail):
        def loss(logits):
            worse = log(unbox(logits, box)) - of_default
            return jnp.mean(worse) + tail * jnp.mean(jnp.maximum(worse + _MARGIN, 0.0))

        return unbox(descend(loss, logits, steps), box)

    return jax.vmap(run)(logits, tails)


class Judge:
    """Judges points against the default on all draws, and remembers.

    Attributes:
      evaluations: distinct points so far.
    """

    def __init__(self, grid: Grid, draws: Contention, default: np.ndarray):
        self.grid, self.draws, self.region = grid, jax.tree.map(jnp.asarray, draws), anonymous(grid.region)
        self._seen: dict[bytes, tuple[float, float]] = {}
        self._default = self._run(default[None])[0]

    @property
    def evaluations(self) -> int:
        return len(self._seen)

    def judge(self, points: np.ndarray) -> Judgement:
        """Judgement of points (n, collectives, 4)."""
        keys = [point.astype(np.int64).tobytes() for point in points]
        new = {key: point for key, point in zip(keys, points) if key not in self._seen}
        if new:
            worse = self._run(np.stack(list(new.values()))) - self._default
            self._seen.update((key, (row.mean(), (row > _EQUAL).mean())) for key, row in zip(new, worse))
        found = np.array([self._seen[key] for key in keys])
        return Judgement(found[:, 0], found[:, 1])

    def scores(self, points: np.ndarray, risk: float) -> np.ndarray:
        """What to make small: the expectation, and above every expectation the risk beyond `risk`."""
        judged = self.judge(points)
        return np.where(judged.risk <= risk, judged.expected, 1e3 + judged.risk)

    def _run(self, points: np.ndarray) -> np.ndarray:
        found = []
        for i in range(0, len(points), _ROWS):
            part = points[i : i + _ROWS]
            padded = np.concatenate([part, np.repeat(part[:1], _ROWS - len(part), axis=0)])
            found.append(np.asarray(_log_makespans(self.region, self.grid.settings(padded), self.draws))[: len(part)])
        return np.concatenate(found)


def robust(
    judge: Judge, default: tuple[Setting, ...], candidates: list[np.ndarray], *, risk: float, starts: int = STARTS, steps: int = STEPS, seed: int = 0
) -> np.ndarray:
    """The point with the smallest expectation among those whose risk is at most `risk`; the default is one of them.

    Args:
      judge: of the region, with all draws.
      default: settings to be compared with.
      candidates: points from elsewhere that are judged too.
      risk: largest share of draws that may be worse than the default. [1]
      starts, steps: of the descents, which see some of the draws.
      seed: of the starts.
    """
    grid, box = judge.grid, Box(judge.grid)
    some = jax.tree.map(lambda numbers: numbers[:_DESCENT_DRAWS], judge.draws)
    logits = starting_logits(grid, box, default, starts, seed)
    tails = np.resize(np.array(_TAILS), starts)
    ends = _descend_expected(judge.region, some, make_settings(grid.region, default), box.arrays(), jnp.asarray(logits), jnp.asarray(tails), steps)
    at_default = grid.place(default)
    points = np.unique(np.concatenate([grid.nearest(ends), at_default[None], *[point[None] for point in candidates]]), axis=0)
    scores = lambda points: judge.scores(points, risk)
    left = lambda: EVALUATIONS - judge.evaluations
    order = np.argsort(scores(points), kind="stable")[:_POLISHED]
    ends = np.stack([*(polish(grid, scores, points[k], left) for k in order), at_default])
    return ends[int(np.argmin(scores(ends)))]
