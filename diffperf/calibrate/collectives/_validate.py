"""`validate collectives`: the shipped fit against files of measured collectives; refits nothing but one floor per source, which it reports."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...io import CollectiveTable, bus_factor, read_collectives
from .._evaluate import error_summary
from ._predict import BANDS, Z80, band_of, predict_collectives, prepare_collectives
from ._priors import shipped


def alpha_beta(operation: np.ndarray, nbytes: np.ndarray, ranks: np.ndarray, group: np.ndarray, log_measured: np.ndarray) -> np.ndarray:
    """Log times of `alpha + wire bytes / rate` with both numbers taken from each group's own smallest and largest rows: a kind baseline."""
    out = np.zeros(len(nbytes))
    for key in dict.fromkeys(group):
        at = np.flatnonzero(group == key)
        wire = np.array([bus_factor(str(operation[i]), ranks[i]) for i in at]) * nbytes[at]
        t = np.exp(log_measured[at])
        alpha = float(np.min(t))
        top = int(np.argmax(wire))
        beta = max(t[top] - alpha, 1e-2 * t[top]) / wire[top]
        out[at] = np.log(alpha + beta * wire)
    return out


def validate_collectives(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | CollectiveTable, *, system: str = "", library: str = "",
    fit: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Predicts every collective of some files and scores the predictions.

    Args:
      files: paths for `read_collectives`, or a table.
      system: catalog name, where the files do not name the accelerator or another is meant.
      library: library and version, such as "NCCL 2.8.4", where the files do not say. Unknown versions widen the interval.
      fit: constants as `calibrate_collectives` makes them; None for the shipped ones.
    Returns:
      The keys of `validate_runs` without memory: `n_rows`, `n_modelled`, `skipped`, `error`, `baseline`, `groups` by source, operation and band, the
      worst first, and `rows`; and `offsets`, the floor of the host's time per source. [s]
    Raises:
      CollectiveFileError: for a file that is no table of collectives.
      ValueError: for an unknown system.
    """
    table = files if isinstance(files, CollectiveTable) else read_collectives(files)
    prepared = prepare_collectives(table, system, library)
    predicted = predict_collectives(prepared, fit)
    rows = prepared.rows
    out: dict[str, Any] = {
        "n_rows": len(table) + sum(problem.kind == "row left out" for problem in table.problems), "n_modelled": len(rows),
        "skipped": dict(prepared.skipped), "error": error_summary(predicted.log_time, rows.log_time), "baseline": error_summary(np.array([]), np.array([])),
        "groups": [], "rows": [], "offsets": predicted.floors, "unit": "errors are fractions of the measured time", "calibration": shipped().get("meta", {}),
    }  # fmt: skip
    lost = out["n_rows"] - len(table)
    if lost:
        out["skipped"]["row cannot be read"] = lost
    if not len(rows):
        return out
    operation = np.array([kind.split("|")[0] for kind in rows.kind])
    line = np.array([f"{log}/{op}/{n:g}" for log, op, n in zip(rows.log, operation, rows.ranks)])
    baseline = alpha_beta(operation, rows.nbytes, rows.ranks, line, rows.log_time)
    out["baseline"] = error_summary(baseline, rows.log_time)
    source, band = np.array([prepared.sources[k] for k in rows.log]), band_of(rows.nbytes)
    for key in dict.fromkeys(zip(source, operation, band)):
        at = np.array([item == key for item in zip(source, operation, band)])
        error = error_summary(predicted.log_time[at], rows.log_time[at])
        group = {"source": str(key[0]), "op": str(key[1]), "band": BANDS[int(key[2])]}
        out["groups"].append({"group": group, "n": int(at.sum()), "median": error["median"], "bias": error["bias"]})
    out["groups"].sort(key=lambda entry: -entry["median"])
    for k, i in enumerate(prepared.at):
        place = f":{table.line[i]}" if table.line[i] >= 0 else ""
        out["rows"].append(dict(
            id=f"{prepared.names[rows.log[k]]}{place} {operation[k]} {rows.nbytes[k]:.0f}", measured_s=float(np.exp(rows.log_time[k])),
            predicted_s=float(np.exp(predicted.log_time[k])), low_s=float(np.exp(predicted.log_time[k] - Z80 * predicted.sd[k])),
            high_s=float(np.exp(predicted.log_time[k] + Z80 * predicted.sd[k])), baseline_s=float(np.exp(baseline[k])),
        ))  # fmt: skip
    return out
