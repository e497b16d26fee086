"""Task graphs: their longest path, its gradient, transforms and relaxation, and graphs that cannot run."""

import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.estimate.timeline import Task, TaskGraphError, Timeline, finish_times, makespan, task_graph
from diffperf.estimate.timeline._longest_path import host_schedule


def chain(*tasks):
    """Tasks from (name, rank, stream, names it waits for)."""
    return task_graph([Task(name, "compute", rank, stream, tuple(after)) for name, rank, stream, after in tasks])


DIAMOND = chain(("a", 0, "s", ""), ("b", 0, "s", ""), ("c", 1, "s", "a"), ("d", 0, "s", "c"))  # a then b then d on one stream, c beside b


def test_a_diamond_by_hand():
    durations = jnp.array([1.0, 2.0, 5.0, 1.0])
    assert_allclose(finish_times(DIAMOND, durations), [1, 3, 6, 7])
    assert_allclose(Timeline(DIAMOND, durations).start, [0, 1, 1, 6])
    assert_allclose(jax.grad(lambda d: makespan(DIAMOND, d))(durations), [1, 0, 1, 1])
    assert_allclose(jax.grad(lambda d: makespan(DIAMOND, d))(jnp.array([1.0, 7.0, 5.0, 1.0])), [1, 1, 0, 1])


def test_a_stream_runs_one_task_at_a_time_in_the_order_given():
    graph = chain(("a", 0, "s", ""), ("b", 0, "s", ""), ("c", 0, "other", ""), ("d", 1, "s", ""))
    assert_allclose(finish_times(graph, jnp.array([1.0, 2.0, 4.0, 8.0])), [1, 3, 4, 8])


def test_ties_give_one_path():
    """b and c end together: d waits for the one of its own stream; e and f end last together: the first counts."""
    assert_allclose(jax.grad(lambda d: makespan(DIAMOND, d))(jnp.array([1.0, 5.0, 5.0, 1.0])), [1, 1, 0, 1])
    graph = chain(("e", 0, "s", ""), ("f", 1, "s", ""))
    assert_allclose(jax.grad(lambda d: makespan(graph, d))(jnp.ones(2)), [1, 0])


def test_nothing_takes_time():
    for temperature in (0.0, jnp.array(0.0), jnp.array(0.1)):
        value, slope = jax.value_and_grad(lambda d, t=temperature: makespan(DIAMOND, d, t))(jnp.zeros(4))
        assert value == 0 and np.all(np.isfinite(slope))


def test_a_wide_join():
    n = 37
    graph = task_graph([*(Task(f"t{i}", "compute", i, "s") for i in range(n)), Task("end", "compute", n, "s", tuple(f"t{i}" for i in range(n)))])
    durations = jnp.append(jnp.array(np.random.default_rng(0).permutation(n) + 1.0), 3.0)
    assert makespan(graph, durations) == n + 3
    slope = jax.grad(lambda d: makespan(graph, d))(durations)
    assert np.flatnonzero(slope).tolist() == [int(np.argmax(durations[:n])), n]


@st.composite
def graphs(draw):
    """Tasks on a few streams that wait for any earlier ones, shuffled so that the list is not in topological order across streams."""
    n = draw(st.sampled_from((1, 7, 20)))  # few sizes, few compilations
    streams = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    after = [draw(st.lists(st.integers(0, i - 1), max_size=7, unique=True)) if i else [] for i in range(n)]
    durations = draw(st.lists(st.floats(1e-6, 1e3), min_size=n, max_size=n))
    order = sorted(range(n), key=lambda i: (streams[i], i)) if draw(st.booleans()) else list(range(n))
    return [(i, streams[i], after[i], durations[i]) for i in order]


@settings(deadline=None, max_examples=25)
@given(graphs())
def test_against_a_recursion(tasks):
    graph = task_graph([Task(f"t{i}", "k", s, "s", tuple(f"t{j}" for j in after)) for i, s, after, _ in tasks])
    durations = jnp.array([d for *_, d in tasks])
    ends = {}
    for i, s, after, d in sorted(tasks):  # by number: what a task waits for has a smaller one
        front = max((j for j, other, *_ in tasks if other == s and j < i), default=None)
        ends[i] = d + max([ends[j] for j in after] + ([] if front is None else [ends[front]]), default=0.0)
    assert_allclose(finish_times(graph, durations), [ends[i] for i, *_ in tasks], rtol=1e-12)
    value, slope = jax.value_and_grad(lambda d: makespan(graph, d))(durations)
    assert value == pytest.approx(max(ends.values()))
    assert set(np.unique(slope)) <= {0.0, 1.0} and slope @ durations == pytest.approx(value)
    host = host_schedule(graph, durations)
    assert np.flatnonzero(slope).tolist() == sorted(host.critical.tolist())
    assert_allclose(host.finish, finish_times(graph, durations), rtol=1e-12)
    assert_allclose(host.start[host.critical[1:]], host.finish[host.critical[:-1]])


RANDOM = task_graph([Task(f"t{i}", "k", i % 3, "s", tuple(f"t{j}" for j in {i // 2, i // 3} if j < i)) for i in range(30)])


def test_transforms_agree():
    durations = jnp.array(np.random.default_rng(1).random((4, 30)))
    slope = jax.grad(lambda d: makespan(RANDOM, d))
    assert_allclose(jax.vmap(lambda d: makespan(RANDOM, d))(durations), [makespan(RANDOM, d) for d in durations])
    assert_allclose(jax.jit(jax.vmap(slope))(durations), [slope(d) for d in durations])
    value, change = jax.jvp(lambda d: makespan(RANDOM, d), (durations[0],), (durations[1],))
    assert change == pytest.approx(slope(durations[0]) @ durations[1])
    jacobian = jax.jacrev(lambda d: finish_times(RANDOM, d))(durations[0])
    assert_allclose(jacobian, jax.jacfwd(lambda d: finish_times(RANDOM, d))(durations[0]))
    assert_allclose(jacobian @ durations[0], finish_times(RANDOM, durations[0]))  # all times are sums of durations
    assert not np.any(jax.hessian(lambda d: makespan(RANDOM, d))(durations[0]))


def test_float32():
    with jax.enable_x64(False):
        durations = jnp.array(np.random.default_rng(1).random(30), jnp.float32)
        value, slope = jax.value_and_grad(lambda d: makespan(RANDOM, d))(durations)
        assert value.dtype == slope.dtype == jnp.float32
        assert value == pytest.approx(host_schedule(RANDOM, durations).finish.max(), rel=1e-6)


def number_of_paths(graph):
    into = defaultdict(list)
    for j, i in graph.edges.array:
        into[i].append(j)
    count = lambda i: sum(map(count, into[i])) if into[i] else 1
    return sum(count(i) for i in np.asarray(graph.sinks))


def test_relaxed_makespan_is_bounded_and_has_its_own_gradient():
    durations = jnp.array(np.random.default_rng(2).random(30))
    exact, tau = makespan(RANDOM, durations), jnp.mean(durations)
    relaxed = jax.jit(lambda d, t: makespan(RANDOM, d, t))
    assert relaxed(durations, 0.0) == exact
    paths = number_of_paths(RANDOM)
    before = exact
    for temperature in (1e-3, 0.03, 0.3, 3.0):
        value = relaxed(durations, temperature)
        assert before <= value <= exact + temperature * tau * math.log(paths) * (1 + 1e-9)
        assert relaxed(1e3 * durations, temperature) == pytest.approx(1e3 * value)  # in milliseconds
        before = value
    assert relaxed(jnp.zeros(30) + 1e-9, 1e9) == pytest.approx(math.log(paths), rel=1e-6)  # all paths count alike
    slope, step = jax.grad(relaxed)(durations, 0.2), 1e-6
    numeric = [(relaxed(durations + step * e, 0.2) - relaxed(durations - step * e, 0.2)) / (2 * step) for e in jnp.eye(30)]
    assert_allclose(slope, numeric, atol=1e-7)
    assert_allclose(jax.grad(relaxed)(durations, 1e-4), jax.grad(lambda d: makespan(RANDOM, d))(durations), atol=1e-3)


# what cannot run


def test_a_cycle_is_named():
    with pytest.raises(TaskGraphError, match="cycle.*'b' waits for 'c', which waits for 'b'"):
        chain(("a", 0, "s", ""), ("b", 1, "s", "ac"), ("c", 2, "s", "b"), ("d", 3, "s", "c"))
    with pytest.raises(TaskGraphError, match="stream runs its tasks in the order given"):
        chain(("a", 0, "s", "b"), ("b", 0, "s", ""))
    with pytest.raises(TaskGraphError, match="cycle"):
        chain(("a", 0, "s", "a"))
    with pytest.raises(TaskGraphError, match="and 42 more"):
        task_graph([Task(f"t{i}", "k", i, "s", (f"t{(i + 1) % 50}",)) for i in range(50)])


@pytest.mark.parametrize("tasks, parts", [
    ([], "empty"),
    ([Task("a", "k", 0, "s"), Task("a", "k", 1, "s")], "'a' is given twice"),
    ([Task("a", "k", 0, "s", ("b",))], "'a' waits for 'b', which is not a task"),
])  # fmt: skip
def test_bad_tasks(tasks, parts):
    with pytest.raises(TaskGraphError, match=parts):
        task_graph(tasks)


@pytest.mark.parametrize("durations, parts", [
    ([1, 1, -2.5, 1], "'c' takes -2.5 s"),
    ([1, math.nan, 1, -1], r"'b' takes nan s.*2 tasks are wrong"),
    ([1, 1, 1, math.inf], "'d' takes inf s"),
    ([1, 1, 1], r"shape \(3,\); the graph has 4 tasks"),
])  # fmt: skip
def test_bad_durations(durations, parts):
    with pytest.raises(TaskGraphError, match=parts):
        Timeline(DIAMOND, jnp.array(durations, float))
