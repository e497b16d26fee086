"""The posterior over runs: fitted physics, linearised at its mode, plus the residual process, conditioned on all measured rows at once.

With `f` the log step time at the mode, `J` its Jacobian in all parameters, `P` the diagonal prior and `K_res` the residual kernel, log times
are jointly normal with covariance `J P J' + K_res + S` (function-space view; the update keeps every constant free and is exact for
the linearised model). Rows of a stack, chip or family the fit has not seen get fresh offsets with their prior widths, so a new
software stack starts from its family and learns from its own rows through the same formula. `S` is row noise, reweighted so that single
odd rows (Student-t, 4 degrees of freedom) do not count.
"""

import dataclasses
from functools import cached_property

import numpy as np
import scipy.linalg

from ._constants import CONSTANTS
from ._design import LEVELS, Design
from ._fit import Fit, log_time_and_gradient
from ._residual import Points, points, residual_kernel, same
from ._rows import Rows

ROW_NOISE = 0.06
ROW_FREEDOM = 4.0
REWEIGHTINGS = 4
ROWS_PER_GROUP = 1000
"""Rows of one (source, model) group kept in the posterior: beyond this they repeat each other and only cost time."""

UNSEEN_SHARE = 0.82
"""Deviations of rows of a stack without any measured run are multiplied by this: their priors are wide, and cover 92% where 80 is meant."""

Z80 = 1.2816
"""Half width of a normal 80% interval in standard deviations."""

_LABEL = {"generation": "generation", "chip": "accelerator", "family": "family", "stack": "stack"}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Log step times of rows. Their 80% interval in seconds is `exp(mean -+ 1.2816 sd)`.

    Attributes:
      mean, sd: shape (rows,). [log s], [log]
      physics: part of the mean that is the fitted model alone, shape (rows,). [log s]
    """

    mean: np.ndarray
    sd: np.ndarray
    physics: np.ndarray


@dataclasses.dataclass(frozen=True)
class Posterior:
    """Fit and measured rows, ready to predict.

    Attributes:
      design: parameters and priors of the fit.
      parameters: its mode.
      rows: the measured rows.
      gradient: of each row's log time in its constants, at the mode, shape (rows, constants).
      residual: measured minus predicted log time with all parameters at their prior mean in the linearised model, shape (rows,).
      row_noise: prior standard deviation of each row's noise, shape (rows,). [log]
      row_weight: robust weight of each row if it was found before, else None, shape (rows,). [1]
    """

    design: Design
    parameters: np.ndarray
    rows: Points
    gradient: np.ndarray
    residual: np.ndarray
    row_noise: np.ndarray
    row_weight: np.ndarray | None = None

    @cached_property
    def _shift(self) -> np.ndarray:
        return self.design.mean - self.parameters

    @cached_property
    def _solved(self) -> tuple[tuple, np.ndarray, np.ndarray]:
        """Cholesky factor of the covariance of the measured rows, its product with the residual, and robust row weights."""
        prior = self._prior(self.rows, self.gradient, self.rows, self.gradient)
        weight = np.ones(len(self.rows)) if self.row_weight is None else self.row_weight
        for step in range(REWEIGHTINGS):
            noise = self.row_noise**2 / weight
            factor = scipy.linalg.cho_factor(prior + np.diag(noise), lower=True, overwrite_a=True)
            alpha = scipy.linalg.cho_solve(factor, self.residual)
            if self.row_weight is not None or step == REWEIGHTINGS - 1:
                return factor, alpha, weight
            weight = (ROW_FREEDOM + 1) / (ROW_FREEDOM + (noise * alpha / self.row_noise) ** 2)
        raise AssertionError("unreachable: the loop returns in its last pass")

    @property
    def weights(self) -> np.ndarray:
        """Robust weight of each measured row, near 1.25 for an ordinary and below 0.5 for an odd one."""
        return self._solved[2]

    @property
    def standardised(self) -> np.ndarray:
        """Residual of each measured row after the update, in units of its noise."""
        return self.row_noise / self._solved[2] * self._solved[1]

    def settled(self) -> "Posterior":
        """The same posterior with its robust weights written down, so that they need not be found again."""
        return dataclasses.replace(self, row_weight=self.weights)

    def jacobian(self, at: Points, gradient: np.ndarray) -> np.ndarray:
        """Jacobian of log times in the parameters, shape (rows, parameters)."""
        return self.design.jacobian(at, gradient)

    def _prior(self, a: Points, grad_a: np.ndarray, b: Points, grad_b: np.ndarray) -> np.ndarray:
        """Prior covariance of log times: known parameters, fresh offsets of unknown labels, residual process."""
        known = (self.jacobian(a, grad_a) * self.design.width**2) @ self.jacobian(b, grad_b).T
        return known + self.fresh(a, grad_a, b, grad_b) + residual_kernel(a, b)

    def fresh(self, a: Points, grad_a: np.ndarray, b: Points, grad_b: np.ndarray) -> np.ndarray:
        """Prior covariance from offsets of labels that the fit does not know."""
        total = np.zeros((len(a), len(b)))
        for level in LEVELS:
            known = {key[2] for key in self.design.keys if key[1] == level}
            new_a, new_b = (tuple("" if label in known else label for label in getattr(p, _LABEL[level])) for p in (a, b))
            shared = same(new_a, new_b)
            if shared.any():
                width = np.array([getattr(c, level) for c in CONSTANTS]) ** 2
                if level == "stack":  # a stack without a family also carries what a family would
                    alone = np.array([family == "" for family in a.family], bool)[:, None] * np.array([c.family for c in CONSTANTS]) ** 2
                    total += shared * (((width + alone) * grad_a) @ grad_b.T)
                else:
                    total += shared * ((width * grad_a) @ grad_b.T)
        return total

    def joint(self, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Posterior mean and covariance of the noise-free log times of rows, and their physics part."""
        constants = self.design.constants(rows, self.parameters)
        physics, gradient = log_time_and_gradient(rows, constants)
        at = points(rows)
        cross = self._prior(at, gradient, self.rows, self.gradient)
        prior_mean = physics + self.jacobian(at, gradient) @ self._shift
        mean, covariance = self.condition(cross, prior_mean, self._prior(at, gradient, at, gradient))
        return mean, covariance, physics

    def chip_constants(self, generation: str, chip: str) -> np.ndarray:
        """Mode of all constants for a chip, shared values and its offsets, scale of the fit, shape (constants,)."""
        index = self.design.index
        levels = (("shared", ""), ("generation", generation), ("chip", chip))
        return np.array([sum(self.parameters[index[c.name, *key]] for key in levels if (c.name, *key) in index) for c in CONSTANTS])

    def condition(self, cross: np.ndarray, prior_mean: np.ndarray, prior_covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and covariance of any quantities with this prior and prior covariance `cross` with the measured rows."""
        factor, alpha, _ = self._solved
        half = scipy.linalg.solve_triangular(factor[0], cross.T, lower=True)
        return prior_mean + cross @ alpha, prior_covariance - half.T @ half

    def predict(self, rows: Rows) -> Prediction:
        """Predicts rows, measured or not; the standard deviation includes the noise of one run."""
        block = 512
        parts = [self.joint(rows.take(np.arange(start, min(start + block, len(rows))))) for start in range(0, len(rows), block)]
        mean, physics = (np.concatenate([part[i] for part in parts]) for i in (0, 2))
        variance = np.concatenate([np.diag(part[1]) for part in parts])
        measured = set(self.rows.stack)
        share = np.array([1.0 if stack in measured else UNSEEN_SHARE for stack in rows.stack])
        return Prediction(mean, share * np.sqrt(np.maximum(variance, 0) + ROW_NOISE**2), physics)

    def observe(self, rows: Rows) -> "Posterior":
        """The posterior with further measured rows.

        Raises:
          ValueError: for a row without a measured time.
        """
        if not np.isfinite(rows.log_time).all():
            missing = [run.id for run, t in zip(rows.runs, rows.log_time, strict=True) if not np.isfinite(t)]
            raise ValueError(f"observe: no measured step time in {', '.join(missing[:3])}. Leave such rows out, or predict them.")
        at, gradient, residual, noise = _measured(self.design, self.parameters, rows)
        return dataclasses.replace(
            self, rows=self.rows.join(at), gradient=np.concatenate([self.gradient, gradient]),
            residual=np.concatenate([self.residual, residual]), row_noise=np.concatenate([self.row_noise, noise]), row_weight=None,
        )  # fmt: skip


def _measured(design: Design, parameters: np.ndarray, rows: Rows):
    at = points(rows)
    predicted, gradient = log_time_and_gradient(rows, design.constants(at, parameters))
    residual = rows.log_time - predicted - design.jacobian(at, gradient) @ (design.mean - parameters)
    return at, gradient, residual, ROW_NOISE / np.sqrt(np.maximum(rows.weight, 0.05))


def build_posterior(fit: Fit, rows: Rows, *, per_group: int = ROWS_PER_GROUP) -> Posterior:
    """Conditions on measured rows of positive weight, at most `per_group` of one (source, model) group, evenly picked by configuration.

    Raises:
      ValueError: when no row has a positive weight and a finite time.
    """
    usable = np.flatnonzero((rows.weight > 0) & np.isfinite(rows.log_time))
    if not len(usable):
        raise ValueError("build_posterior: no row has a measured time and a positive weight. Give at least one measured row.")
    order = np.lexsort(points(rows).coordinates[usable].T)
    kept = []
    for group in dict.fromkeys(rows.groups[i] for i in usable):
        members = [i for i in usable[order] if rows.groups[i] == group]
        kept += [members[j] for j in np.unique(np.linspace(0, len(members) - 1, min(len(members), per_group)).round().astype(int))]
    at, gradient, residual, noise = _measured(fit.design, fit.parameters, rows.take(np.sort(kept)))
    return Posterior(fit.design, fit.parameters, at, gradient, residual, noise)
