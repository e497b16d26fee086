"""A transformer from plain Python numbers, with the defaults of a gated, RMS-normalised decoder without biases.

Leaves out what has no weight and next to no FLOP: rotary positions, activation functions, soft caps. Counts are exact for the usual
decoders, encoders and encoder-decoders; layers of other make enter through `mixer_parameters` and `mixer_flops_per_token`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ._transformer import Blocks, Transformer

NORM_VECTORS = {"rms": 1, "layer": 2, "none": 0}
"""Vectors of width `hidden` in one norm: gain; gain and bias; nothing. A LayerNorm without bias counts as "rms"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One kind of layer in plain numbers, as the arguments of `transformer` describe it.

    Attributes:
      count: layers of this kind. [1]
      num_heads: query heads; 0 for a layer without softmax attention. [1]
      num_kv_heads: key/value heads; None for `num_heads`. [1]
      head_dim: width of a query or key head, with the rotary part for multi-head latent attention; None for `hidden / num_heads`. [1]
      v_head_dim: width of a value head; None for `head_dim`. [1]
      query_rank, kv_rank, rope_dim: multi-head latent attention, see `Blocks`; 0 for none. [1]
      window: keys that a query sees. [1]
      causal: whether a query sees only the keys before it.
      cross_seq_len: keys of a cross-attention sub-layer; 0 for none. [1]
      seq_share: positions per position of `seq_len`. [1]
      ffn_hidden: width of the dense feed-forward part; None for 0 beside experts, else `4 hidden`. [1]
      gated: three matrices in a feed-forward part instead of two.
      num_experts, experts_per_token, expert_hidden, shared_hidden: mixture of experts, see `Blocks`; 0 for none. [1]
      mixer_parameters: weights of a mixer that replaces attention, or of an output gate beside it. [1]
      mixer_flops_per_token: forward FLOP of the mixer beyond 2 per weight. [FLOP]
      parallel: whether attention and feed-forward part read the same input; set for a layer that is only one of the two.
      norm: a key of `NORM_VECTORS`.
      norms: norms of one layer; None for one per sub-layer, or one in all where `parallel`. [1]
      qk_norm: whether queries and keys have a gain of width `head_dim`, shared by the heads.
      qkv_bias, output_bias, ffn_bias: biases of the attention input, of its output, and of all feed-forward matrices.
      extra_parameters: further weights without FLOP of their own. [1]
      leading: whether these layers come before all others (dense layers first), so that they lie on the first pipeline stages.
    """

    count: float = 1
    num_heads: float = 0
    num_kv_heads: float | None = None
    head_dim: float | None = None
    v_head_dim: float | None = None
    query_rank: float = 0
    kv_rank: float = 0
    rope_dim: float = 0
    window: float = math.inf
    causal: bool = True
    cross_seq_len: float = 0
    seq_share: float = 1
    ffn_hidden: float | None = None
    gated: bool = True
    num_experts: float = 0
    experts_per_token: float = 0
    expert_hidden: float = 0
    shared_hidden: float = 0
    mixer_parameters: float = 0
    mixer_flops_per_token: float = 0
    parallel: bool = False
    norm: str = "rms"
    norms: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    extra_parameters: float = 0
    leading: bool = False


_LAYER_FIELDS = tuple(field.name for field in dataclasses.fields(Layer))


def transformer(
    *,
    hidden: float,
    layers: int | Sequence[Mapping[str, Any]],
    vocab: float = 0,
    tied: bool = False,
    seq_len: float = 2048,
    positions: float = 0,
    final_norms: float = 1,
    extra_parameters: float = 0,
    **layer: Any,
) -> Transformer:
    """A `Transformer` from plain numbers.

    `transformer(hidden=4096, layers=32, num_heads=32, num_kv_heads=8, ffn_hidden=14336, vocab=128256)` is Llama 3 8B. Several kinds of
    layer: `layers=[{"count": 3, "ffn_hidden": 18432}, {"count": 58, "num_experts": 256, ...}]`, each overriding the common `layer` fields.

    Args:
      hidden: width of the residual stream. [1]
      layers: number of equal layers, or one mapping of `Layer` fields per kind.
      vocab: rows of the embedding; 0 for none. [1]
      tied: whether the output matrix is the embedding.
      seq_len: positions of one sequence. [1]
      positions: rows of a learned position table. [1]
      final_norms: norms outside the layers (final, embedding). [1]
      extra_parameters: further weights outside the layers (heads, poolers). [1]
      layer: fields of `Layer` (without `count`), common to all kinds.
    Raises:
      ValueError: for an unknown field, a size that is not positive, or numbers that do not fit each other.
    """
    if isinstance(layers, Mapping) or (isinstance(layers, Sequence) and not layers):
        raise ValueError(f"transformer: layers is {layers!r}; it should be a number or a non-empty list of mappings, one per kind of layer.")
    kinds = [{"count": layers}] if not isinstance(layers, Sequence) else layers
    built = [_layer({**layer, **kind}) for kind in kinds]
    for name, value in {"hidden": hidden, "seq_len": seq_len}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"transformer: {name} is {value}; it should be positive and finite. Pass the width of the model in elements.")
    for name, value in {"vocab": vocab, "positions": positions, "final_norms": final_norms}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"transformer: {name} is {value}; it should be 0 or more. Pass 0 for a model without it.")
    rows = [_block(kind, hidden) for kind in built]
    outside = hidden * (positions + final_norms * NORM_VECTORS[built[-1].norm]) + extra_parameters
    blocks = Blocks(**{name: [row[name] for row in rows] for name in rows[0]})
    return Transformer(blocks, hidden, vocab, tied if vocab else 1, seq_len, outside)


def mamba2_mixer(hidden: float, num_heads: float, head_dim: float, state: float, groups: float, kernel: float = 4) -> dict[str, float]:
    """Fields of `Layer` for a Mamba-2 mixer.

    Input `h (2 d + 2 G N + H)` with `d = H P`, causal convolution of `kernel` taps over `d + 2 G N` channels, output `d h`; scan 7 d N FLOP.

    References:
      Dao and Gu 2024, arXiv:2405.21060, section 7. The 7 is that of NVIDIA Megatron-LM, `training.py`, `mamba_layer_flops`.
    """
    inner = num_heads * head_dim
    channels = inner + 2 * groups * state
    weights = hidden * (inner + channels + num_heads) + channels * kernel + inner * hidden
    extra = channels + 3 * num_heads + inner  # convolution bias; A, D and step bias; gated norm
    return {"mixer_parameters": weights, "mixer_flops_per_token": 7 * inner * state, "extra_parameters": extra}


def gated_delta_mixer(
    hidden: float, num_key_heads: float, num_value_heads: float, key_dim: float, value_dim: float, kernel: float = 4
) -> dict[str, float]:
    """Fields of `Layer` for a gated delta-rule mixer.

    Input `h (2 k + 2 v + 2 H)` (query, key, value, output gate, decay, step), convolution over `2 k + v` channels, output `v h`; with
    `k` and `v` the summed widths of key and value heads, `H` value heads. The recurrence costs `8 H dk dv` FLOP.

    References:
      Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464. The 8 is that of NVIDIA Megatron-LM, `training.py`, `gdn_layer_flops`.
    """
    keys, values = num_key_heads * key_dim, num_value_heads * value_dim
    weights = hidden * (2 * keys + 2 * values + 2 * num_value_heads) + (2 * keys + values) * kernel + values * hidden
    extra = 2 * num_value_heads + value_dim  # decay and step bias; gated norm, shared by the heads
    return {"mixer_parameters": weights, "mixer_flops_per_token": 8 * num_value_heads * key_dim * value_dim, "extra_parameters": extra}


def _layer(fields: Mapping[str, Any]) -> Layer:
    unknown = sorted(set(fields) - set(_LAYER_FIELDS))
    if unknown:
        raise ValueError(f"transformer: unknown field {', '.join(unknown)}. Accepted for a layer: {', '.join(_LAYER_FIELDS)}.")
    layer = Layer(**fields)
    flags = ("causal", "gated", "parallel", "norm", "qk_norm", "qkv_bias", "output_bias", "ffn_bias", "leading")
    for name in set(_LAYER_FIELDS) - set(flags) - {"extra_parameters", "mixer_parameters"}:
        value = getattr(layer, name)
        if value is not None and not value >= 0:
            raise ValueError(f"transformer: {name} is {value}; it should be 0 or more.")
    if not 0 < layer.count < math.inf:
        raise ValueError(f"transformer: count is {layer.count}; a kind of layer should have at least one layer. Leave the kind out.")
    if layer.window <= 0 or layer.seq_share <= 0:
        raise ValueError(f"transformer: window is {layer.window} and seq_share {layer.seq_share}; both should be positive. Leave out for all keys.")
    if layer.norm not in NORM_VECTORS:
        raise ValueError(f"transformer: norm is {layer.norm!r}; choose one of {', '.join(NORM_VECTORS)}.")
    _check_attention(layer)
    _check_experts(layer)
    return layer


def _check_attention(layer: Layer) -> None:
    kv_heads = layer.num_heads if layer.num_kv_heads is None else layer.num_kv_heads
    if layer.num_heads and (kv_heads <= 0 or layer.num_heads % kv_heads):
        accepted = ", ".join(str(n) for n in range(1, int(layer.num_heads) + 1) if layer.num_heads % n == 0)
        raise ValueError(f"transformer: num_kv_heads is {kv_heads}; it should divide num_heads = {layer.num_heads}. Choose {accepted}.")
    if layer.kv_rank and layer.head_dim is not None and layer.rope_dim > layer.head_dim:
        raise ValueError(
            f"transformer: rope_dim is {layer.rope_dim}, more than head_dim = {layer.head_dim}. Pass head_dim with its rotary part included."
        )
    if not layer.kv_rank and layer.rope_dim:
        raise ValueError(f"transformer: rope_dim is {layer.rope_dim} without kv_rank. It is for multi-head latent attention; leave it out.")
    if layer.cross_seq_len and not layer.num_heads:
        raise ValueError(f"transformer: cross_seq_len is {layer.cross_seq_len} in a layer without heads. Set num_heads, or leave it out.")


def _check_experts(layer: Layer) -> None:
    if layer.num_experts and not 0 < layer.experts_per_token <= layer.num_experts:
        raise ValueError(
            f"transformer: experts_per_token is {layer.experts_per_token}; it should be from 1 to num_experts = {layer.num_experts}."
        )
    if layer.num_experts and not layer.expert_hidden > 0:
        raise ValueError(f"transformer: expert_hidden is {layer.expert_hidden}; {layer.num_experts} experts need a positive width.")
    if not layer.num_experts and (layer.expert_hidden or layer.experts_per_token):
        raise ValueError(
            f"transformer: expert_hidden is {layer.expert_hidden} and experts_per_token {layer.experts_per_token} in a layer without experts."
            " Set num_experts, or leave both out."
        )


def _block(layer: Layer, hidden: float) -> dict[str, float]:
    """The `Blocks` fields of one kind of layer."""
    heads = layer.num_heads
    if heads and layer.head_dim is None and hidden % heads:
        raise ValueError(f"transformer: hidden is {hidden}, not a multiple of num_heads = {heads}. Pass head_dim.")
    kv_heads = heads if layer.num_kv_heads is None or not heads else layer.num_kv_heads
    head_dim = (hidden / heads if heads else 0) if layer.head_dim is None or not heads else layer.head_dim
    ffn_hidden = layer.ffn_hidden if layer.ffn_hidden is not None else (0 if layer.num_experts else 4 * hidden)
    copied = ("count", "query_rank", "kv_rank", "rope_dim", "window", "causal", "cross_seq_len", "seq_share", "num_experts")
    copied += ("experts_per_token", "expert_hidden", "shared_hidden", "mixer_parameters", "mixer_flops_per_token", "leading")
    v_head_dim = (head_dim if layer.v_head_dim is None else layer.v_head_dim) if heads else 0
    block = {name: getattr(layer, name) for name in copied}
    block |= {"num_heads": heads, "num_kv_heads": kv_heads, "qk_head_dim": head_dim, "v_head_dim": v_head_dim}
    block |= {"ffn_hidden": ffn_hidden, "ffn_matrices": 3 if layer.gated else 2}
    block |= {"parallel": layer.parallel or sum(_sublayers(layer, block)) == 1}  # either way one exchange between tensor ranks
    return block | {"extra_parameters": _norms(layer, hidden, block) + _biases(layer, hidden, block) + layer.extra_parameters}


def _sublayers(layer: Layer, block: Mapping[str, float]) -> tuple[int, int]:
    """Sub-layers that mix positions, and feed-forward ones."""
    mixing = bool(layer.num_heads or layer.mixer_parameters) + bool(layer.cross_seq_len)
    return mixing, int(bool(block["ffn_hidden"] or layer.num_experts or layer.shared_hidden))


def _norms(layer: Layer, hidden: float, block: Mapping[str, float]) -> float:
    norms = (1 if layer.parallel else sum(_sublayers(layer, block))) if layer.norms is None else layer.norms
    compressed = layer.query_rank + layer.kv_rank  # latent attention normalises both
    return norms * NORM_VECTORS[layer.norm] * hidden + (2 * block["qk_head_dim"] if layer.qk_norm else 0) + compressed


def _biases(layer: Layer, hidden: float, block: Mapping[str, float]) -> float:
    sublayers = 2 if layer.cross_seq_len else 1
    heads = block["num_heads"] * block["qk_head_dim"] + block["num_kv_heads"] * (block["qk_head_dim"] + block["v_head_dim"])
    attention = sublayers * (heads * layer.qkv_bias + (hidden if layer.num_heads else 0) * layer.output_bias)
    widths = [(1, block["ffn_hidden"]), (1, layer.shared_hidden), (layer.num_experts, layer.expert_hidden)]
    return attention + layer.ffn_bias * sum(n * ((block["ffn_matrices"] - 1) * width + hidden) for n, width in widths if width)
