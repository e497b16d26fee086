"""Measured runs as inputs: nothing dropped silently, every default as documented, every spelling read as meant."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest

from diffperf.calibrate import SkipRun, prepare
from diffperf.calibrate._frameworks import FAMILIES, FEATURES, features, identify, is_adapter, known_framework
from diffperf.calibrate._rows import ADAPTER_SHARE, link_rate, precision_of
from diffperf.hardware import DATATYPES, load_system
from diffperf.io import Run, published_runs_path, read_runs
from diffperf.workload import load_model, model_names, num_layers, num_parameters

GPT = dict(model_name="mine", layers=24, hidden=2048, heads=16, vocab=50304, seq_len=2048)


def run(**cells):
    """A dense run on one node of A100, 2024, unless said otherwise."""
    base = dict(id="r", source="my cluster", year=2024, accelerator="A100-80GB-SXM", gpus_per_node=8, num_devices=8, global_batch=64, step_time_s=1.0)
    return Run(**(base | GPT | cells))


def one(**cells):
    return prepare((run(**cells),))


def plan(**cells):
    """The plan of one run, leaves as plain numbers."""
    return jax.tree.map(lambda x: x[0].item() if x.ndim == 1 else x[0], one(**cells).plan)


# -- the published table --------------------------------------------------------------------------------------------------------------


def test_every_published_row_is_modelled_or_counted(published_rows):
    runs = read_runs(published_runs_path())
    assert len(published_rows) + published_rows.skipped.total() == len(runs)
    decoders = [r for r in runs if r.family in ("dense-decoder", "moe") and r.step_time_s]
    not_decoders = sum(n for reason, n in published_rows.skipped.items() if reason.startswith("family"))
    assert not_decoders == sum(r.family not in ("dense-decoder", "moe") for r in runs)
    assert len(published_rows) >= 0.95 * len(decoders)  # at most 5% skipped


def test_leaves_share_the_leading_axis_and_hold_no_nan(published_rows):
    n = len(published_rows)
    for tree in (published_rows.model, published_rows.system, published_rows.plan):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path)
            assert leaf.shape[0] == n and leaf.dtype == np.float64, name
            assert not np.isnan(leaf).any() and (leaf >= 0).all(), name
            assert np.isfinite(leaf).all() or name in (".blocks.window", ".shard_group"), name  # inf: all keys, all ranks
    for field in ("runs", "log_time", "weight", "stack", "family", "generation", "accelerator", "features", "groups"):
        assert len(getattr(published_rows, field)) == n, field
    assert np.isfinite(published_rows.log_time).all() and np.isfinite(published_rows.features).all()
    assert set(published_rows.family) <= {*FAMILIES, ""} and "" not in published_rows.stack


def test_degrees_multiply_to_the_devices_and_the_batch_divides(published_rows):
    p = published_rows.plan
    devices = p.tensor_parallel * p.pipeline_parallel * p.context_parallel * p.data_parallel
    np.testing.assert_allclose(devices, [r.num_devices for r in published_rows.runs], rtol=1e-9)
    micro_batches = p.global_batch_size / (p.data_parallel * p.micro_batch_size)
    assert (micro_batches >= 1 - 1e-9).all()


def test_printed_architecture_is_kept(published_rows):
    m = published_rows.model
    for i, r in enumerate(published_rows.runs):
        for printed, used in ((r.layers, m.blocks.count[i].sum()), (r.hidden, m.hidden[i]), (r.vocab, m.vocab[i])):
            assert printed is None or printed == used, r.id
    parameters = np.asarray(jax.vmap(num_parameters)(m)) / 1e9
    printed = np.array([r.params_b or np.nan for r in published_rows.runs])
    off = np.abs(parameters / printed - 1)
    assert np.nanmedian(off) < 0.01
    # vTrain's counts leave out the embedding, and MosaicML's small models print counts of another vocabulary
    stray = {r.model_name for r, o in zip(published_rows.runs, off, strict=True) if o > 0.1 and not r.model_name.startswith("GPT-h")}
    assert stray <= {"MPT-125m", "MPT-350m", "BLOOM-candidate-18B"}


def test_take_keeps_rows_aligned(published_rows):
    mask = np.array([s == "torchtitan" for s in published_rows.stack])
    picks = (slice(3, 9), np.array([5, 2, 2, 7]), mask, slice(None, None, -400))
    for index in picks:
        taken, where = published_rows.take(index), np.arange(len(published_rows))[index]
        assert [r.id for r in taken.runs] == [published_rows.runs[i].id for i in where]
        np.testing.assert_array_equal(taken.log_time, published_rows.log_time[where])
        np.testing.assert_array_equal(taken.plan.global_batch_size, [r.global_batch for r in taken.runs])
        np.testing.assert_array_equal(taken.features, published_rows.features[where])
        assert taken.stack == tuple(published_rows.stack[i] for i in where)
        assert taken.groups == tuple(r.group for r in taken.runs)
        assert jax.tree.leaves(taken.model)[0].shape[0] == len(taken) == len(where)
    assert len(published_rows.take(np.zeros(len(published_rows), bool))) == 0


def test_a_row_does_not_depend_on_the_rows_beside_it(published_rows):
    known = [r for r in published_rows.runs if r.tp and r.pp][::200]
    together = prepare(tuple(known))
    for i, r in enumerate(known):
        alone, beside = prepare((r,)), together.take(np.array([i]))
        for a, b in zip(jax.tree.leaves((alone.model, alone.system, alone.plan)), jax.tree.leaves((beside.model, beside.system, beside.plan)), strict=True):
            np.testing.assert_array_equal(a, b)


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


# -- network rate from free text -----------------------------------------------------------------------------------------------------------

GBPS = {  # free text of the published column -> Gbit/s per device of an 8-device node; None where it says nothing usable
    "": None,
    "InfiniBand, about 800 Gbit/s per node (unverified)": 100,
    "4x Omni-Path 100 Gb/s per node": 50,
    "Jean Zay Omni-Path": None,
    "EFA 800/1600 Gb/s": 100,
    "4x100Gb RoCE per node": 50,
    "8x HDR InfiniBand 200 Gb/s": 200,
    "RoCE 1600 Gbps per node": 200,
    "RDMA 400 Gb/s per GPU": 400,
    "RDMA 400 Gb/s per GPU (CX-7)": 400,
    "DCN between slices": None,
    "DCN between pods": None,
    "25 Gb/s Ethernet": 3.125,
    "InfiniBand; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s": None,
    "ROCE2; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s": None,
    "4x ConnectX-8 IB XDR 800 Gb/s": 400,
    "Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s Et": 400,
    "Storage+Management: 1x NVIDIA BlueField 2 DPU 100Gb/s, Compute: 8x NVIDIA ConnectX-7 IB NDR 400Gb/s": 400,
    "Storage: 2x BF3 ConnectX-7 400Gb/s, Compute: 8x BF3 ConnectX-7 400Gb/s, Management: 100Gb/s Ethernet": 400,
    "Compute: 8x NVIDIA Quantum-2 400Gb/s InfiniBand, Management: 2x100Gb/s Ethernet NIC": 400,
    "Compute: 8x MT43244 BlueField-3 200Gb/s, Management: 2x100Gb/s Ethernet NIC": 200,
    "Storage&Compute: 4x ConnectX-7 IB NDR 400Gb/s, Management: 25Gb/s Ethernet NIC": 200,
    "8x ConnectX-7 IB NDR 400Gb/s + 200Gb/s Ethernet NIC": 400,
    "Infiniband, Ethernet": None,
    "Ethernet, Infiniband": None,
    "Ethernet(RoCEv2)": None,
    "A3 (GPUDirect-TCPX)": None,
    "400 Gb/s (as printed, per node)": 50,
    "800 Gb/s (as printed, per node)": 100,
    "0 Gb/s per GPU": None,
    "1..2 Gb/s per node": 0.25,
    "100GbE InfiniBand": None,  # one rail or eight: not said
}


@pytest.mark.parametrize("text, gbps", GBPS.items())
def test_link_rate_of_free_text(text, gbps):
    assert link_rate(text, 8.0) == (None if gbps is None else pytest.approx(gbps / 8 * 1e9))


def test_link_rate_knows_every_decoder_text_and_reads_the_others_without_error():
    runs = read_runs(published_runs_path())
    decoders = {r.inter_node_net for r in runs if r.family in ("dense-decoder", "moe")}
    assert decoders <= set(GBPS)
    for text in {r.inter_node_net for r in runs}:
        rate = link_rate(text, 8.0)
        assert rate is None or 1e8 < rate < 1e12, text


def test_row_network_and_node_replace_the_catalog():
    rows = one(inter_node_net="4x100Gb RoCE per node", gpus_per_node=4, num_devices=8)
    assert rows.system.scale_out.bandwidth[0] == 100 / 8 * 1e9 and rows.system.scale_up.domain[0] == 4
    plain = load_system("a100_sxm_80", fitted=False)
    assert one().system.scale_out.bandwidth[0] == float(plain.scale_out.bandwidth)
    assert one(accelerator="GB200-NVL72", gpus_per_node=4).system.scale_up.domain[0] == 72
    assert one(accelerator="TPU v5p", num_devices=256).system.scale_up.domain[0] == 256
    assert one(accelerator="TPU v5p", num_devices=512, zero_stage_or_fsdp="fsdp, size 256 per slice").system.scale_up.domain[0] == 256


# -- stacks, families, features --------------------------------------------------------------------------------------------------------------

STACK_OF_SOURCE = {  # source repository -> (stack, family) of its runs
    "AI-Hypercomputer/tpu-recipes": {("maxtext-tpu", "maxtext"), ("maxtext-tpu7x", "maxtext")},
    "Bang et al.": {("megatron-deepspeed-vtrain", "megatron-deepspeed")},
    "InternLM/InternEvo": {("internevo", "")},
    "Korthikanti et al.": {("megatron-lm-2022", "megatron-lm")},
    "MooreThreads/SimuMax": {("simumax", "")},
    "NVIDIA-NeMo/Automodel": {("automodel", "fsdp"), ("automodel-adapter", "fsdp")},
    "NVIDIA-NeMo/Megatron-Bridge": {("megatron-bridge", "mcore")},
    "NVIDIA/Megatron-LM": {("megatron-lm-2020", "megatron-lm"), ("megatron-lm-jan2021", "megatron-lm"), ("megatron-core", "mcore")},
    "NVIDIA/NeMo": {("nemo", "mcore")},
    "NVIDIA/dgxc-benchmarking": {("nemo-dgxc", "mcore"), ("maxtext-gpu", "maxtext")},
    "Narayanan et al.": {("megatron-lm-2021", "megatron-lm"), ("deepspeed-zero", "zero")},
    "alpa-projects/alpa": {("alpa", "")},
    "aws-neuron/aws-neuron-sdk": {("neuron", "")},
    "bigscience-workshop/bigscience": {
        ("bloom", "megatron-deepspeed"), ("megatron-deepspeed-v100", "megatron-deepspeed"), ("deepspeed-zero-v100", None),
    },
    "foundation-model-stack/fms-fsdp": {("fms-fsdp", "fsdp")},
    "mlcommons/training_results": {("mlperf-nvidia", "mcore"), ("rocm-training", "")},
    "mosaicml/llm-foundry": {("llm-foundry", "fsdp"), ("llm-foundry-pure", "fsdp"), ("llm-foundry-early", "fsdp")},
    "pytorch/torchtitan": {("torchtitan", "fsdp")},
}  # fmt: skip


def test_each_source_has_its_stacks(published_rows):
    found = {}
    for group, stack, family in zip(published_rows.groups, published_rows.stack, published_rows.family, strict=True):
        family_or_either = None if stack == "deepspeed-zero-v100" else family  # two code bases under one name: alone or not, by held-out error
        found.setdefault(group[0], set()).add((stack, family_or_either))
    assert found == STACK_OF_SOURCE


def test_a_stack_has_one_family(published_rows):
    families = Counter(stack for stack, _ in set(zip(published_rows.stack, published_rows.family, strict=True)))
    assert set(families.values()) == {1}


@pytest.mark.parametrize(
    "framework, expected",
    [
        ("Megatron-LM", ("megatron-lm", "megatron-lm")),
        ("NeMo / Megatron-Core", ("nemo", "mcore")),
        ("DeepSpeed ZeRO-3", ("deepspeed-zero", "zero")),
        ("Megatron-DeepSpeed", ("megatron-deepspeed", "megatron-deepspeed")),
        ("PyTorch FSDP2", ("pytorch-fsdp", "fsdp")),
        ("Hugging Face accelerate", ("pytorch-fsdp", "fsdp")),
        ("JAX", ("maxtext", "maxtext")),
        ("neuronx-nemo-megatron", ("neuron", "")),
        ("my own trainer", ("", "")),
        ("", ("", "")),
    ],
)
def test_framework_names(framework, expected):
    assert known_framework(framework) == expected


@pytest.mark.parametrize(
    "accelerator, expected",
    [
        ("NVIDIA H100 80GB HBM3", "maxtext-gpu"),
        ("H100-80GB-SXM", "maxtext-gpu"),
        ("MI300X", "maxtext-gpu"),
        ("TPU v5p", "maxtext-tpu"),
        ("TPU7x", "maxtext-tpu7x"),
    ],
)
def test_maxtext_stack_follows_the_vendor_in_any_spelling(accelerator, expected):
    assert one(framework="MaxText", accelerator=accelerator, num_devices=8).stack == (expected,)


def test_mlperf_stack_follows_the_vendor():
    at = lambda accelerator: identify(run(source="mlcommons/training_results_v5.0 x", accelerator=accelerator, framework="NeMo"))
    assert at("NVIDIA H100 80GB HBM3") == at("GB200-NVL72") == ("mlperf-nvidia", "mcore")
    assert at("MI300X") == at("MI355X") == ("rocm-training", "")
    assert at("TPU v5p")[1] == "maxtext"


def test_unknown_framework_stands_alone():
    rows = one(framework="my own trainer")
    assert rows.stack == ("unknown my own trainer",) and rows.family == ("",)
    assert one(framework="").stack == ("unknown",)


def test_feature_values():
    value = lambda generation="hopper", **cells: dict(zip(FEATURES, features(run(**cells), generation), strict=True))
    assert value(year=2024)["release_year"] == -1 and value(year=2024)["release_year_expert"] == 0
    assert value(year=2024, experts=8)["release_year_expert"] == -1 and value(year=2024, experts=8)["release_year"] == 0
    assert value(year=2021)["release_year"] == 0  # older stacks are stacks of their own
    assert value(year=None)["release_year"] == 0
    assert value(year=2025, notes="26.06 container")["release_year"] == 0  # not the form `container 26.06`
    assert value(year=2025, notes="container 26.07")["release_year"] == pytest.approx(1 + 6.5 / 12)
    assert value(year=2030)["release_year"] == 2
    bridge = dict(framework="Megatron-Bridge", experts=8, notes="container 26.06")
    assert value("blackwell", **bridge)["blackwell_expert_jump"] == 1
    assert value("hopper", **bridge)["blackwell_expert_jump"] == 0
    assert value("blackwell", **bridge | dict(notes="container 26.04"))["blackwell_expert_jump"] == 0
    assert value("blackwell", **bridge | dict(experts=None))["blackwell_expert_jump"] == 0
    assert value(notes="SFT, packed sequences")["packed"] == 1 and value(notes="SFT; LoRA")["packed"] == 0
    assert value(notes="no compile")["eager"] == value(notes="Eager mode")["eager"] == 1 and value()["eager"] == 0


# -- precision ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "printed, used",
    [
        ("bf16", "bf16"), ("", "bf16"), ("BF16-mixed", "bf16"), ("fp16", "fp16"), ("AMP", "fp16"), ("mixed", "fp16"), ("amp_bf16", "bf16"), ("fp32", "fp32"),
        ("float32", "fp32"), ("tf32", "tf32"), ("fp8", "fp8"), ("FP8-CS", "fp8"), ("fp8-ds", "fp8"), ("fp8-mx", "mxfp8"), ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"), ("fp4", "nvfp4"), ("int8(AQT)", "int8"), ("bf16 with fp8 experts", "fp8"), ("bfloat16", "bf16"),
        ("half", "fp16"), ("16-mixed", "fp16"), ("float8_e4m3fn", "fp8"), ("amp_fp16", "fp16"),
    ],
)  # fmt: skip
def test_precision_names(printed, used):
    assert precision_of(run(precision=printed)) == used
    assert one(precision=printed).plan.precision[0][DATATYPES.index(used)] == 1


def test_marker_replaces_the_printed_precision():
    assert precision_of(run(precision="fp8", notes="TREAT AS precision bf16: attention only")) == "bf16"


# -- rows that cannot be modelled ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cells, reason",
    [
        (dict(accelerator="Abacus 9000"), "accelerator 'Abacus 9000' not in the catalog"),
        (dict(accelerator=""), "accelerator '' not in the catalog"),
        (dict(model_name="mystery", layers=None, hidden=None), "no architecture"),
        (dict(model_name="mystery", layers=None, hidden=None, params_b=8, experts=8), "mixture of experts without an architecture"),
        (dict(num_devices=None), "no device count"),
        (dict(num_devices=0.0), "no device count"),
        (dict(global_batch=None), "no global batch"),
        (dict(step_time_s=None), "no step time"),
        (dict(precision="bf17"), "precision 'bf17' is not known; it should be one of fp32, tf32, fp16, bf16"),
        (dict(family="cnn"), "family cnn is not modelled"),
        (dict(family="Diffusion-Transformer"), "family diffusion-transformer is not modelled"),
        (dict(notes="STEP TIME NOT SEPARABLE: includes evaluation"), "step time not separable"),
        (dict(model_name="mine", experts=8.0, topk=9.0), "no model or plan fits the row: transformer: experts_per_token is 9.0"),
    ],
)
def test_reason_of_a_skipped_run(cells, reason):
    with pytest.raises(SkipRun, match=reason) as caught:
        one(**cells)
    assert caught.value.reasons.total() == 1 and next(iter(caught.value.reasons)).startswith(reason.split(":")[0])
    rows = prepare((run(**cells), run(id="good")))  # one bad run does not take the others with it
    assert len(rows) == 1 and rows.runs[0].id == "good" and rows.skipped == caught.value.reasons


def test_wished_runs_need_no_step_time():
    rows = prepare((run(step_time_s=None),), need_time=False)
    assert len(rows) == 1 and np.isnan(rows.log_time[0])


def test_markers_set_the_weight():
    rows = prepare((run(), run(notes="WEIGHT 0.3: one of two readings"), run(notes="LEFT OUT: duplicate")))
    np.testing.assert_array_equal(rows.weight, [1.0, 0.3, 0.0])


def test_no_runs_at_all():
    with pytest.raises(SkipRun, match="none of 0 rows"):
        prepare(())
