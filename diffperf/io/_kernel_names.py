"""Words of kernel-timing tables in one spelling: operators, datatypes, libraries, columns, and the sizes that each operator needs.

Tables of other projects name the same thing in many ways (`gemm`, `linear`, `mm`; `bfloat16`, `bf16xbf16->bf16`). What is not known keeps its name,
so that nothing is lost; no model is chosen here.
"""

import re

# Canonical size -> columns of a file that hold it, the first non-empty one counts. Headers are compared in lower case.
SIZES: dict[str, tuple[str, ...]] = {
    "batch": ("batch", "b", "num_groups"),
    "m": ("m", "elements", "numel"),
    "n": ("n",),
    "k": ("k",),
    "batch_size": ("batch_size", "batchsize"),
    "q_len": ("q_len", "isl", "s_q", "seq_len"),
    "kv_len": ("kv_len", "s_kv"),
    "n_q_heads": ("n_q_heads", "num_q_heads"),
    "n_kv_heads": ("n_kv_heads", "num_key_value_heads", "num_kv_heads"),
    "num_heads": ("num_heads",),
    "head_dim": ("head_dim",),
    "window_size": ("window_size",),
    "num_tokens": ("num_tokens", "num_token"),
    "hidden_size": ("hidden_size",),
    "inter_size": ("inter_size", "intermediate_size"),
    "topk": ("topk", "num_topk"),
    "num_experts": ("num_experts",),
    "moe_tp_size": ("moe_tp_size",),
    "moe_ep_size": ("moe_ep_size",),
    "tp_size": ("tp_size", "tp"),
    "step": ("step",),
    "next_n": ("next_n",),
    "vocab": ("vocab",),
    "layers": ("layers",),
    "flops": ("flops",),
    "bytes_min": ("bytes_min",),
    "num_threads": ("num_threads",),
    "rotated_bytes": ("rotated_bytes",),
}
UNCHECKED = ("flops", "bytes_min", "num_threads", "rotated_bytes")  # of the file's author, not sizes: kept as they are; the first two show a wrong time unit
MAY_BE_ZERO = ("window_size", "step")  # 0: no window; nothing cached before this call

TEXTS: dict[str, tuple[str, ...]] = {
    "gpu": ("gpu", "system"),
    "datatype": ("datatype", "dtype", "gemm_dtype", "attn_dtype", "bmm_dtype", "mla_dtype", "moe_dtype", "quant_dtype"),
    "datatype_name": ("datatype_name",),
    "out_datatype": ("out_datatype", "out_dtype"),
    "kv_cache_datatype": ("kv_cache_datatype", "kv_cache_dtype", "kv_dtype"),
    "quant_datatype": ("quant_datatype", "quant_dtype"),
    "gemm_datatype": ("gemm_datatype", "gemm_type"),
    "library": ("library", "framework"),
    "library_version": ("library_version", "version", "torch", "software"),
    "kernel_source": ("kernel_source", "kernel_name"),
    "flag": ("flag",),
    "distribution": ("distribution",),
    "transpose": ("transpose", "transpose_ab"),
    "model": ("model", "model_name"),
    "config": ("config", "key"),
    "device": ("device",),
    "date": ("date",),
}
OP_COLUMNS = ("op", "op_name", "component")
# Time column -> seconds per unit. A column without a unit is taken as microseconds, as the tables of this kind usually are, and then checked.
TIMES = {"time_s": 1.0, "time_us": 1e-6, "latency_us": 1e-6, "time_ms": 1e-3, "latency_ms": 1e-3, "time_ns": 1e-9, "time": 1e-6, "latency": 1e-6}
# Follow from the sizes and the time, or describe the measurement; not read and not worth a remark.
DERIVED = frozenset("tflops gbps mfu efficiency peak_tflops peak_tflops_used time_std_us raw throughput_raw detail power power_limit beam_width".split())

_ELEMENTWISE = "add mul gelu relu tanh silu swiglu exp copy scale triad rope mlp_act attn_rope hbm_copy hbm_mul hbm_add hbm_triad memory_bound".split()
_OPS = {
    **dict.fromkeys(("gemm", "linear", "matmul", "mm"), "matmul"),
    **dict.fromkeys(("bmm", "batched_matmul", "batched_gemm"), "batched_matmul"),
    **dict.fromkeys(("group_matmul", "grouped_gemm", "grouped_matmul", "grouped_gemm_prefill", "grouped_gemm_decode"), "grouped_matmul"),
    **dict.fromkeys(("moe", "moe_ffn"), "moe_ffn"),
    **dict.fromkeys(("context_attention", "attention_prefill", "sdp_fwd", "standard_attention_pytorch", "flash_attention_2_0"), "attention_prefill"),
    **dict.fromkeys(("generation_attention", "attention_decode", "mha_decode"), "attention_decode"),
    **dict.fromkeys(("sdp_bwd", "attention_backward"), "attention_backward"),
    **dict.fromkeys(("mla_context", "context_mla", "mla_prefill"), "mla_prefill"),
    **dict.fromkeys(("mla_generation", "generation_mla", "mla_decode"), "mla_decode"),
    **dict.fromkeys(("mla_bmm", "mla_gen_pre", "mla_gen_post"), "mla_bmm"),
    **dict.fromkeys(("compute_scale", "computescale", "quantize_computescale"), "quantize_computescale"),
    **dict.fromkeys(("scale_matrix", "quantize_scale_matrix"), "quantize_scale_matrix"),
    **dict.fromkeys(("ln", "layernorm", "layer_norm", "input_layernorm", "post_attention_layernorm"), "layernorm"),
    **dict.fromkeys(("rmsnorm", "rms_norm"), "rmsnorm"),
    **dict.fromkeys(("reduction", "reduce", "reduce_sum", "sum", "hbm_dot"), "reduction"),
    **dict.fromkeys((*_ELEMENTWISE, "elementwise"), "elementwise"),
}
_ATTENTION = ("batch_size", "q_len", "kv_len", "n_q_heads", "n_kv_heads", "head_dim")
_MLA = ("batch_size", "q_len", "kv_len", "num_heads")
# Operator -> (sizes it needs, sizes it may have). Others are blanked: a `k` of 0 in a row without one says "not applicable".
NEEDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "matmul": (("m", "n", "k"), ("tp_size", "num_tokens")),
    "batched_matmul": (("batch", "m", "n", "k"), ()),
    "grouped_matmul": (("batch", "m", "n", "k"), ()),
    "moe_ffn": (("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"), ()),
    "attention_prefill": (_ATTENTION, ("window_size", "step")),
    "attention_decode": (_ATTENTION, ("window_size", "step")),
    "attention_backward": (_ATTENTION, ("window_size",)),
    "encoder_attention": (_ATTENTION, ()),
    "mla_prefill": (_MLA, ("tp_size", "step")),
    "mla_decode": (_MLA, ("tp_size", "step", "next_n")),
    "mla_bmm": (("num_tokens", "num_heads"), ()),
    "quantize_computescale": (("m", "k"), ()),
    "quantize_scale_matrix": (("m", "k"), ()),
    "layernorm": (("m", "n"), ("tp_size", "num_tokens")),
    "rmsnorm": (("m", "n"), ("tp_size", "num_tokens")),
    "softmax": (("m", "n"), ()),
    "reduction": (("m",), ("n",)),
    "embedding": (("num_tokens", "hidden_size"), ("vocab",)),
    "scatter_add": (("num_tokens", "hidden_size"), ("vocab",)),
    "cross_entropy": (("num_tokens", "vocab"), ()),
    "adam": (("m",), ()),
    "elementwise": (("m",), ("n", "tp_size", "num_tokens")),
}

_DATATYPES = {
    **dict.fromkeys(("float32", "fp32", "f32", "float"), "fp32"),
    **dict.fromkeys(("tf32", "tensorfloat32"), "tf32"),
    **dict.fromkeys(("float16", "fp16", "f16", "half", "fp16_mixed"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("fp8", "float8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz"), "fp8"),
    **dict.fromkeys(("int8", "sq", "s8", "i8"), "int8"),
    **dict.fromkeys(("int8_wo", "int8_weight_only"), "int8_weight_only"),
    **dict.fromkeys(("int4_wo", "int4_weight_only"), "int4_weight_only"),
    **dict.fromkeys(("float64", "fp64", "f64", "double"), "fp64"),
}


def canonical_op(name: str) -> str:
    """The operator under its usual name here; an unknown one keeps its own, in lower case with `_`."""
    key = re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")
    return _OPS.get(key, key)


def canonical_datatype(name: str) -> tuple[str, str]:
    """Datatype of the inputs and of the output ("" where not said): `bf16xbf16->f32` is ("bf16", "fp32")."""
    text = name.strip().lower()
    inputs, _, output = text.partition("->")
    output = _DATATYPES.get(output, output)
    if inputs in _DATATYPES:
        return _DATATYPES[inputs], output
    parts = [_DATATYPES.get(part, part) for part in inputs.split("x")] if output else [inputs]
    return (parts[0] if len(set(parts)) == 1 else "x".join(parts)), output


def canonical_library(name: str) -> tuple[str, str]:
    """Library and version: `trtllm 1.3.0rc20` is ("trtllm", "1.3.0rc20"); "" for a version not said."""
    text = name.strip()
    if text.lower().startswith("xla"):
        found = re.search(r"(\d+(?:\.\w+)+)\)?$", text)
        return "xla", found[1] if found else ""
    found = re.fullmatch(r"(.+?)[ =]+v?(\d[\w.+-]*)", text)
    return (found[1].lower(), found[2]) if found else (text.lower(), "")
