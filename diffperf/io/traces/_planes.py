"""JAX profiles, as XSpace (`.xplane.pb`) or as trace.json: one `RankTrace` per device plane.

Device lines named "Stream" hold the kernels of a GPU, "XLA Ops" and "Async XLA Ops" the operations of a TPU; other lines of a plane say the same again
by module, framework operation or source line, and are not read. Schema: TensorFlow/OpenXLA, xplane.proto. Leaves out the planes of the host, hence the
launches, and the shapes inside the HLO protos.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._calls import collective_calls
from ._classify import kind_of
from ._numbers import sizes, whole
from ._tables import DeviceEvents, Operators, RankTrace, Remarks, Step, TraceError
from ._wire import WireError, fields, signed, text

_NO_OPERATORS = Operators(*(np.zeros(0, kind) for kind in (float, float, np.int64, np.int64, np.int64)))


@dataclasses.dataclass
class Line:
    """One line of a device plane while it is read: (start [s], duration [s], name, args, number) per event."""

    name: str
    stream: int
    events: list[tuple[float, float, str, dict[str, Any], int]] = dataclasses.field(default_factory=list)


def plane_trace(file: str, format: str, rank: int, accelerator: str, num_sms: int, origin_ns: int, lines: Sequence[Line], remarks: Remarks) -> RankTrace:
    """A rank of the lines of one device plane, times from the origin."""
    streams = [line for line in lines if line.name.startswith("Stream")] or [line for line in lines if line.name in ("XLA Ops", "Async XLA Ops")]
    steps = tuple(Step(f"step {name}", start, start + duration)
                  for line in lines if line.name == "Steps" for start, duration, name, _, _ in sorted(line.events))  # fmt: skip
    names: dict[str, int] = {}
    launch: dict[tuple[Any, ...], int] = {}
    rows = []
    for line in streams:
        for start, duration, name, args, number in line.events:
            if duration < 0:
                remarks.add("clock running backwards: an event ends before it starts", f"event {number} ({name[:60]!r}) of {line.name}")
                continue
            grid, block = _dimensions(args.get("kernel_details"))
            shape = launch.setdefault((grid, block, -1, -1), len(launch)) if grid else -1
            correlation = args.get("correlation_id", -1)
            rows.append((start, duration, names.setdefault(name, len(names)), kind_of(name), line.stream, rank, whole(correlation), math.prod(grid or (0,)),
                         math.prod(block or (0,)), grid[0] if grid else 0, shape, math.nan, math.nan, -1, -1, number))  # fmt: skip
    rows.sort(key=lambda row: row[0])
    kinds = (float, float, np.int64, np.int8, *(np.int64,) * 7, float, float, np.int64, np.int64, np.int64)
    columns = [np.array(column, kind) for column, kind in zip(zip(*rows) if rows else [()] * len(kinds), kinds, strict=True)]
    events = DeviceEvents(*columns)
    if steps:
        starts, ends = (np.array([getattr(step, side) for step in steps]) for side in ("start_s", "end_s"))
        at = np.searchsorted(starts, events.start_s, side="right") - 1
        events = dataclasses.replace(events, step=np.where((at >= 0) & (events.start_s < ends[at]), at, -1))
    calls = collective_calls(events, tuple(names), tuple(launch), _NO_OPERATORS, (), {}, {}, {}, -1)
    return RankTrace(file, format, rank, -1, accelerator, num_sms, "", origin_ns, tuple(names), tuple(launch), (), events, _NO_OPERATORS, calls, steps,
                     np.zeros((0, 2)), remarks.done())  # fmt: skip


def read_xspace(file: str, data: memoryview) -> list[RankTrace]:
    """All device planes with events of an XSpace.

    Raises:
      TraceError: the bytes are no XSpace, or it has no device plane with events.
    """
    planes, cut, base = [], "", 0
    try:
        for number, value in fields(data):
            if number == 1 and isinstance(value, memoryview):
                name, stats = _plane_head(value)
                planes.append((name, value))
                start = stats.get("profile_start_time", base)
                base = start if isinstance(start, int) else base
    except WireError as error:
        cut = str(error)
    if cut and not planes:
        raise TraceError(f"{file} is neither JSON nor a profile of JAX (XSpace): {cut}. Give a .json, .json.gz, .xplane.pb or .et file.")
    result = []
    for name, plane in planes:
        if found := re.match(r"/device:(?!CUSTOM)\w+:(\d+)$", name):
            remarks = Remarks(file)
            if cut:
                remarks.add("the file is cut; what follows is missing", cut)
            try:
                rank = _plane_trace(file, int(found[1]), plane, base, remarks)
            except WireError as error:
                cut = cut or f"{name} is damaged: {error}"
                continue
            if len(rank.events):
                result.append(rank)
    if not result:
        what = f"it is cut or damaged: {cut}" if cut else f"its planes are {', '.join(name for name, _ in planes) or 'none'}"
        raise TraceError(f"{file} has no GPU events; {what}. Profile on the device, and copy the whole file.")
    return result


def _plane_head(plane: memoryview) -> tuple[str, dict[str, Any]]:
    """Name and statistics of a plane, without its events."""
    name, stat_names, stats = "", {}, []
    for number, value in fields(plane):
        if number == 2:
            name = text(value)
        elif number == 5 and isinstance(value, memoryview):
            key, found = _entry(value)
            stat_names[key] = text(dict(fields(found)).get(2, 0))
        elif number == 6 and isinstance(value, memoryview):
            stats.append(value)
    return name, dict(_stat(value, stat_names) for value in stats)


def _plane_trace(file: str, rank: int, plane: memoryview, base: int, remarks: Remarks) -> RankTrace:
    event_names: dict[int, str] = {}
    stat_names: dict[int, str] = {}
    stats, raw = [], []
    for number, value in fields(plane):
        if not isinstance(value, memoryview):
            continue
        if number == 3:
            raw.append(value)
        elif number in (4, 5):
            key, found = _entry(value)
            parts = dict(fields(found))
            name = parts.get(4) if number == 4 and parts.get(4) else parts.get(2, 0)
            (event_names if number == 4 else stat_names)[key] = text(name)
        elif number == 6:
            stats.append(value)
    heads = [dict((number, value) for number, value in fields(line) if number != 4) for line in raw]
    start = min((signed(_int(head.get(3, 0))) for head in heads), default=0)
    lines, number = [], 0
    for head, line in zip(heads, raw, strict=True):
        name = text(head.get(11, head.get(2, 0)))
        found = re.search(r"#(\d+)", name)
        lines.append(Line(name, int(found[1]) if found else signed(_int(head.get(1, 0)))))
        if not name.startswith(("Stream", "XLA Ops", "Async XLA Ops", "Steps")):
            continue
        shift = (signed(_int(head.get(3, 0))) - start) * 1e-9
        for field, event in fields(line):
            if field != 4 or not isinstance(event, memoryview):
                continue
            number += 1
            try:
                found = _event(event, shift, event_names, stat_names, number)
            except WireError as error:
                remarks.add("a damaged event", f"event {number} of {name}: {error}")
                continue
            if found is None:
                remarks.add("an event that sums up several, without times", f"event {number} of {name}")
            else:
                lines[-1].events.append(found)
    about = dict(_stat(value, stat_names) for value in stats)
    accelerator = " ".join(str(about[key]) for key in ("device_vendor", "device_type_string") if about.get(key))
    origin = start + (base if start < 10**17 else 0)  # lines count from the start of the profile, or since 1970
    return plane_trace(file, "xspace", rank, accelerator, whole(about.get("core_count", 0)), origin, lines, remarks)


def _event(
    event: memoryview, shift: float, names: dict[int, str], stat_names: dict[int, str], number: int
) -> tuple[float, float, str, dict[str, Any], int] | None:
    """Start [s], duration [s], name, statistics and number; None for an event that only counts occurrences."""
    key = offset = duration = 0
    args = {}
    for field, value in fields(event):
        if field == 4 and isinstance(value, memoryview):
            name, found = _stat(value, stat_names)
            args[name] = found
        elif field == 1:
            key = _int(value)
        elif field == 2:
            offset = signed(_int(value))
        elif field == 3:
            duration = signed(_int(value))
        elif field == 5:
            return None
    return shift + offset * 1e-12, duration * 1e-12, names.get(key, f"event {key}").removesuffix(".kd"), args, number


def _stat(stat: memoryview, names: dict[int, str]) -> tuple[str, Any]:
    key, found = 0, None
    for number, value in fields(stat):
        if number == 1:
            key = _int(value)
        elif number in (3, 4) and isinstance(value, int):
            found = signed(value) if number == 4 else value
        elif number == 5:
            found = text(value)
        elif number == 7:
            found = names.get(_int(value), "")
    return names.get(key, str(key)), found


def _entry(value: memoryview) -> tuple[int, memoryview]:
    """Key and message of an entry of a map."""
    parts = dict(fields(value))
    found = parts.get(2)
    return _int(parts.get(1, 0)), found if isinstance(found, memoryview) else memoryview(b"")


class JaxJsonBuilder:
    """Takes the events of a trace.json that JAX wrote, in which events have no category and processes are the planes."""

    def __init__(self, file: str):
        self.file = file
        self._process: dict[Any, str] = {}
        self._thread: dict[tuple[Any, Any], str] = {}
        self._events: dict[tuple[Any, Any], list[tuple[float, float, str, dict[str, Any], int]]] = {}

    def add(self, event: dict[str, Any], number: int) -> None:
        """One item of `traceEvents` without a category."""
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if event.get("ph") == "M" and event.get("name") == "process_name":
            self._process[event.get("pid")] = str(args.get("name", ""))
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            self._thread[event.get("pid"), event.get("tid")] = str(args.get("name", ""))
        elif event.get("ph") == "X" and isinstance(event.get("ts"), (int, float)) and not self._process.get(event.get("pid"), "").startswith("/host:"):
            kept = {key: args[key] for key in ("kernel_details", "correlation_id") if key in args}
            self._events.setdefault((event.get("pid"), event.get("tid")), []).append(
                (event["ts"], event.get("dur", 0.0), str(event.get("name", "")), kept, number)
            )

    def done(self) -> list[RankTrace]:
        """One trace per device; none if there is no device."""
        result = []
        for process, name in self._process.items():
            found = re.match(r"/device:(?!CUSTOM)\w+:(\d+)", name)
            threads = [key for key in self._events if key[0] == process]
            if not found or not threads:
                continue
            origin = math.floor(min(event[0] for key in threads for event in self._events[key]))
            lines = []
            for key in threads:
                stream = re.search(r"#(\d+)", self._thread.get(key, ""))
                lines.append(Line(self._thread.get(key, ""), int(stream[1]) if stream else -1))
                lines[-1].events += [((start - origin) * 1e-6, duration * 1e-6, *rest) for start, duration, *rest in self._events[key]]
            rank = plane_trace(self.file, "jax-json", int(found[1]), "", 0, origin * 1000, lines, Remarks(self.file))
            if len(rank.events):
                result.append(rank)
        return result


def _dimensions(details: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Grid and block of `grid:1280,1,1 block:256,1,1`."""
    found = re.search(r"grid:([\d,]+) block:([\d,]+)", details) if isinstance(details, str) else None
    return (sizes(found[1].split(",")), sizes(found[2].split(","))) if found else ((), ())


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0
