"""Latent attention: shapes, limits, gradients, monotony, rows and a fit."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.calibrate.kernels import _rows_mla
from diffperf.calibrate.kernels._fit import fit_kernels, predict_rows
from diffperf.cost.kernel._attention import attention_flops
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._device import Device, device_of
from diffperf.cost.kernel._mla import (
    MLA_DECODE_PRIORS,
    MlaDecodeConstants,
    MlaDecodeShape,
    mla_bmm_shape,
    mla_decode_bound,
    mla_decode_features,
    mla_decode_kernel_time,
    mla_decode_roofline,
    mla_decode_traffic,
    mla_prefill_shape,
)
from diffperf.hardware import load_system
from diffperf.io import read_kernels

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "kernels"
GPU = Device(1e15, 3e12, 132.0, 50e6)
CONSTANTS = constrain(MlaDecodeConstants, MLA_DECODE_PRIORS, jnp.zeros(len(MlaDecodeConstants._fields)))
TIME = jax.jit(lambda s, d, c, t: mla_decode_kernel_time(s, d, c, t))
SHAPE = MlaDecodeShape(16.0, 3000.0, 100.0, 2.0, 512.0, 64.0)


def test_prefill_widths_and_work():
    expanded, absorbed = (mla_prefill_shape(2.0, 1024.0, 1024.0, 16.0, x) for x in (0.0, 1.0))
    assert [float(x) for x in (expanded.kv_heads, expanded.head_dim, expanded.value_dim)] == [16, 192, 128]
    assert [float(x) for x in (absorbed.kv_heads, absorbed.head_dim, absorbed.value_dim)] == [1, 576, 512]
    assert_allclose(attention_flops(expanded), 2 * 2 * 16 * (192 + 128) * 1024 * 1024 / 2, rtol=1e-2)  # causal: half of the square
    assert_allclose(attention_flops(absorbed) / attention_flops(expanded), (576 + 512) / (192 + 128), rtol=1e-6)


def test_products_around_decode_have_equal_work():
    before, after = (mla_bmm_shape(64.0, 128.0, x) for x in (0.0, 1.0))
    assert [float(x) for x in (before.n, before.k, after.n, after.k)] == [512, 128, 128, 512]
    assert float(before.batch) == 128


def test_long_context_reads_the_cache_once_for_all_heads():
    one, many = (SHAPE._replace(batch=64.0, keys=131072.0, heads=heads) for heads in (1.0, 16.0))
    stream = 64 * 131072 * 576 * 2 / (CONSTANTS.memory * GPU.bandwidth)
    for shape in (one, many):
        assert 1 <= float(TIME(shape, GPU, CONSTANTS, 0.0) / stream) < 1.25
    assert_allclose(mla_decode_traffic(one), 64 * (131072 * 576 * 2 + (576 + 512) * 2), rtol=1e-6)


def test_many_heads_are_bound_by_arithmetic():
    shape = SHAPE._replace(batch=132.0, keys=65536.0, heads=128.0, kv_bytes=0.01)
    flops = 2 * 132 * 65536 * 128 * (576 + 512)
    assert_allclose(TIME(shape, GPU, CONSTANTS, 0.0), flops / (GPU.peak * CONSTANTS.rate), rtol=0.1)


def test_gradients_match_finite_differences():
    count = len(MlaDecodeConstants._fields)

    def log_time(point):
        sizes = MlaDecodeShape(*jnp.exp(point[count:]))
        return jnp.log(mla_decode_kernel_time(sizes, GPU, MlaDecodeConstants(*jnp.exp(point[:count])), 0.2))

    point = jnp.log(jnp.array([*CONSTANTS, *SHAPE]))
    h, steps = 1e-6, jnp.eye(len(point))
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(log_time)))(jnp.concatenate([point[None], point + h * steps, point - h * steps]))
    assert_allclose(slopes[0], (values[1 : 1 + len(point)] - values[1 + len(point) :]) / (2 * h), atol=2e-5)


def test_finite_at_edges_and_same_under_vmap():
    shapes = [SHAPE._replace(**change) for change in ({}, {"batch": 0.0}, {"keys": 1.0}, {"keys": 0.0}, {"heads": 1.0}, {"batch": 4096.0, "keys": 1e6})]
    shape = MlaDecodeShape(*(jnp.array(x) for x in zip(*shapes)))

    def total(s, c, temperature):
        time = mla_decode_kernel_time(s, GPU, c, temperature)
        return jnp.sum(time), time

    (_, time), slopes = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(shape, CONSTANTS, 0.1)
    chex.assert_tree_all_finite((time, slopes, mla_decode_features(shape, GPU)))
    assert list(time > 0) == [True, False, True, False, True, True]
    assert_allclose(jax.vmap(lambda s: TIME(s, GPU, CONSTANTS, 0.1))(shape), time, rtol=1e-9)
    assert_allclose(mla_decode_kernel_time(SHAPE, GPU, CONSTANTS, 0.1), time[0], rtol=1e-9)


@settings(deadline=None, max_examples=30)
@given(batch=st.floats(1, 1024), keys=st.floats(1, 1e5), heads=st.sampled_from([1.0, 16.0, 33.0, 128.0]), grow=st.floats(1.01, 4.0))
def test_more_work_never_faster_and_a_better_chip_never_slower(batch, keys, heads, grow):
    shape = MlaDecodeShape(batch, keys, heads, 2.0, 512.0, 64.0)
    time = lambda s=shape, d=GPU: float(TIME(s, d, CONSTANTS, 0.1))
    here = time()
    for field in ("batch", "keys", "kv_bytes", "rank"):
        assert time(shape._replace(**{field: getattr(shape, field) * grow})) >= here * (1 - 1e-9), field
    for field in ("peak", "bandwidth"):
        assert time(d=GPU._replace(**{field: getattr(GPU, field) * grow})) <= here * (1 + 1e-9), field
    assert float(mla_decode_bound(shape, GPU)) <= min(here, float(mla_decode_roofline(shape, GPU)))


def test_rows_tell_kernels_and_caches_apart():
    row = {"gpu": "h100_sxm", "op": "mla_decode", "framework": "trtllm 1.3", "kernel_source": "default", "mla_dtype": "bfloat16", "kv_cache_dtype": "bfloat16",
           "num_heads": 32, "batch_size": 4, "isl": 1, "step": 1023, "tp_size": 4, "time_us": 20.0}  # fmt: skip
    prefill = {**row, "op": "mla_prefill", "isl": 512, "step": 0}
    table = read_kernels([
        row, {**row, "kv_cache_dtype": "fp8"}, {**row, "kv_cache_dtype": "fp8", "gpu": "a100_sxm"}, {**row, "kv_cache_dtype": "int4"}, prefill,
        {**prefill, "framework": "sglang 0.5", "kernel_source": "flash_attention"},
    ])  # fmt: skip
    before, decode = _rows_mla.rows(table)
    assert list(decode.library) == ["trtllm/default", "trtllm/default/fp8_cache", "trtllm/default/fp8_cache"]
    assert list(decode.datatype) == ["bf16", "fp8", "bf16"]  # an A100 does not multiply fp8
    assert [list(x) for x in (decode.shape.keys, decode.shape.kv_bytes)] == [[1024] * 3, [2, 1, 1]]
    assert decode.left_out == {"datatype of a latent cache 'int4' has no model, as in records:4; it should be one of fp16, bf16, fp8": 1}
    assert list(before.shape.head_dim) == [192, 576]
    assert list(before.shape.kv_heads) == [32, 1]
    bmm = {"gpu": "h100_sxm", "framework": "vllm 0.24", "kernel_source": "vllm_torch_bmm", "bmm_dtype": "bfloat16", "num_tokens": 8, "num_heads": 16}
    (products,) = _rows_mla.rows(read_kernels([{**bmm, "op": op, "time_us": 5.0} for op in ("mla_gen_pre", "mla_gen_post", "mla_bmm")]))
    assert list(products.shape.n) == [512, 128, 320]  # a table that does not say which: in between
    assert set(products.group) == {"16 heads"}


def test_fit_recovers_constants_of_synthetic_kernels():
    rng = np.random.default_rng(1)
    powers = lambda low, high: 2.0 ** rng.integers(low, high, 500)
    shape = MlaDecodeShape(powers(0, 11), powers(1, 17), powers(0, 8), *(np.full(500, x) for x in SHAPE[3:]))
    true = np.zeros(len(MlaDecodeConstants._fields))
    true[[0, 2, 4]] = 0.3, 0.5, -0.4
    log_time = np.log(np.asarray(TIME(shape, GPU, constrain(MlaDecodeConstants, MLA_DECODE_PRIORS, jnp.asarray(true)), 0.0)))
    fit = fit_kernels(_rows_mla.MLA_DECODE, shape, GPU, log_time, starts=0, passes=15)
    assert np.max(np.abs(predict_rows(fit, shape, GPU) - log_time)) < 0.03
    assert_allclose(fit.free[[0, 2]], true[[0, 2]], atol=0.2)


@pytest.mark.skipif(not DATA.exists(), reason="the public timings are not beside this repository")
def test_unseen_heads_of_public_timings():
    (rows,) = _rows_mla.rows(read_kernels(DATA / "aic_mla_decode_h100_sxm.csv.gz").select(library="trtllm", kv_cache_datatype="bf16"))
    device = device_of(load_system("h100_sxm", fitted=False).chip, "bf16")
    unseen = np.isin(rows.shape.heads, (8, 64))
    seen = np.flatnonzero(~unseen)[:512]
    fit = fit_kernels(rows.family, rows.take(seen).shape, device, np.log(rows.time[seen]), starts=0, passes=15)
    error = np.abs(np.exp(predict_rows(fit, rows.take(unseen).shape, device)) / rows.time[unseen] - 1)
    assert unseen.sum() > 200
    assert error.mean() < 0.1  # a plain roofline is off by 0.6
