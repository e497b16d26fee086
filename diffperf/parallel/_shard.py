"""What one device computes and sends for one layer and one micro-batch under a plan: shapes, bytes and counts, no times.

Column-parallel matmuls split their output width, row-parallel ones their input width over the tensor-parallel ranks (Shoeybi et al. 2019,
arXiv:1909.08053); context parallelism splits tokens; expert parallelism spreads experts and their tokens evenly (balanced routing).
Axes: matrices of a layer first, then kinds of layer.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..smooth import safe_divide
from ..workload import Transformer
from ..workload._transformer import dense_parameters, expert_parameters, mean_attention_span
from ._plan import Plan


class Matmuls(NamedTuple):
    """Matrix products `C[m, n] = A[m, k] B[k, n]`, each done `count` times; leaves broadcast to shape (matrices, kinds)."""

    m: Float[Array, "..."]
    k: Float[Array, "matrices kinds"]
    n: Float[Array, "matrices kinds"]
    count: Float[Array, "..."]


class LayerWork(NamedTuple):
    """One layer of each kind, one device, one micro-batch, one forward pass; leaves have shape (kinds,) but for the matmuls.

    Attributes:
      tokens: tokens of the micro-batch on this device, before tensor parallelism. [1]
      dense: projections, dense and shared feed-forward part, router, mixer.
      experts: routed experts.
      attention_flops: fused attention core: causal pairs only. [FLOP]
      score_pairs: query-key pairs times heads, without causal halving, for unfused attention. [1]
      head_dim: mean of query and value width. [1]
      mixer_flops: scans of mixers that replace attention. [FLOP]
      residual_elements: elements of the residual stream that norms and additions touch. [1]
      hidden_elements: elements between the matrices of the feed-forward part, those that an activation function touches. [1]
      routed_elements: elements that are permuted to experts and back. [1]
      tensor_nbytes: buffer of one tensor-parallel all-reduce (or gather and scatter). [B]
      tensor_collectives: how many of them in one pass. [1]
      context_nbytes: key and value bytes of one rank that travel round the context-parallel ranks. [B]
      expert_nbytes: bytes of tokens that this device sends to experts, and as many back. [B]
    """

    tokens: Float[Array, " kinds"]
    dense: Matmuls
    experts: Matmuls
    attention_flops: Float[Array, " kinds"]
    score_pairs: Float[Array, " kinds"]
    head_dim: Float[Array, " kinds"]
    mixer_flops: Float[Array, " kinds"]
    residual_elements: Float[Array, " kinds"]
    hidden_elements: Float[Array, " kinds"]
    routed_elements: Float[Array, " kinds"]
    tensor_nbytes: Float[Array, " kinds"]
    tensor_collectives: Float[Array, " kinds"]
    context_nbytes: Float[Array, " kinds"]
    expert_nbytes: Float[Array, " kinds"]


def sequence_split(plan: Plan) -> Float[Array, ""]:
    """Ranks that share the tokens of norms and residuals: `tensor_parallel` with sequence parallelism, else 1; blends in between. [1]"""
    return 1 + plan.sequence_parallel * (plan.tensor_parallel - 1)


def layer_work(model: Transformer, plan: Plan) -> LayerWork:
    """The work of one layer of each kind on one device for one micro-batch, forward."""
    b, h = model.blocks, model.hidden
    t, c, e = plan.tensor_parallel, plan.context_parallel, plan.expert_parallel
    tokens = plan.micro_batch_size * model.seq_len * b.seq_share / c
    wide = jnp.ones_like(b.count) * h
    heads = b.num_heads * b.qk_head_dim / t
    latent = b.kv_rank > 0
    twice = jnp.where(b.cross_seq_len > 0, 2.0, 1.0)
    direct_kv = b.num_kv_heads * (b.qk_head_dim + b.v_head_dim) / t
    projection = jnp.where(b.query_rank > 0, 0.0, heads) + jnp.where(latent, 0.0, direct_kv)
    ffn = (b.ffn_hidden + b.shared_hidden) / t
    dense = Matmuls(
        m=tokens,
        # fmt: off
        k=jnp.stack([wide, wide, b.query_rank, wide, b.kv_rank, b.num_heads * b.v_head_dim / t, wide, ffn, wide]),
        n=jnp.stack([projection, b.query_rank, heads, jnp.where(latent, b.kv_rank + b.rope_dim, 0.0),
                     b.num_heads * (b.qk_head_dim - b.rope_dim + b.v_head_dim) / t, wide, (b.ffn_matrices - 1) * ffn, wide,
                     b.mixer_parameters / h / t + b.num_experts]),
        # fmt: on
        count=jnp.stack([twice] * 6 + [jnp.ones_like(twice)] * 3),
    )
    routed = tokens * b.experts_per_token
    local_experts = safe_divide(b.num_experts, e)
    experts = Matmuls(
        m=safe_divide(routed, local_experts),
        k=jnp.stack([wide, b.expert_hidden / t]),
        n=jnp.stack([(b.ffn_matrices - 1) * b.expert_hidden / t, wide]),
        count=local_experts,
    )
    keys = mean_attention_span(model) + b.cross_seq_len
    all_keys = jnp.minimum(b.window, model.seq_len * b.seq_share) + b.cross_seq_len
    kv_width = jnp.where(latent, b.kv_rank + b.rope_dim, b.num_kv_heads * (b.qk_head_dim + b.v_head_dim) / t)
    return LayerWork(
        tokens=tokens,
        dense=dense,
        experts=experts,
        attention_flops=2 * tokens * keys * b.num_heads * (b.qk_head_dim + b.v_head_dim) / t,
        score_pairs=tokens * all_keys * b.num_heads / t,
        head_dim=(b.qk_head_dim + b.v_head_dim) / 2,
        mixer_flops=tokens * b.mixer_flops_per_token / t,
        residual_elements=tokens * h / sequence_split(plan),
        hidden_elements=tokens * (b.ffn_matrices - 1) * (b.ffn_hidden + b.shared_hidden + b.experts_per_token * b.expert_hidden) / t,
        routed_elements=routed * h,
        tensor_nbytes=2 * tokens * h,
        tensor_collectives=2 - b.parallel + (b.cross_seq_len > 0),
        context_nbytes=2 * tokens * kv_width,
        expert_nbytes=2 * tokens * h * (b.num_experts > 0) / t,
    )


def device_parameters(model: Transformer, plan: Plan) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weights held by one device before sharding over data-parallel ranks: dense ones (a pipeline stage's even part of layers and
    embeddings) and routed experts. [1]

    Embedding and output matrix are averaged over the stages; `stage_memory` puts them on the first and the last one.
    """
    t, p, e = plan.tensor_parallel, plan.pipeline_parallel, plan.expert_parallel
    ends = model.vocab * model.hidden * (2 - model.tied) + model.extra_parameters
    dense = jnp.sum(model.blocks.count * dense_parameters(model)) + ends
    experts = jnp.sum(model.blocks.count * expert_parameters(model))
    return dense / (t * p), experts / (t * p * e)


def data_ranks(plan: Plan) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Ranks that hold the same dense weights, and those that hold the same experts. [1]"""
    ranks = plan.data_parallel * plan.context_parallel
    return ranks, jnp.maximum(ranks / plan.expert_parallel, 1.0)
