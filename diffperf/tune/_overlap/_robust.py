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
from ._descent import STARTS, STEPS
from ._evaluate import Remembered, anonymous, in_batches
from ._relaxed import TEMPERATURE, Box, descend, starting_logits, unbox
from ._search import polish
from ._space import Grid

EVALUATIONS = 240
"""Points that robust tuning may judge, each on all draws."""

_DESCENT_DRAWS = 16
_TAILS = (0.0, 3.0, 10.0, 30.0)  # weights of the losing tail, start by start
_MARGIN = 0.01  # the tail starts this much before a loss
_POLISHED = 2
_ROWS = 8
_ROUNDING = 16  # resolutions of a float by which log makespans of equal settings may differ: no loss


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
        self._default = self._log_makespans(default[None])
        self._remembered = Remembered(self._compare)

    @property
    def evaluations(self) -> int:
        return len(self._remembered)

    def judge(self, points: np.ndarray) -> Judgement:
        """Judgement of points (n, collectives, 4)."""
        return Judgement(*np.array(self._remembered(points)).T)

    def scores(self, points: np.ndarray, risk: float) -> np.ndarray:
        """What to make small: the expectation, and above every expectation the risk beyond `risk`."""
        judged = self.judge(points)
        return np.where(judged.risk <= risk, judged.expected, 1e3 + judged.risk)

    def _compare(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        worse = self._log_makespans(points) - self._default
        return worse.mean(axis=1), (worse > _ROUNDING * np.finfo(worse.dtype).eps).mean(axis=1)

    def _log_makespans(self, points: np.ndarray) -> np.ndarray:
        """Shape (points, draws)."""
        return in_batches(lambda part: [_log_makespans(self.region, self.grid.settings(part), self.draws)], points, _ROWS)[0]


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
