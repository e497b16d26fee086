"""Measured mixtures of experts and grouped matmuls as rows to fit: which kernel, datatype, routing and tuning a row has.

Times are of the busiest expert-parallel rank, from logits to weighted sum. `power_law_a` in the column `distribution` is a skew of a.
Three things in public tables are neither the chip nor the kernel, and are told apart here:
Triton kernels without a tuning table for the shape fall back to one default tile.
Routers that limit a token to some groups of experts (DeepSeek-V3: 4 of 8), fed with the collectors' one-hot scores, drop the experts outside the chosen
groups and fill up with the first experts of tied score, whatever the label says.
SGLang 0.5.10 was timed with the pairs of other ranks' experts sent to the rank's first expert, for every token that has a pair on the rank.
"""

import re

import numpy as np

from ...cost.kernel._expert_load import TIED, expert_load
from ...cost.kernel._families import GROUPED_MATMUL, MOE_FFN
from ...cost.kernel._moe import GroupedMatmulShape, MoeShape
from ...io import KernelTable
from ._families import FamilyRows, split_rows, unknown_words

# Datatype of a row: what is multiplied (which peak counts), bytes per weight with its scales, bytes per activation as it is multiplied.
DATATYPES: dict[str, tuple[str, float, float]] = {
    "fp16": ("fp16", 2.0, 2.0),
    "bf16": ("bf16", 2.0, 2.0),
    "fp8": ("fp8", 1.0, 1.0),
    "fp8_block": ("fp8", 1.0, 1.0),
    "nvfp4": ("nvfp4", 0.5625, 0.5625),  # half a byte, and a scale byte per 16 elements
    "w4a16_mxfp4": ("bf16", 0.53125, 2.0),  # half a byte, and a scale byte per 32 elements
    "w4a8_mxfp4_mxfp8": ("mxfp8", 0.53125, 1.03125),
    "int4_weight_only": ("bf16", 0.515625, 2.0),  # half a byte, and two scale bytes per 128 elements
}
PLAIN = ("fp16", "bf16", "fp8", "nvfp4")  # datatypes that name what is multiplied; the others are told apart in the library's name
KERNELS = ("trtllm", "cutlass", "marlin", "triton")  # first of these in a kernel's name, the library's own prefix aside, is the kernel


def rows(table: KernelTable) -> list[FamilyRows]:
    """The mixtures of experts and grouped matmuls of a table; groups are models, or (groups, n, k)."""
    return [found for found in (_moe(table), _grouped(table)) if found is not None]


def _moe(table: KernelTable) -> FamilyRows | None:
    here = np.flatnonzero(table.op == "moe_ffn")
    if not len(here):
        return None
    part = table.take(here)
    skew = np.array([_skew(text) for text in part["distribution"]])
    unknown = unknown_words(part, part.datatype, DATATYPES, "datatype of mixtures of experts")
    keep, left_out = split_rows({**unknown, "distribution is neither balanced nor power_law_": np.isnan(skew)}, np.ones(len(part), bool))
    here, part, skew = here[keep], part.take(keep), skew[keep]
    kernel = np.array([_kernel(*row) for row in zip(part.library, part.kernel_source)], object)
    experts, top_k, ranks = part["num_experts"], part["topk"], part["moe_ep_size"]
    limited = _group_limited(part, kernel)
    halved = limited & (skew == 0)  # one expert in each group, half of the groups open: half of the experts are reached, half of the picks are tied
    tied = np.where(limited, np.where(skew == 0, 4.0, 1.3), 0.0)
    stray = (part.library == "sglang") & (part["library_version"] == "0.5.10") & np.isin(kernel, ("triton", "marlin")) & (ranks > 1)
    if stray.any():
        tokens, e, k, r = (x[stray] for x in (part["num_tokens"], experts, top_k, ranks))
        per_token = np.asarray(expert_load(tokens, e, k, r, skew[stray]).pairs) / tokens
        tied[stray] = (k * np.minimum(per_token, 1.0) - per_token) * TIED / np.minimum(TIED, e / r)
    kinds = [DATATYPES[d] for d in part.datatype]
    shape = MoeShape(
        part["num_tokens"], part["hidden_size"], part["inter_size"], np.where(halved, experts / 2, experts), top_k - np.where(limited, tied, 0.0),
        part["moe_tp_size"], np.where(halved, np.maximum(ranks / 2, 1.0), ranks), skew, np.array([k[1] for k in kinds]), np.array([k[2] for k in kinds]),
        _tuned(part, kernel), np.full(len(part), 2.0), tied,
    )  # fmt: skip
    library = np.array(["/".join([lib, kind] + [d] * (d not in PLAIN)) for lib, kind, d in zip(part.library, kernel, part.datatype)], object)
    group = np.array([f"{h:.0f}x{i:.0f}x{e:.0f}" for h, i, e in zip(part["hidden_size"], part["inter_size"], experts)], object)
    return FamilyRows(MOE_FFN, shape, np.array([k[0] for k in kinds], object), library, group, part.time_s, here, left_out)


def _grouped(table: KernelTable) -> FamilyRows | None:
    here = np.flatnonzero(table.op == "grouped_matmul")
    if not len(here):
        return None
    part = table.take(here)
    keep, left_out = split_rows(unknown_words(part, part.datatype, PLAIN, "datatype of grouped matmuls"), np.ones(len(part), bool))
    here, part = here[keep], part.take(keep)
    m, n, k = part["m"], part["n"], part["k"]
    backward = np.array([next((stage for stage in ("bwd_grad_act", "bwd_grad_w") if stage in text), "") for text in part["config"]], object)
    inputs, weights = backward == "bwd_grad_act", backward == "bwd_grad_w"  # of Y[m, n] = X[m, k] W[k, n]: dX = dY W^T, dW = X^T dY added to fp32
    size = np.array([DATATYPES[d][1] for d in part.datatype])
    shape = GroupedMatmulShape(
        part["batch"], np.where(weights, k, m), np.where(inputs, k, n), np.where(inputs, n, np.where(weights, m, k)), size, size, np.where(weights, 8.0, 2.0)
    )  # fmt: skip
    group = np.array([f"{b:.0f}x{x:.0f}x{y:.0f}" for b, x, y in zip(part["batch"], n, k)], object)
    return FamilyRows(GROUPED_MATMUL, shape, part.datatype, part.library, group, part.time_s, here, left_out)


def _skew(distribution: str) -> float:
    """0 for balanced, the exponent of `power_law_...`, else NaN. A table without the column is balanced."""
    if distribution in ("", "balanced"):
        return 0.0
    found = re.fullmatch(r"power_law_([0-9.]+)", distribution)
    return float(found[1]) if found else np.nan


def _kernel(library: str, source: str) -> str:
    """Kernel of a call. vLLM's and SGLang's plain `fused_moe` is Triton's; TensorRT-LLM's own flow is Cutlass's."""
    name = source.lower().removeprefix(library)
    plain = "triton" if "fused_moe" in name else "cutlass" if "moe_torch_flow" in name else name or "default"
    return next((kernel for kernel in KERNELS if kernel in name), plain)


def _chip(table: KernelTable) -> np.ndarray:
    return np.array([re.sub(r"[^a-z0-9]", "", gpu.lower()) for gpu in table.gpu], object)


def _group_limited(table: KernelTable, kernel: np.ndarray) -> np.ndarray:
    """DeepSeek-V3 (hidden 7168, 256 experts) where the timed call routes itself; SGLang's Triton rows are given their experts."""
    model = (table["hidden_size"] == 7168) & (table["num_experts"] == 256)
    return model & ((kernel == "trtllm") | (table.library == "vllm"))


def _tuned(table: KernelTable, kernel: np.ndarray) -> np.ndarray:
    """1 where the library has a tuning table. Known is only what SGLang's bf16 rows on H100 show, by experts and width per rank: else 1."""
    experts, width = table["num_experts"] / table["moe_ep_size"], table["inter_size"] / table["moe_tp_size"]
    few = ((experts == 8) & np.isin(width, (1792, 2048, 3584, 4096, 7168))) | ((experts == 16) & np.isin(width, (1024, 2048)))
    many = (experts >= 64) & ~((experts == 128) & (width == 1536))
    known = np.array(["h100" in chip for chip in _chip(table)], bool) & (table.library == "sglang") & (kernel == "triton") & (table.datatype == "bf16")
    return np.where(known & ~few & ~many, 0.0, 1.0)
