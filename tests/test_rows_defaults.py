"""Runs with missing cells: every default as documented, and catalog models cut to fewer layers."""

import dataclasses

import jax
import numpy as np
import pytest
from one_run import one, plan, run

from diffperf.calibrate import prepare
from diffperf.calibrate._frameworks import is_adapter
from diffperf.calibrate._rows import ADAPTER_SHARE
from diffperf.workload import load_model, model_names, num_layers, num_parameters

# -- the defaults of the module's docstring ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("year, tp, expected", [(2024, 2, 1), (2023, 2, 1), (2022, 2, 0), (2024, 1, 0), (None, 2, 1)])
def test_default_sequence_parallelism(year, tp, expected):
    assert plan(year=year, tp=tp, pp=1).sequence_parallel == expected
    assert plan(year=year, tp=2, pp=1, sp=False).sequence_parallel == 0


def stage(p):
    return p.shard_optimizer + p.shard_gradients + p.shard_parameters


@pytest.mark.parametrize(
    "cells, expected",
    [
        (dict(year=2024), 1),
        (dict(year=2022), 0),
        (dict(model_name="mine (LoRA)"), 0),
        (dict(accelerator="TPU v5p", framework="MaxText"), 3),
        (dict(framework="MaxText"), 3),
        (dict(zero_stage_or_fsdp="ddp none"), 0),
        (dict(zero_stage_or_fsdp="zero1"), 1),
        (dict(zero_stage_or_fsdp="zero2"), 2),
        (dict(zero_stage_or_fsdp="fsdp shard-grad-op"), 2),
        (dict(zero_stage_or_fsdp="zero3"), 3),
        (dict(zero_stage_or_fsdp="FSDP full-shard"), 3),
    ],
)
def test_sharding_stage(cells, expected):
    assert stage(plan(**cells)) == expected


def test_hybrid_sharding_and_offload():
    assert plan(zero_stage_or_fsdp="hsdp", num_devices=64).shard_group == 8
    assert plan(zero_stage_or_fsdp="hsdp group 16", num_devices=64).shard_group == 16
    assert plan(zero_stage_or_fsdp="zero3").shard_group == np.inf
    assert plan(zero_stage_or_fsdp="zero3 offload").optimizer_offload == 1


@pytest.mark.parametrize("year, printed, expected", [(2024, None, 1), (2022, None, 0), (2022, True, 1), (2024, False, 0)])
def test_default_fused_attention(year, printed, expected):
    assert plan(year=year, flash_attention=printed).fused_attention == expected


@pytest.mark.parametrize(
    "cells, full, selective",
    [
        ({}, 0, 0),
        (dict(recompute="full"), 1, 0),
        (dict(recompute="selective"), 0, 1),
        (dict(model_name="mine (LoRA)", framework="NeMo AutoModel"), 1, 0),
        (dict(model_name="mine (LoRA)", framework="NeMo AutoModel", num_devices=1), 0, 0),
        (dict(model_name="mine (LoRA)", framework="NeMo"), 0, 0),
        (dict(accelerator="TPU v5p", framework="MaxText", recompute="selective"), 0.5, 0),
    ],
)
def test_default_recompute(cells, full, selective):
    p = plan(**cells)
    assert (p.recompute_full, p.recompute_selective) == (full, selective)


@pytest.mark.parametrize(
    "cells, expected",
    [
        (dict(accelerator="TPU v5p", num_devices=16), 4),  # 64 sequences over 16 chips
        (dict(framework="torchtitan", tp=1, pp=4, num_devices=8), 8),  # 64 over 2 data-parallel ranks and 4 stages
        (dict(year=2024), 1),
        (dict(source="mlcommons/training_results_v4.1", year=2024), 1),
        (dict(year=2022, tp=1, pp=1), 4),
        (dict(year=2022, tp=8, pp=1, model_name="GPT-3 20B", hidden=None, layers=None, params_b=20), 2),
        (dict(year=2022, tp=8, pp=8, num_devices=64, model_name="", hidden=None, layers=None, params_b=175), 1),
        (dict(year=2022, framework="Alpa"), 8),
        (dict(micro_batch=2), 2),
        (dict(micro_batch=16, tp=1, pp=1), 8),  # no more than a data-parallel rank has
    ],
)
def test_default_micro_batch(cells, expected):
    assert plan(**cells).micro_batch_size == expected


def test_eight_bit_mlperf_keeps_narrow_weights_and_gradients():
    p = plan(source="mlcommons/training_results_v5.0", precision="fp8")
    assert (p.weight_bytes, p.gradient_bytes) == (1, 2)
    assert (plan().weight_bytes, plan().gradient_bytes) == (2, 4)


def test_missing_degrees_come_from_a_like_row():
    known = run(id="known", tp=4, pp=2, dp=4, num_devices=32, micro_batch=2, vpp=2)
    silent = run(id="silent", num_devices=32)
    rows = prepare((silent, known))
    for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "micro_batch_size", "virtual_stages"):
        first, second = getattr(rows.plan, name)
        assert first == second, name
    elsewhere = prepare((silent,), like=(known,))
    assert elsewhere.plan.tensor_parallel[0] == 4 and len(elsewhere) == 1
    other_batch = prepare((dataclasses.replace(silent, global_batch=128.0), known))
    assert other_batch.plan.tensor_parallel[0] == 1


def test_missing_tensor_parallel_holds_model_states_in_60_percent_of_memory():
    for params_b, devices, expected in ((1, 8, 1), (5, 8, 2), (10, 8, 4), (20, 8, 8), (70, 8, 8), (20, 4, 4)):
        p = plan(model_name="", layers=None, hidden=None, params_b=params_b, num_devices=devices, pp=1)
        actual = float(np.asarray(num_parameters(jax.tree.map(lambda x: x[0], one(model_name="", layers=None, hidden=None, params_b=params_b).model))))
        need = actual * 16 / (0.6 * 80e9)
        assert p.tensor_parallel == expected and (p.tensor_parallel >= need or expected == min(8, devices)), (params_b, need)
        assert p.tensor_parallel * p.data_parallel == devices


def test_data_parallelism_takes_the_rest():
    p = plan(tp=2, pp=2, cp=2, num_devices=64)
    assert p.data_parallel == 8
    assert plan(tp=2, dp=8, num_devices=64).pipeline_parallel == 4  # the missing degree follows from the others


def test_catalog_architecture_wins_over_nothing_printed():
    rows = one(model_name="Llama 3.1 8B", layers=None, hidden=None, heads=None, vocab=None, seq_len=4096)
    np.testing.assert_allclose(np.asarray(num_parameters(jax.tree.map(lambda x: x[0], rows.model))), 8.03e9, rtol=2e-3)
    assert rows.model.seq_len[0] == 4096


def test_printed_width_wins_over_a_catalog_name_that_differs():
    rows = one(model_name="Llama 3.1 8B", layers=16, hidden=2048, heads=16)
    assert rows.model.hidden[0] == 2048 and rows.model.blocks.count[0].sum() == 16


def test_parameter_count_alone_gives_a_gpt_of_128_hidden_per_layer():
    rows = one(model_name="", layers=None, hidden=None, heads=None, vocab=None, params_b=22)
    hidden, layers = rows.model.hidden[0], rows.model.blocks.count[0].sum()
    assert hidden % 128 == 0 and abs(hidden / (128 * layers) - 1) < 0.1
    np.testing.assert_allclose(12 * layers * hidden**2, 22e9, rtol=0.03)


def test_default_sequence_length():
    assert one(seq_len=None).model.seq_len[0] == 2048


def test_adapters_train_a_small_share():
    assert plan(model_name="Llama 2 70B (LoRA)", hidden=None, layers=None).trainable == ADAPTER_SHARE
    assert plan(notes="PEFT run").trainable == ADAPTER_SHARE
    assert is_adapter(run(notes="full fine-tuning; WEIGHT 0.3: LoRA rows disagree")) is False  # a marker's reason is not about the run


# -- catalog models cut to fewer layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Mixtral 8x7B", "Llama 3.1 405B", "Gemma 2 27B", "Qwen3 30B-A3B"])
@pytest.mark.parametrize("layers", [2, 4, 7])
def test_proxy_keeps_layers_and_proportions(name, layers):
    full = load_model(name)
    rows = one(model_name=f"{name}-{layers}layers", layers=layers, hidden=float(full.hidden), heads=None, vocab=None)
    count = rows.model.blocks.count[0]
    assert count.sum() == layers and (count >= 0).all()
    kinds = int((np.asarray(full.blocks.count) > 0).sum())
    assert (count > 0).sum() == kinds  # each kind keeps at least one layer
    cut = jax.tree.map(lambda x: x[0], rows.model)
    assert float(num_parameters(cut)) < float(num_parameters(full))
    assert float(num_layers(cut)) == layers


def test_fewer_layers_than_kinds_keep_proportions():
    full = load_model("DeepSeek-V3")
    count = one(model_name="DeepSeek-V3", layers=1, hidden=float(full.hidden)).model.blocks.count[0]
    assert count.sum() == pytest.approx(1) and (count >= 0).all()


@pytest.mark.parametrize("name", model_names())
def test_own_numbers_of_a_catalog_model_change_nothing(name):
    full = load_model(name, seq_len=2048.0)
    if full.blocks.count.shape[-1] > 3 or not float(full.vocab):
        pytest.skip("not a decoder of at most three kinds of layer")
    kv = {float(k) for k, h, c in zip(full.blocks.num_kv_heads, full.blocks.num_heads, full.blocks.count, strict=True) if h > 0 and c > 0}
    cells = dict(hidden=float(full.hidden), layers=float(num_layers(full)), heads=None, vocab=float(full.vocab), kv_heads=kv.pop() if len(kv) == 1 else None)
    rows = one(model_name=name, **cells)
    np.testing.assert_allclose(float(num_parameters(jax.tree.map(lambda x: x[0], rows.model))), float(num_parameters(full)), rtol=1e-9)
