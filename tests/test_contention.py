"""Contention: worked numbers, closed forms, bounds, published bands and orderings, gradients at kinks, and errors that name the operator."""


import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.cost import two_streams
from diffperf.cost.contention import (
    CONTENTION_SD,
    FABRICS,
    NOMINAL_CONTENTION,
    OVERLAP_CHIPS,
    Collective,
    Contention,
    Kernel,
    OverlapChip,
    Setting,
    attention_block_kernels,
    channel_time,
    draw_contention,
    ffn_kernels,
    kernel_time,
    make_settings,
    matmul_kernel,
    overlap_chip,
    overlap_makespan,
    overlap_region,
    overlap_times,
    sm_loss_ratio,
    streaming_kernel,
    taken_processors,
)
from diffperf.hardware import load_system
from diffperf.tune import load_overlap_region

times_of = jax.jit(overlap_times)
makespan_and_slopes = jax.jit(jax.value_and_grad(overlap_makespan, argnums=(0, 1, 2), allow_int=True))


@jax.jit
def kernel_times(region, rows, constants):
    """Of the kernels alone, and beside the first collective."""
    _, in_flight, traffic = channel_time(region.collectives, rows, 1.0, 1.0)
    taken = taken_processors(rows.channels, rows.threads, constants.processors_per_channel)
    alone, _ = kernel_time(region.chip, region.kernels, constants)
    beside, _ = kernel_time(region.chip, region.kernels, constants, taken[0], in_flight[0], traffic[0])
    return jnp.sum(alone), jnp.sum(beside)


CHIP = OverlapChip(100, 1e14, 1e12, 1e7)
NO_CONTENTION = NOMINAL_CONTENTION._replace(processors_per_channel=0.0, spill=0.0, oversubscription=0.0)


def region_of(kernels, transfers, streams=None, links=None):
    """Collectives that take a given time [s] whatever the settings, and touch no memory: two ranks, a slow link."""
    fabrics = [FABRICS["a40_ib"]._replace(bandwidth=1e30, channel_rate=1e30, sync=0.0, base=t, hop=0.0) for t in transfers]
    streams, links = streams or [0] * len(transfers), links or ["a"] * len(transfers)
    collectives = [Collective("all_gather", 1.0, 2, f._replace(name=link), stream=stream) for f, stream, link in zip(fabrics, streams, links)]
    return overlap_region(kernels, collectives, CHIP)


def work(seconds, blocks=100.0):
    return Kernel("work", seconds * 1e14, 0.0, 0.0, blocks)


# The law of lost processors


def test_a_lost_wave_doubles_a_kernel_that_just_fitted_and_spares_one_with_room():
    ratio = lambda blocks: float(sm_loss_ratio(blocks, 108, 8.5, 0.0))
    assert [ratio(b) for b in (96, 100, 128, 200, 400)] == [1, 2, 1, 1.5, 1.25]  # ceil(blocks / 99.5) over ceil(blocks / 108)
    assert_allclose(sm_loss_ratio(1e6, 108, 8.5, 1.0), 108 / 99.5)  # evenly spread work feels the share



def test_v100_kernels_of_one_wave_lose_it_to_two_channels():
    """80 blocks on 80 processors beside 2 channels ran 1.71 and 1.72 times as long, other matmuls 1.04 (V100 example trace of HolisticTraceAnalysis)."""
    taken = taken_processors(2, 512, 1.05)
    assert_allclose(taken, 2.1)
    assert 1.6 < sm_loss_ratio(80, 80, taken) < 1.75
    assert np.median(sm_loss_ratio(np.arange(100, 2000, 7), 80, taken)) < 1.06


# Progress of streams


@given(c=st.floats(1e-5, 1e-2), x=st.floats(1e-5, 1e-2), a=st.floats(1.0, 3.0), b=st.floats(1.0, 3.0))
@settings(deadline=None, max_examples=20)
def test_one_kernel_and_one_collective_are_the_closed_form(c, x, a, b):
    """The slowdown of compute comes from lost processors (evenly spread), bounded together with none of communication."""
    constants = NOMINAL_CONTENTION._replace(processors_per_channel=100 * (1 - 1 / a) / 8, evenness=1.0, spill=0.0)
    times = times_of(region_of([work(c, 1e6)], [x]), make_settings(region_of([work(c)], [x])), constants)
    assert_allclose(times.overlapped, two_streams(c, x, a - 1, 0.0), rtol=1e-6)
    assert_allclose(times.compute, c, rtol=1e-9)
    assert_allclose(times.communication, x, rtol=1e-6)


def test_no_contention_is_the_longest_stream_and_full_contention_the_sum():
    region = region_of([work(1e-3), work(2e-3)], [1.5e-3, 0.5e-3])
    some = make_settings(region)
    assert_allclose(times_of(region, some, NO_CONTENTION).overlapped, 3e-3, rtol=1e-6)
    long = region_of([work(1e-3), work(2e-3)], [4e-3, 0.5e-3])
    assert_allclose(times_of(long, some, NO_CONTENTION).overlapped, 4.5e-3, rtol=1e-6)
    # all processors but four are taken (25 times slower), and the collective runs at what the bound leaves: at least one stream's worth of work is done
    full = NOMINAL_CONTENTION._replace(processors_per_channel=1e6, evenness=1.0, oversubscription=1e9)
    kernels = [Kernel("memory", 0.0, 1e9, 1e9, 1e6)]  # 1 ms of traffic
    busy = overlap_region(kernels, [Collective("all_reduce", 1e8, 8, FABRICS["h100_nvlink"])], CHIP)
    times = times_of(busy, make_settings(busy), full)
    assert_allclose(times.overlapped, times.sequential, rtol=0.02)


def test_streams_on_one_link_share_it_and_on_two_do_not():
    f = FABRICS["h100_nvlink"]._replace(base=0.0, hop=0.0, sync=0.0, channel_rate=1e30)
    pair = lambda other: [Collective("all_gather", 1e9, 8, f), Collective("all_gather", 1e9, 8, f._replace(name=other), stream=1)]
    kernel = [streaming_kernel(1.0)]
    shared, apart = (overlap_region(kernel, pair(name), OverlapChip(100, 1e14, 1e15, 1e7)) for name in (f.name, "other"))
    one = 1e9 * 7 / 8 / 370e9
    assert_allclose(times_of(apart, make_settings(apart)).overlapped, one, rtol=1e-3)
    assert_allclose(times_of(shared, make_settings(shared)).overlapped, 2 * one, rtol=1e-3)


def test_two_halves_on_one_link_disturb_compute_as_the_whole_does():
    """Each with half of the channels: together they move no more data per second than the link carries."""
    f = FABRICS["a100_nvlink"]._replace(base=0.0, hop=0.0)
    kernels = [streaming_kernel(2e9)] * 4
    of = lambda parts: overlap_region(kernels, [Collective("all_reduce", 6e9 / parts, 8, f, stream=i) for i in range(parts)], OVERLAP_CHIPS["a100"])
    one, two = (times_of(of(n), make_settings(of(n), Setting(channels=16 // n))) for n in (1, 2))
    assert one.compute_slowdown > 0.1 and one.exposed > 0
    assert_allclose(two.compute_slowdown, one.compute_slowdown, rtol=0.05)


def test_an_all_reduce_moves_what_its_two_halves_do():
    f = FABRICS["h100_nvlink"]._replace(base=0.0, hop=0.0, sync=0.0)
    rows = overlap_region([work(1.0)], [Collective(op, 1e9, 8, f) for op in ("all_reduce", "reduce_scatter", "all_gather")], CHIP).collectives
    whole, scatter, gather = (rows.touches * rows.wire)[:, 0]
    assert_allclose(whole, scatter + gather)
    assert_allclose(scatter, 3 * 7 / 8 * 1e9)


def test_three_streams_by_hand():
    """No contention: each stream runs its queue; the longest decides, and what lies beyond the kernels is exposed."""
    region = region_of([work(1e-3)], [0.4e-3, 0.4e-3, 1.7e-3, 0.1e-3], streams=[0, 0, 1, 2], links=["a", "a", "b", "c"])
    times = times_of(region, make_settings(region), NO_CONTENTION)
    assert_allclose([times.overlapped, times.exposed, times.communication], [1.7e-3, 0.7e-3, 2.6e-3], rtol=1e-6)


SIZES = st.lists(st.floats(0, 1e9), min_size=2, max_size=2)


@given(flops=SIZES, nbytes=SIZES, tiles=st.floats(1, 50), blocks=SIZES, messages=st.lists(st.floats(0, 1e9), min_size=3, max_size=3),
       channels=st.integers(1, 64), chunk=st.floats(1e3, 1e7), seed=st.integers(0, 99), temperature=st.sampled_from([0.0, 0.3]))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_overlap_lies_between_ideal_and_sequential(flops, nbytes, tiles, blocks, messages, channels, chunk, seed, temperature):
    kernels = [Kernel("k", 1e3 * f, b, tiles * b, max(n / 1e5, 1)) for f, b, n in zip(flops, nbytes, blocks)]
    collectives = [Collective("all_reduce", s, 8, FABRICS["a40_nvlink"], stream=i % 2) for i, s in enumerate(messages)]
    region = overlap_region(kernels, collectives, OVERLAP_CHIPS["a40"])
    constants = jax.tree.map(lambda x: x[0], draw_contention(1, sd=CONTENTION_SD, seed=seed))
    times = times_of(region, make_settings(region, Setting(channels, chunk)), constants, temperature)
    slack = 1 + 1e-9
    assert times.ideal <= times.overlapped * slack + 1e-15 and times.overlapped <= times.sequential * slack + 1e-15
    assert times.compute <= times.compute_beside * slack + 1e-15
    assert_allclose(times.overlapped, times.compute_beside + times.exposed, rtol=1e-9, atol=1e-15)


# Published bands and orderings


def test_ordering_of_lagom_pattern_1():
    """Phi-2 FFN over an all-gather (arXiv:2602.20656): NC 2 with 684 KiB is 1.35 times as fast as 8 with 2 MiB, NC 61 0.87 times."""
    region = load_overlap_region("phi2_fsdp_ffn")
    time = lambda *setting: float(times_of(region, make_settings(region, Setting(*setting))).overlapped)
    default = time(8, 2 * 2**20)
    assert 1.25 < default / time(2, 684 * 1024) < 1.45
    assert 0.82 < default / time(61, 2 * 2**20) < 0.95
    default = make_settings(region)
    slope = jax.jit(jax.grad(lambda log: overlap_makespan(region, default._replace(channels=jnp.exp(log)), NOMINAL_CONTENTION)))
    assert slope(jnp.log(jnp.array([1.0]))) < -1e-3 < 0 < slope(jnp.log(jnp.array([8.0])))  # seconds per log channel: below and above the balance


def test_slowdown_band_of_fsdp_on_four_gpus():
    """Compute is slowed by 18.9% in the mean and 40% at most (arXiv:2507.03114), on H100 and A100 with FSDP; NCCL ran 8 to 24 channels."""
    slowdowns = []
    for chip in ("h100", "a100"):
        for hidden, heads, length in ((5120, 40, 2048), (2048, 16, 2048)):
            kernels = ffn_kernels(4 * length, hidden, 4 * hidden, backward=True) + attention_block_kernels(4, length, hidden, heads, 128, backward=True)
            weights = 2 * 12 * hidden**2
            for channels in (8, 16, 24):
                transfers = [Collective(op, weights, 4, FABRICS[f"{chip}_nvlink"]) for op in ("all_gather", "reduce_scatter")]
                region = overlap_region(kernels, transfers, OVERLAP_CHIPS[chip])
                rows = make_settings(region, Setting(channels))
                constants = NOMINAL_CONTENTION._replace(processors_per_channel=1.05 if chip == "a100" else 0.95)
                alone, beside = kernel_times(region, rows, constants)
                slowdowns.append(float(beside / alone) - 1)
                times = times_of(region, rows, constants)
                assert 0 <= times.compute_slowdown <= 0.4 and times.ideal <= times.overlapped <= times.sequential
                if times.exposed < 1e-9:
                    assert_allclose(times.ideal, times.overlapped - (times.compute_beside - times.compute), rtol=1e-9)
    assert 0.1 < np.mean(slowdowns) < 0.25 and max(slowdowns) < 0.4


def test_regions_have_the_times_of_the_published_set_ups():
    """Worked by hand: two matmuls of 2 x 4096 x 10240 x 2560 FLOP at 92.8 TFLOP/s are 4.63 ms; 157.3 MB x 15/16 over 46 GB/s 3.21 ms."""
    region = load_overlap_region("phi2_fsdp_ffn")
    times = times_of(region, make_settings(region))
    assert 4.63e-3 < times.compute < 5.3e-3 and 3.21e-3 < times.communication < 3.5e-3


# Collectives


def test_collectives_saturate_in_channels_and_chunks_and_protocols_trade_latency_for_rate():
    f = FABRICS["a40_nvlink"]
    choices = (("ring", "simple"), ("ring", "ll128"), ("ring", "ll"), ("tree", "simple"))
    region = overlap_region([work(1e-3)], [Collective("all_reduce", s, 8, f, choices=choices) for s in (1e3, 1e9)], CHIP)

    def time(setting):
        return channel_time(region.collectives, make_settings(region, setting), 1.0, 1.0)[0]

    by_channels = np.array([time(Setting(n, 2**18)) for n in (1, 2, 4, 8, 16, 32)])
    assert (np.diff(by_channels[:, 1]) <= 0).all()
    assert_allclose(time(Setting(61, 4 * 2**20))[1], 2 * 1e9 * 7 / 8 / 44e9, rtol=0.05)
    simple, ll = time(Setting()), time(Setting(protocol="ll"))
    assert ll[0] < simple[0] / 2 and ll[1] > 1.8 * simple[1]
    assert time(Setting(algorithm="tree"))[0] < simple[0]


def test_nothing_to_send_and_one_rank_take_no_time_and_have_gradients():
    for nbytes, ranks in ((0.0, 8), (1e6, 1)):
        region = overlap_region([streaming_kernel(0.0), work(1e-3)], [Collective("all_reduce", nbytes, ranks, FABRICS["a40_ib"])], CHIP)
        rows = make_settings(region)
        value, slopes = makespan_and_slopes(region, rows, Contention(*map(jnp.asarray, NOMINAL_CONTENTION)))
        assert_allclose(value, 1e-3 + 2e-6, rtol=1e-9)
        chex.assert_tree_all_finite([leaf for leaf in jax.tree.leaves(slopes) if leaf.dtype != jax.dtypes.float0])


@pytest.mark.parametrize("name", ["phi2_fsdp_backward", "llama3_tensor_and_fsdp"])
def test_gradient_equals_finite_differences(name):
    region = load_overlap_region(name)
    base = make_settings(region, Setting(5, 9e5, 320))
    logs = jnp.log(jnp.stack(base[:3])) + 0.01 * jnp.arange(3 * len(region.collective_names)).reshape(3, -1)
    time = lambda logs: jnp.log(overlap_makespan(region, base._replace(channels=jnp.exp(logs[0]), chunk_bytes=jnp.exp(logs[1]), threads=jnp.exp(logs[2])),
                                                 temperature=0.3))  # fmt: skip
    slope, h = jax.jit(jax.grad(time))(logs), 1e-6
    steps = h * np.eye(logs.size).reshape(-1, *logs.shape)
    above, below = jax.jit(jax.vmap(time))(logs + np.stack([steps, -steps]).reshape(-1, *logs.shape)).reshape(2, *logs.shape)
    assert_allclose(slope, (above - below) / (2 * h), atol=1e-6)


def test_draws_have_the_stated_spread_and_the_catalog_makes_chips():
    draws = draw_contention(4000, sd=CONTENTION_SD, seed=3)
    assert_allclose(np.std(np.log(draws.spill)), 0.5, rtol=0.05)
    assert_allclose(np.median(draws.spill), 1.1, rtol=0.05)
    assert draws.evenness.max() <= 1 and (draws.overlap == 3).all()
    chip = overlap_chip(load_system("a100").chip)
    assert chip.processors == 108 and 150e12 < chip.flops_per_s < 312e12
    with pytest.raises(ValueError, match="datatype 'int3'"):
        overlap_chip(load_system("a100").chip, "int3")
    with pytest.raises(ValueError, match="count is 0"):
        draw_contention(0)


GATHER = Collective("all_gather", 1e6, 8, FABRICS["a40_ib"], name="gather weights")


@pytest.mark.parametrize("make, message", [
    (lambda: overlap_region([], [GATHER], CHIP), "no kernels"),
    (lambda: overlap_region([work(1e-3)], [], CHIP), "no collectives"),
    (lambda: overlap_region([matmul_kernel(64, 64, -64, name="odd")], [GATHER], CHIP), r"flops of kernel 0 \(odd\) is -"),
    (lambda: overlap_region([work(float("nan"))], [GATHER], CHIP), r"flops of kernel 0 \(work\) is nan"),
    (lambda: overlap_region([work(1e-3)._replace(blocks=0)], [GATHER], CHIP), "blocks of kernel 0"),
    (lambda: overlap_region([work(1e-3)], [GATHER._replace(nbytes=-1.0)], CHIP), r"nbytes of collective 0 \(gather weights\) is -1"),
    (lambda: overlap_region([work(1e-3)], [GATHER._replace(ranks=0)], CHIP), r"ranks of collective 0 \(gather weights\) is 0"),
    (lambda: overlap_region([work(1e-3)], [GATHER._replace(op="all_scatter")], CHIP), "'all_scatter'; one of all_reduce"),
    (lambda: overlap_region([work(1e-3)], [GATHER._replace(choices=(("tree", "ll"),))], CHIP), "only all_reduce"),
    (lambda: overlap_region([work(1e-3)], [GATHER], CHIP._replace(bandwidth=0.0)), "bandwidth of the chip is 0"),
    (lambda: make_settings(overlap_region([work(1e-3)], [GATHER], CHIP), Setting(65)), "gather weights has 65 channels; it should have 1 to 64"),
    (lambda: make_settings(overlap_region([work(1e-3)], [GATHER], CHIP._replace(processors=40)), Setting(40)), "1 to 39"),
    (lambda: make_settings(overlap_region([work(1e-3)], [GATHER], CHIP), Setting(8, 2**20, 500)), "gather weights has 500 threads"),
    (lambda: make_settings(overlap_region([work(1e-3)], [GATHER], CHIP), Setting(8, 0)), "chunks of 0 B"),
    (lambda: make_settings(overlap_region([work(1e-3)], [GATHER], CHIP), Setting(protocol="ll")), "may not run ring with ll"),
    (lambda: make_settings(overlap_region([work(1e-3)], [GATHER], CHIP), [Setting()] * 2), "2 settings for 1 collectives"),
])  # fmt: skip
def test_bad_input_names_the_operator(make, message):
    with pytest.raises(ValueError, match=message):
        make()
