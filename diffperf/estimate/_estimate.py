"""What a prediction is: a pytree of numbers that also prints itself."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from ..parallel import StageMemory
from . import _render


class Breakdown(eqx.Module):
    """Parts of the step time of the busiest pipeline stage; they add up to `Estimate.step_time`. [s]

    Attributes:
      matmul: projections, feed-forward parts, experts, forward and backward.
      attention: attention cores and scans.
      elementwise: norms, residuals, activations, casts, routing permutations.
      recompute: forward work repeated in the backward pass, with its communication.
      vocabulary: output matrix and loss.
      launch: waiting for the host to launch operators.
      tensor: exposed tensor-parallel communication.
      context: exposed context-parallel communication.
      expert: exposed all-to-all of routed experts.
      pipeline: exposed stage-to-stage transfers.
      data: exposed gradient reduction and parameter gathering.
      bubble: idle pipeline slots.
      optimizer: optimizer step.
      offload: exposed host transfers.
      overhead: fixed time per step.
      jitter: growth with the number of devices.
    """

    matmul: Float[Array, ""]
    attention: Float[Array, ""]
    elementwise: Float[Array, ""]
    recompute: Float[Array, ""]
    vocabulary: Float[Array, ""]
    launch: Float[Array, ""]
    tensor: Float[Array, ""]
    context: Float[Array, ""]
    expert: Float[Array, ""]
    pipeline: Float[Array, ""]
    data: Float[Array, ""]
    bubble: Float[Array, ""]
    optimizer: Float[Array, ""]
    offload: Float[Array, ""]
    overhead: Float[Array, ""]
    jitter: Float[Array, ""]


class Estimate(eqx.Module):
    """Prediction for one training step.

    Attributes:
      step_time: wall time. [s]
      tokens_per_s: all devices. [1/s]
      tokens_per_s_per_device: one device. [1/s]
      mfu: model FLOP (no recomputation, causal pairs only) over peak at the plan's precision. [1]
      hfu: the same with recomputed FLOP. [1]
      breakdown: where the time goes.
      memory: of the stage with the highest peak.
      peak_memory: its sum. [B]
      peak_stage: the pipeline stage where it occurs, 0 first. [1]
      memory_capacity: of a device. [B]
      energy: of one step, whole facility. [J]
      cost: of one step. [USD]
      lower_bound: roofline: all arithmetic at datasheet peak, see `step_lower_bound`. [s]
      feasible: True where the plan is legal for model and system and fits into memory.
    """

    step_time: Float[Array, ""]
    tokens_per_s: Float[Array, ""]
    tokens_per_s_per_device: Float[Array, ""]
    mfu: Float[Array, ""]
    hfu: Float[Array, ""]
    breakdown: Breakdown
    memory: StageMemory
    peak_memory: Float[Array, ""]
    peak_stage: Float[Array, ""]
    memory_capacity: Float[Array, ""]
    energy: Float[Array, ""]
    cost: Float[Array, ""]
    lower_bound: Float[Array, ""]
    feasible: Array

    def to_dict(self) -> dict[str, Any]:
        """Plain Python numbers under names with units, such as `step_time_s`; lists where the estimate is batched."""
        return _render.to_dict(self)

    def __str__(self) -> str:
        return repr(self) if _render.is_traced(self) else _render.to_text(self)

    def _repr_html_(self) -> str | None:
        return None if _render.is_traced(self) else _render.to_html(self)
