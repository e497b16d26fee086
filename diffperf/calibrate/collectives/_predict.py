"""Predictions of measured collectives from a fit, with intervals, and the one number that differs between ways of measuring: the host's floor."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...cost.collective import OPERATIONS
from ...cost.collective._saturating import FLOOR_POWER
from ...io import CollectiveTable
from ._design import CollectiveRows, Design, log_times, pack, predict_design
from ._design import _first as first_places
from ._priors import HELD, prior_of
from ._settings import Setting, setting_of
from ._vector import INDEX, LEAVES

SICK = "labelled unhealthy or invalid by its source"
WAITING = "time of one rank, which holds its waiting for the others (flag waiting_included); give `diffperf trace` the traces of all ranks"
ROW_NOISE = 0.06
"""Standard deviation of a row's log time about its log's curve: protocol changes and repeats."""
Z80 = 1.2816
"""Half width of an 80% interval of the normal distribution."""
BAND_LIMITS = (256 * 1024, 16 * 2**20)
BANDS = ("< 256 KiB", "256 KiB-16 MiB", ">= 16 MiB")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Rows that the model covers, and why others are not among them.

    Attributes:
      rows: the rows.
      at: their places in the table.
      settings: of each log; `rows.log` points into it.
      names: of each log.
      sources: who published each log; floors belong to them.
      skipped: reason -> number of rows.
    """

    rows: CollectiveRows
    at: np.ndarray
    settings: list[Setting]
    names: list[str]
    sources: list[str]
    skipped: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Predictions of rows.

    Attributes:
      log_time: logarithm of the time, floor included, shape (rows,).
      sd: its standard deviation, shape (rows,).
      floors: least time of the host by source. [s]
    """

    log_time: np.ndarray
    sd: np.ndarray
    floors: dict[str, float]


def prepare_collectives(table: CollectiveTable, system: str = "", library: str = "") -> Prepared:
    """Rows of a table with their settings.

    Args:
      table: measured collectives.
      system: catalog name that overrides what rows say.
      library: library and version, such as "NCCL 2.8.4", where rows do not say.
    Raises:
      ValueError: when `system` is unknown.
    """
    skipped: Counter = Counter()
    if system:
        setting_of("", "", 2.0, 1.0, system=system)
    logs: dict[tuple, int] = {}
    settings, names, sources, columns, places = [], [], [], [], []
    for i in range(len(table)):
        op, n, t = str(table.op[i]), float(table.ranks[i]), float(table.time_s[i])
        nodes = float(table.nodes[i]) if np.isfinite(table.nodes[i]) else 1.0
        own = str(table.library[i])
        if own.startswith("custom_allreduce"):
            skipped["an engine's own all-reduce kernel"] += 1
        elif op not in OPERATIONS:
            skipped[f"operation {op or 'not stated'}"] += 1
        elif not (np.isfinite(n) and n >= 2):
            skipped["number of ranks not stated or below 2"] += 1
        elif not (np.isfinite(t) and t > 0):
            skipped["no time"] += 1
        else:
            key = (str(table.log[i]), str(table.accelerator[i]), str(table.interconnect[i]), own, n, nodes)
            if key not in logs:
                header = table.headers[int(table.header[i])] if int(table.header[i]) >= 0 else None
                version = f"{header.library} {header.library_version}" if header and header.library_version else own
                accelerator = key[1] or (header.devices[0] if header and header.devices else "")
                try:
                    settings.append(setting_of(accelerator, key[2], n, nodes, version if any(c.isdigit() for c in version) else library, system))
                except ValueError as error:
                    logs[key] = -1
                    reason = str(error)
                else:
                    logs[key] = len(names)
                    names.append(key[0] or str(table.file[i]))
                    sources.append(str(table.source[i]) or names[-1])
            if logs[key] < 0:
                skipped[reason] += 1
                continue
            algorithm = str(table.algorithm[i]).lower()
            kind = f"{op}|{algorithm if op == 'all_reduce' and algorithm in ('ring', 'tree') else 'auto'}"
            columns.append((kind, float(table.nbytes[i]), n, settings[logs[key]].ranks_per_node, logs[key], np.log(t), 1.0))
            places.append(i)
    fields = [field.name for field in dataclasses.fields(CollectiveRows)]
    data = zip(*columns) if columns else [()] * len(fields)
    rows = CollectiveRows(**{name: np.array(values, int if name == "log" else None) for name, values in zip(fields, data)})
    return Prepared(rows, np.array(places, int), settings, names, sources, dict(skipped.most_common()))


def unfit_rows(table: CollectiveTable) -> tuple[np.ndarray, dict[str, int]]:
    """Mask of the rows whose time is not that of a healthy transfer, shape (rows,), and how many there are for each reason: the system was not well, the test
    did not do what it says, or the time of a trace includes waiting."""
    words = ("unhealthy", "invalid")
    sick = np.array([str(health) in words or str(flag).startswith(words) for health, flag in zip(table.health, table.flag)], bool)
    waits = np.array(["waiting_included" in str(flag).split("|") for flag in table.flag], bool) & ~sick
    return sick | waits, {reason: int(mask.sum()) for reason, mask in ((SICK, sick), (WAITING, waits)) if mask.any()}


def predict_collectives(prepared: Prepared, fit: dict[str, Any] | None = None, floors: bool = True) -> Predicted:
    """Predicts rows from a fit (the shipped one by default); with `floors`, one floor per source is found from its rows."""
    rows = prepared.rows
    if not len(rows):
        return Predicted(np.zeros(0), np.zeros(0), {})
    priors = [prior_of(setting, fit) for setting in prepared.settings]
    mean, width, present = (np.array([p[k] for p in priors]) for k in range(3))
    present[:, INDEX["source.floor"]] = False
    design = Design(mean, present)
    for i, name in enumerate(LEAVES):
        if width[:, i].max() > HELD:
            design.add(name, name, 1.0, range(len(priors)))
    value, gradient = predict_design(rows, design, np.zeros(len(design.names)))
    spread = width[:, [INDEX[name] for name in design.names]][rows.log]
    sd = np.sqrt(np.sum((gradient * spread) ** 2, axis=1) + ROW_NOISE**2)
    found: dict[str, float] = {}
    if floors:
        source = np.array([prepared.sources[k] for k in rows.log])
        for name in dict.fromkeys(source):
            at = source == name
            found[name] = fit_floor(value[at], rows.log_time[at])
            value[at] = with_floor(value[at], found[name])
    return Predicted(value, sd, found)


def with_floor(log_time: np.ndarray, floor: float) -> np.ndarray:
    """Log times after a host that needs at least `floor` [s] to issue each."""
    if floor <= 0:
        return log_time
    return np.logaddexp(FLOOR_POWER * log_time, FLOOR_POWER * np.log(floor)) / FLOOR_POWER


def fit_floor(log_time: np.ndarray, log_measured: np.ndarray) -> float:
    """The floor [s] that explains measured times best beside a device's own, 0 where none does; robust, by search over a grid of 3%."""
    cost = lambda r: np.sum(np.sqrt(1 + (r / 0.1) ** 2) - 1)
    candidates = np.exp(np.arange(np.log(1e-6), np.log(5e-4), 0.03))
    costs = [cost(log_measured - with_floor(log_time, f)) for f in candidates]
    best = int(np.argmin(costs))
    return float(candidates[best]) if costs[best] + 0.5 < cost(log_measured - log_time) else 0.0


def times_of(rows: CollectiveRows, base: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Log time of every row under every vector of constants, shape (vectors, rows); `base` and `present` of shape (vectors, leaves)."""
    count, n = len(base), len(rows)
    every = rows.take(np.tile(np.arange(n), count))
    every = dataclasses.replace(every, log=np.repeat(np.arange(count), n))
    inputs, order = pack(every, Design(base, present, ["none"], [1.0]))
    with jax.enable_x64(True):
        value = np.asarray(_log_times(jnp.zeros(1), inputs))
    return value[first_places(order, len(every))].reshape(count, n)


_log_times = jax.jit(log_times)


def band_of(nbytes: Sequence[float] | np.ndarray) -> np.ndarray:
    """Index into `BANDS` of each size."""
    sizes = np.asarray(nbytes, float)
    return np.where(sizes < BAND_LIMITS[0], 0, np.where(sizes < BAND_LIMITS[1], 1, 2))
