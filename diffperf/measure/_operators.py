"""The operators of `measure_kernels`: their sizes, and how each becomes a jitted JAX function with its inputs.

FLOP and compulsory bytes are counted as in the tables of kernels: 2mnk for a matmul; 4 b h d s_q s_kv for attention, half of it when causal, 2.5 times the
forward for the backward; every input read and every output written once. Columns of sizes have the names of those tables: C[m,n] = A[m,k] B[k,n];
element-wise, softmax, norms and reductions on `m` rows of width `n`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _transformer as small
from ._design import Case, choose, size
from ._inputs import indices, uniform

Point = Sequence[float]

DTYPES = {
    "float32": jnp.float32, "tf32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "fp8": jnp.float8_e4m3fn, "int8": jnp.int8,
}  # fmt: skip
ALIASES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "float8_e4m3fn": "fp8", "e4m3": "fp8"}
_HIGH, _HALF, _LOW = ("float32",), ("bfloat16", "float16"), ("fp8", "int8")
_MATMUL, _SHORT = (*_HIGH, "tf32", *_HALF, *_LOW), (*_HIGH, *_HALF)


class Work(NamedTuple):
    """A case made ready.

    Attributes:
      run: function to jit and time.
      make: makes one set of its arguments from a number (uint32), to be jitted.
      flops: operations. [FLOP]
      bytes_min: compulsory traffic. [B]
      scratch: memory that it needs beyond that traffic, in arguments or while it runs. [B]
      carry: `run` updates its first argument in place and returns the new one first.
      most_sets: sets of inputs to rotate at most; 1 for a whole program, which finds its own state of the last step in the cache in real use too.
    """

    run: Callable[..., Any]
    make: Callable[[Any], tuple[Any, ...]]
    flops: float
    bytes_min: float
    scratch: float = 0.0
    carry: bool = False
    most_sets: int = 1024


class Operator(NamedTuple):
    """An operator of the design.

    Attributes:
      dimensions: of its space.
      place: (point of the unit cube, largest width) -> sizes.
      build: case -> work.
      weight: share of the turns.
      dtypes: datatypes it knows.
      fixed: its cases are these, instead of a walk.
    """

    dimensions: int
    place: Callable[[Point, int], dict[str, int | str]]
    build: Callable[[Case], Work]
    weight: float
    dtypes: tuple[str, ...]
    fixed: tuple[dict[str, int | str], ...] = ()


def width(dtype: str) -> int:
    """Bytes of one element."""
    return jnp.dtype(DTYPES[dtype]).itemsize


def _matmul(case: Case) -> Work:
    batch = dict(case.sizes).get("b")
    m, n, k = case["m"], case["n"], case["k"]
    dtype, lead = DTYPES[case.dtype], () if batch is None else (int(batch),)
    result = {"int8": jnp.int32, "fp8": jnp.bfloat16}.get(case.dtype)
    precision = lax.Precision.HIGHEST if case.dtype == "float32" else lax.Precision.DEFAULT
    run = lambda a, b: jnp.matmul(a, b, precision=precision, preferred_element_type=result)
    make = lambda seed: (uniform(seed, 1, (*lead, m, k), dtype), uniform(seed, 2, (*lead, k, n), dtype))
    count, out = float(batch or 1), jnp.dtype(result or dtype).itemsize
    return Work(run, make, 2.0 * count * m * n * k, count * (width(case.dtype) * (m * k + k * n) + out * m * n))


def _gemm_sizes(u: Point, largest: int) -> dict[str, int | str]:
    if u[3] < 0.5:  # anything
        return {"m": size(u[0], 8, largest), "n": size(u[1], 8, largest), "k": size(u[2], 8, largest)}
    hidden = size(u[1], 128, largest / 2)
    ratios = ((1.0, 1.0), (3.0, 1.0), (4.0, 1.0), (1.0, 4.0), (1.25, 1.0), (1.0, 0.25))  # projections, QKV, MLP up and down, grouped QKV, one rank's share
    wide, deep = ratios[min(int(u[2] * len(ratios)), len(ratios) - 1)]
    tokens = size(u[0], 1, 64) if u[3] > 0.8 else size(u[0], 64, largest)  # decode, and training or prefill
    return {"m": tokens, "n": max(round(hidden * wide), 1), "k": max(round(hidden * deep), 1)}


def _bmm_sizes(u: Point, largest: int) -> dict[str, int | str]:
    return {"b": size(u[0], 2, 256), "m": size(u[1], 8, largest / 4), "n": size(u[2], 8, largest / 4), "k": size(u[3], 16, 512)}


def _heads(u: float, v: float, w: float) -> dict[str, int | str]:
    queries = choose(u, (2, 4, 8, 16, 32, 64))
    return {"n_q_heads": queries, "n_kv_heads": max(queries // choose(v, (1, 1, 2, 4, 8)), 1), "head_dim": choose(w, (64, 128, 32, 96, 256)), "window_size": 0}


def _prefill_sizes(u: Point, largest: int) -> dict[str, int | str]:
    length = size(u[1], 32, largest / 2)
    return {"batch_size": size(u[0], 1, 16), "isl": length, "kv_len": length} | _heads(*u[2:5])


def _decode_sizes(u: Point, largest: int) -> dict[str, int | str]:
    return {"batch_size": size(u[0], 1, 128), "isl": 1, "kv_len": size(u[1], 64, 2 * largest)} | _heads(*u[2:5])


def _attention_inputs(case: Case) -> Callable[[Any], tuple[Any, ...]]:
    b, s, kv, d, dtype = case["batch_size"], case["isl"], case["kv_len"], case["head_dim"], DTYPES[case.dtype]
    query, key = (b, s, case["n_q_heads"], d), (b, kv, case["n_kv_heads"], d)
    return lambda seed: (uniform(seed, 1, query, dtype), uniform(seed, 2, key, dtype), uniform(seed, 3, key, dtype))


def _attention_work(case: Case) -> tuple[Callable[..., Any], float, float, float]:
    """Function, FLOP, bytes, and bytes of one matrix of scores, which an implementation that is not fused keeps."""
    b, s, kv, h, d = (case[name] for name in ("batch_size", "isl", "kv_len", "n_q_heads", "head_dim"))
    causal = case.op != "attention_decode"
    source = None if case.source == "xla" else case.source
    attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=source)  # type: ignore[arg-type]
    moved = width(case.dtype) * float(b) * d * (2 * s * h + 2 * kv * case["n_kv_heads"])
    return attend, 4.0 * b * h * d * s * kv * (0.5 if causal else 1.0), moved, 4.0 * b * h * s * kv if case.source == "xla" else 0.0


def _attention(case: Case) -> Work:
    attend, flops, moved, scores = _attention_work(case)
    return Work(attend, _attention_inputs(case), flops, moved, 3 * scores)


def _attention_backward(case: Case) -> Work:
    attend, flops, moved, scores = _attention_work(case)
    inputs, shape = _attention_inputs(case), (case["batch_size"], case["isl"], case["n_q_heads"], case["head_dim"])
    make = lambda seed: (jax.vjp(attend, *inputs(seed))[1], uniform(seed, 4, shape, DTYPES[case.dtype]))
    return Work(lambda pull, gradient: pull(gradient), make, 2.5 * flops, 2 * moved, 8 * scores)


def _rows(u: Point, largest: int) -> dict[str, int | str]:
    return {"m": size(u[0], 1, 8 * largest), "n": size(u[1], 32, 2 * largest)}


def _elementwise(function: Callable[..., Any], operands: int, flops_each: float, writes: float = 1.0) -> Callable[[Case], Work]:
    """An operator on `operands` arrays of shape (m, n) which writes the `writes`-th part of one. `flops_each` per element, roughly."""

    def build(case: Case) -> Work:
        shape, dtype = (case["m"], case["n"]), DTYPES[case.dtype]
        make = lambda seed: tuple(uniform(seed, at, shape, dtype) for at in range(operands))
        count = float(shape[0]) * shape[1]
        written = shape[0] if writes == 0 else count * writes
        return Work(function, make, flops_each * count, width(case.dtype) * (operands * count + written))

    return build


def _layer_norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (centred * lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _rms_norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _table_sizes(u: Point, largest: int) -> dict[str, int | str]:
    return {"num_tokens": size(u[0], 16, 4 * largest), "hidden_size": size(u[1], 32, largest), "vocab": size(u[2], 512, 262144)}


def _embedding(case: Case) -> Work:
    tokens, hidden, vocab = case["num_tokens"], case["hidden_size"], case["vocab"]
    make = lambda seed: (uniform(seed, 1, (vocab, hidden), DTYPES[case.dtype]), indices(seed, tokens, vocab))
    moved, table = 2.0 * width(case.dtype) * tokens * hidden + 4.0 * tokens, float(width(case.dtype)) * vocab * hidden
    return Work(lambda table, at: jnp.take(table, at, axis=0, mode="clip"), make, 0.0, moved, table)


def _scatter_add(case: Case) -> Work:
    """The gradient of an embedding: rows summed into a table of zeros, which is written whole."""
    tokens, hidden, vocab = case["num_tokens"], case["hidden_size"], case["vocab"]
    dtype = DTYPES[case.dtype]
    make = lambda seed: (uniform(seed, 1, (tokens, hidden), dtype), indices(seed, tokens, vocab))
    run = lambda rows, at: jnp.zeros((vocab, hidden), dtype).at[at].add(rows, mode="drop")
    moved = width(case.dtype) * (3.0 * tokens * hidden + float(vocab) * hidden) + 4.0 * tokens  # rows read, sums read and written; zeros written
    return Work(run, make, float(tokens) * hidden, moved)


def _cross_entropy(case: Case) -> Work:
    tokens, vocab = case["num_tokens"], case["vocab"]

    def run(scores: Any, at: Any) -> Any:
        wide = scores.astype(jnp.float32)
        return jax.nn.logsumexp(wide, axis=-1) - jnp.take_along_axis(wide, at[:, None], axis=-1)[:, 0]

    make = lambda seed: (uniform(seed, 1, (tokens, vocab), DTYPES[case.dtype]), indices(seed, tokens, vocab))
    return Work(run, make, 4.0 * tokens * vocab, width(case.dtype) * float(tokens) * vocab + 8.0 * tokens)


def _adam(case: Case) -> Work:
    shape = (case["elements"],)

    def make(seed: Any) -> tuple[Any, ...]:
        weights, first, second, gradient = (uniform(seed, at, shape, jnp.float32) for at in range(4))
        return (weights, first, abs(second), jnp.zeros((), jnp.float32)), gradient

    run = lambda state, gradient: (small.adam_update(state[0], state[1], state[2], state[3], gradient),)
    return Work(run, make, 12.0 * shape[0], 28.0 * shape[0], carry=True)  # 4 arrays read, 3 written


def _quantize(case: Case) -> Work:
    shape, target = (case["m"], case["k"]), str(dict(case.sizes)["quant_dtype"])
    top, to = (127.0, jnp.int8) if target == "int8" else (448.0, jnp.float8_e4m3fn)

    def run(x: Any, scale: Any) -> Any:
        scaled = jnp.clip(x.astype(jnp.float32) * scale, -top, top)
        return (jnp.round(scaled) if target == "int8" else scaled).astype(to)

    make = lambda seed: (uniform(seed, 1, shape, DTYPES[case.dtype]), jnp.full((), 0.9 * top, jnp.float32))
    count = float(shape[0]) * shape[1]
    return Work(run, make, 3.0 * count, (width(case.dtype) + 1) * count)


def _transpose(case: Case) -> Work:
    shape = (case["m"], case["n"])
    run = lambda x: jnp.copy(lax.optimization_barrier(x).T)
    return Work(run, lambda seed: (uniform(seed, 1, shape, DTYPES[case.dtype]),), 0.0, 2.0 * width(case.dtype) * shape[0] * shape[1])


def _launch(case: Case) -> Work:
    return Work(lambda x: x + jnp.ones((), x.dtype), lambda seed: (uniform(seed, 1, (1,), jnp.float32),), 1.0, 8.0)


def _transformer(case: Case) -> Work:
    sizes, dtype = small.SmallTransformer(*(case[name] for name in small.SmallTransformer._fields)), DTYPES[case.dtype]
    tokens = lambda seed: indices(seed, sizes.batch_size * sizes.seq_len, sizes.vocab).reshape(sizes.batch_size, sizes.seq_len)
    scratch = 4.0 * sizes.batch_size * sizes.seq_len * (sizes.vocab * 3 + sizes.layers * (20 * sizes.hidden_size + 4 * sizes.num_heads * sizes.seq_len))
    if case.op == "transformer_forward":
        run = lambda parameters, batch: small.logits(parameters, batch, sizes.num_heads, dtype)
        make = lambda seed: (small.initial_parameters(sizes, seed), tokens(seed))
        return Work(run, make, sizes.forward_flops, 4.0 * sizes.num_parameters, scratch, most_sets=1)
    step = lambda state, batch: small.train_step(state, batch, sizes.num_heads, dtype)
    start = lambda seed: (small.initial_state(sizes, seed), tokens(seed))
    moved = 40.0 * sizes.num_parameters  # weights read forward and backward, gradients written, and the 28 of Adam
    return Work(step, start, 3 * sizes.forward_flops + 12.0 * sizes.num_parameters, moved, 2 * scratch, carry=True, most_sets=1)


_TRANSFORMERS = tuple(dict(sizes._asdict()) for sizes in small.SIZES)
_none = lambda u, largest: {}
_quantize_sizes = lambda u, largest: {"m": size(u[0], 1, 4 * largest), "k": size(u[1], 64, largest), "quant_dtype": ("int8", "fp8")[int(u[2] * 2)]}
_transpose_sizes = lambda u, largest: {"m": size(u[0], 32, 2 * largest), "n": size(u[1], 32, 2 * largest)}
_score_sizes = lambda u, largest: {"num_tokens": size(u[0], 16, largest), "vocab": size(u[1], 512, 262144)}
_adam_sizes = lambda u, largest: {"elements": size(u[0], 256, 1e9)}

OPERATORS: dict[str, Operator] = {
    "launch": Operator(0, _none, _launch, 1.0, _HIGH, fixed=({"elements": 1},)),
    "gemm": Operator(4, _gemm_sizes, _matmul, 6.0, _MATMUL),
    "bmm": Operator(4, _bmm_sizes, _matmul, 2.0, _MATMUL),
    "attention_prefill": Operator(5, _prefill_sizes, _attention, 2.0, _SHORT),
    "attention_backward": Operator(5, _prefill_sizes, _attention_backward, 1.5, _SHORT),
    "attention_decode": Operator(5, _decode_sizes, _attention, 1.5, _SHORT),
    "add": Operator(2, _rows, _elementwise(jnp.add, 2, 1.0), 1.5, _SHORT),
    "gelu": Operator(2, _rows, _elementwise(jax.nn.gelu, 1, 8.0), 1.0, _SHORT),
    "copy": Operator(2, _rows, _elementwise(jnp.copy, 1, 0.0), 1.0, _SHORT),
    "reduction": Operator(2, _rows, _elementwise(lambda x: jnp.sum(x, axis=-1), 1, 1.0, writes=0.0), 1.0, _SHORT),
    "softmax": Operator(2, _rows, _elementwise(lambda x: jax.nn.softmax(x, axis=-1), 1, 5.0), 1.0, _SHORT),
    "ln": Operator(2, _rows, _elementwise(_layer_norm, 1, 8.0), 1.0, _SHORT),
    "rmsnorm": Operator(2, _rows, _elementwise(_rms_norm, 1, 4.0), 1.0, _SHORT),
    "embedding": Operator(3, _table_sizes, _embedding, 1.0, _SHORT),
    "scatter_add": Operator(3, _table_sizes, _scatter_add, 1.0, _SHORT),
    "cross_entropy": Operator(2, _score_sizes, _cross_entropy, 1.0, _SHORT),
    "adam": Operator(1, _adam_sizes, _adam, 1.0, _HIGH),
    "quantize_scale_matrix": Operator(3, _quantize_sizes, _quantize, 0.7, _SHORT),
    "transpose": Operator(2, _transpose_sizes, _transpose, 0.7, _SHORT),
    "transformer_forward": Operator(0, _none, _transformer, 1.0, ("float32", "bfloat16"), fixed=_TRANSFORMERS),
    "transformer_train_step": Operator(0, _none, _transformer, 1.0, ("float32", "bfloat16"), fixed=_TRANSFORMERS),
}

GROUPS: dict[str, tuple[str, ...]] = {
    "matmul": ("gemm", "bmm"),
    "attention": ("attention_prefill", "attention_backward", "attention_decode"),
    "elementwise": ("add", "gelu", "copy"),
    "norm": ("ln", "rmsnorm"),
    "optimizer": ("adam",),
    "quantize": ("quantize_scale_matrix",),
    "transformer": ("transformer_forward", "transformer_train_step"),
}
