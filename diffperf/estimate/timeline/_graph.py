"""Tasks on streams of ranks and what each waits for, as index arrays in topological order.

Built once on the host, where it is checked; evaluated by `_longest_path` any number of times with other durations. A stream runs its
tasks one at a time in the order given, so stream order is a dependency like any other. Leaves out contention: a task takes its duration
whatever runs beside it (`diffperf.cost.overlap` has that).
"""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

FAN_IN = 4  # predecessors read per row of the scan; a task with more gets several rows
SHOWN = 8  # tasks of a cycle that an error names


class Task(NamedTuple):
    """One piece of work.

    Attributes:
      name: unique in its graph.
      kind: what it is counted as, such as "forward" or "reduce".
      rank: the device it runs on, 0 first.
      stream: the queue of that device in which it runs.
      after: names of tasks that must be done before it starts, besides the one in front of it in its stream.
    """

    name: str
    kind: str
    rank: int
    stream: str
    after: tuple[str, ...] = ()


class TaskGraphError(ValueError):
    """Tasks that no machine can run; the message names them."""


class TaskGraph(eqx.Module):
    """A checked task graph. Make one with `task_graph`.

    The scan works on rows in topological order: slot 0 is the start of the step, slot `i + 1` the end of row `i`, the last slot stands
    for "nothing". Rows are padded to a power of two, so graphs of like size share one compilation.

    Attributes:
      before: slots that a row waits for, shape (rows, FAN_IN).
      row: the row at which a task ends, shape (tasks,).
      sinks: tasks that nothing waits for, shape (sinks,).
      tasks: the tasks, as given.
      edges: pairs (earlier task, later task), stream order first for every later task, shape (edges, 2).
    """

    before: Int[Array, "rows fan_in"]
    row: Int[Array, " tasks"]
    sinks: Int[Array, " sinks"]
    tasks: tuple[Task, ...] = eqx.field(static=True)
    edges: "_Edges" = eqx.field(static=True)


class _Edges:
    """Host array in a static field: compared by identity."""

    def __init__(self, array: np.ndarray):
        self.array = array


def task_graph(tasks: Sequence[Task]) -> TaskGraph:
    """Checks tasks and puts them in topological order.

    Args:
      tasks: in the order in which each stream runs them; a task may wait for one that stands after it in the list.
    Raises:
      TaskGraphError: for no task at all, a rank that is no whole number from 0 on, a name given twice, an unknown predecessor, or tasks that wait for one
        another (a cycle, counting stream order), naming the tasks.
    """
    tasks = tuple(tasks)
    if not tasks:
        raise TaskGraphError("the task graph is empty; give at least one task.")
    index: dict[str, int] = {}
    for i, task in enumerate(tasks):
        _check_task(task, i)
        if task.name in index:
            raise TaskGraphError(f"task {task.name!r} is given twice; a name should be unique, as others wait for a task by its name.")
        index[task.name] = i
    waits = _waits(tasks, index)
    order = _topological_order(tasks, waits)
    before, row = _rows(waits, order)
    edges = np.array([(j, i) for i, some in enumerate(waits) for j in some], dtype=np.int64).reshape(-1, 2)
    sinks = np.setdiff1d(np.arange(len(tasks)), edges[:, 0])
    return TaskGraph(np.asarray(before), np.asarray(row), sinks.astype(np.int32), tasks, _Edges(edges))


def _check_task(task: Task, i: int) -> None:
    if not isinstance(task, Task):
        raise TaskGraphError(f"task {i} is {task!r}; give a list of Task(name, kind, rank, stream, after).")
    if not all(isinstance(text, str) for text in (task.name, task.kind, task.stream)):
        raise TaskGraphError(f"task {i} has the name {task.name!r}, kind {task.kind!r} and stream {task.stream!r}; these should be texts.")
    if not isinstance(task.rank, int | np.integer) or task.rank < 0:
        raise TaskGraphError(f"task {task.name!r} is on rank {task.rank!r}; a rank should be a whole number, 0 or more.")
    if not isinstance(task.after, Sequence) or isinstance(task.after, str):
        raise TaskGraphError(f"task {task.name!r} waits for {task.after!r}; `after` should be a tuple of names, such as ('load',), or () for none.")


def check_durations(graph: TaskGraph, durations: Array | np.ndarray, *, batch: bool = False, plain: bool = False) -> None:
    """Checks durations that belong to a graph, of traced ones only the shape.

    Args:
      batch: accept several sets of them.
      plain: refuse traced ones.
    Raises:
      TaskGraphError: for a number of durations that is not that of the tasks, and for one that is negative, missing (NaN) or infinite, naming the task.
    """
    count = len(graph.tasks)
    if durations.shape[-1:] != (count,):
        raise TaskGraphError(f"durations have shape {durations.shape}; the graph has {count} tasks and needs one for each.")
    if len(durations.shape) > 1 and not batch:
        raise TaskGraphError(f"durations have shape {durations.shape}, several for each of {count} tasks; take one set at a time, or jax.vmap.")
    if isinstance(durations, Tracer):
        if plain:
            raise TaskGraphError("the durations are traced; a critical path or a trace of it needs plain numbers. Take it outside of jit, grad and vmap.")
        return
    flat = np.asarray(durations).reshape(-1)
    bad = np.flatnonzero(~((flat >= 0) & np.isfinite(flat)))
    if bad.size:
        raise TaskGraphError(f"task {graph.tasks[int(bad[0]) % count].name!r} takes {flat[bad[0]]} s; a duration should be a number of seconds, 0 or more."
                             f"{f' ({bad.size} tasks are wrong.)' * (bad.size > 1)}")  # fmt: skip


def _waits(tasks: tuple[Task, ...], index: dict[str, int]) -> list[list[int]]:
    """Predecessors of every task, each once, the one of its stream first."""
    last: dict[tuple[int, str], int] = {}
    waits = []
    for i, task in enumerate(tasks):
        stream = (task.rank, task.stream)
        some = [last[stream]] if stream in last else []
        last[stream] = i
        for name in task.after:
            if name not in index:
                raise TaskGraphError(f"task {task.name!r} waits for {name!r}, which is not a task of the graph; add it or drop it from `after`.")
            if index[name] not in some:
                some.append(index[name])
        waits.append(some)
    return waits


def _topological_order(tasks: tuple[Task, ...], waits: list[list[int]]) -> list[int]:
    """Kahn's algorithm; ready tasks in the order in which they became ready."""
    missing = [len(some) for some in waits]
    followers: list[list[int]] = [[] for _ in waits]
    for i, some in enumerate(waits):
        for j in some:
            followers[j].append(i)
    order = [i for i, count in enumerate(missing) if count == 0]
    for i in order:  # grows while it is walked
        for j in followers[i]:
            missing[j] -= 1
            if missing[j] == 0:
                order.append(j)
    if len(order) < len(tasks):
        raise TaskGraphError(_describe_cycle(tasks, waits, {i for i, count in enumerate(missing) if count > 0}))
    return order


def _describe_cycle(tasks: tuple[Task, ...], waits: list[list[int]], stuck: set[int]) -> str:
    """Walks back from a task that never gets ready until a task comes again."""
    seen: dict[int, int] = {}
    path: list[int] = []
    at = min(stuck)
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = next(j for j in waits[at] if j in stuck)
    cycle = path[seen[at] :]
    named = [repr(tasks[i].name) for i in cycle[:SHOWN]]
    rest = f" and {len(cycle) - SHOWN} more" if len(cycle) > SHOWN else ""
    return (
        f"the task graph has a cycle, so none of these can start: {' waits for '.join(named)}{rest}, which waits for {named[0]}. "
        "A stream runs its tasks in the order given; change that order or drop a dependency."
    )


def _rows(waits: list[list[int]], order: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of at most FAN_IN slots; a wider join is a chain of rows of which only the last has the task's duration."""
    rows: list[list[int]] = []
    row = np.zeros(len(waits), np.int32)
    for i in order:
        slots = [int(row[j]) + 1 for j in waits[i]] or [0]
        while len(slots) > FAN_IN:
            rows.append(slots[:FAN_IN])
            slots = [len(rows), *slots[FAN_IN:]]
        row[i] = len(rows)
        rows.append(slots)
    size = max(64, 1 << (len(rows) - 1).bit_length())
    before = np.full((size, FAN_IN), size + 1, np.int32)
    for i, slots in enumerate(rows):
        before[i, : len(slots)] = slots
    before[len(rows) :, 0] = 0  # rows of padding end at the start of the step
    return before, row
