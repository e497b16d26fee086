"""Kernels of inference engines and expert libraries: which row is which kernel, their fitted constants, and what stands in for a kernel nobody measured.

A kernel is a name (engine and mode, or kernel, phase and datatype), a version and a system. Each measured one has constants of its own. Another is predicted
as the mean over its nearest measured relatives, rates scaled by the link, with an interval as wide as they differ. Above a size the engine hands
all-reduce to the library; that size and what the engine adds there are fitted as well. Leaves out load imbalance between experts.
"""

import dataclasses
import re
from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...hardware import generation, load_system
from ...io import CollectiveTable
from ._design import CollectiveRows
from ._kernels import CUSTOM, EXPERT, EXPERT_LOG_TIME, custom_log_time, custom_prior, expert_prior, fit_kernel
from ._predict import times_of
from ._priors import prior_of, shipped
from ._settings import Setting, system_of
from ._vector import INDEX

ELEMENT = {"fp8": 1.03, "nvfp4": 0.5625, "fp4": 0.5625}
"""Bytes per element that an exchange sends, scales included; 2 for what is not named."""
RELATIVES = (
    (("name", "system", "version"), 0.0), (("name", "system"), 0.1), (("name", "generation", "version"), 0.1), (("name", "generation"), 0.15),
    (("name", "version"), 0.25), (("name",), 0.25), (("form", "phase", "generation"), 0.35), (("form", "phase"), 0.5), (("form",), 0.6),
)  # fmt: skip
"""What a measured kernel must share to stand in, the nearest kin first, and how far that kin lies apart at least (standard deviation of the log time)."""
LIMITS = tuple(2.0**k for k in (20, 21, 22, 23, 24, 25))
"""Sizes above which an engine may hand all-reduce to the library. [B]"""
MOST_ROWS = 512
LEAST_ROWS = 12
LEAST_NOISE = 0.03


@dataclasses.dataclass(frozen=True)
class EngineKernel:
    """One kernel.

    Attributes:
      form: "custom" (all-reduce), "low_latency", "high_throughput" or "hierarchical" (experts).
      name: engine and mode, or kernel, phase and datatype.
      phase: "all_reduce", "moe_dispatch" or "moe_combine".
      version: engine and version.
      system: canonical name in the catalog.
    """

    form: str
    name: str
    phase: str
    version: str
    system: str

    def kin(self) -> dict[str, str]:
        """Everything that `RELATIVES` compares."""
        return dataclasses.asdict(self) | {"generation": generation(self.system)}


@dataclasses.dataclass(frozen=True)
class EngineRows:
    """Rows of a table that are kernels of engines.

    Attributes:
      at: their places in the table.
      kernels: the kernels.
      kernel: which kernel each row is.
      inputs: what its form reads, shape (rows, 6): bytes and ranks, or tokens, bytes of a token, k, ranks, ranks per node, processors.
      log_time: logarithm of the measured time.
      skipped: reason -> rows.
    """

    at: np.ndarray
    kernels: list[EngineKernel]
    kernel: np.ndarray
    inputs: np.ndarray
    log_time: np.ndarray
    skipped: dict[str, int]


def is_engine(table: CollectiveTable) -> np.ndarray:
    """Which rows are kernels of engines rather than collectives of a library."""
    return np.array([str(op).startswith("moe_") or str(library).startswith("custom_allreduce") for op, library in zip(table.op, table.library)], bool)


def engine_rows(table: CollectiveTable, system: str = "") -> EngineRows:
    """The rows of a table that are kernels of engines, `system` overriding what they say."""
    skipped: Counter = Counter()
    known: dict[EngineKernel, int] = {}
    at, kernel, inputs = [], [], []
    for i in np.flatnonzero(is_engine(table)):
        op, n, t = str(table.op[i]), float(table.ranks[i]), float(table.time_s[i])
        name = system_of(system or str(table.accelerator[i]))
        custom = str(table.library[i]).startswith("custom_allreduce")
        row = (float(table.nbytes[i]), n, 0.0, 0.0, 0.0, 0.0) if custom else _expert_inputs(table, i)
        reason = (
            f"the accelerator {str(table.accelerator[i]) or 'is not stated and'!r} is not in the catalog" if not name
            else "preparing an exchange, which moves indices only" if op == "moe_prepare"
            else f"an engine's own {op}" if op != "all_reduce" and custom
            else "number of ranks not stated or below 2" if not (np.isfinite(n) and n >= 2)
            else "no time" if not (np.isfinite(t) and t > 0)
            else "tokens, width or experts per token not stated" if not (np.isfinite(row).all() and row[0] > 0)
            else ""
        )  # fmt: skip
        if reason:
            skipped[reason] += 1
            continue
        key = _custom_kernel(table, i, name) if custom else _expert_kernel(table, i, name)
        at.append(i)
        kernel.append(known.setdefault(key, len(known)))
        inputs.append(row)
    log_time = np.log(table.time_s[np.array(at, int)])
    return EngineRows(np.array(at, int), list(known), np.array(kernel, int), np.array(inputs, float).reshape(-1, 6), log_time, dict(skipped))


def _custom_kernel(table: CollectiveTable, i: int, system: str) -> EngineKernel:
    words = str(table.library[i]).split()[1:]
    return EngineKernel("custom", words[-1].lower() if len(words) != 2 else words[0].lower(), "all_reduce", " ".join(words[:2]), system)


def _expert_kernel(table: CollectiveTable, i: int, system: str) -> EngineKernel:
    kernel, phase, datatype = str(table.kernel[i]), str(table.op[i]), str(table.datatype[i])
    name = ", ".join(part for part in (kernel, phase, datatype, str(table.flag[i]).replace("_", " ") if "low_precision" in str(table.flag[i]) else "") if part)
    return EngineKernel(expert_form(kernel), name, phase, str(table.library[i]), system)


def expert_form(kernel: str) -> str:
    """Low-latency kernels send a token once per expert, the others once per rank, DeepEP's once per node first; told by the kernel's name."""
    words = set(re.split(r"[ _,]+", kernel.lower()))
    return "low_latency" if {"ll", "generation"} & words else "hierarchical" if "deepep" in words else "high_throughput"


def _expert_inputs(table: CollectiveTable, i: int) -> tuple[float, ...]:
    n, nodes, sms = (float(x) for x in (table.ranks[i], table.nodes[i], table.sms[i]))
    hidden = float(table.hidden[i]) * ELEMENT.get(str(table.datatype[i]), 2.0)
    nodes = nodes if np.isfinite(nodes) and nodes > 1 else 1.0
    return float(table.tokens[i]), hidden, float(table.experts_per_token[i]), n, n / nodes, sms if np.isfinite(sms) and sms > 0 else 1e4


def fit_engines(rows: EngineRows) -> list[dict[str, Any]]:
    """Constants of every kernel with at least `LEAST_ROWS` rows, in the shipped form: name, version, system, constants, scatter of the log time."""
    out = []
    for k, kernel in enumerate(rows.kernels):
        at = np.flatnonzero(rows.kernel == k)
        if len(at) >= LEAST_ROWS:
            at = at[np.linspace(0, len(at) - 1, min(len(at), MOST_ROWS)).round().astype(int)]
            fit = _fit_custom if kernel.form == "custom" else _fit_expert
            values, log_time = fit(kernel, rows.inputs[at], rows.log_time[at])
            noise = max(LEAST_NOISE, 1.4826 * float(np.median(np.abs(log_time - rows.log_time[at]))))
            out.append(dataclasses.asdict(kernel) | dict(rows=len(at), noise=noise, values=values))
    return out


def _fit_custom(kernel: EngineKernel, inputs: np.ndarray, log_time: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """Constants and the log times they give; the limit is the one of `LIMITS` that leaves the smallest robust error."""
    size, prior, library = inputs[:, 0], custom_prior(_link(kernel.system)), library_log_time(kernel.system, inputs)
    best: tuple[float, dict[str, float], np.ndarray] | None = None
    for limit in (*LIMITS, np.inf):
        own = size <= limit
        if own.sum() < LEAST_ROWS or (not own.all() and np.isfinite(limit) and size[~own].min() > 2.01 * limit):
            continue
        theta = fit_kernel(custom_log_time, (size, inputs[:, 1]), np.exp(log_time), own, prior)
        extra = float(np.median((log_time - library)[~own])) if (~own).any() else 0.0
        predicted = np.where(own, _times("custom", theta, inputs), library + extra)
        cost = float(np.sum(np.sqrt(1 + ((predicted - log_time) / 0.05) ** 2)))
        if best is None or cost < best[0]:
            values = dict(zip(CUSTOM, (float(x) for x in np.exp(theta)))) | dict(limit=float(min(limit, 1e15)), library=float(np.exp(extra)))
            best = cost, values, predicted
    if best is None:
        theta = np.asarray(prior[0])
        return dict(zip(CUSTOM, (float(x) for x in np.exp(theta)))) | dict(limit=1e15, library=1.0), _times("custom", theta, inputs)
    return best[1:]


def _fit_expert(kernel: EngineKernel, inputs: np.ndarray, log_time: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    theta = fit_kernel(EXPERT_LOG_TIME[kernel.form], tuple(inputs.T), np.exp(log_time), np.ones(len(inputs)), expert_prior(), MOST_ROWS)
    return dict(zip(EXPERT, (float(x) for x in np.exp(theta)))), _times(kernel.form, theta, inputs)


def predict_engines(rows: EngineRows, fit: dict[str, Any] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Log times and their standard deviations, shape (rows,), from the constants of a fit (the shipped one by default)."""
    entries = (shipped() if fit is None else fit).get("engines", [])
    kin = [entry | {"generation": generation(entry["system"])} for entry in entries]
    value, sd = np.zeros(len(rows.at)), np.ones(len(rows.at))
    for k, kernel in enumerate(rows.kernels):
        at = np.flatnonzero(rows.kernel == k)
        own = kernel.kin()
        share = lambda entry, keys, own=own: entry["form"] == own["form"] and all(entry[key] == own[key] for key in keys)
        found, apart = next(((near, apart) for keys, apart in RELATIVES if (near := [entry for entry in kin if share(entry, keys)])), ([], 1.0))
        if not found:
            mean = (custom_prior(_link(kernel.system)) if kernel.form == "custom" else expert_prior())[0]
            value[at] = _times(kernel.form, mean, rows.inputs[at])
            continue
        each = np.array([_entry_times(kernel, entry, rows.inputs[at]) for entry in found])
        value[at] = each.mean(axis=0)
        sd[at] = np.sqrt(each.var(axis=0) + apart**2 + np.mean([entry["noise"] for entry in found]) ** 2)
    return value, sd


def _entry_times(kernel: EngineKernel, entry: dict[str, Any], inputs: np.ndarray) -> np.ndarray:
    """Log times of the kernel with the constants of a measured relative, rates scaled by the link."""
    scale = _link(kernel.system) / _link(entry["system"])
    relative = ("bandwidth", "one_shot_bandwidth", "two_shot_bandwidth")
    names = CUSTOM if kernel.form == "custom" else EXPERT
    theta = np.log([entry["values"][name] * (scale if name in relative else 1.0) for name in names])
    out = _times(kernel.form, theta, inputs)
    if kernel.form == "custom" and (inputs[:, 0] > entry["values"]["limit"]).any():
        handed = library_log_time(kernel.system, inputs) + np.log(entry["values"]["library"])
        out = np.where(inputs[:, 0] > entry["values"]["limit"], handed, out)
    return out


def library_log_time(system: str, inputs: np.ndarray) -> np.ndarray:
    """Log times of the library's all-reduce inside one node for rows of bytes and ranks."""
    size, n = inputs[:, 0], inputs[:, 1]
    rows = CollectiveRows(np.array(["all_reduce|auto"] * len(n)), size, n, n, np.zeros(len(n), int), np.zeros(len(n)), np.ones(len(n)))
    mean, _, present = prior_of(Setting(system, 8.0, 4e11, "unknown", unknown_version=False))
    present = present.copy()
    present[INDEX["source.floor"]] = False
    return times_of(rows, mean[None], present[None])[0]


def _times(form: str, theta: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    block = 128 if len(inputs) <= 128 else MOST_ROWS
    padded = inputs[np.minimum(np.arange(-(-len(inputs) // block) * block), len(inputs) - 1)]
    columns = tuple(padded.T[: 2 if form == "custom" else 6])
    with jax.enable_x64(True):
        return np.asarray(_compiled(form)(jnp.asarray(theta), columns))[: len(inputs)]


@cache
def _compiled(form: str):
    return jax.jit(custom_log_time if form == "custom" else EXPERT_LOG_TIME[form])


def _link(system: str) -> float:
    return float(load_system(system).scale_up.bandwidth)
