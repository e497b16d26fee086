"""What was read of a Kineto file into one `RankTrace` per rank or device: who launched each kernel, in which step, and how the ranks are called.

A file holds one rank, unless it was merged of several or its process drives several devices. Then the device events fall into parts, one per process and
device as recorded with them. A part is launched by one process of the host: that with a call of the same correlation before most of its kernels, so that
correlations that two processes share are not mixed. The parts of one process with a recorded rank are this rank on each of its devices; parts of a file
with several processes, or without a rank, take the number of the device for the rank, as the reader of XSpace does. HolisticTraceAnalysis merges them all.

The link from a kernel to its operator is taken from the calls of the runtime: same correlation, then the innermost operator on that thread at that time (the
"External id" of old traces is no operator).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._calls import collective_calls
from ._classify import SYNCHRONISATION
from ._kineto_job import Job
from ._nesting import innermost, nest
from ._numbers import FAR_OFF, far_off
from ._steps import Marks, step_of
from ._tables import DeviceEvents, Inputs, Operators, RankTrace, Remarks, TraceError, grids

_BEFORE_S = 1e-6  # a kernel may seem to start that much before its call [s]
_MOST_PROCESSES = 64  # of a file are looked at, those with the most calls


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A file as it was read, times in microseconds.

    Attributes:
      file, meta, remarks: its name, its members other than the events, and what was left out.
      columns: of device events (`ts`, `dur`, `nbytes`, `name`, `kind`, `stream`, `place`, `correlation`, `launch`, `event`), operators (`op_...`),
        calls (`call_...`), and of threads their process (`process_of`).
      places: process and device, by the numbers in `place`.
      names, launch_shapes, inputs: as in `RankTrace`.
      recorded, op_recorded: device event or operator -> what stands with it of a collective.
      marks: of steps.
    """

    file: str
    meta: Mapping[str, Any]
    remarks: Remarks
    columns: dict[str, np.ndarray]
    places: tuple[tuple[int, int], ...]
    names: tuple[str, ...]
    launch_shapes: tuple[tuple[Any, ...], ...]
    inputs: tuple[Inputs, ...]
    recorded: Mapping[int, Mapping[str, Any]]
    op_recorded: Mapping[int, Mapping[str, Any]]
    marks: Marks


def rank_traces(found: Recorded) -> list[RankTrace]:
    """One trace per rank or device, in order of rank; of one rank with several devices the busiest first.

    Raises:
      TraceError: no device event.
    """
    if not len(found.columns["ts"]):
        raise TraceError(
            f"{found.file} has no GPU events: no kernel or copy could be read, so there is nothing to time{found.remarks.why()}. "
            "Profile with the activity CUDA as well as CPU."
        )
    order = _usable(found)
    origin = float(math.floor(found.columns["ts"][order].min()))
    c = _seconds(found.columns, origin)
    devices, part = _parts(found.places, c["place"][order], c["kind"][order], c["dur"][order])
    process = c["process_of"][c["call_thread"]]
    owner = _owners(part, len(devices), c, order, process)
    call = _calls(owner[part], c["correlation"][order], process, c["call_correlation"])
    ops, op_order = _operators(c)
    operator = np.full(len(order), -1, np.int64)
    at = np.flatnonzero(call >= 0)
    operator[at] = innermost(c["op_thread"][op_order], ops.start_s, ops.start_s + ops.duration_s, c["call_thread"][call[at]], c["call_ts"][call[at]])
    row_of, op_of = _places(order, len(c["ts"])), _places(op_order, len(op_order))
    recorded = {int(row_of[i]): record for i, record in found.recorded.items() if row_of[i] >= 0}
    op_recorded = {int(op_of[i]): record for i, record in found.op_recorded.items()}
    job = Job(found.file, found.meta, found.remarks)
    alone = len(np.unique(process)) < 2
    ranks = []
    rows_of = np.split(np.argsort(part, kind="stable"), np.cumsum(np.bincount(part))[:-1]) if len(devices) > 1 else [slice(None)]
    for k, (rows, (rank, device, world)) in enumerate(zip(rows_of, _called(devices, owner, job, found.remarks), strict=True)):
        remarks = found.remarks if k == 0 else Remarks(found.file)
        of_call = call[rows]
        launch_s = np.where(of_call >= 0, c["call_ts"][of_call], np.nan) if len(process) else np.full(len(of_call), np.nan)
        time = np.where(of_call >= 0, launch_s, c["ts"][order[rows]])
        steps = found.marks.steps(lambda thread, k=k: alone or c["process_of"][thread] == owner[k], time, origin, remarks)
        events = _events(c, order[rows], found.launch_shapes, devices[k], launch_s, operator[rows], step_of(steps, time))
        of_part = recorded if isinstance(rows, slice) else {i: recorded[row] for i, row in enumerate(rows.tolist()) if row in recorded}
        calls = collective_calls(events, found.names, found.launch_shapes, ops, found.inputs, of_part, op_recorded, job.groups, world)
        _doubts(events, found.names, remarks)
        used = np.unique(of_call[of_call >= 0])
        ranks.append(RankTrace(
            found.file, "kineto", rank, device, world, *job.accelerator(int(devices[k])), job.library, int(origin) * 1000 + job.base_ns, found.names,
            found.launch_shapes, found.inputs, events, ops, calls, steps, (found.marks.last - origin) * 1e-6,
            np.stack([c["call_ts"][used], c["call_dur"][used]], 1) if len(used) else np.zeros((0, 2)), remarks.done(),
        ))  # fmt: skip
    return sorted(ranks, key=lambda trace: trace.rank)


def _usable(found: Recorded) -> np.ndarray:
    """The device events whose times can be, in order of their start."""
    c = found.columns
    lost = far_off(c["ts"] * 1e-6)
    for i in np.flatnonzero(lost).tolist():
        found.remarks.add(FAR_OFF, f"event {c['event'][i]}: ts is {c['ts'][i]}")
    order = np.lexsort((c["event"], c["ts"]))
    return order[~lost[order]]


def _seconds(columns: dict[str, np.ndarray], origin: float) -> dict[str, np.ndarray]:
    """The columns with times in seconds from the origin, durations in seconds."""
    starts = {name: (columns[name] - origin) * 1e-6 for name in ("ts", "op_ts", "call_ts")}
    return columns | starts | {name: columns[name] * 1e-6 for name in ("dur", "op_dur", "call_dur")}


def _parts(places: Sequence[tuple[int, int]], place: np.ndarray, kind: np.ndarray, duration: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parts of a file, the busiest first: the device of each, shape (parts,), and the part of each event, shape (n,).

    Events without a device join the one device of their process. Places where nothing but synchronisation is recorded join a part too, and are none of
    their own: that of their device, else of their process, else the busiest.
    """
    work = kind != SYNCHRONISATION
    busy, count = np.bincount(place[work], duration[work], len(places)), np.bincount(place[work], minlength=len(places))
    count = count if work.any() else np.bincount(place, minlength=len(places))
    full = [p for p in np.argsort(-busy, kind="stable").tolist() if count[p]]
    on_device: dict[int, int] = {}
    of_process: dict[int, list[int]] = {}
    for p in full:
        process, device = places[p]
        if device >= 0:
            on_device.setdefault(device, p)
            of_process.setdefault(process, []).append(p)
    joins = np.arange(len(places))
    for p, (process, device) in enumerate(places):
        near = of_process.get(process, [])
        if not count[p]:
            joins[p] = on_device.get(device, near[0] if near else full[0])
        elif device < 0 and len(near) == 1:
            joins[p] = near[0]
    kept = [p for p in full if joins[p] == p]
    number = np.full(len(places), -1)
    number[kept] = np.arange(len(kept))
    return np.array([places[p][1] for p in kept]), number[joins[place]]


def _owners(part: np.ndarray, num_parts: int, c: Mapping[str, np.ndarray], order: np.ndarray, process: np.ndarray) -> np.ndarray:
    """The process that launches each part, shape (parts,), -1 for none: that with a call of the same correlation before most of its kernels. Of equal ones that
    whose calls are nearest in the file, as merged files hold one rank after the other."""
    known, counts = np.unique(process, return_counts=True)
    if len(known) < 2:
        return np.full(num_parts, known[0] if len(known) else -1)
    known = known[np.argsort(-counts, kind="stable")][:_MOST_PROCESSES]
    correlation, latest, kernels = c["correlation"][order], c["ts"][order] + _BEFORE_S, np.bincount(part)
    scores = []
    for number in known.tolist():
        calls = np.flatnonzero(process == number)
        keys = c["call_correlation"][calls]
        before = np.bincount(part, _closest(keys, c["call_ts"][calls], correlation, latest) >= 0)
        at_all = np.bincount(part, np.isin(correlation, keys) & (correlation >= 0))
        apart = np.abs(np.bincount(part, c["event"][order]) / kernels - c["call_event"][calls].mean())
        scores.append(list(zip(before, at_all, -apart)))
    best = [max(range(len(known)), key=lambda i, k=k: scores[i][k]) for k in range(num_parts)]
    return np.array([known[i] if scores[i][k][1] else -1 for k, i in enumerate(best)])


def _closest(keys: np.ndarray, times: np.ndarray, wanted: np.ndarray, latest: np.ndarray) -> np.ndarray:
    """Index of the last of `keys` in time that equals each of `wanted` and is not after `latest`, -1 for none or a negative key."""
    order = np.lexsort((np.arange(len(keys) + len(wanted)), np.concatenate([times, latest]), np.concatenate([keys, wanted])))
    before = np.maximum.accumulate(np.where(order < len(keys), np.arange(len(order)), -1))
    result = np.full(len(keys) + len(wanted), -1)
    result[order] = np.where(before >= 0, order[before], -1)
    result = result[len(keys) :]
    return np.where((result >= 0) & (keys[result] == wanted) & (wanted >= 0), result, -1)


def _calls(owner: np.ndarray, correlation: np.ndarray, process: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Index of the call that launched each device event, -1 for none: the last of its process with its correlation."""
    result = np.full(len(correlation), -1)
    for number in np.unique(owner).tolist():
        rows, calls = np.flatnonzero(owner == number), np.flatnonzero(process == number)
        if len(calls):
            found = _closest(keys[calls], calls, correlation[rows], np.full(len(rows), len(keys)))
            result[rows] = np.where(found >= 0, calls[found], -1)
    return result


def _called(devices: np.ndarray, owner: np.ndarray, job: Job, remarks: Remarks) -> list[tuple[int, int, int]]:
    """Rank, device where that is needed to tell it from others, and size of the job, for each part."""
    numbers = devices.tolist()
    if len(numbers) == 1:
        return [(job.rank, -1, job.world_size)]
    shown = ", ".join(map(str, sorted(numbers)[:16]))
    if job.rank >= 0 and len(np.unique(owner[owner >= 0])) < 2:
        remarks.add("several devices of one rank in one file, each shown for itself", f"devices {shown} of rank {job.rank}")
        return [(job.rank, number, job.world_size) for number in numbers]
    if len(set(numbers)) == len(numbers) and min(numbers) >= 0:
        remarks.add("several ranks or devices in one file, the number of the device is taken for the rank", f"devices {shown}")
        return [(number, -1, job.world_size if max(numbers) < job.world_size else -1) for number in numbers]
    remarks.add("several ranks in one file that do not tell which they are, each shown for itself", f"devices {shown}")
    return [(-1, number, job.world_size) for number in numbers]


def _events(
    c: Mapping[str, np.ndarray], at: np.ndarray, shapes: Sequence[tuple[Any, ...]], device: int, launch_s: np.ndarray, operator: np.ndarray, step: np.ndarray
) -> DeviceEvents:
    launch = c["launch"][at]
    blocks, threads, channels = grids(shapes, launch)
    return DeviceEvents(
        start_s=c["ts"][at], duration_s=c["dur"][at], name=c["name"][at], kind=c["kind"][at].astype(np.int8), stream=c["stream"][at],
        device=np.broadcast_to(device, len(at)), correlation=c["correlation"][at], blocks=blocks, threads=threads, channels=channels, launch=launch,
        nbytes=c["nbytes"][at], launch_start_s=launch_s, operator=operator, step=step, event=c["event"][at],
    )  # fmt: skip


def _operators(c: Mapping[str, np.ndarray]) -> tuple[Operators, np.ndarray]:
    order = np.lexsort((-c["op_dur"], c["op_ts"], c["op_thread"]))
    start, duration, thread = c["op_ts"][order], c["op_dur"][order], c["op_thread"][order]
    return Operators(start, duration, c["op_name"][order], nest(thread, start, start + duration), c["op_inputs"][order]), order


def _places(order: np.ndarray, count: int) -> np.ndarray:
    """Where each of `count` things stands in `order`, -1 for one that is left out."""
    result = np.full(count, -1)
    result[order] = np.arange(len(order))
    return result


def _doubts(events: DeviceEvents, names: tuple[str, ...], remarks: Remarks) -> None:
    where = lambda i: f"event {events.event[i]} ({names[events.name[i]][:60]!r})"
    work = events.kind != SYNCHRONISATION
    for stream in np.unique(events.stream[work & (events.stream >= 0)]):
        at = np.flatnonzero((events.stream == stream) & work)
        before = np.maximum.accumulate(events.end_s[at])[:-1] - events.start_s[at][1:]
        for i in np.flatnonzero(before > 1e-9):
            remarks.add("overlapping kernels on one stream, kept", f"{where(at[i + 1])} on stream {stream} starts {before[i] * 1e6:.3g} us early")
    for i in np.flatnonzero(work & (events.stream < 0)):
        remarks.add("a kernel without a stream number, kept, its overlap with others not checked", where(i))
    for i in np.flatnonzero((events.start_s < events.launch_start_s - _BEFORE_S) & work):
        gap = (events.launch_start_s[i] - events.start_s[i]) * 1e6
        remarks.add("clock running backwards: a kernel starts before the host launches it, kept", f"{where(i)} by {gap:.3g} us")
