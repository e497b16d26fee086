"""Words of measured runs: networks, frameworks and precisions read as meant."""

from collections import Counter

import pytest
from one_run import one, run

from diffperf.calibrate._frameworks import FEATURES, features, identify, known_framework
from diffperf.calibrate._rows import link_rate, precision_of
from diffperf.hardware import DATATYPES, load_system
from diffperf.io import published_runs_path, read_runs

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
