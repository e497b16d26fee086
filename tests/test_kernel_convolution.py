"""Convolutions: FLOP and output sizes by counting, agreement with the matmul, limits, gradients, monotone."""

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
from diffperf.cost.kernel._convolution import (
    CONVOLUTION_PRIORS,
    PASSES,
    ConvolutionConstants,
    ConvolutionShape,
    convolution_bound,
    convolution_bytes,
    convolution_features,
    convolution_flops,
    convolution_kernel_time,
    convolution_matmul,
    convolution_roofline,
    output_size,
)
from diffperf.cost.kernel._device import Device
from diffperf.cost.kernel._matmul import MATMUL_PRIORS, MatmulConstants, MatmulShape, matmul_kernel_time

H100 = Device(9.89e14, 3.35e12, 132.0, 50e6)
start = lambda kind, priors: kind(*map(float, constrain(kind, priors, jnp.zeros(len(kind._fields)))))
MATMUL = start(MatmulConstants, MATMUL_PRIORS)
CONSTANTS = start(ConvolutionConstants, CONVOLUTION_PRIORS)
LAYER = ConvolutionShape(32.0, 256.0, 512.0, 1.0, 56.0, 56.0, 1.0, 3.0, 3.0, stride=2.0, padding=1.0)
VOLUME = ConvolutionShape(2.0, 32.0, 64.0, 64.0, 64.0, 64.0, 3.0, 3.0, 3.0, padding=1.0)
DEPTHWISE = ConvolutionShape(32.0, 512.0, 512.0, 1.0, 28.0, 28.0, 1.0, 3.0, 3.0, padding=1.0, groups=512.0)
TIME = jax.jit(convolution_kernel_time, static_argnames="which")


@given(size=st.integers(1, 40), kernel=st.integers(1, 7), stride=st.integers(1, 4), dilation=st.integers(1, 3), padding=st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_output_size_by_counting(size, kernel, stride, dilation, padding):
    if kernel == 1:
        stride, dilation, padding = 1, 1, 0  # a direction that the filter does not span is left alone
    places = [x for x in range(0, size + 2 * padding, stride) if x + dilation * (kernel - 1) < size + 2 * padding]
    shape = LAYER._replace(stride=float(stride), dilation=float(dilation), padding=float(padding))
    assert output_size(size, kernel, shape) == len(places)


def test_flops_and_bytes_of_known_layers():
    """First block of ResNet-50's third stage: 32 x 28 x 28 outputs of 512 channels, 256 x 9 multiply-adds each."""
    assert_allclose(convolution_flops(LAYER), 2 * 32 * 28 * 28 * 512 * 256 * 9)
    assert_allclose(convolution_bytes(LAYER), 2 * (32 * 256 * 56 * 56 + 512 * 256 * 9 + 32 * 512 * 28 * 28))
    assert_allclose(convolution_flops(VOLUME), 2 * 2 * 64**3 * 64 * 32 * 27)
    assert_allclose(convolution_flops(DEPTHWISE), 2 * 32 * 28 * 28 * 512 * 9)


@pytest.mark.parametrize("layer", [LAYER, VOLUME, DEPTHWISE, LAYER._replace(groups=4.0, dilation=2.0)])
@pytest.mark.parametrize("which", PASSES)
def test_every_pass_multiplies_and_moves_the_same(layer, which):
    p = convolution_matmul(layer, which)
    assert_allclose(2 * p.batch * p.m * p.n * p.k, convolution_flops(layer))
    assert_allclose(p.batch * (p.m * p.k * p.a_bytes + p.k * p.n * p.b_bytes + p.m * p.n * p.c_bytes), convolution_bytes(layer))


def test_an_unknown_pass_is_refused():
    with pytest.raises(ValueError, match="sideways.*forward, input_gradient, weight_gradient"):
        convolution_matmul(LAYER, "sideways")


def test_a_filter_of_one_element_is_a_matmul():
    shape = ConvolutionShape(8.0, 1024.0, 2048.0, 1.0, 32.0, 32.0, 1.0, 1.0, 1.0)
    plain = MatmulShape(8 * 32 * 32.0, 2048.0, 1024.0, cold=1.0)
    assert_allclose(TIME(shape, H100, CONSTANTS._replace(gather=1.0), MATMUL), jax.jit(matmul_kernel_time)(plain, H100, MATMUL), rtol=1e-9)


def test_a_large_convolution_reaches_the_rate_of_the_matmul():
    """90% of what the 256-wide tiles reach, 75% of the peak, and the throttle of long kernels."""
    big = LAYER._replace(batch=512.0, in_channels=1024.0, out_channels=1024.0)
    for which in PASSES:
        share = convolution_flops(big) / H100.peak / TIME(big, H100, CONSTANTS, MATMUL, which)
        assert 0.5 < share < 0.9 * 0.75


def test_a_depthwise_convolution_streams():
    expected = MATMUL.launch + convolution_bytes(DEPTHWISE) / (0.6 * 3.35e12)
    assert_allclose(TIME(DEPTHWISE, H100, CONSTANTS, MATMUL), expected, rtol=1e-9)
    slow_vectors = CONSTANTS._replace(vector=1e-4)
    assert TIME(DEPTHWISE, H100, slow_vectors, MATMUL) > expected


def test_patches_cost_cache_traffic():
    """Without reuse bandwidth to spare, the nine patches of each element are read at that bandwidth, once per 128 output channels."""
    slow = CONSTANTS._replace(reuse=0.05, vector=1e-9)
    patches = 2 * 32 * 28 * 28 * 256 * 9 - 2 * 32 * 56 * 56 * 256
    assert_allclose(TIME(LAYER, H100, slow, MATMUL), 4 * patches / (0.05 * 3.35e12), rtol=0.02)


def test_an_empty_output_takes_no_time_and_has_finite_gradients():
    value_and_slope = jax.jit(jax.value_and_grad(lambda s: convolution_kernel_time(s, H100, CONSTANTS, MATMUL)))
    for empty in (LAYER._replace(batch=0.0), LAYER._replace(in_channels=0.0), LAYER._replace(height=1.0, padding=0.0), LAYER._replace(out_channels=0.0)):
        time, slope = value_and_slope(jax.tree.map(jnp.asarray, empty))
        assert time == 0 and all(np.isfinite(x) for x in slope)


@pytest.mark.parametrize("which", PASSES)
def test_gradients_match_finite_differences(which):
    def log_time(p):
        shape = LAYER._replace(batch=jnp.exp(p[0]), in_channels=jnp.exp(p[1]), out_channels=jnp.exp(p[2]), element_bytes=jnp.exp(p[3]))
        device = Device(*jnp.exp(p[4:8]))
        return jnp.log(convolution_kernel_time(shape, device, ConvolutionConstants(*jnp.exp(p[8:12])), MatmulConstants(*jnp.exp(p[12:])), which, 0.1))

    p = jnp.log(jnp.array([31.3, 250.7, 509.1, 2.0, *H100, *CONSTANTS, *MATMUL]))
    steps = 1e-6 * jnp.eye(len(p))
    many = jax.jit(jax.vmap(log_time))
    assert_allclose(jax.jit(jax.grad(log_time))(p), (many(p + steps) - many(p - steps)) / 2e-6, atol=3e-6)


def test_jit_vmap_and_eager_agree():
    batch = jnp.array([1.0, 33.0, 256.0])
    one = lambda b: convolution_kernel_time(LAYER._replace(batch=b), H100, CONSTANTS, MATMUL)
    assert_allclose(jax.jit(jax.vmap(one))(batch), one(batch), rtol=1e-12)
    assert_allclose(TIME(LAYER._replace(batch=batch), H100, CONSTANTS, MATMUL), one(batch), rtol=1e-12)


@settings(deadline=None, max_examples=40)
@given(batch=st.integers(1, 64), channels=st.integers(1, 600), size=st.integers(3, 60), kernel=st.integers(1, 5), factor=st.floats(1.0, 6.0))
def test_monotone_and_never_below_the_bound(batch, channels, size, kernel, factor):
    shape = ConvolutionShape(*map(float, (batch, channels, 64, 1, size, size, 1, kernel, kernel)), padding=2.0)
    slack = 1 - 1e-9
    time = lambda s, d=H100: TIME(s, d, CONSTANTS, MATMUL, temperature=0.05)
    base = time(shape)
    assert time(shape._replace(batch=batch * factor)) >= base * slack
    assert time(shape._replace(out_channels=64 * factor)) >= base * slack
    assert time(shape, H100._replace(bandwidth=3.35e12 * factor)) <= base / slack
    assert time(shape, H100._replace(peak=9.89e14 * factor)) <= base / slack
    assert base >= convolution_bound(shape, H100) * slack
    assert convolution_bound(shape, H100) <= convolution_roofline(shape, H100)
    assert np.isfinite(convolution_features(shape, H100)).all()


def test_a_fit_recovers_what_made_the_data():
    rng = np.random.default_rng(0)
    n = 120
    pick = lambda *values: rng.choice(values, n).astype(float)
    size = pick(14, 28, 56)
    shape = LAYER._replace(batch=pick(8, 32, 128), in_channels=pick(64, 256, 512), out_channels=pick(64, 256, 512), height=size, width=size)
    shape = ConvolutionShape(*(np.broadcast_to(np.asarray(x, float), n) for x in shape))
    forward = jax.jit(lambda s, d, c: convolution_kernel_time(s, d, c, MATMUL))
    family = Family("convolution", ConvolutionConstants, CONVOLUTION_PRIORS, forward, convolution_bound, convolution_features, convolution_roofline)
    time = forward(shape, H100, CONSTANTS._replace(gather=0.7))
    assert_allclose(fit_kernels(family, shape, H100, np.log(np.asarray(time)), starts=0).constants().gather, 0.7, rtol=0.02)
