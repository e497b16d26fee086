"""The matmul kernel: limits, edges, gradients, monotony; its correction; and a fit that finds what made the data."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffperf.calibrate.kernels._fit import fit_kernels, predict_rows
from diffperf.calibrate.kernels._joint import KernelSet, adapt, fit_jointly
from diffperf.cost.kernel import Device, MatmulShape, device_of, matmul_kernel_time
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._correction import LIMIT, bounded, log_factor, num_weights, start_weights
from diffperf.cost.kernel._families import MATMUL
from diffperf.cost.kernel._matmul import matmul_bound, matmul_features
from diffperf.hardware import load_system

H100 = Device(989e12, 3.35e12, 132.0, 50e6)
START = constrain(MATMUL.constants, MATMUL.priors, jnp.zeros(MATMUL.size))
time = jax.jit(matmul_kernel_time)
time_and_slopes = jax.jit(jax.value_and_grad(matmul_kernel_time))


def test_a_large_product_runs_at_the_rate_of_the_best_tile():
    shape = MatmulShape(16384.0, 16384.0, 16384.0)
    share = 2 * 16384**3 / 989e12 / float(time(shape, H100, START._replace(throttle=0.0)))
    assert 0.95 * 0.75 < share < 0.75  # 0.75 is the rate of the large tiles; ramp and waves take the rest


def test_a_product_of_one_row_runs_at_memory_rate():
    shape = MatmulShape(1.0, 16384.0, 16384.0)  # 0.5 GB of weights, 8 MB apart from them
    ideal = 2 * 16384**2 / (3.35e12 * 0.81)
    assert float(time(shape, H100, START)) == pytest.approx(ideal, rel=0.1)


def test_an_empty_kernel_takes_no_time_and_a_tiny_one_the_launch():
    assert float(time(MatmulShape(0.0, 8.0, 8.0), H100, START)) == 0
    tiny = float(time(MatmulShape(1.0, 8.0, 8.0), H100, START))
    assert 2.2e-6 + 0.4e-6 < tiny < 4e-6


def test_waves_are_whole_without_stream_k_and_even_with_it():
    slow = {f"rate_{tile}": 1e-3 for tile in ("64x32", "64x64", "64x128", "128x256", "256x128", "256x256")}
    one_tile = START._replace(overlap=8.0, split_sync=1.0, **slow)
    full, over = MatmulShape(33 * 128.0, 4 * 128.0, 4096.0), MatmulShape(34 * 128.0, 4 * 128.0, 4096.0)  # 132 and 136 tiles of 128 x 128
    for stream_k, ratio in ((1e-9, 2.0), (1 - 1e-9, 34 / 33)):
        constants = one_tile._replace(stream_k=stream_k, launch=0.0)
        assert float(time(over, H100, constants) / time(full, H100, constants)) == pytest.approx(ratio, rel=0.03)


def log_time(logs):
    """Log time from log sizes, log rates of the chip and unconstrained constants."""
    constants = constrain(MATMUL.constants, MATMUL.priors, logs[7:])
    return jnp.log(matmul_kernel_time(MatmulShape(*jnp.exp(logs[:3])), Device(*jnp.exp(logs[3:7])), constants, 0.05))


log_value, log_slope = jax.jit(jax.vmap(log_time)), jax.jit(jax.grad(log_time))


@pytest.mark.parametrize("m, n, k", [(1, 4096, 4096), (37, 1000, 300), (4096, 11008, 4096), (64, 64, 65536)])
def test_gradients_match_finite_differences(m, n, k):
    at = np.concatenate([np.log(np.array([m, n, k]) * 1.01), np.log(np.array(H100)), 0.1 * np.ones(MATMUL.size)])
    step = 1e-5 * np.eye(len(at))
    values = np.asarray(log_value(np.concatenate([at + step, at - step])))
    np.testing.assert_allclose(log_slope(at), (values[: len(at)] - values[len(at) :]) / 2e-5, atol=2e-5)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 1, 1), (128, 128, 64), (1, 65536, 1)])
def test_values_and_gradients_at_edges_are_finite(sizes):
    shape = MatmulShape(*(jnp.array(float(x)) for x in sizes))
    for temperature in (0.0, 0.1):
        value, slopes = time_and_slopes(shape, H100, START, temperature)
        assert np.isfinite(float(value)) and all(np.isfinite(x) for x in jax.tree.leaves(slopes))


def test_jit_vmap_and_eager_agree():
    sizes = np.random.default_rng(0).integers(1, 8192, (3, 40)).astype(float)
    together = np.asarray(time(MatmulShape(*sizes), H100, START))
    single = jax.jit(jax.vmap(lambda m, n, k: matmul_kernel_time(MatmulShape(m, n, k), H100, START)))(*sizes)
    eager = matmul_kernel_time(MatmulShape(*sizes), H100, START)
    np.testing.assert_allclose(together, single, rtol=1e-12)
    np.testing.assert_allclose(together, eager, rtol=1e-12)


LOG = st.floats(1.0, 10.0)


@settings(max_examples=40, deadline=None)
@given(LOG, LOG, LOG, st.integers(0, 4))
def test_more_work_or_a_slower_chip_takes_longer(m, n, k, which):
    relaxed = partial(time, constants=START, temperature=jnp.array(0.2))
    shape = MatmulShape(*(jnp.exp(jnp.array(x)) for x in (m, n, k)))
    device = Device(*(jnp.array(x) for x in H100))
    base = float(relaxed(shape, device))
    if which < 3:
        more = shape._replace(**{("m", "n", "k")[which]: shape[which] * 1.3})
        assert float(relaxed(more, device)) >= base * (1 - 1e-9)
    else:
        slower = device._replace(**{("peak", "bandwidth")[which - 3]: device[which - 3] / 1.3})
        assert float(relaxed(shape, slower)) >= base * (1 - 1e-9)


def test_the_correction_never_beats_the_bound_and_is_bounded_itself():
    rng = np.random.default_rng(1)
    shape = MatmulShape(*np.exp(rng.uniform(0, 11, (3, 300))))
    features = matmul_features(shape, H100)
    weights = jnp.asarray(rng.normal(0, 3, num_weights(features.shape[-1])))
    factor = log_factor(weights, features)
    assert float(jnp.abs(factor).max()) <= LIMIT and float(jnp.abs(factor).max()) > 0.2
    plain = time(shape, H100, START)
    least = MATMUL.bound(shape, H100, START)
    moved = bounded(plain, factor, least)
    assert bool(jnp.all(moved >= least)) and bool(jnp.all(moved <= plain * np.exp(LIMIT) * 1.05))
    np.testing.assert_allclose(bounded(plain, jnp.zeros(300), least), plain, rtol=1e-12)
    assert num_weights(features.shape[-1]) == len(start_weights(features.shape[-1], 0))


def synthetic(seed, device=H100, rows=250):
    """Times of a library whose constants differ from the prior's, with 1% noise."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(MATMUL.size)
    names = MATMUL.constants._fields
    for name, move in (("launch", 0.5), ("memory", -0.5), ("split_sync", -0.4), ("rate_256x256", 0.6)):
        truth[names.index(name)] = move
    m, n, k = (np.exp(rng.uniform(*bounds, rows)) for bounds in ((0, 9), (4, 10), (4, 10)))
    ones = np.ones(rows)
    shape = MatmulShape(np.ceil(m), np.ceil(n), np.ceil(k), ones, 2 * ones, 2 * ones, 2 * ones, 0 * ones)
    constants = constrain(MATMUL.constants, MATMUL.priors, jnp.asarray(truth))
    return shape, np.log(np.asarray(time(shape, device, constants))) + rng.normal(0, 0.01, rows), truth


def test_a_fit_finds_the_constants_that_made_the_data():
    shape, log_time, truth = synthetic(0)
    fit = fit_kernels(MATMUL, shape, H100, log_time, starts=0)
    assert np.abs(predict_rows(fit, shape, H100) - log_time).mean() < 0.012
    names = MATMUL.constants._fields
    for name in ("launch", "memory"):
        at = names.index(name)
        assert fit.free[at] == pytest.approx(truth[at], abs=0.12)


def test_a_new_chip_starts_from_those_like_it():
    """Two chips share a library: a third is predicted better from them than from the prior, and better still with rows of its own."""
    chips = {"h100_sxm": H100, "h200_sxm": H100._replace(bandwidth=4.8e12), "h800_sxm": H100._replace(processors=120.0)}
    sets = []
    for i, (chip, device) in enumerate(chips.items()):
        shape, log_time, _ = synthetic(i, device)
        sets.append(KernelSet(chip, "library", "bf16", shape, device, log_time, np.arange(250)))
    _, shared = fit_jointly(MATMUL, sets[:2], rounds=1, starts=0)
    target, error = sets[2], lambda fit: np.abs(predict_rows(fit, sets[2].shape, sets[2].device) - sets[2].log_time).mean()
    prior = np.abs(np.log(np.asarray(time(target.shape, target.device, START))) - target.log_time).mean()
    none, some = (error(adapt(shared, target, np.arange(count))) for count in (0, 200))
    assert some < none < 0.6 * prior


def test_device_of_refuses_what_the_chip_lacks():
    chip = load_system("a100_sxm_80").chip
    assert float(device_of(chip, "bf16").peak) == pytest.approx(312e12, rel=0.01)
    with pytest.raises(ValueError, match="no unit for fp8; it has .*bf16"):
        device_of(chip, "fp8")
    with pytest.raises(ValueError, match="'bf8' is unknown; one of fp32"):
        device_of(chip, "bf8")


def test_the_roofline_is_the_larger_of_two():
    assert float(matmul_bound(MatmulShape(1.0, 4096.0, 4096.0), H100)) == pytest.approx((4096 * 4096 + 2 * 4096) * 2 / 3.35e12)
    assert float(matmul_bound(MatmulShape(8192.0, 8192.0, 8192.0), H100)) == pytest.approx(2 * 8192**3 / 989e12)
