"""Collects tasks with the class of their cost, so that thousands of durations are one gather from a short table."""

from collections.abc import Hashable, Iterable

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from ._graph import Task, TaskGraph, task_graph


class TaskList:
    """Tasks in the order in which streams run them, each with a cost class and a share of it.

    A task may wait for an event, any hashable that is not a text, of which only later is said which tasks bring it about.
    """

    def __init__(self) -> None:
        self._tasks: list[tuple[str, str, int, str]] = []
        self._after: list[tuple[Hashable, ...]] = []
        self._cost: list[str] = []
        self._share: list[float] = []
        self._events: dict[Hashable, tuple[str, ...]] = {}

    def add(self, name: str, kind: str, rank: int, stream: str, cost: str, after: Iterable[Hashable] = (), share: float = 1.0) -> str:
        """Appends a task that takes `share` of the cost class `cost`; returns its name."""
        self._tasks.append((name, kind, rank, stream))
        self._after.append(tuple(after))
        self._cost.append(cost)
        self._share.append(share)
        return name

    def __len__(self) -> int:
        return len(self._tasks)

    def name(self, i: int) -> str:
        return self._tasks[i][0]

    def event(self, event: Hashable, tasks: Iterable[str]) -> None:
        """Says after which tasks an event has happened."""
        self._events[event] = tuple(tasks)

    def graph(self) -> TaskGraph:
        names = lambda after: tuple(name for one in after for name in ((one,) if isinstance(one, str) else self._events[one]))
        return task_graph([Task(*task, names(after)) for task, after in zip(self._tasks, self._after, strict=True)])

    def durations(self, costs: dict[str, Float[Array, ""]]) -> Float[Array, " tasks"]:
        """Durations under a table of costs; differentiable in it. [s]"""
        place = {name: i for i, name in enumerate(costs)}
        which, share = np.array([place[name] for name in self._cost]), np.array(self._share)
        if any(isinstance(cost, Tracer) for cost in costs.values()):
            return jnp.stack(list(costs.values()))[which] * share
        return jnp.asarray(np.array([float(cost) for cost in costs.values()])[which] * share, float)  # plain numbers need no compilation
