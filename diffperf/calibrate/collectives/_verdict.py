"""Is this log healthy? Each row against the curve of a healthy system of its kind, and the likeliest cause where it is not.

The judgement uses what is known before the test (accelerator, links, NICs, network): a curve fitted to a sick log would call it healthy. The log's number
is the median of measured over predicted time at 16 MiB and above, else of the three largest sizes. Above `SICK` it is unhealthy, above `CHECK` it should be
looked at, below `FAST` the test did not do what it says. `benchmarks/collectives_health.py` gives detection and false-alarm rates of these limits.
A cause is the curve of a degraded system that describes the rows best.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...hardware import load_system
from ...io import CollectiveTable, bus_factor
from ._design import CollectiveRows
from ._predict import fit_floor, prepare_collectives, times_of, with_floor
from ._priors import prior_of
from ._settings import Setting
from ._vector import INDEX

SICK, CHECK, FAST = 3.5, 1.45, 0.4
ROW_SLOW, ROW_FAST = 1.3, 0.6
LARGE = 16 * 2**20
UNCALIBRATED = ("broadcast", "reduce", "send_recv")
"""Between nodes these are predicted from datasheets alone: a slow log of them is to be checked, not called unhealthy."""
TCP_RATE = 2e9
"""What sockets carry per node when the network's own transport is missing: 0.5-6 GB/s in published logs. [B/s]"""
HOST_RATE = 10e9
"""GPU memory staged through the host, per NIC, without GPUDirect RDMA. [B/s]"""


@dataclasses.dataclass(frozen=True)
class RowVerdict:
    """One row.

    Attributes:
      nbytes, measured_s, expected_s, bus_rate: size, times and measured bus rate. [B], [s], [s], [B/s]
      ratio: measured over expected.
      state: "healthy", "slow", "fast" or "floor" (bound by the host at small sizes).
      text: one sentence.
    """

    nbytes: float
    measured_s: float
    expected_s: float
    bus_rate: float
    ratio: float
    state: str
    text: str


@dataclasses.dataclass(frozen=True)
class LogVerdict:
    """One log.

    Attributes:
      name: of the log.
      setting: where it ran, as far as known.
      operation: its collective.
      state: "healthy", "check", "unhealthy" or "invalid".
      ratio: measured over expected time of large messages.
      cause: likeliest cause, "" for a healthy log.
      evidence: what speaks for it.
      floor_s: the host's floor found in the small sizes. [s]
      link_peak: bus rate that the weakest link allows. [B/s]
      rows: each size.
    """

    name: str
    setting: Setting
    operation: str
    state: str
    ratio: float
    cause: str
    evidence: str
    floor_s: float
    link_peak: float
    rows: tuple[RowVerdict, ...]


def judge_collectives(table: CollectiveTable, system: str = "", library: str = "", interconnect: str = "") -> list[LogVerdict]:
    """A verdict for each log and collective of a table.

    Args:
      table: as `read_nccl_tests` gives it.
      system: catalog name, where the log does not name the accelerator.
      library: library and version, where the log does not say.
      interconnect: such as "EFA 4x100G", where the log does not say.
    Raises:
      ValueError: for an unknown system, or when no row can be judged; the message gives the reasons.
    """
    if interconnect:
        table = dataclasses.replace(table, interconnect=np.array([str(x) or interconnect for x in table.interconnect]))
    prepared = prepare_collectives(table, system, library)
    if not len(prepared.rows):
        reasons = "; ".join(prepared.skipped) or "the file has no rows"
        raise ValueError(f"no row can be judged: {reasons}")
    out = []
    for k, setting in enumerate(prepared.settings):
        of_log = np.flatnonzero(prepared.rows.log == k)
        for kind in dict.fromkeys(prepared.rows.kind[of_log]):
            at = of_log[prepared.rows.kind[of_log] == kind]
            rows = prepared.rows.take(at)
            rows.log[:] = 0
            out.append(judge_rows(rows, setting, prepared.names[k]))
    return out


def judge_rows(rows: CollectiveRows, setting: Setting, name: str = "log") -> LogVerdict:
    """The verdict on rows of one collective in one setting; both buffers may be among them, the better of each size counts for the log."""
    hypotheses = degradations(setting, float(rows.ranks[0]))
    base, present = np.array([item[1] for item in hypotheses]), np.array([item[2] for item in hypotheses])
    present[:, INDEX["source.floor"]] = False
    times = times_of(rows, base, present)
    best = np.array([i for i in range(len(rows)) if rows.log_time[i] <= rows.log_time[rows.nbytes == rows.nbytes[i]].min() + 1e-12])
    ratio, floor = log_ratio(rows.nbytes[best], rows.log_time[best] - times[0][best]), fit_floor(times[0][best], rows.log_time[best])
    operation = rows.kind[0].split("|")[0]
    factor = bus_factor(operation, float(rows.ranks[0]))
    peak = link_peak(setting, float(rows.ranks[0]))
    measured = np.exp(rows.log_time)
    bus = factor * rows.nbytes / measured
    unreal = bool(np.max(bus[best]) > 2.0 * peak)
    state = "invalid" if ratio < FAST or unreal else "unhealthy" if ratio > SICK else "check" if ratio > CHECK else "healthy"
    if state == "unhealthy" and operation in UNCALIBRATED and rows.ranks[0] > setting.ranks_per_node:
        state = "check"
    cause, evidence = "", ""
    if state == "invalid":
        cause = "the test did not move its data over the link (a copy to itself, or wrong sizes)"
        evidence = f"busbw reaches {np.max(bus) / 1e9:.4g} GB/s, the link carries {peak / 1e9:.4g} GB/s"
    elif state != "healthy":
        cause, evidence = _cause(rows.take(best), times[:, best], [item[0] for item in hypotheses], ratio, bus[best], peak)
    expected = with_floor(times[0], floor)
    verdicts = _rows(rows, expected, times[0], bus, floor)
    return LogVerdict(name, setting, operation, state, float(ratio), cause, evidence, floor, peak, verdicts)


def log_ratio(nbytes: np.ndarray, log_ratio: np.ndarray) -> float:
    """Median of measured over predicted time at `LARGE` and above, else of the three largest sizes."""
    large = nbytes >= LARGE
    chosen = log_ratio[large] if large.any() else log_ratio[np.argsort(nbytes)[-3:]]
    return float(np.exp(np.median(chosen)))


def link_peak(setting: Setting, ranks: float) -> float:
    """Bus rate per rank that the weakest link of the group allows, from datasheets. [B/s]"""
    inside = setting.bridge or float(load_system(setting.system).scale_up.bandwidth)
    return inside if ranks <= setting.ranks_per_node else min(inside, setting.nic_bandwidth)


def degradations(setting: Setting, ranks: float) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """The healthy system first, then degraded ones: name, log constants, which are present."""
    mean, _, present = prior_of(setting)
    out = [("healthy", mean, present)]

    def variant(name: str, absent: Sequence[str] = (), **changes: float) -> None:
        new, there = mean.copy(), present.copy()
        for leaf, value in changes.items():
            new[INDEX[leaf.replace("__", ".")]] = np.log(value)
        for leaf in absent:
            there[INDEX[leaf]] = False
        out.append((name, new, there))

    inside = np.exp(mean[INDEX["node.bandwidth"]])
    if setting.ranks_per_node > 1:
        no_switch = ("node.nvls", "network.nvls", "node.bump_step")
        local = {f"node__local_{op}_bandwidth": 1e13 for op in ("reduce", "gather", "scatter", "exchange")}
        slow = ((20e9, "PCIe instead of NVLink"), (10e9, "PCIe across sockets instead of NVLink"), (1.5e9, "peer access off, data pass host memory"))
        for rate, what in slow:
            if rate < inside * 0.8:
                variant(what, no_switch, node__bandwidth=rate, **local)
        if present[INDEX["node.nvls"]]:
            variant("in-switch reduction (NVLS) not used", ("node.nvls", "network.nvls"))
    if ranks > setting.ranks_per_node:
        nic, count = setting.nic_bandwidth, max(setting.nics or round(setting.ranks_per_node), 2)
        variant(f"one NIC of {count} missing", network__bandwidth=nic * (count - 1) / count)
        variant("half of the NICs missing", network__bandwidth=nic / 2)
        variant(f"one NIC of {count} in use", network__bandwidth=nic / count)
        if HOST_RATE * count < 0.8 * nic:
            variant("GPUDirect RDMA off: data pass host memory", network__bandwidth=HOST_RATE * count, network__hop=2 * np.exp(mean[INDEX["network.hop"]]))
        variant("TCP instead of the network's own transport", network__bandwidth=TCP_RATE, network__hop=50e-6)
    variant("LL128 not available: the middle sizes wait for the bandwidth protocol", source__ramp=3.0 * np.exp(mean[INDEX["source.ramp"]]))
    return out


def _cause(rows: CollectiveRows, times: np.ndarray, names: Sequence[str], ratio: float, bus: np.ndarray, peak: float) -> tuple[str, str]:
    above = rows.nbytes >= min(32768.0, float(np.median(rows.nbytes)))  # small sizes tell of the host, not of links
    residual = rows.log_time[above] - times[:, above]
    misfit = np.mean(np.sqrt(1 + (residual / 0.1) ** 2) - 1, axis=1)
    typical = np.median(np.abs(residual), axis=1)
    chosen = int(np.argmin(misfit))
    reached = f"busbw at large sizes is {np.median(bus[np.argsort(rows.nbytes)[-3:]]) / 1e9:.3g} GB/s of {peak / 1e9:.4g} GB/s that the link carries"
    if chosen == 0 or typical[chosen] > 0.9 * typical[0]:
        return "unclear", f"{reached}; no degraded system that is known here describes the rows better than a healthy one"
    evidence = f"{reached}, {ratio:.2g} times as long as expected; this curve misses the rows by {typical[chosen]:.0%}, the healthy one by {typical[0]:.0%}"
    jumps = np.diff(rows.log_time[np.argsort(rows.nbytes)])
    if np.sum(jumps < -0.1) > 0.08 * len(rows):
        evidence += "; times fall with size in places, as retransmissions and sockets make them"
    return names[chosen], evidence


def _rows(rows: CollectiveRows, expected: np.ndarray, device: np.ndarray, bus: np.ndarray, floor: float) -> tuple[RowVerdict, ...]:
    out = []
    residual = rows.log_time - expected
    for i in range(len(rows)):
        ratio = float(np.exp(residual[i]))
        near = np.argsort(np.abs(np.log(rows.nbytes / rows.nbytes[i])))[1:5]
        lonely = residual[i] - float(np.median(residual[near])) if len(rows) > 3 else 0.0
        bound = floor > 0 and floor > 0.8 * np.exp(device[i])
        if ratio > ROW_SLOW:
            state, text = "slow", f"slow by {ratio - 1:.0%}"
            if lonely > 0.25:
                text += ": alone among its neighbours, a hiccup or a change of protocol"
        elif ratio < ROW_FAST:
            state, text = "fast", f"faster than expected by {1 / ratio - 1:.0%}"
        elif bound:
            state, text = "floor", f"bound by the host, which takes {floor * 1e6:.3g} us to issue it"
        elif lonely < -0.2 or lonely > 0.2:
            state, text = "healthy", "healthy; a change of protocol makes a step here"
        else:
            state, text = "healthy", "healthy" if rows.nbytes[i] > 65536 else "healthy; bound by latency"
        out.append(RowVerdict(float(rows.nbytes[i]), float(np.exp(rows.log_time[i])), float(np.exp(expected[i])), float(bus[i]), ratio, state, text))
    return tuple(out)
