"""Gathering kernels: published curve and factors, hit rates, limits, gradients, edges, monotone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.calibrate.kernels._families import Family
from diffperf.calibrate.kernels._fit import fit_kernels
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._device import Device
from diffperf.cost.kernel._memory_curve import MEMORY_CURVES, sigmoid_curve_time
from diffperf.cost.kernel._sparse import (
    SPARSE_PRIORS,
    AggregationShape,
    EmbeddingBagShape,
    SparseConstants,
    aggregation_bytes,
    aggregation_kernel_time,
    cache_hit_rate,
    embedding_bag_bytes,
    embedding_bag_kernel_time,
    sparse_bound,
    sparse_features,
    sparse_roofline,
)

A100 = Device(312e12, 1.555e12, 108.0, 40e6)
CONSTANTS = SparseConstants(*map(float, constrain(SparseConstants, SPARSE_PRIORS, jnp.zeros(len(SparseConstants._fields)))))
SIZE = st.floats(0, 24).map(lambda x: float(np.round(2**x)))
BAG = jax.jit(lambda b, p, r, w, s, bw, t: embedding_bag_kernel_time(EmbeddingBagShape(b, p, r, w, skew=s), A100._replace(bandwidth=bw), CONSTANTS, t))
GRAPH = jax.jit(lambda n, e, f, i, bw, t: aggregation_kernel_time(AggregationShape(n, n, e, f, imbalance=i), A100._replace(bandwidth=bw), CONSTANTS, t))


# Times in us at 2^12, 2^18, 2^20, 2^22, 2^24, 2^26, 2^28, 2^31 bytes, worked out from the published constants of arXiv 2404.12674.
CURVE = {
    "a100": (6.450, 11.838, 12.720, 11.529, 19.390, 55.925, 201.936, 1550.177),
    "v100": (4.833, 8.775, 11.023, 14.673, 31.323, 96.628, 352.220, 2633.483),
    "gv100": (6.963, 10.207, 12.156, 18.677, 41.862, 124.550, 433.891, 3579.876),
}


@pytest.mark.parametrize("chip", CURVE)
def test_the_published_curve(chip):
    nbytes = 2.0 ** np.array([12, 18, 20, 22, 24, 26, 28, 31])
    assert_allclose(sigmoid_curve_time(MEMORY_CURVES[chip], nbytes) * 1e6, CURVE[chip], rtol=1e-4)
    x = 2.0 ** np.linspace(0, 34, 500)
    smooth = np.asarray(sigmoid_curve_time(MEMORY_CURVES[chip], x, 0.1))
    assert (np.abs(np.diff(np.log(smooth))) < 0.06).all()  # no jump, where the published pieces jump by 60%


def test_narrow_rows_take_longer_as_published():
    """arXiv 2404.12674: 1.55 times for at most 32 floats a row, 1.1 times for at most 64."""
    per_byte = lambda width: (BAG(1e5, 1.0, 1e9, width, 0.0, A100.bandwidth, 0.0) - CONSTANTS.launch) / (width * 4)
    index = lambda width: 1 + 8 / (4 * width) / CONSTANTS.memory * CONSTANTS.random  # indices and outputs weigh more beside narrow rows
    assert_allclose(per_byte(32.0) / per_byte(512.0), 1.55 * index(32), rtol=0.08)
    assert_allclose(per_byte(64.0) / per_byte(512.0), 1.10 * index(64), rtol=0.08)


def test_hit_rate():
    assert_allclose(cache_hit_rate(1e6, 1e6, 1e9), np.exp(-1), rtol=1e-6)  # as many draws as rows: 1 - (1 - 1/e) of them repeat
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 1000, 3000)
    assert_allclose(cache_hit_rate(3000, 1000, 1e4), 1 - len(np.unique(drawn)) / 3000, atol=0.02)
    assert_allclose(cache_hit_rate(1e12, 1e6, 2.5e5), 0.25, rtol=1e-5)  # a quarter of the rows held, drawn evenly
    ranks = np.arange(1, 1_000_001) ** -0.5
    assert_allclose(cache_hit_rate(1e12, 1e6, 2.5e5, 0.5), ranks[:250_000].sum() / ranks.sum(), rtol=2e-3)
    assert cache_hit_rate(0.0, 1e6, 1e3) == 0
    assert_allclose(cache_hit_rate(1e12, 10.0, 1e9), 1)


def test_large_table_is_bound_by_random_access_and_a_small_one_by_the_cache():
    """1e6 rows of 512 B: 0.512 GB gathered at 70% of memory bandwidth, or, of 1000 rows, at 1.7 times it; indices and sums stream."""
    c = CONSTANTS._replace(launch=0.0, overlap=7.9, narrow=0.0)
    of = lambda table: embedding_bag_kernel_time(EmbeddingBagShape(1e5, 10.0, table, 128.0), A100, c)
    stream = 8e6 + 1e5 * 512
    assert_allclose(of(1e12), (5.12e8 / 0.7 + stream / 0.85) / 1.555e12, rtol=1e-2)
    assert_allclose(of(1000.0), (5.12e8 + stream) / (1.7 * 1.555e12), rtol=1e-2)


def test_a_gradient_reads_and_writes_what_the_sum_reads():
    c = CONSTANTS._replace(launch=0.0)
    shape = EmbeddingBagShape(1e5, 20.0, 1e12, 256.0, index_bytes=0.0)
    ratio = embedding_bag_kernel_time(shape._replace(write_back=1.0), A100, c) / embedding_bag_kernel_time(shape, A100, c)
    assert 1.9 < ratio < 2.0  # only the outputs do not double
    assert_allclose(embedding_bag_bytes(shape._replace(write_back=1.0)) - embedding_bag_bytes(shape), 1e5 * 20 * 1024)


def test_a_hub_bounds_the_aggregation():
    """A node with 1e6 of 2e6 edges of 256 B: one processor reads 256 MB at 4 times its share of the bandwidth."""
    c = CONSTANTS._replace(launch=0.0)
    shape = AggregationShape(1e6, 1e6, 2e6, 64.0, imbalance=5e5)
    assert_allclose(aggregation_kernel_time(shape, A100, c), 1e6 * 256 / (4 * 1.555e12 / 108), rtol=1e-9)
    even = aggregation_kernel_time(shape._replace(imbalance=1.0), A100, c)
    assert even > sparse_bound(shape, A100) and even < 2e6 * 256 * 3 / 1.555e12
    assert_allclose(aggregation_bytes(shape), 3e6 * 256 + 2e6 * 8)
    assert_allclose(sparse_roofline(shape, A100), (3e6 * 256 + 2e6 * 8) / 1.555e12)


def test_nothing_named_takes_no_time_and_has_finite_gradients():
    bag = jax.jit(jax.value_and_grad(lambda p: embedding_bag_kernel_time(EmbeddingBagShape(*p), A100, CONSTANTS)))
    graph = jax.jit(jax.value_and_grad(lambda p: aggregation_kernel_time(AggregationShape(*p), A100, CONSTANTS)))
    for p in ((0.0, 4.0, 100.0, 8.0), (4.0, 0.0, 100.0, 8.0), (4.0, 4.0, 0.0, 8.0), (4.0, 4.0, 100.0, 0.0)):
        for f in (bag, graph):
            time, slope = f(jnp.array(p))
            assert np.isfinite(time) and np.isfinite(slope).all()
            if p[2] and f is bag:
                assert (time == 0) == (0 in (p[0], p[1], p[3]))
    assert graph(jnp.array([4.0, 4.0, 0.0, 8.0]))[0] == 0


def test_gradients_match_finite_differences():
    def log_time(p):
        device, c = A100._replace(bandwidth=jnp.exp(p[4]), cache=jnp.exp(p[5])), SparseConstants(*jnp.exp(p[6:]))
        bag = embedding_bag_kernel_time(EmbeddingBagShape(*jnp.exp(p[:4]), skew=0.4), device, c, 0.1)
        graph = aggregation_kernel_time(AggregationShape(jnp.exp(p[0]), *jnp.exp(p[:1]), jnp.exp(p[2]), jnp.exp(p[3]), imbalance=jnp.exp(p[1])), device, c, 0.1)
        return jnp.log(jnp.stack([bag, graph]))

    many, slope = jax.jit(jax.vmap(log_time)), jax.jit(jax.jacobian(log_time))
    for sizes in ((1e4, 3.0, 1e6, 33.0), (1e5, 20.0, 1e5, 130.0)):
        p = jnp.log(jnp.array([*sizes, 1.555e12, 40e6, *CONSTANTS]))
        steps = 1e-5 * jnp.eye(len(p))
        assert_allclose(slope(p).T, (many(p + steps) - many(p - steps)) / 2e-5, atol=3e-6)


def test_jit_vmap_and_eager_agree():
    rows = jnp.array([10.0, 1e5, 1e9])
    one = lambda r: embedding_bag_kernel_time(EmbeddingBagShape(1000.0, 7.0, r, 100.0), A100, CONSTANTS)
    assert_allclose(jax.vmap(one)(rows), one(rows), rtol=1e-12)
    assert_allclose(BAG(1000.0, 7.0, rows, 100.0, 0.0, A100.bandwidth, 0.0), one(rows), rtol=1e-12)


@settings(deadline=None, max_examples=50)
@given(a=SIZE, b=st.floats(1, 100), rows=SIZE, width=st.floats(1, 1000), skew=st.floats(0, 0.9), factor=st.floats(1.0, 8.0))
def test_monotone_and_never_below_the_bound(a, b, rows, width, skew, factor):
    w, slack = A100.bandwidth, 1 - 1e-9
    base = BAG(a, b, rows, width, skew, w, 0.05)
    assert BAG(a * factor, b, rows, width, skew, w, 0.05) >= base * slack
    assert BAG(a, b, rows * factor, width, skew, w, 0.05) >= base * slack
    assert BAG(a, b, rows, width, skew, w * factor, 0.05) <= base / slack
    assert base >= sparse_bound(EmbeddingBagShape(a, b, rows, width, skew=skew), A100) * slack
    base = GRAPH(rows, a * b, width, b, w, 0.05)
    assert GRAPH(rows, a * b * factor, width, b, w, 0.05) >= base * slack
    assert GRAPH(rows, a * b, width, b * factor, w, 0.05) >= base * slack
    assert GRAPH(rows, a * b, width, b, w * factor, 0.05) <= base / slack
    assert np.isfinite(sparse_features(EmbeddingBagShape(a, b, rows, width), A100)).all()
    assert np.isfinite(sparse_features(AggregationShape(rows, rows, a, width), A100)).all()


def test_a_fit_recovers_what_made_the_data():
    rng = np.random.default_rng(0)
    n = 400
    shape = EmbeddingBagShape(2 ** rng.uniform(4, 18, n), 2 ** rng.uniform(0, 7, n), 2 ** rng.uniform(8, 26, n), 2 ** rng.uniform(3, 9, n))
    shape = EmbeddingBagShape(*(np.broadcast_to(np.asarray(x, float), n) for x in shape))
    time = embedding_bag_kernel_time(shape, A100, CONSTANTS._replace(launch=6e-6, random=0.5))
    family = Family("embedding_bag", SparseConstants, SPARSE_PRIORS, embedding_bag_kernel_time, sparse_bound, sparse_features, sparse_roofline)
    found = fit_kernels(family, shape, A100, np.log(np.asarray(time)), starts=0).constants()
    assert_allclose(found.launch, 6e-6, rtol=0.02)
    assert_allclose(found.random, 0.5, rtol=0.05)
