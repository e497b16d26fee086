"""Plans: words in, numbers out, mistakes named; schedules against a simulation; memory against published figures."""

import itertools
import math

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.hardware import DATATYPES, load_system
from diffperf.parallel import PlanError, check_plan, make_plan, num_devices, num_microbatches
from diffperf.parallel._check import legal
from diffperf.parallel._memory import peak_memory, stage_memory
from diffperf.parallel._plan import SCHEDULES, Plan, plan_numbers
from diffperf.parallel._schedule import bubble_slots, in_flight, parameter_copies
from diffperf.parallel._shard import device_parameters, layer_work
from diffperf.workload import forward_flops_per_sequence, num_parameters, pad_kinds, transformer

SYSTEM = load_system("h100_sxm", num_devices=64, fitted=False)
V100 = load_system("v100_sxm2_32", num_devices=64, fitted=False)
DENSE = transformer(hidden=4096, layers=32, num_heads=32, num_kv_heads=8, ffn_hidden=14336, vocab=128256, seq_len=8192)
EXPERTS = dict(num_experts=8, experts_per_token=2, expert_hidden=14336)
MIXED = transformer(hidden=4096, layers=[{"count": 4, "ffn_hidden": 8192}, {"count": 28, **EXPERTS}], num_heads=32, vocab=32000, seq_len=4096)
GPT3 = transformer(hidden=12288, layers=96, num_heads=96, vocab=51200, tied=True, seq_len=2048, positions=2048, gated=False, norm="layer")  # 175B

stage = jax.jit(stage_memory)


# words


def test_make_plan_reads_the_words_of_the_field():
    plan = make_plan(global_batch_size=256, micro_batch_size=2, tensor_parallel=4, data_parallel=8, zero_stage=2, recompute="selective", precision="fp8")
    assert (num_devices(plan), num_microbatches(plan)) == (32, 16)
    assert (plan.shard_optimizer, plan.shard_gradients, plan.shard_parameters) == (1, 1, 0)
    assert (plan.recompute_full, plan.recompute_selective, plan.sequence_parallel) == (0, 1, 1)
    assert_allclose(plan.precision, [name == "fp8" for name in DATATYPES])
    assert_allclose(plan.schedule, [1, 0, 0])
    assert (plan.optimizer_bytes, plan.shard_group) == (12, math.inf)
    assert make_plan(global_batch_size=1).sequence_parallel == 0
    assert make_plan(global_batch_size=1, recompute=0.25).recompute_full == 0.25
    assert make_plan(global_batch_size=1, optimizer="adam-8bit").optimizer_bytes == 6
    assert make_plan(global_batch_size=1, optimizer="lion", optimizer_bytes=8).optimizer_bytes == 8  # a number overrides the name
    leaves = jax.tree.leaves(plan)
    assert all(isinstance(x, jax.Array) and x.dtype == jnp.float64 for x in leaves)


def test_make_plan_takes_numbers_of_numpy():
    assert make_plan(global_batch_size=np.int64(8), data_parallel=np.int32(4), trainable=np.float32(0.5)).data_parallel == 4


POSITIVE = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "virtual_stages", "expert_parallel", "micro_batch_size")
WHOLE = POSITIVE[:-1] + ("shard_group",)
FRACTIONS = ("trainable", "optimizer_offload", "activation_offload")
BYTES = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
MISTAKES = (
    [(name, value, "positive number") for name in ("micro_batch_size", "global_batch_size") for value in (0, -2, math.nan, math.inf, "8", True, None)]
    + [("shard_group", value, "whole number of at least 1, or inf") for value in (0, -1, "all")]
    + [(name, value, "whole number of at least 1") for name in POSITIVE[:-1] for value in (0, -2, math.nan, math.inf, "8", True, None)]
    + [(name, value, "whole number of at least 1") for name in WHOLE for value in (0.5, 2.5)]
    + [(name, value, "fraction in [0, 1]") for name in FRACTIONS for value in (-0.1, 1.1, math.nan, "half")]
    + [(name, value, "0 or more") for name in BYTES for value in (-1.0, math.inf, "two")]
    + [("recompute", value, "'none', 'selective', 'full' or the part of the layers, in [0, 1]") for value in ("some", 1.5, -1, True, None)]
    + [("zero_stage", value, "0, 1, 2 or 3") for value in (4, -1, "3", 1.5)]
    + [("context_mode", "star", "'ring' or 'all-to-all'"), ("optimizer", "lion", "adam, adam-8bit"), ("optimizer", "lion", "optimizer_bytes")]
    + [("precision", "bf15", ", ".join(DATATYPES)), ("schedule", "gpipe", ", ".join(SCHEDULES))]
)


@pytest.mark.parametrize("name, value, accepted", MISTAKES, ids=str)
def test_make_plan_names_the_mistake(name, value, accepted):
    with pytest.raises(PlanError) as raised:
        make_plan(**{"global_batch_size": 8, name: value})
    assert f"{name} is {value!r}; it should be" in str(raised.value)
    assert accepted in str(raised.value)


def test_make_plan_refuses_an_unknown_word():
    with pytest.raises(TypeError, match="tensor_paralell"):
        make_plan(global_batch_size=8, tensor_paralell=2)


REFUSED = [
    # model, system, words, what the message says
    (DENSE, SYSTEM, dict(tensor_parallel=3), ["tensor_parallel is 3", "divide num_heads = 32", "Choose 1, 2, 4, 8, 16 or 32."]),
    (DENSE, SYSTEM, dict(tensor_parallel=64), ["tensor_parallel is 64", "divide num_heads = 32"]),
    (DENSE, SYSTEM, dict(data_parallel=4, expert_parallel=2), ["expert_parallel is 2", "no routed experts", "Use 1."]),
    (MIXED, SYSTEM, dict(data_parallel=3, expert_parallel=3), ["expert_parallel is 3", "divide num_experts = 8", "Choose 1, 2, 4 or 8."]),
    (MIXED, SYSTEM, dict(data_parallel=2, context_parallel=3, expert_parallel=4), ["is 4", "data_parallel * context_parallel = 6", "1, 2, 3 or 6"]),
    (DENSE, SYSTEM, dict(pipeline_parallel=5), ["virtual_stages is 5", "divide num_layers = 32 (or 33, 34", "1, 2, 3, 4, 8, 11, 16, 17 or 32."]),
    (DENSE, SYSTEM, dict(pipeline_parallel=4, virtual_stages=5), ["pipeline_parallel * virtual_stages is 20", "Lower virtual_stages."]),
    (DENSE, SYSTEM, dict(pipeline_parallel=3, virtual_stages=8), ["is 24", "With virtual_stages = 8 choose pipeline_parallel = 2 or 4."]),
    (DENSE, SYSTEM, dict(pipeline_parallel=2, virtual_stages=40), ["is 80", "divide num_layers = 32", "Lower virtual_stages."]),
    (DENSE, SYSTEM, dict(virtual_stages=2), ["virtual_stages is 2 with pipeline_parallel = 1", "Use virtual_stages = 1."]),
    (DENSE, SYSTEM, dict(data_parallel=5), ["global_batch_size is 32", "= 5 should divide it", "for example 35", "divides 6.4"]),
    (DENSE, SYSTEM, dict(micro_batch_size=64), ["global_batch_size is 32", "= 64 should divide it", "for example 64"]),
    (DENSE, SYSTEM, dict(context_parallel=8193), ["context_parallel is 8193", "at most seq_len = 8192"]),
    (DENSE, SYSTEM, dict(tensor_parallel=8, data_parallel=16), ["8 * 1 * 16 * 1 = 128 devices", "the system has 64"]),
    (DENSE, SYSTEM, dict(precision="nvfp4"), ["precision is nvfp4", "Choose fp32, tf32, fp16, bf16, fp8"]),
    (DENSE, V100, dict(precision="bf16"), ["precision is bf16", "fp16"]),
]  # fmt: skip


@pytest.mark.parametrize("model, system, words, said", REFUSED, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_check_plan_says_what_to_change(model, system, words, said):
    plan = make_plan(**{"global_batch_size": 32, **words})
    with pytest.raises(PlanError) as raised:
        check_plan(model, system, plan)
    missing = [part for part in said if part not in str(raised.value)]
    assert not missing, str(raised.value)
    assert not legal(model, system, plan)


def random_plans(rng, num, experts):
    degree = lambda *choices: rng.choice(choices).item()
    for _ in range(num):
        yield plan_numbers(
            global_batch_size=degree(1, 8, 24, 32, 64, 96), micro_batch_size=degree(1, 2, 3), tensor_parallel=degree(1, 2, 3, 4, 8),
            pipeline_parallel=degree(1, 2, 3, 4, 5, 8), data_parallel=degree(1, 2, 3, 4), context_parallel=degree(1, 1, 2),
            virtual_stages=degree(1, 1, 1, 2, 4), expert_parallel=degree(1, 1, 2, 3, 4) if experts else degree(1, 1, 1, 1, 2),
            precision=degree("bf16", "bf16", "fp8", "nvfp4"),
        )  # fmt: skip


@pytest.mark.parametrize("model", [DENSE, MIXED], ids=["dense", "experts"])
def test_legal_agrees_with_check_plan(model):
    """The mask inside `vmap` and the error at the Python door are written apart; on random plans they say the same."""
    numbers = list(random_plans(np.random.default_rng(0), 300, experts=model is MIXED))
    plans = Plan(**{name: np.stack([n[name] for n in numbers]) for name in numbers[0]})
    masked = jax.jit(jax.vmap(legal, (None, None, 0)))(model, SYSTEM, plans)

    def accepted(plan):
        try:
            check_plan(model, SYSTEM, plan)
        except PlanError:
            return False
        return True

    assert_allclose(masked, [accepted(Plan(**n)) for n in numbers])
    assert 20 < np.sum(np.asarray(masked)) < 280  # both answers were asked for


def test_legal_knows_large_counts_also_in_float32():
    """Ratios close to a whole number, or to 0, are no multiples."""
    ok = jax.jit(legal)
    big = load_system("h100_sxm", num_devices=65536, fitted=False)
    cases = {(1, 32768): False, (32768, 32768): True, (98305, 32768): False, (98304, 32768): True, (65537, 32768): False}
    for x64 in (True, False):
        with jax.enable_x64(x64):
            single = lambda tree, x64=x64: jax.tree.map(lambda x: x.astype(jnp.float64 if x64 else jnp.float32), tree)
            got = [bool(ok(single(DENSE), single(big), make_plan(global_batch_size=b, data_parallel=d))) for b, d in cases]
            assert got == list(cases.values())


# schedules


def run_pipeline(orders, dependency, duration):
    """Makespan and, per rank, the peak number of forward passes whose backward pass is not done.

    Args:
      orders: per rank, its tasks in order; a task is (kind, chunk, micro-batch) with kind "F" or "B".
      dependency: (rank, task) -> (rank, task) that must be done before, or None.
      duration: kind -> time.
    """
    done, clock, place = {}, [0.0] * len(orders), [0] * len(orders)
    while any(i < len(order) for i, order in zip(place, orders, strict=True)):
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                needs = dependency(rank, order[place[rank]])
                if needs is not None and needs not in done:
                    break
                clock[rank] = max(clock[rank], done.get(needs, 0.0)) + duration[order[place[rank]][0]]
                done[rank, order[place[rank]]] = clock[rank]
                place[rank] += 1
    peaks = [max(itertools.accumulate(1 if kind == "F" else -1 for kind, *_ in order)) for order in orders]
    return max(clock), peaks


def megatron_order(p, v, m, rank):
    """Order of one rank in Megatron-LM: warm-up, one forward and one backward in turn, the remaining backward passes (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2); chunks take turns every p micro-batches."""
    total = m * v
    chunk = lambda k: (k // p) % v
    micro = lambda k: k // (p * v) * p + k % p
    forward = [("F", chunk(k) if v > 1 else 0, micro(k) if v > 1 else k) for k in range(total)]
    backward = [("B", v - 1 - (chunk(k) if v > 1 else 0), micro(k) if v > 1 else k) for k in range(total)]
    warm_up = min(total, p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p)
    order = forward[:warm_up]
    for i in range(total - warm_up):
        order += [forward[warm_up + i], backward[i]]
    return order + backward[total - warm_up :]


def megatron_dependency(p, v):
    def needs(rank, task):
        kind, chunk, micro = task
        if kind == "F":
            return (rank - 1, task) if rank else ((p - 1, ("F", chunk - 1, micro)) if chunk else None)
        return (rank + 1, task) if rank < p - 1 else ((0, ("B", chunk + 1, micro)) if chunk < v - 1 else (rank, ("F", chunk, micro)))

    return needs


@pytest.mark.parametrize("p, v, m", [(1, 1, 4), (2, 1, 2), (4, 1, 4), (4, 1, 12), (8, 1, 3), (8, 1, 16), (2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 16)])
def test_1f1b_agrees_with_a_simulation(p, v, m):
    plan = make_plan(global_batch_size=m, pipeline_parallel=p, virtual_stages=v)
    orders = [megatron_order(p, v, m, rank) for rank in range(p)]
    makespan, peaks = run_pipeline(orders, megatron_dependency(p, v), {"F": 1 / v, "B": 2 / v})
    assert_allclose(bubble_slots(plan, 1 / 3), makespan / 3 - m, rtol=1e-12, atol=1e-12)
    assert_allclose([in_flight(plan, rank) for rank in range(p)], np.array(peaks) / v, rtol=1e-12)


def test_bubbles_as_published():
    """DeepSeek-AI 2024 (arXiv:2412.19437, table 2), with F = 1, B = 2, W = 1 (so F&B = 3) on 16 ranks: 1F1B (PP - 1)(F + B) = 45,
    ZB1P (PP - 1)(F + B - 2 W) = 15, DualPipe (PP / 2 - 1)(F&B + B - 3 W) = 14; parameters 1, 1, 2 and activations PP, PP, PP + 1."""
    plans = [make_plan(global_batch_size=64, pipeline_parallel=16, schedule=name) for name in SCHEDULES]
    assert_allclose([3 * bubble_slots(plan, 1 / 3) for plan in plans], [45, 15, 14], rtol=1e-12)
    assert_allclose([parameter_copies(plan) for plan in plans], [1, 1, 2])
    assert_allclose([in_flight(plan, 0.0) for plan in plans], [16, 16, 17])
    # without a weight gradient F = B = 1, so W = 0 and F&B = 2: 30, 30 and 7 * 3
    assert_allclose([2 * bubble_slots(plan, 0.0) for plan in plans], [30, 30, 21], rtol=1e-12)
    # Korthikanti et al. 2022 (arXiv:2205.05198, section 4.2.3): the first stage of an interleaved schedule stores L (1 + (p - 1) / (p v)) layers
    interleaved = make_plan(global_batch_size=64, pipeline_parallel=8, virtual_stages=3)
    assert_allclose(in_flight(interleaved, 0.0), 8 * (1 + 7 / (8 * 3)), rtol=1e-12)


def test_schedules_at_their_edges():
    for name in SCHEDULES:
        one = make_plan(global_batch_size=4, schedule=name)
        assert bubble_slots(one, 1 / 3) == 0
        few = make_plan(global_batch_size=2, pipeline_parallel=8, schedule=name)
        assert in_flight(few, 0.0) == 2  # never more than there are
        for plan in (one, few):
            chex.assert_tree_all_finite(jax.grad(lambda q: bubble_slots(q, 1 / 3) + in_flight(q, 0.0))(plan))


# memory


@pytest.fixture(scope="module")
def plain(stack):
    """A stack that needs exactly what the closed forms count: no overhead, and no working set beside what is stored."""
    ones = [name for name in ("activation_memory", "selective_memory", "memory_overhead") if hasattr(stack, name)]
    zeros = [name for name in ("memory_fixed", "working_layers", "low_precision_storage") if hasattr(stack, name)]
    values = [jnp.asarray(1.0)] * len(ones) + [jnp.asarray(0.0)] * len(zeros)
    return eqx.tree_at(lambda s: [getattr(s, name) for name in ones + zeros], stack, values)


def activation_bytes(model, plan, plain):
    """Activations stored by one layer of a model of equal layers, for one micro-batch. [B]"""
    return stage(model, plan, plain, 0.0).activations / jnp.sum(model.blocks.count)


@pytest.mark.parametrize("hidden, heads, seq_len, batch", [(12288, 96, 2048, 1), (6144, 64, 2048, 4), (1024, 16, 512, 3)])
def test_activations_are_those_of_korthikanti(plain, hidden, heads, seq_len, batch):
    """Korthikanti et al. 2022 (arXiv:2205.05198), table 2: bytes per layer with multi-head attention and a 4 h feed-forward part."""
    model = transformer(hidden=hidden, layers=2, num_heads=heads, gated=False, seq_len=seq_len, vocab=1000)
    words = dict(global_batch_size=batch, micro_batch_size=batch, fused_attention=False)
    sbh, core = seq_len * batch * hidden, 5 * heads * seq_len / hidden
    nbytes = lambda **more: activation_bytes(model, make_plan(**words, **more), plain)
    assert_allclose(nbytes(), sbh * (34 + core), rtol=1e-12)
    assert_allclose(nbytes(tensor_parallel=8, sequence_parallel=False), sbh * (10 + 24 / 8 + core / 8), rtol=1e-12)
    assert_allclose(nbytes(tensor_parallel=8), sbh * (34 / 8 + core / 8), rtol=1e-12)
    assert_allclose(nbytes(tensor_parallel=8, recompute="selective"), sbh * 34 / 8, rtol=1e-12)


def test_selective_recompute_saves_what_was_published(plain):
    """Korthikanti et al. 2022, section 5: recomputing the attention core of GPT-3 (175B) saves 70% of its activations, of MT-NLG (530B) 65%."""
    shapes = [(GPT3, 0.70), (transformer(hidden=20480, layers=105, num_heads=128, vocab=51200, seq_len=2048, gated=False), 0.65)]
    for model, saved in shapes:
        plan = lambda recompute: make_plan(global_batch_size=1, fused_attention=False, tensor_parallel=8, recompute=recompute)
        ratio = activation_bytes(model, plan("selective"), plain) / activation_bytes(model, plan("none"), plain)
        assert_allclose(1 - ratio, saved, atol=0.006)


def test_a_gated_layer_and_a_fused_core_by_hand(plain):
    """Llama 3 8B per token: 4 inputs of h; q and output of 4096, k and v of 1024; gate, up and product of 14336; 2 bytes each."""
    plan = make_plan(global_batch_size=1)
    assert_allclose(activation_bytes(DENSE, plan, plain), 8192 * 2 * (4 * 4096 + 2 * (4096 + 1024) + 3 * 14336), rtol=1e-12)


def test_model_states_are_those_of_zero(stack):
    """Rajbhandari et al. 2020 (arXiv:1910.02054, figure 1): 7.5B parameters, 64 ranks, K = 12: 120 GB, 31.4, 16.6 and 1.9 GB."""
    small = transformer(hidden=4096, layers=32, num_heads=32, vocab=51200)
    model = eqx.tree_at(lambda m: m.extra_parameters, small, 7.5e9 - num_parameters(small) + small.extra_parameters)
    assert_allclose(num_parameters(model), 7.5e9)
    words = dict(global_batch_size=64, data_parallel=64, gradient_bytes=2.0)
    states = []
    for zero_stage in (0, 1, 2, 3):
        parts = stage(model, make_plan(**words, zero_stage=zero_stage), stack, 0.0)
        states.append(float(parts.weights + parts.gradients + parts.optimizer) / 1e9)
    assert_allclose(states, [120.0, 31.4, 16.6, 1.9], rtol=0.015)  # as rounded there
    assert_allclose(states, [7.5 * 16, 7.5 * (4 + 12 / 64), 7.5 * (2 + 14 / 64), 7.5 * 16 / 64], rtol=1e-12)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("words", [dict(data_parallel=8), dict(data_parallel=4, context_parallel=2, tensor_parallel=2),
                                   dict(data_parallel=8, expert_parallel=4), dict(data_parallel=8, shard_group=2)], ids=str)  # fmt: skip
def test_zero_stages_split_states_over_their_ranks(stack, words, zero_stage):
    plan = make_plan(global_batch_size=64, zero_stage=zero_stage, **words)
    whole = stage(MIXED, make_plan(global_batch_size=64, zero_stage=0, **words), stack, 0.0)
    parts = stage(MIXED, plan, stack, 0.0)
    dense, experts = device_parameters(MIXED, plan)
    group = min(words.get("shard_group", 8), 8)
    share = (dense / group + experts / min(group, 8 // words.get("expert_parallel", 1))) / (dense + experts)
    for part, first_stage in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
        ratio = getattr(parts, part) / getattr(whole, part)
        assert_allclose(ratio, share if zero_stage >= first_stage else 1.0, rtol=1e-12)


@pytest.mark.parametrize("p, t", [(1, 1), (1, 4), (4, 1), (8, 8)])
def test_stages_hold_every_weight_once(stack, p, t):
    plan = make_plan(global_batch_size=8, pipeline_parallel=p, tensor_parallel=t, zero_stage=0)
    weights = sum(float(stage(DENSE, plan, stack, float(s)).weights) for s in range(p)) * t
    assert_allclose(weights, 2 * num_parameters(DENSE), rtol=1e-12)
    tied = sum(float(stage(GPT3, plan, stack, float(s)).weights) for s in range(p)) * t
    again = 51200 * 12288 if p > 1 else 0  # first and last stage each hold a tied embedding
    assert_allclose(tied, 2 * (num_parameters(GPT3) + again), rtol=1e-12)


def test_gpt3_175b_by_hand(plain):
    """The 175B of Korthikanti et al., table 3: t = 8, p = 8, v = 3, micro-batch 1, batch 64; selective recompute."""
    words = dict(global_batch_size=64, tensor_parallel=8, pipeline_parallel=8, virtual_stages=3)
    plan = make_plan(**words, recompute="selective", fused_attention=False, zero_stage=0)
    parts = stage(GPT3, plan, plain, 0.0)
    layer = 12 * 12288**2 + 4 * 12288  # matrices and two LayerNorms
    embedding = (51200 + 2048 + 2) * 12288  # words, positions and the final norm
    assert_allclose(parts.weights, 2 * (12 * layer + embedding) / 8, rtol=1e-12)
    assert_allclose(parts.optimizer, 12 * (12 * layer + embedding) / 8, rtol=1e-12)
    assert_allclose(parts.activations, 34 * 2048 * 12288 / 8 * 96 * (1 + 7 / 24), rtol=1e-12)  # 13.3 GB
    assert 25e9 < sum(parts) < 80e9  # it fits into the 80 GB on which it was trained


def test_recompute_keeps_the_input_of_each_layer(plain):
    plan = lambda recompute: make_plan(global_batch_size=8, recompute=recompute, tensor_parallel=2, pipeline_parallel=2)
    none, full, half = (stage(DENSE, plan(r), plain, 0.0).activations for r in ("none", "full", 0.5))
    per_layer = 8192 * 2 * (4 * 4096 + 2 * (4096 + 1024) + 3 * 14336) / 2
    assert_allclose(none, 2 * 16 * per_layer, rtol=1e-12)  # two micro-batches in flight, 16 layers
    assert_allclose(full, 2 * 16 * 2 * 8192 * 4096 / 2 + per_layer, rtol=1e-12)  # inputs, split over the sequence, and one layer while it is repeated
    assert_allclose(half, (none + full) / 2, rtol=1e-12)


def test_offload_and_adapters_free_the_device(plain):
    parts = lambda **more: stage(DENSE, make_plan(global_batch_size=8, zero_stage=0, **more), plain, 0.0)
    assert parts(optimizer_offload=1.0).optimizer == 0
    assert parts(activation_offload=1.0).activations == 0
    assert_allclose(parts(trainable=0.01).gradients, 0.01 * parts().gradients, rtol=1e-12)
    assert_allclose(parts(trainable=0.01).weights, parts().weights)


GRID = [
    dict(pipeline_parallel=p, virtual_stages=v, schedule=schedule, global_batch_size=batch, recompute=recompute, zero_stage=zero)
    for p, v, schedule, batch, recompute, zero in itertools.product((1, 2, 4, 8), (1, 2), SCHEDULES, (2, 64), ("none", "full"), (0, 3))
    if v == 1 or p > 1
]


@pytest.mark.parametrize("model", [DENSE, GPT3], ids=["vocabulary of 128k", "tied"])
def test_peak_memory_is_the_highest_of_all_stages(stack, model):
    plans = Plan(**{name: np.stack([plan_numbers(**words)[name] for words in GRID]) for name in plan_numbers(**GRID[0])})
    stages = jnp.arange(8.0)
    every = jax.jit(jax.vmap(jax.vmap(lambda plan, s: sum(stage_memory(model, plan, stack, s)), (None, 0)), (0, None)))(plans, stages)
    every = jnp.where(stages < plans.pipeline_parallel[:, None], every, 0.0)
    parts, at = jax.jit(jax.vmap(lambda plan: peak_memory(model, plan, stack)))(plans)
    assert_allclose(sum(parts), jnp.max(every, axis=1), rtol=1e-12)
    assert_allclose(jnp.take_along_axis(every, at[:, None].astype(int), axis=1)[:, 0], jnp.max(every, axis=1), rtol=1e-12)
    if model is DENSE:
        assert len(set(np.asarray(at))) > 1  # sometimes the first, sometimes the last stage


def test_padded_kinds_change_nothing(stack):
    plan = make_plan(global_batch_size=8, data_parallel=2, expert_parallel=2, zero_stage=3, recompute=0.5)
    padded = pad_kinds(MIXED, 4)
    chex.assert_trees_all_close(stage(padded, plan, stack, 0.0), stage(MIXED, plan, stack, 0.0), rtol=1e-12)
    assert legal(padded, SYSTEM, plan) == legal(MIXED, SYSTEM, plan)


# sharded work


@pytest.mark.parametrize("words", [{}, dict(tensor_parallel=4), dict(context_parallel=4), dict(data_parallel=4, expert_parallel=4)], ids=str)
def test_devices_share_all_flops(words):
    """The matmuls and attention cores of all devices add up to the model FLOP of one forward pass, but for the router, which each
    tensor-parallel rank repeats."""
    plan = make_plan(global_batch_size=64, **words)
    work = layer_work(MIXED, plan)
    matmuls = sum(jnp.sum(2 * w.m * w.k * w.n * w.count, axis=0) for w in (work.dense, work.experts))
    router = 2 * work.tokens * 4096 * MIXED.blocks.num_experts * (1 - 1 / plan.tensor_parallel)
    layers = jnp.sum(MIXED.blocks.count * (matmuls - router + work.attention_flops))
    sequences_per_device = plan.micro_batch_size / plan.context_parallel / plan.tensor_parallel
    vocabulary = 2 * MIXED.seq_len * MIXED.vocab * MIXED.hidden
    assert_allclose(layers / sequences_per_device, forward_flops_per_sequence(MIXED) - vocabulary, rtol=1e-12)
