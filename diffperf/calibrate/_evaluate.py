"""Held-out accuracy: errors of predictions of rows whose whole group, or whole source, the fit has not seen."""

from collections.abc import Callable, Sequence

import numpy as np

from ._calibration import constant_efficiency, lower_bounds
from ._fit import Fit, fit_runs
from ._posterior import Prediction, build_posterior
from ._rows import Rows


def error_summary(log_predicted: np.ndarray, log_measured: np.ndarray) -> dict[str, float]:
    """Median, mean and 90th percentile of `|predicted / measured - 1|`, and bias, the median of `predicted / measured - 1`; fractions."""
    if len(log_predicted) == 0:
        return dict(median=float("nan"), mean=float("nan"), p90=float("nan"), bias=float("nan"))
    ratio = np.exp(log_predicted - log_measured) - 1
    error = np.abs(ratio)
    return dict(median=float(np.median(error)), mean=float(error.mean()), p90=float(np.quantile(error, 0.9)), bias=float(np.median(ratio)))


def partition(rows: Rows, seed: int, folds: int = 5) -> np.ndarray:
    """Fold of each row; (source, model) groups stay whole. Shape (rows,)."""
    groups = sorted(set(rows.groups))
    place = dict(zip(np.random.default_rng(seed).permutation(len(groups)), range(len(groups)), strict=True))
    fold = {group: place[i] % folds for i, group in enumerate(groups)}
    return np.array([fold[group] for group in rows.groups])


def held_out(rows: Rows, fold: np.ndarray, *, start: Fit | None = None, progress: Callable[[int, int], None] | None = None) -> tuple[Prediction, np.ndarray]:
    """Predicts every row from a fit without its fold.

    Args:
      fold: label of each row's part.
      start: warm start of the fits; priors are unchanged, so the mode does not depend on it but for the passes taken.
      progress: called with parts done and parts in all.
    Returns:
      The predictions, and the log time of the constant-efficiency roofline whose efficiency is the median over the other folds.
    """
    mean, sd, physics, baseline = (np.full(len(rows), np.nan) for _ in range(4))
    parts: Sequence = sorted(set(fold.tolist()))
    for done, part in enumerate(parts):
        test, known = np.flatnonzero(fold == part), rows.take(fold != part)
        fit = fit_runs(known, start=start, passes=8 if start else 14)
        out = rows.take(test)
        prediction = build_posterior(fit, known).predict(out)
        mean[test], sd[test], physics[test] = prediction.mean, prediction.sd, prediction.physics
        baseline[test] = np.log(lower_bounds(out) / constant_efficiency(known))
        if progress:
            progress(done + 1, len(parts))
    return Prediction(mean, sd, physics), baseline
