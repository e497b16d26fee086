"""When each task ends: the longest path to it, as one scan over the topological order, differentiable in the durations.

Exact: `finish = duration + max(finish of predecessors)`. The derivative of a finish time is 1 for every task on the critical path to it
and 0 for all others. At a tie the path goes through the predecessor named first (the one of its own stream), and of tasks that end last
together through the first in the graph: one element of the subdifferential, not their mean, so the gradient is always one path.

Relaxed: the maximum becomes `tau * logsumexp(. / tau)`, so the makespan becomes `tau log(sum over all paths of exp(length / tau))`, with
`tau` = temperature x mean duration. It errs high, by at most `tau log(number of paths)`, and every path gets a part of the gradient.
A graph has very many paths: keep the temperature below about 0.1. It has reverse-mode derivatives only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ._graph import TaskGraph, check_durations


def finish_times(graph: TaskGraph, durations: Real[ArrayLike, " tasks"], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, " tasks"]:
    """When each task ends, counted from the start of the step. [s]

    Args:
      durations: at least 0 and finite, in the order of `graph.tasks`; traced ones are not checked. [s]
      temperature: 0 for exact, also when traced; above it relaxed. [1]
    Raises:
      TaskGraphError: for a number of durations that is not that of the tasks, and for a plain one that is negative or not finite, naming the task.
    """
    durations = si(durations)
    check_durations(graph, durations)
    by_row = jnp.zeros(graph.before.shape[0], durations.dtype).at[graph.row].set(durations)
    before = jnp.asarray(graph.before)
    if isinstance(temperature, (int, float)) and temperature == 0:
        return _exact(before, by_row)[graph.row]
    tau = si(temperature) * jnp.mean(durations)
    safe = jnp.where(tau > 0, tau, 1.0)
    relaxed = safe * _relaxed(before, by_row / safe)
    return jnp.where(tau > 0, relaxed, _exact(before, by_row))[graph.row]


def makespan(graph: TaskGraph, durations: Real[ArrayLike, " tasks"], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, ""]:
    """When the last task ends; its gradient in `durations` is the critical path, 1 on it and 0 off it. Arguments as `finish_times`. [s]"""
    durations = si(durations)
    ends = finish_times(graph, durations, temperature)[graph.sinks]
    last = ends[jnp.argmax(ends)]  # of equals the first, where the gradient of max would share between them
    if isinstance(temperature, (int, float)) and temperature == 0:
        return last
    tau = si(temperature) * jnp.mean(durations)
    safe = jnp.where(tau > 0, tau, 1.0)
    return jnp.where(tau > 0, safe * jax.nn.logsumexp(ends / safe), last)


class Schedule(NamedTuple):
    """What runs when, on the host.

    Attributes:
      start, finish: of each task, shape (tasks,). [s]
      critical: indices of the tasks on the critical path, first to last; each starts when the one before it ends.
    """

    start: np.ndarray
    finish: np.ndarray
    critical: np.ndarray


def host_schedule(graph: TaskGraph, durations: Real[ArrayLike, " tasks"]) -> Schedule:
    """The same longest path in NumPy's float64, for files and tables: in float32 the bars of a long step would overlap."""
    lengths = np.asarray(durations, float).tolist()
    before = np.asarray(graph.before).tolist()
    row = np.asarray(graph.row)
    task_of = dict(zip(row.tolist(), range(len(lengths)), strict=True))
    nothing = len(before) + 1
    ends = [0.0]
    via = [0]  # the slot that decides when a row starts
    for i, slots in enumerate(before):
        last = max((slot for slot in slots if slot != nothing), key=ends.__getitem__)  # the first of equals, as argmax
        via.append(last)
        ends.append(ends[last] + (lengths[task_of[i]] if i in task_of else 0.0))
    slots = np.array(via)[row + 1]
    start, finish = np.array(ends)[slots], np.array(ends)[row + 1]
    sinks = np.asarray(graph.sinks)
    at = int(row[sinks[np.argmax(finish[sinks])]]) + 1
    path = []
    while at:
        if at - 1 in task_of:
            path.append(task_of[at - 1])
        at = via[at]
    return Schedule(start, finish, np.array(path[::-1]))


def _scan(before, by_row, join):
    """Slots after all rows: 0 for the start, the end of each row, -inf for "nothing"."""
    rows = by_row.shape[0]
    slots = jnp.zeros(rows + 2, by_row.dtype).at[rows + 1].set(-jnp.inf)

    def step(slots, row):
        i, some, duration = row
        end = join(slots[some]) + duration
        return lax.dynamic_update_index_in_dim(slots, end, i + 1, 0), None

    return lax.scan(step, slots, (jnp.arange(rows), before, by_row))[0]


@jax.custom_jvp
@jax.jit
def _exact(before, by_row):
    return _scan(before, by_row, jnp.max)[1:-1]


@_exact.defjvp
def _exact_jvp(primals, tangents):
    before, by_row = primals
    ends = _exact(before, by_row)
    return ends, _along_path(before, ends, tangents[1])


@jax.jit
def _along_path(before, ends, values):
    """Sum of `values` of the rows on the critical path to each row, by pointer doubling; linear in `values`."""
    rows = values.shape[0]
    slots = jnp.concatenate([jnp.zeros(1), ends, jnp.full(1, -jnp.inf)])
    critical = jnp.take_along_axis(before, jnp.argmax(slots[before], axis=1)[:, None], axis=1)[:, 0]
    pointer = jnp.concatenate([jnp.zeros(1, critical.dtype), critical])
    total = jnp.concatenate([jnp.zeros(1, values.dtype), values])
    for _ in range(rows.bit_length()):
        total, pointer = total + total[pointer], pointer[pointer]
    return total[1:]


@jax.custom_vjp
@jax.jit
def _relaxed(before, by_row):
    """Ends with logsumexp for the maximum; durations in units of tau."""
    return _scan(before, by_row, jax.nn.logsumexp)[1:-1]


def _relaxed_forward(before, by_row):
    ends = _relaxed(before, by_row)
    return ends, (before, ends)


@jax.jit
def _relaxed_backward(kept, cotangents):
    """From the last row to the first, each passes its cotangent on to what it waits for, by softmax. Written out, as the transposed scan that JAX
    derives copies all slots in every row, sixty times the time for 10,000 tasks."""
    before, ends = kept
    slots = jnp.concatenate([jnp.zeros(1), ends, jnp.full(1, -jnp.inf)])
    weights = jax.nn.softmax(slots[before], axis=1).astype(cotangents.dtype)

    def step(held, row):
        i, some, weight = row
        own = held[i + 1]
        return held.at[some].add(weight * own), None

    held = jnp.concatenate([jnp.zeros(1, cotangents.dtype), cotangents, jnp.zeros(1, cotangents.dtype)])
    return None, lax.scan(step, held, (jnp.arange(len(before)), before, weights), reverse=True)[0][1:-1]


_relaxed.defvjp(_relaxed_forward, _relaxed_backward)
