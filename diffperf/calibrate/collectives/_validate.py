"""`validate collectives`: the shipped fit against files of measured collectives; refits nothing but one floor per source, which it reports.

A library's collectives follow the calibrated curve, kernels of engines (their own all-reduce, dispatch and combine of experts) constants of their own.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...io import CollectiveTable, bus_factor, read_collectives
from .._evaluate import error_summary
from ._engines import engine_rows, is_engine, predict_engines
from ._predict import BANDS, Z80, band_of, predict_collectives, prepare_collectives, unfit_rows
from ._priors import shipped


def alpha_beta(wire: np.ndarray, group: np.ndarray, log_measured: np.ndarray) -> np.ndarray:
    """Log times of `alpha + wire bytes / rate` with both numbers taken from each group's own smallest and largest rows: a kind baseline."""
    out = np.zeros(len(wire))
    for key in dict.fromkeys(group):
        at = np.flatnonzero(group == key)
        t = np.exp(log_measured[at])
        alpha = float(np.min(t))
        top = int(np.argmax(wire[at]))
        beta = max(t[top] - alpha, 1e-2 * t[top]) / wire[at][top]
        out[at] = np.log(alpha + beta * wire[at])
    return out


def validate_collectives(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | CollectiveTable, *, system: str = "", library: str = "",
    fit: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Predicts every collective of some files and scores the predictions; leaves out rows that their source calls unhealthy or invalid, and times with waiting.

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
    engine, (unfit, reasons) = is_engine(table), unfit_rows(table)
    of_library, of_engines = np.flatnonzero(~engine & ~unfit), np.flatnonzero(engine & ~unfit)
    rows = _concatenate(_library_rows(table, of_library, system, library, fit), _engine_rows(table, of_engines, system, fit))
    rows.skipped.update(reasons)
    out: dict[str, Any] = {
        "n_rows": len(table) + sum(problem.kind == "row left out" for problem in table.problems), "n_modelled": len(rows.at), "skipped": rows.skipped,
        "error": error_summary(rows.predicted, rows.log_time), "baseline": error_summary(np.array([]), np.array([])), "groups": [], "rows": [],
        "offsets": rows.floors, "unit": "errors are fractions of the measured time", "calibration": shipped().get("meta", {}),
    }  # fmt: skip
    lost = out["n_rows"] - len(table)
    if lost:
        out["skipped"]["row cannot be read"] = lost
    if not len(rows.at):
        return out
    operation, nbytes = table.op[rows.at], rows.nbytes
    baseline = alpha_beta(rows.wire, rows.series, rows.log_time)
    out["baseline"] = error_summary(baseline, rows.log_time)
    keys = list(zip(rows.source.tolist(), operation.tolist(), band_of(nbytes).tolist()))
    for key in dict.fromkeys(keys):
        at = np.array([item == key for item in keys])
        error = error_summary(rows.predicted[at], rows.log_time[at])
        group = {"source": str(key[0]), "op": str(key[1]), "band": BANDS[key[2]]}
        out["groups"].append({"group": group, "n": int(at.sum()), "median": error["median"], "bias": error["bias"]})
    out["groups"].sort(key=lambda entry: -entry["median"])
    for k, i in enumerate(rows.at):
        place = f":{table.line[i]}" if table.line[i] >= 0 else ""
        middle, half = rows.predicted[k], Z80 * rows.sd[k]
        out["rows"].append(dict(
            id=f"{table.log[i] or table.file[i]}{place} {operation[k]} {nbytes[k]:.0f}", measured_s=float(np.exp(rows.log_time[k])),
            predicted_s=float(np.exp(middle)), low_s=float(np.exp(middle - half)), high_s=float(np.exp(middle + half)), baseline_s=float(np.exp(baseline[k])),
        ))  # fmt: skip
    return out


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Predicted rows: place in the table, bytes, log times, who published them, the series that share a baseline, bytes on the wire."""

    at: np.ndarray
    nbytes: np.ndarray
    log_time: np.ndarray
    predicted: np.ndarray
    sd: np.ndarray
    source: np.ndarray
    series: np.ndarray
    wire: np.ndarray
    skipped: dict[str, int]
    floors: dict[str, float]


def _library_rows(table: CollectiveTable, at: np.ndarray, system: str, library: str, fit: dict[str, Any] | None) -> _Rows:
    prepared = prepare_collectives(table.take(at), system, library)
    predicted = predict_collectives(prepared, fit)
    rows = prepared.rows
    operation = [kind.split("|")[0] for kind in rows.kind]
    series = [f"{log}/{op}/{n:g}" for log, op, n in zip(rows.log, operation, rows.ranks)]
    wire = np.array([bus_factor(op, n) for op, n in zip(operation, rows.ranks)]) * rows.nbytes
    source = [prepared.sources[k] for k in rows.log]
    return _Rows(
        at[prepared.at], rows.nbytes, rows.log_time, predicted.log_time, predicted.sd, np.array(source, object), np.array(series, object), wire,
        dict(prepared.skipped), predicted.floors,
    )  # fmt: skip


def _engine_rows(table: CollectiveTable, at: np.ndarray, system: str, fit: dict[str, Any] | None) -> _Rows:
    part = table.take(at)
    rows = engine_rows(part, system)
    value, sd = predict_engines(rows, fit)
    source = [str(part.source[i]) or str(part.log[i]) for i in rows.at]
    series = [f"{k}/{'/'.join(f'{x:g}' for x in row[3:] if row[3])}/{row[1]:g}" for k, row in zip(rows.kernel, rows.inputs)]
    nbytes = rows.inputs[:, 0] * np.where(rows.inputs[:, 2] > 0, rows.inputs[:, 1], 1.0)  # of tokens, where experts are per token
    return _Rows(at[rows.at], nbytes, rows.log_time, value, sd, np.array(source, object), np.array(series, object), nbytes, rows.skipped, {})


def _concatenate(a: _Rows, b: _Rows) -> _Rows:
    columns = {field.name: np.concatenate([getattr(a, field.name), getattr(b, field.name)]) for field in dataclasses.fields(_Rows)[:8]}
    order = np.argsort(columns["at"], kind="stable")
    return _Rows(**{name: column[order] for name, column in columns.items()}, skipped=a.skipped | b.skipped, floors=a.floors)
