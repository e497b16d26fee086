"""Writes Chrome traces, the JSON of the Trace Event Format, which Perfetto and chrome://tracing open.

Times are in microseconds there (`ts`, `dur`); what is given here is in seconds. Source: Google, "Trace Event Format", sections "Complete
events", "Flow events", "Counter events", "Metadata events".
"""

import gzip
import json
import math
import os
from typing import Any, NamedTuple

from .._files import write_atomic


class TraceSlice(NamedTuple):
    """A bar on a track.

    Attributes:
      process, track: names; each process has its own tracks.
      name: what stands on it.
      category: what it can be searched by.
      start, duration: [s]
      colour: a reserved colour name of the format, or "".
      args: further facts shown when it is picked.
    """

    process: str
    track: str
    name: str
    category: str
    start: float
    duration: float
    colour: str = ""
    args: dict[str, Any] = {}


class TraceCounter(NamedTuple):
    """A value of a process from a time on.

    Attributes:
      process: name.
      name: of the counter.
      time: [s]
      values: series and their values.
    """

    process: str
    name: str
    time: float
    values: dict[str, float]


class ChromeTrace(NamedTuple):
    """Attributes:
    slices: bars; those of one track should not overlap.
    arrows: pairs of indices into `slices`, from the end of one to the start of the other.
    counters: values over time.
    facts: shown as the trace's metadata.
    """

    slices: list[TraceSlice]
    arrows: list[tuple[int, int]]
    counters: list[TraceCounter]
    facts: dict[str, Any]


def write_chrome_trace(path: str | os.PathLike, trace: ChromeTrace) -> None:
    """Writes a trace, whole or not at all.

    Args:
      path: file to create or replace; compressed with gzip when it ends in `.gz`.
    Raises:
      ValueError: for a time that is negative or not finite.
      OSError: when it cannot be written.
    """
    text = json.dumps({"traceEvents": _events(trace), "displayTimeUnit": "ms", "otherData": trace.facts}, allow_nan=False, separators=(",", ":"))
    data = text.encode()
    write_atomic(path, gzip.compress(data, mtime=0) if os.fspath(path).endswith(".gz") else data)


def _microseconds(seconds: float, what: str) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{what} is at {seconds} s; a trace holds times from 0 on.")
    return round(seconds * 1e6, 4)


def _events(trace: ChromeTrace) -> list[dict[str, Any]]:
    processes = {name: i for i, name in enumerate(dict.fromkeys([*(s.process for s in trace.slices), *(c.process for c in trace.counters)]))}
    tracks = {place: i for i, place in enumerate(dict.fromkeys((s.process, s.track) for s in trace.slices))}
    events: list[dict[str, Any]] = []
    for name, pid in processes.items():
        events += [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
                   {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}]  # fmt: skip
    for (process, track), tid in tracks.items():
        place = {"pid": processes[process], "tid": tid}
        events += [{"ph": "M", "name": "thread_name", **place, "args": {"name": track}},
                   {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}]  # fmt: skip
    timed: list[tuple[float, dict[str, Any]]] = []
    places = []
    for s in trace.slices:
        start, end = _microseconds(s.start, s.name), _microseconds(s.start + s.duration, s.name)
        place = {"pid": processes[s.process], "tid": tracks[s.process, s.track]}
        places.append((place, start, end))
        colour = {"cname": s.colour} if s.colour else {}
        timed.append((start, {"ph": "X", "name": s.name, "cat": s.category, "ts": start, "dur": round(end - start, 4), **place, **colour, "args": s.args}))
    for number, (source, target) in enumerate(trace.arrows):
        flow = {"name": "waits for", "cat": "dependency", "id": number}
        place, start, end = places[source]
        timed.append((start, {"ph": "s", **flow, "ts": start, **place}))  # binds to the slice that is open at `ts`
        place, start, end = places[target]
        timed.append((start, {"ph": "f", "bp": "e", **flow, "ts": start, **place}))
    for c in trace.counters:
        at = _microseconds(c.time, c.name)
        timed.append((at, {"ph": "C", "name": c.name, "ts": at, "pid": processes[c.process], "tid": 0, "args": c.values}))
    timed.sort(key=lambda pair: pair[0])  # stable: a slice comes before the arrows that bind to it
    return events + [event for _, event in timed]
