"""JAX profiles as XSpace (`.xplane.pb`): one `RankTrace` per device plane.

The names of events stand behind them in the file, so it is walked twice: for names and statistics, stepping over the lines; then for the lines of the
devices. Neither holds more than a chunk of the file. Schema: TensorFlow/OpenXLA, xplane.proto. Leaves out the planes of the host, hence the launches, and
the shapes inside the HLO protos.
"""

import dataclasses
import re
from typing import Any

from ._json import open_bytes
from ._numbers import clean, whole
from ._planes import READ, Launches, Line, plane_trace
from ._tables import RankTrace, Remarks, TraceError
from ._wire import Stream, WireError, after, fields, signed, text, varint


@dataclasses.dataclass
class Plane:
    """What a plane says of itself, without its lines.

    Attributes:
      name: such as "/device:GPU:0".
      events, stats: key -> name.
      about: its statistics, name -> value.
      end: the byte after it.
    """

    name: str = ""
    events: dict[int, str] = dataclasses.field(default_factory=dict)
    stats: dict[int, str] = dataclasses.field(default_factory=dict)
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    end: int = 0

    @property
    def device(self) -> int:
        """Number of the device, -1 for the host and what is no device."""
        found = re.match(r"/device:(?!CUSTOM)\w+:(\d{1,9})$", self.name)
        return int(found[1]) if found else -1


def read_xspace(file: str) -> list[RankTrace]:
    """All device planes with events of an XSpace.

    Raises:
      TraceError: the bytes are no XSpace, or it has no device plane with events.
    """
    planes, damaged, cut = _heads(file)
    if cut and not planes and not damaged:
        raise TraceError(f"{file} is neither JSON nor a profile of JAX (XSpace): {cut}. Give a .json, .json.gz, .xplane.pb or .et file.")
    started = [start for plane in planes if isinstance(start := plane.about.get("profile_start_time"), int)]
    result, left, whole_file = [], Remarks(file), Remarks(file)
    with open_bytes(file) as opened:
        stream = Stream(opened)
        for plane in planes:
            number, _, size = next(stream.fields())
            while number != 1 or stream.at + size != plane.end:
                stream.skip_to(stream.at + max(size, 0))
                number, _, size = next(stream.fields())
            remarks = Remarks(file)
            if plane.device >= 0:
                try:
                    rank = _rank(file, plane, stream, started[-1] if started else 0, remarks)
                except WireError as error:
                    damaged.append(f"{plane.name}: {error}")
                else:
                    if len(rank.events):
                        result.append(rank)
                    else:
                        left = remarks
            stream.skip_to(plane.end)
    if not result:
        what = f"it is cut or damaged: {cut or damaged[0]}" if cut or damaged else f"its planes are {', '.join(plane.name for plane in planes) or 'none'}"
        raise TraceError(f"{file} has no GPU events; {what}{left.why()}. Profile on the device, and copy the whole file.")
    if cut:
        whole_file.add("the file is cut; what follows is missing", cut)
    for word in damaged:
        whole_file.add("a damaged plane", word)
    return [dataclasses.replace(result[0], left_out=(*whole_file.done(), *result[0].left_out)), *result[1:]]


def _heads(file: str) -> tuple[list[Plane], list[str], str]:
    """The whole planes, those that cannot be read, and where the file is cut."""
    planes, damaged = [], []
    with open_bytes(file) as opened:
        stream = Stream(opened)
        try:
            for number, _, size in stream.fields():
                if number != 1 or size < 0:
                    continue
                plane, end = Plane(end=stream.at + size), stream.at + size
                try:
                    _head(stream, plane)
                except WireError as error:
                    stream.skip_to(end)  # fails where the file ends inside the plane
                    damaged.append(f"{plane.name or 'a plane'}: {error}")
                else:
                    planes.append(plane)
        except WireError as error:
            return planes, damaged, str(error)
    return planes, damaged, ""


def _head(stream: Stream, plane: Plane) -> None:
    about = []
    for number, _, size in stream.fields(plane.end):
        if size < 0 or number == 3:
            continue
        if number == 2:
            plane.name = clean(text(stream.read(size)))
        elif number == 5 or (number == 4 and (plane.device >= 0 or not plane.name)):
            key, found = _entry(stream.read(size))
            parts = dict(fields(found))
            name = parts.get(4) if number == 4 and parts.get(4) else parts.get(2, 0)
            (plane.events if number == 4 else plane.stats)[key] = text(name)
        elif number == 6:
            about.append(stream.read(size))
    plane.about = dict(_stat(item, plane.stats) for item in about)  # their names may stand behind them


def _rank(file: str, plane: Plane, stream: Stream, base: int, remarks: Remarks) -> RankTrace:
    """The plane whose bytes are next."""
    reader = _Events(plane, remarks)
    for number, _, size in stream.fields(plane.end):
        if number == 3 and size >= 0:
            reader.line(stream, stream.at + size)
    first = min(reader.stamps, default=0)
    for line, stamp in zip(reader.lines, reader.stamps, strict=True):
        shift = (stamp - first) * 1e-9
        line.rescale(-shift, 1.0)
    accelerator = clean(" ".join(str(plane.about[key]) for key in ("device_vendor", "device_type_string") if plane.about.get(key)))
    origin = first + (base if first < 10**17 else 0)  # lines count from the start of the profile, or since 1970
    return plane_trace(file, "xspace", plane.device, accelerator, max(whole(plane.about.get("core_count", 0)), 0), origin, reader.lines, plane.events,
                       reader.launches, remarks)  # fmt: skip


class _Events:
    """Takes the lines of one plane."""

    def __init__(self, plane: Plane, remarks: Remarks):
        self.lines: list[Line] = []
        self.stamps: list[int] = []  # start of each line [ns]
        self.launches = Launches()
        self._plane, self._remarks, self._number = plane, remarks, 0
        names = {name: key for key, name in plane.stats.items()}
        self._correlation, self._details = names.get("correlation_id", -1), names.get("kernel_details", -1)
        self._known: dict[bytes, int] = {}  # a statistic with kernel details -> number of the launch shape

    def line(self, stream: Stream, end: int) -> None:
        """The line whose bytes are next, up to `end`."""
        line, identity, stamp = Line(), -1, 0
        for number, value, size in stream.fields(end):
            if number == 4 and size >= 0:
                if line.name and not line.name.startswith(READ):
                    stream.skip_to(end)
                    break
                self._event(stream.read(size), line)
            elif number == 1:
                identity = signed(value)
            elif number == 3:
                stamp = signed(value)
            elif number == 2 or (number == 11 and not line.name):
                line.name = clean(text(stream.read(size)))
        found = re.search(r"#(\d{1,18})", line.name)
        line.stream = int(found[1]) if found else whole(identity)
        self.lines.append(line if line.name.startswith(READ) else Line(line.name))
        self.stamps.append(stamp)

    def _event(self, event: bytes, line: Line) -> None:
        self._number += 1
        key = offset = duration = at = 0
        correlation = launch = -1
        end = len(event)
        try:
            while at < end:
                tag = event[at]
                if tag == 0x22:  # a statistic; most are small, and only two are wanted
                    size, begin = event[at + 1], at + 2
                    if size >= 0x80:
                        size, begin = varint(event, at + 1)
                    at = begin + size
                    if at > end:
                        raise WireError(f"a statistic needs {size:,} bytes, {end - begin:,} are left")
                    of = event[begin + 1] if size > 1 and event[begin] == 0x08 and event[begin + 1] < 0x80 else None
                    if of is None or of in (self._correlation, self._details):
                        stat = event[begin:at]
                        if of == self._details and of is not None:
                            launch = self._launch(stat)
                        else:
                            name, value = _stat(stat, self._plane.stats)
                            if name == "correlation_id":
                                correlation = whole(value)
                            elif name == "kernel_details":
                                launch = self.launches.number(value)
                elif tag & 7 == 0 and tag < 0x80:
                    value, at = varint(event, at + 1)
                    if tag == 0x08:
                        key = signed(value)
                    elif tag == 0x10:
                        offset = signed(value)
                    elif tag == 0x18:
                        duration = signed(value)
                    elif tag == 0x28:
                        self._remarks.add("an event that sums up several, without times", f"event {self._number} of {line.name}")
                        return
                else:  # no field that is known here
                    at = after(event, at)
        except (WireError, IndexError) as error:
            self._remarks.add("a damaged event", f"event {self._number} of {line.name}: {error}")
            return
        line.add(offset * 1e-12, duration * 1e-12, key, correlation, launch, self._number)

    def _launch(self, stat: bytes) -> int:
        if stat not in self._known:
            self._known[stat] = self.launches.number(_stat(stat, self._plane.stats)[1])
        return self._known[stat]


def _stat(stat: bytes, names: dict[int, str]) -> tuple[str, Any]:
    key, found = 0, None
    for number, value in fields(stat):
        if number == 1 and isinstance(value, int):
            key = value
        elif number in (3, 4) and isinstance(value, int):
            found = signed(value) if number == 4 else value
        elif number == 5:
            found = text(value)
        elif number == 7 and isinstance(value, int):
            found = names.get(value, "")
    return names.get(key, str(key)), found


def _entry(value: bytes) -> tuple[int, bytes]:
    """Key and message of an entry of a map."""
    parts = dict(fields(value))
    key, found = parts.get(1, 0), parts.get(2)
    return signed(key) if isinstance(key, int) else 0, found if isinstance(found, bytes) else b""
