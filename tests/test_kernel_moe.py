"""Mixtures of experts: the load of the busiest rank against a simulated draw, limits, gradients, monotony, rows and a fit."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.calibrate.kernels import _rows_moe
from diffperf.calibrate.kernels._fit import fit_kernels, predict_rows
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._device import Device, device_of
from diffperf.cost.kernel._expert_load import expert_load
from diffperf.cost.kernel._moe import (
    GROUPED_MATMUL_PRIORS,
    MOE_PRIORS,
    GroupedMatmulConstants,
    GroupedMatmulShape,
    MoeConstants,
    MoeShape,
    grouped_matmul_bound,
    grouped_matmul_kernel_time,
    moe_bound,
    moe_features,
    moe_kernel_time,
    moe_roofline,
)
from diffperf.hardware import load_system
from diffperf.io import read_kernels

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "kernels"
GPU = Device(1e15, 3e12, 132.0, 50e6)
LOAD = jax.jit(lambda *args: expert_load(*args))
TIME = jax.jit(lambda s, d, c: moe_kernel_time(s, d, c, 0.1))
EXACT = jax.jit(lambda s, d, c: moe_kernel_time(s, d, c))
FEATURES = jax.jit(moe_features)
BOUND = jax.jit(lambda s, d: moe_bound(s, d))
GROUPED_TIME = jax.jit(lambda s, d, c: grouped_matmul_kernel_time(s, d, c))
QWEN = MoeShape(2048.0, 4096.0, 1536.0, 128.0, 8.0, 2.0, 4.0, 1.2, 2.0, 2.0, 1.0, 2.0, 0.0)


def usual(kind, priors):
    return constrain(kind, priors, jnp.zeros(len(kind._fields)))


def drawn(tokens, experts, top_k, ranks, skew, rng):
    """One draw of the public collector: weights from the power law, whole tokens, what rounding left spread over ranks; pairs and experts of the busiest."""
    low, high = (1.0, 0.8 * tokens) if tokens * top_k > experts else (0.01, 2.0)
    a = 1 - skew
    weight = ((high**a - low**a) * rng.random(experts) + low**a) ** (1 / a)
    count = np.minimum(np.round(weight / weight.sum() * tokens * top_k), tokens).reshape(ranks, -1)
    left, rank = int(tokens * top_k - count.sum()), 0
    while left:
        row = count[rank % ranks]
        if left > 0 and row.min() < tokens:
            row[row.argmin()] += 1
            left -= 1
        elif left < 0 and row.max() > 0:
            row[row.argmax()] -= 1
            left += 1
        rank += 1
    busiest = count[count.sum(1).argmax()]
    return busiest.sum(), (busiest > 0).sum(), np.ceil(busiest / 64).sum()


@pytest.mark.parametrize("experts, top_k, ranks, tokens, skew", [(128, 8, 8, 512, 1.2), (256, 8, 32, 256, 1.01), (16, 1, 4, 1024, 1.2), (128, 4, 2, 16, 1.01)])
def test_expected_load_of_a_skewed_draw(experts, top_k, ranks, tokens, skew):
    rng = np.random.default_rng(0)
    pairs, active, tiles = np.mean(np.array([drawn(tokens, experts, top_k, ranks, skew, rng) for _ in range(60)]), axis=0)
    load = LOAD(tokens, experts, top_k, ranks, skew, 0.0)
    assert_allclose(float(load.pairs), pairs, rtol=0.2)
    assert_allclose(float(load.active), active, rtol=0.2)
    assert_allclose(float(load.tiles(jnp.array([64.0]))[0]), tiles, rtol=0.3)
    assert float(load.pairs) > tokens * top_k / ranks  # busier than the average


def test_balanced_load_is_exact():
    load = LOAD(1024.0, 64.0, 8.0, 8.0, 0.0, 0.0)
    assert_allclose([load.pairs, load.active], [1024, 8], rtol=1e-6)  # 1024 x 8 / 8 ranks; all 8 experts, 128 tokens each
    assert_allclose(load.tiles(jnp.array([16.0, 128.0])), [64, 8], rtol=1e-5)
    few = LOAD(2.0, 64.0, 2.0, 16.0, 0.0, 0.0)
    assert float(few.pairs) == 1  # a quarter of a pair each, but the timed rank has one
    assert float(few.active) == 1


def test_tied_picks_go_to_four_experts_of_the_rank():
    load = LOAD(512.0, 128.0, 4.0, 16.0, 0.0, 4.0)  # 4 of 8 picks tied: 8 experts per rank
    assert_allclose(load.pairs, 512 * 4 / 16 + 4 * 512, rtol=1e-4)
    assert_allclose(load.active, 8, rtol=1e-5)
    assert_allclose(load.tiles(jnp.array([128.0]))[0], 8 + 4 * 4, rtol=1e-4)


def test_limits_of_a_grouped_matmul():
    c = usual(GroupedMatmulConstants, GROUPED_MATMUL_PRIORS)
    thin = GroupedMatmulShape(64.0, 1.0, 4096.0, 4096.0)  # 2.1 GB of weights for 64 rows
    weights = 64 * 4096 * 4096 * 2
    assert_allclose(GROUPED_TIME(thin, GPU, c) - c.launch, weights / (c.memory * GPU.bandwidth), rtol=0.1)  # overlap adds a little
    thick = GroupedMatmulShape(8.0, 16384.0, 8192.0, 8192.0)
    flops = 2 * 8 * 16384 * 8192 * 8192
    assert_allclose(GROUPED_TIME(thick, GPU, c), flops / (GPU.peak * c.rate * 128 / (128 + c.half)), rtol=0.12)
    padded = [GROUPED_TIME(GroupedMatmulShape(64.0, rows, 4096.0, 4096.0), GPU, c._replace(half=1e4, near=1e9)) for rows in (1025.0, 1040.0)]
    assert_allclose(padded[0], padded[1], rtol=0.01)  # the same tiles


def test_layer_is_two_grouped_matmuls_and_overhead():
    c = usual(MoeConstants, MOE_PRIORS)._replace(routed=0.0, local=0.0, token=0.0, expert=0.0, sort=0.0, cache_share=1e-9)
    shape = MoeShape(4096.0, 2048.0, 1024.0, 16.0, 2.0)
    rows = 4096 * 2 / 16
    up = GROUPED_TIME(GroupedMatmulShape(16.0, rows, 2 * 1024.0, 2048.0), GPU, c.grouped())
    down = GROUPED_TIME(GroupedMatmulShape(16.0, rows, 2048.0, 1024.0), GPU, c.grouped())
    assert_allclose(EXACT(shape, GPU, c), c.launch + up + down, rtol=1e-4)


def test_gradients_match_finite_differences():
    fields = [f for f in MoeShape._fields if f not in ("skew", "tuned", "tied")]
    shape = QWEN._replace(hidden=4000.0, width=1500.0)  # no whole number of tiles, where a ceiling has a kink
    count = len(MoeConstants._fields)

    def log_time(point):
        sizes = shape._replace(**{f: jnp.exp(x) for f, x in zip(fields, point[count:])})
        return jnp.log(moe_kernel_time(sizes, GPU, MoeConstants(*jnp.exp(point[:count])), 0.2))

    point = jnp.log(jnp.array([*usual(MoeConstants, MOE_PRIORS), *(getattr(shape, f) for f in fields)]))
    h, steps = 1e-6, jnp.eye(len(point))
    many = jax.jit(jax.vmap(jax.value_and_grad(log_time)))
    values, slopes = many(jnp.concatenate([point[None], point + h * steps, point - h * steps]))
    numeric = (values[1 : 1 + len(point)] - values[1 + len(point) :]) / (2 * h)
    assert_allclose(slopes[0], numeric, atol=2e-5)
    assert float(jnp.sum(jnp.abs(slopes[0][:count]))) > 0.5


EDGES = [{}, {"tokens": 0.0}, {"tokens": 1.0}, {"expert_parallel": 128.0}, {"experts": 1.0, "top_k": 1.0, "expert_parallel": 1.0}, {"skew": 1.0}, {"skew": 2.0},
         {"skew": 0.0}, {"tokens": 1e6}, {"tied": 4.0}, {"tuned": 0.0}]  # fmt: skip


def test_finite_values_and_gradients_at_edges():
    shapes = [QWEN._replace(**change) for change in EDGES]
    shape = MoeShape(*(jnp.array(x, float) for x in zip(*shapes)))

    def total(s, c, temperature):
        time = moe_kernel_time(s, GPU, c, temperature)
        return jnp.sum(time), time

    (_, time), slopes = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(shape, usual(MoeConstants, MOE_PRIORS), 0.1)
    chex.assert_tree_all_finite((time, slopes, FEATURES(shape, GPU)))
    assert list(time > 0) == [change.get("tokens") != 0 for change in EDGES]


def test_same_under_jit_and_vmap():
    c = usual(MoeConstants, MOE_PRIORS)
    eager = moe_kernel_time(QWEN, GPU, c, 0.1)
    assert_allclose(TIME(QWEN, GPU, c), eager, rtol=1e-9)
    shapes = MoeShape(*(jnp.stack([jnp.asarray(x), jnp.asarray(y)]) for x, y in zip(QWEN, QWEN._replace(tokens=16.0, skew=0.0))))
    assert_allclose(jax.vmap(lambda s: TIME(s, GPU, c))(shapes)[0], eager, rtol=1e-9)


SIZES = {"tokens": st.floats(1, 1e5), "hidden": st.floats(64, 16384), "width": st.floats(64, 16384), "experts": st.sampled_from([8.0, 64.0, 256.0])}


@settings(deadline=None, max_examples=25)
@given(**SIZES, ranks=st.sampled_from([1.0, 4.0, 8.0]), skew=st.sampled_from([0.0, 1.01, 1.2]), grow=st.floats(1.01, 4.0))
def test_more_work_never_faster_and_a_better_chip_never_slower(tokens, hidden, width, experts, ranks, skew, grow):
    shape, c = MoeShape(tokens, hidden, width, experts, 2.0, 1.0, ranks, skew), usual(MoeConstants, MOE_PRIORS)
    time = lambda s=shape, d=GPU: float(TIME(s, d, c))
    here = time()
    for field in ("hidden", "width", "weight_bytes", *(("tokens",) if skew == 0 else ())):
        assert time(shape._replace(**{field: getattr(shape, field) * grow})) >= here * (1 - 1e-4), field
    for field in ("peak", "bandwidth"):
        assert time(d=GPU._replace(**{field: getattr(GPU, field) * grow})) <= here * (1 + 1e-4), field
    assert here >= float(BOUND(shape, GPU)) * 0.99


def test_bounds_do_not_exceed_the_roofline_or_the_time():
    for tokens in (1.0, 64.0, 4096.0, 65536.0):
        shape = QWEN._replace(tokens=tokens, skew=0.0)
        assert float(BOUND(shape, GPU)) <= float(moe_roofline(shape, GPU)) * (1 + 1e-6)
    for rows in (1.0, 100.0, 1e4):
        grouped = GroupedMatmulShape(8.0, rows, 4096.0, 4096.0)
        assert float(grouped_matmul_bound(grouped, GPU)) < float(GROUPED_TIME(grouped, GPU, usual(GroupedMatmulConstants, GROUPED_MATMUL_PRIORS)))


def table(**changes):
    row = {"gpu": "h100_sxm", "op": "moe", "framework": "sglang 0.5", "kernel_source": "sglang_fused_moe_triton", "dtype": "bfloat16", "num_tokens": 64,
           "hidden_size": 4096, "inter_size": 1536, "topk": 8, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1, "distribution": "power_law_1.2",
           "time_us": 900.0}  # fmt: skip
    return read_kernels([row, *({**row, **change} for change in changes.values())])


def test_rows_tell_kernels_routing_and_tuning_apart():
    deepseek = {"dtype": "fp8_block", "hidden_size": 7168, "inter_size": 2048, "num_experts": 256, "distribution": "balanced", "moe_ep_size": 4}
    (rows,) = _rows_moe.rows(table(
        tuned={"moe_tp_size": 2}, generated={**deepseek, "kernel_source": "sglang_flashinfer_trtllm_moe"}, given=deepseek,
        cutlass={"framework": "trtllm 1.0", "kernel_source": "moe_torch_flow"}, odd={"distribution": "uniform"},
    ))  # fmt: skip
    assert list(rows.library) == ["sglang/triton", "sglang/triton", "sglang/trtllm/fp8_block", "sglang/triton/fp8_block", "trtllm/cutlass"]
    assert list(rows.datatype) == ["bf16", "bf16", "fp8", "fp8", "bf16"]
    assert list(rows.shape.tuned) == [0, 1, 1, 1, 1]
    assert list(rows.shape.tied) == [0, 0, 4, 0, 0]
    assert list(rows.shape.experts / rows.shape.expert_parallel) == [128, 128, 64, 64, 128]
    assert list(rows.shape.top_k + rows.shape.tied) == [8] * 5
    assert list(rows.shape.skew) == [1.2, 1.2, 0, 0, 1.2]
    assert rows.left_out == {"distribution is neither balanced nor power_law_": 1}


def test_rows_of_a_version_that_sends_strangers_to_the_first_expert():
    split = {"framework": "sglang 0.5.10", "num_tokens": 1024, "moe_ep_size": 32, "distribution": "balanced"}
    (rows,) = _rows_moe.rows(table(old=split, new={**split, "framework": "sglang 0.5.14"}))
    assert_allclose(rows.shape.tied[1:], [8 * 0.25 - 0.25, 0])  # a quarter of the tokens have one pair here, and bring their 7 others
    load = LOAD(1024.0, 128.0, 8.0, 32.0, 0.0, rows.shape.tied[1])
    assert_allclose(load.pairs, 1024 / 4 * 8, rtol=1e-6)


def test_backward_products_of_grouped_matmuls():
    row = {"gpu": "A100", "op": "group_matmul", "dtype": "bf16", "b": 4, "m": 10, "n": 20, "k": 30, "time_us": 9.0}
    (rows,) = _rows_moe.rows(read_kernels([{**row, "key": f"stage={stage}"} for stage in ("fwd", "bwd_grad_act", "bwd_grad_w")]))
    assert [list(x) for x in (rows.shape.rows, rows.shape.n, rows.shape.k)] == [[10, 10, 30], [20, 30, 20], [30, 20, 10]]
    assert set(rows.group) == {"4x20x30"}


def test_fit_recovers_constants_of_synthetic_kernels():
    rng = np.random.default_rng(1)
    pick = lambda *values: rng.choice(values, 500).astype(float)
    shape = MoeShape(2.0 ** rng.integers(0, 15, 500), pick(2048, 4096), pick(768, 1536, 8192), pick(64, 128), pick(4, 8), 1.0, pick(1, 2, 8), pick(0, 1.2))
    true = np.zeros(len(MoeConstants._fields))
    true[[0, 1, 7]] = 0.4, -0.5, 0.3
    family = _rows_moe.MOE_FFN
    constants = constrain(MoeConstants, MOE_PRIORS, jnp.asarray(true))
    log_time = np.log(np.asarray(EXACT(MoeShape(*(jnp.asarray(x, float) for x in shape)), GPU, constants)))
    fit = fit_kernels(family, shape, GPU, log_time, starts=0, passes=15)
    assert np.max(np.abs(predict_rows(fit, MoeShape(*(np.broadcast_to(x, 500) for x in shape)), GPU) - log_time)) < 0.05
    assert_allclose(fit.free[[0, 7]], true[[0, 7]], atol=0.1)


@pytest.mark.skipif(not DATA.exists(), reason="the public timings are not beside this repository")
def test_unseen_model_of_public_timings():
    part = read_kernels(DATA / "aic_moe_b200_sxm.csv.gz")
    (rows,) = _rows_moe.rows(part.select(datatype="bf16", kernel_source="sglang_flashinfer_trtllm_moe"))
    device = device_of(load_system("b200_sxm", fitted=False).chip, "bf16")
    unseen = rows.group == "2048x768x128"
    seen = np.flatnonzero(~unseen)[:512]
    fit = fit_kernels(rows.family, rows.take(seen).shape, device, np.log(rows.time[seen]), starts=0, passes=15)
    error = np.abs(np.exp(predict_rows(fit, rows.take(unseen).shape, device)) / rows.time[unseen] - 1)
    assert unseen.sum() > 500
    assert error.mean() < 0.12  # a plain roofline is off by 0.7
