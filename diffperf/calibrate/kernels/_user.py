"""`calibrate kernels`: fit a user's measured kernels, starting from what the shipped libraries share.

Each set is fitted twice: without a quarter of its groups (whole (n, k) pairs, head shapes, models), to say what error to expect on shapes not measured,
and then on all rows, which is what is kept.
"""

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...cost.kernel._library import shipped
from ...io import KernelTable, read_kernels
from .._evaluate import error_summary
from ._file import entries, write_kernels_fit
from ._fit import KernelFit, fit_kernels, predict_rows
from ._joint import share
from ._sets import PlacedSet, place
from ._system import write_efficiencies, write_system
from ._validate import constants_of, predict_set, roofline

LEAST_CORRECTION = 400
"""Rows from which the network is fitted too."""
LEAST_GROUPS = 8
"""Groups from which a quarter can be held out."""


@dataclass(frozen=True)
class KernelCalibration:
    """What a calibration found.

    Attributes:
      sets: per set: chip, operators, datatype, library, rows, `before` (error of the shipped guess), `after` (error of the fit) and `roofline` on the groups
        held out (`held_out` rows; on all rows where too few groups allow none), and `constants` by name with `determined`, how much the rows say.
      families: entries of the fitted file.
      skipped: reason -> rows not used.
      fits: each set as it was placed, with its fit.
    """

    sets: Sequence[Mapping[str, Any]]
    families: Mapping[str, list[dict[str, Any]]]
    skipped: Mapping[str, int]
    fits: Sequence[tuple[PlacedSet, KernelFit]]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file for `validate kernels --kernels` and `read_fitted`."""
        write_kernels_fit(path, self.families, {"rows": int(sum(s["rows"] for s in self.sets)), "by": "diffperf calibrate kernels"})


def quarter(groups: np.ndarray) -> np.ndarray:
    """True for about a quarter of the groups, chosen by their names alone, so that the choice does not move with the rows."""
    return np.array([zlib.crc32(str(g).encode()) % 4 == 0 for g in groups])


def calibrate_kernels(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | KernelTable, *, system: str | os.PathLike[str] | None = None,
    system_out: str | os.PathLike[str] | None = None, correction: bool = True, progress: Callable[[int, int], None] | None = None,
) -> KernelCalibration:  # fmt: skip
    """Fits every set of a table.

    Args:
      source: files as `read_kernels` takes them, or a table.
      system: TOML file of the chip, for rows whose `gpu` is not in the catalog, or which are of a CPU.
      system_out: TOML file to write: the machine as a system, its efficiencies in `.fitted.toml` beside it (see `_system.py`). Give it as `system` later on.
      correction: fit the network where a set has `LEAST_CORRECTION` rows.
      progress: called with sets done and sets in all.
    Raises:
      RunFileError: for a file that is not a table of kernels.
      UnknownNameError: for a GPU that is not in the catalog, without `system`.
      ValueError: when no row can be used, or for a `system_out` that cannot describe the table.
    """
    table = source if isinstance(source, KernelTable) else read_kernels(source)
    target = None
    if system_out is not None:
        target = write_system(system_out, table, system)
        system = str(target)
    placed, skipped = place(table, system)
    for rejection in table.rejected:
        skipped[f"cell cannot be used: {rejection.reason}"] += rejection.count
    if not placed:
        if target is not None:
            target.unlink()
        why = "; ".join(f"{reason}: {count}" for reason, count in skipped.most_common(3))
        raise ValueError(f"none of the {len(table)} rows can be fitted ({why}).")
    sets, fitted = [], {}
    for i, one in enumerate(placed):
        fit, said = _fit_one(one, table, correction)
        sets.append(said)
        fitted.setdefault(one.rows.family.name, []).append((one, fit))
        if progress:
            progress(i + 1, len(placed))
    families = {}
    for name, pairs in fitted.items():
        kernels, fits = [one.kernels for one, _ in pairs], [fit for _, fit in pairs]
        priors = [shipped(name).shared.prior(*s.key) for s in kernels]
        families[name] = entries(kernels, fits, share(pairs[0][0].rows.family, [s.key for s in kernels], fits, priors))
    fits = [pair for pairs in fitted.values() for pair in pairs]
    if target is not None:
        write_efficiencies(target, fits, _meta(table, sets))
    return KernelCalibration(sets, families, dict(skipped.most_common()), fits)


def _meta(table: KernelTable, sets: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    held = [s for s in sets if s["held_out"]] or sets
    rows = [s["held_out"] or s["rows"] for s in held]
    mean = float(np.average([s["after"]["mean"] for s in held], weights=rows))
    files = ", ".join(os.path.basename(name) for name in table.files)
    quality = f"mean error {100 * mean:.1f}% on {sum(rows)} rows"
    return {"date": time.strftime("%Y-%m-%d"), "data": f"{len(table)} measured kernels of {files}", "quality": quality}


def _fit_one(one: PlacedSet, table: KernelTable, correction: bool) -> tuple[KernelFit, dict[str, Any]]:
    s, family = one.kernels, one.rows.family
    known = shipped(family.name)
    mean, sd = known.shared.prior(*s.key)
    fit = lambda part: fit_kernels(
        family, part.shape, part.device, part.log_time, mean=mean, sd=sd, starts=2 if len(part) >= 64 else 0,
        correction=correction and len(part) >= LEAST_CORRECTION,
    )  # fmt: skip
    test = quarter(s.group)
    if len(set(s.group)) < LEAST_GROUPS or test.all() or not test.any():
        test = np.zeros(len(s), bool)
    final = fit(s)
    partial = fit(s.take(~test)) if test.any() else final
    scored = test if test.any() else np.ones(len(s), bool)
    summary = lambda predicted: error_summary(predicted[scored], s.log_time[scored])
    narrowed = 1 - np.diag(np.linalg.inv(final.precision)) / sd**2
    return final, {
        "chip": os.path.basename(s.chip), "ops": sorted(set(table.op[one.at])), "datatype": s.datatype, "library": s.library, "rows": len(s),
        "held_out": int(test.sum()), "before": summary(predict_set(one, known)[0]), "after": summary(predict_rows(partial, s.shape, s.device)),
        "roofline": summary(roofline(one)), "constants": constants_of(family, final.free),
        "determined": dict(zip(family.constants._fields, np.round(np.clip(narrowed, 0, 1), 2).tolist())),
    }  # fmt: skip
