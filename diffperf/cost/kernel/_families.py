"""The families of kernels by name."""

from typing import Any

from ._constants import Prior
from ._device import Device
from ._family import Family
from ._matmul import MATMUL_PRIORS, MatmulConstants, MatmulShape, matmul_bound, matmul_features, matmul_kernel_time


def _arithmetic(shape: MatmulShape, device: Device, constants: MatmulConstants) -> Any:
    """Arithmetic at the datasheet peak; traffic may all be cached. [s]"""
    return 2 * shape.batch * shape.m * shape.n * shape.k / device.peak  # type: ignore[operator]


def _matmul(name: str, **priors: Prior) -> Family:
    return Family(name, MatmulConstants, {**MATMUL_PRIORS, **priors}, matmul_kernel_time, _arithmetic, matmul_features, matmul_bound)


MATMUL = _matmul("matmul")
MATMUL_QUANTISED = _matmul(
    "matmul_quantised", launch=Prior(3.7e-6, "positive", 0.6), split_sync=Prior(5e-6, "positive", 1.0), ramp=Prior(300.0, "positive", 1.0),
    quantise=Prior(2.0, "positive", 0.7),
)  # fmt: skip
"""Twice the launches, a deeper pipeline, and a pass over the activations; our fits to fp8, block-scaled fp8 and nvfp4 kernels of three GPUs."""
MATMUL_FP32 = _matmul("matmul_fp32", launch=Prior(1e-5, "positive", 1.0))
"""32-bit sets are timed by events around the call, so the launch is the host's."""

FAMILIES: dict[str, Family] = {family.name: family for family in (MATMUL, MATMUL_QUANTISED, MATMUL_FP32)}
