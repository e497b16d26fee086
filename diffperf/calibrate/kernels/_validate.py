"""`validate kernels`: shipped or own kernel libraries against a table of measured kernels; refits nothing, drops nothing silently."""

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...cost.kernel._constants import constrain
from ...cost.kernel._library import Fitted, KernelLibrary, read_fitted, shipped
from ...io import KernelTable, read_kernels
from .._evaluate import error_summary
from .._posterior import Z80
from ._fit import KernelFit, predict_rows, roofline_time, slopes_of_rows
from ._sets import PlacedSet, place


def fit_of(library: KernelLibrary, free: np.ndarray) -> KernelFit:
    """A library in the form of a fit."""
    return KernelFit(library.family, free, np.asarray(library.weights), np.zeros((0, 0)), float("nan"), float(library.noise))


def predict_set(placed: PlacedSet, fitted: Fitted, correction: bool = True) -> tuple[np.ndarray, np.ndarray, str]:
    """Log time and its standard deviation per row, and what the constants rest on."""
    s = placed.kernels
    library = fitted.library(s.chip, s.library, s.datatype, correction)
    entry = fitted.entries.get(s.key)
    free = np.array(entry["free"]) if entry else fitted.shared.prior(*s.key)[0]
    fit = fit_of(library, free)
    mean = predict_rows(fit, s.shape, s.device)
    variance = np.full(len(s), float(library.noise) ** 2)
    spread = np.asarray(library.spread)
    if spread.any():
        variance = variance + slopes_of_rows(fit, s.shape, s.device) ** 2 @ spread**2
    return mean, np.sqrt(variance), library.source


def roofline(placed: PlacedSet) -> np.ndarray:
    """Log of the plain roofline of each row: arithmetic at the datasheet peak or compulsory traffic at the datasheet bandwidth."""
    s = placed.kernels
    return np.log(np.maximum(roofline_time(placed.rows.family, s.shape, s.device), 1e-12))


def validate_kernels(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | KernelTable, *, fitted: str | os.PathLike[str] | None = None,
    system: str | os.PathLike[str] | None = None, correction: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Predicts every kernel of a table and scores the predictions beside the plain roofline.

    Args:
      source: files as `read_kernels` takes them, or a table.
      fitted: a file written by `calibrate kernels`, whose sets come before the shipped ones.
      system: TOML file of the chip, for rows whose `gpu` is not in the catalog.
      correction: use the fitted networks.
    Returns:
      A dictionary ready for JSON: `n_rows`, `n_modelled`, `skipped` (reason -> count), `error` and `baseline` (median, mean, p90 and bias as
      fractions), `groups` by chip, operator, datatype and library, worst first, with what their constants rest on, and `rows` with 80%
      intervals in seconds.
    Raises:
      RunFileError: for a file that is not a table of kernels.
      UnknownNameError: for a GPU that is not in the catalog, without `system`.
    """
    table = source if isinstance(source, KernelTable) else read_kernels(source)
    own = {} if fitted is None else read_fitted(fitted)
    placed, skipped = place(table, system)
    for rejection in table.rejected:
        skipped[f"cell cannot be used: {rejection.reason}"] += rejection.count
    names = table.source_row
    groups, rows, all_predicted, all_measured, all_baseline = [], [], [], [], []
    for one in placed:
        s, name = one.kernels, one.rows.family.name
        mine, named = own.get(name), dataclasses.replace(one, kernels=dataclasses.replace(s, chip=os.path.basename(s.chip)))
        if mine is not None and named.kernels.key in mine.entries:
            predicted, sd, text = predict_set(named, mine, correction)
        else:
            predicted, sd, text = predict_set(one, shipped(name), correction)
        base = roofline(one)
        low, high = np.exp(predicted - Z80 * sd), np.exp(predicted + Z80 * sd)
        for op in dict.fromkeys(table.op[one.at]):
            at = table.op[one.at] == op
            score = error_summary(predicted[at], s.log_time[at])
            label = {"chip": os.path.basename(s.chip), "op": str(op), "datatype": s.datatype, "library": s.library}
            groups.append({"group": label, "n": int(at.sum()), **score, "baseline": error_summary(base[at], s.log_time[at]), "source": text})
        numbers = zip(one.at, np.exp(s.log_time), np.exp(predicted), low, high, np.exp(base), strict=True)
        rows += [{"id": str(names[i]), "measured_s": float(a), "predicted_s": float(b), "low_s": float(c), "high_s": float(d), "baseline_s": float(e)}
                 for i, a, b, c, d, e in numbers]  # fmt: skip
        all_predicted.append(predicted)
        all_measured.append(s.log_time)
        all_baseline.append(base)
    join = lambda parts: np.concatenate(parts) if parts else np.array([])
    measured = join(all_measured)
    return {
        "n_rows": len(table) + table.num_rejected, "n_modelled": len(rows), "skipped": dict(Counter(skipped).most_common()),
        "error": error_summary(join(all_predicted), measured), "baseline": error_summary(join(all_baseline), measured),
        "groups": sorted(groups, key=lambda g: -g["median"]), "rows": rows, "unit": "errors are fractions of the measured value",
    }  # fmt: skip


def constants_of(family: Any, free: np.ndarray) -> dict[str, float]:
    """Constants by name from unconstrained numbers."""
    return {name: float(x) for name, x in zip(family.constants._fields, constrain(family.constants, family.priors, jnp.asarray(free)))}
