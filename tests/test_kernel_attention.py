"""Attention kernels: limits by arithmetic, traffic and launch, paths of the libraries, gradients, edges, fits."""

import functools
import os

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.calibrate.kernels import _rows_attention
from diffperf.calibrate.kernels._fit import fit_kernels, predict_rows
from diffperf.calibrate.kernels._rows_attention import ATTENTION_BACKWARD, ATTENTION_DECODE, ATTENTION_PREFILL
from diffperf.cost.kernel import _attention, _decode
from diffperf.cost.kernel._attention import (
    BACKWARD,
    AttentionShape,
    attention_bound,
    attention_features,
    attention_flops,
    attention_peak_share,
    attention_roofline,
    attention_traffic,
)  # fmt: skip
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._decode import DecodeShape, decode_flops, decode_path, decode_roofline, decode_traffic
from diffperf.cost.kernel._device import Device
from diffperf.io import read_kernels

H100 = Device(9.89e14, 3.35e12, 132.0, 50e6)
DATA = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "data", "kernels")
attention_kernel_time, attention_backward_kernel_time = jax.jit(_attention.attention_kernel_time), jax.jit(_attention.attention_backward_kernel_time)
decode_kernel_time = jax.jit(_decode.decode_kernel_time)
of = lambda family: constrain(family.constants, family.priors, jnp.zeros(family.size))
FORWARD, BACKWARDS, DECODE = of(ATTENTION_PREFILL), of(ATTENTION_BACKWARD), of(ATTENTION_DECODE)
SHAPE = AttentionShape(4.0, 1500.0, 1500.0, 32.0, 8.0, 120.0, 128.0, 1.0, 1024.0, append=1.0)
STEP = DecodeShape(24.0, 3000.0, 32.0, 8.0, 128.0, 2000.0, alone=0.0, regroup=1.0)
CASES = pytest.mark.parametrize(
    "time, shape, constants", [(attention_kernel_time, SHAPE, FORWARD), (attention_backward_kernel_time, SHAPE, BACKWARDS), (decode_kernel_time, STEP, DECODE)],
    ids=["forward", "backward", "decode"],
)  # fmt: skip


def _counted(queries, keys, window, causal):
    """Scores that a mask leaves, counted one by one."""
    q, k = np.arange(queries)[:, None] + keys - queries, np.arange(keys)[None, :]
    return np.sum((k <= q) & (k > q - window)) if causal else queries * keys


@pytest.mark.parametrize("queries, keys, window, causal", [(64, 64, np.inf, 1), (64, 200, np.inf, 1), (200, 200, 30, 1), (50, 90, 60, 1), (40, 70, np.inf, 0)])
def test_flops_count_the_scores_that_the_mask_leaves(queries, keys, window, causal):
    shape = AttentionShape(3.0, queries, keys, 8.0, 2.0, 64.0, 32.0, causal, window)
    exact = 2 * 3 * 8 * _counted(queries, keys, window, causal) * (64 + 32)
    assert_allclose(attention_flops(shape), exact, rtol=1.1 / min(keys, window) + 1e-12)  # the diagonal counts half


def test_traffic_is_every_tensor_once():
    shape = AttentionShape(2.0, 10.0, 20.0, 8.0, 2.0, 64.0, 32.0, kv_bytes=1.0)
    assert float(attention_traffic(shape)) == 2 * (10 * 8 * 64 * 2 + 10 * 8 * 32 * 2 + 20 * 2 * 64 * 1 + 20 * 2 * 32 * 1)
    step = DecodeShape(3.0, 500.0, 8.0, 2.0, 64.0, 100.0, kv_bytes=1.0)
    assert float(decode_traffic(step)) == 3 * (2 * 100 * 2 * 64 * 1 + 2 * 8 * 64 * 2)
    assert float(decode_flops(step)) == 3 * 4 * 100 * 8 * 64


@pytest.mark.parametrize("width", [64.0, 128.0, 256.0])
def test_a_large_kernel_reaches_the_peak_share_of_its_width(width):
    for time, constants, backward in ((attention_kernel_time, FORWARD, False), (attention_backward_kernel_time, BACKWARDS, True)):
        shape = AttentionShape(1.0, 2**20, 2**20, 132.0, 132.0, width, width, causal=0.0)
        reached = attention_flops(shape) * (BACKWARD if backward else 1) / H100.peak / time(shape, H100, constants)
        assert_allclose(reached, attention_peak_share(width, width, H100, constants, backward=backward), rtol=5e-3)
    assert 0.2 < float(attention_peak_share(64.0, 64.0, H100, FORWARD)) < float(attention_peak_share(width, width, H100, FORWARD)) + 1e-12 < 0.9


def test_a_causal_mask_halves_a_long_sequence():
    long = AttentionShape(1.0, 65536.0, 65536.0, 64.0, 64.0, 128.0, 128.0)
    assert_allclose(attention_kernel_time(long._replace(causal=0.0), H100, FORWARD) / attention_kernel_time(long, H100, FORWARD), 2, rtol=0.03)


def test_decoding_a_long_cache_takes_its_bytes_over_the_bandwidth():
    shape = DecodeShape(64.0, 65536.0, 32.0, 8.0, 128.0)
    nbytes = 64 * 65536 * 8 * 128 * 2 * 2
    assert 1 <= float(decode_kernel_time(shape, H100, DECODE)) / (nbytes / 3.35e12) < 1.35
    half = decode_kernel_time(shape._replace(kv_bytes=1.0), H100, DECODE)
    assert 0.5 < float(half / decode_kernel_time(shape, H100, DECODE)) < 0.75


def test_one_key_costs_little_more_than_the_launch():
    assert float(decode_kernel_time(DecodeShape(1.0, 1.0, 1.0, 1.0, 128.0), H100, DECODE)) < 1.5 * float(DECODE.launch)
    assert float(attention_kernel_time(AttentionShape(1.0, 1.0, 1.0, 1.0, 1.0, 64.0, 64.0), H100, FORWARD)) < 1.5 * float(FORWARD.launch)


def test_paths_of_decode_kernels():
    assert decode_path("vllm_flash_attn_fa2", 32, 8, 16, np.inf, False) == (0, 0, 1)
    assert decode_path("vllm_flash_attn_fa2", 32, 8, 1, np.inf, False) == (0, 0, 0)  # one sequence is in order already
    assert decode_path("vllm_flash_attn_fa2", 32, 8, 16, 128.0, False) == (1, 1, 0)
    assert decode_path("vllm_flash_attn_fa2", 8, 8, 16, np.inf, False) == (1, 1, 0)
    assert [decode_path("torch_flow", h, 1, 16, np.inf, new) for h in (1, 8, 64) for new in (False, True)] == [
        (1, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0),
    ]  # fmt: skip
    assert decode_path("vllm_flash_attn_fa3", 8, 8, 16, 128.0, False) == (0, 0, 0)
    long = DecodeShape(1.0, 65536.0, 8.0, 8.0, 128.0)
    assert float(decode_kernel_time(long._replace(whole=1.0), H100, DECODE)) > 3 * float(decode_kernel_time(long, H100, DECODE))  # 8 of 132 processors
    extra = decode_kernel_time(long._replace(regroup=1.0), H100, DECODE) - decode_kernel_time(long, H100, DECODE)
    assert_allclose(extra, DECODE.regroup, rtol=1e-9)


def test_the_cache_write_counts_only_where_it_is_part_of_the_call():
    bare = attention_kernel_time(SHAPE._replace(append=0.0), H100, FORWARD)
    assert_allclose(bare, attention_kernel_time(SHAPE._replace(append=0.0), H100, FORWARD._replace(store=9.0, rotate=9.0, per_sequence=1.0)))
    assert float(attention_kernel_time(SHAPE, H100, FORWARD)) > float(bare)


@CASES
def test_gradients_match_finite_differences(time, shape, constants):
    sizes = [name for name in ("batch", "queries", "keys", "heads", "head_dim", "window", "kv_bytes") if hasattr(shape, name)]
    names = [name for name in constants._fields if getattr(constants, name) > 0]

    def log_time(x):
        c = constants._replace(**{n: jnp.exp(v) for n, v in zip(names, x["constants"])})
        s = shape._replace(**{n: jnp.exp(v) for n, v in zip(sizes, x["sizes"])})
        return jnp.log(time(s, Device(*jnp.exp(x["device"])), c, 0.1))

    x = {
        "constants": jnp.log(jnp.array([getattr(constants, n) for n in names])), "sizes": jnp.log(jnp.array([getattr(shape, n) for n in sizes])),
        "device": jnp.log(jnp.array(H100)),
    }  # fmt: skip
    flat, unravel = jax.flatten_util.ravel_pytree(x)
    f = jax.jit(lambda v: log_time(unravel(v)))
    h, eye = 1e-5, jnp.eye(len(flat))
    numeric = jax.jit(jax.vmap(lambda e: (f(flat + h * e) - f(flat - h * e)) / (2 * h)))(eye)
    assert_allclose(jax.jit(jax.grad(f))(flat), numeric, atol=2e-6)


@functools.cache
def _slopes(time):
    return jax.jit(jax.grad(time, argnums=(0, 1, 2)))


@CASES
@pytest.mark.parametrize("field", ["batch", "queries", "keys", "heads", "kv_heads", "head_dim"])
def test_nothing_to_do_takes_no_time_and_has_finite_gradients(time, shape, constants, field):
    for value in (0.0, 1.0):
        shape_ = shape._replace(**{field: value}) if hasattr(shape, field) else shape._replace(batch=value)
        took = time(shape_, H100, constants)
        assert (float(took) == 0) == (value == 0)
        slopes = _slopes(time)(jax.tree.map(float, shape_._replace(window=np.inf)), H100, constants, 0.1)
        assert all(np.isfinite(g) for g in jax.tree.leaves(slopes))


@CASES
def test_jit_vmap_and_eager_agree(time, shape, constants):
    batch = jnp.array([1.0, 3.0, 64.0])
    one_by_one = [time(shape._replace(batch=b), H100, constants) for b in batch]
    assert_allclose(time(shape._replace(batch=batch), H100, constants), one_by_one, rtol=1e-12)
    assert_allclose(jax.vmap(lambda b: time(shape._replace(batch=b), H100, constants))(batch), one_by_one, rtol=1e-12)
    assert_allclose(time.__wrapped__(shape._replace(batch=batch), H100, constants), one_by_one, rtol=1e-12)
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), constants)
    assert_allclose(jax.vmap(time, in_axes=(None, None, 0))(shape, H100, both)[0], time(shape, H100, constants), rtol=1e-12)


SIZE = st.floats(0, 14).map(lambda x: float(2**x))


@settings(deadline=None, max_examples=60)
@given(batch=st.floats(1, 256), keys=SIZE, group=st.sampled_from([1.0, 4.0, 16.0]), kv_heads=st.sampled_from([1.0, 8.0]), more=st.floats(1.01, 3.0))
def test_more_work_or_a_slower_chip_is_never_faster(batch, keys, group, kv_heads, more):
    prefill = AttentionShape(batch, keys, keys, group * kv_heads, kv_heads, 128.0, 128.0, append=1.0)
    decode = DecodeShape(batch, keys, group * kv_heads, kv_heads, 128.0)
    for time, shape, c in ((attention_kernel_time, prefill, FORWARD), (decode_kernel_time, decode, DECODE)):
        smooth = lambda s, d=H100, time=time, c=c: float(time(s, d, c, 0.1))
        least = smooth(shape) * (1 - 1e-6)
        grown = [shape._replace(batch=batch * more), shape._replace(kv_bytes=2 * more), shape._replace(head_dim=128 * more)]
        grown += [shape._replace(keys=keys * more, queries=keys * more) if shape is prefill else shape._replace(keys=keys * more)]
        assert min(map(smooth, grown)) >= least
        assert min(smooth(shape, d) for d in (H100._replace(peak=9.89e14 / more), H100._replace(bandwidth=3.35e12 / more))) >= least
    assert float(attention_kernel_time(prefill, H100, FORWARD)) > float(attention_bound(prefill, H100))


@CASES
def test_temperature_zero_is_the_limit(time, shape, constants):
    exact = float(time(shape, H100, constants))
    near = [float(time(shape, H100, constants, t)) for t in (0.1, 0.01, 0.001)]
    assert_allclose(near[-1], exact, rtol=2e-3)
    assert abs(near[0] / exact - 1) < 0.35


def test_float32_is_close_to_float64():
    single = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    for time, shape, constants in ((attention_kernel_time, SHAPE, FORWARD), (decode_kernel_time, STEP, DECODE)):
        assert_allclose(time(single(shape), single(H100), single(constants)), time(shape, H100, constants), rtol=1e-4)


def _random_prefill(rng, n):
    kv = 2.0 ** rng.integers(0, 4, n)
    q = np.round(2.0 ** rng.uniform(4, 14, n))
    return AttentionShape(
        2.0 ** rng.integers(0, 6, n), q, q, kv * 2.0 ** rng.integers(0, 4, n), kv, 64.0 * 2 ** rng.integers(0, 3, n), 64.0 * np.ones(n), np.ones(n),
        np.full(n, np.inf), np.full(n, 2.0), np.full(n, 2.0), np.ones(n),
    )  # fmt: skip


def test_a_fit_recovers_what_made_the_times():
    rng = np.random.default_rng(3)
    shape = _random_prefill(rng, 256)
    truth = FORWARD._replace(launch=1.3e-5, softmax=6e-11, rate=0.7)
    log_time = np.log(attention_kernel_time(shape, H100, truth)) + rng.normal(0, 0.01, 256)
    fit = fit_kernels(ATTENTION_PREFILL, shape, H100, log_time, starts=0, passes=15)
    assert np.median(np.abs(predict_rows(fit, shape, H100) - log_time)) < 0.02
    assert_allclose(fit.constants().launch, 1.3e-5, rtol=0.1)
    share = lambda c: attention_peak_share(128.0, 128.0, H100, c)
    assert_allclose(share(fit.constants()), share(truth), rtol=0.1)


def test_rows_name_library_path_and_reason():
    base = dict(gpu="h100_sxm", dtype="bfloat16", n_q_heads=32, n_kv_heads=8, head_dim=128, batch_size=4, window_size=0)
    call = lambda op, kernel, cache="bfloat16", isl=512, kv=512, flag="", **more: {
        **base, "op": op, "framework": "vllm 1.0", "kernel_source": kernel, "kv_cache_dtype": cache, "isl": isl, "kv_len": kv, "time_us": 900.0, "flag": flag,
        **more,
    }  # fmt: skip
    table = read_kernels([
        call("attention_prefill", "vllm_flash_attn_fa3"), call("attention_prefill", "vllm_flash_attn_fa3", "fp8"),
        call("attention_prefill", "vllm_triton_attn", "fp8"), call("attention_prefill", "vllm_flash_attn_fa3", isl=1, kv=1),
        call("attention_decode", "vllm_flash_attn", isl=1), call("attention_decode", "vllm_flash_attn", isl=1, window_size=128),
        call("attention_decode", "vllm_flash_attn", isl=1, flag="above_hbm_bw"),
    ])  # fmt: skip
    prefill, decode = _rows_attention.rows(table)
    assert list(prefill.library) == ["vllm/vllm_flash_attn_fa3", "vllm/vllm_flash_attn_fa3/fp8_cache", "vllm/vllm_triton_attn/fp8_cache"]
    assert list(prefill.datatype) == ["bf16", "fp8", "bf16"]
    assert list(prefill.shape.kv_bytes) == [2, 1, 1] and list(prefill.group) == ["32x8x128"] * 3
    assert sum(prefill.left_out.values()) == 1 and "one query" in next(iter(prefill.left_out))
    assert list(decode.shape.alone) == [0, 1] and list(decode.shape.regroup) == [1, 0] and list(decode.shape.window) == [np.inf, 128]
    assert sum(decode.left_out.values()) == 1 and list(decode.row) == [4, 5]


@pytest.mark.skipif(not os.path.isdir(DATA), reason=f"measured kernels are not at {DATA}")
@pytest.mark.parametrize(
    "name, family, library, most", [
        ("attention_prefill_h100_sxm", "attention_prefill", "vllm/vllm_flash_attn_fa3", 0.13),
        ("attention_decode_h100_sxm", "attention_decode", "vllm/vllm_flash_attn_fa3", 0.12),
    ],
)  # fmt: skip
def test_measured_kernels_of_unseen_heads(name, family, library, most):
    rows = next(r for r in _rows_attention.rows(read_kernels(os.path.join(DATA, f"aic_{name}.csv.gz"))) if r.family.name == family)
    rows = rows.take(np.flatnonzero(rows.library == library)[::2])
    held = np.array([sum(map(ord, group)) % 4 == 0 for group in rows.group])
    device = H100
    learn = np.flatnonzero(~held)[:768]
    fit = fit_kernels(rows.family, rows.take(learn).shape, device, np.log(rows.time[learn]), starts=0, passes=20)
    error = lambda log_time: np.mean(np.abs(np.exp(log_time) / rows.time[held] - 1))
    unseen = rows.take(np.flatnonzero(held)).shape
    roofline = attention_roofline if family == "attention_prefill" else decode_roofline
    assert error(predict_rows(fit, unseen, device)) < most < 0.4 < error(np.log(roofline(unseen, device)))


def test_features_are_of_order_one():
    shape = _random_prefill(np.random.default_rng(0), 100)
    assert np.abs(attention_features(shape, H100)).max() < 4
