"""A task graph with durations: when everything runs, how long the whole takes, and which tasks decide it."""

import os
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Real

from ..._arrays import si
from ._graph import TaskGraph, check_durations
from ._longest_path import finish_times, host_schedule, makespan


class Memory(eqx.Module):
    """Memory over a step.

    Attributes:
      base: bytes that a rank holds all the time, shape (ranks,). [B]
      micro_batch: what one micro-batch adds to a rank's chunk, shape (ranks,). [B]
      spans: rank, task that begins to hold it, task that ends it, shape (spans, 3).
    """

    base: Float[Array, " ranks"]
    micro_batch: Float[Array, " ranks"]
    spans: Int[np.ndarray, "spans three"]


class Timeline(eqx.Module):
    """Tasks and how long each takes.

    Attributes:
      graph: the tasks and what each waits for.
      durations: in the order of `graph.tasks`, shape (tasks,). [s]
      memory: memory over the step, or None.
      closed_form: step time of `train_step` for the same step, or None. [s]
    """

    graph: TaskGraph
    durations: Float[Array, " tasks"]
    memory: Memory | None
    closed_form: Float[Array, ""] | None

    def __init__(self, graph: TaskGraph, durations: Real[ArrayLike, " tasks"], memory: Memory | None = None, closed_form: Float[Array, ""] | None = None):
        """Raises:
        TaskGraphError: for a number of durations that is not that of the tasks, and, when they are plain numbers, for a negative or missing
          (NaN) or infinite one, naming the task.
        """
        durations = si(durations)
        check_durations(graph, durations, batch=True)
        self.graph, self.durations, self.memory, self.closed_form = graph, durations, memory, closed_form

    @property
    def makespan(self) -> Float[Array, ""]:
        """When the last task ends; its gradient in `durations` is 1 on the critical path and 0 off it. [s]"""
        return makespan(self.graph, self.durations)

    @property
    def finish(self) -> Float[Array, " tasks"]:
        """When each task ends. [s]"""
        return finish_times(self.graph, self.durations)

    @property
    def start(self) -> Float[Array, " tasks"]:
        """When each task starts. [s]"""
        return self.finish - self.durations

    def write_trace(self, path: str | os.PathLike) -> None:
        """Writes the timeline as a Chrome trace, which Perfetto (https://ui.perfetto.dev) opens: one process per rank, one track per stream,
        arrows where one rank waits for another, the critical path marked, and memory as a counter.

        Args:
          path: file to create or replace; compressed when it ends in `.gz`.
        Raises:
          OSError: when it cannot be written; nothing is left half-written.
          TaskGraphError: when the durations are traced, or there are several for a task.
        """
        from ...io import write_chrome_trace
        from ._trace import chrome_trace

        write_chrome_trace(path, chrome_trace(self))


class PathShare(NamedTuple):
    """Time of one kind of task on the critical path.

    Attributes:
      kind: of the tasks.
      time: on the critical path. [s]
      share: of the makespan. [1]
      tasks: how many. [1]
    """

    kind: str
    time: float
    share: float
    tasks: int


def critical_path(timeline: Timeline) -> list[PathShare]:
    """What the step waits for: the time of each kind of task on the critical path, longest first; the times add up to the makespan.

    A kind that is not here, or a task off the path, can get a little faster without any gain.

    Raises:
      TaskGraphError: when the durations are traced, or there are several for a task.
    """
    check_durations(timeline.graph, timeline.durations, plain=True)
    durations = np.asarray(timeline.durations)
    found: dict[str, list[float]] = {}
    for i in host_schedule(timeline.graph, durations).critical:
        found.setdefault(timeline.graph.tasks[i].kind, []).append(float(durations[i]))
    total = sum(map(sum, found.values()))
    rows = [PathShare(kind, sum(times), sum(times) / total if total else 0.0, sum(t > 0 for t in times)) for kind, times in found.items()]
    return sorted((row for row in rows if row.tasks), key=lambda row: -row.time)
