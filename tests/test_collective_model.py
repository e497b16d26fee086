"""The calibrated model of collectives: worked numbers, limits, gradients, edges, transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.cost.collective import (
    EXCHANGE_KERNELS,
    OPERATIONS,
    CollectiveConstants,
    CustomAllReduceConstants,
    ExpertExchangeConstants,
    NetworkConstants,
    NodeConstants,
    SourceConstants,
    collective_time,
    custom_all_reduce_time,
    distinct_destinations,
    expert_exchange_time,
    saturating_ramp,
    uneven_all_to_all_time,
)


def node(**changes):
    numbers = dict(
        bandwidth=400e9, reduce_rate=1.0, exchange_rate=0.8, local_reduce_bandwidth=1e12, local_gather_bandwidth=1e12, local_scatter_bandwidth=1e12,
        local_exchange_bandwidth=1e12, launch=5e-6, hop=1e-6, second_hop=0.0, second_bytes=16384.0, exchange_launch=9e-6, exchange_hop=0.4e-6,
        peer_bandwidth=6e9, peer_ceiling=6e-6, ramp=20e-6, gather_ramp=1.0, scatter_ramp=1.0, exchange_ramp=0.5, ramp_half=0.7, ramp_power=0.8, nvls=0.0,
        bump_step=0.0, bump_bytes=1e6, bump_limit=4.0, bump_line=0.0,
    )  # fmt: skip
    return NodeConstants(**(numbers | changes))


def network(**changes):
    numbers = dict(bandwidth=200e9, efficiency=0.9, hop=6e-6, ramp_ratio=5.0, ramp_half=0.7, ramp_power=0.5, tree_rate=0.8, nvls=0.0)
    return NetworkConstants(**(numbers | changes))


def constants(**changes):
    parts = dict(node=node(), network=network(), source=SourceConstants())
    return CollectiveConstants(**(parts | changes))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_one_rank_costs_nothing_and_edges_have_finite_gradients(operation, algorithm):
    model = constants(node=node(nvls=0.8, bump_step=7e-6), network=network(nvls=0.8))
    run = lambda m, s, n, p: collective_time(operation, m, s, n, p, algorithm=algorithm)
    assert run(model, 1e6, 1, 1) == 0
    for size, n, p in ((0.0, 8.0, 8.0), (0.0, 1.0, 1.0), (1e6, 1.0, 8.0), (1e6, 8.0, 8.0), (1e6, 16.0, 8.0), (1e13, 4096.0, 8.0), (1e6, 8.0, 1.0)):
        value, gradient = jax.value_and_grad(run, argnums=(0, 1, 2))(model, size, n, p)
        assert np.isfinite(value) and value >= 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_worked_all_reduce_of_one_node():
    """8 ranks, 256 MiB: 2 * 7 steps of 1 us, 7/4 of the buffer over 400 GB/s and an eighth over 1 TB/s, and the ramp of that wire time."""
    size = 2.0**28
    wire = 1.75 * size / 400e9 + size / 8 / 1e12
    ramp = 20e-6 * (wire / (wire + 0.7 * 20e-6)) ** 0.8
    assert_allclose(collective_time("all_reduce", constants(), size, 8, 8), 5e-6 + 14e-6 + wire + ramp, rtol=1e-9)


def test_worked_ring_and_tree_between_two_nodes():
    """Large messages on 2 nodes: the ring carries 15/8 of the buffer through the NICs, the tree the buffer itself, so it wins by nearly that."""
    size, fast = 2.0**36, constants(node=node(bandwidth=1e14))
    nic = 200e9 * 0.9
    ring = collective_time("all_reduce", fast, size, 16, 8, algorithm="ring")
    tree = collective_time("all_reduce", fast, size, 16, 8, algorithm="tree")
    assert_allclose(ring, 1.875 * size / nic, rtol=2e-3)
    assert_allclose(tree, size / nic, rtol=2e-3)
    assert collective_time("all_reduce", fast, size, 16, 8) == tree


def test_nvls_wins_where_it_moves_less():
    """At 8 ranks the switch moves 9/8 of the buffer at 0.8 of the link, 1.41 against 1.75 by ring; at 2 ranks 1.875 against 1."""
    model, size = constants(node=node(nvls=0.8, local_reduce_bandwidth=1e16)), 2.0**36
    assert_allclose(collective_time("all_reduce", model, size, 8, 8), size * 1.125 / (0.8 * 400e9), rtol=1e-3)
    assert_allclose(collective_time("all_reduce", model, size, 2, 2), size / 400e9, rtol=1e-3)
    assert collective_time("all_reduce", model, size, 8, 8, algorithm="ring") > collective_time("all_reduce", model, size, 8, 8)


def test_temperature_errs_low_and_vanishes():
    model = constants(node=node(nvls=0.8))
    exact = collective_time("all_reduce", model, 1e8, 8, 8)
    assert collective_time("all_reduce", model, 1e8, 8, 8, temperature=0.1) <= exact
    assert_allclose(collective_time("all_reduce", model, 1e8, 8, 8, temperature=1e-3), exact, rtol=1e-3)


@settings(max_examples=40, deadline=None)
@given(size=st.floats(1, 1e11), more=st.floats(1, 100), n=st.sampled_from([2, 4, 8, 16, 128]), operation=st.sampled_from(OPERATIONS))
def test_monotone_in_bytes_and_links(size, more, n, operation):
    """More bytes are never faster (without the change of protocol), a faster link or NIC never slower."""
    p = min(n, 8)
    time = _compiled(operation)(constants(), size, n, p)
    assert _compiled(operation)(constants(), size * more, n, p) >= time * (1 - 1e-12)
    assert _compiled(operation)(constants(node=node(bandwidth=400e9 * more)), size, n, p) <= time * (1 + 1e-12)
    assert _compiled(operation)(constants(network=network(bandwidth=200e9 * more)), size, n, p) <= time * (1 + 1e-12)


_CACHE = {}


def _compiled(operation):
    return _CACHE.setdefault(operation, jax.jit(lambda m, s, n, p: collective_time(operation, m, s, n, p)))


@pytest.mark.parametrize("n", [8.0, 32.0])
def test_gradient_is_that_of_finite_differences(n):
    model = constants(node=node(bump_step=7e-6, second_hop=0.2, nvls=0.7), network=network(nvls=0.7), source=SourceConstants(floor=2e-5))
    leaves, tree = jax.tree.flatten(model)
    leaves = jnp.array(leaves)

    @jax.jit
    def log_time(logs):
        return jnp.log(collective_time("all_reduce", jax.tree.unflatten(tree, list(jnp.exp(logs))), 3e7, n, 8.0))

    logs, h = jnp.log(jnp.where(leaves > 0, leaves, 1e-3)), 1e-5
    numeric = [(log_time(logs + h * e) - log_time(logs - h * e)) / (2 * h) for e in jnp.eye(len(leaves))]
    assert_allclose(jax.grad(log_time)(logs), numeric, atol=1e-7)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_units_and_transforms(operation):
    """Seconds times 1000 and bytes times 1000 follow through; jit, vmap and float32 agree."""
    model = constants()
    scaled_time = jax.tree.map(lambda x: x, model)
    k = 1000.0
    slow = node(bandwidth=400e9 / k, local_reduce_bandwidth=1e12 / k, local_gather_bandwidth=1e12 / k, local_scatter_bandwidth=1e12 / k,
                local_exchange_bandwidth=1e12 / k, launch=5e-6 * k, hop=1e-6 * k, exchange_launch=9e-6 * k, exchange_hop=0.4e-6 * k,
                peer_bandwidth=6e9 / k, peer_ceiling=6e-6 * k, ramp=20e-6 * k)  # fmt: skip
    in_ms = constants(node=slow, network=network(bandwidth=200e9 / k, hop=6e-6 * k))
    for n, p in ((8.0, 8.0), (16.0, 8.0)):
        time = collective_time(operation, scaled_time, 1e7, n, p)
        assert_allclose(collective_time(operation, in_ms, 1e7, n, p), k * time, rtol=1e-9)
        many = jax.jit(jax.vmap(lambda s, n=n, p=p: collective_time(operation, model, s, n, p)))(jnp.array([1e7, 1e3]))
        assert_allclose(many[0], time, rtol=1e-12)
        with jax.enable_x64(False):
            single = collective_time(operation, constants(), 1e7, n, p)
        assert_allclose(single, time, rtol=1e-4)


def test_floor_and_source_factors():
    quick = collective_time("all_reduce", constants(), 8, 8, 8)
    held = collective_time("all_reduce", constants(source=SourceConstants(floor=1e-4)), 8, 8, 8)
    assert_allclose(held, (quick**3 + 1e-12) ** (1 / 3), rtol=1e-9)
    assert_allclose(collective_time("all_reduce", constants(source=SourceConstants(latency=2.0)), 0, 8, 8), 2 * quick, rtol=2e-2)
    wide = collective_time("all_reduce", constants(source=SourceConstants(wire=2.0)), 2.0**36, 8, 8)
    assert_allclose(wide, 2 * collective_time("all_reduce", constants(), 2.0**36, 8, 8), rtol=1e-3)


def test_change_of_protocol_makes_the_only_fall():
    """The documented bump: four ranks double within one doubling of the size, and the extra time is gone far above it."""
    plain, bump = constants(node=node(ramp=1e-6)), constants(node=node(ramp=1e-6, bump_step=7e-6, bump_limit=10.0))
    extra = [collective_time("all_reduce", bump, s, 4, 4) - collective_time("all_reduce", plain, s, 4, 4) for s in (1e6, 8e6, 4e9)]
    assert extra[0] < 1e-6 and extra[1] > 20e-6 and extra[2] < 1e-6


def test_ramp_saturates():
    ramp = [float(saturating_ramp(jnp.asarray(x), jnp.asarray(1e-5), jnp.asarray(0.7), jnp.asarray(0.5))) for x in (0.0, 1e-6, 1e-5, 1.0)]
    assert ramp[0] == 0 and ramp == sorted(ramp)
    assert_allclose(ramp[3], 1e-5, rtol=1e-4)


def test_uneven_all_to_all_waits_for_the_busiest_rank():
    sent = jnp.array([1e6, 3e6, 2e6, 2e6])
    received = jnp.array([2e6, 1e6, 1e6, 4e6])
    even = collective_time("all_to_all", constants(), 4e6, 4, 4)
    assert_allclose(uneven_all_to_all_time(constants(), sent, received, 4), even, rtol=1e-12)
    gradient = jax.grad(lambda r: uneven_all_to_all_time(constants(), sent, r, 4))(received)
    assert gradient[3] > 0 and not gradient[:3].any()


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="operation is 'gossip'.*all_reduce"):
        collective_time("gossip", constants(), 1, 2, 2)
    with pytest.raises(ValueError, match="algorithm is 'star'"):
        collective_time("all_reduce", constants(), 1, 2, 2, algorithm="star")
    with pytest.raises(ValueError, match="kernel is 'x'"):
        expert_exchange_time("x", exchange(), 1, 1, 1, 2, 2)


def test_custom_all_reduce_changes_from_one_shot_to_two():
    model = CustomAllReduceConstants(4e-6, 0.1e-6, 300e9, 10e-6, 300e9, blend=200.0)
    assert_allclose(custom_all_reduce_time(model, 1e4, 8), 4.7e-6 + 7e4 / 300e9, rtol=1e-4)
    assert_allclose(custom_all_reduce_time(model, 1e8, 8), 4.7e-6 + 10e-6 + 1.75e8 / 300e9, rtol=1e-4)
    assert custom_all_reduce_time(model, 1e4, 1) == 0
    assert np.isfinite(jax.grad(custom_all_reduce_time, argnums=1)(model, 0.0, 1.0))


def exchange(**changes):
    numbers = dict(launch=20e-6, hop=1e-6, bandwidth=400e9, processor_bandwidth=30e9, token_time=0.0, expert_time=0.0, ramp=1e-9, network_bandwidth=50e9,
                   network_launch=30e-6, network_hop=10e-6)  # fmt: skip
    return ExpertExchangeConstants(**(numbers | changes))


def test_destinations_of_a_token():
    """With k = 8 of 8 ranks a token reaches 8 (1 - (7/8)^8) = 5.25 of them; one expert reaches one rank; one rank holds them all."""
    assert_allclose(distinct_destinations(8, 8), 8 * (1 - (7 / 8) ** 8))
    assert_allclose(distinct_destinations(8, 1), 1.0)
    assert_allclose(distinct_destinations(1, 8), 1.0)


def test_expert_exchange_counts_bytes_per_kernel():
    tokens, hidden = 1e6, 14336.0
    low = expert_exchange_time("low_latency", exchange(), tokens, hidden, 8, 8, 8)
    high = expert_exchange_time("high_throughput", exchange(), tokens, hidden, 8, 8, 8)
    assert_allclose(low, tokens * hidden * 7 / 400e9, rtol=1e-3)
    assert_allclose(high, tokens * hidden * 8 * (1 - (7 / 8) ** 8) / 400e9, rtol=1e-3)
    few = expert_exchange_time("high_throughput", exchange(), tokens, hidden, 8, 8, 8, processors=4)
    assert_allclose(few / high, 400 / 120, rtol=5e-3)


@pytest.mark.parametrize("kernel", EXCHANGE_KERNELS)
def test_expert_exchange_edges(kernel):
    assert expert_exchange_time(kernel, exchange(), 100, 1e4, 8, 1, 8) == 0
    for tokens, n, p in ((0.0, 8.0, 8.0), (10.0, 32.0, 8.0), (10.0, 1.0, 1.0)):
        gradient = jax.grad(lambda m, t, n=n, p=p: expert_exchange_time(kernel, m, t, 1e4, 8.0, n, p, 20.0), argnums=(0, 1))(exchange(), tokens)
        assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(gradient))
    near, far = (expert_exchange_time(kernel, exchange(), 4096, 1e4, 8, n, 8) for n in (8, 32))
    assert far > near
