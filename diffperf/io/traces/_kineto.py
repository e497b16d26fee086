"""Kineto traces of the PyTorch profiler (CUDA, ROCm and XPU), event by event, into columns; `_kineto_ranks` makes ranks of them.

Leaves out Python frames, flow arrows and memory counters, which make up most of a file. Categories are read in any case, and of a list with commas the first
that is known counts. Whatever has a correlation and does not run on the device is a call that may have launched something, whatever its category.
"""

import math
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from ._classify import COMMUNICATION, kind_of
from ._kineto_ranks import Recorded, rank_traces
from ._numbers import DAY_S, FAR_OFF, LATEST_US, amount, clean, last_number, real, sizes, whole
from ._steps import Marks
from ._tables import Inputs, RankTrace, Remarks

_DEVICE, _RUNTIME, _OPERATOR, _ANNOTATION, _SHADOW, _OTHER = range(6)  # _SHADOW: annotations of the host, drawn over the kernels that they launched
_ROLES = {
    **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "cuda_sync"), _DEVICE),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime", "xpu_driver"), _RUNTIME),
    **dict.fromkeys(("privateuse1_runtime", "privateuse1_driver"), _RUNTIME),
    **dict.fromkeys(("cpu_op", "operator"), _OPERATOR),
    "user_annotation": _ANNOTATION,
    "gpu_user_annotation": _SHADOW,
}
_STEP = "ProfilerStep"
_RECORDED = ("Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype", "Process Group Name", "Process Group Ranks", "Src Rank", "Dst Rank")
_DAY_US = DAY_S * 1e6


class KinetoBuilder:
    """Takes the members of a Kineto file one by one, and gives a `RankTrace` per rank or device."""

    def __init__(self, file: str):
        self.file, self.remarks, self.meta = file, Remarks(file), {}
        self._roles: dict[str, tuple[int, str]] = {}  # category as in the file -> role, category in small letters
        self._names: dict[str, int] = {}
        self._written: dict[str, int] = {}  # name as in the file -> index
        self._kinds: dict[tuple[int, str], int] = {}
        self._launch: dict[tuple[Any, ...], int] = {}
        self._inputs: dict[Any, int] = {}
        self._processes: dict[Any, int] = {}
        self._threads: dict[Any, int] = {}
        self._process_of = array("q")  # thread -> process
        self._places: dict[tuple[int, int], int] = {}  # process and device of a device event
        self._real = {name: array("d") for name in ("ts", "dur", "nbytes", "op_ts", "op_dur", "call_ts", "call_dur")}
        self._whole = {name: array("q") for name in ("name", "kind", "stream", "place", "correlation", "launch", "event", "op_name", "op_thread", "op_inputs",
                                                     "call_thread", "call_correlation", "call_event")}  # fmt: skip
        self._recorded: dict[int, dict[str, Any]] = {}  # device event -> what stands with it
        self._op_recorded: dict[int, dict[str, Any]] = {}  # operator -> the same
        self._marks = Marks()

    def add(self, event: Any, number: int) -> None:
        """One item of `traceEvents`."""
        if not isinstance(event, dict):
            self.remarks.add("an item of traceEvents is no event", f"event {number}: {type(event).__name__}")
            return
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        role, category = self._role(category)
        name, args = event.get("name"), event.get("args")
        args = args if isinstance(args, dict) else {}
        step = role != _DEVICE and isinstance(name, str) and name.startswith(_STEP)
        if role == _OTHER and not step:
            if "stream" in args:
                self.remarks.add("an event with a stream in a category that is not read", f"event {number} ({str(name)[:60]!r}): {category[:40]!r}")
            elif "correlation" in args:
                role = _RUNTIME
        if role in (_SHADOW, _OTHER) and not step:
            return
        try:
            time, duration = float(event["ts"]), float(event["dur"])
        except (KeyError, TypeError, ValueError, OverflowError):
            time = duration = math.nan
        if not (-LATEST_US < time < LATEST_US and 0 <= duration <= _DAY_US) or not isinstance(name, str):
            self._refuse(event, number, time, duration)
        elif role == _DEVICE:
            self._device(name, category, time, duration, args, event, number)
        elif step:
            if "stream" not in args:
                self._marks.seen(name, time)
            if role in (_ANNOTATION, _OPERATOR):
                self._marks.step(name, self._thread(event), time, duration)
        elif role == _RUNTIME:
            correlation = whole(args.get("correlation", event.get("id")))
            if correlation >= 0:
                self._call(event, time, duration, correlation, number)
        elif role == _OPERATOR or name.startswith(("nccl:", "rccl:")):
            self._operator(name, self._thread(event), time, duration, args)
        else:
            self._marks.annotation(name, self._thread(event), time, duration)

    def _role(self, category: str) -> tuple[int, str]:
        if category not in self._roles:
            words = [word.strip() for word in category.lower().split(",")]
            self._roles[category] = next(((_ROLES[word], word) for word in words if word in _ROLES), (_OTHER, category))
        return self._roles[category]

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
        process = _index(self._processes, event.get("pid"))
        thread = _index(self._threads, (process, event.get("tid")))
        if thread == len(self._process_of):
            self._process_of.append(process)
        return thread

    def _name(self, name: str) -> int:
        index = self._written.get(name)
        if index is None:
            index = self._written[name] = self._names.setdefault(clean(name) or "unnamed", len(self._names))
        return index

    def _device(self, name: str, category: str, time: float, duration: float, args: dict[str, Any], event: dict[str, Any], number: int) -> None:
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
            self._recorded[len(self._whole["name"])] = {key: args[key] for key in _RECORDED if key in args}
            for key in ("In msg nelems", "Out msg nelems", "Group size"):
                if key in args and not real(args[key]) >= 0:
                    self.remarks.add("a collective whose size or group is no number, not used", f"event {number}: {key} is {str(args[key])[:40]!r}")
        place = _index(self._processes, event.get("pid")), whole(args.get("device"))
        for column, value in (("ts", time), ("dur", duration), ("nbytes", amount(args.get("bytes")))):
            self._real[column].append(value)
        for column, value in (("name", index), ("kind", kind), ("stream", last_number(args.get("stream", event.get("tid")))),
                              ("place", self._places.setdefault(place, len(self._places))), ("correlation", whole(args.get("correlation"))), ("launch", launch),
                              ("event", number)):  # fmt: skip
            self._whole[column].append(value)

    def _call(self, event: dict[str, Any], time: float, duration: float, correlation: int, number: int) -> None:
        self._real["call_ts"].append(time)
        self._real["call_dur"].append(duration)
        self._whole["call_thread"].append(self._thread(event))
        self._whole["call_correlation"].append(correlation)
        self._whole["call_event"].append(number)

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
            self._op_recorded[len(self._whole["op_name"])] = {key: args[key] for key in _RECORDED if key in args}
        self._real["op_ts"].append(time)
        self._real["op_dur"].append(duration)
        for column, value in (("op_name", self._name(name)), ("op_thread", thread), ("op_inputs", inputs)):
            self._whole[column].append(value)

    def done(self) -> list[RankTrace]:
        """One trace per rank or device.

        Raises:
          TraceError: no device event.
        """
        columns = {name: np.array(column) for name, column in (*self._real.items(), *self._whole.items())}
        columns["process_of"] = np.array(self._process_of)
        return rank_traces(Recorded(self.file, self.meta, self.remarks, columns, tuple(self._places), tuple(self._names), tuple(self._launch),
                                    tuple(self._inputs), self._recorded, self._op_recorded, self._marks))  # fmt: skip


def _index(known: dict[Any, int], key: Any) -> int:
    """The number of a key, in order of appearance."""
    try:
        return known.setdefault(key, len(known))
    except TypeError:  # where a number or a name should be, a list or an object
        return known.setdefault(str(key), len(known))


def _tuple(value: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_tuple(item) if isinstance(item, list) else item for item in value)
