"""Which software stack a measured run belongs to, from what its row says: the stack (one software image), its family (one code base) and
the features that shift its constants. A row of an unknown stack gets its family's constants; of an unknown family, those of all stacks."""

import re
from functools import lru_cache

from ..hardware import resolve_name, vendor
from ..io import Run

FAMILIES = ("mcore", "megatron-lm", "megatron-deepspeed", "fsdp", "zero", "maxtext")
"""Code bases with several known stacks. Others (Neuron, Alpa, InternEvo, SimuMax's Megatron, ROCm) stand alone: lending them a family made
them worse (Neuron 10 to 20%, SimuMax 4 to 10% error)."""

_RULES: tuple[tuple[str, str, str], ...] = (
    # framework pattern, stack, family; first match wins
    (r"simumax", "simumax", ""),
    (r"internevo|internlm", "internevo", ""),
    (r"neuron|optimum-neuron", "neuron", ""),
    (r"alpa", "alpa", ""),
    (r"rocm|llmboost|primus", "rocm-training", ""),
    (r"automodel", "automodel", "fsdp"),
    (r"torchtitan", "torchtitan", "fsdp"),
    (r"llm-foundry|composer|mosaic", "llm-foundry", "fsdp"),
    (r"fms-fsdp", "fms-fsdp", "fsdp"),
    (r"maxtext", "maxtext", "maxtext"),
    (r"megatron-bridge", "megatron-bridge", "mcore"),
    (r"megatron[- ]?(?:\+ ?)?deepspeed zero|zero-?3|zero-?2", "deepspeed-zero", "zero"),
    (r"megatron-deepspeed|megatron \+ deepspeed", "megatron-deepspeed", "megatron-deepspeed"),
    (r"nemo|megatron-core|mcore|transformerengine", "nemo", "mcore"),
    (r"megatron", "megatron-lm", "megatron-lm"),
    (r"deepspeed", "deepspeed-zero", "zero"),
    (r"peft|accelerate|transformers|fsdp|lightning|torch", "pytorch-fsdp", "fsdp"),
    (r"jax|flax|xla|paxml|pax\b", "maxtext", "maxtext"),
)

FEATURES = ("release_year", "release_year_expert", "blackwell_expert_jump", "packed", "eager")
"""Shifts of stack constants that a row's text reveals, in the order of `features`."""

REFERENCE_YEAR = 2025.0


def known_framework(framework: str) -> tuple[str, str]:
    """(stack, family) of a framework by its name; ("", "") when no rule knows it."""
    text = framework.lower()
    return next(((stack, family) for pattern, stack, family in _RULES if re.search(pattern, text)), ("", ""))


def is_adapter(run: Run) -> bool:
    """True for fine-tuning with frozen weights (LoRA and its relatives)."""
    return bool(re.search(r"lora|peft", f"{run.model_name} {run.notes.split('WEIGHT')[0]}", re.IGNORECASE))


@lru_cache(maxsize=1024)
def known_chip(accelerator: str) -> tuple[str, str]:
    """(catalog name, vendor) of an accelerator in whatever spelling a row names it; ("", "") for one not in the catalog."""
    try:
        name = resolve_name(accelerator)
    except ValueError:
        return "", ""
    return name, vendor(name)


def identify(run: Run) -> tuple[str, str]:
    """(stack, family) of a run. Runs of one repository are split where its notes name different software images; software that no rule
    knows is a stack of its own, so that its prior spread counts."""
    source, notes, year = run.source.lower(), run.notes, run.year or REFERENCE_YEAR
    stack, family = known_framework(run.framework)
    chip, maker = known_chip(run.accelerator)
    if source.startswith("mlcommons/"):
        if maker == "AMD":
            return "rocm-training", ""
        return ("mlperf-nvidia", "mcore") if maker == "NVIDIA" else (f"mlperf-{run.accelerator.lower()}", "maxtext" if maker == "Google" else "")
    if "simumax" in source:
        return "simumax", ""
    if stack == "llm-foundry":
        if "repository history" in source and run.accelerator.startswith("H100"):
            return "llm-foundry-early", family
        return ("llm-foundry-pure" if "mode PURE" in notes else "llm-foundry"), family
    if stack == "automodel":
        return ("automodel-adapter" if is_adapter(run) else "automodel"), family
    if stack == "maxtext":
        if maker != "Google":
            return "maxtext-gpu", family
        return ("maxtext-tpu7x" if chip == "tpu_v7x" else "maxtext-tpu"), family
    if stack == "nemo" and "dgxc" in source:
        return "nemo-dgxc", family
    if stack == "megatron-deepspeed" and "bigscience" in source:
        return ("bloom" if run.accelerator.startswith("A100") else "megatron-deepspeed-v100"), family
    if stack == "megatron-deepspeed" and source.startswith("bang"):
        return "megatron-deepspeed-vtrain", family
    if stack == "deepspeed-zero":
        return ("deepspeed-zero-v100" if run.accelerator.startswith("V100") else "deepspeed-zero"), family
    if stack == "megatron-lm":
        if year >= 2023:
            return "megatron-core", "mcore"
        if "bigscience" in source:
            return "megatron-deepspeed-v100", "megatron-deepspeed"
        if "jan2021" in source:
            return "megatron-lm-jan2021", family
        return f"megatron-lm-{min(max(int(year), 2020), 2022)}", family
    return stack or f"unknown {run.framework}".strip(), family


def release_year(run: Run) -> float:
    """Year of the software, from a container or release tag (`26.06 container`, `v25.04.02`, `24.07`) if the row names one, else its year."""
    found = re.search(r"(?:container |v|release |\()(2[2-9])\.(\d\d)\b", f"{run.source} {run.notes}")
    if found:
        return 2000 + int(found[1]) + (int(found[2]) - 0.5) / 12
    return float(run.year or REFERENCE_YEAR)


def features(run: Run, generation: str) -> tuple[float, ...]:
    """Values of `FEATURES` for one run.

    Release years count from 2025, at most 2 either way, for stacks from 2023 on. The jump is that of Megatron-Bridge containers from
    26.06 on for mixtures of experts on Blackwell: one step for dispatch and grouped matmuls, not a slope.
    """
    year = release_year(run)
    modern = (run.year or REFERENCE_YEAR) >= 2023
    since = min(max(year - REFERENCE_YEAR, -2.0), 2.0) if modern else 0.0
    experts = float(bool(run.experts))
    stack, _ = identify(run)
    jump = float(stack == "megatron-bridge" and experts and generation == "blackwell" and year >= 2026 + 5 / 12)
    packed = float(bool(re.search(r"\bSFT\b|packed seq", run.notes)) and not is_adapter(run))
    eager = float(bool(re.search(r"no compile|without compile|compile (off|disabled)|eager", run.notes, re.IGNORECASE)))
    return (since * (1 - experts), since * experts, jump, packed, eager)
