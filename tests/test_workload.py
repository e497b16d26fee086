"""How models come in: constructor, catalog, Hugging Face import, and what a transformer costs in parameters and FLOP."""

import json
import math
from decimal import Decimal
from pathlib import Path

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.workload import (
    UnknownModelError,
    catalog_entry,
    forward_flops_per_sequence,
    from_huggingface,
    load_model,
    model_names,
    num_active_parameters,
    num_layers,
    num_parameters,
    pad_kinds,
    published_parameters,
    resolve_model_name,
    transformer,
    with_seq_len,
)

CONFIGS = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "model_configs"

MISSES = {
    # name: (tolerance, why the printed count cannot be met)
    "gpt3-350m": (0.02, "Table 2.1 rounds 355.9M to 350M"),
    "megatron-core-32b": (0.02, "the printed shape gives 31.5B; the README prints 32B"),
    "grok-1": (0.006, "314B is printed; the layers alone give 314.9B and the embedding 0.8B"),
}


def tolerance(printed: str, relative: float) -> float:
    """Half a unit of the last printed digit, or a share of the value: "1.7e9" may be anything from 1.65e9 to 1.75e9."""
    value = Decimal(printed)
    return max(relative * float(value), 0.5 * 10.0 ** int(value.as_tuple().exponent))


def dense(**changes):
    """A small decoder, for tests that need no particular model."""
    return transformer(**{"hidden": 64, "layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden": 160, "vocab": 1000, "seq_len": 128, **changes})


# --- the catalog


@pytest.mark.parametrize("name", [name for name in model_names() if catalog_entry(name).published])
def test_catalog_parameters_are_those_published(name):
    entry = catalog_entry(name)
    allowed = MISSES[name][0] * float(entry.published) if name in MISSES else tolerance(entry.published, 0.005)
    assert abs(num_parameters(load_model(name)) - float(entry.published)) <= allowed, entry.source


@pytest.mark.parametrize("name", [name for name in model_names() if catalog_entry(name).published_active])
def test_catalog_active_parameters_are_those_published(name):
    entry, model = catalog_entry(name), load_model(name)
    active = num_active_parameters(model) - entry.active_without_embedding * model.vocab * model.hidden
    assert abs(active - float(entry.published_active)) <= tolerance(entry.published_active, 0.03), entry.source


def test_catalog_is_complete_and_unambiguous():
    spellings = {}
    for name in model_names():
        entry = catalog_entry(name)
        assert entry.source and entry.seq_len > 0
        assert published_parameters(name) == (None if entry.published is None else float(entry.published))
        for spelling in (name, *entry.aliases):
            assert resolve_model_name(spelling) == name, f"{spelling} also means {spellings.get(spelling)}"
            spellings[spelling] = name
    assert set(MISSES) <= set(model_names())


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Llama3.1-405B", "llama-3.1-405b"),
        ("meta-llama/Meta-Llama-3.1-405B", "llama-3.1-405b"),
        ("llama 3.1 405b", "llama-3.1-405b"),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b"),
        ("Llama-2-70B (LoRA)", "llama-2-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Llama-3_1-8B", "llama-3.1-8b"),
        ("GPT-3-175B", "gpt3-175b"),
        ("MT-NLG-530B", "megatron-529.6b"),
        ("Megatron-GPT-22B", "megatron-22b"),
        ("Megatron-GPT2-2B", "megatron-gpt2-2b"),
        ("OPT-1.3b", "opt-1.3b"),
        ("opt-13b", "opt-13b"),
        ("Qwen2.5 32B", "qwen-2.5-32b"),
        ("Qwen/Qwen3-30B-A3B", "qwen-3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("GPT-OSS 20B", "gpt-oss-20b"),
        ("Nemotron V3 Nano 30B", "nemotron-3-nano-30b-a3b"),
        ("Transformer-big (WMT En-De)", "transformer-big"),
    ],
)
def test_usual_spellings_find_their_model(spelling, name):
    assert resolve_model_name(spelling) == name


def test_unknown_name_lists_near_ones():
    with pytest.raises(UnknownModelError, match=r"lama-31-8b.*Near: llama-3\.1-8b.*config\.json"):
        load_model("lama-31-8b")
    with pytest.raises(UnknownModelError):
        resolve_model_name("Megatron-GPT-1.7B")  # two shapes bear this name


def test_load_model_takes_names_files_and_folders(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for where in (tmp_path, tmp_path / "config.json", str(tmp_path / "config.json")):
        assert num_layers(load_model(where)) == 2
    assert load_model("llama-3.1-8b").seq_len == 8192  # its training context
    assert load_model("llama-3.1-8b", seq_len=1024).seq_len == 1024
    assert from_huggingface(config).seq_len == 4096
    assert from_huggingface({**config, "max_position_embeddings": 2048}).seq_len == 2048


# --- Hugging Face import

PUBLISHED_CONFIGS = {
    # file: parameters, all digits where the count of the checkpoint is known. MTP layers and vision towers are not counted.
    "Qwen--Qwen2.5-7B": "7615616512",
    "Qwen--Qwen3-0.6B": "596049920",
    "Qwen--Qwen3-30B-A3B": "30532122624",
    "Qwen--Qwen3-32B": "32762123264",
    "Qwen--Qwen3-32B-FP8": "32762123264",
    "Qwen--Qwen3-8B": "8190735360",
    "Qwen--Qwen3-Next-80B-A3B": "80e9",
    "Qwen--Qwen3.5-27B": "27e9",
    "Qwen--Qwen3.5-397B-A17B": "397e9",
    "XiaomiMiMo--MiMo-7B-Base": "7.6e9",  # 7.83e9 with its MTP layer
    "deepseek-ai--DeepSeek-R1": "671e9",
    "deepseek-ai--DeepSeek-V2-Lite": "15.7e9",
    "deepseek-ai--DeepSeek-V3": "671e9",
    "deepseek-ai--DeepSeek-V4-Flash": "284e9",
    "google--gemma-2-9b": "9241705984",
    "gpt3-like-175b": "175e9",
    "meta-llama--Llama-2-70b-hf": "68976648192",
    "meta-llama--Llama-2-7b-hf": "6738415616",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": "107.77e9",
    "meta-llama--Meta-Llama-3-8B": "8030261248",
    "meta-llama--Meta-Llama-3.1-405B": "405853388800",
    "meta-llama--Meta-Llama-3.1-70B": "70553706496",
    "meta-llama--Meta-Llama-3.1-8B": "8030261248",
    "mistralai--Mistral-7B-v0.1": "7241732096",
    "mistralai--Mixtral-8x7B-v0.1": "46702792704",
    "moonshotai--Kimi-K2.5": "1026408232448",
    "nvidia--Llama-3.1-70B-Instruct-FP8": "70553706496",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "31.6e9",
    "openai--gpt-oss-120b": "116.83e9",
    "openai--gpt2": "124439808",
}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the shared model configurations are not on this machine")
def test_every_shared_config_is_read_with_its_published_size():
    files = sorted(CONFIGS.glob("*.json"))
    assert files
    for file in files:
        count = float(num_parameters(from_huggingface(file)))
        assert count > 0
        if file.stem in PUBLISHED_CONFIGS:
            printed = PUBLISHED_CONFIGS[file.stem]
            assert abs(count - float(printed)) <= tolerance(printed, 0.005), file.stem


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the shared model configurations are not on this machine")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("deepseek-ai--DeepSeek-V3", "deepseek-v3"),
        ("deepseek-ai--DeepSeek-V4-Flash", "deepseek-v4-flash"),
        ("meta-llama--Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
        ("openai--gpt-oss-120b", "gpt-oss-120b"),
        ("Qwen--Qwen3-Next-80B-A3B", "qwen-3-next-80b-a3b"),
        ("Qwen--Qwen3.5-27B", "qwen-3.5-27b"),
        ("Qwen--Qwen3.5-397B-A17B", "qwen-3.5-397b-a17b"),
    ],
)
def test_catalog_and_original_config_agree(file, name):
    chex.assert_trees_all_close(load_model(CONFIGS / f"{file}.json", 4096), load_model(name, 4096), rtol=1e-12)


OTHER_CONFIGS = {
    # Counts of the released checkpoints; the architectures that the catalog does not cover.
    "Qwen1.5-MoE-A2.7B": (
        14315784192,
        {"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 5632,
         "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
         "vocab_size": 151936, "sliding_window": 32768, "max_window_layers": 21, "use_sliding_window": False},
    ),
    "falcon-rw-1b": (
        1311625216,
        {"model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "alibi": True, "bias": True,
         "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False, "vocab_size": 50304},
    ),
    "starcoder2-3b": (
        3030371328,
        {"model_type": "starcoder2", "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
         "intermediate_size": 12288, "vocab_size": 49152, "sliding_window": 4096, "use_bias": True},
    ),
    "OLMo-2-1124-7B": (
        7298617344,
        {"model_type": "olmo2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
         "vocab_size": 100352, "tie_word_embeddings": False},
    ),
    "t5-v1_1-base": (
        247577856,
        {"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12,
         "feed_forward_proj": "gated-gelu", "vocab_size": 32128, "tie_word_embeddings": False},
    ),
    "mpt-7b": (
        6649286656,
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True,
         "vocab_size": 50432, "attn_config": {"alibi": True}},
    ),
    "gemma-3-4b, text, with keys left out": (
        3880263168,
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
         "num_hidden_layers": 34, "sliding_window": 1024}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_other_architectures_have_the_parameters_of_their_checkpoints(name):
    count, config = OTHER_CONFIGS[name]
    assert_allclose(num_parameters(from_huggingface(config)), count, rtol=1e-12)


def test_narrow_embeddings_are_counted_with_a_warning():
    config = {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512, "num_hidden_layers": 24, "num_attention_heads": 16}
    config |= {"ffn_dim": 4096, "vocab_size": 50272, "max_position_embeddings": 2048, "do_layer_norm_before": False}
    with pytest.warns(UserWarning, match="embeddings of width 512"):
        model = from_huggingface(config)
    assert num_parameters(model) == 331196416  # facebook/opt-350m


def test_unknown_architecture_is_read_as_a_decoder_with_a_warning():
    config = {"model_type": "novel", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 96}
    with pytest.warns(UserWarning, match="'novel'.*unknown"):
        model = from_huggingface(config)
    chex.assert_trees_all_equal(model, from_huggingface({**config, "model_type": "llama"}))


def test_missing_keys_are_named_with_the_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(ValueError, match=r"config\.json lacks num_hidden_layers .*; num_attention_heads"):
        from_huggingface(file)
    with pytest.raises(ValueError, match="has no vocab_size"):
        from_huggingface({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
    with pytest.raises(ValueError, match="is not a file"):
        from_huggingface(tmp_path / "none.json")


def test_layer_patterns_are_read():
    gemma, llama4 = load_model("gemma-3-27b"), load_model("llama-4-maverick")
    windows = dict(zip(gemma.blocks.window.tolist(), gemma.blocks.count.tolist(), strict=True))
    assert windows == {1024.0: 52.0, math.inf: 10.0}  # 5 local layers to 1 global one
    assert sum(llama4.blocks.count[llama4.blocks.num_experts > 0].tolist()) == 24  # every second layer
    assert load_model("deepseek-v3").blocks.count.tolist() == [3, 58]
    hybrid = load_model("nemotron-h-56b").blocks
    assert dict(zip(["mamba", "mlp", "attention"], hybrid.count.tolist(), strict=True)) == {"mamba": 54, "mlp": 54, "attention": 10}
    assert jnp.all(hybrid.parallel == 1)  # one sub-layer, one exchange


# --- the constructor


def test_constructor_defaults_are_those_of_a_gated_decoder():
    h, layers, vocab, kv = 64, 3, 1000, 32
    attention, ffn, norms = 2 * h * h + 2 * h * kv, 3 * h * 160, 2 * h
    assert num_parameters(dense()) == layers * (attention + ffn + norms) + h + 2 * vocab * h
    assert num_parameters(dense(tied=True)) == num_parameters(dense()) - vocab * h
    assert num_parameters(dense(ffn_hidden=None, gated=False)) == num_parameters(dense(ffn_hidden=256, gated=False))


def test_constructor_counts_biases_norms_and_positions():
    h, layers, kv = 64, 3, 32
    with_all = dense(norm="layer", qkv_bias=True, output_bias=True, ffn_bias=True, positions=128)
    biases = (h + 2 * kv) + h + (2 * 160 + h)  # query, key and value; output; gate, up and down
    assert num_parameters(with_all) - num_parameters(dense()) == layers * (biases + 2 * h) + h + 128 * h
    assert num_parameters(dense(qk_norm=True)) - num_parameters(dense()) == layers * 2 * 16


def test_kinds_override_what_is_common():
    moe = {"ffn_hidden": 0, "num_experts": 8, "experts_per_token": 2, "expert_hidden": 32, "shared_hidden": 32}
    model = dense(layers=[{"count": 1}, {"count": 2, **moe}])
    h = 64
    assert num_layers(model) == 3
    assert num_parameters(model) - num_active_parameters(model) == 2 * 6 * 3 * h * 32  # six of eight experts are not visited
    assert num_parameters(model) - num_parameters(dense()) == 2 * (3 * h * (8 * 32 + 32 - 160) + 8 * h)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, r"num_kv_heads is 3; it should divide num_heads = 4\. Choose 1, 2, 4"),
        ({"num_heads": 5, "num_kv_heads": None}, "not a multiple of num_heads = 5"),
        ({"hidden": 0}, "hidden is 0; it should be positive"),
        ({"vocab": -1}, "vocab is -1"),
        ({"layers": 0}, "at least one layer"),
        ({"layers": []}, "non-empty list"),
        ({"ffn_hidden": -8}, "ffn_hidden is -8"),
        ({"window": 0}, "window is 0"),
        ({"norm": "batch"}, "norm is 'batch'; choose one of rms, layer, none"),
        ({"num_experts": 4, "experts_per_token": 5, "expert_hidden": 8}, "from 1 to num_experts = 4"),
        ({"num_experts": 4, "experts_per_token": 2}, "4 experts need a positive width"),
        ({"expert_hidden": 8}, "without experts"),
        ({"rope_dim": 8}, "without kv_rank"),
        ({"kv_rank": 16, "head_dim": 16, "rope_dim": 32}, "more than head_dim"),
        ({"layers": [{"count": 2, "windows": 3}]}, "unknown field windows. Accepted for a layer: count"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dense(**changes)


# --- FLOP


def test_training_flops_are_six_per_weight_and_token_and_attention():
    """Llama 2 7B by hand: 6 per weight and token without look-up and norms; attention 3 x 4 x (s/2) per element of its width."""
    s, h, layers, vocab = 4096, 4096, 32, 32000
    weights = 6738415616 - vocab * h - (2 * layers + 1) * h
    expected = 6 * weights * s + layers * 3 * 4 * (s / 2) * h * s
    assert_allclose(3 * forward_flops_per_sequence(load_model("llama-2-7b")), expected, rtol=1e-12)


def test_llama_8b_at_8192_costs_seven_percent_more_than_6n():
    """6 N leaves out the attention (+13.4%) and counts the embedding look-up (-6.5%): 1.068."""
    model = load_model("llama-3.1-8b", 8192)
    assert_allclose(3 * forward_flops_per_sequence(model) / (6 * num_parameters(model) * 8192), 1.068, rtol=1e-3)


@pytest.mark.parametrize(("name", "layers", "h"), [("megatron-22b", 48, 6144), ("megatron-529.6b", 105, 20480)])
def test_flops_are_those_of_korthikanti(name, layers, h):
    """Korthikanti et al. 2022, arXiv:2205.05198, appendix A: `72 L s h^2 (1 + s/6h + V/12hL)`, with s/12h since we count causal pairs only."""
    s, vocab = 2048, 51200
    expected = 72 * layers * s * h**2 * (1 + s / (12 * h) + vocab / (12 * h * layers))
    assert_allclose(3 * forward_flops_per_sequence(load_model(name)), expected, rtol=1e-12)


@settings(deadline=None, max_examples=25)
@given(window=st.floats(1, 4096), s=st.floats(1, 4096))
def test_a_window_saves_flops_and_never_adds_any(window, s):
    full, windowed = (forward_flops_per_sequence(dense(window=w, seq_len=s)) for w in (math.inf, window))
    both = forward_flops_per_sequence(dense(causal=False, window=window, seq_len=s))
    assert windowed <= full * (1 + 1e-12) and windowed <= both * (1 + 1e-12)
    if window >= s:
        assert_allclose(windowed, full, rtol=1e-12)


def test_causal_attention_is_half_of_bidirectional():
    def quadratic(**changes):
        return forward_flops_per_sequence(dense(seq_len=256, **changes)) - 2 * forward_flops_per_sequence(dense(seq_len=128, **changes))

    assert_allclose(quadratic(), 0.5 * quadratic(causal=False), rtol=1e-12)


# --- as a pytree


def test_padding_with_empty_kinds_changes_nothing():
    model = load_model("deepseek-v3")
    padded = pad_kinds(model, 5)
    assert padded.blocks.count.shape == (5,)
    for count in (num_layers, num_parameters, num_active_parameters, forward_flops_per_sequence):
        assert_allclose(count(padded), count(model), rtol=1e-12)
    with pytest.raises(ValueError, match="has 2 kinds of layer, more than the 1"):
        pad_kinds(model, 1)


def test_one_compilation_serves_models_of_every_family():
    names = ("llama-3.1-8b", "deepseek-v3", "qwen-3-next-80b-a3b", "nemotron-h-56b", "t5-3b", "vit-h-14", "falcon-40b")
    models = [pad_kinds(load_model(name), 4) for name in names]

    def counts(model):
        return jnp.stack([num_parameters(model), num_active_parameters(model), forward_flops_per_sequence(model)])

    compiled = jax.jit(chex.assert_max_traces(counts, n=1))
    one_by_one = jnp.stack([compiled(model) for model in models])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    assert_allclose(one_by_one, jnp.stack([counts(model) for model in models]), rtol=1e-12)
    assert_allclose(jax.vmap(counts)(stacked), one_by_one, rtol=1e-12)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "nemotron-h-8b", "t5-small", "gemma-2-2b", "bert-base"])
def test_gradients_are_finite_in_every_leaf(name):
    model = load_model(name)
    for count in (num_parameters, num_active_parameters, forward_flops_per_sequence):
        chex.assert_tree_all_finite(jax.grad(count)(model))


def test_flops_have_the_elasticity_of_their_terms():
    """d log F / d log count is the share of the layers: all but the output matrix."""
    model = dense()

    def scaled(k):
        return forward_flops_per_sequence(eqx.tree_at(lambda m: m.blocks.count, model, model.blocks.count * k))

    share = 1 - 2 * 128 * 1000 * 64 / forward_flops_per_sequence(model)
    assert_allclose(jax.grad(scaled)(1.0) / forward_flops_per_sequence(model), share, rtol=1e-12)


def test_a_new_sequence_length_changes_only_that():
    model = with_seq_len(dense(), 256)
    chex.assert_trees_all_equal(model, dense(seq_len=256))
