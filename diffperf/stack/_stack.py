"""What a software stack (framework, libraries, launch path) achieves on a chip, as a pytree of numbers apart from the hardware."""

import equinox as eqx
from jaxtyping import Array, Float

from .._arrays import si


class Stack(eqx.Module):
    """A software stack. Values are fitted (`diffperf calibrate runs`); see `docs/model.md` for the place of each in the equations.

    Attributes:
      matmul_factor: matmul rate relative to `Chip.matmul_efficiency`. [1]
      low_precision_factor: further factor where operands have 8 or 4 bits. [1]
      expert_factor: further factor of the grouped matmuls of routed experts. [1]
      expert_low_precision_factor: further factor of those with 8- or 4-bit operands. [1]
      attention_factor: fused attention rate relative to `Chip.attention_efficiency`. [1]
      attention_backward_ratio: backward over forward time of fused attention. [1]
      attention_head_half: head width at which fused attention reaches half its rate. [1]
      weight_traffic: memory traffic of a matmul's weight operand per compulsory byte. [1]
      activation_traffic: the same of its input and output. [1]
      elementwise_bytes: traffic of norms, residuals, activations per token and element of width, one forward pass. [B]
      cast_bytes: further traffic of quantising passes, per token and element of width. [B]
      permute_bytes: further traffic of routing tokens to experts, per token, visited expert and element of width. [B]
      score_bytes: traffic of unfused attention per pair of query and key and head, one pass. [B]
      vocabulary_factor: time of output matrix and loss relative to their matmul and traffic. [1]
      vocabulary_share: part of it that a pipeline with more than one stage pays in every micro-batch slot. [1]
      layer_factor: remaining factor on the device time of a layer. [1]
      frozen_factor: the same for layers with frozen weights and adapters. [1]
      launch_time: host time to launch forward and backward of one layer. [s]
      launch_recompute: factor on it when the forward pass is launched again. [1]
      launch_expert: factor on it for layers with experts. [1]
      tensor_exposed: part of tensor-parallel transfer time that compute does not hide. [1]
      collective_latency: time of a tensor-parallel collective per doubling of ranks, never hidden. [s]
      context_exposed: part of context-parallel transfer time not hidden. [1]
      expert_exposed: all-to-all time of routed experts relative to its transfer time at link rate (imbalance, less overlap). [1]
      pipeline_exposed: part of pipeline transfer time not hidden. [1]
      gradient_traffic: bytes moved by gradient reduction and parameter gathering relative to those of the plan's datatypes. [1]
      data_overlap: part of the last micro-batches' compute under which data-parallel traffic hides. [1]
      shard_overlap: weight of perfect overlap (against none) of parameter gathering with compute when parameters are sharded. [1]
      bubble_factor: pipeline bubble relative to its closed form. [1]
      optimizer_traffic: traffic of the optimizer step relative to one read and one write of its states. [1]
      offload_exposed: part of host transfer time not hidden. [1]
      step_overhead: fixed time per step. [s]
      scale_jitter: growth of the step per doubling of devices beyond 8. [1]
      activation_memory: stored activations relative to their closed form. [1]
      selective_memory: stored activations under selective recompute relative to those without. [1]
      low_precision_storage: 1 where 8-bit matmuls keep their operands in 8 bits for the backward pass. [1]
      working_layers: working set of a layer's backward pass relative to its stored activations. [1]
      logit_bytes: memory per logit at the output layer: copies in 16 and 32 bits, gradient. [B]
      memory_overhead: allocated memory relative to live tensors (fragmentation). [1]
      memory_fixed: context, communication buffers, workspace. [B]
    """

    matmul_factor: Float[Array, ""] = eqx.field(converter=si)
    low_precision_factor: Float[Array, ""] = eqx.field(converter=si)
    expert_factor: Float[Array, ""] = eqx.field(converter=si)
    expert_low_precision_factor: Float[Array, ""] = eqx.field(converter=si)
    attention_factor: Float[Array, ""] = eqx.field(converter=si)
    attention_backward_ratio: Float[Array, ""] = eqx.field(converter=si)
    attention_head_half: Float[Array, ""] = eqx.field(converter=si)
    weight_traffic: Float[Array, ""] = eqx.field(converter=si)
    activation_traffic: Float[Array, ""] = eqx.field(converter=si)
    elementwise_bytes: Float[Array, ""] = eqx.field(converter=si)
    cast_bytes: Float[Array, ""] = eqx.field(converter=si)
    permute_bytes: Float[Array, ""] = eqx.field(converter=si)
    score_bytes: Float[Array, ""] = eqx.field(converter=si)
    vocabulary_factor: Float[Array, ""] = eqx.field(converter=si)
    vocabulary_share: Float[Array, ""] = eqx.field(converter=si)
    layer_factor: Float[Array, ""] = eqx.field(converter=si)
    frozen_factor: Float[Array, ""] = eqx.field(converter=si)
    launch_time: Float[Array, ""] = eqx.field(converter=si)
    launch_recompute: Float[Array, ""] = eqx.field(converter=si)
    launch_expert: Float[Array, ""] = eqx.field(converter=si)
    tensor_exposed: Float[Array, ""] = eqx.field(converter=si)
    collective_latency: Float[Array, ""] = eqx.field(converter=si)
    context_exposed: Float[Array, ""] = eqx.field(converter=si)
    expert_exposed: Float[Array, ""] = eqx.field(converter=si)
    pipeline_exposed: Float[Array, ""] = eqx.field(converter=si)
    gradient_traffic: Float[Array, ""] = eqx.field(converter=si)
    data_overlap: Float[Array, ""] = eqx.field(converter=si)
    shard_overlap: Float[Array, ""] = eqx.field(converter=si)
    bubble_factor: Float[Array, ""] = eqx.field(converter=si)
    optimizer_traffic: Float[Array, ""] = eqx.field(converter=si)
    offload_exposed: Float[Array, ""] = eqx.field(converter=si)
    step_overhead: Float[Array, ""] = eqx.field(converter=si)
    scale_jitter: Float[Array, ""] = eqx.field(converter=si)
    activation_memory: Float[Array, ""] = eqx.field(converter=si)
    selective_memory: Float[Array, ""] = eqx.field(converter=si)
    low_precision_storage: Float[Array, ""] = eqx.field(converter=si)
    working_layers: Float[Array, ""] = eqx.field(converter=si)
    logit_bytes: Float[Array, ""] = eqx.field(converter=si)
    memory_overhead: Float[Array, ""] = eqx.field(converter=si)
    memory_fixed: Float[Array, ""] = eqx.field(converter=si)
