"""One device plane of a JAX profile as a `RankTrace`: lines of events in columns, whichever file they are from.

Device lines named "Stream" hold the kernels of a GPU, "XLA Ops" and "Async XLA Ops" the operations of a TPU; other lines of a plane say the same again
by module, framework operation or source line, and are not read.
"""

import dataclasses
import math
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._calls import collective_calls
from ._classify import kind_of
from ._numbers import DAY_S, FAR_OFF, clean, far_off, sizes
from ._steps import step_of
from ._tables import DeviceEvents, Operators, RankTrace, Remarks, Step, grids

READ = ("Stream", "XLA Ops", "Async XLA Ops", "Steps")
_NO_OPERATORS = Operators(*(np.zeros(0, kind) for kind in (float, float, np.int64, np.int64, np.int64)))


class Line:
    """The events of one line, one column each; `start` and `duration` in the unit of the file, `name`, `launch` as the reader numbers them."""

    def __init__(self, name: str = "", stream: int = -1):
        self.name, self.stream = name, stream
        self.start, self.duration = array("d"), array("d")
        self.key, self.correlation, self.launch, self.number = array("q"), array("q"), array("i"), array("q")

    def add(self, start: float, duration: float, key: int, correlation: int, launch: int, number: int) -> None:
        """One event."""
        self.start.append(start)
        self.duration.append(duration)
        self.key.append(key)
        self.correlation.append(correlation)
        self.launch.append(launch)
        self.number.append(number)

    def rescale(self, origin: float, unit: float) -> None:
        """Takes `origin` off the starts, and multiplies all times by `unit`."""
        if len(self):
            start, duration = _view(self.start), _view(self.duration)
            start -= origin
            start *= unit
            duration *= unit

    def __len__(self) -> int:
        return len(self.start)


class Launches:
    """Numbers for launch shapes, given as `grid:1280,1,1 block:256,1,1` among other words."""

    def __init__(self):
        self.shapes: list[tuple[Any, ...]] = []
        self._number: dict[str, int] = {}

    def number(self, details: Any) -> int:
        """Index into `shapes`, -1 where the details tell none."""
        if not isinstance(details, str):
            return -1
        if details not in self._number:
            found = re.search(r"grid:([\d,]+) block:([\d,]+)", details)
            grid, block = (sizes(found[1].split(",")), sizes(found[2].split(","))) if found else ((), ())
            shape = (grid, block, -1, -1)
            if grid and shape not in self.shapes:
                self.shapes.append(shape)
            self._number[details] = self.shapes.index(shape) if grid else -1
        return self._number[details]


def plane_trace(
    file: str, format: str, rank: int, accelerator: str, num_sms: int, origin_ns: int, lines: Sequence[Line], names: dict[int, str], launches: Launches,
    remarks: Remarks,
) -> RankTrace:  # fmt: skip
    """A rank of the lines of one device plane, in seconds from the origin.

    Args:
      names: key of an event -> its name.
    """
    work = [line for line in lines if line.name.startswith("Stream")] or [line for line in lines if line.name in ("XLA Ops", "Async XLA Ops")]
    steps = tuple(Step(f"step {clean(names.get(line.key[i], str(line.key[i])))}", line.start[i], line.start[i] + line.duration[i])
                  for line in lines if line.name == "Steps" for i in np.argsort(line.start, kind="stable").tolist())  # fmt: skip
    known: dict[str, int] = {}
    of_key: dict[int, int] = {}
    for line in work:
        for key in np.unique(_view(line.key)).tolist():
            of_key[key] = known.setdefault(clean(names.get(key, f"event {key}")).removesuffix(".kd") or "unnamed", len(known))
    stream = np.concatenate([np.zeros(0, np.int64), *(np.full(len(line), line.stream, np.int64) for line in work)])
    keys, order = np.array(sorted(of_key), np.int64), np.argsort(_joined(work, "start"), kind="stable")
    order = order[_usable(_joined(work, "start"), _joined(work, "duration"), _joined(work, "number"), stream, remarks)[order]]
    take = lambda column: _joined(work, column)[order]
    index = np.array([of_key[key] for key in keys.tolist()], np.int32)
    name = index[np.searchsorted(keys, take("key"))] if len(order) else index[:0]
    kinds = np.array([kind_of(word) for word in known] or [0], np.int8)
    launch = take("launch")
    same = lambda value: np.broadcast_to(np.asarray(value), len(order))  # one value that stands for all, and takes no memory
    events = DeviceEvents(
        take("start"), take("duration"), name, kinds[name], stream[order], same(rank), take("correlation"), *grids(launches.shapes, launch), launch,
        same(math.nan), same(math.nan), same(-1), same(-1), take("number"),
    )  # fmt: skip
    if steps:
        events = dataclasses.replace(events, step=step_of(steps, events.start_s))
    shapes = tuple(launches.shapes)
    calls = collective_calls(events, tuple(known), shapes, _NO_OPERATORS, (), {}, {}, {}, -1)
    last = steps[-1].start_s if len({step.name for step in steps}) > 1 else math.nan
    return RankTrace(file, format, rank, -1, -1, accelerator, num_sms, "", origin_ns, tuple(known), shapes, (), events, _NO_OPERATORS, calls, steps, last,
                     np.zeros((0, 2)), remarks.done())  # fmt: skip


def _view(column: array) -> np.ndarray:
    return np.frombuffer(column, column.typecode) if len(column) else np.zeros(0, column.typecode)


def _joined(lines: Sequence[Line], column: str) -> np.ndarray:
    parts = [_view(getattr(line, column)) for line in lines]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, getattr(Line(), column).typecode)


def _usable(start: np.ndarray, duration: np.ndarray, number: np.ndarray, stream: np.ndarray, remarks: Remarks) -> np.ndarray:
    """Mask of the events whose times can be."""
    backwards, lost = duration < 0, (duration > DAY_S) | far_off(start)
    for reason, found in (("clock running backwards: an event ends before it starts", backwards), (FAR_OFF, lost & ~backwards)):
        for i in np.flatnonzero(found)[:3].tolist():
            remarks.add(reason, f"event {number[i]} on stream {stream[i]}: from {start[i]:.6g} s, for {duration[i]:.3g} s")
        remarks.add(reason, "", int(found.sum()) - 3) if found.sum() > 3 else None
    return ~(backwards | lost)
