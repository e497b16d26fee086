"""Durations of the pieces of a pass, from the same cost functions as `train_step`.

`train_step` needs the time of a micro-batch as a whole; a timeline needs forward and backward apart, and of every transfer the part that
blocks (what the fitted exposure of the stack leaves) and the part that runs beside compute. The pieces of a micro-batch's blocking time
add up to what `train_step` charges for it.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...cost.collective import point_to_point_time
from ...hardware import System
from ...parallel._memory import stage_memory
from ...parallel._plan import Plan, num_microbatches
from ...parallel._shard import layer_work, sequence_split
from ...smooth import safe_divide
from ...stack import Stack
from ...workload import Transformer
from .._layer import ELEMENTWISE_BACKWARD, LayerTime, layer_time, matmuls_time, rates
from .._train import exposed_gather_time, exposed_reduce_time, gradient_reduce_time, optimizer_time, parameter_gather_time, vocabulary_time


class PassTimes(NamedTuple):
    """One pass of one micro-batch through all layers of a pipeline rank. [s]

    Attributes:
      layers: matmuls, norms, launch waits, without attention core and routed experts.
      attention: attention core.
      experts: routed experts' matmuls.
      vocabulary: output matrix and loss, the part every stage is charged.
      tensor, context, expert, pipeline: transfers that block.
      tensor_beside, context_beside, expert_beside, pipeline_beside: transfers that run beside compute.
      offload: host transfers that block.
    """

    layers: Float[Array, ""]
    attention: Float[Array, ""]
    experts: Float[Array, ""]
    vocabulary: Float[Array, ""]
    tensor: Float[Array, ""]
    context: Float[Array, ""]
    expert: Float[Array, ""]
    pipeline: Float[Array, ""]
    tensor_beside: Float[Array, ""]
    context_beside: Float[Array, ""]
    expert_beside: Float[Array, ""]
    pipeline_beside: Float[Array, ""]
    offload: Float[Array, ""]


class StepTimes(NamedTuple):
    """Everything a step is made of, on one rank. [s]

    Attributes:
      forward, backward: passes; `backward` is the input gradient alone.
      weight: weight gradient of a micro-batch.
      recompute: forward work repeated in the backward pass of a micro-batch, with its communication.
      gather, scatter: sharded parameters once gathered, their gradients once scattered, per step in a pipeline, else per micro-batch.
      gather_exposed: part of both that blocks, as `train_step` has it. [1]
      reduce, update: gradient reduction, and gathering of updated parameters, per step.
      reduce_exposed: part of both that `train_step` does not hide. [1]
      optimizer, host: optimizer step, host transfers of its states.
      overhead: fixed time per step.
    """

    forward: PassTimes
    backward: PassTimes
    weight: Float[Array, ""]
    recompute: Float[Array, ""]
    gather: Float[Array, ""]
    scatter: Float[Array, ""]
    gather_exposed: Float[Array, ""]
    reduce: Float[Array, ""]
    reduce_exposed: Float[Array, ""]
    update: Float[Array, ""]
    optimizer: Float[Array, ""]
    host: Float[Array, ""]
    overhead: Float[Array, ""]


def step_times(model: Transformer, system: System, plan: Plan, stack: Stack) -> StepTimes:
    """Pieces of a step on one rank; pure and differentiable in all four arguments."""
    p, v = plan.pipeline_parallel, plan.virtual_stages
    count = model.blocks.count
    work = layer_work(model, plan)
    on_rank = lambda part: jnp.sum(count * part) / p

    parts = layer_time(model, system, plan, stack, work)
    one_way = _forward(model, system, plan, stack, work, parts)
    whole = layer_time(model, system, _with(plan, overlap_tensor=0.0), _with(stack, context_exposed=1.0, expert_exposed=1.0), work)  # nothing hidden
    beside = LayerTime(*(jnp.maximum(all_ - exposed, 0.0) for all_, exposed in zip(whole, parts, strict=True)))

    latency = work.tensor_collectives * stack.collective_latency * jnp.log2(plan.tensor_parallel)
    context_passes = 3 - plan.context_all_to_all
    factor = stack.layer_factor * stack.frozen_factor ** (1 - plan.trainable)
    experts = factor * matmuls_time(work.experts, rates(system, stack, plan).expert, rates(system, stack, plan), stack, grouped=True)

    vocabulary = vocabulary_time(model, system, plan, stack) * jnp.where(p > 1, stack.vocabulary_share, 1.0)
    message = 2 * plan.micro_batch_size * model.seq_len / plan.context_parallel * model.hidden / sequence_split(plan)
    stride = plan.tensor_parallel * plan.context_parallel * plan.data_parallel
    send = jnp.where(p > 1, v * point_to_point_time(system, message, stride, p), 0.0)
    exposed_send = 1 - plan.overlap_pipeline * (1 - stack.pipeline_exposed)
    offload = plan.activation_offload * jnp.sum(count) / p * message / system.host.link_bandwidth * stack.offload_exposed

    def one_pass(layers, attention, experts, vocabulary, share):
        """`share`: this pass's part of context-parallel traffic, which is threefold for a ring."""
        return PassTimes(
            layers=on_rank(layers),
            attention=on_rank(attention),
            experts=on_rank(experts),
            vocabulary=vocabulary,
            tensor=on_rank(one_way.tensor),
            context=on_rank(parts.context * share),
            expert=on_rank(parts.expert / 2),
            pipeline=exposed_send * send,
            tensor_beside=on_rank(beside.tensor / 2),
            context_beside=on_rank(beside.context * share),
            expert_beside=on_rank(beside.expert / 2),
            pipeline_beside=(1 - exposed_send) * send,
            offload=offload,
        )

    back = lambda name: getattr(parts, name) - getattr(one_way, name)
    weight = plan.trainable * one_way.matmul
    forward = one_pass(one_way.matmul - experts + one_way.elementwise + one_way.launch, one_way.attention, experts, vocabulary / (2 + plan.trainable),
                       1 / context_passes)  # fmt: skip
    input_gradient = back("matmul") - weight - experts + back("elementwise") + back("launch")
    backward = one_pass(input_gradient, back("attention"), experts, vocabulary * (1 + plan.trainable) / (2 + plan.trainable), 1 - 1 / context_passes)

    compute = sum(on_rank(part) for part in parts) + vocabulary + 2 * exposed_send * send  # of a micro-batch
    exposed_gather, exposed_reduce = (of(model, system, plan, stack, compute) for of in (exposed_gather_time, exposed_reduce_time))
    gathered = parameter_gather_time(model, system, plan, stack)
    traffic = gathered * jnp.where(p > 1, num_microbatches(plan), 1.0)
    nbytes = 2 * plan.weight_bytes + 2 * stack.gradient_traffic * plan.trainable
    reduce = gradient_reduce_time(model, system, plan, stack)
    update = gradient_reduce_time(model, system, _with(plan, gradient_bytes=0.0), stack)
    optimizer, host = optimizer_time(model, system, plan, stack)
    return StepTimes(
        forward=forward,
        backward=backward,
        weight=on_rank(weight),
        recompute=on_rank(parts.recompute + latency * plan.recompute_full),
        gather=traffic * safe_divide(plan.weight_bytes, nbytes),
        scatter=traffic * safe_divide(2 * stack.gradient_traffic * plan.trainable, nbytes),
        gather_exposed=jnp.clip(safe_divide(exposed_gather, gathered), 0.0, 1.0),  # it is, but for rounding
        reduce=reduce - update,
        reduce_exposed=safe_divide(exposed_reduce, reduce),
        update=update,
        optimizer=optimizer,
        host=host,
        overhead=stack.step_overhead,
    )


def _with(tree, **leaves):
    """The pytree with other leaves."""
    return eqx.tree_at(lambda t: [getattr(t, name) for name in leaves], tree, [jnp.asarray(value, float) for value in leaves.values()])


def _forward(model, system, plan, stack, work, parts: LayerTime) -> LayerTime:
    """The forward pass of a layer, in the parts of `LayerTime`: a pass costs what recomputing it would, which gives the attention core."""
    latency = work.tensor_collectives * stack.collective_latency * jnp.log2(plan.tensor_parallel)
    again = layer_time(model, system, _with(plan, recompute_full=1.0, recompute_selective=0.0), stack, work).recompute
    matmul = parts.matmul / (2 + plan.trainable)
    elementwise = parts.elementwise / (1 + ELEMENTWISE_BACKWARD)
    tensor = (parts.tensor - latency * (2 + plan.recompute_full)) / 2
    context, expert = parts.context / (3 - plan.context_all_to_all), parts.expert / 2
    attention = jnp.maximum(again - matmul - elementwise - tensor - context - expert, 0.0)  # a layer without attention leaves rounding
    busy = matmul + attention + elementwise + tensor + context + expert
    device = sum(parts) - parts.launch - parts.recompute - latency * (2 + plan.recompute_full)
    return LayerTime(
        matmul=matmul,
        attention=attention,
        elementwise=elementwise,
        tensor=tensor + latency,
        context=context,
        expert=expert,
        launch=parts.launch * safe_divide(busy, device),
        recompute=jnp.zeros_like(matmul),
    )


class StageActivations(NamedTuple):
    """Memory of every pipeline rank: what is there all the step, and what one micro-batch adds from its forward to its backward pass. [B]"""

    base: Float[Array, " ranks"]
    micro_batch: Float[Array, " ranks"]


def stage_activations(model: Transformer, plan: Plan, stack: Stack, ranks: int) -> StageActivations:
    """Memory of each pipeline rank, split by whether it grows with the micro-batches in flight; the working set of a backward pass counts as
    there all the time. [B]"""
    padded = max(16, 1 << (ranks - 1).bit_length())  # one compilation for most pipelines
    base, one = _stage_memory(model, plan, stack, jnp.minimum(jnp.arange(padded), ranks - 1).astype(float))
    return StageActivations(base[:ranks], one[:ranks] - base[:ranks])


@jax.jit
def _stage_memory(model, plan, stack, stages):
    """Totals per stage without, and with, the activations of one micro-batch. [B]"""
    alone = _with(plan, global_batch_size=plan.data_parallel * plan.micro_batch_size)  # one micro-batch: one in flight
    total = lambda layout: jax.vmap(lambda stage: sum(stage_memory(model, layout, stack, stage)))(stages)
    return total(_with(alone, activation_offload=1.0)), total(alone)
