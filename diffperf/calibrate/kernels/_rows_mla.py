"""Measured latent attention as rows to fit: prefill, decode and the batched products around decode, by library, kernel and type of the cache."""


import numpy as np

from ...cost.kernel._families import MLA_BMM, MLA_DECODE, MLA_PREFILL
from ...cost.kernel._matmul import MatmulShape
from ...cost.kernel._mla import MlaDecodeShape, mla_bmm_shape, mla_prefill_shape
from ...hardware import DATATYPES as UNITS
from ...hardware import UnknownNameError, load_system, resolve_name
from ...io import KernelTable
from ._families import FamilyRows, split_rows, unknown_words

DATATYPES = {"fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
ABSORBED = ("flash_attention", "triton")  # kernels whose prefill attends to the latent; the others expand keys and values per head


def rows(table: KernelTable) -> list[FamilyRows]:
    """The latent attention of a table; groups are (heads, batch), or heads for the batched products."""
    return [found for found in (_attention(table, "mla_prefill"), _attention(table, "mla_decode"), _bmm(table)) if found is not None]


def _attention(table: KernelTable, op: str) -> FamilyRows | None:
    here = np.flatnonzero(table.op == op)
    if not len(here):
        return None
    part = table.take(here)
    cache = np.where(part["kv_cache_datatype"] == "", part.datatype, part["kv_cache_datatype"])
    cache = np.array([{"bfloat16": "bf16", "float16": "fp16"}.get(c, c) for c in cache], object)
    known, left_out = split_rows(unknown_words(part, cache, DATATYPES, "datatype of a latent cache"), np.ones(len(part), bool))
    here, part, cache = here[known], part.take(known), cache[known]
    nbytes, batch, keys, heads = np.array([DATATYPES[c] for c in cache]), part["batch_size"], part["kv_len"], part["num_heads"]
    if op == "mla_prefill":
        prefill = mla_prefill_shape(batch, part["q_len"], keys, heads, np.isin(part.kernel_source, ABSORBED) * 1.0, nbytes)
        family, shape = MLA_PREFILL, type(prefill)(*(np.broadcast_to(np.asarray(x, float), len(part)) for x in prefill))
    else:
        family, shape = MLA_DECODE, MlaDecodeShape(batch, keys, heads, nbytes, np.full(len(part), 512.0), np.full(len(part), 64.0))
    library = _library(part, np.where(cache == "fp8", "/fp8_cache", ""))
    group = np.array([f"{h:.0f} heads, batch {b:.0f}" for h, b in zip(heads, batch)], object)
    lacking = {gpu for gpu in set(part.gpu) if not _has_fp8(gpu)}
    multiplied = np.array(["bf16" if c == "fp8" and gpu in lacking else c for gpu, c in zip(part.gpu, cache)], object)
    return FamilyRows(family, shape, multiplied, library, group, part.time_s, here, left_out)


def _library(table: KernelTable, suffix: np.ndarray) -> np.ndarray:
    return np.array([f"{lib}/{source or 'default'}{end}" for lib, source, end in zip(table.library, table.kernel_source, suffix)], object)


def _has_fp8(gpu: str) -> bool:
    """Whether a chip multiplies fp8; one that the catalog does not know is asked about later."""
    try:
        return float(load_system(resolve_name(gpu), fitted=False).chip.peak_flops_per_s[UNITS.index("fp8")]) > 0
    except UnknownNameError:
        return True


def _bmm(table: KernelTable) -> FamilyRows | None:
    here = np.flatnonzero(table.op == "mla_bmm")
    if not len(here):
        return None
    part = table.take(here)
    known, left_out = split_rows(unknown_words(part, part.datatype, DATATYPES, "datatype of latent products"), np.ones(len(part), bool))
    here, part = here[known], part.take(known)
    after = np.array([1.0 if name == "mla_gen_post" else 0.0 if name == "mla_gen_pre" else 0.5 for name in part["op_name"]])
    nbytes = np.array([DATATYPES[d] for d in part.datatype])
    shape = mla_bmm_shape(part["num_tokens"], part["num_heads"], after, nbytes, nbytes)
    shape = MatmulShape(*(np.broadcast_to(np.asarray(x, float), len(part)) for x in shape))
    library = _library(part, np.full(len(part), ""))
    group = np.array([f"{h:.0f} heads" for h in part["num_heads"]], object)
    return FamilyRows(MLA_BMM, shape, part.datatype, library, group, part.time_s, here, left_out)
