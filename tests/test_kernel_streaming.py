"""Streaming kernels: limits by bandwidth, latency and launch, gradients, edges, bounds, fits."""

import glob
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.calibrate.kernels import _rows_streaming
from diffperf.calibrate.kernels._fit import fit_kernels, predict_rows
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._device import Device
from diffperf.cost.kernel._families import STREAMING
from diffperf.cost.kernel._streaming import (
    STREAMING_PRIORS,
    StreamingConstants,
    StreamingShape,
    adam_shape,
    cast_shape,
    cross_entropy_shape,
    elementwise_shape,
    normalisation_shape,
    reduction_shape,
    streaming_bound,
    streaming_bytes,
    streaming_features,
    streaming_kernel_time,
    streaming_roofline,
)  # fmt: skip
from diffperf.io import read_kernels

H100 = Device(9.89e14, 3.35e12, 132.0, 50e6)
CONSTANTS = constrain(StreamingConstants, STREAMING_PRIORS, jnp.zeros(len(StreamingConstants._fields)))
DATA = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "data", "kernels")
SIZE = st.floats(0, 22).map(lambda x: float(np.round(2**x)))


def test_a_large_kernel_is_bound_by_memory():
    """2^30 elements, two reads and one write of 2 B: 6.44 GB over 85% of 3.35 TB/s is 2.263 ms; launch and the first block add microseconds."""
    time = streaming_kernel_time(elementwise_shape(2.0**30, inputs=2), H100, CONSTANTS)
    expected = 6 * 2**30 / (0.85 * 3.35e12)
    assert expected < time < 1.06 * expected


def test_a_cached_kernel_runs_at_the_cache():
    """12 MB fit into 50 MB: reading and writing at 1.8 times the memory bandwidth."""
    sharp = CONSTANTS._replace(cache_step=50.0, launch=0.0, row_latency=0.0, near=1e3)
    assert_allclose(streaming_kernel_time(normalisation_shape(1000, 3000), H100, sharp), 12e6 / (1.8 * 3.35e12), rtol=1e-3)
    cold = streaming_kernel_time(normalisation_shape(1000, 3000)._replace(cold=1.0), H100, sharp)
    assert_allclose(cold, 6e6 / (0.85 * 3.35e12) + 6e6 / (1.8 * 3.35e12), rtol=1e-3)


def test_one_long_row_is_bound_by_one_processor():
    """One row of 1e6 elements of 2 B on a processor that streams at four times its share of the bandwidth, read 1.2 times and written once."""
    c = CONSTANTS._replace(launch=0.0, overlap=8.0)
    expected = 0.5e-6 + (1.2 * 2e6 + 2e6) / (4 * 3.35e12 / 132)
    assert_allclose(streaming_kernel_time(normalisation_shape(1, 1e6), H100, c), expected, rtol=2e-3)


def test_a_tiny_kernel_is_bound_by_launch_and_one_latency():
    assert_allclose(streaming_kernel_time(elementwise_shape(1.0), H100, CONSTANTS), 2.2e-6 + 0.5e-6, rtol=1e-2)


def test_bytes_of_the_usual_kernels():
    n = 4096.0 * 1000
    assert_allclose(streaming_bytes(elementwise_shape(n, inputs=2, element_bytes=2)), 6 * n)
    assert_allclose(streaming_bytes(cast_shape(n, 4, 2)), 6 * n)
    assert_allclose(streaming_bytes(normalisation_shape(1000, 4096, backward=True)), 6 * n)
    assert_allclose(streaming_bytes(reduction_shape(1000, 4096)), 2 * n + 2 * 1000)
    assert_allclose(streaming_bytes(cross_entropy_shape(1000, 4096, 4)), 4 * n + 4 * 1000)
    assert_allclose(streaming_bytes(cross_entropy_shape(1000, 4096, 4, backward=True)), 8 * n)
    assert_allclose(streaming_bytes(adam_shape(n)), (4 + 4 + 8 + 4 + 8 + 2) * n)  # gradient, master, moments; master, moments, working copy


def test_nothing_to_move_takes_no_time_and_has_finite_gradients():
    value_and_slope = jax.jit(jax.value_and_grad(lambda s: streaming_kernel_time(s, H100, CONSTANTS)))
    for shape in (normalisation_shape(0.0, 128.0), normalisation_shape(128.0, 0.0), elementwise_shape(0.0), cast_shape(0.0, 2.0, 1.0)):
        time, slope = value_and_slope(jax.tree.map(jnp.asarray, shape))
        assert time == 0 and all(np.isfinite(x) for x in slope)
    assert np.isfinite(jax.grad(lambda x: streaming_kernel_time(elementwise_shape(x), H100, CONSTANTS))(0.0))


@pytest.mark.parametrize("temperature", [0.0, 0.1])
def test_gradients_match_finite_differences(temperature):
    def log_time(p):
        shape = StreamingShape(*jnp.exp(p[:4]), cold=0.3)
        device = Device(1.0, *jnp.exp(p[4:7]))
        return jnp.log(streaming_kernel_time(shape, device, StreamingConstants(*jnp.exp(p[7:])), temperature))

    many, slope_of = jax.jit(jax.vmap(log_time)), jax.jit(jax.grad(log_time))
    for rows, columns in ((77.0, 5000.0), (30000.0, 1000.0), (1.0, 12.0), (1e6, 4096.0)):
        p = jnp.log(jnp.array([rows, columns, 2.0, 2.0, *H100[1:], *CONSTANTS]))
        steps = 1e-5 * jnp.eye(len(p))
        assert_allclose(slope_of(p), (many(p + steps) - many(p - steps)) / 2e-5, atol=2e-6)


def test_jit_vmap_and_eager_agree():
    shape = StreamingShape(jnp.array([1.0, 333.0, 5e4]), jnp.array([4096.0, 77.0, 1e4]), 2.0, 2.0)
    eager = streaming_kernel_time(shape, H100, CONSTANTS)
    assert_allclose(jax.jit(streaming_kernel_time)(shape, H100, CONSTANTS), eager, rtol=1e-12)
    one = jax.vmap(lambda r, c: streaming_kernel_time(StreamingShape(r, c), H100, CONSTANTS))
    assert_allclose(one(shape.rows, shape.columns), eager, rtol=1e-12)
    with jax.enable_x64(False):
        assert_allclose(streaming_kernel_time(StreamingShape(5e4, 1e4), H100, StreamingConstants(*map(float, CONSTANTS))), eager[2], rtol=1e-4)


TIME = jax.jit(lambda r, c, e, w: streaming_kernel_time(StreamingShape(r, c, e, e), H100._replace(bandwidth=w), CONSTANTS, 0.05))


@settings(deadline=None, max_examples=60)
@given(rows=SIZE, columns=SIZE, element=st.sampled_from([1.0, 2.0, 4.0]), factor=st.floats(1.0, 8.0))
def test_monotone_and_never_below_the_bound(rows, columns, element, factor):
    base = TIME(rows, columns, element, 3.35e12)
    slack = 1 - 1e-9
    assert TIME(rows * factor, columns, element, 3.35e12) >= base * slack
    assert TIME(rows, columns * factor, element, 3.35e12) >= base * slack
    assert TIME(rows, columns, element * factor, 3.35e12) >= base * slack
    assert TIME(rows, columns, element, 3.35e12 * factor) <= base / slack
    shape = StreamingShape(rows, columns, element, element)
    assert base >= streaming_bound(shape, H100) * slack
    assert streaming_bound(shape, H100) <= streaming_roofline(shape, H100)
    assert np.isfinite(streaming_features(shape, H100)).all()


def test_a_fit_recovers_what_made_the_data():
    rng = np.random.default_rng(0)
    shape = StreamingShape(2 ** rng.uniform(0, 16, 400), 2 ** rng.uniform(5, 15, 400), np.full(400, 2.0), np.full(400, 2.0), np.zeros(400))
    truth = CONSTANTS._replace(launch=4e-6, memory=0.7, row_latency=3e-6)
    time = np.asarray(streaming_kernel_time(shape, H100, truth))
    fit = fit_kernels(STREAMING, shape, H100, np.log(time), starts=0)
    assert_allclose(fit.constants().launch, 4e-6, rtol=0.02)
    large = StreamingShape(1e6, 1e4)  # memory, cached and output share what the data says of bandwidth
    assert_allclose(streaming_kernel_time(large, H100, fit.constants()), streaming_kernel_time(large, H100, truth), rtol=0.02)
    assert np.abs(np.exp(predict_rows(fit, shape, H100)) / time - 1).mean() < 0.005


def test_rows_of_a_table():
    table = read_kernels({
        "gpu": ["h100"] * 6, "op": ["add", "layernorm", "quantize_scale_matrix", "quantize_computescale", "quantize_computescale", "mlp_act"],
        "dtype": ["fp16", "fp32", "fp8", "fp8", "fp8", "fp16"], "library": ["torch", "torch", "vllm", "trtllm", "vllm", "vidur"],
        "kernel_source": ["", "", "", "", "a_minus_b", ""], "m": [64.0] * 6, "n": [4096.0] * 6, "k": [4096.0] * 6, "time_us": [3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    })  # fmt: skip
    (found,) = _rows_streaming.rows(table)
    elements = 64 * 4096
    assert list(found.library) == ["torch/add", "torch/layernorm", "vllm/quantize_scale_matrix", "trtllm/quantize_computescale", "vidur/mlp_act"]
    assert_allclose(streaming_bytes(found.shape), [6 * elements, 8 * elements, 3 * elements, 2 * elements + 4 * 64, 6 * elements])
    assert_allclose(found.shape.rows, [256, 64, 64, 64, 64])  # blocks of 1024 elements; tokens
    assert list(found.group) == ["64x4096"] * 5 and sum(found.left_out.values()) == 1
    assert _rows_streaming.rows(table.take(np.array([], int))) == []


def test_unseen_shapes_of_measured_kernels():
    files = glob.glob(os.path.join(DATA, "aic_quantize_scale_matrix_h100_sxm.csv.gz"))
    if not files:
        pytest.skip("the measured kernels are not beside this checkout")
    (found,) = _rows_streaming.rows(read_kernels(files[0]))
    found = found.take(found.library == "trtllm/quantize_scale_matrix")
    unseen = np.array([sum(map(ord, g)) % 4 == 0 for g in found.group])
    seen = found.take(np.flatnonzero(~unseen)[::2])
    fit = fit_kernels(found.family, seen.shape, H100, np.log(seen.time), starts=0)
    rest = found.take(unseen)
    assert np.abs(np.exp(predict_rows(fit, rest.shape, H100)) / rest.time - 1).mean() < 0.08
