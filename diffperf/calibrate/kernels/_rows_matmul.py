"""Measured matrix multiplications as rows to fit: which family, library, datatype and bytes a row has, and which rows are not kernel times.

One family per class of datatype, with the same form and other priors: `MATMUL` for 16 bits (and fewer, where the call multiplies and nothing else),
`MATMUL_QUANTISED` where the timed call quantises the activations first, `MATMUL_FP32` for 32 bits. All sources are benchmarks: weights may be in the cache.
"""

from collections.abc import Callable

import numpy as np

from ...cost.kernel._families import MATMUL, MATMUL_FP32, MATMUL_QUANTISED
from ...cost.kernel._matmul import MatmulShape
from ...io import KernelTable
from ._families import FamilyRows, split_rows, unknown_words

OPERATORS = ("matmul", "batched_matmul")
# Datatype of a row: what is multiplied (which peak counts), bytes per element of A and B, bytes of C where the table does not say.
DATATYPES: dict[str, tuple[str, float, float, float]] = {
    "fp32": ("fp32", 4.0, 4.0, 4.0),
    "tf32": ("tf32", 4.0, 4.0, 4.0),
    "fp16": ("fp16", 2.0, 2.0, 2.0),
    "bf16": ("bf16", 2.0, 2.0, 2.0),
    "int8": ("int8", 1.0, 1.0, 2.0),
    "fp8": ("fp8", 1.0, 1.0, 2.0),
    "fp8_block": ("fp8", 1.0, 1.0, 2.0),
    "mxfp8": ("mxfp8", 1.03125, 1.03125, 2.0),  # a scale byte per 32 elements
    "nvfp4": ("nvfp4", 0.5625, 0.5625, 2.0),  # half a byte, and a scale byte per 16 elements
    "int8_weight_only": ("fp16", 2.0, 1.0, 2.0),
    "int4_weight_only": ("fp16", 2.0, 0.5, 2.0),
}
OUTPUT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0}
QUANTISING = ("trtllm", "vllm", "sglang")  # inference frameworks, whose timed call takes 16-bit activations
SEVERAL_KERNELS = ("fp8_block", "int8_weight_only", "int4_weight_only")  # beside the library's plain kernel for the same peak


def rows(table: KernelTable) -> list[FamilyRows]:
    """The matmuls and batched matmuls of a table, one `FamilyRows` per family that has any (kept or left out); groups are (n, k) pairs."""
    here = np.flatnonzero(np.isin(table.op, OPERATORS))
    if not len(here):
        return []
    part = table.take(here)
    of = [DATATYPES.get(d, ("", 0.0, 0.0, 0.0)) for d in part.datatype]
    quantising = np.isin(part.library, QUANTISING) & ~np.isin(part.datatype, ("int8_weight_only", "int4_weight_only"))
    name = np.array([
        MATMUL_FP32.name if d in ("fp32", "tf32") else MATMUL_QUANTISED.name if q and d not in ("fp16", "bf16") else MATMUL.name
        for d, q in zip(part.datatype, quantising)
    ])  # fmt: skip
    batch = part["batch"]
    shape = MatmulShape(
        part["m"], part["n"], part["k"], np.where(np.isnan(batch), 1.0, batch), np.array([x[1] for x in of]), np.array([x[2] for x in of]),
        np.array([OUTPUT_BYTES.get(o, x[3]) for o, x in zip(part["out_datatype"], of)]), np.zeros(len(part)),
    )  # fmt: skip
    library = np.array([_library(*row) for row in zip(part.library, part.datatype, part.op)], object)
    group = np.array([f"{n:.0f}x{k:.0f}" for n, k in zip(part["n"], part["k"])], object)
    reasons = {**unknown_words(part, part.datatype, DATATYPES, "datatype of matmuls"), **{reason: test(part) for reason, test in LEFT_OUT.items()}}
    result = []
    for family in (MATMUL, MATMUL_QUANTISED, MATMUL_FP32):
        mine = name == family.name
        if not mine.any():
            continue
        keep, left_out = split_rows(reasons, mine)
        at = np.flatnonzero(keep)
        datatype = np.array([of[i][0] for i in at], object)
        picked = MatmulShape(*(np.asarray(x)[at] for x in shape))
        result.append(FamilyRows(family, picked, datatype, library[at], group[at], part.time_s[at], here[at], left_out))
    return result


def _library(library: str, datatype: str, op: str) -> str:
    """Rows of one library share constants: frameworks that multiply the same datatype by several kernels, or through several calls, count as several."""
    parts = [library]
    if datatype in SEVERAL_KERNELS:
        parts.append(datatype)
    if library == "torch" and op == "batched_matmul":
        parts.append("bmm")
    return "/".join(parts)


def _flagged(*flags: str) -> Callable[[KernelTable], np.ndarray]:
    return lambda table: np.isin([f.split(" ")[0] for f in table.flag], flags)


def _host_bound(table: KernelTable) -> np.ndarray:
    return (table.library == "vllm") & (table.datatype == "fp8_block")


def _between_regimes(table: KernelTable) -> np.ndarray:
    weights = table["n"] * table["k"] * np.array([DATATYPES.get(d, ("", 0.0, 0.0, 0.0))[2] for d in table.datatype])
    chip = np.array([g.lower().replace("nvidia", "").strip() == "l40s" for g in table.gpu])
    return chip & (weights > 8e6) & (weights < 110e6) & (table["m"] <= 128)


def _spikes(table: KernelTable) -> np.ndarray:
    """Rows that take over twice as long as both neighbours in m, all else equal: more rows cannot be faster."""
    out = np.zeros(len(table), bool)
    series: dict[tuple, list[int]] = {}
    batch = np.nan_to_num(table["batch"], nan=1.0)
    for i, key in enumerate(zip(table.gpu, table.library, table.datatype, table.kernel_source, table["out_datatype"], batch, table["n"], table["k"])):
        series.setdefault(key, []).append(i)
    m, time = table["m"], table.time_s
    for at in series.values():
        order = np.array(at)[np.argsort(m[at], kind="stable")]
        if len(order) > 2:
            before, here, after = time[order[:-2]], time[order[1:-1]], time[order[2:]]
            distinct = (m[order[:-2]] < m[order[1:-1]]) & (m[order[1:-1]] < m[order[2:]])
            out[order[1:-1]] = distinct & (here > 2 * before) & (here > 2 * after)
    return out


LEFT_OUT: dict[str, Callable[[KernelTable], np.ndarray]] = {
    "faster than the datasheet peak": _flagged("above_peak_flops", "above_peak"),
    "bound by the host: block-scaled fp8 of vllm has a floor of 55-280 us and falls where m grows": _host_bound,
    "bound by the host, as the table says": _flagged("host_launch_overhead_suspected", "dispatch_overhead_dominated"),
    "an isolated spike: over twice the time of both neighbours in m": _spikes,
    "weights of 8-110 MB with few rows on L40S, measured in or out of the cache without a pattern": _between_regimes,
}
"""Reason -> which rows of a table it concerns, in this order; a row is counted under the first."""
