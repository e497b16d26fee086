"""One training step: Plan -> sharded operators and messages -> cost of each -> schedule -> Estimate.

The pipeline is the closed form of its schedule; parameter gathering (ZeRO-3, FSDP) runs beside every micro-batch; gradient reduction runs
beside the last one and is exposed for the rest. `docs/model.md` has the equations in order with their sources.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..cost import blended_overlap, exposed_time, matmul_time, step_cost, step_energy, streaming_time
from ..cost.collective import fill_time, group_rate, point_to_point_time, ring_latency, tree_latency
from ..hardware import System
from ..parallel._check import legal
from ..parallel._memory import peak_memory
from ..parallel._plan import Plan, num_devices, num_microbatches
from ..parallel._schedule import bubble_slots
from ..parallel._shard import data_ranks, device_parameters, layer_work, sequence_split
from ..smooth import safe_divide
from ..stack import Stack
from ..workload import Transformer, forward_flops_per_sequence
from ..workload._transformer import mean_attention_span
from ._estimate import Breakdown, Estimate
from ._layer import LayerTime, high_precision, layer_time, rates

BUCKET, BUCKET_RANK = 40e6, 1e6
"""Parameters of one gradient message: the larger of the first, and the second per rank (Megatron-LM's default `--ddp-bucket-size`). [1]"""
JITTER_FREE_DEVICES = 8.0  # `Stack.scale_jitter` counts doublings beyond one node of eight


def vocabulary_time(model: Transformer, system: System, plan: Plan, stack: Stack) -> Float[Array, ""]:
    """Output matrix and loss for one micro-batch, forward and backward: 3 matmuls (2 with a frozen model) and 20 bytes per logit
    (cast, softmax, loss and its gradient in fp32), always in 16 bit. [s]"""
    r = rates(system, stack, plan)
    tokens = plan.micro_batch_size * model.seq_len / plan.context_parallel
    logits = model.vocab / plan.tensor_parallel
    matmul = matmul_time(tokens, model.hidden, logits, r.high, r.memory, stack.weight_traffic, stack.activation_traffic, r.processors)
    return stack.vocabulary_factor * ((2 + plan.trainable) * matmul + streaming_time(20 * tokens * logits, r.memory))


def _ring_time(system: System, ranks: Float[Array, ""], stride: Float[Array, ""]) -> Float[Array, ""]:
    """Time per byte of a ring all-gather or reduce-scatter of a full buffer, `(n - 1) / n / rate`. [s/B]"""
    return (ranks - 1) / ranks / group_rate(system, ranks, stride)


def parameter_gather_time(model: Transformer, system: System, plan: Plan, stack: Stack) -> Float[Array, ""]:
    """Traffic of sharded parameters for one micro-batch: gathered for the forward and the backward pass, gradients scattered once.

    Each layer is a message, which takes the steps of a ring and fills its pipeline. In a pipeline of stages parameters stay gathered (`stage_memory` counts
    that), and the traffic of a step is spread over its micro-batches. [s]
    """
    dense, experts = device_parameters(model, plan)
    dense_ranks, expert_ranks = (jnp.minimum(r, plan.shard_group) for r in data_ranks(plan))
    nbytes = 2 * plan.weight_bytes + 2 * stack.gradient_traffic * plan.trainable
    stride = plan.tensor_parallel
    moved = dense * _ring_time(system, dense_ranks, stride) + experts * _ring_time(system, expert_ranks, stride * plan.expert_parallel)
    times = jnp.where(plan.pipeline_parallel > 1, 1 / num_microbatches(plan), 1.0)
    layers = jnp.sum(model.blocks.count) / plan.pipeline_parallel
    has_experts = jnp.max((model.blocks.num_experts > 0) * 1.0)
    steps = ring_latency(system, dense_ranks, stride) + has_experts * ring_latency(system, expert_ranks, stride * plan.expert_parallel)
    messages = layers * (2 + plan.trainable)
    latency = messages * (steps + fill_time(nbytes * moved / messages, steps))
    return plan.shard_parameters * (nbytes * moved + latency) * times


def gradient_reduce_time(model: Transformer, system: System, plan: Plan, stack: Stack) -> Float[Array, ""]:
    """Traffic of gradient reduction and of gathering updated parameters, per step.

    Whole gradients (ZeRO 0): an all-reduce, twice `gradient_bytes` round the ring. Split optimizer states (ZeRO 1): reduce-scatter of the
    gradients, all-gather of the weights. Split gradients (ZeRO 2): the reduce-scatter comes with every micro-batch. Split parameters
    (ZeRO 3): only the all-reduce that hybrid sharding leaves between groups. Messages are buckets of parameters; each takes the steps of a ring where it
    is scattered or gathered, of a tree between nodes where it is reduced whole. [s]
    """
    dense, experts = device_parameters(model, plan)
    ranks, stride = data_ranks(plan), plan.tensor_parallel
    strides = (stride, stride * plan.expert_parallel)
    whole = sum(n * _ring_time(system, r, s) for n, r, s in zip((dense, experts), ranks, strides, strict=True))
    groups = [jnp.minimum(r, plan.shard_group) for r in ranks]
    between = sum(n / g * _ring_time(system, r / g, s * g) for n, r, g, s in zip((dense, experts), ranks, groups, strides, strict=True))
    times = 1 + plan.shard_gradients * (num_microbatches(plan) - 1)
    split = plan.shard_optimizer * (plan.gradient_bytes * times + plan.weight_bytes)
    nbytes = split + (1 - plan.shard_optimizer) * 2 * plan.gradient_bytes
    moved = (1 - plan.shard_parameters) * nbytes * whole + plan.shard_parameters * 2 * plan.gradient_bytes * between
    messages = lambda n, r: jnp.maximum(n / jnp.maximum(BUCKET, BUCKET_RANK * r), (n > 0) * 1.0)
    pairs = list(zip((dense, experts), ranks, strides, strict=True))
    ring = sum(messages(n, r) * ring_latency(system, r, s) for n, r, s in pairs)
    tree = sum(messages(n, r) * tree_latency(system, r, s) for n, r, s in pairs)
    reduced, gathered = (plan.gradient_bytes > 0) * times, (plan.weight_bytes > 0) * 1.0  # 0 bytes ask what the other half alone takes
    split_latency = plan.shard_optimizer * (reduced + gathered) * ring
    latency = (1 - plan.shard_parameters) * (split_latency + (1 - plan.shard_optimizer) * (plan.gradient_bytes > 0) * tree)
    return plan.trainable * (stack.gradient_traffic * moved + latency)


def exposed_gather_time(model: Transformer, system: System, plan: Plan, stack: Stack, compute: Float[Array, ""]) -> Float[Array, ""]:
    """What the traffic of `parameter_gather_time` adds to a micro-batch of `compute` seconds. [s]"""
    traffic = parameter_gather_time(model, system, plan, stack)
    return blended_overlap(compute, traffic, stack.shard_overlap * plan.overlap_parameter) - compute


def exposed_reduce_time(model: Transformer, system: System, plan: Plan, stack: Stack, compute: Float[Array, ""]) -> Float[Array, ""]:
    """What of `gradient_reduce_time` hides under no micro-batch, each of `compute` seconds; per step. [s]"""
    batches = 1 + plan.shard_gradients * (1 - plan.shard_parameters) * (num_microbatches(plan) - 1)  # micro-batches with a reduction to hide
    cover = plan.overlap_gradient * stack.data_overlap * compute / plan.virtual_stages * batches
    return exposed_time(gradient_reduce_time(model, system, plan, stack), cover)


def optimizer_time(model: Transformer, system: System, plan: Plan, stack: Stack) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Optimizer step on the device, and host transfers of offloaded states (gradients out, parameters back). [s]"""
    dense, experts = device_parameters(model, plan)
    dense_ranks, expert_ranks = data_ranks(plan)
    split = lambda ranks: 1 + plan.shard_optimizer * (jnp.minimum(ranks, plan.shard_group) - 1)
    updated = plan.trainable * (dense / split(dense_ranks) + experts / split(expert_ranks))
    traffic = 2 * plan.optimizer_bytes + plan.gradient_bytes + plan.weight_bytes
    on_device = streaming_time(stack.optimizer_traffic * traffic * updated * (1 - plan.optimizer_offload), rates(system, stack, plan).memory)
    host = system.host
    transfer = (plan.gradient_bytes + plan.weight_bytes) / host.link_bandwidth + 2 * plan.optimizer_bytes / host.memory_bandwidth
    return on_device, stack.offload_exposed * plan.optimizer_offload * updated * transfer


def train_step(model: Transformer, system: System, plan: Plan, stack: Stack) -> Estimate:
    """Predicts one training step.

    A pure function of four pytrees of numbers: it may be jitted, batched over any of them and differentiated in every leaf. It does not
    raise for a plan that cannot run; `Estimate.feasible` says so, and `check_plan` says why.

    Args:
      model: the network.
      system: the cluster.
      plan: how the one is laid out on the other.
      stack: what the software achieves.
    Returns:
      The estimate; all leaves of shape ().
    """
    p, v, m = plan.pipeline_parallel, plan.virtual_stages, num_microbatches(plan)
    devices = num_devices(plan)
    count = model.blocks.count
    work = layer_work(model, plan)
    per_stage = LayerTime(*(jnp.sum(count * part) / p for part in layer_time(model, system, plan, stack, work)))
    vocabulary = vocabulary_time(model, system, plan, stack) * jnp.where(p > 1, stack.vocabulary_share, 1.0)
    tokens = plan.micro_batch_size * model.seq_len / plan.context_parallel
    exposed_p2p = 1 - plan.overlap_pipeline * (1 - stack.pipeline_exposed)
    message = 2 * tokens * model.hidden / sequence_split(plan)
    stride = plan.tensor_parallel * plan.context_parallel * plan.data_parallel
    pipeline = jnp.where(p > 1, exposed_p2p * 2 * v * point_to_point_time(system, message, stride, p), 0.0)
    offloaded = 2 * plan.activation_offload * jnp.sum(count) / p * message / system.host.link_bandwidth * stack.offload_exposed

    compute = sum(per_stage) + vocabulary + pipeline
    gather = exposed_gather_time(model, system, plan, stack, compute)
    reduce = exposed_reduce_time(model, system, plan, stack, compute)
    micro_batch = compute + gather + offloaded
    optimizer, host = optimizer_time(model, system, plan, stack)
    put_off = safe_divide(plan.trainable * per_stage.matmul, (2 + plan.trainable) * micro_batch)  # weight gradients: one of three passes of the matmuls
    bubble = stack.bubble_factor * bubble_slots(plan, put_off) * micro_batch
    plain = m * micro_batch + bubble + reduce + optimizer + host + stack.step_overhead
    jitter = plain * stack.scale_jitter * jnp.log2(jnp.maximum(devices / JITTER_FREE_DEVICES, 1.0))
    step_time = plain + jitter

    breakdown = Breakdown(
        matmul=m * per_stage.matmul,
        attention=m * per_stage.attention,
        elementwise=m * per_stage.elementwise,
        recompute=m * per_stage.recompute,
        vocabulary=m * vocabulary,
        launch=m * per_stage.launch,
        tensor=m * per_stage.tensor,
        context=m * per_stage.context,
        expert=m * per_stage.expert,
        pipeline=m * pipeline,
        data=m * gather + reduce,
        bubble=bubble,
        optimizer=optimizer,
        offload=m * offloaded + host,
        overhead=stack.step_overhead,
        jitter=jitter,
    )
    memory, stage = peak_memory(model, plan, stack)
    peak = sum(memory)

    forward = forward_flops_per_sequence(model) * plan.global_batch_size
    model_flops = (2 + plan.trainable) * forward
    hardware_flops = model_flops + plan.recompute_full * (forward - 2 * model.seq_len * model.vocab * model.hidden * plan.global_batch_size)
    chip = system.chip
    peak_rate = safe_divide(1.0, jnp.sum(safe_divide(plan.precision, chip.peak_flops_per_s)))
    step_tokens = plan.global_batch_size * model.seq_len
    busy = breakdown.matmul + breakdown.attention + breakdown.elementwise + breakdown.recompute + breakdown.vocabulary + optimizer
    return Estimate(
        step_time=step_time,
        tokens_per_s=step_tokens / step_time,
        tokens_per_s_per_device=step_tokens / step_time / devices,
        mfu=_share(model_flops, devices, step_time, peak_rate),
        hfu=_share(hardware_flops, devices, step_time, peak_rate),
        breakdown=breakdown,
        memory=memory,
        peak_memory=peak,
        peak_stage=stage,
        memory_capacity=chip.memory_capacity,
        energy=step_energy(system, devices, step_time, busy),
        cost=step_cost(system, devices, step_time),
        lower_bound=step_lower_bound(model, system, plan),
        feasible=legal(model, system, plan) & (peak <= chip.memory_capacity),
    )


def _share(flops, devices, step_time, peak_rate):
    return safe_divide(flops / devices / step_time, peak_rate)


def step_lower_bound(model: Transformer, system: System, plan: Plan) -> Float[Array, ""]:
    """Time no implementation of this plan can beat: the FLOP of the step at datasheet peak (layers at the plan's precision, attention core
    and output matrix in 16 bit), with the plan's recomputation. Communication and memory may hide entirely. [s]"""
    chip, b = system.chip, model.blocks
    s = model.seq_len * b.seq_share
    per_flop = jnp.sum(safe_divide(plan.precision, chip.peak_flops_per_s))
    per_flop_high = jnp.sum(safe_divide(high_precision(plan), chip.peak_flops_per_s))
    core = jnp.sum(b.count * s * 2 * (mean_attention_span(model) + b.cross_seq_len) * b.num_heads * (b.qk_head_dim + b.v_head_dim))
    vocabulary = 2 * model.seq_len * model.vocab * model.hidden
    linear = forward_flops_per_sequence(model) - core - vocabulary
    passes = 2 + plan.trainable
    layers = (passes + plan.recompute_full) * (linear * per_flop + core * per_flop_high)
    return plan.global_batch_size / num_devices(plan) * (layers + passes * vocabulary * per_flop_high)
