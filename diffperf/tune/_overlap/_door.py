"""The door of overlap tuning: which search runs, and what it says."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..._numbers import check_whole, plain_number
from ...cost.contention import DEFAULT_SETTING, NOMINAL_CONTENTION, Contention, OverlapRegion, Setting, make_settings
from ...cost.contention._constants import check_contention
from ._descent import STARTS, STEPS, gradient
from ._evaluate import Evaluator
from ._robust import Judge, robust
from ._search import coordinate, exhaustive, priority
from ._space import DEFAULT_SPACE, Grid, OverlapSpace

OVERLAP_METHODS = ("auto", "exhaustive", "gradient", "priority", "coordinate")
_MOST_POINTS = 1_200_000  # that an exhaustive search evaluates: seconds


@dataclasses.dataclass(frozen=True)
class OverlapResult:
    """Outcome of `overlap`.

    Attributes:
      settings: of each collective, by its name.
      makespan, default_makespan: of the region, with these settings and with the default. [s]
      method: that searched at the constants given; with draws, gradients over them follow.
      evaluations: distinct settings whose exact makespan was computed, at the constants given and, each time counted once, over all draws.
      kept_default: whether the settings are the default because nothing else was worth it.
      expected_gain: by how much the makespan is expected to fall over the draws, `1 - exp(mean log ratio)`; None without draws. [1]
      risk: share of draws in which the settings are worse than the default; None without draws. [1]
    """

    settings: dict[str, Setting]
    makespan: float
    default_makespan: float
    method: str
    evaluations: int
    kept_default: bool
    expected_gain: float | None = None
    risk: float | None = None

    @property
    def gain(self) -> float:
        """Relative decrease of the makespan, at the constants given; 0 for a region that takes no time. [1]"""
        return 1 - self.makespan / self.default_makespan if self.default_makespan else 0.0


def overlap(
    region: OverlapRegion,
    *,
    method: str = "auto",
    space: OverlapSpace = DEFAULT_SPACE,
    default: Setting | Sequence[Setting] = DEFAULT_SETTING,
    constants: Contention = NOMINAL_CONTENTION,
    draws: Contention | None = None,
    threshold: float = 0.01,
    risk: float = 0.01,
    starts: int = STARTS,
    steps: int = STEPS,
    seed: int = 0,
) -> OverlapResult:
    """Settings of the collectives of an overlap region with the shortest makespan; by the model never worse than the default.

    Args:
      region: from `diffperf.cost.contention.overlap_region`.
      method: "auto" evaluates every point where there are at most two collectives and 1.2 million points, and descends by gradients beyond; or one of
        `OVERLAP_METHODS`.
      space: what may be chosen.
      default: what runs now, one setting for all collectives or one for each.
      constants: of contention.
      draws: the constants drawn from what is known of them, each of shape (draws,), as `draw_contention` gives. With draws, tuning is robust: the expected log
        makespan is made small among settings that are worse than the default in at most `risk` of the draws.
      threshold: with draws, the default is kept unless the expected gain is at least this. [1]
      risk: see `draws`. [1]
      starts, steps: of the gradient search.
      seed: of its starts.
    Raises:
      ValueError: for an unknown method, more points than an exhaustive search can evaluate, a space beyond the hardware, draws with another method than
        "auto" or "gradient", constants or draws out of their range, a threshold or risk outside of 0 to 1, and fewer than one start or step; the message
        names the collective where one is at fault.
    """
    if not isinstance(region, OverlapRegion):
        raise ValueError(f"region is {region!r}; give what `overlap_region` or `load_overlap_region` makes.")
    if method not in OVERLAP_METHODS:
        raise ValueError(f"method is {method!r}; it should be one of {', '.join(OVERLAP_METHODS)}.")
    if draws is not None and method not in ("auto", "gradient"):
        raise ValueError(f"method is {method!r}, but draws are tuned over by gradients; leave `method` as it is, or the draws out.")
    for name, value, least in (("starts", starts, 1), ("steps", steps, 1), ("seed", seed, 0)):
        check_whole(value, name, least)
    for name, value in (("threshold", threshold), ("risk", risk)):
        if not 0 <= plain_number(value, name) <= 1:
            raise ValueError(f"{name} is {value}; it is a share, from 0 to 1.")
    _check_constants(constants, draws)
    make_settings(region, default)
    grid = Grid(region, space)
    settings = (default,) * grid.count if isinstance(default, Setting) else tuple(default)
    evaluator, at_default = Evaluator(grid, constants), grid.place(settings)
    if grid.describe(at_default) != settings:
        raise ValueError(f"the default {settings} is not in the space; add its channels, chunk size and threads to the space, so that it can be kept.")
    starts, steps, seed = int(starts), int(steps), int(seed)
    if method == "auto":
        method = "exhaustive" if grid.count <= 2 and grid.num_points <= _MOST_POINTS else "gradient"
    nothing_to_gain = _takes_no_time(region)  # and has no log
    point = at_default if nothing_to_gain else _search(evaluator, method, settings, at_default, starts, steps, seed)
    evaluations = grid.num_points if method == "exhaustive" and not nothing_to_gain else evaluator.evaluations
    more = {} if draws is None else dict(expected_gain=0.0, risk=0.0)
    if draws is not None and not nothing_to_gain:
        judge = Judge(grid, draws, at_default)
        point = robust(judge, settings, [point], risk=risk, starts=starts, steps=steps, seed=seed)
        evaluations += judge.evaluations
        gain, chance = _judged(judge, point)
        if gain < threshold:
            point, gain, chance = at_default, 0.0, 0.0
        more = dict(expected_gain=gain, risk=chance)
    makespan, default_makespan = evaluator.values(np.stack([point, at_default]))
    if draws is None and not makespan < default_makespan:
        point, makespan = at_default, default_makespan
    kept = bool((point == at_default).all())
    return OverlapResult(dict(zip(region.collective_names, grid.describe(point))), float(makespan), float(default_makespan), method, evaluations, kept, **more)


def _check_constants(constants: Contention, draws: Contention | None) -> None:
    """Raises ValueError unless both are in their range, constants plain numbers, and draws all of one shape (draws,)."""
    check_contention(constants, "constants")
    if any(np.ndim(value) for value in constants):
        raise ValueError("constants have several values each; give one of each, and several as `draws`.")
    if draws is None:
        return
    check_contention(draws, "draws")
    shapes = {name: np.shape(value) for name, value in draws._asdict().items()}
    if len(set(shapes.values())) > 1 or len(shapes["spill"]) != 1 or shapes["spill"][0] < 1:
        raise ValueError(f"draws have the shapes {', '.join(f'{name} {shape}' for name, shape in shapes.items())}; they should all be (draws,), with at least "
                         "one draw, as `draw_contention` gives.")  # fmt: skip


def _takes_no_time(region: OverlapRegion) -> bool:
    """Whether no kernel and no collective has anything to do."""
    work, transfers = region.kernels, region.collectives
    return not any(np.any(column) for column in (work.flops, work.nbytes, work.launch, transfers.latency, transfers.wire))


def _judged(judge: Judge, point: np.ndarray) -> tuple[float, float]:
    judged = judge.judge(point[None])
    return float(-np.expm1(judged.expected[0])), float(judged.risk[0])


def _search(
    evaluator: Evaluator, method: str, default: tuple[Setting, ...], at_default: np.ndarray, starts: int, steps: int, seed: int
) -> np.ndarray:  # fmt: skip
    grid = evaluator.grid
    if method == "exhaustive":
        if grid.num_points > _MOST_POINTS:
            raise ValueError(f"about 1e{math.log10(grid.num_points):.0f} points, more than {_MOST_POINTS:.2g}, cannot all be evaluated; "
                             "take method 'gradient' or a smaller space.")  # fmt: skip
        return exhaustive(evaluator)
    if method == "gradient":
        return gradient(evaluator, default, starts=starts, steps=steps, seed=seed)
    if method == "priority":
        return priority(evaluator, at_default)
    return coordinate(grid, evaluator.values, at_default)
