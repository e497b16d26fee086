"""How a job is laid out on a cluster, as a pytree of numbers, and the door at which a person's words become one."""

import math
import numbers
from typing import Literal

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from .._arrays import si
from ..hardware import DATATYPES

SCHEDULES = ("1f1b", "zero-bubble", "dualpipe")
"""Order of the axis of `Plan.schedule`. `1f1b` is interleaved when `virtual_stages > 1`; GPipe has the same bubble and `in_flight` of all micro-batches."""

OPTIMIZER_BYTES = {"adam": 12.0, "adam-8bit": 6.0, "adam-bf16": 8.0, "sgd-momentum": 8.0, "adafactor": 4.1, "none": 0.0}
"""Optimizer states and fp32 master weights per trainable parameter. [B]"""


class Plan(eqx.Module):
    """A parallel layout. Make one from words with `make_plan`; every leaf is a traced number, so a plan can be batched and differentiated.

    Attributes:
      tensor_parallel, pipeline_parallel, data_parallel, context_parallel: degrees; their product is the number of devices. [1]
      virtual_stages: model chunks per pipeline rank (interleaving). [1]
      expert_parallel: ranks over which routed experts are spread, taken from the data- and context-parallel ranks. [1]
      sequence_parallel: 1 where norms and residuals are split over the tensor-parallel ranks. [1]
      context_all_to_all: 0 for ring, 1 for all-to-all (head-splitting) context parallelism. [1]
      shard_optimizer, shard_gradients, shard_parameters: 1 where these are split over `shard_group` (ZeRO 1, 2, 3). [1]
      shard_group: data-parallel ranks over which they are split; inf for all (hybrid sharding when smaller). [1]
      micro_batch_size: sequences per micro-batch of one data-parallel rank. [1]
      global_batch_size: sequences per step. [1]
      recompute_full: part of the layers whose forward pass is repeated in the backward pass. [1]
      recompute_selective: part of the layers that repeat the attention core only. [1]
      precision: weights (sum 1) over `DATATYPES`: operands of the layers' matmuls. [1]
      schedule: weights (sum 1) over `SCHEDULES`. [1]
      fused_attention: 1 for fused (flash) attention. [1]
      trainable: part of the weights with gradients and optimizer states (adapters: about 0.002). [1]
      weight_bytes, gradient_bytes, optimizer_bytes: bytes per parameter; `optimizer_bytes` with master weights. [B]
      optimizer_offload, activation_offload: part kept in host memory. [1]
      overlap_gradient, overlap_parameter, overlap_tensor, overlap_pipeline: 1 where that communication may hide under compute. [1]
    """

    tensor_parallel: Float[Array, ""] = eqx.field(converter=si)
    pipeline_parallel: Float[Array, ""] = eqx.field(converter=si)
    data_parallel: Float[Array, ""] = eqx.field(converter=si)
    context_parallel: Float[Array, ""] = eqx.field(converter=si)
    virtual_stages: Float[Array, ""] = eqx.field(converter=si)
    expert_parallel: Float[Array, ""] = eqx.field(converter=si)
    sequence_parallel: Float[Array, ""] = eqx.field(converter=si)
    context_all_to_all: Float[Array, ""] = eqx.field(converter=si)
    shard_optimizer: Float[Array, ""] = eqx.field(converter=si)
    shard_gradients: Float[Array, ""] = eqx.field(converter=si)
    shard_parameters: Float[Array, ""] = eqx.field(converter=si)
    shard_group: Float[Array, ""] = eqx.field(converter=si)
    micro_batch_size: Float[Array, ""] = eqx.field(converter=si)
    global_batch_size: Float[Array, ""] = eqx.field(converter=si)
    recompute_full: Float[Array, ""] = eqx.field(converter=si)
    recompute_selective: Float[Array, ""] = eqx.field(converter=si)
    precision: Float[Array, " datatypes"] = eqx.field(converter=si)
    schedule: Float[Array, " schedules"] = eqx.field(converter=si)
    fused_attention: Float[Array, ""] = eqx.field(converter=si)
    trainable: Float[Array, ""] = eqx.field(converter=si)
    weight_bytes: Float[Array, ""] = eqx.field(converter=si)
    gradient_bytes: Float[Array, ""] = eqx.field(converter=si)
    optimizer_bytes: Float[Array, ""] = eqx.field(converter=si)
    optimizer_offload: Float[Array, ""] = eqx.field(converter=si)
    activation_offload: Float[Array, ""] = eqx.field(converter=si)
    overlap_gradient: Float[Array, ""] = eqx.field(converter=si)
    overlap_parameter: Float[Array, ""] = eqx.field(converter=si)
    overlap_tensor: Float[Array, ""] = eqx.field(converter=si)
    overlap_pipeline: Float[Array, ""] = eqx.field(converter=si)


class PlanError(ValueError):
    """A plan that cannot run; the message says which number must change and to what."""


def one_hot(name: str, names: tuple[str, ...], what: str) -> np.ndarray:
    """Weights that pick `name`.

    Raises:
      PlanError: when `name` is not one of `names`.
    """
    if name not in names:
        raise PlanError(f"{what} is {name!r}; it should be one of {', '.join(names)}.")
    return np.eye(len(names))[names.index(name)]


def make_plan(**words) -> Plan:
    """A `Plan` from the words of the field; takes the arguments of `plan_numbers` and raises what it raises."""
    return Plan(**plan_numbers(**words))


def plan_numbers(
    *,
    global_batch_size: float,
    micro_batch_size: float = 1,
    tensor_parallel: float = 1,
    pipeline_parallel: float = 1,
    data_parallel: float = 1,
    context_parallel: float = 1,
    virtual_stages: float = 1,
    expert_parallel: float = 1,
    sequence_parallel: bool | None = None,
    context_mode: Literal["ring", "all-to-all"] = "ring",
    zero_stage: Literal[0, 1, 2, 3] = 1,
    shard_group: float = math.inf,
    recompute: str | float = "none",
    precision: str = "bf16",
    schedule: str = "1f1b",
    fused_attention: bool = True,
    trainable: float = 1.0,
    optimizer: str = "adam",
    weight_bytes: float = 2.0,
    gradient_bytes: float = 4.0,
    optimizer_bytes: float | None = None,
    optimizer_offload: float = 0.0,
    activation_offload: float = 0.0,
    overlap_gradient: bool = True,
    overlap_parameter: bool = True,
    overlap_tensor: bool = True,
    overlap_pipeline: bool = True,
) -> dict[str, float | np.ndarray]:
    """The leaves of a `Plan` as plain numbers, from the words of the field.

    Args:
      sequence_parallel: None for on exactly when `tensor_parallel > 1`.
      zero_stage: 1 splits the optimizer states, 2 also gradients, 3 also parameters (FSDP full shard) over `shard_group` ranks.
      shard_group: ranks that share one copy, inf for all data-parallel ranks; smaller for hybrid sharding.
      recompute: "none", "selective" (attention core), "full", or the part of the layers recomputed, in [0, 1].
      precision: datatype of the layers' matmul operands, one of `DATATYPES`.
      trainable: part of the weights that is trained; below 1 for adapters.
      optimizer: a key of `OPTIMIZER_BYTES`; `optimizer_bytes` overrides it. [B per parameter]
    Raises:
      PlanError: for a name or number outside its range, saying what is accepted. What depends on model or system is checked by `check_plan`.
    """
    degrees = dict(
        tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, data_parallel=data_parallel, context_parallel=context_parallel,
        virtual_stages=virtual_stages, expert_parallel=expert_parallel, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size,
        shard_group=shard_group,
    )  # fmt: skip
    for name, value in degrees.items():
        unbounded = name == "shard_group" and value == math.inf
        whole = name not in ("micro_batch_size", "global_batch_size")
        if not _is_number(value) or not value > 0 or (value == math.inf and not unbounded) or (whole and not unbounded and value != int(value)):
            accepted = "whole number of at least 1" if whole else "positive number"
            raise PlanError(f"{name} is {value!r}; it should be a {accepted}{', or inf for all ranks' * (name == 'shard_group')}.")
    shares = dict(trainable=trainable, optimizer_offload=optimizer_offload, activation_offload=activation_offload)
    for name, value in shares.items():
        if not _is_number(value) or not 0 <= value <= 1:
            raise PlanError(f"{name} is {value!r}; it should be a fraction in [0, 1].")
    if isinstance(recompute, str):
        if recompute not in ("none", "selective", "full"):
            raise PlanError(f"recompute is {recompute!r}; it should be 'none', 'selective', 'full' or the part of the layers, in [0, 1].")
        full, selective = float(recompute == "full"), float(recompute == "selective")
    else:
        if not _is_number(recompute) or not 0 <= recompute <= 1:
            raise PlanError(f"recompute is {recompute!r}; it should be 'none', 'selective', 'full' or the part of the layers, in [0, 1].")
        full, selective = float(recompute), 0.0
    if zero_stage not in (0, 1, 2, 3):
        raise PlanError(f"zero_stage is {zero_stage!r}; it should be 0, 1, 2 or 3.")
    if context_mode not in ("ring", "all-to-all"):
        raise PlanError(f"context_mode is {context_mode!r}; it should be 'ring' or 'all-to-all'.")
    if optimizer_bytes is None:
        if optimizer not in OPTIMIZER_BYTES:
            raise PlanError(f"optimizer is {optimizer!r}; it should be one of {', '.join(OPTIMIZER_BYTES)}, or give optimizer_bytes.")
        optimizer_bytes = OPTIMIZER_BYTES[optimizer]
    for name, value in dict(weight_bytes=weight_bytes, gradient_bytes=gradient_bytes, optimizer_bytes=optimizer_bytes).items():
        if not _is_number(value) or not 0 <= value < math.inf:
            raise PlanError(f"{name} is {value!r}; it should be the bytes per parameter, 0 or more.")
    return dict(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        data_parallel=data_parallel,
        context_parallel=context_parallel,
        virtual_stages=virtual_stages,
        expert_parallel=expert_parallel,
        sequence_parallel=float(tensor_parallel > 1 if sequence_parallel is None else sequence_parallel),
        context_all_to_all=float(context_mode == "all-to-all"),
        shard_optimizer=float(zero_stage >= 1),
        shard_gradients=float(zero_stage >= 2),
        shard_parameters=float(zero_stage >= 3),
        shard_group=shard_group,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        recompute_full=full,
        recompute_selective=selective,
        precision=one_hot(precision, DATATYPES, "precision"),
        schedule=one_hot(schedule, SCHEDULES, "schedule"),
        fused_attention=float(fused_attention),
        trainable=trainable,
        weight_bytes=weight_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        optimizer_offload=optimizer_offload,
        activation_offload=activation_offload,
        overlap_gradient=float(overlap_gradient),
        overlap_parameter=float(overlap_parameter),
        overlap_tensor=float(overlap_tensor),
        overlap_pipeline=float(overlap_pipeline),
    )


def _is_number(value) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def num_devices(plan: Plan) -> Float[Array, ""]:
    """Devices that the plan needs. [1]"""
    return plan.tensor_parallel * plan.pipeline_parallel * plan.data_parallel * plan.context_parallel


def num_microbatches(plan: Plan) -> Float[Array, ""]:
    """Micro-batches of one data-parallel rank per step, `global_batch_size / (data_parallel * micro_batch_size)`. [1]"""
    return plan.global_batch_size / (plan.data_parallel * plan.micro_batch_size)
