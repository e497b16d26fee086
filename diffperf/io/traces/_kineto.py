"""Kineto traces of the PyTorch profiler (CUDA and ROCm) into a `RankTrace`: device events, who launched them, collectives, steps.

Leaves out Python frames, flow arrows and memory counters, which make up most of a file; the link from a kernel to its operator is taken from the calls
of the runtime: same correlation, then the innermost operator on that thread at that time (the "External id" of old traces is no operator).
"""

import math
import re
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from ._calls import collective_calls
from ._classify import COMMUNICATION, SYNCHRONISATION, kind_of
from ._nesting import innermost, nest
from ._numbers import DAY_S, FAR_OFF, LATEST_US, amount, clean, far_off, ranks, real, sizes, whole
from ._tables import DeviceEvents, Inputs, Operators, RankTrace, Remarks, Step, TraceError

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "cuda_sync"}
RUNTIME = {"cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime", "privateuse1_runtime", "privateuse1_driver"}
OPERATOR = {"cpu_op", "operator"}
RECORDED = ("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name", "Process Group Ranks", "Src Rank", "Dst Rank")

_DAY_US = DAY_S * 1e6


class KinetoBuilder:
    """Takes the members of a Kineto file one by one, and gives a `RankTrace`."""

    def __init__(self, file: str):
        self.file, self.remarks, self.meta = file, Remarks(file), {}
        self._names: dict[str, int] = {}
        self._written: dict[str, int] = {}  # name as in the file -> index
        self._kinds: dict[tuple[int, str], int] = {}
        self._launch: dict[tuple[Any, ...], int] = {}
        self._inputs: dict[Any, int] = {}
        self._threads: dict[Any, int] = {}
        self._real = {name: array("d") for name in ("ts", "dur", "nbytes", "op_ts", "op_dur", "call_ts", "call_dur")}
        self._whole = {name: array("q") for name in ("name", "kind", "stream", "device", "correlation", "launch", "event", "op_name", "op_thread", "op_inputs",
                                                     "call_thread", "call_correlation")}  # fmt: skip
        self._recorded: dict[int, dict[str, Any]] = {}  # device event -> what stands with it
        self._op_recorded: dict[int, dict[str, Any]] = {}  # operator -> the same
        self._steps: list[tuple[str, float, float]] = []

    def add(self, event: Any, number: int) -> None:
        """One item of `traceEvents`."""
        if not isinstance(event, dict):
            self.remarks.add("an item of traceEvents is no event", f"event {number}: {type(event).__name__}")
            return
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        category = category.lower()
        device, operator, runtime = category in DEVICE, category in OPERATOR, category in RUNTIME
        annotation = category == "user_annotation"
        if not (device or operator or runtime or annotation):
            return
        name = event.get("name")
        try:
            time, duration = float(event["ts"]), float(event["dur"])
        except (KeyError, TypeError, ValueError, OverflowError):
            time = duration = math.nan
        if not (-LATEST_US < time < LATEST_US and 0 <= duration <= _DAY_US) or not isinstance(name, str):
            self._refuse(event, number, time, duration)
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if device:
            self._device(name, category, time, duration, args, event.get("tid"), number)
        elif runtime:
            correlation = whole(args.get("correlation", event.get("id")))
            if correlation >= 0:
                self._call(event, time, duration, correlation)
        elif operator or name.startswith(("nccl:", "rccl:")):
            self._operator(name, self._thread(event), time, duration, args)
        elif name.startswith("ProfilerStep"):
            self._steps.append((clean(name), time, duration))

    def _refuse(self, event: dict[str, Any], number: int, time: float, duration: float) -> None:
        name = event.get("name")
        if math.isfinite(time) and math.isfinite(duration):
            reason = ("an event without a name" if not isinstance(name, str) else
                      "clock running backwards: an event ends before it starts" if duration < 0 else FAR_OFF)  # fmt: skip
        else:
            reason = "an event without a time or duration that is a number"
        shown = ", ".join(f"{key} is {str(event[key])[:40]!r}" if isinstance(event.get(key), str) else f"{key} is {str(event.get(key))[:40]}"
                          for key in ("ts", "dur"))  # fmt: skip
        self.remarks.add(reason, f"event {number} ({str(name)[:60]!r}): {shown}")

    def __len__(self) -> int:
        """Device events so far."""
        return len(self._whole["name"])

    def _thread(self, event: dict[str, Any]) -> int:
        lane = event.get("pid"), event.get("tid")
        try:
            return self._threads.setdefault(lane, len(self._threads))
        except TypeError:  # no number or name
            return self._threads.setdefault(str(lane), len(self._threads))

    def _name(self, name: str) -> int:
        index = self._written.get(name)
        if index is None:
            index = self._written[name] = self._names.setdefault(clean(name) or "unnamed", len(self._names))
        return index

    def _device(self, name: str, category: str, time: float, duration: float, args: dict[str, Any], thread: Any, number: int) -> None:
        index = self._name(name)
        kind = self._kinds.get((index, category))
        if kind is None:
            kind = self._kinds[index, category] = kind_of(name, category)
        grid, block = sizes(args.get("grid")), sizes(args.get("block"))
        launch = -1
        if grid or block or "shared memory" in args:
            key = (grid, block, whole(args.get("registers per thread")), whole(args.get("shared memory")))
            launch = self._launch.setdefault(key, len(self._launch))
        if kind == COMMUNICATION and "Collective name" in args:
            self._recorded[len(self._whole["name"])] = {key: args[key] for key in RECORDED if key in args}
            for key in ("In msg nelems", "Out msg nelems", "Group size"):
                if key in args and not real(args[key]) >= 0:
                    self.remarks.add("a collective whose size or group is no number, not used", f"event {number}: {key} is {str(args[key])[:40]!r}")
        for column, value in (("ts", time), ("dur", duration), ("nbytes", amount(args.get("bytes")))):
            self._real[column].append(value)
        for column, value in (("name", index), ("kind", kind), ("stream", whole(args.get("stream", thread))), ("device", whole(args.get("device"))),
                              ("correlation", whole(args.get("correlation"))), ("launch", launch), ("event", number)):  # fmt: skip
            self._whole[column].append(value)

    def _call(self, event: dict[str, Any], time: float, duration: float, correlation: int) -> None:
        self._real["call_ts"].append(time)
        self._real["call_dur"].append(duration)
        self._whole["call_thread"].append(self._thread(event))
        self._whole["call_correlation"].append(correlation)

    def _operator(self, name: str, thread: int, time: float, duration: float, args: dict[str, Any]) -> None:
        shapes, inputs = args.get("Input Dims"), -1
        if shapes:
            values = args.get("Concrete Inputs") if "attention" in name or "conv" in name else None
            try:
                key = Inputs(_tuple(shapes), tuple(map(str, args.get("Input type") or ())), tuple(map(str, values or ())))
                inputs = self._inputs.setdefault(key, len(self._inputs))
            except TypeError:  # not the lists that they should be
                self.remarks.add("an operator whose inputs are no lists", f"{name[:60]!r}")
        if "Collective name" in args:
            self._op_recorded[len(self._whole["op_name"])] = {key: args[key] for key in RECORDED if key in args}
        self._real["op_ts"].append(time)
        self._real["op_dur"].append(duration)
        for column, value in (("op_name", self._name(name)), ("op_thread", thread), ("op_inputs", inputs)):
            self._whole[column].append(value)

    def done(self) -> RankTrace:
        """The trace.

        Raises:
          TraceError: no device event.
        """
        c: dict[str, np.ndarray] = {name: np.array(column) for name, column in (*self._real.items(), *self._whole.items())}
        if not len(c["ts"]):
            raise TraceError(
                f"{self.file} has no GPU events: no kernel or copy could be read, so there is nothing to time{self.remarks.why()}. "
                "Profile with the activity CUDA as well as CPU."
            )
        lost = far_off(c["ts"] * 1e-6)
        for i in np.flatnonzero(lost).tolist():
            self.remarks.add(FAR_OFF, f"event {c['event'][i]}: ts is {c['ts'][i]}")
        origin = float(math.floor(c["ts"][~lost].min()))
        origin_ns = int(origin) * 1000 + self._base()
        for name in ("ts", "op_ts", "call_ts"):
            c[name] = (c[name] - origin) * 1e-6
        for name in ("dur", "op_dur", "call_dur"):
            c[name] *= 1e-6
        order = np.lexsort((c["event"], c["ts"]))
        order = order[~lost[order]]
        rows, ops, op_order = self._rows(c, order), *self._operators(c)
        call = _last(c["call_correlation"], c["correlation"][order])
        launched = call >= 0
        rows["launch_start_s"] = np.where(launched, c["call_ts"][call] if len(c["call_ts"]) else np.nan, np.nan)
        at = np.flatnonzero(launched)
        rows["operator"] = np.full(len(order), -1, np.int64)
        thread = c["op_thread"][op_order]
        rows["operator"][at] = innermost(thread, ops.start_s, ops.start_s + ops.duration_s, c["call_thread"][call[at]], c["call_ts"][call[at]])
        steps = tuple(Step(name, (time - origin) * 1e-6, (time - origin + duration) * 1e-6)
                      for name, time, duration in sorted(self._steps, key=lambda step: step[1]))  # fmt: skip
        rows["step"] = _step_of(steps, np.where(launched, rows["launch_start_s"], rows["start_s"]))
        events = DeviceEvents(**rows)
        names, shapes, inputs = tuple(self._names), tuple(self._launch), tuple(self._inputs)
        rank, world, groups = self._distributed()
        ranked, op_ranked = np.full(len(lost), -1), np.argsort(op_order)
        ranked[order] = np.arange(len(order))
        calls = collective_calls(events, names, shapes, ops, inputs, {int(ranked[i]): found for i, found in self._recorded.items() if ranked[i] >= 0},
                                 {int(op_ranked[i]): found for i, found in self._op_recorded.items()}, groups, world)  # fmt: skip
        self._doubts(events, names, launched, steps)
        used = np.unique(call[at])
        name, sms = self._device_properties(events)
        version = clean(self._info().get("nccl_version"))
        return RankTrace(
            self.file, "kineto", rank, world, name, sms, f"NCCL {version}" if version else "", origin_ns, names, shapes, inputs, events, ops, calls, steps,
            np.stack([c["call_ts"][used], c["call_dur"][used]], 1) if len(used) else np.zeros((0, 2)), self.remarks.done(),
        )  # fmt: skip

    def _rows(self, c: dict[str, np.ndarray], order: np.ndarray) -> dict[str, np.ndarray]:
        launch = c["launch"][order]
        size = lambda shape: math.prod(shape) if shape else 0
        table = np.array([(size(grid), size(block), grid[0] if grid else 0) for grid, block, _, _ in self._launch] + [(0, 0, 0)], np.int64)
        blocks, threads, channels = table[launch].T  # -1 is the last row
        return dict(
            start_s=c["ts"][order], duration_s=c["dur"][order], name=c["name"][order], kind=c["kind"][order].astype(np.int8), stream=c["stream"][order],
            device=c["device"][order], correlation=c["correlation"][order], blocks=blocks, threads=threads, channels=channels, launch=launch,
            nbytes=c["nbytes"][order], event=c["event"][order],
        )  # fmt: skip

    def _operators(self, c: dict[str, np.ndarray]) -> tuple[Operators, np.ndarray]:
        order = np.lexsort((-c["op_dur"], c["op_ts"], c["op_thread"]))
        start, duration, thread = c["op_ts"][order], c["op_dur"][order], c["op_thread"][order]
        return Operators(start, duration, c["op_name"][order], nest(thread, start, start + duration), c["op_inputs"][order]), order

    def _info(self) -> dict[str, Any]:
        info = self.meta.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    def _distributed(self) -> tuple[int, int, dict[str, tuple[int, ...]]]:
        """Rank, world size, and the ranks of each process group."""
        info = self._info()
        groups = {clean(str(group.get("pg_name"))): ranks(group.get("ranks")) for group in _dicts(info.get("pg_config"))}
        rank, world = whole(info.get("rank")), whole(info.get("world_size"))
        for key, value, least in (("rank", rank, 0), ("world_size", world, 1)):
            if info.get(key) is not None and value < least:
                self.remarks.add(f"a {key} that is no whole number from {least} on, not used", f"{key} is {str(info[key])[:40]!r}")
        if 0 < world <= rank:
            self.remarks.add("a rank outside its job, whose size is not used", f"rank is {rank}, world_size is {world}; ranks count from 0")
            world = -1
        if rank < 0 and (found := re.search(r"rank[-_]?(\d{1,9})", self.file.rsplit("/", 1)[-1])):
            rank = int(found[1])
        return max(rank, -1), world if world > 0 else -1, groups

    def _base(self) -> int:
        """What the file adds to all times. [ns]"""
        base = self.meta.get("baseTimeNanoseconds", 0)
        if base != 0 and whole(base) <= 0:
            self.remarks.add("a baseTimeNanoseconds that is no time, taken as 0", str(base)[:40])
        return max(whole(base), 0)

    def _device_properties(self, events: DeviceEvents) -> tuple[str, int]:
        devices = _dicts(self.meta.get("deviceProperties"))
        used = {int(device) for device in np.unique(events.device)}
        found = next((item for item in devices if whole(item.get("id")) in used), devices[0] if devices else {})
        return clean(found.get("name")), max(whole(found.get("numSms")), 0)

    def _doubts(self, events: DeviceEvents, names: tuple[str, ...], launched: np.ndarray, steps: tuple[Step, ...]) -> None:
        where = lambda i: f"event {events.event[i]} ({names[events.name[i]][:60]!r})"
        work = events.kind != SYNCHRONISATION
        for device in np.unique(events.device):
            for stream in np.unique(events.stream[(events.device == device) & work & (events.stream >= 0)]):
                at = np.flatnonzero((events.device == device) & (events.stream == stream) & work)
                before = np.maximum.accumulate(events.end_s[at])[:-1] - events.start_s[at][1:]
                for i in np.flatnonzero(before > 1e-9):
                    self.remarks.add("overlapping kernels on one stream, kept", f"{where(at[i + 1])} on stream {stream} starts {before[i] * 1e6:.3g} us early")
        for i in np.flatnonzero(work & (events.stream < 0)):
            self.remarks.add("a kernel without a stream number, kept, its overlap with others not checked", where(i))
        early = launched & (events.start_s < events.launch_start_s - 1e-6) & work
        for i in np.flatnonzero(early):
            gap = (events.launch_start_s[i] - events.start_s[i]) * 1e6
            self.remarks.add("clock running backwards: a kernel starts before the host launches it, kept", f"{where(i)} by {gap:.3g} us")
        marks = [int(found[1]) for step in steps if (found := re.search(r"#(\d{1,18})", step.name))]
        for k in range(1, len(marks)):
            if marks[k] < marks[k - 1]:
                self.remarks.add("clock running backwards: steps out of order, kept", f"{steps[k].name} starts after {steps[k - 1].name}")
        if len(np.unique(events.device[work])) > 1:
            self.remarks.add("kernels of several devices in one file, taken as one rank", f"devices {np.unique(events.device[work]).tolist()}")


def _step_of(steps: tuple[Step, ...], time: np.ndarray) -> np.ndarray:
    if not steps:
        return np.full(len(time), -1, np.int64)
    start, end = np.array([step.start_s for step in steps]), np.array([step.end_s for step in steps])
    at = np.searchsorted(start, time, side="right") - 1
    return np.where((at >= 0) & (time < end[at]), at, -1)


def _last(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Index of the last of `keys` that equals each of `wanted`, -1 for none or a negative one."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (keys[found] == wanted) & (wanted >= 0), found, -1)


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(item) if isinstance(item, list) else item for item in value)
