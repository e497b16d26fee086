"""Task graphs, their longest path, pipeline schedules as tasks, the timeline of a step, and its trace."""

import gzip
import itertools
import json
import math
from collections import defaultdict

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.estimate.timeline import Task, TaskGraphError, Timeline, critical_path, finish_times, makespan, pipeline_timeline, step_timeline, task_graph
from diffperf.estimate.timeline._longest_path import host_schedule
from diffperf.estimate.timeline._step import step_numbers
from diffperf.estimate.timeline._trace import chrome_trace
from diffperf.hardware import load_system
from diffperf.io import ChromeTrace, TraceCounter, TraceSlice, write_chrome_trace
from diffperf.parallel import PlanError, make_plan
from diffperf.parallel._memory import stage_memory
from diffperf.parallel._order import ORDERS, pipeline_order, splits_backward
from diffperf.parallel._schedule import bubble_slots
from diffperf.workload import transformer

DENSE = transformer(hidden=2048, layers=8, num_heads=16, num_kv_heads=8, ffn_hidden=8192, vocab=32000, seq_len=4096)
ROUTED = {"count": 8, "num_experts": 8, "experts_per_token": 2, "expert_hidden": 4096}
EXPERTS = transformer(hidden=2048, layers=[ROUTED], num_heads=16, vocab=32000, seq_len=4096)
SYSTEM = load_system("h100_sxm", num_devices=64, fitted=False)
def step_times(*args):
    return step_numbers(*args)[0]


def changed(tree, **leaves):
    """The pytree with other numbers."""
    return eqx.tree_at(lambda t: [getattr(t, name) for name in leaves], tree, [jnp.asarray(value, float) for value in leaves.values()])


def chain(*tasks):
    """Tasks from (name, rank, stream, names it waits for)."""
    return task_graph([Task(name, "compute", rank, stream, tuple(after)) for name, rank, stream, after in tasks])


DIAMOND = chain(("a", 0, "s", ""), ("b", 0, "s", ""), ("c", 1, "s", "a"), ("d", 0, "s", "c"))  # a then b then d on one stream, c beside b


# longest path


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


# schedules


def simulate(order, forward, backward, weight):
    """Ends of the passes of every rank and the makespan, by moving each rank on until its next pass has no input. Independent of the task graph.

    A backward pass that no "W" follows for good is whole; a pair runs as one.
    """
    split = any(one.kind == "W" for passes in order for one in passes)
    time = {"F": forward, "B": backward + (0 if split else weight), "W": weight}
    last = max(one.position for passes in order for one in passes)
    ends, clock, place = {}, [0.0] * len(order), [0] * len(order)
    left = sum(map(len, order))
    while left:
        moved = False
        for rank, passes in enumerate(order):
            while place[rank] < len(passes):
                one = passes[place[rank]]
                together = passes[place[rank] : place[rank] + 3] if one.paired else (one,)
                needs = [("F", x.batch, x.position - 1) for x in together if x.kind == "F" and x.position]
                needs += [("B", x.batch, x.position + 1) if x.position < last else ("F", x.batch, x.position) for x in together if x.kind == "B"]
                if any(need not in ends for need in needs):
                    break
                clock[rank] = max([clock[rank], *(ends[need] for need in needs)]) + sum(time[x.kind] for x in together)
                for x in together:
                    ends[x.kind, x.batch, x.position] = clock[rank]
                place[rank] += len(together)
                left -= len(together)
                moved = True
        assert moved, "deadlock"
    return max(clock)


GRID = [("gpipe", 4, 8, 1), ("gpipe", 2, 4, 3), ("1f1b", 1, 4, 1), ("1f1b", 4, 3, 1), ("1f1b", 8, 16, 1), ("1f1b", 4, 8, 2), ("1f1b", 2, 6, 4),
        ("zb-h1", 2, 5, 1), ("zb-h1", 4, 4, 1), ("zb-h1", 8, 16, 1), ("zb-v", 2, 3, 2), ("zb-v", 4, 12, 2), ("zb-v", 4, 4, 2), ("dualpipe", 2, 6, 1),
        ("dualpipe", 4, 8, 1), ("dualpipe", 8, 20, 1)]  # fmt: skip


@pytest.mark.parametrize("schedule, p, m, v", GRID)
def test_schedules_run_every_pass_once_and_as_a_simulation_does(schedule, p, m, v):
    order = pipeline_order(schedule, p, m, v)
    chunks = 2 if schedule == "dualpipe" else v
    for rank, passes in enumerate(order):
        at = {(x.kind, x.batch, x.chunk): i for i, x in enumerate(passes)}
        kinds = "FBW" if splits_backward(schedule) else "FB"
        assert len(at) == len(passes) == len(kinds) * m * v
        keys = {(x.batch, x.chunk) for x in passes}
        assert all(at["F", *key] < at["B", *key] for key in keys)
        if "W" in kinds:
            assert all(at["B", *key] < at["W", *key] for key in keys)
        if schedule == "dualpipe":
            assert {x.position for x in passes} == ({rank, p - 1 - rank})
        assert len({x.chunk for x in passes}) == chunks
    for forward, backward, weight in ((1.0, 1.0, 1.0), (1.0, 1.7, 0.8)):
        plan = dict(stages=p, micro_batches=m, virtual_stages=v, forward=forward, backward=backward, weight=weight)
        timeline = pipeline_timeline(schedule, **plan)
        assert timeline.makespan == pytest.approx(simulate(order, forward / v, backward / v, weight / v), rel=1e-12)


@pytest.mark.parametrize("name, schedule, p, m, v", [
    ("1f1b", "gpipe", 8, 8, 1), ("1f1b", "1f1b", 8, 24, 1), ("1f1b", "1f1b", 8, 16, 2), ("zero-bubble", "zb-h1", 8, 12, 1), ("zero-bubble", "zb-v", 8, 16, 2),
    ("dualpipe", "dualpipe", 8, 16, 1),
])  # fmt: skip
@pytest.mark.parametrize("w", [1 / 3, 0.22])
def test_closed_forms_are_the_bubbles_of_the_orders(name, schedule, p, m, v, w):
    plan = make_plan(global_batch_size=m, pipeline_parallel=p, virtual_stages=v, schedule=name)
    steps = simulate(pipeline_order(schedule, p, m, v), (1 - w) / 2 / v, (1 - w) / 2 / v, w / v)
    assert_allclose(bubble_slots(plan, w), steps - m, rtol=1e-9)


def test_1f1b_bubble_for_any_ratio():
    for forward, backward in ((1.0, 3.0), (2.0, 1.0)):
        assert simulate(pipeline_order("1f1b", 4, 12, 1), forward, backward, 0.0) == pytest.approx((12 + 3) * (forward + backward))


def greedy_zero_bubble(p, m, limit):
    """A rank takes the first that can run of: input gradient, forward pass with at most `limit` micro-batches in memory, weight gradient; all take 1."""
    done, stored, waiting = {}, [0] * p, [[] for _ in range(p)]
    next_f, next_b, now = [0] * p, [0] * p, 0
    while any(next_b[r] < m or waiting[r] for r in range(p)):
        ready = lambda key, now=now: done.get(key, math.inf) <= now
        chosen = []
        for r in range(p):
            if next_b[r] < m and ready(("B", next_b[r], r + 1) if r < p - 1 else ("F", next_b[r], r)):
                chosen.append((r, "B"))
            elif next_f[r] < m and stored[r] < limit and (r == 0 or ready(("F", next_f[r], r - 1))):
                chosen.append((r, "F"))
            elif waiting[r]:
                chosen.append((r, "W"))
        now += 1
        for r, kind in chosen:
            if kind == "W":
                waiting[r].pop(0)
                stored[r] -= 1
                continue
            count = next_f if kind == "F" else next_b
            done[kind, count[r], r] = now
            if kind == "B":
                waiting[r].append(count[r])
            else:
                stored[r] += 1
            count[r] += 1
    return now


def test_zb_h1_is_as_good_as_a_greedy_schedule_with_its_memory():
    """Found by rules in place of an order: the same memory (p micro-batches on every rank) allows nothing better."""
    for p, m in ((2, 6), (4, 8), (6, 12)):
        assert simulate(pipeline_order("zb-h1", p, m), 1, 1, 1) <= greedy_zero_bubble(p, m, p)


@pytest.mark.parametrize("schedule, p, m, v, parts", [
    ("zigzag", 2, 4, 1, "gpipe"), ("zb-h1", 2, 4, 2, "ZB-V"), ("zb-v", 2, 4, 1, "two chunks"), ("dualpipe", 4, 7, 1, "even"),
    ("dualpipe", 4, 6, 1, "two micro-batches"), ("dualpipe", 4, 8, 2, "virtual_stages is 2"), ("1f1b", 4, 6, 2, "multiple of the 4"),
    ("1f1b", 4, 0, 1, "at least 1"),
])  # fmt: skip
def test_orders_that_do_not_exist(schedule, p, m, v, parts):
    with pytest.raises(PlanError, match=parts):
        pipeline_order(schedule, p, m, v)


def test_a_transfer_delays_the_receiver():
    """GPipe: each of the p - 1 steps up and down waits for one transfer."""
    words = dict(stages=4, micro_batches=6, forward=1.0, backward=2.0)
    assert pipeline_timeline("gpipe", **words, send=0.25).makespan == pytest.approx((6 + 3) * 3 + 2 * 3 * 0.25)


# a step

LAYOUTS = {
    "one device": (DENSE, dict(global_batch_size=4)),
    "tensor": (DENSE, dict(global_batch_size=8, tensor_parallel=4)),
    "1f1b": (DENSE, dict(global_batch_size=8, pipeline_parallel=4, tensor_parallel=2)),
    "interleaved": (DENSE, dict(global_batch_size=8, pipeline_parallel=4, virtual_stages=2, recompute="full")),
    "zb-h1": (DENSE, dict(global_batch_size=8, pipeline_parallel=4, schedule="zero-bubble")),
    "zb-v": (DENSE, dict(global_batch_size=8, pipeline_parallel=4, schedule="zero-bubble", virtual_stages=2)),
    "dualpipe": (DENSE, dict(global_batch_size=16, pipeline_parallel=4, schedule="dualpipe", data_parallel=2)),
    "fsdp": (DENSE, dict(global_batch_size=32, data_parallel=8, zero_stage=3)),
    "hybrid": (DENSE, dict(global_batch_size=32, data_parallel=8, zero_stage=3, shard_group=4)),
    "fsdp in a pipeline": (DENSE, dict(global_batch_size=32, data_parallel=4, zero_stage=3, pipeline_parallel=2)),
    "zero 2": (DENSE, dict(global_batch_size=32, data_parallel=8, zero_stage=2)),
    "ring": (DENSE, dict(global_batch_size=8, context_parallel=4, tensor_parallel=2)),
    "all-to-all": (DENSE, dict(global_batch_size=8, context_parallel=4, context_mode="all-to-all")),
    "experts": (EXPERTS, dict(global_batch_size=32, data_parallel=8, expert_parallel=8)),
    "experts and ring": (EXPERTS, dict(global_batch_size=8, data_parallel=4, context_parallel=2, expert_parallel=8)),
    "offload": (DENSE, dict(global_batch_size=8, activation_offload=0.5, optimizer_offload=1.0)),
}
COMPUTE = ("forward", "backward", "weight", "recompute", "vocabulary")


@pytest.fixture(scope="module")
def steps(stack):
    """Timeline and estimate of every layout."""
    done = {}

    def step(name):
        if name not in done:
            model, words = LAYOUTS[name]
            plan = make_plan(**words)
            done[name] = step_timeline(model, SYSTEM, plan, stack), step_numbers(model, SYSTEM, plan, stack)[1], plan
        return done[name]

    return step


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_does_the_work_that_train_step_charges(steps, name):
    """Compute, and every transfer that blocks and that the plan has, add up to the parts of the breakdown."""
    timeline, estimate, plan = steps(name)
    b = estimate.breakdown
    by = defaultdict(float)
    for task, duration in zip(timeline.graph.tasks, np.asarray(timeline.durations), strict=True):
        by[task.rank, task.kind if "beside" not in task.name else f"{task.kind} beside"] += duration
    rank = int(plan.pipeline_parallel) // 2
    compute = sum(by[rank, kind] for kind in COMPUTE)
    assert_allclose(compute, b.matmul + b.attention + b.elementwise + b.recompute + b.vocabulary + b.launch, rtol=1e-9)
    for kind in ("tensor", "context", "expert", "optimizer", "offload", "overhead", "jitter"):
        at = 0 if kind in ("overhead", "jitter") else rank
        blocking = sum(d for task, d in zip(timeline.graph.tasks, np.asarray(timeline.durations), strict=True)
                       if task.rank == at and task.kind == kind and not any(word in task.name for word in ("beside", "dispatch", "combine")))  # fmt: skip
        assert_allclose(blocking, getattr(b, kind), rtol=1e-9, atol=1e-15)
    if plan.pipeline_parallel > 2 and plan.virtual_stages == 1:  # a rank in the middle sends both ways
        assert by[rank, "pipeline"] == pytest.approx(float(b.pipeline))
    for r in range(int(plan.pipeline_parallel)):
        assert timeline.makespan >= sum(by[r, kind] for kind in (*COMPUTE, "tensor", "context", "optimizer"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_timeline_is_near_the_closed_form(steps, name):
    """What they differ in is said in the module: mostly exposed data-parallel traffic, hidden transfers, the fitted factor on the bubble."""
    timeline, estimate, _ = steps(name)
    assert timeline.closed_form == estimate.step_time
    assert_allclose(timeline.makespan, estimate.step_time, rtol=1e-9 if name in ("one device", "tensor", "offload") else 0.12)


def test_1f1b_is_the_closed_form_where_nothing_is_hidden(stack):
    """Without hidden transfers and fitted bubble, up to the transfers of end stages."""
    plain = changed(stack, bubble_factor=1.0, pipeline_exposed=1.0)
    for v in (1, 2):
        plan = make_plan(global_batch_size=16, pipeline_parallel=4, virtual_stages=v)
        timeline = step_timeline(DENSE, SYSTEM, plan, plain)
        assert_allclose(timeline.makespan, timeline.closed_form, rtol=0.01)


def test_prefetch_hides_all_but_the_first_gather(stack):
    """One device computes 8 groups of layers; a gather under each but the first, and the last scatter alone. Worked from the pieces."""
    perfect = changed(stack, shard_overlap=1.0)
    plan = make_plan(global_batch_size=8, data_parallel=8, zero_stage=3)
    t = step_times(DENSE, SYSTEM, plan, perfect)
    gather, scatter = float(t.gather) / 8, float(t.scatter) / 8
    work = lambda one: float(one.layers + one.attention)
    assert gather + scatter < work(t.forward) / 8  # so that all of the others fit under compute
    timeline = step_timeline(DENSE, SYSTEM, plan, perfect, groups=8)
    compute = work(t.forward) + work(t.backward) + float(t.weight + t.forward.vocabulary + t.backward.vocabulary)
    tail = float(t.optimizer + t.overhead)
    assert_allclose(timeline.makespan, gather + compute + scatter + tail, rtol=1e-9)
    none = step_timeline(DENSE, SYSTEM, make_plan(global_batch_size=8, data_parallel=8, zero_stage=3, overlap_parameter=False), perfect, groups=8)
    assert_allclose(none.makespan, compute + float(2 * t.gather + t.scatter) + tail, rtol=1e-9)


def test_buckets_are_reduced_under_the_backward_pass(stack):
    """The last of 4 buckets has nothing to hide under, and without overlap none has."""
    plan = make_plan(global_batch_size=8, data_parallel=8, zero_stage=0)
    t = step_times(DENSE, SYSTEM, plan, stack)
    assert t.update == 0
    compute = float(sum(sum((one.layers, one.attention, one.vocabulary)) for one in (t.forward, t.backward)) + t.weight)
    tail = float(t.optimizer + t.overhead)
    timeline = step_timeline(DENSE, SYSTEM, plan, stack, groups=4)
    each, group = float(t.reduce) / 4, float(t.backward.layers + t.backward.attention + t.weight) / 4
    data = 0.0
    for ready in [compute - group * n for n in (3, 2, 1, 0)]:
        data = max(data, ready) + each
    assert_allclose(timeline.makespan, data + tail, rtol=1e-9)
    alone = step_timeline(DENSE, SYSTEM, make_plan(global_batch_size=8, data_parallel=8, zero_stage=0, overlap_gradient=False), stack, groups=4)
    assert_allclose(alone.makespan, compute + float(t.reduce) + tail, rtol=1e-9)


def test_a_ring_shows_what_does_not_fit_under_attention(stack):
    """With a slow link the hidden part of the ring is longer than the attention above it: the rest delays the layers."""
    slow = changed(stack, context_exposed=0.0)
    link = lambda factor: eqx.tree_at(lambda s: s.scale_up.bandwidth, SYSTEM, SYSTEM.scale_up.bandwidth * factor)
    plan = make_plan(global_batch_size=1, context_parallel=4, zero_stage=0)
    for factor in (1.0, 0.005):
        system = link(factor)
        t = step_times(DENSE, system, plan, slow)
        timeline = step_timeline(DENSE, system, plan, slow, groups=1)
        expected = 0.0
        for one in (t.forward, t.backward):
            send, block = float(one.context_beside) / 3, float(one.attention) / 4
            expected += block + 3 * max(send, block) if send <= block else 3 * send + block
            expected += float(one.layers + one.vocabulary)
        names = {task.name: i for i, task in enumerate(timeline.graph.tasks)}
        last = timeline.finish[names["B0 layers @0"]]
        assert_allclose(last, expected + float(t.weight), rtol=1e-9)


def test_halves_hide_the_exchange_of_tokens(stack):
    """Two halves: the dispatch of one is under the layers of the other, the combine of the first under the experts of the second."""
    plan = make_plan(global_batch_size=8, data_parallel=8, expert_parallel=8, zero_stage=0)
    half = changed(stack, expert_exposed=0.5)
    t = step_times(EXPERTS, SYSTEM, plan, half)
    timeline = step_timeline(EXPERTS, SYSTEM, plan, half, groups=1)
    names = {task.name: i for i, task in enumerate(timeline.graph.tasks)}
    one = t.forward
    front, experts, move = float(one.attention + one.layers) / 2, float(one.experts) / 2, float(one.expert_beside) / 4
    free = 0.0  # of the link
    dispatched = []
    for half_done in (front, 2 * front):
        free = max(free, half_done) + move
        dispatched.append(free)
    clock = 2 * front
    for arrived in dispatched:
        clock = max(clock, arrived) + experts
        free = max(free, clock) + move
    assert_allclose(timeline.finish[names["F0 combine b @0"]], free, rtol=1e-9)
    assert timeline.finish[names["F0 expert @0"]] == pytest.approx(free + float(one.expert))


def test_gradient_in_hardware(stack):
    plan = make_plan(global_batch_size=8, pipeline_parallel=4, tensor_parallel=2)

    @jax.jit
    @jax.value_and_grad
    def step_time(log_scale):
        chip = eqx.tree_at(lambda s: s.chip.peak_flops_per_s, SYSTEM, SYSTEM.chip.peak_flops_per_s * jnp.exp(log_scale))
        return step_timeline(DENSE, chip, plan, stack).makespan

    step = 1e-5
    value, slope, above, below = map(float, (*step_time(0.0), step_time(step)[0], step_time(-step)[0]))
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-5)
    assert -1 < slope / value < 0


@pytest.mark.parametrize("words, more, parts", [
    (dict(global_batch_size=3, micro_batch_size=2), {}, "1.5 micro-batches"),
    (dict(global_batch_size=6, pipeline_parallel=4, virtual_stages=2), {}, "multiple of the 4"),
    (dict(global_batch_size=8, pipeline_parallel=4, virtual_stages=4, schedule="zero-bubble"), {}, "virtual_stages is 4"),
    (dict(global_batch_size=8), dict(groups=9), "between 1 and 8"),
    (dict(global_batch_size=8), dict(groups=1.5), "whole number"),
    (dict(global_batch_size=8), dict(schedule="zigzag"), "'zigzag'"),
])  # fmt: skip
def test_steps_that_cannot_be_laid_out(stack, words, more, parts):
    with pytest.raises(PlanError, match=parts):
        step_timeline(DENSE, SYSTEM, make_plan(**words), stack, **more)


def test_a_traced_or_blended_plan_is_refused(stack):
    plan = make_plan(global_batch_size=8)
    with pytest.raises(PlanError, match="plain numbers"):
        jax.jit(lambda q: step_timeline(DENSE, SYSTEM, q, stack).makespan)(plan)
    with pytest.raises(PlanError, match="0.5 1f1b, 0.5 zero-bubble"):
        step_timeline(DENSE, SYSTEM, changed(plan, schedule=[0.5, 0.5, 0.0]), stack)


# memory


@pytest.mark.parametrize("name", ["one device", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"])
def test_the_memory_track_peaks_where_the_closed_form_does(steps, stack, name):
    timeline, estimate, plan = steps(name)
    peaks = defaultdict(float)
    for counter in chrome_trace(timeline).counters:
        peaks[counter.process] = max(peaks[counter.process], counter.values["held"])
    stages = range(int(plan.pipeline_parallel))
    assert_allclose([peaks[f"rank {r}"] for r in stages], [sum(map(float, stage_memory(DENSE, plan, stack, r))) / 1e9 for r in stages], atol=2e-4)
    assert max(peaks.values()) == pytest.approx(float(estimate.peak_memory) / 1e9, abs=2e-4)


# trace


def read(path):
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.name.endswith(".gz") else raw)


@pytest.mark.parametrize("name", ["interleaved", "dualpipe", "fsdp in a pipeline", "experts"])
def test_trace_follows_the_format(steps, tmp_path, name):
    timeline = steps(name)[0]
    timeline.write_trace(tmp_path / "step.json.gz")
    assert [file.name for file in tmp_path.iterdir()] == ["step.json.gz"]
    document = read(tmp_path / "step.json.gz")
    events = document["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "s", "f", "C"}
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(timed))
    tracks = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            assert {"name", "cat", "ts", "dur", "pid", "tid"} <= set(event) and (event["pid"], event["tid"]) in names
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():  # one thing at a time
        assert all(a["ts"] + a["dur"] <= b["ts"] + 2e-4 for a, b in itertools.pairwise(track))
    expected = {(f"rank {task.rank}", task.stream) for task in timeline.graph.tasks}
    path = {key for key in tracks if processes[key[0]] == "critical path"}
    assert {(processes[pid], names[pid, tid]) for pid, tid in tracks if (pid, tid) not in path} == expected
    end = max(event["ts"] + event["dur"] for event in timed if event["ph"] == "X")
    assert end == pytest.approx(float(timeline.makespan) * 1e6, rel=1e-9)  # microseconds
    assert sum(event["dur"] for key in path for event in tracks[key]) == pytest.approx(end, rel=1e-6)
    marked = [event for track in tracks.values() for event in track if event["args"].get("critical_path")]
    assert sum(event["dur"] for event in marked) == pytest.approx(end, rel=1e-6) and all("critical" in event["cat"].split(",") for event in marked)
    starts, finishes = ({event["id"]: event for event in timed if event["ph"] == kind} for kind in "sf")
    assert len(starts) == sum(event["ph"] == "s" for event in timed) and starts.keys() == finishes.keys()
    across = [(a, b) for a, b in timeline.graph.edges.array if timeline.graph.tasks[a].rank != timeline.graph.tasks[b].rank]
    assert len(starts) == len(across)
    for number, start in starts.items():
        finish = finishes[number]
        assert start["ts"] <= finish["ts"] and start["pid"] != finish["pid"] and finish["bp"] == "e"
        for event in (start, finish):  # binds to a slice that is open there
            assert any(slice_["ts"] <= event["ts"] <= slice_["ts"] + slice_["dur"] for slice_ in tracks[event["pid"], event["tid"]])
    counters = [event for event in timed if event["ph"] == "C"]
    assert {processes[event["pid"]] for event in counters} == {f"rank {task.rank}" for task in timeline.graph.tasks}
    assert document["otherData"]["step_time_s"] == pytest.approx(float(timeline.makespan))


def test_trace_writer(tmp_path):
    bar = TraceSlice("p", "t", "a", "k", 1.0, 0.5, "good", {"x": 1})
    write_chrome_trace(tmp_path / "t.json", ChromeTrace([bar], [], [TraceCounter("p", "c", 0.25, {"v": 2.0})], {}))
    timed = [event for event in read(tmp_path / "t.json")["traceEvents"] if event["ph"] != "M"]
    assert timed[0]["ph"] == "C" and timed[0]["ts"] == 0.25e6 and timed[0]["args"] == {"v": 2.0}
    assert (timed[1]["ts"], timed[1]["dur"], timed[1]["cname"], timed[1]["args"]) == (1e6, 0.5e6, "good", {"x": 1})
    with pytest.raises(ValueError, match="a is at nan s"):
        write_chrome_trace(tmp_path / "bad.json", ChromeTrace([bar._replace(start=math.nan)], [], [], {}))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        write_chrome_trace(tmp_path / "no" / "t.json.gz", ChromeTrace([bar], [], [], {}))
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_critical_path_table(steps):
    for name in ("1f1b", "experts"):
        timeline = steps(name)[0]
        rows = critical_path(timeline)
        assert sum(row.time for row in rows) == pytest.approx(float(timeline.makespan)) and sum(row.share for row in rows) == pytest.approx(1)
        assert [row.time for row in rows] == sorted((row.time for row in rows), reverse=True)
        slope = np.asarray(jax.grad(lambda d, g=timeline.graph: makespan(g, d))(timeline.durations))
        for row in rows:  # what the gradient says
            on_path = [s * d for s, d, task in zip(slope, np.asarray(timeline.durations), timeline.graph.tasks, strict=True) if task.kind == row.kind]
            assert row.time == pytest.approx(sum(on_path))


def test_command_line(tmp_path, capsys):
    from diffperf.cli import _output, main
    from diffperf.cli._timeline import timeline_report

    def run(*args):
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        return stop.value.code, *capsys.readouterr()

    job = ("predict", "llama-3.1-8b", "h100_sxm", "--devices", 8, "--gbs", 16, "--tp", 2, "--pp", 2, "--seq", 4096)
    code, out, err = run(*job, "--trace", tmp_path / "step.json.gz", "--json")
    facts = json.loads(out)["timeline"]
    assert code == 0, err
    assert sum(row["time"] for row in facts["critical_path"]) == pytest.approx(facts["step_time_s"])
    assert read(tmp_path / "step.json.gz")["otherData"]["step_time_s"] == pytest.approx(facts["step_time_s"])
    _output.out().print(timeline_report(facts))
    out, _ = capsys.readouterr()
    assert "Critical path" in out and "ui.perfetto.dev" in out and all(row["kind"] in out for row in facts["critical_path"])
    for path, part in ((tmp_path / "step.txt", ".json.gz"), (tmp_path / "no" / "step.json", "does not exist")):
        code, out, err = run(*job, "--trace", path)
        assert code == 2 and part in err and len(err.strip().splitlines()) == 1


def test_every_order_has_a_test():
    assert {schedule for schedule, *_ in GRID} == set(ORDERS)
