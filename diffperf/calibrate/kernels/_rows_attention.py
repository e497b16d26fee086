"""Measured attention kernels as rows to fit: prefill, backward, encoder and decode.

Rows share constants where framework, kernel, and datatypes of queries and cache agree; head widths above 256 are kernels of their own,
and so are widths that are no multiple of 16 in TensorRT-LLM (on Blackwell they take five times as long as their neighbours). With an 8-bit cache
the kernels of TensorRT-LLM (also behind FlashInfer) and FlashAttention 3 multiply in 8 bits; FlashInfer's own and Triton's widen the cache to 16.
"""

import re
from typing import Any

import numpy as np

from ...cost.kernel._attention import AttentionShape
from ...cost.kernel._decode import DecodeShape, decode_path
from ...cost.kernel._families import ATTENTION_BACKWARD, ATTENTION_DECODE, ATTENTION_PREFILL, ENCODER_ATTENTION
from ...io import KernelTable
from ._families import Family, FamilyRows, split_rows, unknown_words

FAMILIES = {family.name: family for family in (ATTENTION_PREFILL, ATTENTION_BACKWARD, ENCODER_ATTENTION, ATTENTION_DECODE)}
"""Families by operator, whose names are those of kernel tables."""
BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
WIDENING = ("fidecode", "fiprefill", "triton")
ALIASES = {"vllm_flash_attn": "vllm_flash_attn_fa2"}  # before vLLM named the version, it was FlashAttention 2
WIDE, ODD = 256, 16


def rows(table: KernelTable) -> list[FamilyRows]:
    """The attention kernels of a table, one `FamilyRows` per family that has any (kept or left out); groups are (query heads, key heads, width)."""
    return [_rows(table, here, family) for op, family in FAMILIES.items() if len(here := np.flatnonzero(table.op == op))]


def _rows(table: KernelTable, here: np.ndarray, family: Family) -> FamilyRows:
    part = table.take(here)
    queries, heads, kv_heads, width = (part[name] for name in ("q_len", "n_q_heads", "n_kv_heads", "head_dim"))
    cache = np.where(part["kv_cache_datatype"] == "", part.datatype, part["kv_cache_datatype"])
    flag = np.array([f.split(" ")[0] for f in part.flag])
    reasons = {
        **unknown_words(part, part.datatype, BYTES, "datatype of attention"),
        **unknown_words(part, cache, BYTES, "datatype of an attention cache"),
        "faster than the datasheet peak": flag == "above_peak_flops",
        "read faster than device memory delivers, though far larger than the cache: not all that was counted was read": flag == "above_hbm_bw",
        "one query: a decode kernel, or a single tile, behind the prefill call": (family is ATTENTION_PREFILL) & (queries == 1),
    }
    keep, left_out = split_rows(reasons, np.ones(len(part), bool))
    shape = _decode_shape(part, cache) if family is ATTENTION_DECODE else _shape(part, cache, family)
    source = np.array([ALIASES.get(s, s) for s in part.kernel_source], object)
    widens = np.array([any(word in s for word in WIDENING) for s in source], bool)
    datatype = np.where((cache == "fp8") & ~widens, "fp8", part.datatype)
    library = np.array([_library(*row) for row in zip(part.library, source, part.datatype, cache, width)], object)
    group = np.array([f"{a:.0f}x{b:.0f}x{c:.0f}" for a, b, c in zip(heads, kv_heads, width)], object)
    at = np.flatnonzero(keep)
    picked = type(shape)(*(np.broadcast_to(x, len(part))[at] for x in shape))
    return FamilyRows(family, picked, datatype[at].astype(object), library[at], group[at], part.time_s[at], here[at], left_out)


def _library(library: str, source: str, datatype: str, cache: str, width: float) -> str:
    kernel = "wide" if width > WIDE else "odd" if source == "torch_flow" and width % ODD else ""
    parts = [library, source, "fp8" if datatype == "fp8" else "fp8_cache" if cache == "fp8" else "", kernel]
    return "/".join(part for part in parts if part)


def _element_bytes(datatype: np.ndarray) -> np.ndarray:
    return np.array([BYTES.get(d, np.nan) for d in datatype])


def _border_bytes(part: KernelTable) -> np.ndarray:
    return np.where(part.datatype == "fp32", 4.0, 2.0)


def _window(part: KernelTable) -> np.ndarray:
    window = part["window_size"]
    return np.where(window > 0, window, np.inf)  # 0 and none: everything


def _shape(part: KernelTable, cache: np.ndarray, family: Family) -> AttentionShape:
    """Queries and outputs of 8-bit kernels are 16 bits wide at the border of the call; encoders have no cache to write."""
    width, serving = part["head_dim"], family is ATTENTION_PREFILL
    return AttentionShape(
        part["batch_size"], part["q_len"], part["kv_len"], part["n_q_heads"], part["n_kv_heads"], width, width,
        np.array(0.0 if family is ENCODER_ATTENTION else 1.0), _window(part), _border_bytes(part), _element_bytes(cache),
        np.array(1.0 if serving else 0.0) * np.isin(part.library, ("trtllm", "vllm", "sglang")),
    )  # fmt: skip


def _decode_shape(part: KernelTable, cache: np.ndarray) -> DecodeShape:
    window, heads, kv_heads, batch = _window(part), part["n_q_heads"], part["n_kv_heads"], part["batch_size"]
    blackwell = np.array([bool(re.search(r"b[23]00", gpu.lower())) for gpu in part.gpu])
    source = np.array([ALIASES.get(s, s) for s in part.kernel_source], object)
    paths: Any = np.array([decode_path(*row) for row in zip(source, heads, kv_heads, batch, window, blackwell)]).reshape(-1, 3)
    return DecodeShape(
        batch, part["kv_len"], heads, kv_heads, part["head_dim"], window, _border_bytes(part), _element_bytes(cache),
        np.nan_to_num(part["q_len"], nan=1.0), *paths.T,
    )
