"""Why a step takes as long as it does: elasticities by one reverse-mode gradient, and the bottleneck in a sentence."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..hardware import System
from ..parallel._plan import Plan
from ..stack import Stack
from ..workload import Transformer
from ._estimate import Estimate
from ._paths import INPUTS, pack, path_names
from ._train import train_step

QUANTITIES = ("step_time", "tokens_per_s", "mfu", "energy", "cost", "peak_memory", "lower_bound")

# Breakdown field -> what it is called, its verb, the kind of limit it makes, and what shrinks it.
_PARTS = {
    "matmul": ("matmuls", "take", "compute", "lower precision or a faster chip shrinks them"),
    "attention": ("attention", "takes", "compute", "fused attention, a shorter window or context parallelism shrinks it"),
    "elementwise": ("elementwise passes", "take", "memory bandwidth", "sequence parallelism or fused kernels shrink them"),
    "recompute": ("recomputed forward work", "takes", "compute", "less recomputation shrinks it, where memory allows"),
    "vocabulary": ("output matrix and loss", "takes", "compute", "tensor parallelism splits it"),
    "launch": ("waiting for kernel launches", "takes", "the host", "captured graphs or larger micro-batches shrink it"),
    "tensor": ("tensor-parallel communication", "takes", "the network", "a smaller tensor_parallel or a faster scale-up link shrinks it"),
    "context": ("context-parallel communication", "takes", "the network", "a smaller context_parallel shrinks it"),
    "expert": ("expert all-to-all", "takes", "the network", "experts inside the scale-up domain shrink it"),
    "pipeline": ("pipeline transfers", "take", "the network", "fewer virtual_stages shrink them"),
    "data": ("gradient and parameter communication", "takes", "the network", "a larger batch per device or a lower zero_stage shrinks it"),
    "bubble": ("the pipeline bubble", "takes", "idle pipeline slots", "more micro-batches, fewer stages or more virtual_stages shrink it"),
    "optimizer": ("the optimizer step", "takes", "memory bandwidth", "sharding its states (zero_stage 1) shrinks it"),
    "offload": ("host transfers", "take", "the host link", "less offloading shrinks them"),
    "overhead": ("the fixed time per step", "takes", "the host", "a larger global batch makes it rarer"),
    "jitter": ("waiting for the slowest device", "takes", "scale", "fewer devices shrink it"),
}


class Elasticity(NamedTuple):
    """Relative change of a prediction per relative change of one number.

    Attributes:
      path: dotted name, such as `system.scale_out.bandwidth`.
      value: the number in use. [SI]
      elasticity: d ln quantity / d ln value: -0.3 says that 1% more of it makes the quantity 0.3% smaller. [1]
    """

    path: str
    value: float
    elasticity: float


def elasticities(
    model: Transformer, system: System, plan: Plan, stack: Stack, wrt: Sequence[str] = ("system", "stack"), quantity: str = "step_time"
) -> list[Elasticity]:
    """What a prediction depends on, by one gradient through the whole model; the largest magnitude first.

    Local: where the model has a `max` or a step (a group outgrows a network tier), it says nothing of the other side. Numbers without effect are left out.

    Args:
      wrt: which of `INPUTS`.
      quantity: one of `QUANTITIES`.
    Raises:
      ValueError: for another name in `wrt` or `quantity`.
    """
    wrt = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in wrt:
        if name not in INPUTS:
            raise ValueError(f"wrt holds {name!r}; it should hold some of {', '.join(INPUTS)}.")
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity is {quantity!r}; it should be one of {', '.join(QUANTITIES)}.")
    inputs = (model, system, plan, stack)
    packed = pack(inputs)
    slopes = pack(_log_slope(*inputs, quantity=quantity))
    effect = np.where(np.isfinite(packed), slopes * np.where(np.isfinite(packed), packed, 0.0), 0.0)  # a window of inf has slope 0
    rows = [Elasticity(*row) for row in zip(path_names(inputs), packed.tolist(), effect.tolist()) if row[2] != 0 and row[0].split(".")[0] in wrt]
    return sorted(rows, key=lambda row: -abs(row.elasticity))


@functools.partial(jax.jit, static_argnames="quantity")
def _log_slope(*inputs, quantity: str):
    return jax.grad(lambda inputs: jnp.log(getattr(train_step(*inputs), quantity)))(inputs)


def bottleneck(estimate: Estimate) -> str:
    """What takes most of the step, in words: "Limited by compute: matmuls take 61% of the 4.91 s step ..."."""
    peak, capacity = float(estimate.peak_memory), float(estimate.memory_capacity)
    stage = f"pipeline stage {float(estimate.peak_stage):.0f}"
    if peak > capacity:
        parts = {name: float(value) for name, value in estimate.memory._asdict().items()}
        largest = max(parts, key=lambda name: parts[name])
        share = f"{largest} take {parts[largest] / 1e9:.1f} GB of it" if largest != "reserved" else f"{parts[largest] / 1e9:.1f} GB of it is reserved"
        return f"Does not fit: {stage} needs {peak / 1e9:.1f} GB of the {capacity / 1e9:.1f} GB of a device; {share}."
    total = float(estimate.step_time)
    shares = {name: float(getattr(estimate.breakdown, name)) / total for name in _PARTS}
    first, second, third = sorted(shares, key=lambda name: -shares[name])[:3]
    what, verb, limit, remedy = _PARTS[first]
    rest = " and ".join(f"{_PARTS[name][0]} {shares[name]:.0%}" for name in (second, third) if shares[name] >= 0.005)
    text = f"Limited by {limit}: {what} {verb} {shares[first]:.0%} of the {total:.3g} s step; {remedy}."
    return text + (f" Next: {rest}." if rest else "") + f" Memory: {peak / 1e9:.1f} of {capacity / 1e9:.1f} GB on {stage}."
