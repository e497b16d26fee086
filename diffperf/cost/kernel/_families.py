"""The families of kernels by name."""

from typing import Any

from ._attention import (
    ATTENTION_BACKWARD_PRIORS,
    ATTENTION_PRIORS,
    AttentionConstants,
    attention_backward_bound,
    attention_backward_kernel_time,
    attention_bound,
    attention_features,
    attention_kernel_time,
    attention_roofline,
)
from ._constants import Prior
from ._cpu import (
    CPU_ATTENTION_PRIORS,
    CPU_BACKWARD_PRIORS,
    CPU_MATMUL_PRIORS,
    CPU_STREAMING_PRIORS,
    CpuAttentionConstants,
    CpuMatmulConstants,
    CpuStreamingConstants,
    cpu_attention_backward_time,
    cpu_attention_time,
    cpu_decode_time,
    cpu_matmul_time,
    cpu_streaming_time,
)
from ._decode import DECODE_PRIORS, DecodeConstants, decode_bound, decode_features, decode_kernel_time, decode_roofline
from ._device import Device
from ._family import Family
from ._matmul import MATMUL_PRIORS, MatmulConstants, MatmulShape, matmul_bound, matmul_features, matmul_kernel_time
from ._mla import (
    MLA_DECODE_PRIORS,
    MlaDecodeConstants,
    mla_decode_bound,
    mla_decode_features,
    mla_decode_kernel_time,
    mla_decode_roofline,
    mla_prefill_features,
)
from ._moe import (
    GROUPED_MATMUL_PRIORS,
    MOE_PRIORS,
    GroupedMatmulConstants,
    MoeConstants,
    grouped_matmul_bound,
    grouped_matmul_features,
    grouped_matmul_kernel_time,
    grouped_matmul_roofline,
    moe_bound,
    moe_features,
    moe_kernel_time,
    moe_roofline,
)
from ._streaming import STREAMING_PRIORS, StreamingConstants, streaming_bound, streaming_features, streaming_kernel_time, streaming_roofline


def _arithmetic(shape: MatmulShape, device: Device, constants: MatmulConstants) -> Any:
    """Arithmetic at the datasheet peak; traffic may all be cached. [s]"""
    return 2 * shape.batch * shape.m * shape.n * shape.k / device.peak  # type: ignore[operator]


def _matmul(name: str, **priors: Prior) -> Family:
    every = {**MATMUL_PRIORS, **priors}
    return Family(name, MatmulConstants, every, matmul_kernel_time, _arithmetic, matmul_features, matmul_bound)


def _attention(name: str, features: Any = attention_features) -> Family:
    return Family(name, AttentionConstants, ATTENTION_PRIORS, attention_kernel_time, attention_bound, features, attention_roofline)


MATMUL = _matmul("matmul")
MATMUL_QUANTISED = _matmul(
    "matmul_quantised", launch=Prior(3.7e-6, "positive", 0.6), split_sync=Prior(5e-6, "positive", 1.0), ramp=Prior(300.0, "positive", 1.0),
    quantise=Prior(2.0, "positive", 0.7),
)  # fmt: skip
"""Twice the launches, a deeper pipeline, and a pass over the activations; our fits to fp8, block-scaled fp8 and nvfp4 kernels of three GPUs."""
MATMUL_FP32 = _matmul("matmul_fp32", launch=Prior(1e-5, "positive", 1.0))
"""32-bit sets are timed by events around the call, so the launch is the host's."""

STREAMING = Family("streaming", StreamingConstants, STREAMING_PRIORS, streaming_kernel_time, streaming_bound, streaming_features, streaming_roofline)
ATTENTION_PREFILL = _attention("attention_prefill")
ATTENTION_BACKWARD = Family(
    "attention_backward", AttentionConstants, ATTENTION_BACKWARD_PRIORS, attention_backward_kernel_time, attention_backward_bound, attention_features,
    lambda shape, device: 2.5 * attention_roofline(shape, device),
)  # fmt: skip
ENCODER_ATTENTION = _attention("encoder_attention")
ATTENTION_DECODE = Family("attention_decode", DecodeConstants, DECODE_PRIORS, decode_kernel_time, decode_bound, decode_features, decode_roofline)
MOE_FFN = Family("moe_ffn", MoeConstants, MOE_PRIORS, moe_kernel_time, moe_bound, moe_features, moe_roofline)
GROUPED_MATMUL = Family(
    "grouped_matmul", GroupedMatmulConstants, GROUPED_MATMUL_PRIORS, grouped_matmul_kernel_time, grouped_matmul_bound, grouped_matmul_features,
    grouped_matmul_roofline,
)  # fmt: skip
MLA_PREFILL = _attention("mla_prefill", mla_prefill_features)
MLA_DECODE = Family(
    "mla_decode", MlaDecodeConstants, MLA_DECODE_PRIORS, mla_decode_kernel_time, mla_decode_bound, mla_decode_features, mla_decode_roofline
)
MLA_BMM = _matmul("mla_bmm", quantise=Prior(0.5, "positive", 1.0))
"""The batched products around latent decode; 8-bit calls quantise their 16-bit input first."""

MATMUL_CPU = Family("matmul_cpu", CpuMatmulConstants, CPU_MATMUL_PRIORS, cpu_matmul_time, _arithmetic, matmul_features, matmul_bound)
STREAMING_CPU = Family(
    "streaming_cpu", CpuStreamingConstants, CPU_STREAMING_PRIORS, cpu_streaming_time, streaming_bound, streaming_features, streaming_roofline
)
ATTENTION_PREFILL_CPU = Family(
    "attention_prefill_cpu", CpuAttentionConstants, CPU_ATTENTION_PRIORS, cpu_attention_time, attention_bound, attention_features, attention_roofline
)
ATTENTION_BACKWARD_CPU = Family(
    "attention_backward_cpu", CpuAttentionConstants, CPU_BACKWARD_PRIORS, cpu_attention_backward_time, attention_bound, attention_features,
    ATTENTION_BACKWARD.roofline,
)  # fmt: skip
ATTENTION_DECODE_CPU = Family(
    "attention_decode_cpu", CpuAttentionConstants, CPU_ATTENTION_PRIORS, cpu_decode_time, decode_bound, decode_features, decode_roofline
)
ON_CPU: dict[str, Family] = {
    "matmul": MATMUL_CPU, "matmul_fp32": MATMUL_CPU, "matmul_quantised": MATMUL_CPU, "streaming": STREAMING_CPU, "attention_prefill": ATTENTION_PREFILL_CPU,
    "attention_backward": ATTENTION_BACKWARD_CPU, "attention_decode": ATTENTION_DECODE_CPU,
}  # fmt: skip
"""Family of kernels -> the one that takes its place on a CPU, for the same shape."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        MATMUL, MATMUL_QUANTISED, MATMUL_FP32, STREAMING, ATTENTION_PREFILL, ATTENTION_BACKWARD, ENCODER_ATTENTION, ATTENTION_DECODE, MOE_FFN, GROUPED_MATMUL,
        MLA_PREFILL, MLA_DECODE, MLA_BMM, MATMUL_CPU, STREAMING_CPU, ATTENTION_PREFILL_CPU, ATTENTION_BACKWARD_CPU, ATTENTION_DECODE_CPU,
    )
}  # fmt: skip
