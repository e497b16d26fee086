"""Memory of one device, by pipeline stage.

Model states after Rajbhandari et al. 2020 (arXiv:1910.02054), stored activations after Korthikanti et al. 2022 (arXiv:2205.05198, section
4) with the terms of fused attention, gated feed-forward parts and routed experts. Leaves out allocator behaviour beyond one factor.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

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


def layer_activation_bytes(model: Transformer, plan: Plan) -> Float[Array, " kinds"]:
    """Activations that one layer keeps for its backward pass, per micro-batch, without recomputation. [B]

    Per token, 2 bytes each: inputs of two norms and of attention and feed-forward part (4 h), queries, keys, values and attention output,
    what lies between the feed-forward matrices (input and output of the activation, and the product of a gated one), inputs and outputs of
    routed experts; plus, for unfused attention, scores, softmax and its dropout mask (5 bytes per pair and head) and two dropout masks
    (2 h). For multi-head attention and a plain 4 h feed-forward part this is equation 1 of Korthikanti et al., `s b h (34 + 5 a s / h)`.
    """
    b, h = model.blocks, model.hidden
    t, ts = plan.tensor_parallel, sequence_split(plan)
    s = model.seq_len * b.seq_share
    tokens = plan.micro_batch_size * s / plan.context_parallel
    heads = b.num_heads * (b.qk_head_dim + b.v_head_dim) + b.num_kv_heads * (b.qk_head_dim + b.v_head_dim)
    mixer = 2 * b.mixer_parameters / h  # a scan keeps its projected inputs
    ffn = b.ffn_matrices * (b.ffn_hidden + b.shared_hidden + b.experts_per_token * b.expert_hidden)
    routed = 4 * h * b.experts_per_token * (b.num_experts > 0)
    scores = 5 * b.num_heads * s / plan.context_parallel
    per_token = 8 * h / ts + (2 * heads + mixer + 2 * ffn) / t + routed + (1 - plan.fused_attention) * (1 - plan.recompute_selective) * scores / t
    dropout = (1 - plan.fused_attention) * 2 * h / ts  # two masks of 1 byte, in the stacks that still trained with dropout
    return tokens * (per_token + dropout)


def stage_memory(model: Transformer, plan: Plan, stack: Stack, stage: Float[Array, ""] | float) -> StageMemory:
    """Memory of one device of pipeline rank `stage`, 0 first; stages are even parts of the layers, with the embedding on the first and
    the output matrix on the last.

    Returns:
      Parts at the peak of the step. [B]
    """
    b, h = model.blocks, model.hidden
    t, p, e = plan.tensor_parallel, plan.pipeline_parallel, plan.expert_parallel
    first, last = (stage == 0) * 1.0, (stage == p - 1) * 1.0
    copies = parameter_copies(plan)
    ends = (first + last * jnp.where((p > 1) | (model.tied == 0), 1.0, 0.0)) * model.vocab * h + first * model.extra_parameters
    dense = (jnp.sum(b.count * dense_parameters(model)) / p * copies + ends) / t
    experts = jnp.sum(b.count * expert_parameters(model)) / (t * p * e) * copies
    dense_ranks, expert_ranks = data_ranks(plan)

    def held(nbytes, shard):
        split = lambda ranks: 1 + shard * (jnp.minimum(ranks, plan.shard_group) - 1)
        return nbytes * (dense / split(dense_ranks) + experts / split(expert_ranks))

    largest = jnp.max(dense_parameters(model) + expert_parameters(model) / e) / t
    gathered = plan.shard_parameters * (plan.weight_bytes + 2.0) * 2 * largest  # this layer and the one prefetched, weights and their gradients
    tokens = plan.micro_batch_size * model.seq_len / plan.context_parallel
    per_layer = layer_activation_bytes(model, plan)
    selective = 1 + plan.recompute_selective * plan.fused_attention * (stack.selective_memory - 1)
    kept = per_layer * (1 - plan.recompute_full) * selective * stack.activation_memory
    inputs = 2 * h * tokens / sequence_split(plan) * plan.recompute_full
    stored = jnp.sum(b.count * (kept + inputs)) / p * in_flight(plan, stage)
    live = plan.recompute_full * jnp.max(per_layer * (b.count > 0)) * stack.activation_memory
    activations = (stored * (1 - plan.activation_offload) + live) * 1.0
    logits = last * 8 * tokens * model.vocab / t
    parts = StageMemory(
        weights=held(plan.weight_bytes, plan.shard_parameters),
        gradients=held(plan.gradient_bytes, plan.shard_gradients) * plan.trainable,
        optimizer=held(plan.optimizer_bytes, plan.shard_optimizer) * plan.trainable * (1 - plan.optimizer_offload),
        activations=activations,
        logits=logits,
        gathered=gathered,
        reserved=stack.memory_fixed,
    )
    return parts._replace(reserved=parts.reserved + (stack.memory_overhead - 1) * sum(parts[:-1]))


def peak_memory(model: Transformer, plan: Plan, stack: Stack) -> tuple[StageMemory, Float[Array, ""]]:
    """The stage with the highest peak, and which it is. The peak is on the first stage (most micro-batches in flight), the last one
    (logits) or, when embeddings are large, nowhere else: stages between hold fewer micro-batches than the first and no ends. [B], [1]"""
    p = plan.pipeline_parallel
    first, last = (stage_memory(model, plan, stack, stage) for stage in (jnp.zeros_like(p), p - 1))
    on_last = sum(last) > sum(first)
    chosen = StageMemory(*(jnp.where(on_last, y, x) for x, y in zip(first, last, strict=True)))
    return chosen, jnp.where(on_last, p - 1, 0.0)


def fits_layers(model: Transformer, plan: Plan) -> Array:
    """True where the layers divide evenly over stages, counting embedding and output as up to two layers as Megatron-LM may."""
    layers, chunks = num_layers(model), plan.pipeline_parallel * plan.virtual_stages
    even = lambda extra: jnp.abs((layers + extra) / chunks - jnp.round((layers + extra) / chunks)) < 1e-4
    return (chunks <= layers) & (even(0.0) | even(1.0) | even(2.0))
