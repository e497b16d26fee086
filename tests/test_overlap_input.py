"""Bad and extreme input of overlap regions, their tuning, task graphs and traces: an error that names what is wrong, or a right result, never NaN."""

import dataclasses
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.calibrate import calibrate_overlap, load_overlap_fit
from diffperf.cli import main
from diffperf.cost.contention import (
    FABRICS,
    NOMINAL_CONTENTION,
    OVERLAP_CHIPS,
    Collective,
    Contention,
    Kernel,
    Setting,
    draw_contention,
    make_settings,
    overlap_makespan,
    overlap_region,
    overlap_times,
)
from diffperf.estimate.timeline import Task, Timeline, critical_path, finish_times, makespan, pipeline_timeline, task_graph
from diffperf.hardware import load_system
from diffperf.io.traces import Slowdown
from diffperf.parallel import PlanError
from diffperf.tune import OverlapSpace, load_overlap_region, overlap

NAN, INF = math.nan, math.inf
CHIP, FABRIC = OVERLAP_CHIPS["a100"], FABRICS["a100_nvlink"]
WORK = Kernel("work", 1e11, 1e6, 2e6, 100.0)
GATHER = Collective("all_gather", 1e6, 8, FABRIC, name="gather")


def region_of(kernels=(WORK,), collectives=(GATHER,), chip=CHIP):
    return overlap_region(list(kernels), list(collectives), chip)


REGION = region_of()
FEW = dict(space=OverlapSpace((1, 8), (2**20, 2**21), (512,)), starts=2, steps=2)


# Regions and settings


@pytest.mark.parametrize("make, message", [
    (lambda: region_of([WORK._replace(flops="1e9")]), r"flops of kernel 0 \(work\) is '1e9'; it should be a number"),
    (lambda: region_of([WORK._replace(flops=None)]), r"flops of kernel 0 \(work\) is None"),
    (lambda: region_of([WORK._replace(nbytes=np.ones(2))]), r"nbytes of kernel 0 \(work\) is array"),
    (lambda: region_of([WORK._replace(launch=INF)]), r"launch of kernel 0 \(work\) is inf; it should be a finite number"),
    (lambda: overlap_region(WORK, [GATHER], CHIP), "kernel 0 is 'work'; give a list of Kernel"),
    (lambda: region_of(collectives=[8]), "collective 0 is 8; give a list of Collective"),
    (lambda: region_of(collectives=[GATHER, GATHER]), "collectives 0 and 1 are both named 'gather'"),
    (lambda: region_of(collectives=[GATHER._replace(fabric="a40_ib")]), r"fabric of collective 0 \(gather\) is 'a40_ib'; give a Fabric"),
    (lambda: region_of(collectives=[GATHER._replace(fabric=FABRIC._replace(channel_rate=INF))]), "above 0 and finite"),
    (lambda: region_of(collectives=[GATHER._replace(choices=("ring", "simple"))]), r"collective 0 \(gather\) has the choice 'ring'; give pairs"),
    (lambda: region_of(collectives=[GATHER._replace(choices=(("ring", "simple"),) * 2)]), "has a choice twice: ring/simple, ring/simple"),
    (lambda: region_of(chip="a100"), "chip is a str; give an OverlapChip"),
    (lambda: region_of(chip=load_system("h100").chip), r"chip is a Chip; .* overlap_chip\(load_system"),
    (lambda: region_of(chip=CHIP._replace(processors=0.5)), "processors of the chip is 0.5; it should be at least 1"),
    (lambda: make_settings(REGION, Setting("8")), "channels of gather is '8'; it should be a number"),
    (lambda: make_settings(REGION, Setting(chunk_bytes=INF)), "larger than 0 and finite"),
    (lambda: overlap_times(REGION, Setting()), r"settings is Setting\(.*make_settings\(region"),
    (lambda: make_settings(REGION, {"gather": Setting()}), "settings are {.*give one Setting for all collectives, or a list"),
    (lambda: make_settings(REGION, None), "settings are None"),
    (lambda: draw_contention(2.5), "count is 2.5; it should be a whole number"),
    (lambda: draw_contention(2, seed=-1), "seed is -1"),
    (lambda: draw_contention(2, NOMINAL_CONTENTION._replace(spill=-1.0)), "medians of the draws: spill is -1; it should be at least 0"),
    (lambda: draw_contention(2, sd=NOMINAL_CONTENTION._replace(sync=INF)), "standard deviation of sync is inf"),
    (lambda: load_overlap_region([]), r"no overlap region \[\]"),
])  # fmt: skip
def test_a_region_that_cannot_run_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_kernel_that_takes_no_time_alone_takes_none_beside():
    """Its tiles would go to memory once buffers fill the cache; a share of no time is no time."""
    nothing = Kernel("nothing", 0.0, 0.0, 1e9, 1.0)
    one = Collective("all_reduce", 1e9, 8, FABRIC)
    with_it, without = (region_of(kernels, [one]) for kernels in ([nothing, WORK], [WORK]))
    settings = make_settings(without, Setting(61, 8e6))
    value, slopes = jax.jit(jax.value_and_grad(overlap_makespan, argnums=(1, 2)))(with_it, settings, Contention(*map(jnp.asarray, NOMINAL_CONTENTION)))
    assert_allclose(value, overlap_makespan(without, settings), rtol=1e-12)
    chex.assert_tree_all_finite(slopes)


def test_float32_counts_the_waves_of_float64():
    """Blocks that just fill what channels leave: 1.2 x 20 channels of 256 threads take 20 of 108 processors, and so on."""
    taken = [(a / 25, channels) for a in range(15, 50) for channels in range(1, 65) if a * channels % 30 == 0 and a * channels <= 30 * 90]
    kernels = [Kernel(f"{n} left", n * 1e9, 0.0, 0.0, float(n)) for n in sorted({108 - round(a * b * 5 / 6) for a, b in taken})]
    region = region_of(kernels, [GATHER._replace(nbytes=1e9)])
    settings = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(make_settings(region, Setting(channels, threads=256)) for _, channels in taken))
    constants = Contention(*(jnp.full(len(taken), value) for value in NOMINAL_CONTENTION))
    constants = constants._replace(processors_per_channel=jnp.array([a for a, _ in taken]), evenness=jnp.zeros(len(taken)))
    run = jax.jit(jax.vmap(overlap_times, (None, 0, 0)))
    exact = run(region, settings, constants)
    single = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32), tree)
    with jax.enable_x64(False):
        rounded = run(single(region), single(settings), single(constants))
    assert rounded.overlapped.dtype == jnp.float32
    assert_allclose(rounded.overlapped, exact.overlapped, rtol=1e-5)
    assert_allclose(rounded.compute_beside, exact.compute_beside, rtol=1e-5)


def test_a_cache_filled_without_end_is_full():
    settings = make_settings(REGION, Setting(61, 1e30))
    steep = Contention(*map(jnp.asarray, NOMINAL_CONTENTION._replace(steepness=12.0)))
    value, slopes = jax.jit(jax.value_and_grad(overlap_makespan, argnums=(1, 2)))(REGION, settings, steep)
    assert math.isfinite(value)
    chex.assert_tree_all_finite(slopes)


# Tuning


DRAWS = draw_contention(4)


@pytest.mark.parametrize("wrong, message", [
    (dict(starts=0), "starts is 0; it should be a whole number, at least 1"),
    (dict(steps=0), "steps is 0"),
    (dict(seed=-1), "seed is -1"),
    (dict(threshold=NAN), "threshold is nan; it is a share, from 0 to 1"),
    (dict(threshold="1%"), "threshold is '1%'; it should be a number"),
    (dict(risk=1.5), "risk is 1.5; it is a share, from 0 to 1"),
    (dict(default=None), "settings are None"),
    (dict(default=Setting(3)), "is not in the space; add its channels"),
    (dict(constants=NOMINAL_CONTENTION._replace(spill=NAN)), "constants: spill is nan"),
    (dict(constants=NOMINAL_CONTENTION._replace(channel_rate=0)), "constants: channel_rate is 0; it should be above 0"),
    (dict(constants=NOMINAL_CONTENTION._replace(evenness=1.1)), "constants: evenness is 1.1; it should be from 0 to 1"),
    (dict(constants=DRAWS), "several values each; give one of each, and several as `draws`"),
    (dict(draws=128), r"draws: 128 is no Contention; .* draw_contention"),
    (dict(draws=NOMINAL_CONTENTION), r"should all be \(draws,\), with at least one"),
    (dict(draws=jax.tree.map(lambda x: x[:0], DRAWS)), "at least one draw"),
    (dict(draws=DRAWS._replace(sync=np.array([1, 1, INF, 1]))), "draws: sync is inf"),
    (dict(space=None), "space is None; give an OverlapSpace"),
    (dict(space=OverlapSpace(8)), "channels of the space is 8; give a tuple"),
    (dict(space=OverlapSpace(())), r"channels of the space is \(\); give at least one"),
    (dict(space=OverlapSpace((8, 4))), r"channels of the space is \(8, 4\)"),
    (dict(space=OverlapSpace((1, 2.5, 8))), "whole numbers, rising"),
    (dict(space=OverlapSpace(chunk_bytes=(2**21, NAN))), "chunk_bytes of the space"),
    (dict(space=OverlapSpace(chunk_bytes=(2**21, INF))), "chunk_bytes of the space"),
    (dict(space=OverlapSpace((1, 8, 65))), "gather has 65 channels; it should have 1 to 64"),
])  # fmt: skip
def test_a_search_that_cannot_run_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        overlap(REGION, **FEW | wrong)


def test_a_region_given_by_its_name_and_too_many_points_are_refused():
    with pytest.raises(ValueError, match="region is 'phi2_fsdp_ffn'; give what `overlap_region`"):
        overlap("phi2_fsdp_ffn")
    many = region_of(collectives=[GATHER._replace(name=f"gather {i}") for i in range(200)])
    with pytest.raises(ValueError, match="1e502 points"):  # (12 x 9 x 3)^200: more than a float holds
        overlap(many, method="exhaustive")


@pytest.mark.parametrize("more", [dict(), dict(method="gradient"), dict(method="priority"), dict(draws=DRAWS)])
def test_a_region_that_takes_no_time_keeps_the_default(more):
    found = overlap(region_of([Kernel("nothing", 0.0, 0.0, 0.0, 1.0)], [GATHER._replace(nbytes=0.0)]), **FEW | more)
    assert found.kept_default and found.makespan == 0 and found.gain == 0 and found.settings == {"gather": Setting()}
    assert not found.expected_gain and not found.risk


def test_a_space_of_arrays_is_one_of_numbers():
    space = OverlapSpace(np.array([1, 8]), np.array([2**20, 2**21]), [512])
    assert overlap(REGION, space=space) == overlap(REGION, space=FEW["space"])


# Task graphs and traces


A, B = Task("a", "x", 0, "s"), Task("b", "x", 1, "s", ("a",))
PAIR = task_graph([A, B])


@pytest.mark.parametrize("make, message", [
    (lambda: task_graph([A, B._replace(after="a")]), r"task 'b' waits for 'a'; `after` should be a tuple"),
    (lambda: task_graph([A._replace(after=None)]), "task 'a' waits for None"),
    (lambda: task_graph([tuple(A)]), r"task 0 is \('a'.*give a list of Task"),
    (lambda: task_graph([A._replace(name=1)]), "task 0 has the name 1"),
    (lambda: task_graph([A._replace(rank=0.5)]), "task 'a' is on rank 0.5; a rank should be a whole number"),
    (lambda: makespan(PAIR, 1.0), r"durations have shape \(\); the graph has 2 tasks"),
    (lambda: finish_times(PAIR, [1.0]), r"durations have shape \(1,\)"),
    (lambda: makespan(PAIR, [1.0, -1.0]), "task 'b' takes -1.0 s"),
    (lambda: makespan(PAIR, jnp.array([NAN, 1.0]), 0.1), "task 'a' takes nan s"),
    (lambda: Timeline(PAIR, np.ones((3, 2))).makespan, "several for each of 2 tasks; take one set at a time"),
    (lambda: critical_path(Timeline(PAIR, np.ones((3, 2)))), "several for each of 2 tasks"),
    (lambda: jax.jit(lambda d: critical_path(Timeline(PAIR, d)))(jnp.ones(2)), "the durations are traced; a critical path"),
    (lambda: jax.jit(lambda d: Timeline(PAIR, d).write_trace("t.json"))(jnp.ones(2)), "the durations are traced"),
])  # fmt: skip
def test_tasks_and_durations_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_traced_durations_still_run_in_batches():
    assert_allclose(jax.vmap(lambda d: makespan(PAIR, d))(jnp.array([[1.0, 2.0], [0.0, 0.0]])), [3, 0])


@pytest.mark.parametrize("wrong, message", [
    (dict(stages=2.5), "stages is 2.5; it should be a whole number"),
    (dict(micro_batches=NAN), "micro_batches is nan"),
    (dict(forward=NAN), "forward is nan; it should be a number of seconds"),
    (dict(weight=-1.0), "weight is -1.0"),  # less than the backward pass that it is added to
    (dict(backward=[1.0, 2.0]), "backward is "),
    (dict(send="1us"), "send is '1us'"),
    (dict(schedule="zb-v", virtual_stages=3), "ZB-V has two chunks per stage"),
    (dict(schedule="dualpipe", stages=3), "DualPipe with 3 stages"),
])  # fmt: skip
def test_a_pipeline_that_cannot_run_is_refused(wrong, message):
    with pytest.raises(PlanError, match=message):
        pipeline_timeline(**dict(schedule="1f1b", stages=4, micro_batches=8, forward=1.0, backward=2.0) | wrong)


def test_arrows_hold_on_to_bars_that_can_be_seen(tmp_path):
    """`sent` and `check` take no time, so an arrow at their times would stick to what runs beside: it goes from `make` to `use`."""
    graph = task_graph([
        Task("make", "x", 0, "s"), Task("sent", "x", 0, "s", ("make",)), Task("next", "x", 0, "s"), Task("seat @ 7", "x", 0, "s"),
        Task("check", "x", 1, "s", ("sent",)), Task("use", "x", 1, "s", ("check",)),
    ])  # fmt: skip
    Timeline(graph, [1.0, 0.0, 2.0, 1.0, 0.0, 3.0]).write_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    start, end = (next(e for e in events if e["ph"] == phase) for phase in "sf")
    bars = lambda arrow: [e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"]) and e["ts"] == arrow["ts"]]
    assert bars(start) == ["make"] and "use" in bars(end)
    assert sum(e["ph"] == "s" for e in events) == 1 and start["id"] == end["id"] and start["ts"] <= end["ts"]
    assert "seat @ 7" in [e["name"] for e in events]  # no rank of its own to leave out


# Fits and the command line


def row(blocks, **change):
    return dataclasses.replace(Slowdown("gemm", blocks, 128, 1.0, 5e-5, 6e-5, 1, 1, "all_reduce", 8, 544, "position", 0, "A100", 108), **change)


@pytest.mark.parametrize("change, more, message", [
    (dict(time_alone_s=NAN), {}, "time_alone_s of kernel 'gemm' is nan"),
    (dict(time_with_s=0.0), {}, "time_with_s of kernel 'gemm' is 0; it should be above 0"),
    (dict(blocks=1.5), {}, "blocks of kernel 'gemm' is 1.5"),
    (dict(channels=200), {}, "3 left out: more channels than the chip has processors"),
    (dict(num_sms=0), {}, "--processors"),
    ({}, dict(processors=0), "processors is 0; it should be a whole number"),
    ({}, dict(sd=NOMINAL_CONTENTION._replace(evenness=0.0)), "prior and sd of evenness are 0.35 and 0.0"),
    ({}, dict(prior=NOMINAL_CONTENTION._replace(spill=NAN)), "prior: spill is nan"),
])  # fmt: skip
def test_slowdowns_that_cannot_be_fitted_are_refused(change, more, message):
    with pytest.raises(ValueError, match=message):
        calibrate_overlap([row(**dict(blocks=n) | change) for n in (96, 100, 128)], **more)


def test_a_fit_file_with_numbers_that_are_none_is_refused(tmp_path):
    fit = calibrate_overlap([row(n) for n in (96, 100, 128)])
    path = tmp_path / "fit.json"
    fit.write(path)
    assert load_overlap_fit(path).constants.spill == 1.1
    for wrong in ("NaN", '"1.1"', "-1"):
        path.write_text(json.dumps(fit.document()).replace('"spill": 1.1', f'"spill": {wrong}'))
        with pytest.raises(ValueError, match="is no overlap fit .*spill"):
            load_overlap_fit(path)


@pytest.mark.parametrize("name, message", [("no/step.json", "does not exist"), ("step.txt", ".json.gz"), ("", "ends in .json.gz")])
def test_a_trace_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["predict", "llama-3.1-8b", "h100", "--devices", "8", "--gbs", "8", "--trace", name])
    assert end.value.code and message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
