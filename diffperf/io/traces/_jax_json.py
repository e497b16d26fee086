"""JAX profiles as trace.json, in which events have no category and processes are the planes: one `RankTrace` per device."""

import math
import re
from typing import Any

from ._numbers import DAY_S, LATEST_US, clean, real, whole
from ._planes import Launches, Line, plane_trace
from ._tables import RankTrace, Remarks


class JaxJsonBuilder:
    """Takes events one by one, and gives a `RankTrace` per device."""

    def __init__(self, file: str):
        self.file, self.remarks = file, Remarks(file)
        self._process: dict[str, str] = {}
        self._thread: dict[tuple[str, str], str] = {}
        self._lines: dict[tuple[str, str], Line] = {}
        self._names: dict[str, int] = {}
        self._launches = Launches()

    def add(self, event: dict[str, Any], number: int) -> None:
        """One item of `traceEvents` without a category."""
        args, phase, process = event.get("args"), event.get("ph"), str(event.get("pid"))
        args = args if isinstance(args, dict) else {}
        lane = process, str(event.get("tid"))
        if phase == "M" and event.get("name") == "process_name":
            self._process[process] = clean(args.get("name"))
        elif phase == "M" and event.get("name") == "thread_name":
            self._thread[lane] = clean(args.get("name"))
        elif phase == "X" and self._process.get(process, "/device:").startswith("/device:"):
            time, duration, name = real(event.get("ts")), real(event.get("dur", 0.0)), event.get("name")
            if not (abs(time) < LATEST_US and duration < DAY_S * 1e6 and isinstance(name, str)):
                if self._process.get(process):
                    shown = ", ".join(f"{key} is {str(event.get(key))[:40]}" for key in ("ts", "dur"))
                    self.remarks.add("an event without a name, or with a time or duration that cannot be", f"event {number} ({str(name)[:60]!r}): {shown}")
                return
            if lane not in self._lines:
                self._lines[lane] = Line()
            self._lines[lane].add(time, duration, self._names.setdefault(name, len(self._names)), whole(args.get("correlation_id")),
                                  self._launches.number(args.get("kernel_details")), number)  # fmt: skip

    @property
    def devices(self) -> str:
        """Names of the processes that are devices."""
        return ", ".join(name for name in self._process.values() if name.startswith("/device:"))

    def done(self) -> list[RankTrace]:
        """One trace per device; none if there is no device."""
        result, names = [], {key: name for name, key in self._names.items()}
        for process, name in self._process.items():
            found = re.match(r"/device:(?!CUSTOM)\w+:(\d{1,9})", name)
            lanes = [lane for lane in self._lines if lane[0] == process]
            if not found or not lanes:
                continue
            origin = math.floor(min(min(self._lines[lane].start) for lane in lanes))
            for lane in lanes:
                line = self._lines[lane]
                line.name = self._thread.get(lane, "")
                stream = re.search(r"#(\d{1,18})", line.name)
                line.stream = int(stream[1]) if stream else -1
                line.rescale(origin, 1e-6)
            lines, remarks = [self._lines.pop(lane) for lane in lanes], self.remarks if not result else Remarks(self.file)
            rank = plane_trace(self.file, "jax-json", int(found[1]), "", 0, origin * 1000, lines, names, self._launches, remarks)
            if len(rank.events):
                result.append(rank)
        return result
