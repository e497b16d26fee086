"""What an operator of PyTorch computes, from its recorded inputs: sizes under the names of kernel tables, FLOP and compulsory bytes.

Counted as in those tables: 2mnk for a matmul; 4 b h d s_q s_kv for attention, half of it when causal, 2.5 times the forward for the backward; every input
read and every output written once; for a convolution 2 per multiplication. Leaves out backward convolutions, whose work is split over several kernels, and
operators whose inputs do not tell what they do.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from .._collective_table import element_bytes
from ._classify import type_name
from ._tables import Inputs

_MATMUL = {"aten::mm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::_addmm_activation": 1, "aten::bmm": 0, "aten::baddbmm": 1}  # where the operands are
_CONVOLUTION = {"aten::cudnn_convolution": (2, 3, 4, 5), "aten::miopen_convolution": (3, 4, 5, 6)}  # where padding, stride, dilation and groups are
_ELEMENTWISE = {
    **{f"aten::{name}{end}": name for name in ("add", "mul", "gelu", "relu", "tanh", "silu", "exp") for end in ("", "_")},
    **{f"aten::{name}": "elementwise" for name in ("sub", "sub_", "div", "div_", "sigmoid", "clamp_min_", "rsqrt", "neg", "pow")},
    "aten::copy_": "copy",
}


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one call.

    Attributes:
      op: operator as kernel tables name it.
      datatype: of the inputs.
      sizes: as kernel tables name them.
      flops: 0 for an operator that only moves data. [FLOP]
      nbytes: compulsory traffic. [B]
    """

    op: str
    datatype: str
    sizes: Mapping[str, int]
    flops: float
    nbytes: float


def work_of(name: str, inputs: Inputs) -> Work | None:
    """The work of a call of the operator `name`; None where its inputs do not say."""
    try:
        return _matmul(name, inputs) or _attention(name, inputs) or _convolution(name, inputs) or _norm(name, inputs) or _elementwise(name, inputs)
    except (IndexError, ValueError, TypeError, ZeroDivisionError):  # fewer arguments, or of another form, than the operator has
        return None


def _matmul(name: str, inputs: Inputs) -> Work | None:
    at = _MATMUL.get(name)
    if at is None:
        return None
    (*batch, m, k), (*_, inner, n) = inputs.shapes[at], inputs.shapes[at + 1]
    if inner != k or min(m, n, k) < 1:
        return None
    datatype, b = type_name(inputs.types[at]), math.prod(batch)
    width = element_bytes(datatype)
    sizes = dict(m=m, n=n, k=k) | (dict(batch=b) if batch else {})
    return Work("batched_matmul" if batch else "matmul", datatype, sizes, 2.0 * b * m * n * k, b * width * (m * k + k * n + m * n))


def _attention(name: str, inputs: Inputs) -> Work | None:
    backward = name == "aten::_flash_attention_backward"
    if name == "aten::_scaled_dot_product_flash_attention":
        (b, h, s, d), (_, h_kv, s_kv, _), causal = inputs.shapes[0], inputs.shapes[1], inputs.values[4]
    elif name == "aten::_flash_attention_forward" and not inputs.shapes[3]:  # no packed sequences
        (b, s, h, d), (_, s_kv, h_kv, _), causal = inputs.shapes[0], inputs.shapes[1], inputs.values[8]
    elif backward and not inputs.shapes[6]:
        (b, s, h, d), (_, s_kv, h_kv, _), causal = inputs.shapes[1], inputs.shapes[2], inputs.values[11]
    else:
        return None
    if causal not in ("True", "False"):
        return None
    datatype = type_name(inputs.types[0])
    sizes = dict(batch_size=b, q_len=s, kv_len=s_kv, n_q_heads=h, n_kv_heads=h_kv, head_dim=d)
    full = 4.0 * b * h * d * s * s_kv * (2.5 if backward else 1.0)
    moved = element_bytes(datatype) * b * d * (2 * h * s + 2 * h_kv * s_kv) * (2 if backward else 1)
    if causal == "True" and s > 1:
        return Work("attention_backward" if backward else "attention_prefill", datatype, sizes, full / 2, moved)
    if backward:
        return None  # tables of backward attention are causal
    return Work("attention_decode" if s == 1 else "encoder_attention", datatype, sizes, full, moved)


def _convolution(name: str, inputs: Inputs) -> Work | None:
    at = _CONVOLUTION.get(name)
    if at is None:
        return None
    (batch, channels, *image), (out_channels, depth, *window) = inputs.shapes[0], inputs.shapes[1]
    padding, stride, dilation, groups = (json.loads(inputs.values[i]) for i in at)
    if groups * depth != channels:
        return None
    out = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, p, s, d in zip(image, window, padding, stride, dilation, strict=True)]
    outputs, datatype = batch * out_channels * math.prod(out), type_name(inputs.types[0])
    sizes = dict(batch=batch, in_channels=channels, out_channels=out_channels, image=math.prod(image), window=math.prod(window), groups=groups)
    moved = batch * channels * math.prod(image) + out_channels * depth * math.prod(window) + outputs
    return Work("convolution", datatype, sizes, 2.0 * outputs * depth * math.prod(window), element_bytes(datatype) * moved)


def _norm(name: str, inputs: Inputs) -> Work | None:
    if name != "aten::native_layer_norm":
        return None
    n = math.prod(inputs.shapes[2])
    m = math.prod(inputs.shapes[0]) // n
    datatype = type_name(inputs.types[0])
    return Work("layernorm", datatype, dict(m=m, n=n), 0.0, 2.0 * m * n * element_bytes(datatype))


def _elementwise(name: str, inputs: Inputs) -> Work | None:
    op = _ELEMENTWISE.get(name)
    tensors = [(shape, type_name(kind)) for shape, kind in zip(inputs.shapes, inputs.types) if shape]
    if op is None or not tensors:
        return None
    sizes = [math.prod(shape) for shape, _ in tensors]
    m, datatype = max(sizes), tensors[0][1]
    if op == "copy":
        datatype = tensors[-1][1]
        sizes = sizes[1:]
    read = sum(size * element_bytes(kind) for size, (_, kind) in zip(sizes, tensors[-len(sizes) :]))
    return Work(op, datatype, dict(m=m), 0.0, read + m * element_bytes(tensors[0][1]))


def rows_of(work: Work) -> dict[str, Any]:
    """The sizes of kernel tables that this work has, as a dict of cells."""
    return dict(op=work.op, datatype=work.datatype, **work.sizes)
