"""Held-out accuracy: errors of predictions of rows whose whole group, or whole source, the fit has not seen."""

from collections.abc import Callable, Sequence

import numpy as np

from ._calibration import constant_efficiency, lower_bounds
from ._choice import choose
from ._fit import Fit, fit_runs
from ._posterior import REWEIGHTINGS, ROW_FREEDOM, ROW_NOISE, UNSEEN_SHARE, Z80, Prediction, build_posterior
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


def update(mean: np.ndarray, covariance: np.ndarray, log_time: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Posterior mean and standard deviation (of one more run) of all rows after the measured ones in `seen`, from their joint prior.

    Student-t row weights; deviations are scaled by how well the prior foresaw the measured rows, `(4 + chi^2) / (4 + k)`.
    """
    if len(seen) == 0:
        return mean, UNSEEN_SHARE * np.sqrt(np.diag(covariance) + ROW_NOISE**2)
    surprise = log_time[seen] - mean[seen]
    block, cross = covariance[np.ix_(seen, seen)], covariance[:, seen]
    weight = np.ones(len(seen))
    for _ in range(REWEIGHTINGS):
        noise = ROW_NOISE**2 / weight
        alpha = np.linalg.solve(block + np.diag(noise), surprise)
        weight = (ROW_FREEDOM + 1) / (ROW_FREEDOM + (noise * alpha / ROW_NOISE) ** 2)
    chi_square = surprise @ np.linalg.solve(block + ROW_NOISE**2 * np.eye(len(seen)), surprise)
    left = np.diag(covariance) - np.einsum("qk,qk->q", cross, np.linalg.solve(block + np.diag(noise), cross.T).T)
    scale = (4 + chi_square) / (4 + len(seen))
    return mean + cross @ alpha, np.sqrt(scale * (np.maximum(left, 0) + ROW_NOISE**2))


def few_shot(
    rows: Rows, source: str, counts: Sequence[int] = (0, 1, 3, 10), *, start: Fit | None = None, draws: int = 40, most: int = 150, seed: int = 0
) -> dict[str, dict[int, dict[str, float]]]:
    """A whole source held out, then predicted from a few of its own rows: what a user's own cluster feels like.

    Args:
      source: repository of the rows to hold out.
      counts: numbers of own rows revealed.
      draws: random choices averaged over.
      most: rows of the source at most; further ones are left out at random.
    Returns:
      For "random" and "chosen" rows and each count: median and p90 of the error over the other rows, and coverage of their 80% intervals;
      averages over draws.
    """
    own = np.array([group[0] == source for group in rows.groups])
    known = rows.take(~own)
    posterior = build_posterior(fit_runs(known, start=start, passes=8 if start else 14), known)
    rng = np.random.default_rng(seed)
    index = np.flatnonzero(own & (rows.weight == 1))  # rows whose own source does not disown them
    target = rows.take(np.sort(rng.permutation(index)[:most]))
    mean, covariance, _ = posterior.joint(target)
    n = len(target)

    def score(seen):
        rest = np.setdiff1d(np.arange(n), seen)
        new, sd = update(mean, covariance, target.log_time, np.asarray(seen, int))
        error = np.abs(np.exp(new - target.log_time) - 1)[rest]
        inside = (np.abs(new - target.log_time) <= Z80 * sd)[rest]
        return dict(median=float(np.median(error)), p90=float(np.quantile(error, 0.9)), coverage=float(inside.mean()))

    chosen = [i for i, _, _ in choose(covariance, max(counts))]
    out: dict[str, dict[int, dict[str, float]]] = {"random": {}, "chosen": {}}
    for count in (c for c in counts if c < n):
        scores = [score(rng.permutation(n)[:count]) for _ in range(draws if count else 1)]
        out["random"][count] = {key: float(np.mean([s[key] for s in scores])) for key in scores[0]}
        out["chosen"][count] = score(chosen[:count])
    return out
