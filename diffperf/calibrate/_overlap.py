"""Fitting the law of lost processors to overlap slowdowns: how many processors a channel takes, and how evenly a kernel's blocks spread.

Rows are kernels at one position of a step, once alone and once under a collective (`diffperf.io.traces.overlap_slowdowns`). Those that are matmuls or
convolutions by their name follow the law; the slowdown of the others is reported, not fitted. The likelihood jumps where one processor more or less decides
about a wave, so the posterior is computed on a grid, exactly, and not climbed by gradients. Noise is Student's t, of unknown width: a pair is often one run
each. Leaves out everything else that contention knows (cache, memory, channel rates): traces of single ranks do not determine it.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._files import write_atomic
from .._numbers import check_amount, check_whole, plain_number
from ..cost.contention import CONTENTION_SD, NOMINAL_CONTENTION, Contention, draw_contention, sm_loss_ratio, taken_processors
from ..cost.contention._constants import check_contention
from ..io.traces import Slowdown

FITTED = ("processors_per_channel", "evenness")
SHORTEST_S = 15e-6
"""Kernels that take less alone are left out: launch gaps and the clock's resolution weigh more than contention."""

_LAUNCH_S = 3e-6  # of a matmul, as `cost.contention.matmul_kernel` has it: not slowed
_FREEDOM = 4.0  # degrees of freedom of the noise
_NOISES = np.geomspace(0.02, 0.2, 9)  # widths of the noise in logs, equally likely
_SPAN = 3.0  # prior standard deviations to each side of the grid
_POINTS = 81
_TILED = re.compile(r"gemm|conv|xmma|cutlass|wgrad|dgrad|fprop|cijk|nvjet", re.IGNORECASE)
_REDUCES = re.compile(r"reduc", re.IGNORECASE)  # sums partial results of split kernels: bound by memory


def is_tiled(kernel: str) -> bool:
    """Whether a kernel is a matmul or a convolution by its name, and not the reduction after a split one."""
    return bool(_TILED.search(kernel)) and not _REDUCES.search(kernel)


@dataclasses.dataclass(frozen=True)
class OverlapFit:
    """What slowdowns say of contention on one chip.

    Attributes:
      chip: as the rows name it, "" where they do not.
      processors: of the chip. [1]
      constants: medians; those that are not of `FITTED` are the nominal ones.
      sd: standard deviations of the logs; for the others those of the prior.
      used: kernels in the fit.
      left_out: reason -> rows.
      error, held_out: mean absolute error of the log ratio: of the fit on its rows, and each row left out once. [1]
      before, constant: the same of the nominal constants, and of one ratio for all kernels, each row left out once. [1]
      others: slowdown of kernels that the law is not for: their number, median and 90th percentile of the ratio.
      predicted: per kernel of `used`, the ratio predicted without it.
    """

    chip: str
    processors: int
    constants: Contention
    sd: Contention
    used: Sequence[Slowdown]
    left_out: Mapping[str, int]
    error: float
    held_out: float
    before: float
    constant: float
    others: Mapping[str, float]
    predicted: Sequence[float]

    @property
    def rows(self) -> int:
        """Kernels in the fit."""
        return len(self.used)

    def draws(self, count: int, seed: int = 0) -> Contention:
        """Constants drawn from the posterior, for robust `diffperf.tune.overlap`; each of shape (count,)."""
        return draw_contention(count, self.constants, self.sd, seed)

    def ratios(self, rows: Sequence[Slowdown]) -> np.ndarray:
        """Predicted ratios of the time under the collective to the time alone, of tiled kernels on this chip or another. Shape (rows,)."""
        at = lambda name: np.array([float(getattr(self.constants, name))])
        return np.exp(_log_ratios(rows, [row.num_sms or self.processors for row in rows], at("processors_per_channel"), at("evenness")))[0]

    def document(self) -> dict[str, Any]:
        """Everything as plain dicts, lists and numbers."""
        plain = lambda constants: {key: float(f"{float(value):.5g}") for key, value in constants._asdict().items()}
        return dataclasses.asdict(self) | {name: plain(getattr(self, name)) for name in ("constants", "sd")}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes constants, what they rest on and their errors as JSON, whole or not at all; `load_overlap_fit` reads it."""
        write_atomic(path, json.dumps(self.document(), indent=1) + "\n")


def load_overlap_fit(path: str | os.PathLike[str]) -> OverlapFit:
    """A fit as `OverlapFit.write` wrote it.

    Raises:
      OSError: when the file cannot be read.
      ValueError: for a file that holds no such fit.
    """
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        constants = {name: Contention(**document[name]) for name in ("constants", "sd")}
        check_contention(constants["constants"], "constants")
        for name, width in constants["sd"]._asdict().items():
            check_amount(width, f"sd of {name}")
        check_whole(document["processors"], "processors", 1)
        return OverlapFit(**document | constants | {"used": [Slowdown(**row) for row in document["used"]]})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)} is no overlap fit ({error}); `diffperf calibrate overlap FILE --out JSON` writes one.") from None


def calibrate_overlap(
    rows: Sequence[Slowdown], *, chip: str | None = None, processors: int | None = None, prior: Contention = NOMINAL_CONTENTION, sd: Contention = CONTENTION_SD
) -> OverlapFit:
    """Fits the law of lost processors to kernels of one chip.

    Args:
      rows: pairs, of position where there are any; pairs by name differ in cache and clock and are used only where no other is.
      chip: takes only rows of this one.
      processors: of the chip, where the rows do not say. [1]
      prior, sd: medians of the constants, and standard deviations of their logs.
    Raises:
      ValueError: for rows of several chips, no number of processors, fewer than three kernels that the law is for, times that are no positive numbers, and
        a prior out of its range.
    """
    for row in rows:
        _check_row(row)
    if processors is not None:
        check_whole(processors, "processors", 1)
    check_contention(prior, "prior")
    for name in FITTED:
        if not (getattr(prior, name) > 0 and 0 < plain_number(getattr(sd, name), f"sd of {name}") < np.inf):
            raise ValueError(f"prior and sd of {name} are {getattr(prior, name)} and {getattr(sd, name)}; both should be above 0 and finite.")
    if chip is not None:
        known = sorted({row.accelerator for row in rows})
        rows = [row for row in rows if row.accelerator == chip]
        if not rows:
            raise ValueError(f"no row is of the chip {chip!r}; the rows are of {', '.join(map(repr, known)) or 'none'}.")
    used, others, left_out = _sort(rows)
    chips = sorted({row.accelerator for row in used})
    if len(chips) > 1:
        raise ValueError(f"the rows are of several chips: {', '.join(map(repr, chips))}. Fit one at a time: name it as `chip`, on the command line --gpu.")
    counts = sorted({row.num_sms for row in used if row.num_sms > 0} | ({processors} if processors is not None else set()))
    if used and (len(counts) != 1 or counts[0] < 1):
        speakers = "the rows say" if processors is None else "the rows and `processors` say"
        raise ValueError(f"{speakers} {' and '.join(map(str, counts)) or 'nothing'} for the processors of the chip, which has one number of them; give it as "
                         "`processors`, on the command line --processors, where the rows do not say it, and fit one chip at a time.")  # fmt: skip
    if len(used) < 3:
        reasons = "".join(f"; {count} left out: {reason}" for reason, count in left_out.items())
        raise ValueError(f"{len(used)} matmul or convolution kernels ran both alone and under a collective; three are the least{reasons}.")
    total = int(counts[0])
    log = np.log([row.time_with_s / row.time_alone_s for row in used])
    grid = _Grid(used, total, log, prior, sd)
    weights = grid.weights()
    fitted, spread = grid.moments(weights)
    without = np.array([grid.weights(without=i) @ grid.predicted[:, i] for i in range(len(used))])
    nominal = _log_ratios(used, total, np.array([prior.processors_per_channel]), np.array([prior.evenness]))[0]
    kept_out = (log.sum() - log) / (len(log) - 1)
    error = lambda predicted: float(np.mean(np.abs(predicted - log)))
    ratios = np.array([row.time_with_s / row.time_alone_s for row in others])
    of_others = dict(count=len(ratios)) | (dict(median=float(np.median(ratios)), p90=float(np.quantile(ratios, 0.9))) if len(ratios) else {})
    return OverlapFit(
        chips[0], total, prior._replace(**fitted), sd._replace(**spread), used, left_out, error(weights @ grid.predicted), error(without), error(nominal),
        error(kept_out), of_others, np.exp(without).tolist(),
    )  # fmt: skip


def _check_row(row: Slowdown) -> None:
    for name in ("time_alone_s", "time_with_s"):
        seconds = plain_number(getattr(row, name), f"{name} of kernel {row.kernel!r}")
        if not 0 < seconds < np.inf:
            raise ValueError(f"{name} of kernel {row.kernel!r} is {seconds:g}; it should be above 0 and finite.")
    for name in ("blocks", "channels", "channel_threads", "num_sms"):
        check_whole(getattr(row, name), f"{name} of kernel {row.kernel!r}", 0)


def _sort(rows: Sequence[Slowdown]) -> tuple[list[Slowdown], list[Slowdown], dict[str, int]]:
    """Rows for the law, rows of other kernels, and reasons why the rest is neither."""
    by_position = any(row.pairing == "position" for row in rows)
    used: list[Slowdown] = []
    others: list[Slowdown] = []
    left_out: dict[str, int] = {}
    for row in rows:
        reason = ("alone shorter than 15 us" if row.time_alone_s < SHORTEST_S else "grid or channels are not recorded" if not (row.blocks and row.channels)
                  else "more channels than the chip has processors" if 0 < row.num_sms < row.channels
                  else "paired by name, while others are paired by position" if by_position and row.pairing == "name" else "")  # fmt: skip
        if reason:
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            (used if is_tiled(row.kernel) else others).append(row)
    return used, others, left_out


def _log_ratios(rows: Sequence[Slowdown], processors: int | Sequence[int], per_channel: np.ndarray, evenness: np.ndarray) -> np.ndarray:
    """Log ratios, shape (points, rows), of constants of shape (points,)."""
    columns = np.array([(r.blocks, r.channels, r.channel_threads or 512, min(_LAUNCH_S / r.time_alone_s, 1.0)) for r in rows], float).T
    return np.asarray(_law(columns, np.asarray(processors, float), per_channel[:, None], evenness[:, None]))


@jax.jit
def _law(
    columns: Float[Array, "4 rows"], processors: Float[Array, "*rows"], per_channel: Float[Array, "points 1"], evenness: Float[Array, "points 1"]
) -> Float[Array, "points rows"]:
    blocks, channels, threads, fixed = columns
    return jnp.log(fixed + (1 - fixed) * sm_loss_ratio(blocks, processors, taken_processors(channels, threads, per_channel), evenness))


class _Grid:
    """The posterior on a grid of the two constants and the width of the noise."""

    def __init__(self, rows: Sequence[Slowdown], processors: int, log: np.ndarray, prior: Contention, sd: Contention):
        axes = []
        for name in FITTED:
            middle, width = np.log(getattr(prior, name)), _SPAN * getattr(sd, name)
            axes.append(np.linspace(middle - width, min(middle + width, 0.0) if name == "evenness" else middle + width, _POINTS))
        self.logs = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")])
        away = [(at - np.log(getattr(prior, name))) / getattr(sd, name) for at, name in zip(self.logs, FITTED)]
        self.predicted = _log_ratios(rows, processors, *np.exp(self.logs))
        z = (self.predicted - log)[:, :, None] / _NOISES
        self.likelihood = -0.5 * (_FREEDOM + 1) * np.log1p(z**2 / _FREEDOM) - np.log(_NOISES)
        self.joint = self.likelihood.sum(axis=1) - 0.5 * np.sum(np.square(away), axis=0)[:, None]

    def weights(self, without: int | None = None) -> np.ndarray:
        """Posterior weights of the points, summed over the noise, from all rows but one. Shape (points,)."""
        joint = self.joint if without is None else self.joint - self.likelihood[:, without]
        weights = np.exp(joint - joint.max()).sum(axis=1)
        return weights / weights.sum()

    def moments(self, weights: np.ndarray) -> tuple[dict[str, float], dict[str, float]]:
        """Exponential of the mean log, and standard deviation of the log, by name."""
        mean = self.logs @ weights
        spread = np.sqrt((self.logs - mean[:, None]) ** 2 @ weights)
        named = lambda values: {name: float(value) for name, value in zip(FITTED, values)}
        return named(np.exp(mean)), named(spread)
