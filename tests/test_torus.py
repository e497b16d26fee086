"""Collectives on a torus: published worked problems, bounds on links, gradients and edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.cost.collective import (
    Torus,
    multislice_all_reduce_time,
    torus_all_gather_time,
    torus_all_reduce_time,
    torus_all_to_all_time,
    torus_of,
    torus_reduce_scatter_time,
    torus_send_time,
)
from diffperf.hardware import load_system

GATHER, REDUCE, EXCHANGE = (jax.jit(fn) for fn in (torus_all_gather_time, torus_all_reduce_time, torus_all_to_all_time))
BF16, LINK, HOP = 2, 4.5e10, 1e-6  # TPU v4p and v5e: one link in one direction, and the book's time per hop


def torus(*extents, wrap=True, link=LINK, latency=HOP):
    return Torus(extents, [float(wrap)] * len(extents), link, latency)


@pytest.mark.parametrize(
    "group, nbytes, seconds",
    [
        # Austin et al. 2025, "Sharded Matrices", pop quiz 2: v5e, axis of 4 without joined ends: 3 hops of 8.4 MB; then 3 hops of 1 us
        (torus(1, 4, wrap=False), 2048 * 8192 * BF16, 560e-6),
        (torus(1, 4, wrap=False), 256 * 256 * BF16, 3e-6),
        # question 2: v4p, 4 x 4 x 4 with joined ends, array of 1024 x 4096: along X; along X and Y; along Z of an array sharded over 16 chips
        (torus(4, 1, 1), 1024 * 4096 * BF16 / 4, 23e-6),
        (torus(4, 4, 1), 1024 * 4096 * BF16, 46e-6),
        (torus(1, 1, 4), 1024 * 4096 * BF16 / 16, 5.8e-6),
        # question 3: 256 bytes over 4 chips: two hops
        (torus(4), 128 * BF16, 2e-6),
    ],
)
def test_all_gather_of_the_scaling_book(group, nbytes, seconds):
    assert_allclose(GATHER(group, nbytes), seconds, rtol=0.05)


def test_other_collectives_of_the_scaling_book():
    """An all-reduce takes twice, a reduce-scatter once, an all-to-all of the same array a quarter of an all-gather (summary table, question 10)."""
    ring, array = torus(16), 1e9
    assert_allclose(REDUCE(ring, array), 2 * array / (2 * LINK), rtol=0.05)
    assert_allclose(torus_reduce_scatter_time(ring, array), array / (2 * LINK), rtol=0.05)
    assert_allclose(EXCHANGE(ring, array / 16), array / (2 * LINK) / 4, rtol=0.05)


def test_message_of_the_scaling_book():
    """"How to Think About TPUs", question 5: 17 MB over a 4 x 4 slice of v5e from corner to corner: first byte after 6 us, all after 188 us."""
    corner = [3, 3]
    assert_allclose(torus_send_time(torus(4, 4, wrap=False), 0.0, corner), 6e-6, rtol=1e-6)
    assert_allclose(torus_send_time(torus(4, 4, wrap=False), 8 * 128 * 8192 * BF16, corner), 188e-6, rtol=0.05)


def test_data_centre_network_of_the_scaling_book():
    """"How to Parallelize a Transformer": with many slices of v5p, 71,360 tokens per chip balance arithmetic and network: 4.59e14 FLOP/s over 6.25e9 B/s.

    A slice of N chips multiplies by two matrices backwards, `8 B D F / N` FLOP; gradients of 4 D F bytes cross between slices.
    """
    width, chips, tokens = 8192 * 32768, 64, 71_360
    arithmetic = 8 * tokens * chips * width / (chips * 4.59e14) / chips
    whole = multislice_all_reduce_time(torus(4, 4, 4), 2 * BF16 * width, 1000.0, 6.25e9)
    assert_allclose(whole - REDUCE(torus(4, 4, 4), 2 * BF16 * width), arithmetic, rtol=0.05)


@settings(deadline=None, max_examples=25)
@given(x=st.integers(1, 16), y=st.integers(1, 16), wrap=st.booleans(), size=st.floats(0, 1e10))
def test_no_faster_than_the_links_allow(x, y, wrap, size):
    """A chip receives all but its own shard over at most two links per axis; cutting the longer axis in half bounds the exchange."""
    group, spanned = torus(x, y, wrap=wrap, latency=0.0), (x > 1) + (y > 1)
    if not spanned:
        assert GATHER(group, size) == REDUCE(group, size) == EXCHANGE(group, size) == 0
        return
    links = 2 * spanned * LINK
    assert GATHER(group, size) >= size * (1 - 1 / (x * y)) / links * (1 - 1e-6)
    n = max(x, y)
    cut = (2 if wrap else 1) * LINK  # links across the middle of the longer axis, per row of chips
    assert EXCHANGE(group, size) >= (n // 2) * (n - n // 2) / n * size / cut * (1 - 1e-6)


def test_more_links_are_never_slower():
    nbytes = jnp.geomspace(1.0, 1e10, 20)
    time = lambda group: jax.vmap(lambda b: torus_all_gather_time(group, b))(nbytes)
    assert np.all(time(torus(16)) <= time(torus(16, wrap=False)))
    assert np.all(time(torus(16, link=2 * LINK)) <= time(torus(16)))
    assert np.all(np.diff(time(torus(4, 4))) >= 0)


@pytest.mark.parametrize("fn", [torus_all_gather_time, torus_all_reduce_time, torus_all_to_all_time])
def test_gradient_is_that_of_finite_differences(fn):
    log_time = jax.jit(lambda p: jnp.log(fn(Torus([8.0, 4.0], [1.0, 0.0], *jnp.exp(p[:2])), jnp.exp(p[2]), 0.1)))
    p = jnp.log(jnp.array([LINK, HOP, 2e5]))
    numeric = [(log_time(p + 1e-5 * e) - log_time(p - 1e-5 * e)) / 2e-5 for e in jnp.eye(3)]
    assert_allclose(jax.grad(log_time)(p), numeric, atol=1e-6)


@pytest.mark.parametrize("extents, nbytes", [((1, 1), 1e6), ((1, 4), 0.0), ((2, 2), 0.0), ((4, 4), 4.5e4)])
def test_gradients_are_finite_at_edges(extents, nbytes):
    """One chip, no bytes, equal axes, and latency equal to transfer."""

    def total(group, size):
        times = [fn(group, size, temperature) for fn in (torus_all_gather_time, torus_all_to_all_time) for temperature in (0.0, 0.1)]
        return sum(times) + multislice_all_reduce_time(group, size, 1.0, 6e9) + torus_send_time(group, size, [0.0, 0.0])

    value, slope = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(torus(*extents), nbytes)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slope))


def test_smooth_maximum_errs_high_and_meets_the_exact_one():
    exact, soft, hot = (GATHER(torus(4), 9e4, temperature) for temperature in (0.0, 1e-3, 0.3))
    assert exact <= soft <= hot <= 2 * exact
    assert_allclose(soft, exact, rtol=2e-3)


def test_catalog_and_wrong_shapes():
    """v5p: 600 GB/s in one direction over six links; a list of axes must match."""
    system = load_system("tpu_v5p")
    assert_allclose(torus_of(system.scale_up, [4, 4, 4], [1, 1, 1]).link_bandwidth, float(system.scale_up.efficiency) * 1e11, rtol=1e-6)
    with pytest.raises(ValueError, match="one number per axis"):
        Torus([4, 4], [1.0], LINK, HOP)
