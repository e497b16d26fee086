"""Time of one layer and one micro-batch on one device, forward and backward, from sharded work, chip and stack.

Device time is the sum of its operators; a layer whose operators are short waits for the host instead, so layer time is the 4-norm of
device and launch time. Collective latencies come on top: they synchronise ranks and hide under neither.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..cost import attention_time, matmul_time, streaming_time
from ..cost.collective import exchange_latency, expert_exchange_time_per_byte, fill_time, group_rate, ring_latency
from ..hardware import DATATYPES, LOW_PRECISION, System
from ..parallel._plan import Plan
from ..parallel._shard import LayerWork, Matmuls
from ..smooth import pnorm, safe_divide
from ..stack import Stack
from ..workload import Transformer

PEAK_NORM = 12.0  # how sharply rates stay below the datasheet peak
ELEMENTWISE_BACKWARD = 1.3  # backward over forward traffic of norms, residuals and activations; not identified by whole-step times
UNFUSED_PASSES = 2.0  # score matrices are streamed once forward and once backward, and once more when recomputed


class LayerTime(NamedTuple):
    """Parts of the time of one layer of each kind for one micro-batch, all passes; shape (kinds,). [s]"""

    matmul: Float[Array, " kinds"]
    attention: Float[Array, " kinds"]
    elementwise: Float[Array, " kinds"]
    tensor: Float[Array, " kinds"]
    context: Float[Array, " kinds"]
    expert: Float[Array, " kinds"]
    launch: Float[Array, " kinds"]
    recompute: Float[Array, " kinds"]


class Rates(NamedTuple):
    """Rates of a chip under a stack and a precision [FLOP/s], its memory rate [B/s], and its processors [1]."""

    linear: Float[Array, ""]
    expert: Float[Array, ""]
    high: Float[Array, ""]
    attention: Float[Array, ""]
    memory: Float[Array, ""]
    processors: Float[Array, ""]


def high_precision(plan: Plan) -> Float[Array, " datatypes"]:
    """Weights over `DATATYPES` of what stays out of 8- and 4-bit: attention core and output matrix run in bf16 there."""
    low = jnp.array(LOW_PRECISION)
    return plan.precision * (1 - low) + (plan.precision @ low) * jnp.array([float(name == "bf16") for name in DATATYPES])


def rates(system: System, stack: Stack, plan: Plan) -> Rates:
    """Rates of linear layers, experts, 16-bit matmuls and attention [FLOP/s] and of memory [B/s].

    Time per FLOP is the 12-norm of what chip and stack achieve and of the datasheet peak, so no product of factors beats the chip; a share
    of 0.8 becomes 0.795, and one of 1 becomes 0.94.
    """
    chip = system.chip
    low = plan.precision @ jnp.array(LOW_PRECISION)
    achieved = chip.peak_flops_per_s * chip.matmul_efficiency
    high = high_precision(plan)
    spent = lambda weights, rate: jnp.sum(safe_divide(weights, rate))  # time per FLOP of a mix of datatypes
    limit, limit_high = spent(plan.precision, chip.peak_flops_per_s), spent(high, chip.peak_flops_per_s)
    linear = spent(plan.precision, achieved) / (stack.matmul_factor * stack.low_precision_factor**low)
    expert = linear / (stack.expert_factor * stack.expert_low_precision_factor**low)
    attention = limit_high / (chip.attention_efficiency * stack.attention_factor)
    bounded = lambda per_flop, least: safe_divide(1.0, pnorm(per_flop, least, PEAK_NORM))
    return Rates(
        linear=bounded(linear, limit),
        expert=bounded(expert, limit),
        high=bounded(spent(high, achieved) / stack.matmul_factor, limit_high),
        attention=bounded(attention, limit_high),
        memory=chip.memory_bandwidth * chip.memory_efficiency,
        processors=chip.num_processors,
    )


def matmuls_time(work: Matmuls, rate: Float[Array, ""], r: Rates, stack: Stack, grouped: bool = False) -> Float[Array, " kinds"]:
    """Summed time of a layer's matmuls, one pass; grouped ones run as one kernel and share its last wave. [s]"""
    processors = safe_divide(r.processors, work.count) if grouped else r.processors
    one = matmul_time(work.m, work.k, work.n, rate, r.memory, stack.weight_traffic, stack.activation_traffic, processors)
    return jnp.sum(one * work.count, axis=0)


def layer_time(model: Transformer, system: System, plan: Plan, stack: Stack, work: LayerWork) -> LayerTime:
    """Time of one layer of each kind for one micro-batch, split by cause; the parts add up to it. [s]"""
    b = model.blocks
    r = rates(system, stack, plan)
    low = plan.precision @ jnp.array(LOW_PRECISION)
    t = plan.tensor_parallel
    passes_back = 1 + plan.trainable  # input gradient always, weight gradient of what is trained
    has_experts = (b.num_experts > 0) * 1.0

    linear = matmuls_time(work.dense, r.linear, r, stack) + matmuls_time(work.experts, r.expert, r, stack, grouped=True)
    fused = attention_time(work.attention_flops, work.head_dim, r.attention, stack.attention_head_half)
    core = fused + safe_divide(work.mixer_flops, r.high)
    unfused_pass = streaming_time(stack.score_bytes * work.score_pairs, r.memory)
    unfused_flops = safe_divide(4 * work.score_pairs * work.head_dim, r.high)
    streamed = stack.elementwise_bytes * (work.residual_elements + work.hidden_elements / 8)
    streamed = streamed + stack.cast_bytes * low * work.tokens * model.hidden + stack.permute_bytes * work.routed_elements
    elementwise = streaming_time(streamed, r.memory)

    transfer = work.tensor_collectives * 2 * (t - 1) / t * work.tensor_nbytes / group_rate(system, t)
    messages = 2 * work.tensor_collectives  # an all-reduce, or a scatter and a gather
    transfer = transfer + messages * fill_time(safe_divide(transfer, messages), ring_latency(system, t))
    exposed = 1 - plan.overlap_tensor * (1 - stack.tensor_exposed)
    tensor = exposed * transfer
    latency = work.tensor_collectives * stack.collective_latency * jnp.log2(t)
    ring = (plan.context_parallel - 1) * work.context_nbytes
    # all-to-all: queries, keys, values and outputs leave once forward and once backward; a ring sends keys and values and, backward, their gradients too
    exchange = (work.context_nbytes + 4 * work.tokens * b.num_heads * work.head_dim / t) * (1 - 1 / plan.context_parallel)
    context_nbytes = ring + plan.context_all_to_all * (exchange - ring)
    context_passes = 3 - plan.context_all_to_all
    context = stack.context_exposed * context_nbytes / group_rate(system, plan.context_parallel, t)
    per_byte = expert_exchange_time_per_byte(system, plan.expert_parallel, b.experts_per_token, t)
    steps = (work.expert_nbytes > 0) * exchange_latency(system, plan.expert_parallel, t)
    expert = stack.expert_exposed * 2 * (work.expert_nbytes * per_byte + steps)

    fuse = plan.fused_attention
    unfused_forward = unfused_flops + unfused_pass
    attention_forward = fuse * core + (1 - fuse) * unfused_forward
    attention = fuse * core * (1 + stack.attention_backward_ratio) + (1 - fuse) * (3 * unfused_flops + UNFUSED_PASSES * unfused_pass)
    full, selective = plan.recompute_full, plan.recompute_selective
    # selective recompute repeats the unfused core; a fused core recomputes inside its backward kernel and is counted there
    again = full * (linear + attention_forward + elementwise + tensor + expert + context) + selective * (1 - fuse) * unfused_forward

    factor = stack.layer_factor * stack.frozen_factor ** (1 - plan.trainable)
    parts = LayerTime(
        matmul=factor * linear * (1 + passes_back),
        attention=factor * attention,
        elementwise=factor * elementwise * (1 + ELEMENTWISE_BACKWARD),
        tensor=factor * tensor * 2 + latency * (2 + full),
        context=factor * context * context_passes,
        expert=factor * expert * 2,
        launch=jnp.zeros_like(linear),
        recompute=factor * again,
    )
    device = sum(parts) - latency * (2 + full)
    launch = stack.launch_time * (1 + full * (stack.launch_recompute - 1)) * (1 + has_experts * (stack.launch_expert - 1))
    return parts._replace(launch=pnorm(device, launch, 4.0) - device)
