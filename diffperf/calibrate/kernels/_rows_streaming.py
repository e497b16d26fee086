"""Measured element-wise, normalisation, softmax, reduction, cross-entropy, optimizer and quantisation kernels as rows to fit.

Each kind of kernel of a library has constants of its own: an activation, a residual addition and a norm are different kernels. All sources are benchmarks,
which find their inputs in the cache where they fit.
"""

import numpy as np

from ...cost.kernel._families import STREAMING
from ...cost.kernel._streaming import BLOCK, StreamingShape
from ...io import KernelTable
from ._families import FamilyRows, split_rows, unknown_words

OPERATORS = ("elementwise", "layernorm", "rmsnorm", "softmax", "reduction", "cross_entropy", "adam", "quantize_computescale", "quantize_scale_matrix")
ELEMENT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0}
# Word of a table for an element-wise kernel -> tensors read and written per element of the output.
TENSORS = {
    **dict.fromkeys(("gelu", "relu", "tanh", "silu", "exp", "copy", "scale", "rope", "attn_rope", "elementwise", "hbm_copy", "hbm_mul"), (1.0, 1.0)),
    **dict.fromkeys(("add", "mul", "swiglu", "mlp_act", "triad", "hbm_add", "hbm_triad"), (2.0, 1.0)),
    "adam": (4.0, 3.0),  # weight, both moments and gradient; the first three are written
}
BY_TOKEN = ("mlp_act", "attn_rope", "rope", "swiglu")
"""Element-wise words whose kernels give a block to each token, however long: the gated activation and rotary kernels of serving frameworks."""


def rows(table: KernelTable) -> list[FamilyRows]:
    """The streaming kernels of a table; groups are (rows, columns) pairs. An empty list where the table has none."""
    here = np.flatnonzero(np.isin(table.op, OPERATORS))
    if not len(here):
        return []
    part = table.take(here)
    word = np.where(part.op == "elementwise", part["op_name"], part.op)
    quantise, scale = np.isin(part.op, ("quantize_computescale", "quantize_scale_matrix")), part.op == "quantize_computescale"
    element = np.array([ELEMENT_BYTES.get(d, np.nan) for d in part.datatype])
    element = np.where(quantise, 2.0, element)  # 16-bit activations; the datatype is what they become
    tensors = np.array([TENSORS.get(w, (1.0, 1.0)) for w in word]).reshape(-1, 2)
    entropy = part.op == "cross_entropy"
    m, n = np.where(entropy, part["num_tokens"], part["m"]), np.where(entropy, part["vocab"], part["n"])
    n = np.where(quantise, part["k"], np.nan_to_num(n, nan=1.0))
    flat = np.isin(part.op, ("elementwise", "adam")) & ~np.isin(word, BY_TOKEN)
    columns = np.where(flat, np.minimum(m * n, BLOCK), n)
    written = np.where(part.op == "reduction", element / n, np.where(entropy, 4.0 / n, element * tensors[:, 1]))  # a loss per token in fp32
    written = np.where(quantise, np.where(scale, 4.0 / n, 1.0), written)
    shape = StreamingShape(m * n / columns, columns, element * tensors[:, 0], written, np.zeros(len(part)))
    difference = np.array(["_minus_" in source for source in part.kernel_source])
    reasons = {
        **unknown_words(part, np.where(quantise, "bf16", part.datatype), ELEMENT_BYTES, "datatype of kernels that move data"),
        "scales that this library computes inside another kernel: a difference of two timings near zero": scale & (part.library == "sglang"),
        "a difference of two kernels' timings, which is no kernel's time (it falls where rows are added)": difference,
    }
    keep, left_out = split_rows(reasons, np.ones(len(part), bool))
    at = np.flatnonzero(keep)
    library = np.array([f"{lib}/{kind}" for lib, kind in zip(part.library[at], word[at])], object)
    group = np.array([f"{a:.0f}x{b:.0f}" for a, b in zip(m[at], n[at])], object)
    picked = StreamingShape(*(np.asarray(x)[at] for x in shape))
    return [FamilyRows(STREAMING, picked, part.datatype[at], library, group, part.time_s[at], here[at], left_out)]
