"""Operators to measure: what they count and compute, their inputs, and the small transformer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

from diffperf.measure._design import Case
from diffperf.measure._inputs import indices, uniform
from diffperf.measure._operators import OPERATORS
from diffperf.measure._transformer import SmallTransformer, adam_update, initial_parameters, initial_state, logits, train_step

# Operators


def small_case(op, dtype="float32"):
    sizes = {
        "gemm": dict(m=6, n=10, k=4), "bmm": dict(b=3, m=6, n=10, k=4), "embedding": dict(num_tokens=12, hidden_size=8, vocab=40),
        "scatter_add": dict(num_tokens=12, hidden_size=8, vocab=40), "cross_entropy": dict(num_tokens=6, vocab=30), "adam": dict(elements=50),
        "quantize_scale_matrix": dict(m=6, k=10, quant_dtype="int8"), "launch": dict(elements=1),
        "attention_decode": dict(batch_size=2, isl=1, kv_len=16, n_q_heads=4, n_kv_heads=2, head_dim=8, window_size=0),
    }.get(op, dict(m=6, n=10))  # fmt: skip
    if op in ("attention_prefill", "attention_backward"):
        sizes = dict(batch_size=2, isl=16, kv_len=16, n_q_heads=4, n_kv_heads=2, head_dim=8, window_size=0)
    if op.startswith("transformer"):
        sizes = dict(layers=1, hidden_size=16, num_heads=2, seq_len=8, batch_size=2, vocab=32)
    return Case(op, dtype, tuple(sizes.items()))


def abstract(work):
    """Inputs and results as shapes."""
    inputs = jax.eval_shape(work.make, jnp.uint32(0))
    return inputs, jax.eval_shape(work.run, *inputs)


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


WHOLE = ("gemm", "bmm", "attention_prefill", "attention_decode", "add", "gelu", "copy", "reduction", "softmax", "ln", "rmsnorm", "transpose")


@pytest.mark.parametrize("op", WHOLE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compulsory_bytes_are_inputs_and_results(op, dtype):
    with jax.enable_x64(False):
        work = OPERATORS[op].build(small_case(op, dtype))
        assert work.bytes_min == nbytes(abstract(work))


def test_compulsory_bytes_where_only_a_part_moves():
    with jax.enable_x64(False):
        byte_counts = {op: OPERATORS[op].build(small_case(op)).bytes_min for op in ("embedding", "cross_entropy", "adam", "quantize_scale_matrix")}
    assert byte_counts == {
        "embedding": 12 * 8 * 4 * 2 + 12 * 4,  # rows read, rows written, indices
        "cross_entropy": 6 * 30 * 4 + 6 * 4 * 2,  # scores, indices, results
        "adam": 50 * 4 * 7,  # weight, two moments, gradient; three written
        "quantize_scale_matrix": 6 * 10 * (4 + 1),
    }


@pytest.mark.parametrize("op", ["gemm", "bmm"])
def test_matmul_flops_are_those_of_the_compiler(op):
    with jax.enable_x64(False):
        work = OPERATORS[op].build(small_case(op))
        counted = jax.jit(work.run).lower(*jax.eval_shape(work.make, jnp.uint32(0))).cost_analysis()["flops"]
    assert work.flops == counted


def test_attention_flops():
    """4 b h d s^2 / 2 causal, 2.5 times that backward, 4 b h d kv decoding."""
    flops = [OPERATORS[op].build(small_case(op)).flops for op in ("attention_prefill", "attention_backward", "attention_decode")]
    assert flops == [4 * 2 * 4 * 8 * 16**2 / 2, 2.5 * 4 * 2 * 4 * 8 * 16**2 / 2, 4 * 2 * 4 * 8 * 16]


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_traces_in_its_datatype(op):
    """Under double precision too, nothing is promoted; and what is carried keeps its shape."""
    for dtype in OPERATORS[op].dtypes[:2]:
        work = OPERATORS[op].build(small_case(op, dtype))
        inputs, results = abstract(work)
        assert not any(leaf.dtype in (jnp.float64, jnp.int64) for leaf in jax.tree.leaves((inputs, results)))
        if work.carry:
            same = lambda a, b: a.shape == b.shape and a.dtype == b.dtype
            assert jax.tree.all(jax.tree.map(same, inputs[0], results[0]))


def test_operators_compute_what_they_are_called():
    get = lambda op: (work := OPERATORS[op].build(small_case(op)), [np.asarray(x) for x in work.make(jnp.uint32(3))])
    work, (a, b) = get("gemm")
    assert_allclose(work.run(a, b), a @ b, rtol=1e-5, atol=1e-6)
    work, (x,) = get("ln")
    assert_allclose(work.run(x), (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5), rtol=1e-4, atol=1e-5)
    work, (rows, at) = get("scatter_add")
    expected = np.zeros((40, 8), np.float32)
    np.add.at(expected, at, rows)
    assert_allclose(work.run(jnp.asarray(rows), jnp.asarray(at)), expected, rtol=1e-5, atol=1e-6)
    work, (table, at) = get("embedding")
    assert_allclose(work.run(table, at), table[at])
    work, (scores, at) = get("cross_entropy")
    expected = np.log(np.exp(scores).sum(1)) - scores[np.arange(6), at]
    assert_allclose(work.run(jnp.asarray(scores), jnp.asarray(at)), expected, rtol=1e-5)
    work, (x, scale) = get("quantize_scale_matrix")
    assert_allclose(work.run(x, scale), np.round(x * scale))


def test_inputs_are_spread_and_differ():
    x, y = (np.asarray(uniform(jnp.uint32(seed), 1, (50, 40), jnp.float32)) for seed in (0, 1))
    assert -1 <= x.min() < -0.95 and 0.95 < x.max() < 1 and abs(x.mean()) < 0.05 and abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.1
    at = np.asarray(indices(jnp.uint32(5), 5000, 37))
    assert set(at) == set(range(37))


# The small transformer


SIZES = SmallTransformer(1, 16, 2, 8, 3, 32)


def test_transformer_counts():
    parameters = initial_parameters(SIZES, jnp.uint32(0))
    assert sum(x.size for x in jax.tree.leaves(parameters)) == SIZES.num_parameters
    tokens = jnp.zeros((3, 8), jnp.int32)
    counted = jax.jit(logits, static_argnums=2).lower(parameters, tokens, 2).cost_analysis()["flops"]
    whole_attention = 2.0 * 3 * 8 * 8 * 16  # the compiler multiplies the masked half too
    small_parts = counted / (SIZES.forward_flops + whole_attention) - 1  # norms, softmax, GELU
    assert 0 < small_parts < 0.5


def test_transformer_is_causal_and_learns():
    parameters = initial_parameters(SIZES, jnp.uint32(0))
    tokens = indices(jnp.uint32(1), 24, 32).reshape(3, 8)
    before = jax.jit(logits, static_argnums=2)
    changed = before(parameters, tokens.at[:, 5].set((tokens[:, 5] + 1) % 32), 2)
    same = before(parameters, tokens, 2)
    assert_allclose(changed[:, :5], same[:, :5], rtol=1e-4, atol=1e-6)
    assert np.abs(changed[:, 5:] - same[:, 5:]).max() > 1e-4
    state, step = initial_state(SIZES, jnp.uint32(0)), jax.jit(train_step, static_argnums=2)
    losses = []
    for _ in range(20):
        state, value = step(state, tokens, 2)
        losses.append(float(value))
    assert abs(losses[0] - np.log(32)) < 0.1 and losses[-1] < losses[0] - 0.2


def test_adam_is_optax_adam():
    weights, gradient = jnp.array([1.0, -2.0, 3.0], jnp.float32), jnp.array([0.5, 0.1, -2.0], jnp.float32)
    state, other = (weights, jnp.zeros(3, jnp.float32), jnp.zeros(3, jnp.float32), jnp.zeros((), jnp.float32)), optax.adam(1e-3)
    expected, memory = weights, other.init(weights)
    for _ in range(3):
        state = adam_update(*state, gradient)
        update, memory = other.update(gradient, memory)
        expected = expected + update
    assert_allclose(state[0], expected, rtol=1e-5)
