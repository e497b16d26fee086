"""Where the time of a rank went: busy, idle, overlapped and exposed time per kind of work, per kernel and per step.

Definitions, those of HolisticTraceAnalysis (temporal breakdown; communication-computation overlap): the span runs from the start of the first to the end
of the last kernel; the time of a kind is the union of its kernels, so that kernels side by side count once; idle is what no kernel covers; the overlap is
the part of the communication that compute covers. Records of synchronisation are not work here. Leaves out why a kernel waited.
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np

from ._classify import COMMUNICATION, COMPUTE, KINDS, MEMORY, SYNCHRONISATION
from ._intervals import covered, length, union
from ._tables import ExecutionGraph, RankTrace
from ._work import Work, work_of

_HELPER = re.compile(r"elementwise_kernel|reduce_kernel|splitKreduce|transpose|nchwToNhwc|nhwcToNchw|im2|im3d2|SubTensorOp", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Times:
    """Where a span of time went. [s]

    Attributes:
      span_s: from the first start to the last end.
      idle_time_s: no kernel runs.
      compute_time_s, communication_time_s, memory_time_s: union of the kernels of this kind.
      exposed_communication_time_s: communication that no compute covers.
      overlap_fraction: covered part of the communication, NaN if there is none. [1]
    """

    span_s: float
    idle_time_s: float
    compute_time_s: float
    communication_time_s: float
    exposed_communication_time_s: float
    overlap_fraction: float
    memory_time_s: float


def times_of(trace: RankTrace, rows: np.ndarray | None = None) -> Times:
    """Where the time went.

    Args:
      rows: mask or indices of the events that count; None for all but synchronisation.
    """
    e = trace.events
    mask = e.kind != SYNCHRONISATION if rows is None else rows
    return _times(e.start_s[mask], e.end_s[mask], e.kind[mask])


def _times(start: np.ndarray, end: np.ndarray, kind: np.ndarray, span: float | None = None) -> Times:
    """`span`: of the time looked at, None for that from the first start to the last end. [s]"""
    if not len(start):
        return Times(span or 0.0, span or 0.0, 0.0, 0.0, 0.0, math.nan, 0.0)
    busy = {k: length(start[kind == k], end[kind == k]) for k in (COMPUTE, COMMUNICATION, MEMORY)}
    first, last = union(start[kind == COMMUNICATION], end[kind == COMMUNICATION])
    hidden = float(np.sum(covered(first, last, start[kind == COMPUTE], end[kind == COMPUTE])))
    span, total = float(end.max() - start.min()) if span is None else span, busy[COMMUNICATION]
    return Times(span, max(span - length(start, end), 0.0), busy[COMPUTE], total, max(total - hidden, 0.0), hidden / total if total > 0 else math.nan,
                 busy[MEMORY])  # fmt: skip


def hta_times(trace: RankTrace) -> Times:
    """What HolisticTraceAnalysis reports of this file with its default settings. It differs from `times_of` in four ways:

    - The last of several steps is left out, and with it every kernel that no call before it launched. It begins with the last event named `ProfilerStep`,
      whatever its category: one drawn over the kernels begins later than that on the host. Steps of other names are none.
    - Records of synchronisation on a stream count as busy.
    - A start is rounded up and an end down to whole microseconds, which shortens short kernels by much.
    - Devices of one file are one rank to it; here each is for itself.

    The kinds of kernels are those of `diffperf.io.traces`, which know more names (see `kind_of`).
    """
    e = trace.events
    rows = e.stream >= 0
    if not math.isnan(trace.last_step_s):
        rows &= e.launch_start_s < trace.last_step_s
    microseconds = lambda seconds: np.round(seconds[rows] * 1e6, 3)  # profilers record nanoseconds
    start, end = np.ceil(microseconds(e.start_s)), np.floor(microseconds(e.end_s))
    return _times(start * 1e-6, np.maximum(start, end) * 1e-6, e.kind[rows])


def kind_times(trace: RankTrace) -> dict[str, dict[str, float]]:
    """Per kind of work: `busy_s`, the union of its kernels; `overlapped_s`, the part of it beside another kind; `exposed_s`, the part alone. [s]"""
    e, result = trace.events, {}
    for kind, word in enumerate(KINDS):
        rows, others = e.kind == kind, (e.kind != kind) & (e.kind != SYNCHRONISATION)
        if kind == SYNCHRONISATION or not rows.any():
            continue
        first, last = union(e.start_s[rows], e.end_s[rows])
        busy, beside = float(np.sum(last - first)), float(np.sum(covered(first, last, e.start_s[others], e.end_s[others])))
        result[word] = {"busy_s": busy, "overlapped_s": beside, "exposed_s": max(busy - beside, 0.0)}
    return result


@dataclasses.dataclass(frozen=True)
class KernelTimes:
    """All runs of one kernel on one rank.

    Attributes:
      name: of the kernel.
      kind: a word of `KINDS`.
      count: [1]
      total_s, mean_s, min_s, max_s: of their durations. [s]
      covered_share: part of the total under another stream's communication, or for communication under compute. [1]
      flops_per_s: achieved, over the runs whose shapes were recorded; NaN for none. [FLOP/s]
      bytes_per_s: compulsory bytes, bytes copied, or for a collective its size, over the time; NaN where not recorded. [B/s]
    """

    name: str
    kind: str
    count: int
    total_s: float
    mean_s: float
    min_s: float
    max_s: float
    covered_share: float
    flops_per_s: float
    bytes_per_s: float


def kernel_times(trace: RankTrace) -> list[KernelTimes]:
    """The kernels of a rank, longest total first."""
    e = trace.events
    if not len(e):
        return []
    work = works(trace)
    flops, nbytes = np.full(len(e), np.nan), e.nbytes.copy()
    for row, found in work.items():
        flops[row], nbytes[row] = found.flops or math.nan, found.nbytes
    for call in trace.collectives:
        nbytes[call.row] = call.nbytes
    other = np.zeros(len(e))
    for kind, by in ((COMPUTE, COMMUNICATION), (COMMUNICATION, COMPUTE)):
        at, over = e.kind == kind, e.kind == by
        other[at] = covered(e.start_s[at], e.end_s[at], e.start_s[over], e.end_s[over])
    result = []
    keys = e.name * len(KINDS) + e.kind
    order = np.argsort(keys, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        duration, total = e.duration_s[at], float(e.duration_s[at].sum())
        result.append(KernelTimes(trace.names[e.name[at[0]]], KINDS[e.kind[at[0]]], len(at), total, total / len(at), float(duration.min()),
                                  float(duration.max()), float(other[at].sum() / total) if total > 0 else 0.0, _rate(flops[at], duration),
                                  _rate(nbytes[at], duration)))  # fmt: skip
    return sorted(result, key=lambda kernel: -kernel.total_s)


def _rate(amount: np.ndarray, duration: np.ndarray) -> float:
    """Amount per time over the runs whose amount is known."""
    known = ~np.isnan(amount)
    total = float(duration[known].sum())
    return float(amount[known].sum()) / total if total > 0 else math.nan


def works(trace: RankTrace) -> dict[int, Work]:
    """Device event -> the work of its operator, for operators whose recorded inputs tell it. Of several kernels of one call the longest stands for it; a
    matmul or convolution is never a kernel that adds its bias, sums its parts or changes a layout."""
    e, ops = trace.events, trace.operators
    at = np.flatnonzero((e.kind == COMPUTE) & (e.operator >= 0))
    at = at[ops.inputs[e.operator[at]] >= 0] if len(ops) else at[:0]
    known: dict[tuple[int, int], Work | None] = {}
    longest: dict[int, int] = {}
    helps = np.array([_HELPER.search(name) is not None for name in trace.names], bool)
    for row in at.tolist():
        op = int(e.operator[row])
        key = (int(ops.name[op]), int(ops.inputs[op]))
        if key not in known:
            known[key] = work_of(trace.names[key[0]], trace.inputs[key[1]])
        work = known[key]
        if work is None or (work.flops and helps[e.name[row]]):
            continue
        if op not in longest or e.duration_s[row] > e.duration_s[longest[op]]:
            longest[op] = row
    found = {row: known[int(ops.name[op]), int(ops.inputs[op])] for op, row in longest.items()}
    return {row: work for row, work in found.items() if work is not None}


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """One step on one rank.

    Attributes:
      name: as the profiler wrote it.
      start_s: of its first kernel on the busiest stream, so that a copy fetched ahead does not count, from the origin of the rank. [s]
      end_s: of its last kernel, at most `start_s` of the next step. [s]
      period_s: from its start to that of the next step; for the last step to its end. [s]
      host_s: as marked on the host. [s]
      kernels: launched in it. [1]
      times: where the time from start to end went, kernels of other steps included.
    """

    name: str
    start_s: float
    end_s: float
    period_s: float
    host_s: float
    kernels: int
    times: Times


def step_times(trace: RankTrace) -> list[StepTimes]:
    """The steps of a rank in order; a kernel belongs to the step in which it was launched, else in which it started. Steps without kernels are not listed."""
    e, found = trace.events, []
    at = np.flatnonzero((e.step >= 0) & (e.kind != SYNCHRONISATION))
    at = at[np.argsort(e.step[at], kind="stable")]
    main = busiest_stream(trace)
    for rows in np.split(at, np.flatnonzero(np.diff(e.step[at])) + 1) if len(at) else ():
        first = rows[e.stream[rows] == main]
        found.append((trace.steps[e.step[rows[0]]], float(e.start_s[first if len(first) else rows].min()), float(e.end_s[rows].max()), len(rows)))
    found.sort(key=lambda step: step[1])
    work = np.flatnonzero(e.kind != SYNCHRONISATION)
    latest = np.maximum.accumulate(e.end_s[work])
    result = []
    for k, (step, start, last, count) in enumerate(found):
        after = found[k + 1][1] if k + 1 < len(found) else last
        end = min(last, after)
        rows = work[np.searchsorted(latest, start, side="right") : np.searchsorted(e.start_s[work], end)]
        first, until = np.clip(e.start_s[rows], start, end), np.clip(e.end_s[rows], start, end)
        times = _times(first, until, e.kind[rows], end - start)
        result.append(StepTimes(step.name, start, end, after - start, step.end_s - step.start_s, count, times))
    return result


def host_times(trace: RankTrace) -> dict[str, float]:
    """Launches of a rank: how many, the median time of the call, and the median wait from call to kernel; short waits mean that the host sets the pace.

    Returns:
      `launches` [1], `launch_call_s`, `launch_to_start_s` [s], `gap_s`: time between kernels on the busiest stream [s], NaN where not recorded.
    """
    e = trace.events
    known = ~np.isnan(e.launch_start_s) & (e.kind != SYNCHRONISATION)
    at = np.flatnonzero((e.stream == busiest_stream(trace)) & (e.kind != SYNCHRONISATION))
    gaps = e.start_s[at][1:] - np.maximum.accumulate(e.end_s[at])[:-1] if len(at) > 1 else np.zeros(0)
    middle = lambda values: float(np.median(values)) if len(values) else math.nan
    return {"launches": len(trace.launches), "launch_call_s": middle(trace.launches[:, 1]),
            "launch_to_start_s": middle((e.start_s - e.launch_start_s)[known]), "gap_s": float(np.maximum(gaps, 0.0).sum())}  # fmt: skip


def busiest_stream(trace: RankTrace) -> int:
    """The stream with the most compute time, -2 if there is none."""
    rows = trace.events.kind == COMPUTE
    streams, at = np.unique(trace.events.stream[rows], return_inverse=True)
    return int(streams[np.argmax(np.bincount(at, trace.events.duration_s[rows]))]) if len(streams) else -2


def rank_dict(trace: RankTrace | ExecutionGraph) -> dict[str, Any]:
    """A rank for JSON: `Times`, launches, kernels. An execution graph has sums of durations only, and what needs start times is None."""
    if isinstance(trace, ExecutionGraph):
        return _graph_dict(trace)
    hta = hta_times(trace)
    return {
        "rank": trace.rank if trace.rank >= 0 else None, "device": trace.device if trace.device >= 0 else None, "file": trace.file, "format": trace.format,
        "accelerator": trace.accelerator,
        "origin_ns": trace.origin_ns, **dataclasses.asdict(times_of(trace)), "by_kind": kind_times(trace), "host": host_times(trace),
        "as_hta": {part: getattr(hta, part) for part in ("span_s", "idle_time_s", "compute_time_s", "communication_time_s", "overlap_fraction")},
        "kernels": [dataclasses.asdict(kernel) for kernel in kernel_times(trace)],
        "collectives": [dataclasses.asdict(call) | {"start_s": trace.events.start_s[call.row], "duration_s": trace.events.duration_s[call.row]}
                        for call in trace.collectives],
    }  # fmt: skip


def _graph_dict(graph: ExecutionGraph) -> dict[str, Any]:
    seconds = np.where(np.isnan(graph.duration_s), 0.0, graph.duration_s)
    total = {kind: float(seconds[(graph.kind == kind) & graph.on_device].sum()) for kind in (COMPUTE, COMMUNICATION, MEMORY)}
    groups: dict[tuple[str, int], list[float]] = {}
    for name, kind, device, time in zip(graph.names, graph.kind.tolist(), graph.on_device.tolist(), seconds.tolist()):
        if device:
            groups.setdefault((name, kind), []).append(time)
    kernels = [dict(name=name, kind=KINDS[kind], count=len(times), total_s=sum(times), mean_s=sum(times) / len(times))
               for (name, kind), times in sorted(groups.items(), key=lambda item: -sum(item[1]))]  # fmt: skip
    timed = not np.isnan(graph.duration_s).all()
    return {
        "rank": graph.rank if graph.rank >= 0 else None, "file": graph.file, "format": graph.format, "nodes": len(graph),
        "dependencies": int((graph.parents >= 0).sum()), "span_s": None, "idle_time_s": None, "compute_time_s": total[COMPUTE] if timed else None,
        "communication_time_s": total[COMMUNICATION] if timed else None, "exposed_communication_time_s": None, "overlap_fraction": None,
        "memory_time_s": total[MEMORY] if timed else None, "kernels": kernels,
    }  # fmt: skip
