"""`validate runs`: the shipped calibration against a file of measured runs; refits nothing, drops nothing silently."""

import os
from collections import Counter

import numpy as np

from ..io import RunTable, published_runs_path, read_runs
from ._calibration import Calibration, load_calibration, lower_bounds
from ._evaluate import error_summary
from ._memory_fit import log_peak
from ._posterior import Z80
from ._rows import Rows, SkipRun, prepare


def _groups(rows: Rows, log_predicted: np.ndarray) -> list[dict]:
    out = []
    for group in dict.fromkeys(rows.groups):
        at = np.array([g == group for g in rows.groups])
        error = error_summary(log_predicted[at], rows.log_time[at])
        entry = {"group": {"source": group[0], "model": group[1]}, "n": int(at.sum()), "median": error["median"], "bias": error["bias"]}
        out.append(entry)
    return sorted(out, key=lambda entry: -entry["median"])


def validate_runs(path: str | os.PathLike | RunTable, *, calibration: Calibration | None = None) -> dict:
    """Predicts every run of a file in the schema of `training_runs.csv` and scores the predictions.

    Unknown columns are ignored; cells that cannot be read, rows without a step time and rows outside the model's reach are counted under
    `skipped`. Missing knobs take the defaults documented in `_rows.py`. Rows of unknown software get their family's constants.

    Returns:
      A dictionary ready for JSON: `n_rows`, `n_modelled`, `skipped` (reason -> count), `error`, `baseline` and `memory` (median, mean, p90
      and bias as fractions, with `n` for memory), `groups` by source and model, worst first, and `rows` with 80% intervals in seconds.
    Raises:
      RunFileError: for a file that is not a table of runs.
    """
    calibration = calibration or load_calibration()
    table = path if isinstance(path, RunTable) else read_runs(path, strict=False)
    skipped: Counter = Counter(f"cell cannot be read: {reason}" for _, _, reason in table.rejected)
    try:
        rows = prepare(table.runs, like=read_runs(published_runs_path(), strict=False).runs)
        skipped.update(rows.skipped)
    except SkipRun as error:
        rows = None
        skipped.update(error.reasons)
    empty = error_summary(np.array([]), np.array([]))
    result: dict = {
        "n_rows": len(table.runs) + len(table.rejected), "n_modelled": 0 if rows is None else len(rows), "skipped": dict(skipped.most_common()),
        "error": empty, "baseline": empty, "memory": empty | {"n": 0}, "groups": [], "rows": [], "unit": "errors are fractions of the measured value",
        "calibration": calibration.meta,
    }  # fmt: skip
    if rows is None:
        return result
    prediction = calibration.posterior.predict(rows)
    low, high = (np.exp(prediction.mean + sign * Z80 * prediction.sd) for sign in (-1, 1))
    baseline = np.log(lower_bounds(rows) / calibration.efficiency)
    with_peak = np.array([run.peak_mem_gb is not None for run in rows.runs])
    result["error"] = error_summary(prediction.mean, rows.log_time)
    result["baseline"] = error_summary(baseline, rows.log_time)
    if with_peak.any():
        some = rows.take(with_peak)
        peak = log_peak(some, {s: calibration.memory_of(s, f) for s, f in zip(some.stack, some.family, strict=True)})
        result["memory"] = error_summary(peak, np.log([(run.peak_mem_gb or np.nan) * 1e9 for run in some.runs])) | {"n": int(with_peak.sum())}
    result["groups"] = _groups(rows, prediction.mean)
    numbers = zip(rows.runs, np.exp(prediction.mean), low, high, np.exp(baseline), strict=True)
    result["rows"] = [
        {"id": run.id, "measured_s": run.step_time_s, "predicted_s": float(t), "low_s": float(a), "high_s": float(b), "baseline_s": float(c)}
        for run, t, a, b, c in numbers
    ]
    return result
