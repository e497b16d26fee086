"""A training step: the parts add up, every number has a true gradient, transforms agree, and more resources never hurt."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.estimate import train_step
from diffperf.hardware import load_system
from diffperf.parallel import check_plan, make_plan, num_devices
from diffperf.workload import pad_kinds, transformer
from diffperf.workload._build import mamba2_mixer

LLAMA_8B = dict(hidden=4096, layers=32, num_heads=32, num_kv_heads=8, ffn_hidden=14336, vocab=128256, seq_len=8192)
LATENT = dict(num_heads=128, head_dim=192, v_head_dim=128, query_rank=1536, kv_rank=512, rope_dim=64)
ROUTED = dict(num_experts=256, experts_per_token=8, expert_hidden=2048, shared_hidden=2048)

# Models of two kinds of layer each, so that one compiled function serves all.
MODELS = {
    "llama3-8b": pad_kinds(transformer(**LLAMA_8B), 2),
    "gpt3-175b": pad_kinds(transformer(hidden=12288, layers=96, num_heads=96, vocab=51200, tied=True, seq_len=2048, gated=False, norm="layer"), 2),
    "deepseek-v3": transformer(hidden=7168, layers=[{"count": 3, "ffn_hidden": 18432}, {"count": 58, **ROUTED}], vocab=129280, seq_len=4096, **LATENT),
    "t5": transformer(hidden=1024, layers=[{"count": 24, "causal": False}, {"count": 24, "cross_seq_len": 512}], num_heads=16, vocab=32128, seq_len=512),
    "hybrid": transformer(
        hidden=4096,
        layers=[{"count": 8, "num_heads": 32, "num_kv_heads": 8, "window": 1024}, {"count": 24, **mamba2_mixer(4096, 128, 64, 128, 8), "ffn_hidden": 0}],
        vocab=65536, seq_len=4096,
    ),
}  # fmt: skip
SYSTEMS = {name: load_system(name, num_devices=4096, fitted=False) for name in ("h100_sxm", "a100_sxm_80", "v100_sxm2_32", "gb200_nvl72", "tpu_v4")}

CASES = {
    "one device": ("llama3-8b", "h100_sxm", dict(global_batch_size=4)),
    "everything": ("gpt3-175b", "a100_sxm_80", dict(global_batch_size=1536, tensor_parallel=8, pipeline_parallel=8, data_parallel=16, virtual_stages=3,
                                                    recompute="selective", fused_attention=False)),
    "fully sharded": ("llama3-8b", "h100_sxm", dict(global_batch_size=256, data_parallel=128, zero_stage=3, shard_group=32, recompute=0.5)),
    "context ring": ("llama3-8b", "h100_sxm", dict(global_batch_size=64, tensor_parallel=2, context_parallel=8, data_parallel=8, precision="fp8")),
    "context all-to-all": ("llama3-8b", "h100_sxm", dict(global_batch_size=64, context_parallel=8, data_parallel=8, context_mode="all-to-all")),
    "experts": ("deepseek-v3", "gb200_nvl72", dict(global_batch_size=2048, pipeline_parallel=8, data_parallel=128, expert_parallel=64, precision="mxfp8",
                                                   schedule="dualpipe", optimizer="adam-bf16")),
    "experts without tensor cores for it": ("deepseek-v3", "h100_sxm", dict(global_batch_size=2048, data_parallel=512, expert_parallel=32, precision="nvfp4")),
    "encoder and decoder": ("t5", "v100_sxm2_32", dict(global_batch_size=128, data_parallel=32, micro_batch_size=4, precision="fp16", recompute="full")),
    "mixer on a torus": ("hybrid", "tpu_v4", dict(global_batch_size=512, data_parallel=256, tensor_parallel=4, zero_stage=3)),
    "adapters, offloaded": ("llama3-8b", "h100_sxm", dict(global_batch_size=8, data_parallel=8, trainable=0.002, optimizer_offload=1.0,
                                                          activation_offload=1.0)),
    "frozen": ("llama3-8b", "h100_sxm", dict(global_batch_size=8, trainable=0.0, pipeline_parallel=2, data_parallel=2, schedule="zero-bubble")),
}  # fmt: skip
relaxed = settings(deadline=None, max_examples=60, derandomize=True)


@functools.lru_cache(maxsize=1)
def cases():
    return {name: (MODELS[model], SYSTEMS[system], make_plan(**words)) for name, (model, system, words) in CASES.items()}


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def in_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float32), tree)


ROWS = 512  # one compiled function serves every batch of the tests
step = jax.jit(chex.assert_max_traces(train_step, n=1))
_steps = jax.jit(jax.vmap(train_step))


def steps(rows):
    """Estimates of up to `ROWS` tuples of (model, system, plan, stack), in one call."""
    return batch_steps(jax.tree.map(lambda *x: np.stack(x), *rows), len(rows))


def batch_steps(batch, num):
    """The same of trees whose leaves have a leading axis of `num` rows."""
    padded = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[-1:], ROWS - num, axis=0)]), batch)
    return jax.tree.map(lambda x: np.asarray(x)[:num], _steps(*padded))


@pytest.fixture(scope="module")
def estimates(stack):
    return steps([(*case, stack) for case in cases().values()])


@pytest.fixture(scope="module")
def single_estimates(stack):
    """The same in float32."""
    with jax.enable_x64(False):
        return steps([in_float32((*case, stack)) for case in cases().values()])


# what an estimate says


@pytest.mark.parametrize("precision", ["double", "single"])
def test_breakdown_adds_up_to_the_step_time(estimates, single_estimates, precision):
    estimate = estimates if precision == "double" else single_estimates
    parts = np.stack([np.asarray(x, np.float64) for x in jax.tree.leaves(estimate.breakdown)])
    assert_allclose(np.sum(parts, axis=0), estimate.step_time, rtol=1e-12 if precision == "double" else 1e-6)
    assert np.all(parts >= -1e-7 * np.asarray(estimate.step_time))


def test_each_part_is_there_when_its_cause_is(estimates):
    """A part of the breakdown is 0, up to rounding, exactly in the cases that lack its cause."""
    degrees = dict(tensor_parallel=1, context_parallel=1, expert_parallel=1, pipeline_parallel=1, data_parallel=1)
    for i, (name, case) in enumerate(CASES.items()):
        w = {**degrees, **case[2]}
        causes = {
            "recompute": w.get("recompute", "none") != "none",
            "tensor": w["tensor_parallel"] > 1,
            "context": w["context_parallel"] > 1,
            "expert": w["expert_parallel"] > 1,
            "pipeline": w["pipeline_parallel"] > 1,
            "bubble": w["pipeline_parallel"] > 1,
            "data": w["data_parallel"] * w["context_parallel"] > 1 and w.get("trainable", 1) > 0,
            "optimizer": w.get("trainable", 1) > 0 and not w.get("optimizer_offload"),
            "offload": w.get("optimizer_offload", 0) > 0,
            "jitter": num_devices(cases()[name][2]) > 8,
        }
        for part, cause in causes.items():
            assert (getattr(estimates.breakdown, part)[i] > 1e-12 * estimates.step_time[i]) == cause, (name, part)


def test_throughput_and_utilisation_follow_from_the_step_time(estimates):
    for i, (name, (model, system, words)) in enumerate(CASES.items()):
        e = jax.tree.map(lambda x, i=i: x[i], estimates)
        tokens = words["global_batch_size"] * MODELS[model].seq_len
        devices = num_devices(cases()[name][2])
        assert_allclose(e.tokens_per_s * e.step_time, tokens, rtol=1e-12)
        assert_allclose(e.tokens_per_s_per_device * devices, e.tokens_per_s, rtol=1e-12)
        assert_allclose(e.cost, devices * SYSTEMS[system].price_per_hour * e.step_time / 3600, rtol=1e-12)
        assert e.energy > 0
        assert e.mfu <= e.hfu <= 1, name
        assert_allclose(sum(jax.tree.leaves(e.memory)), e.peak_memory, rtol=1e-12)


def test_model_flop_utilisation_by_hand(stack):
    """GPT-3 of Narayanan et al. 2021 (arXiv:2104.04473, equation 3): 96 B s l h^2 (1 + s / 6h + V / 16 l h) FLOP with full recomputation, of
    which the last forward pass of the layers is not the model's; there all pairs of the mask count, here half of them."""
    model, system = MODELS["gpt3-175b"], SYSTEMS["a100_sxm_80"]
    plan = make_plan(global_batch_size=1536, tensor_parallel=8, pipeline_parallel=16, data_parallel=8, recompute="full", precision="bf16")
    e = step(model, system, plan, stack)
    batch, s, layers, h, vocab = 1536, 2048, 96, 12288, 51200
    hardware = 96 * batch * s * layers * h**2 * (1 + s / 2 / (6 * h) + vocab / (16 * layers * h))
    peak = 312e12 * 1024
    assert_allclose(e.hfu, hardware / peak / e.step_time, rtol=1e-6)
    model_flops = 72 * batch * s * layers * h**2 * (1 + s / 2 / (6 * h) + vocab / (12 * layers * h))
    assert_allclose(e.mfu, model_flops / peak / e.step_time, rtol=1e-6)


@pytest.mark.parametrize(
    "model, words, feasible",
    [
        ("llama3-8b", dict(global_batch_size=64, data_parallel=64, zero_stage=3, recompute="full"), True),
        ("llama3-8b", dict(global_batch_size=64, data_parallel=64, tensor_parallel=3, zero_stage=3, recompute="full"), False),
        ("llama3-8b", dict(global_batch_size=63, data_parallel=64, zero_stage=3, recompute="full"), False),
        ("llama3-8b", dict(global_batch_size=8192, data_parallel=8192, zero_stage=3, recompute="full"), False),
        ("llama3-8b", dict(global_batch_size=64, data_parallel=64, zero_stage=3, recompute="full", precision="nvfp4"), False),
        ("gpt3-175b", dict(global_batch_size=64), False),
        ("gpt3-175b", dict(global_batch_size=64, tensor_parallel=8, pipeline_parallel=8, recompute="full"), True),
    ],
    ids=str,
)
def test_plans_that_cannot_run_are_masked(stack, model, words, feasible):
    e = step(MODELS[model], SYSTEMS["h100_sxm"], make_plan(**words), stack)
    assert bool(e.feasible) == feasible
    chex.assert_tree_all_finite(jax.tree.map(lambda x: x * 1.0, e))  # masked, not NaN


def test_out_of_memory_is_the_only_difference_between_legal_and_feasible(stack):
    plan = make_plan(global_batch_size=64, data_parallel=8)
    check_plan(MODELS["gpt3-175b"], SYSTEMS["h100_sxm"], plan)
    e = step(MODELS["gpt3-175b"], SYSTEMS["h100_sxm"], plan, stack)
    assert e.peak_memory > e.memory_capacity and not e.feasible
    roomy = eqx.tree_at(lambda s: s.chip.memory_capacity, SYSTEMS["h100_sxm"], e.peak_memory * 1.001)
    assert step(MODELS["gpt3-175b"], roomy, plan, stack).feasible


# transforms


@pytest.mark.parametrize("name", CASES)
def test_jit_is_a_row_of_vmap(stack, estimates, name):
    row = jax.tree.map(lambda x: x[list(CASES).index(name)], estimates)
    chex.assert_trees_all_close(step(*cases()[name], stack), row, rtol=1e-12)


def test_eager_is_jit(stack):
    chex.assert_trees_all_close(train_step(*cases()["experts"], stack), step(*cases()["experts"], stack), rtol=1e-12)


def test_one_trace_serves_all_models_systems_and_plans(stack):
    """Models of the same number of kinds, any system and any plan are values, not code: `step` refuses a second trace."""
    assert len({float(step(*case, stack).step_time) for case in cases().values()}) == len(CASES)


def test_float32_is_close(estimates, single_estimates):
    assert single_estimates.step_time.dtype == np.float32
    double, single = (eqx.tree_at(lambda e: (e.breakdown, e.feasible), e, (None, None)) for e in (estimates, single_estimates))
    chex.assert_trees_all_close(single, double, rtol=1e-4)
    for part, exact in zip(jax.tree.leaves(single_estimates.breakdown), jax.tree.leaves(estimates.breakdown), strict=True):
        # waiting for launches is the small difference of two long times, so its error is in proportion to the step
        assert (np.abs(part - exact) <= 1e-4 * exact + 1e-6 * estimates.step_time).all()
    assert_allclose(single_estimates.feasible, estimates.feasible)


# gradients


@jax.jit
def log_step_and_gradients(model, system, plan, stack):
    return jax.value_and_grad(lambda trees: jnp.log(train_step(*trees).step_time))((model, system, plan, stack))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_finite_in_every_leaf(stack, name):
    """Also at the edges that the cases stand for: one device or stage, no experts, kinds of count 0, frozen weights, full offload, a datatype
    that the chip lacks."""
    value, gradients = log_step_and_gradients(*cases()[name], stack)
    chex.assert_tree_all_finite((value, gradients))
    assert sum(float(jnp.sum(jnp.abs(x))) > 0 for x in jax.tree.leaves(gradients)) > 40  # and not all zero


# Degrees away from every kink (one rank, a full node), so that both sides of a finite difference lie on one branch.
GENERIC = dict(tensor_parallel=3.7, pipeline_parallel=4.3, data_parallel=37.9, context_parallel=2.2, virtual_stages=2.1, expert_parallel=5.7,
               micro_batch_size=1.3, global_batch_size=1017.0)  # fmt: skip


@pytest.mark.parametrize(
    "model, system, words",
    [
        ("deepseek-v3", "gb200_nvl72", dict(precision="fp8", schedule="dualpipe", recompute=0.3)),
        ("gpt3-175b", "a100_sxm_80", dict(fused_attention=False, recompute="selective", activation_offload=0.4, optimizer_offload=0.6)),
        ("hybrid", "tpu_v4", dict(zero_stage=3, shard_group=7, context_mode="all-to-all", trainable=0.3, schedule="zero-bubble")),
        ("t5", "h100_sxm", dict(zero_stage=3, overlap_gradient=False, overlap_pipeline=False)),
    ],
    ids=["experts", "unfused and offloaded", "torus and sharding groups", "encoder and decoder"],
)
def test_gradients_are_elasticities_by_finite_differences(stack, model, system, words):
    """In log parameters, for every number that is neither 0 nor infinite, of model, system, plan and stack."""
    plan = make_plan(global_batch_size=1, **words)
    plan = eqx.tree_at(lambda p: [getattr(p, name) for name in GENERIC], plan, [jnp.asarray(x) for x in GENERIC.values()])
    trees = (MODELS[model], SYSTEMS[system], plan, stack)
    leaves, structure = jax.tree.flatten(trees)
    flatten = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    flat, gradients = flatten(trees), flatten(log_step_and_gradients(*trees)[1])
    checked = np.flatnonzero((flat != 0) & np.isfinite(flat))
    names = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(trees) for _ in range(leaf.size)]
    h = 1e-5
    moved = np.concatenate([np.where(np.arange(flat.size) == checked[:, None], flat * np.exp(sign * h), flat) for sign in (1, -1)])
    columns = np.split(moved, np.cumsum([x.size for x in leaves])[:-1], axis=1)
    batch = jax.tree.unflatten(structure, [c.reshape(len(moved), *x.shape) for c, x in zip(columns, leaves, strict=True)])
    above, below = np.split(np.log(batch_steps(batch, len(moved)).step_time), 2)
    numeric = (above - below) / (2 * h)
    exact = gradients[checked] * flat[checked]
    wrong = [f"{names[i]}: {a} against {b}" for i, a, b in zip(checked, exact, numeric, strict=True) if abs(a - b) > 1e-7 + 1e-5 * abs(b)]
    assert not wrong, "\n".join(wrong)
    assert np.sum(np.abs(numeric) > 1e-6) > 50


# what must hold for any plan


def random_rows(stack, num):
    rng = np.random.default_rng(1)
    pick = lambda *choices: rng.choice(choices).item()
    for _ in range(num):
        words = dict(
            micro_batch_size=pick(1, 2, 4), tensor_parallel=pick(1, 2, 4, 8), pipeline_parallel=pick(1, 2, 4, 8), data_parallel=pick(1, 4, 32, 256),
            context_parallel=pick(1, 1, 2, 8), virtual_stages=pick(1, 1, 2), expert_parallel=pick(1, 4), sequence_parallel=pick(True, False),
            context_mode=pick("ring", "all-to-all"), zero_stage=pick(0, 1, 2, 3), recompute=pick("none", "selective", "full"),
            precision=pick("bf16", "bf16", "fp8", "fp16", "fp32"), schedule=pick("1f1b", "zero-bubble", "dualpipe"), fused_attention=pick(True, False),
            trainable=pick(1.0, 1.0, 0.01), optimizer_offload=pick(0.0, 0.0, 1.0), overlap_gradient=pick(True, False),
        )  # fmt: skip
        plan = make_plan(global_batch_size=words["data_parallel"] * words["micro_batch_size"] * pick(1, 8, 64), **words)
        yield MODELS[pick(*MODELS)], SYSTEMS[pick(*SYSTEMS)], plan, stack


def test_no_step_beats_its_lower_bound(stack):
    estimate = steps(list(random_rows(stack, ROWS)))
    chex.assert_tree_all_finite(jax.tree.map(lambda x: x * 1.0, estimate))
    assert np.all(estimate.lower_bound <= estimate.step_time)
    assert np.max(estimate.lower_bound / estimate.step_time) > 0.4  # it is a bound that says something
    assert np.all((0 <= estimate.peak_stage) & (estimate.mfu <= estimate.hfu))


RATES = ("chip.peak_flops_per_s", "chip.matmul_efficiency", "chip.attention_efficiency", "chip.memory_bandwidth", "chip.memory_efficiency",
         "scale_up.bandwidth", "scale_out.bandwidth", "scale_out.efficiency", "spine.bandwidth", "host.link_bandwidth", "host.memory_bandwidth")  # fmt: skip
BYTES = ("plan.weight_bytes", "plan.gradient_bytes", "plan.optimizer_bytes", "stack.weight_traffic", "stack.activation_traffic", "stack.elementwise_bytes",
         "stack.cast_bytes", "stack.permute_bytes", "stack.score_bytes", "stack.gradient_traffic", "stack.optimizer_traffic", "model.hidden", "model.vocab",
         "model.seq_len", "model.blocks.ffn_hidden", "model.blocks.expert_hidden")  # fmt: skip


def scaled(trees, path, factor):
    return eqx.tree_at(lambda t: functools.reduce(getattr, path.split("."), t), trees, replace_fn=lambda x: x * factor)


@relaxed
@given(name=st.sampled_from(list(CASES)), rate=st.sampled_from(RATES), factor=st.floats(1.0, 30.0))
def test_more_bandwidth_or_peak_is_never_slower(stack, name, rate, factor):
    model, system, plan = cases()[name]
    assert step(model, scaled(system, rate, factor), plan, stack).step_time <= step(model, system, plan, stack).step_time * (1 + 1e-12)


@relaxed
@given(name=st.sampled_from(list(CASES)), size=st.sampled_from(BYTES), factor=st.floats(1.0, 30.0))
def test_more_bytes_are_never_faster(stack, name, size, factor):
    which, path = size.split(".", 1)
    trees = dict(zip(("model", "system", "plan"), cases()[name], strict=True), stack=stack)
    time = step(*trees.values()).step_time
    trees[which] = scaled(trees[which], path, factor)
    assert step(*trees.values()).step_time >= time * (1 - 1e-12)


@relaxed
@given(name=st.sampled_from(list(CASES)), factor=st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(stack, name, factor):
    model, system, plan = cases()[name]
    slower = system
    for path in ("chip.peak_flops_per_s", "chip.memory_bandwidth", "host.link_bandwidth", "host.memory_bandwidth"):
        slower = scaled(slower, path, 1 / factor)
    for tier in ("scale_up", "scale_out", "spine"):
        slower = scaled(scaled(slower, f"{tier}.bandwidth", 1 / factor), f"{tier}.latency", factor)
    slow_stack = stack
    for path in {"launch_time", "collective_latency", "expert_latency", "step_overhead"} & set(vars(stack)):
        slow_stack = scaled(slow_stack, path, factor)
    time = step(model, system, plan, stack).step_time
    assert_allclose(step(model, slower, plan, slow_stack).step_time, factor * time, rtol=1e-11)


# directions that a training engineer expects


def llama(stack, **words):
    return step(MODELS["llama3-8b"], SYSTEMS["h100_sxm"], make_plan(**{"global_batch_size": 512, "data_parallel": 32, **words}), stack)


def test_low_precision_is_faster(stack):
    bf16, fp8 = llama(stack), llama(stack, precision="fp8")
    assert fp8.step_time < bf16.step_time
    assert fp8.breakdown.matmul < 0.75 * bf16.breakdown.matmul
    assert_allclose(fp8.breakdown.attention, bf16.breakdown.attention)  # stays in 16 bit
    assert fp8.mfu < bf16.mfu  # of a peak twice as high


def test_twice_the_data_parallel_ranks_do_half_the_work_each(stack):
    half, whole = llama(stack, data_parallel=64), llama(stack, data_parallel=32)
    for part in ("matmul", "attention", "elementwise", "vocabulary"):
        assert_allclose(2 * getattr(half.breakdown, part), getattr(whole.breakdown, part), rtol=1e-12)
    assert whole.step_time / 2 < half.step_time < whole.step_time
    assert half.tokens_per_s_per_device < whole.tokens_per_s_per_device
    assert_allclose(2 * half.memory.optimizer, whole.memory.optimizer, rtol=1e-12)  # ZeRO-1 is the default
    assert_allclose(half.memory.activations, whole.memory.activations, rtol=1e-12)


def test_recompute_trades_time_for_memory(stack):
    none, part, full = (llama(stack, recompute=r) for r in ("none", 0.5, "full"))
    assert none.step_time < part.step_time < full.step_time
    assert none.peak_memory > part.peak_memory > full.peak_memory
    assert_allclose(none.mfu * none.step_time, full.mfu * full.step_time, rtol=1e-12)  # the model's FLOP are the same
    assert full.hfu > full.mfu and none.hfu == none.mfu


def test_interleaving_and_zero_bubble_shorten_the_bubble(stack):
    pipeline = dict(pipeline_parallel=8, data_parallel=4, tensor_parallel=1)
    plain, interleaved = llama(stack, **pipeline), llama(stack, **pipeline, virtual_stages=4)
    zero_bubble, dualpipe = (llama(stack, **pipeline, schedule=name) for name in ("zero-bubble", "dualpipe"))
    assert interleaved.breakdown.bubble < 0.5 * plain.breakdown.bubble
    assert interleaved.breakdown.pipeline > plain.breakdown.pipeline  # and sends more messages
    assert dualpipe.breakdown.bubble < zero_bubble.breakdown.bubble < plain.breakdown.bubble
    assert dualpipe.memory.weights > 1.5 * plain.memory.weights


def test_zero_stages_trade_traffic_for_memory(stack):
    estimates = [llama(stack, zero_stage=z) for z in (0, 1, 2, 3)]
    states = [float(e.memory.weights + e.memory.gradients + e.memory.optimizer) for e in estimates]
    assert states == sorted(states, reverse=True) and len(set(states)) == 4
    assert estimates[3].breakdown.data > estimates[2].breakdown.data


# context parallelism


@pytest.mark.parametrize("c", [2, 4])
def test_context_parallel_all_to_all_sends_what_ulysses_sends(stack, c):
    """Jacobs et al. 2023 (arXiv:2309.14509, section 3.2): all-to-alls of q, k, v and output, 4 N h / P elements per rank, forward; a rank
    keeps 1 / P of what it sends. The backward pass sends as much again."""
    model = pad_kinds(transformer(**{**LLAMA_8B, "num_kv_heads": 32}), 2)
    system = SYSTEMS["h100_sxm"]
    plan = make_plan(global_batch_size=1, context_parallel=c, context_mode="all-to-all")
    nbytes = 2 * 2 * (4 * 8192 / c * 4096) * (1 - 1 / c)  # passes, bytes per element, elements, part that leaves
    seconds = 32 * nbytes / (system.scale_up.bandwidth * system.scale_up.efficiency)
    assert_allclose(step(model, system, plan, stack).breakdown.context, stack.context_exposed * seconds, rtol=1e-12)


@pytest.mark.parametrize("c", [2, 4])
def test_context_parallel_ring_sends_keys_and_values_and_their_gradients(stack, c):
    """Liu et al. 2023 (arXiv:2310.01889): in c - 1 steps each rank passes on the keys and values of s / c positions; the backward pass does so
    again, with their gradients beside."""
    model, system = MODELS["llama3-8b"], SYSTEMS["h100_sxm"]
    nbytes = 3 * (c - 1) * 2 * (8192 / c) * 2 * 8 * 128  # passes, steps, bytes per element, positions, keys and values of 8 heads of 128
    seconds = 32 * nbytes / (system.scale_up.bandwidth * system.scale_up.efficiency)
    plan = make_plan(global_batch_size=1, context_parallel=c)
    assert_allclose(step(model, system, plan, stack).breakdown.context, stack.context_exposed * seconds, rtol=1e-12)
