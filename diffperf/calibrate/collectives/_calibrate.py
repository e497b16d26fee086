"""`calibrate collectives`: the constants of a user's links, from the user's own logs, with intervals.

Logs of one system, NIC rate and network are fitted together: node and network constants are shared, and each log has a floor and three factors of its own,
so that what a library version or a way of timing adds is not taken for the links'. Intervals are those of the Laplace approximation at the mode.
Kernels of engines get constants of their own. Left out are rows that their source calls unhealthy or invalid, and times of one rank of a trace, which hold its
waiting for the others.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...io import CollectiveTable, read_collectives, write_atomic
from .._evaluate import error_summary
from ._design import fit_design, predict_design
from ._engines import LEAST_ROWS, EngineRows, engine_rows, fit_engines, is_engine, predict_engines
from ._levels import LOG_WIDTH, log_design
from ._predict import ROW_NOISE, Z80, Prepared, prepare_collectives, unfit_rows
from ._priors import prior_of, shipped, source_key
from ._settings import Setting
from ._vector import INDEX

LEARNED = 0.7
"""A constant counts as learned when its width fell below this share of the prior's."""


@dataclasses.dataclass(frozen=True)
class CollectiveFit:
    """The fit of one system and network.

    Attributes:
      setting: of its first log.
      logs: names of its logs.
      constants: each with `name`, `prior`, `value`, `low`, `high` (80%), `learned`; SI units.
      floors: least time of the host, by log. [s]
      before, after: errors of the shipped fit and of this one on these rows, which it has seen; of what is peculiar to a log its floor counts, and of the rest
        the mean over the logs, which is what the fit keeps. Medians, means, p90 and bias as fractions.
      rows: number of rows.
      sd: predictive standard deviation of the log time, mean over the rows.
    """

    setting: Setting
    logs: tuple[str, ...]
    constants: tuple[dict[str, Any], ...]
    floors: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    rows: int
    sd: float


@dataclasses.dataclass(frozen=True)
class EngineFit:
    """The fit of one engine's kernel.

    Attributes:
      name: kernel, version and system.
      rows: number of rows.
      values: its constants; SI units.
      noise: scatter of its log time about the fit.
      before, after: errors of the shipped constants (those of its nearest relative, if it was not measured) and of these.
    """

    name: str
    rows: int
    values: dict[str, float]
    noise: float
    before: dict[str, float]
    after: dict[str, float]


@dataclasses.dataclass(frozen=True)
class CollectiveCalibration:
    """What `calibrate collectives` found.

    Attributes:
      fits: one per system and network.
      engines: one per kernel of an engine.
      skipped: reason -> rows.
      document: the constants in the form of the shipped fit, for `validate_collectives(fit=...)`.
    """

    fits: tuple[CollectiveFit, ...]
    engines: tuple[EngineFit, ...]
    skipped: dict[str, int]
    document: dict[str, Any]

    def write(self, path: str) -> None:
        """Writes `document` as JSON."""
        import json

        write_atomic(path, json.dumps(self.document, indent=1) + "\n")


def calibrate_collectives(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | CollectiveTable, *, system: str = "", library: str = ""
) -> CollectiveCalibration:
    """Fits links and network to measured collectives.

    Args:
      files: paths for `read_collectives`, or a table.
      system: catalog name, where the files do not name the accelerator.
      library: library and version, such as "NCCL 2.8.4", where the files do not say.
    Raises:
      CollectiveFileError: for a file that is no table of collectives.
      ValueError: for an unknown system, or when no row can be modelled.
    """
    table = files if isinstance(files, CollectiveTable) else read_collectives(files)
    engine, (unfit, reasons) = is_engine(table), unfit_rows(table)
    prepared = prepare_collectives(table.take(~engine & ~unfit), system, library)
    kernels = engine_rows(table.take(engine & ~unfit), system)
    skipped = prepared.skipped | kernels.skipped | reasons
    if not len(prepared.rows) and not len(kernels.at):
        raise ValueError(f"calibrate_collectives: no row can be fitted: {'; '.join(skipped) or 'the files have no rows'}")
    groups: dict[str, list[int]] = {}
    for k, setting in enumerate(prepared.settings):
        groups.setdefault(source_key(setting), []).append(k)
    document = {key: dict(value) for key, value in shipped().items() if isinstance(value, dict)} | {"engines": shipped().get("engines", [])}
    fits = []
    for logs in groups.values():
        fit, entry = _fit_group(prepared, logs)
        fits.append(fit)
        _merge(document, fit.setting, entry)
    engines, entries = _fit_engines(kernels, skipped)
    own = {(entry["name"], entry["version"], entry["system"]) for entry in entries}
    others = [entry for entry in document["engines"] if (entry["name"], entry["version"], entry["system"]) not in own]
    return CollectiveCalibration(tuple(fits), engines, skipped, document | {"engines": others + entries})


def _fit_engines(rows: EngineRows, skipped: dict[str, int]) -> tuple[tuple[EngineFit, ...], list[dict[str, Any]]]:
    """Fits every kernel and adds those of too few rows to `skipped`."""
    entries = fit_engines(rows)
    of = {(kernel.name, kernel.version, kernel.system): k for k, kernel in enumerate(rows.kernels)}
    before, after = predict_engines(rows)[0], predict_engines(rows, {"engines": entries})[0]
    fits = []
    for entry in entries:
        at = rows.kernel == of[entry["name"], entry["version"], entry["system"]]
        scores = [error_summary(value[at], rows.log_time[at]) for value in (before, after)]
        fits.append(EngineFit(f"{entry['name']}, {entry['version']} on {entry['system']}", int(at.sum()), entry["values"], entry["noise"], *scores))
    few = len(rows.at) - sum(fit.rows for fit in fits)
    if few:
        skipped[f"an engine's kernel with fewer than {LEAST_ROWS} rows"] = few
    return tuple(fits), entries


def _fit_group(prepared: Prepared, logs: Sequence[int]) -> tuple[CollectiveFit, dict[str, list[float]]]:
    rows = prepared.rows.take(np.isin(prepared.rows.log, logs))
    rows.log[:] = np.searchsorted(logs, rows.log)
    settings = [prepared.settings[k] for k in logs]
    graph = ["aiconfigurator" in prepared.sources[k] for k in logs]  # timed in CUDA graphs: no floor
    design = log_design(settings, graph)
    zero = np.zeros(len(design.names))
    before = error_summary(predict_design(rows, design, zero)[0], rows.log_time)
    mode = fit_design(rows, design)
    covariance = np.linalg.inv(mode.precision)
    _, gradient = predict_design(rows, design, mode.parameters)
    sd = np.sqrt(np.einsum("ij,jk,ik->i", gradient, covariance, gradient) + ROW_NOISE**2)
    width = np.sqrt(np.diag(covariance))
    constants, floors, entry = [], {}, {}
    for name, move, after, prior in zip(design.names, mode.parameters, width, design.width, strict=True):
        if name.startswith("log"):
            k, leaf = int(name.split(".")[0][3:]), name.split(".")[1]
            base = design.base[k, INDEX[f"source.{leaf}"]]
            shown = f"{prepared.names[logs[k]]}: {leaf}"
            if leaf == "floor" and after < LEARNED * prior:
                floors[prepared.names[logs[k]]] = float(np.exp(base + move))
        else:
            base, shown = design.base[0, INDEX[name]], name
            entry[name] = [float(np.exp(base + move)), float(after)]
        constants.append(dict(
            name=shown, prior=float(np.exp(base)), value=float(np.exp(base + move)), low=float(np.exp(base + move - Z80 * after)),
            high=float(np.exp(base + move + Z80 * after)), learned=bool(after < LEARNED * prior),
        ))  # fmt: skip
    kept = np.array(mode.parameters)
    for leaf, spread in LOG_WIDTH.items():  # what a further log of this system and network will have
        of, base = [design.names.index(f"log{k}.{leaf}") for k in range(len(logs))], design.base[:, INDEX[f"source.{leaf}"]]
        mean = np.mean(base + kept[of])
        kept[of] = mean - base
        entry[f"source.{leaf}"] = [float(np.exp(mean)), spread]
    error = error_summary(predict_design(rows, design, kept)[0], rows.log_time)
    names = tuple(prepared.names[k] for k in logs)
    fit = CollectiveFit(settings[0], names, tuple(constants), floors, before, error, len(rows), float(sd.mean()))
    return fit, entry


def _merge(document: dict[str, Any], setting: Setting, entry: dict[str, list[float]]) -> None:
    mean, _, _ = prior_of(setting)
    node = {name.removeprefix("node."): pair for name, pair in entry.items() if name.startswith("node.")}
    network = {name.removeprefix("network."): pair for name, pair in entry.items() if name.startswith("network.") and name != "network.hop"}
    systems = dict(document.get("systems", {}))
    systems[setting.system] = {"link": [float(np.exp(mean[INDEX["node.bandwidth"]])), 0.0]} | systems.get(setting.system, {}) | node
    document["systems"] = systems
    document["network"] = dict(document.get("network", {})) | network
    own = {name.removeprefix("source."): pair for name, pair in entry.items() if name.startswith("source.")}
    document["sources"] = dict(document.get("sources", {})) | {source_key(setting): own}
    if "network.hop" in entry:
        document["fabrics"] = dict(document.get("fabrics", {})) | {setting.fabric: entry["network.hop"]}
