"""The timeline of a step: its work, overlaps by hand, the closed form, memory, and its trace."""

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
from numpy.testing import assert_allclose

from diffperf.estimate.timeline import critical_path, makespan, step_timeline
from diffperf.estimate.timeline._step import step_numbers
from diffperf.estimate.timeline._trace import chrome_trace
from diffperf.hardware import load_system
from diffperf.io import ChromeTrace, TraceCounter, TraceSlice, write_chrome_trace
from diffperf.parallel import PlanError, make_plan
from diffperf.parallel._memory import stage_memory
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
    "zero 2 in a pipeline": (DENSE, dict(global_batch_size=32, data_parallel=4, zero_stage=2, pipeline_parallel=2)),
    "ring": (DENSE, dict(global_batch_size=8, context_parallel=4, tensor_parallel=2)),
    "all-to-all": (DENSE, dict(global_batch_size=8, context_parallel=4, context_mode="all-to-all")),
    "experts of one rank": (EXPERTS, dict(global_batch_size=8, tensor_parallel=2)),
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
    assert_allclose(timeline.makespan, estimate.step_time, rtol=1e-9 if name in ("one device", "tensor", "experts of one rank", "offload") else 0.12)


def test_1f1b_is_the_closed_form_where_nothing_is_hidden(stack):
    """Without hidden transfers and fitted bubble, up to the transfers of end stages."""
    plain = changed(stack, bubble_factor=1.0, pipeline_exposed=1.0)
    for v in (1, 2):
        plan = make_plan(global_batch_size=16, pipeline_parallel=4, virtual_stages=v)
        timeline = step_timeline(DENSE, SYSTEM, plan, plain)
        assert_allclose(timeline.makespan, timeline.closed_form, rtol=0.01)


@pytest.mark.parametrize("words", [dict(zero_stage=3), dict(zero_stage=2), dict(zero_stage=2, pipeline_parallel=4)])
def test_slow_data_parallel_traffic_blocks_as_much_as_in_the_closed_form(stack, words):
    """Traffic of every micro-batch on links 30 times slower, so that much of it hides under nothing."""
    slow = eqx.tree_at(lambda s: s.scale_up.bandwidth, SYSTEM, SYSTEM.scale_up.bandwidth / 30)
    plan = make_plan(global_batch_size=64, data_parallel=2, **words)
    timeline = step_timeline(DENSE, slow, plan, changed(stack, bubble_factor=1.0))
    data = step_numbers(DENSE, slow, plan, stack)[1].breakdown.data
    assert data > 0.2 * timeline.closed_form
    assert_allclose(timeline.makespan, timeline.closed_form, rtol=0.02)


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
    assert 0 < t.gather_exposed < 1e-3  # a perfect overlap of the closed form is a norm, not quite a maximum
    blocks = float(t.gather_exposed) * (15 * gather + 7 * scatter)
    assert_allclose(timeline.makespan, gather + compute + scatter + blocks + tail, rtol=1e-9)
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


def test_as_many_groups_of_layers_as_10000_tasks_allow(stack):
    deep = transformer(hidden=256, layers=[ROUTED | {"count": 90}], num_heads=4, vocab=1000, seq_len=128)
    plan = make_plan(global_batch_size=64, data_parallel=4, expert_parallel=2, zero_stage=3, recompute="full")
    timeline = step_timeline(deep, SYSTEM, plan, stack)
    assert 9000 < len(timeline.graph.tasks) <= 10_000
    assert len(step_timeline(DENSE, SYSTEM, make_plan(global_batch_size=2), stack, groups=np.int64(2)).graph.tasks) < 30


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
