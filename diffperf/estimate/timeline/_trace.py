"""A timeline as a Chrome trace: one process per rank, one track per stream, arrows between ranks, memory per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...io import ChromeTrace, TraceCounter, TraceSlice
from ._graph import TaskGraph, check_durations
from ._longest_path import host_schedule

if TYPE_CHECKING:
    from ._timeline import Timeline

COLOURS = {
    # kind -> reserved colour name of the format, for chrome://tracing; Perfetto's colours follow the name of a slice without its numbers
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "weight": "rail_response",
    "recompute": "rail_idle",
    "vocabulary": "rail_animation",
    "tensor": "thread_state_iowait",
    "context": "thread_state_unknown",
    "expert": "rail_load",
    "pipeline": "thread_state_uninterruptible",
    "data": "cq_build_running",
    "optimizer": "good",
    "offload": "bad",
    "overhead": "grey",
    "jitter": "black",
}

_SHORTEST_S = 1e-9  # Perfetto's clock


def chrome_trace(timeline: Timeline) -> ChromeTrace:
    """Slices, arrows and counters of a timeline; `critical` tasks carry that word in category and args."""
    graph = timeline.graph
    check_durations(graph, timeline.durations, plain=True)
    durations = np.asarray(timeline.durations, float)
    starts, ends, path = host_schedule(graph, durations)
    critical = set(path.tolist())
    order = sorted(range(len(graph.tasks)), key=lambda i: graph.tasks[i].stream != "compute")  # tracks stand in the order of their first slice
    place = {i: at for at, i in enumerate(order)}
    slices = []
    for i in order:
        task = graph.tasks[i]
        mark = i in critical
        category = f"{task.kind},critical" if mark else task.kind
        facts = {"kind": task.kind, "rank": task.rank, "critical_path": mark}
        name = task.name.removesuffix(f" @{task.rank}")
        slices.append(TraceSlice(f"rank {task.rank}", task.stream, name, category, float(starts[i]), float(durations[i]), COLOURS.get(task.kind, ""), facts))
    arrows = [(place[a], place[b]) for a, b in _arrows(graph, durations, starts, ends)]
    marks = [TraceSlice("critical path", graph.tasks[i].kind, slices[place[i]].name, "critical", float(starts[i]), float(durations[i]), "",
                   {"rank": graph.tasks[i].rank}) for i in path if durations[i] > 0]  # fmt: skip
    facts = {"made_by": "diffperf", "step_time_s": float(ends.max())}
    if timeline.closed_form is not None:
        facts["closed_form_step_time_s"] = float(timeline.closed_form)
    return ChromeTrace(slices + marks, arrows, _memory(timeline, starts, ends), facts)


def _arrows(graph: TaskGraph, durations: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of tasks on different ranks of which the second waits for the first.

    An arrow binds to whatever bar is open at its time, so one from or to a task too short to see would stick to a neighbour: it starts at what that task waited
    for longest, and ends at what follows it first.
    """
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for a, b in graph.edges.array.tolist():
        before.setdefault(b, []).append(a)
        after.setdefault(a, []).append(b)
    seen = durations >= _SHORTEST_S
    pairs: dict[tuple[int, int], None] = {}
    for a, b in graph.edges.array.tolist():
        if graph.tasks[a].rank == graph.tasks[b].rank:
            continue
        source: int | None = a
        target: int | None = b
        while source is not None and not seen[source]:
            source = max(before.get(source, ()), key=ends.__getitem__, default=None)
        while target is not None and not seen[target]:
            target = min(after.get(target, ()), key=starts.__getitem__, default=None)
        if source is not None and target is not None and graph.tasks[source].rank != graph.tasks[target].rank:
            pairs[source, target] = None
    return list(pairs)


def _memory(timeline: Timeline, starts: np.ndarray, ends: np.ndarray) -> list[TraceCounter]:
    """Memory of every rank whenever it changes."""
    if timeline.memory is None:
        return []
    base, each = (np.asarray(x, float).tolist() for x in (timeline.memory.base, timeline.memory.micro_batch))
    counters = []
    for rank in range(len(base)):
        spans = timeline.memory.spans[timeline.memory.spans[:, 0] == rank]
        changes = sorted([(starts[first], 1) for _, first, _ in spans] + [(ends[last], -1) for _, _, last in spans])
        held = 0
        levels = {0.0: 0}
        for time, change in changes:
            held += change
            levels[float(time)] = held
        counters += [TraceCounter(f"rank {rank}", "memory (GB)", time, {"held": round((base[rank] + n * each[rank]) / 1e9, 4)}) for time, n in levels.items()]
    return counters
