"""Memory of one device, by pipeline stage.

Model states after Rajbhandari et al. 2020 (arXiv:1910.02054), stored activations after Korthikanti et al. 2022 (arXiv:2205.05198, section
4) with the terms of fused attention, gated feed-forward parts and routed experts. Leaves out allocator behaviour beyond one factor.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..hardware import LOW_PRECISION
from ..smooth import safe_divide
from ..stack import Stack
from ..workload import Transformer
from ..workload._transformer import dense_parameters, expert_parameters, num_layers
from ._plan import Plan
from ._schedule import in_flight, parameter_copies
from ._shard import data_ranks, sequence_split


class StageMemory(NamedTuple):
    """Memory of one device of one pipeline stage at its peak. [B]"""

    weights: Float[Array, ""]
    gradients: Float[Array, ""]
    optimizer: Float[Array, ""]
    activations: Float[Array, ""]
    logits: Float[Array, ""]
    gathered: Float[Array, ""]
    reserved: Float[Array, ""]


def layer_activation_bytes(model: Transformer, plan: Plan, stack: Stack) -> Float[Array, " kinds"]:
    """Activations that one layer keeps for its backward pass, per micro-batch, without recomputation. [B]

    Per token, 2 bytes each: inputs of two norms and of attention and feed-forward part (4 h), queries, keys, values and attention output,
    what lies between the feed-forward matrices (input and output of the activation, and the product of a gated one), inputs and outputs of
    routed experts; plus, for unfused attention, scores, softmax and its dropout mask (5 bytes per pair and head) and two dropout masks
    (2 h). For multi-head attention and a plain 4 h feed-forward part this is equation 1 of Korthikanti et al., `s b h (34 + 5 a s / h)`.
    With 8-bit matmuls and `Stack.low_precision_storage` the operands of the linear layers are kept in 1 byte (Transformer Engine).
    """
    b, h = model.blocks, model.hidden
    t, ts = plan.tensor_parallel, sequence_split(plan)
    s = model.seq_len * b.seq_share
    tokens = plan.micro_batch_size * s / plan.context_parallel
    heads = b.num_heads * (b.qk_head_dim + b.v_head_dim) + b.num_kv_heads * (b.qk_head_dim + b.v_head_dim)
    latent = b.query_rank + b.kv_rank + b.rope_dim
    mixer = 2 * b.mixer_parameters / h  # a scan keeps its projected inputs
    width = b.ffn_hidden + b.shared_hidden + b.experts_per_token * b.expert_hidden
    routed = 4 * h * b.experts_per_token * (b.num_experts > 0)
    scores = 5 * b.num_heads * s / plan.context_parallel
    fused, narrow = plan.fused_attention, stack.low_precision_storage * (plan.precision @ jnp.array(LOW_PRECISION))
    per_token = 8 * h / ts + (2 * (heads + latent) + mixer + 2 * b.ffn_matrices * width) / t + routed
    per_token = per_token - narrow * (2 * h / ts + (b.num_heads * b.v_head_dim + width) / t + routed / 4)
    unfused = (1 - plan.recompute_selective) * scores / t + 2 * h / ts  # with two dropout masks of 1 byte, as trained then
    return tokens * (per_token + (1 - fused) * unfused)


def stage_layers(model: Transformer, plan: Plan, stage: Float[Array, ""] | float) -> Float[Array, " kinds"]:
    """Layers of each kind on pipeline rank `stage`: its even part of all layers, leading kinds on the first ranks, others mixed evenly. [1]"""
    b, p = model.blocks, plan.pipeline_parallel
    layers = num_layers(model)
    leading = jnp.sum(b.count * b.leading)
    first = jnp.clip(leading - stage * layers / p, 0.0, layers / p)  # leading layers on this rank
    mixed = layers / p - first
    share = lambda mask: safe_divide(b.count * mask, jnp.sum(b.count * mask))
    return first * share(b.leading) + mixed * share(1 - b.leading)


def stage_memory(model: Transformer, plan: Plan, stack: Stack, stage: Float[Array, ""] | float) -> StageMemory:
    """Memory of one device of pipeline rank `stage`, 0 first; stages are even parts of the layers, with the embedding on the first and
    the output matrix on the last.

    Sharded parameters (ZeRO-3) are gathered one layer ahead; in a pipeline they stay gathered, and their gradients whole, until the last
    micro-batch is done. The peak comes when the output layer holds its logits or when a layer's backward pass holds its working set.

    Returns:
      Parts at the peak of the step. [B]
    """
    b, h = model.blocks, model.hidden
    t, p, e = plan.tensor_parallel, plan.pipeline_parallel, plan.expert_parallel
    first, last = (stage == 0) * 1.0, (stage == p - 1) * 1.0
    count = stage_layers(model, plan, stage)
    copies = parameter_copies(plan)
    ends = (first + last * jnp.where((p > 1) | (model.tied == 0), 1.0, 0.0)) * model.vocab * h + first * model.extra_parameters
    dense = (jnp.sum(count * dense_parameters(model)) * copies + ends) / t
    experts = jnp.sum(count * expert_parameters(model)) / (t * e) * copies
    dense_ranks, expert_ranks = data_ranks(plan)

    def held(nbytes, shard):
        split = lambda ranks: 1 + shard * (jnp.minimum(ranks, plan.shard_group) - 1)
        return nbytes * (dense / split(dense_ranks) + experts / split(expert_ranks))

    largest = jnp.max((b.count > 0) * (dense_parameters(model) + expert_parameters(model) / e)) / t
    ahead = (plan.weight_bytes + 2.0) * 2 * largest  # this layer and the one prefetched, weights and 16-bit gradients
    whole = (plan.weight_bytes + plan.gradient_bytes * plan.trainable) * (dense + experts)
    gathered = plan.shard_parameters * jnp.where(p > 1, whole, ahead)
    tokens = plan.micro_batch_size * model.seq_len / plan.context_parallel
    per_layer = stack.activation_memory * layer_activation_bytes(model, plan, stack)
    selective = 1 + plan.recompute_selective * plan.fused_attention * (stack.selective_memory - 1)
    kept = per_layer * (1 - plan.recompute_full) * selective
    inputs = 2 * h * tokens / sequence_split(plan) * plan.recompute_full
    stored = jnp.sum(count * (kept + inputs)) * in_flight(plan, stage) * (1 - plan.activation_offload)
    again = plan.recompute_full * per_layer
    working = jnp.max((b.count > 0) * (again + stack.working_layers * per_layer))
    logits = last * stack.logit_bytes * tokens * model.vocab / t
    parts = StageMemory(
        weights=held(plan.weight_bytes, plan.shard_parameters),
        gradients=held(plan.gradient_bytes, plan.shard_gradients) * plan.trainable,
        optimizer=held(plan.optimizer_bytes, plan.shard_optimizer) * plan.trainable * (1 - plan.optimizer_offload),
        activations=stored + jnp.where(logits > working, 0.0, working),
        logits=jnp.where(logits > working, logits, 0.0),
        gathered=gathered,
        reserved=stack.memory_fixed,
    )
    return parts._replace(reserved=parts.reserved + (stack.memory_overhead - 1) * sum(parts[:-1]))


def peak_memory(model: Transformer, plan: Plan, stack: Stack) -> tuple[StageMemory, Float[Array, ""]]:
    """The stage with the highest peak, and which it is. [B], [1]

    The first stage (most micro-batches in flight, leading layers, embedding), the second (no leading layers), or the last (output matrix
    and logits): stages between the second and the last hold fewer micro-batches than the second and nothing it does not hold.
    """
    p = plan.pipeline_parallel
    stages = jnp.stack([jnp.zeros_like(p), jnp.minimum(jnp.ones_like(p), p - 1), p - 1])
    parts = [stage_memory(model, plan, stack, stages[i]) for i in range(3)]
    totals = jnp.stack([sum(x) for x in parts])
    pick = jnp.argmax(totals)
    return StageMemory(*(jnp.stack(x)[pick] for x in zip(*parts, strict=True))), stages[pick]


def fits_layers(model: Transformer, plan: Plan) -> Array:
    """True where the layers divide evenly over stages, counting embedding and output as up to two layers as Megatron-LM may."""
    layers, chunks = num_layers(model), plan.pipeline_parallel * plan.virtual_stages
    even = lambda extra: jnp.abs((layers + extra) / chunks - jnp.round((layers + extra) / chunks)) < 1e-4
    return (chunks <= layers) & (even(0.0) | even(1.0) | even(2.0))
