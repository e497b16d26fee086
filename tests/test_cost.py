"""How long one thing takes: numbers by hand, units, monotonicity, bounds and gradients of each cost."""

import functools
import itertools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from numpy.testing import assert_allclose

from diffperf.cost import attention_time, blended_overlap, exposed_time, matmul_time, step_cost, step_energy, streaming_time, two_streams
from diffperf.cost.collective import (
    all_gather_time,
    all_reduce_time,
    expert_exchange_time_per_byte,
    group_latency,
    group_rate,
    members_inside,
    point_to_point_time,
    reduce_scatter_time,
)
from diffperf.cost.collective._alpha_beta import tier_rate
from diffperf.hardware import load_system

GIB = 2.0**30
relaxed = settings(deadline=None, max_examples=40, derandomize=True)
floats = functools.partial(st.floats, allow_subnormal=False)  # XLA flushes subnormal numbers to 0
SIZE, RANKS, SCALE, TIME = floats(1.0, 1e12), st.integers(1, 4096), floats(1e-3, 1e3), floats(1e-7, 1e3)

COLLECTIVES = (all_reduce_time, all_gather_time, reduce_scatter_time)
H100 = load_system("h100_sxm", fitted=False)
ring_times = jax.jit(lambda system, nbytes, ranks, stride: jnp.stack([f(system, nbytes, ranks, stride) for f in COLLECTIVES]))
point_to_point, exchange = jax.jit(point_to_point_time), jax.jit(expert_exchange_time_per_byte)


def network(up=400e9, out=50e9, spine=25e9, up_latency=1e-6, out_latency=1e-5, spine_latency=3e-5, domain=8, out_domain=1024, torus_axes=0):
    """An H100 system whose network has round numbers and reaches its datasheet rates."""
    tiers = [(up, up_latency, domain, torus_axes), (out, out_latency, out_domain, 0), (spine, spine_latency, 1e6, 0)]
    where = lambda s: [x for t in (s.scale_up, s.scale_out, s.spine) for x in (t.bandwidth, t.efficiency, t.latency, t.domain, t.torus_axes)]
    return eqx.tree_at(where, H100, [jnp.asarray(x, float) for b, a, d, axes in tiers for x in (b, 1.0, a, d, axes)])


NETWORK = network()


def in_units(system, byte=1.0, second=1.0):
    """The same network with every number in units of 1/byte bytes and 1/second seconds."""
    tiers = lambda s: (s.scale_up, s.scale_out, s.spine)
    system = eqx.tree_at(lambda s: [t.bandwidth for t in tiers(s)], system, replace_fn=lambda x: x * byte / second)
    return eqx.tree_at(lambda s: [t.latency for t in tiers(s)], system, replace_fn=lambda x: x * second)


# one operator


def test_matmul_by_hand():
    # 2 * 4096^2 * (4096 + 150) FLOP at 600 TFLOP/s, and 2 bytes * 3 * 4096^2 elements at 3 TB/s
    assert_allclose(matmul_time(4096, 4096, 4096, 600e12, 3e12), 142472118272 / 600e12 + 100663296 / 3e12, rtol=1e-14)
    # 132 processors leave a quarter of a wave empty: 33 units of 128 x 192, each 2 * 4246 FLOP per element
    more = matmul_time(4096, 4096, 4096, 600e12, 3e12, processors=132) - matmul_time(4096, 4096, 4096, 600e12, 3e12)
    assert_allclose(more, 33 * 24576 * 2 * 4246 / 600e12, rtol=1e-9)
    # twice the weight traffic adds the weight once more, 2 bytes * k * n; activation traffic counts input and output
    more = matmul_time(16, 64, 256, 1e12, 1e9, weight_traffic=2.0) - matmul_time(16, 64, 256, 1e12, 1e9)
    assert_allclose(more, 2 * 64 * 256 / 1e9, rtol=1e-9)
    more = matmul_time(16, 64, 256, 1e12, 1e9, activation_traffic=2.0) - matmul_time(16, 64, 256, 1e12, 1e9)
    assert_allclose(more, 2 * 16 * (64 + 256) / 1e9, rtol=1e-9)


@pytest.mark.parametrize("m, k, n", [(0, 64, 64), (64, 0, 64), (64, 64, 0), (0, 0, 0)])
def test_empty_matmul_takes_no_time_and_has_a_gradient(m, k, n):
    assert matmul_time(m, k, n, 1e12, 1e9, processors=132.0) == 0
    chex.assert_tree_all_finite(jax.grad(matmul_time, (0, 1, 2, 3, 4, 7))(float(m), float(k), float(n), 1e12, 1e9, 1.0, 1.0, 132.0))


def test_attention_is_quoted_at_head_width_128():
    assert_allclose(attention_time(1e12, 128, 400e12, 24.0), 1e12 / 400e12, rtol=1e-14)
    # width 64 with half width 24: (64 + 24) / 64 against (128 + 24) / 128
    assert_allclose(attention_time(1e12, 64, 400e12, 24.0), 1e12 / 400e12 * 1.375 / 1.1875, rtol=1e-14)
    widths = jnp.array([32.0, 64.0, 128.0, 256.0])
    assert jnp.all(jnp.diff(attention_time(1e12, widths, 400e12, 24.0)) < 0)
    assert_allclose(attention_time(1e12, widths, 400e12, 0.0), 1e12 / 400e12)
    chex.assert_tree_all_finite(jax.value_and_grad(attention_time, (0, 1, 2, 3))(0.0, 0.0, 1e12, 24.0))


def test_streaming_by_hand():
    assert_allclose(streaming_time(6.7e9, 3.35e12), 2e-3, rtol=1e-14)


def test_gradients_of_operators():
    check_grads(matmul_time, (4.0, 8.0, 16.0, 1e3, 1e2, 1.5, 2.5, 0.01), order=1, modes=("rev",), rtol=1e-5)
    check_grads(attention_time, (3.0, 64.0, 7.0, 24.0), order=1, modes=("rev",), rtol=1e-5)


# collectives


def test_all_reduce_of_one_gib_on_eight_h100():
    """2 (n - 1) / n of the buffer over 450 GB/s (NVIDIA, nccl-tests, doc/PERFORMANCE.md), and 14 steps of latency."""
    system = network(up=450e9, up_latency=2e-6)
    # 2 * 7 / 8 * 2^30 B / 450e9 B/s = 4.175663e-3 s; 2 * 7 * 2e-6 s = 2.8e-5 s
    assert_allclose(all_reduce_time(system, GIB, 8), 4.175663e-3 + 2.8e-5, rtol=1e-6)
    assert_allclose(all_gather_time(system, GIB, 8), (4.175663e-3 + 2.8e-5) / 2, rtol=1e-6)
    # the catalog's H100 has that link at its prior efficiency
    link = H100.scale_up
    assert_allclose(link.bandwidth, 450e9)
    assert_allclose(all_reduce_time(H100, GIB, 8), 14 * (GIB / 8 / (450e9 * link.efficiency) + link.latency), rtol=1e-12)


def test_rings_over_nodes_run_at_the_rate_of_their_nics():
    # 16 ranks: 8 per node, the ring crosses each node's border over 8 NICs, 8 * 50 GB/s, as fast as NVLink
    assert_allclose(group_rate(NETWORK, 16), 400e9)
    # 4 of 8 in a node (stride 2): 4 NICs; stride 8: one rank per node and one NIC
    assert_allclose([group_rate(NETWORK, 16, 2), group_rate(NETWORK, 16, 8)], [200e9, 50e9])
    assert_allclose([group_rate(NETWORK, 8), group_rate(NETWORK, 4, 2), group_rate(NETWORK, 2, 4)], 400e9)  # all in one node
    assert_allclose(members_inside(NETWORK.scale_up, 16, jnp.array([1.0, 2.0, 8.0, 64.0])), [8, 4, 1, 1])
    # beyond 1024 devices the spine counts
    assert_allclose([group_rate(NETWORK, 1024), group_rate(NETWORK, 2048), group_rate(NETWORK, 256, 8)], [400e9, 200e9, 25e9])
    assert_allclose([group_latency(NETWORK, n, s) for n, s in ((8, 1), (16, 1), (2, 8), (2048, 1))], [1e-6, 1e-5, 1e-5, 3e-5])


def test_torus_groups_use_the_axes_they_span():
    """On a 16 x 16 x 16 torus with 300 GB/s per device: 16 chips lie on one axis, 256 on two, 4096 on all three."""
    tier = network(up=300e9, domain=4096, torus_axes=3).scale_up
    assert_allclose([tier_rate(tier, n) for n in (2, 16, 256, 4096)], [100e9, 100e9, 200e9, 300e9], rtol=1e-12)
    assert_allclose([tier_rate(NETWORK.scale_up, n) for n in (2, 8)], 400e9)  # switched: always all
    chex.assert_tree_all_finite(jax.value_and_grad(tier_rate, (0, 1))(tier, 1.0))


@relaxed
@given(SIZE, RANKS, st.integers(1, 64), SCALE)
def test_collectives_follow_the_units_of_bytes_and_seconds(nbytes, ranks, stride, scale):
    time = ring_times(NETWORK, nbytes, ranks, stride)
    assert_allclose(ring_times(in_units(NETWORK, byte=scale), nbytes * scale, ranks, stride), time, rtol=1e-12)
    assert_allclose(ring_times(in_units(NETWORK, second=scale), nbytes, ranks, stride), time * scale, rtol=1e-12)
    one = point_to_point(NETWORK, nbytes, stride)
    assert_allclose(point_to_point(in_units(NETWORK, byte=scale), nbytes * scale, stride), one, rtol=1e-12)
    assert_allclose(point_to_point(in_units(NETWORK, second=scale), nbytes, stride), one * scale, rtol=1e-12)
    per_byte = exchange(NETWORK, ranks, 4.0, stride)
    assert_allclose(exchange(in_units(NETWORK, byte=scale), ranks, 4.0, stride) * scale, per_byte, rtol=1e-12)
    assert_allclose(exchange(in_units(NETWORK, second=scale), ranks, 4.0, stride), per_byte * scale, rtol=1e-12)


@relaxed
@given(SIZE, RANKS, st.integers(1, 64), floats(1.0, 10.0), st.sampled_from(["scale_up", "scale_out", "spine"]))
def test_more_bytes_are_never_faster_and_more_bandwidth_never_slower(nbytes, ranks, stride, factor, tier):
    faster = eqx.tree_at(lambda s: getattr(s, tier).bandwidth, NETWORK, replace_fn=lambda x: x * factor)
    everything = lambda system, size: jnp.append(ring_times(system, size, ranks, stride), jnp.stack([
        point_to_point(system, size, stride), size * exchange(system, ranks, 4.0, stride)
    ]))  # fmt: skip
    time = everything(NETWORK, nbytes)
    assert jnp.all(everything(NETWORK, nbytes * factor) >= time)
    assert jnp.all(everything(faster, nbytes) <= time * (1 + 1e-12))


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
def test_collectives_at_their_edges(collective):
    assert collective(NETWORK, GIB, 1) == 0
    assert collective(NETWORK, GIB, 1, 4096) == 0
    assert collective(NETWORK, 0.0, 8) > 0  # the messages are sent though empty
    for nbytes, ranks, stride in ((0.0, 8.0, 1.0), (GIB, 1.0, 1.0), (0.0, 1.0, 8.0), (GIB, 8.0, 1.0), (GIB, 1024.0, 1.0)):
        chex.assert_tree_all_finite(jax.value_and_grad(collective, (0, 1, 2, 3))(NETWORK, nbytes, ranks, stride))
    rows = jnp.array([1.0, 8.0, 16.0, 2048.0])
    eager = jnp.stack([collective(NETWORK, GIB, n) for n in rows])
    assert_allclose(jax.jit(jax.vmap(collective, (None, None, 0)))(NETWORK, GIB, rows), eager, rtol=1e-14)
    check_grads(lambda size, n: collective(NETWORK, size * GIB, n), (1.0, 20.5), order=1, modes=("rev",), rtol=1e-5)


def test_reduce_scatter_and_all_gather_make_an_all_reduce():
    parts = reduce_scatter_time(NETWORK, GIB, 12, 2) + all_gather_time(NETWORK, GIB, 12, 2)
    assert_allclose(parts, all_reduce_time(NETWORK, GIB, 12, 2), rtol=1e-14)


def copies_by_enumeration(domains, inside, k):
    """Mean copies of one token that cross the network and that cross the scale-up tier, over every placing of k experts on the devices.

    The sender is device 0 of domain 0. A copy goes to device 0 of each other domain that holds an expert, and from there to each expert's device.
    """
    out, within = [], []
    for experts in itertools.product(itertools.product(range(domains), range(inside)), repeat=k):
        out.append(len({domain for domain, _ in experts} - {0}))
        within.append(sum(device != 0 for _, device in experts))
    return np.mean(out), np.mean(within)


@pytest.mark.parametrize("domains, inside, k", [(1, 4, 3), (2, 2, 3), (3, 2, 3), (4, 1, 4), (5, 2, 1)])
def test_expert_exchange_counts_each_copy(domains, inside, k):
    out, within = copies_by_enumeration(domains, inside, k)
    expected = out / 50e9 + within / 400e9
    assert_allclose(exchange(network(domain=inside), domains * inside, k), expected, rtol=1e-6)
    assert_allclose(exchange(network(domain=inside * 4), domains * inside, k, 4), expected, rtol=1e-6)  # every fourth device


def test_expert_exchange_at_its_edges():
    assert exchange(NETWORK, 1, 8) == 0
    for ranks in (1.0, 8.0, 16.0):
        chex.assert_tree_all_finite(jax.value_and_grad(expert_exchange_time_per_byte, (0, 1, 2, 3))(NETWORK, ranks, 8.0, 1.0))
    double = float(exchange(NETWORK, 64.0, 8.0))
    with jax.enable_x64(False):
        single = jax.tree.map(lambda x: x.astype(jnp.float32), NETWORK)
        chex.assert_tree_all_finite(jax.value_and_grad(expert_exchange_time_per_byte, (0, 1, 2, 3))(single, 8.0, 8.0, 1.0))
        assert_allclose(expert_exchange_time_per_byte(single, 64.0, 8.0), double, rtol=1e-5)


def test_point_to_point_by_hand():
    # a neighbour in the node, the same place in the next node, a node behind the spine
    assert_allclose([point_to_point(NETWORK, 4e8, s) for s in (1, 4)], 4e8 / 400e9 + 1e-6)
    assert_allclose(point_to_point(NETWORK, 4e8, 2, 8), 4e8 / 50e9 + 1e-5)  # a chain of 8 that leaves the node in its middle
    assert_allclose(point_to_point(NETWORK, 4e8, 8), 4e8 / 50e9 + 1e-5)
    assert_allclose(point_to_point(NETWORK, 4e8, 1024), 4e8 / 25e9 + 3e-5)
    assert point_to_point(NETWORK, 0.0, 8) == 1e-5


# overlap


@relaxed
@given(TIME, TIME, floats(0.0, 1.0))
def test_overlaps_stay_inside_their_bounds(compute, communication, weight):
    exposed = float(exposed_time(communication, compute))
    assert max(0.0, communication - compute) <= exposed * (1 + 1e-12) and exposed <= communication
    together = float(blended_overlap(compute, communication, weight))
    assert max(compute, communication) <= together * (1 + 1e-12) and together <= (compute + communication) * (1 + 1e-12)


def test_limits_of_overlap():
    assert exposed_time(3.0, 0.0) == 3.0
    assert exposed_time(0.0, 3.0) == 0.0
    assert_allclose(exposed_time(1e-4, 1.0), 1e-8, rtol=1e-3)  # short transfers vanish quadratically
    assert_allclose(exposed_time(1e4, 1.0), 1e4 - 1, rtol=1e-6)  # long ones are what the cover leaves
    assert_allclose(blended_overlap(3.0, 4.0, 0.0), 7.0)
    assert_allclose(blended_overlap(3.0, 4.0, 1.0), (3.0**6 + 4.0**6) ** (1 / 6), rtol=1e-14)
    for function, arguments in ((exposed_time, (0.0, 0.0)), (exposed_time, (0.0, 1.0)), (blended_overlap, (0.0, 0.0, 0.5)), (blended_overlap, (0.0, 1.0, 0.5))):
        chex.assert_tree_all_finite(jax.value_and_grad(function, (0, 1))(*arguments))
    assert jax.grad(exposed_time)(0.0, 0.0) == 1  # with no cover all of it is exposed, also the first byte
    check_grads(exposed_time, (2.0, 3.0), order=1, modes=("rev",), rtol=1e-5)
    check_grads(blended_overlap, (2.0, 3.0, 0.3), order=1, modes=("rev",), rtol=1e-5)


SLOWDOWN = floats(0.0, 4.0)


@relaxed
@given(TIME, TIME, SLOWDOWN, SLOWDOWN)
def test_two_streams(compute, communication, a, b):
    time, longest, total = float(two_streams(compute, communication, a, b)), max(compute, communication), compute + communication
    assert longest <= time * (1 + 1e-12)
    if a * b <= 1:
        assert time <= total * (1 + 1e-12)
    assert_allclose(two_streams(communication, compute, b, a), time, rtol=1e-12)  # which stream is called compute does not matter
    assert two_streams(compute, communication, 0.0, 0.0) == longest
    assert two_streams(compute, communication, a + 0.1, b) >= time * (1 - 1e-12)
    # simulate: both run at their slowed rates until one is done, the other goes on alone
    first = min(compute * (1 + a), communication * (1 + b))
    rest = max(compute - first / (1 + a), 0.0) + max(communication - first / (1 + b), 0.0)
    assert_allclose(time, first + rest, rtol=1e-9)


def test_limits_and_gradients_of_two_streams():
    assert_allclose([two_streams(2.0, 3.0, 1e12, 0.0), two_streams(2.0, 3.0, 0.0, 1e12)], 5.0)
    check_grads(two_streams, (2.0, 5.0, 0.3, 0.2), order=1, modes=("fwd", "rev"), rtol=1e-5)
    check_grads(two_streams, (5.0, 2.0, 0.3, 0.2), order=1, modes=("fwd", "rev"), rtol=1e-5)
    for arguments in ((0.0, 0.0, 0.3, 0.2), (1.0, 0.0, 0.0, 0.0), (2.0, 2.0, 0.0, 0.0)):
        chex.assert_tree_all_finite(jax.value_and_grad(two_streams, (0, 1, 2, 3))(*arguments))
    # twice as slow while the other runs: always the sum, so both count fully, also where both end together
    assert_allclose(jax.grad(two_streams, (0, 1))(2.0, 2.0, 1.0, 1.0), (1.0, 1.0), rtol=1e-14)


# energy and money


def test_energy_and_cost_by_hand():
    system = eqx.tree_at(
        lambda s: (s.chip.power, s.chip.idle_power, s.host.power, s.power_usage_effectiveness, s.price_per_hour),
        H100, tuple(jnp.asarray(x) for x in (700.0, 100.0, 500.0, 1.25, 3.6)),
    )  # fmt: skip
    # 8 devices for 10 s, of which 6 s busy: device 100 * 10 + 600 * 6 = 4600 J, host 5000 J; times 1.25
    assert_allclose(step_energy(system, 8, 10.0, 6.0), 8 * 9600 * 1.25)
    assert_allclose(step_energy(system, 8, 10.0, 10.0), 8 * (7000 + 5000) * 1.25)  # never idle: full power
    assert_allclose(step_cost(system, 8, 10.0), 8 * 3.6 / 360)  # 10 s are 1/360 h
