"""A transformer from a Hugging Face `config.json`.

Parameter counts follow the modelling code of `transformers` and of the model's authors. Left out: multi-token-prediction layers
(`num_nextn_predict_layers`), and the vision or audio tower of a multimodal model, of which the language model alone is read.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._build import gated_delta_mixer, mamba2_mixer, transformer
from ._transformer import Transformer

LONGEST_DEFAULT = 4096
"""Without a `seq_len`, a model is read at min(its longest context, this many positions)."""

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers_block_type", "hybrid_override_pattern")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_NUMBER = re.compile(r"(num|n|d|max)_.*|.*_(size|dim|rank)|sliding_window")
_SWITCH = re.compile(r"tie_.*|use_.*|(.*_)?bias")
MOST_LAYERS = 100_000
_NESTED = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class _Config:
    """The keys of one model, the name to call it in messages, and the sequence length it is read at."""

    values: Mapping[str, Any]
    where: str
    seq_len: float

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is present and not null."""
        name = next((name for name in names if self.values.get(name) is not None), None)
        return default if name is None else _checked(name, self.values[name], self.where)

    def need(self, *names: str) -> Any:
        value = self.get(*names)
        if value is None:
            raise ValueError(f"from_huggingface: {self.where} has no {' or '.join(names)}. Add the key, or build the model with `transformer`.")
        return value


def from_huggingface(config: str | Path | Mapping[str, Any], seq_len: float | None = None) -> Transformer:
    """A `Transformer` from a Hugging Face configuration.

    Args:
      config: path of a `config.json`, of a folder that holds one, or its content.
      seq_len: positions of one sequence; None for min(`max_position_embeddings`, 4096), for a vision transformer its patches. [1]
    Returns:
      The language model. An unknown `model_type` with the usual keys is read as a gated decoder, with a warning.
    Raises:
      ValueError: when keys are missing (named, with the file), or numbers do not fit each other.
    """
    values, where = _read(config)
    model_type = values.get("model_type", "")
    values = {**_WITH_DEFAULTS.get(model_type, {}), **values}
    style = _STYLES.get(model_type)
    needed = [_HIDDEN, _LAYERS] if model_type == "nemotron_h" else [_HIDDEN, _LAYERS, _HEADS]
    missing = [" or ".join(names) for names in needed if all(values.get(name) is None for name in names)]
    if missing:
        raise ValueError(f"from_huggingface: {where} lacks {'; '.join(missing)}. Add the keys, or build the model with `transformer`.")
    if style is None:
        warnings.warn(
            f"from_huggingface: model_type {model_type!r} of {where} is unknown; read as a gated decoder without biases. Check its"
            " parameter count, or build the model with `transformer`.",
            stacklevel=2,
        )
        style = _decoder
    length = _default_seq_len(_Config(values, where, 0.0)) if seq_len is None else seq_len
    return transformer(**style(_Config(values, where, length)), seq_len=length)


def _checked(name: str, value: Any, where: str) -> Any:
    """The value of a key, which its name says to be a number or a switch.

    Raises:
      ValueError: when it is not.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    should_be = None
    if name in _LAYERS[:4] and not (number and value == int(value) and 0 <= value <= MOST_LAYERS):
        should_be = f"a whole number of at most {MOST_LAYERS:,}"
    elif _NUMBER.fullmatch(name) and not number:
        should_be = "a finite number"
    elif _SWITCH.fullmatch(name) and not (isinstance(value, bool) or value in (0, 1)):
        should_be = "true or false"
    if should_be:
        raise ValueError(f"from_huggingface: {name} of {where} is {value!r}; it should be {should_be}. Mend it there.")
    return value


def _read(config: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(config, Mapping):
        values, where = dict(config), "the configuration"
    else:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"from_huggingface: {path} is not a file. Pass a config.json, its folder, or its content as a dict.")
        values, where = json.loads(path.read_text(encoding="utf-8")), str(path)
    if not isinstance(values, dict):
        raise ValueError(f"from_huggingface: {where} holds a {type(values).__name__}; it should be an object with keys such as hidden_size.")
    if not isinstance(values.get("model_type", ""), str):
        raise ValueError(f"from_huggingface: model_type of {where} is {values['model_type']!r}; it should be text, such as \"llama\".")
    for name in _NESTED:
        inner = values.get(name)
        if isinstance(inner, Mapping):
            shared = {key: values[key] for key in ("tie_word_embeddings", "model_type") if key in values}
            return {**shared, **inner}, f"{where} ({name})"
    return values, where


def _default_seq_len(c: _Config) -> float:
    if c.get("model_type") == "vit":
        return _patches(c) + 1
    longest = c.get("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", default=LONGEST_DEFAULT)
    return min(longest, LONGEST_DEFAULT)


# --- what most decoders share


def _common(c: _Config) -> dict[str, Any]:
    """The arguments of `transformer` for one plain layer, from the keys most models use."""
    heads = c.need(*_HEADS)
    return {
        "hidden": c.need(*_HIDDEN),
        "layers": c.need(*_LAYERS),
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads", default=heads),
        "head_dim": c.get("head_dim"),
        "ffn_hidden": c.get("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
        "vocab": c.need("vocab_size"),
        "tied": c.get("tie_word_embeddings", default=False),
        "qkv_bias": c.get("attention_bias", "use_bias", default=False),
        "output_bias": c.get("attention_bias", "use_bias", default=False),
        "ffn_bias": c.get("mlp_bias", "use_bias", default=False),
    }


def _decoder(c: _Config, extra_layer: float = 0, extra_outside: float = 0, **style: Any) -> dict[str, Any]:
    """Any decoder whose layers differ only in window, experts, or a gated delta-rule mixer.

    `style` overrides the common arguments; `extra_layer` and `extra_outside` are weights without FLOP of each layer and of the rest.
    """
    arguments = {**_common(c), **style, **_latent_attention(c)}
    count = int(arguments["layers"])
    windows, linear = _windows(c, count), _linear_layers(c, count)
    kinds = []
    for index in range(count):
        kind = _feed_forward(c, index, arguments["ffn_hidden"])
        mixing = _delta_rule(c) if linear[index] else {"window": windows[index], "mixer_parameters": _output_gate(c)}
        extra = kind.get("extra_parameters", 0) + mixing.get("extra_parameters", 0) + extra_layer
        kinds.append({**kind, **mixing, "extra_parameters": extra})
    return {**arguments, "layers": _grouped(kinds), "extra_parameters": extra_outside}


def _delta_rule(c: _Config) -> dict[str, Any]:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    mixer = gated_delta_mixer(c.need(*_HIDDEN), *(c.need(f"linear_{name}") for name in names))
    return {**mixer, "num_heads": 0, "num_kv_heads": 0, "qk_norm": False}


def _output_gate(c: _Config) -> float:
    """Weights of the gate on the attention output: half of a query projection that is twice as wide."""
    gated = c.get("attn_output_gate", default=c.get("model_type") == "qwen3_next")
    return c.need(*_HIDDEN) * c.need(*_HEADS) * c.need("head_dim") if gated else 0


def _grouped(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Equal layers joined into one kind each, in order of first appearance."""
    kinds: list[dict[str, Any]] = []
    for layer in layers:
        same = next((kind for kind in kinds if {**kind, "count": 0} == {**layer, "count": 0}), None)
        if same is None:
            kinds.append({**layer, "count": 1})
        else:
            same["count"] += 1
    return kinds


def _windows(c: _Config, count: int) -> list[float]:
    """Keys seen by a query of each layer."""
    window = c.get("sliding_window", "attention_chunk_size")
    model_type = c.get("model_type", default="")
    used = c.get("use_sliding_window", default=not model_type.startswith(("qwen", "mimo")))
    if not window or not used:
        return [math.inf] * count
    types = c.get("layer_types")
    if types:
        return [math.inf if kind == "full_attention" else window for kind in types[:count]]
    if model_type.startswith(("qwen", "mimo")):
        return [window if index >= c.get("max_window_layers", default=0) else math.inf for index in range(count)]
    period = c.get("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval", default=_PERIODS.get(model_type, 0))
    return [math.inf if period and (index + 1) % period == 0 else window for index in range(count)]


_PERIODS = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "llama4": 4, "llama4_text": 4}
"""Every so many layers one attends to all keys; the others have a window."""


def _linear_layers(c: _Config, count: int) -> list[bool]:
    """Whether each layer is a gated delta-rule mixer."""
    if c.get("linear_num_value_heads") is None:
        return [False] * count
    types, interval = c.get("layer_types"), c.get("full_attention_interval", default=4)
    return [types[i] == "linear_attention" if types else (i + 1) % interval != 0 for i in range(count)]


def _latent_attention(c: _Config) -> dict[str, Any]:
    if not c.get("kv_lora_rank"):
        return {}
    rope, plain = c.need("qk_rope_head_dim"), c.need("qk_nope_head_dim")
    ranks = {"query_rank": c.get("q_lora_rank", default=0), "kv_rank": c.need("kv_lora_rank")}
    return ranks | {"rope_dim": rope, "head_dim": rope + plain, "v_head_dim": c.need("v_head_dim"), "num_kv_heads": c.need(*_HEADS)}


def _feed_forward(c: _Config, index: int, dense: float) -> dict[str, Any]:
    """Dense or expert fields of layer `index`."""
    experts = c.get(*_EXPERTS, default=0)
    if not experts or not _is_sparse(c, index):
        return {"ffn_hidden": dense, "leading": index < c.get("first_k_dense_replace", default=0)}
    width = c.get("moe_intermediate_size", "intermediate_size")
    shared = c.get("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    if shared is None:
        shared = width * c.get("n_shared_experts", "num_shared_experts", default=1 if c.get("model_type", default="").startswith("llama4") else 0)
    gate = c.need(*_HIDDEN) if c.get("shared_expert_intermediate_size") else 0  # Qwen gates the shared expert
    correction = experts if c.get("topk_method") == "noaux_tc" else 0
    router_bias = experts if c.get("model_type") == "gpt_oss" else 0
    return {
        "ffn_hidden": 0,
        "num_experts": experts,
        "experts_per_token": c.need("num_experts_per_tok", "experts_per_token", "moe_top_k"),
        "expert_hidden": width,
        "shared_hidden": shared,
        "extra_parameters": gate + correction + router_bias,
    }


def _is_sparse(c: _Config, index: int) -> bool:
    if index in c.get("mlp_only_layers", default=()) or index < c.get("first_k_dense_replace", default=0):
        return False
    if c.get("moe_layers"):
        return index in c.get("moe_layers")
    step = c.get("interleave_moe_layer_step", "decoder_sparse_step", default=1)
    frequency = c.get("moe_layer_freq", default=1)
    listed = bool(frequency[index]) if isinstance(frequency, list) else index % frequency == 0
    return (index + 1) % step == 0 and listed


# --- architectures that need more than a style


def _gpt2(c: _Config) -> dict[str, Any]:
    tied = c.get("tie_word_embeddings", default=True)
    style = {"norm": "layer", "gated": False, "qkv_bias": True, "output_bias": True, "ffn_bias": True, "tied": tied}
    return _decoder(c, positions=c.get("n_positions", "max_position_embeddings", default=0), **style)


def _opt(c: _Config) -> dict[str, Any]:
    hidden, narrow = c.need("hidden_size"), c.get("word_embed_proj_dim", default=c.need("hidden_size"))
    tied = c.get("tie_word_embeddings", default=True)
    bias = c.get("enable_bias", default=True)
    style = {"norm": "layer", "gated": False, "qkv_bias": bias, "output_bias": bias, "ffn_bias": bias, "tied": tied}
    style |= {"positions": c.need("max_position_embeddings") + 2, "final_norms": 1 if c.get("do_layer_norm_before", default=True) else 0}
    outside = 2 * narrow * hidden - c.need("vocab_size") * (hidden - narrow)  # two projections, a narrower embedding
    if narrow != hidden:
        warnings.warn(
            f"from_huggingface: {c.where} has embeddings of width {narrow} in a model of width {hidden}; parameters are counted exactly,"
            " the FLOP of the output matrix at the full width.",
            stacklevel=3,
        )
    return _decoder(c, extra_outside=outside if narrow != hidden else 0, **style)


def _falcon(c: _Config) -> dict[str, Any]:
    heads, new = c.need(*_HEADS), c.get("new_decoder_architecture", default=False)
    kv_heads = c.get("num_kv_heads", "n_head_kv", default=heads) if new or not c.get("multi_query", default=True) else 1
    parallel, bias = c.get("parallel_attn", default=True), c.get("bias", default=False)
    norms = (c.get("num_ln_in_parallel_attn", default=2) if new else 1) if parallel or new else 2
    style = {"norm": "layer", "gated": False, "qkv_bias": bias, "output_bias": bias, "ffn_bias": bias, "norms": norms, "parallel": parallel}
    return _decoder(c, num_kv_heads=kv_heads, tied=c.get("tie_word_embeddings", default=True), **style)


def _mpt(c: _Config) -> dict[str, Any]:
    hidden, attention, bias = c.need("d_model"), c.get("attn_config", default={}), not c.get("no_bias", default=False)
    style = {"norm": "layer" if bias else "rms", "gated": False, "qkv_bias": bias, "output_bias": bias, "ffn_bias": bias}
    learned = c.get("learned_pos_emb", default=True) and not attention.get("alibi", False)
    style |= {"positions": c.need("max_seq_len") if learned else 0, "tied": c.get("tie_word_embeddings", default=True)}
    kv_heads = attention.get("kv_n_heads", c.need("n_heads"))
    return _decoder(c, num_kv_heads=kv_heads, ffn_hidden=c.get("expansion_ratio", default=4) * hidden, **style)


def _dbrx(c: _Config) -> dict[str, Any]:
    attention, experts = c.need("attn_config"), c.need("ffn_config")
    arguments = {**_common(c), "ffn_hidden": 0, "num_kv_heads": attention["kv_n_heads"], "num_experts": experts["moe_num_experts"]}
    return arguments | {"experts_per_token": experts["moe_top_k"], "expert_hidden": experts["ffn_hidden_size"]}


def _cohere(c: _Config) -> dict[str, Any]:
    heads = c.need(*_HEADS)
    kv_heads, head_dim = c.get("num_key_value_heads", default=heads), c.get("head_dim", default=c.need(*_HIDDEN) / heads)
    per_head_norm = (heads + kv_heads) * head_dim if c.get("use_qk_norm", default=False) else 0
    return _decoder(c, parallel=True, tied=c.get("tie_word_embeddings", default=True), extra_layer=per_head_norm)


def _bert(c: _Config) -> dict[str, Any]:
    """With the heads it is pre-trained with: pooler and next-sentence, masked-token transform with its norm and output bias."""
    hidden, vocab = c.need("hidden_size"), c.need("vocab_size")
    heads = 2 * (hidden * hidden + hidden) + 2 * hidden + vocab + 2 * hidden + 2
    style = {"norm": "layer", "gated": False, "causal": False, "qkv_bias": True, "output_bias": True, "ffn_bias": True, "tied": True}
    rows = c.get("max_position_embeddings", default=512) + c.get("type_vocab_size", default=2)
    return _decoder(c, positions=rows, extra_outside=heads, **style)


def _patches(c: _Config) -> int:
    return (c.get("image_size", default=224) // c.get("patch_size", default=16)) ** 2


def _vit(c: _Config) -> dict[str, Any]:
    """Positions are patches and the class token; a classification head where `num_labels` or `id2label` names its classes."""
    hidden, patch = c.need("hidden_size"), c.get("patch_size", default=16)
    classes = c.get("num_labels", default=len(c.get("id2label", default=())))
    embedding = hidden * (c.get("num_channels", default=3) * patch * patch + 1) + hidden  # patch convolution, class token
    arguments = {**_common(_Config({**c.values, "vocab_size": 0}, c.where, c.seq_len)), "norm": "layer", "gated": False, "causal": False}
    arguments |= {"qkv_bias": c.get("qkv_bias", default=True), "output_bias": True, "ffn_bias": True, "positions": _patches(c) + 1}
    return arguments | {"extra_parameters": embedding + classes * (hidden + 1)}


def _t5(c: _Config) -> dict[str, Any]:
    """Encoder and decoder on equally long sequences; `cross_seq_len` is the sequence length it is read at."""
    heads, ffn = c.need("num_heads"), c.get("feed_forward_proj", default="relu")
    layers, buckets = c.need("num_layers"), c.get("relative_attention_num_buckets", default=32)
    kinds = [{"count": layers, "causal": False}, {"count": c.get("num_decoder_layers", default=layers), "cross_seq_len": c.seq_len}]
    return {
        "hidden": c.need("d_model"),
        "layers": kinds,
        "num_heads": heads,
        "head_dim": c.need("d_kv"),
        "ffn_hidden": c.need("d_ff"),
        "gated": ffn.startswith("gated"),
        "vocab": c.need("vocab_size"),
        "tied": c.get("tie_word_embeddings", default=True),
        "final_norms": 2,
        "extra_parameters": 2 * buckets * heads,  # relative position biases of encoder and decoder
    }


_HYBRID = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_h(c: _Config) -> dict[str, Any]:
    """Nemotron-H: every layer is one sub-layer. With `moe_latent_size` (LatentMoE) the experts work on a narrower input: their width is
    scaled to the same weights and FLOP, and the two projections count as shared; bytes sent to experts are then too high."""
    hidden, head_dim = c.need("hidden_size"), c.need("head_dim")
    pattern = c.get("layers_block_type") or [_HYBRID[letter] for letter in c.need("hybrid_override_pattern")]
    kinds: dict[str, dict[str, Any]] = {"mlp": {"ffn_hidden": c.get("intermediate_size")}}
    heads = {"num_heads": c.need("num_attention_heads"), "num_kv_heads": c.need("num_key_value_heads"), "head_dim": head_dim}
    kinds["attention"] = {**heads, "ffn_hidden": 0}
    if "mamba" in pattern:
        names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
        kinds["mamba"] = {"ffn_hidden": 0, **mamba2_mixer(hidden, *(c.need(name) for name in names))}
    if "moe" in pattern:
        latent, width, experts = c.get("moe_latent_size"), c.need("moe_intermediate_size"), c.need("n_routed_experts")
        shared = c.need("moe_shared_expert_intermediate_size") * c.get("n_shared_experts", default=1) + (latent or 0)
        kinds["moe"] = {"num_experts": experts, "experts_per_token": c.need("num_experts_per_tok"), "shared_hidden": shared}
        kinds["moe"] |= {"expert_hidden": width * (latent / hidden if latent else 1), "extra_parameters": experts}  # router correction
    layers = [{**kinds[kind], "count": pattern.count(kind)} for kind in dict.fromkeys(pattern)]
    return {"hidden": hidden, "layers": layers, "vocab": c.need("vocab_size"), "tied": c.get("tie_word_embeddings", default=False), "gated": False}


def _deepseek_v4(c: _Config) -> dict[str, Any]:
    """DeepSeek-V4 (DeepSeek-AI 2026): compressed sparse attention entered as a mixer, since keys and values share one compressed head.

    Its attention FLOP are those at the sequence length it is read at: a window, plus the average of the compressed keys that a query may
    choose (ratio 4, at most `index_topk`, found by the indexer) or sees in full (ratio 128). The hyper-connections are weights of the mixer.
    """
    hidden, heads, dim = c.need("hidden_size"), c.need("num_attention_heads"), c.need("head_dim")
    query_rank, groups, output_rank = c.need("q_lora_rank"), c.need("o_groups"), c.need("o_lora_rank")
    index_heads, index_dim, streams = c.need("index_n_heads"), c.need("index_head_dim"), c.need("hc_mult")
    dense = query_rank * (hidden + heads * dim) + hidden * dim + heads * dim * output_rank + groups * output_rank * hidden
    mixing = (2 + streams) * streams  # outputs of each of the two hyper-connections of a layer
    s, window = c.seq_len, c.get("sliding_window", default=128)
    near = window - window**2 / (2 * s) if window < s else s / 2
    layers = []
    for index, ratio in enumerate(c.need("compress_ratios")[: c.need("num_hidden_layers")]):
        weights, extra, keys, scores = dense, query_rank + dim + heads, near, 0.0
        if ratio:
            wide = (2 if ratio == 4 else 1) * dim  # ratio 4 pools overlapping spans
            weights, extra = weights + 2 * hidden * wide, extra + ratio * wide + dim
            full = s / (2 * ratio)
            keys += min(full, c.need("index_topk")) if ratio == 4 else full
        if ratio == 4:
            weights += query_rank * index_heads * index_dim + hidden * index_heads + 4 * hidden * index_dim
            extra, scores = extra + ratio * 2 * index_dim + index_dim, 2 * index_heads * index_dim * s / (2 * ratio)
        weights += 2 * mixing * streams * hidden
        extra += 2 * (mixing + 3) + (c.need("n_routed_experts") if index >= c.get("num_hash_layers", default=0) else 0)
        layers.append({"mixer_parameters": weights, "mixer_flops_per_token": 4 * keys * heads * dim + scores, "extra_parameters": extra})
    width = c.need("moe_intermediate_size")
    experts = {"num_experts": c.need("n_routed_experts"), "experts_per_token": c.need("num_experts_per_tok"), "expert_hidden": width}
    experts |= {"shared_hidden": width * c.get("n_shared_experts", default=1), "ffn_hidden": 0}
    head = streams * streams * hidden + streams + 1  # joins the streams before the output matrix
    arguments = {"hidden": hidden, "vocab": c.need("vocab_size"), "tied": c.get("tie_word_embeddings", default=False)}
    return arguments | experts | {"layers": _grouped(layers), "extra_parameters": head}


def _style(**style: Any) -> Callable[[_Config], dict[str, Any]]:
    """A decoder with these arguments; `tied` is only the default of `tie_word_embeddings`."""

    def build(c: _Config) -> dict[str, Any]:
        tied = c.get("tie_word_embeddings", default=style.get("tied", False))
        return _decoder(c, **{**style, "tied": tied})

    return build


def _gpt_neox(c: _Config) -> dict[str, Any]:
    bias, parallel = c.get("attention_bias", default=True), c.get("use_parallel_residual", default=True)
    return _decoder(c, norm="layer", gated=False, qkv_bias=bias, output_bias=bias, ffn_bias=True, norms=2, parallel=parallel)


def _olmo2(c: _Config) -> dict[str, Any]:
    heads, kv_heads = c.need(*_HEADS), c.get("num_key_value_heads", default=c.need(*_HEADS))
    return _decoder(c, extra_layer=c.need(*_HIDDEN) * (1 + kv_heads / heads))  # norms over all heads


_BIASED = {"norm": "layer", "gated": False, "qkv_bias": True, "output_bias": True, "ffn_bias": True}

_STYLES: dict[str, Callable[[_Config], dict[str, Any]]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "internlm2", "phi3", "llama4", "llama4_text"), _style()),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _style()),
    "mimo": _style(qkv_bias=True, output_bias=False),
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _style(**_BIASED, tied=True, final_norms=2),
    "falcon": _falcon,
    "mpt": _mpt,
    "dbrx": _dbrx,
    "gpt_neox": _gpt_neox,
    "gptj": lambda c: _decoder(c, norm="layer", gated=False, ffn_bias=True, parallel=True, extra_outside=c.need("vocab_size")),
    "phi": lambda c: _decoder(c, **_BIASED, parallel=True, extra_outside=c.need("vocab_size")),
    "starcoder2": _style(**_BIASED, tied=True),
    "nemotron": _style(norm="layer", gated=False),
    "cohere": _cohere,
    "cohere2": _cohere,
    "olmo2": _olmo2,
    "qwen2": _style(qkv_bias=True, output_bias=False),
    "qwen2_moe": _style(qkv_bias=True, output_bias=False),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next"), _style(qk_norm=True)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _style(qk_norm=True)),
    "gemma": _style(tied=True),
    "gemma2": _style(tied=True, norms=4),
    **dict.fromkeys(("gemma3", "gemma3_text"), _style(tied=True, norms=4, qk_norm=True)),
    "gpt_oss": lambda c: _style(ffn_bias=True, extra_layer=c.need("num_attention_heads"))(c),  # one attention sink a head
    "deepseek_v4": _deepseek_v4,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
}

_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072}
_GEMMA3 |= {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_QWEN3_5_MOE = {"shared_expert_intermediate_size": 512}
_WITH_DEFAULTS: dict[str, dict[str, Any]] = {
    # Published files leave out what equals the default of the class in `transformers`.
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
