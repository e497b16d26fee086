"""The transformer family as numbers: what is computed, independent of any machine.

A model is a stack of a few kinds of layer (`Blocks`, leaves with a leading axis of kinds), each with its count. Every number is a traced
leaf, so one compiled function serves every model with the same number of kinds; `pad_kinds` brings models to a common number.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._arrays import si
from ..smooth import safe_divide


class Blocks(eqx.Module):
    """Kinds of layer; each leaf has shape (kinds,).

    Attributes:
      count: layers of this kind. [1]
      num_heads: query heads; 0 for a layer without softmax attention. [1]
      num_kv_heads: key/value heads (grouped-query attention), equal to `num_heads` for multi-head attention. [1]
      qk_head_dim: width of a query or key head, for multi-head latent attention with its rotary part. [1]
      v_head_dim: width of a value head. [1]
      query_rank: width of the compressed query, multi-head latent attention; 0 for a direct projection. [1]
      kv_rank: width of the compressed key/value, multi-head latent attention; 0 for none. [1]
      rope_dim: width of the shared rotary key, multi-head latent attention; 0 for none. [1]
      window: keys seen by a query with sliding-window attention; inf for all. A chunk counts as a window, which errs high (a query
        sees half a chunk on average). [1]
      causal: 1 for a causal mask, 0 for bidirectional attention. [1]
      cross_seq_len: keys of a second, cross-attention sub-layer (same heads); 0 for none. Its key/value projection is counted per
        position of this kind, which is exact where both sequences are equally long; `with_seq_len` leaves it. [1]
      seq_share: positions of this kind per position of `Transformer.seq_len` (encoder against decoder). [1]
      ffn_hidden: width of the dense feed-forward part; 0 for none. [1]
      ffn_matrices: 3 for a gated, 2 for a plain feed-forward part. [1]
      num_experts: routed experts; 0 for a dense layer. [1]
      experts_per_token: routed experts that each token visits. [1]
      expert_hidden: width of one routed expert. [1]
      shared_hidden: summed width of the shared experts. [1]
      mixer_parameters: weights of a mixer that replaces attention (Mamba-2, gated delta rule), or of an output gate beside it; else 0. [1]
      mixer_flops_per_token: forward FLOP of its scan, on top of 2 per weight. [FLOP]
      parallel: 1 where attention and feed-forward part read the same input, and for a layer that is only one of the two (one
        tensor-parallel exchange instead of two). [1]
      extra_parameters: norms, biases, sinks, router biases of one layer. [1]
      leading: 1 where the layers of this kind come before all others (dense layers first), 0 where kinds alternate. [1]
    """

    count: Float[Array, " kinds"] = eqx.field(converter=si)
    num_heads: Float[Array, " kinds"] = eqx.field(converter=si)
    num_kv_heads: Float[Array, " kinds"] = eqx.field(converter=si)
    qk_head_dim: Float[Array, " kinds"] = eqx.field(converter=si)
    v_head_dim: Float[Array, " kinds"] = eqx.field(converter=si)
    query_rank: Float[Array, " kinds"] = eqx.field(converter=si)
    kv_rank: Float[Array, " kinds"] = eqx.field(converter=si)
    rope_dim: Float[Array, " kinds"] = eqx.field(converter=si)
    window: Float[Array, " kinds"] = eqx.field(converter=si)
    causal: Float[Array, " kinds"] = eqx.field(converter=si)
    cross_seq_len: Float[Array, " kinds"] = eqx.field(converter=si)
    seq_share: Float[Array, " kinds"] = eqx.field(converter=si)
    ffn_hidden: Float[Array, " kinds"] = eqx.field(converter=si)
    ffn_matrices: Float[Array, " kinds"] = eqx.field(converter=si)
    num_experts: Float[Array, " kinds"] = eqx.field(converter=si)
    experts_per_token: Float[Array, " kinds"] = eqx.field(converter=si)
    expert_hidden: Float[Array, " kinds"] = eqx.field(converter=si)
    shared_hidden: Float[Array, " kinds"] = eqx.field(converter=si)
    mixer_parameters: Float[Array, " kinds"] = eqx.field(converter=si)
    mixer_flops_per_token: Float[Array, " kinds"] = eqx.field(converter=si)
    parallel: Float[Array, " kinds"] = eqx.field(converter=si)
    extra_parameters: Float[Array, " kinds"] = eqx.field(converter=si)
    leading: Float[Array, " kinds"] = eqx.field(converter=si)


class Transformer(eqx.Module):
    """A transformer.

    Attributes:
      blocks: its kinds of layer.
      hidden: width of the residual stream. [1]
      vocab: rows of the embedding and of the output matrix; 0 for none. [1]
      tied: 1 where the output matrix is the embedding. [1]
      seq_len: positions of one sequence. [1]
      extra_parameters: learned positions, patch embedding, final norm, pooler, further heads. [1]
    """

    blocks: Blocks
    hidden: Float[Array, ""] = eqx.field(converter=si)
    vocab: Float[Array, ""] = eqx.field(converter=si)
    tied: Float[Array, ""] = eqx.field(converter=si)
    seq_len: Float[Array, ""] = eqx.field(converter=si)
    extra_parameters: Float[Array, ""] = eqx.field(converter=si)


def num_layers(model: Transformer) -> Float[Array, ""]:
    """Layers of all kinds. [1]"""
    return jnp.sum(model.blocks.count)


def attention_parameters(model: Transformer) -> Float[Array, " kinds"]:
    """Weights of the attention projections (or of the mixer that replaces them) of one layer of each kind. [1]

    Direct: `h (a dqk + g dqk + g dv) + a dv h`. Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1): query
    `h rq + rq a dqk` (or `h a dqk` without compression), key/value `h (rkv + rope) + rkv a (dqk - rope + dv)`, output `a dv h`.
    """
    b, h = model.blocks, model.hidden
    query = jnp.where(b.query_rank > 0, b.query_rank * (h + b.num_heads * b.qk_head_dim), h * b.num_heads * b.qk_head_dim)
    direct = h * b.num_kv_heads * (b.qk_head_dim + b.v_head_dim)
    latent = h * (b.kv_rank + b.rope_dim) + b.kv_rank * b.num_heads * (b.qk_head_dim - b.rope_dim + b.v_head_dim)
    one = query + jnp.where(b.kv_rank > 0, latent, direct) + b.num_heads * b.v_head_dim * h
    return one * jnp.where(b.cross_seq_len > 0, 2.0, 1.0) + b.mixer_parameters


def expert_parameters(model: Transformer) -> Float[Array, " kinds"]:
    """Weights of all routed experts of one layer of each kind. [1]"""
    b = model.blocks
    return b.num_experts * b.ffn_matrices * model.hidden * b.expert_hidden


def dense_parameters(model: Transformer) -> Float[Array, " kinds"]:
    """Weights of one layer of each kind that every token meets: attention, dense and shared feed-forward part, router, norms. [1]"""
    b = model.blocks
    ffn = b.ffn_matrices * model.hidden * (b.ffn_hidden + b.shared_hidden)
    return attention_parameters(model) + ffn + model.hidden * b.num_experts + b.extra_parameters


def embedding_parameters(model: Transformer) -> Float[Array, ""]:
    """Weights of embedding and output matrix. [1]"""
    return model.vocab * model.hidden * (2 - model.tied)


def num_parameters(model: Transformer) -> Float[Array, ""]:
    """All weights. [1]"""
    layers = jnp.sum(model.blocks.count * (dense_parameters(model) + expert_parameters(model)))
    return layers + embedding_parameters(model) + model.extra_parameters


def num_active_parameters(model: Transformer) -> Float[Array, ""]:
    """Weights that one token meets: all but the routed experts it does not visit. [1]"""
    b = model.blocks
    visited = safe_divide(b.experts_per_token, b.num_experts)
    layers = jnp.sum(b.count * (dense_parameters(model) + expert_parameters(model) * visited))
    return layers + embedding_parameters(model) + model.extra_parameters


def mean_attention_span(model: Transformer) -> Float[Array, " kinds"]:
    """Keys that a query sees on average, self-attention. [1]

    Causal without a window `s / 2`; with a window of `w < s` keys `w - w^2 / (2 s)`; bidirectional `s` or, with a window, `w`.
    """
    b = model.blocks
    s = model.seq_len * b.seq_share
    w = jnp.minimum(b.window, s)
    return jnp.where(b.causal > 0, w - safe_divide(w * w, 2 * s), w)


def forward_flops_per_sequence(model: Transformer) -> Float[Array, ""]:
    """Model FLOP of one forward pass of one sequence, without recomputation: 2 per active weight and position, 2 per element of the
    attention scores and of the weighted values (causal pairs only), the mixer scans, and the output matrix. The embedding look-up is free. [FLOP]
    """
    b = model.blocks
    s = model.seq_len * b.seq_share
    visited = safe_divide(b.experts_per_token, b.num_experts)
    weights = dense_parameters(model) - b.extra_parameters + expert_parameters(model) * visited
    keys = mean_attention_span(model) + b.cross_seq_len
    attention = 2 * keys * b.num_heads * (b.qk_head_dim + b.v_head_dim)
    layers = jnp.sum(b.count * s * (2 * weights + attention + b.mixer_flops_per_token))
    return layers + 2 * model.seq_len * model.vocab * model.hidden


def with_seq_len(model: Transformer, seq_len) -> Transformer:
    """The same model on sequences of `seq_len` positions; every other leaf is unchanged."""
    return eqx.tree_at(lambda m: m.seq_len, model, si(seq_len))


def pad_kinds(model: Transformer, kinds: int) -> Transformer:
    """The same model with `kinds` kinds of layer, the added ones with count 0, so that models can be stacked.

    Raises:
      ValueError: when the model has more than `kinds` kinds.
    """
    have = model.blocks.count.shape[-1]
    if have > kinds:
        raise ValueError(f"pad_kinds: the model has {have} kinds of layer, more than the {kinds} asked for. Ask for at least {have}.")
    grown = jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], kinds - have)]), model.blocks)
    grown = eqx.tree_at(lambda b: b.count, grown, grown.count.at[have:].set(0.0))
    return eqx.tree_at(lambda m: m.blocks, model, grown)
