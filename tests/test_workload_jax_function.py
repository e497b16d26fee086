"""The operators of a JAX function: exact FLOP for products, loops counted, calls looked into."""

import jax
import jax.numpy as jnp
import pytest

from diffperf.workload import operators_of

F32 = 4  # bytes


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def flops(operators, primitive):
    return sum(operator.flops for operator in operators if operator.primitive == primitive)


def mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down


def test_mlp():
    m, h, f = 32, 64, 256
    operators = operators_of(mlp, array(m, h), array(h, f), array(f, h))
    products = [operator for operator in operators if operator.primitive == "dot_general"]
    assert [product.flops for product in products] == [2 * m * h * f, 2 * m * f * h]
    assert products[0].nbytes == F32 * (m * h + h * f + m * f)
    assert products[0].input_shapes == ((m, h), (h, f)) and products[0].output_shapes == ((m, f),)
    assert flops(operators, "max") == m * f  # inside the custom_jvp call of relu


def test_gradient_step_of_mlp_costs_three_times_its_forward_products():
    shapes = array(32, 64), array(64, 256), array(256, 64)
    forward = flops(operators_of(mlp, *shapes), "dot_general")
    backward = operators_of(jax.grad(lambda *args: mlp(*args).sum(), argnums=(0, 1, 2)), *shapes)
    assert flops(backward, "dot_general") == 3 * forward


def test_attention():
    b, s, a, d = 2, 128, 4, 16

    @jax.jit
    def attention(q, k, v):
        scores = jnp.einsum("bqad,bkad->baqk", q, k) / d**0.5
        return jnp.einsum("baqk,bkad->bqad", jax.nn.softmax(scores), v)

    operators = operators_of(attention, *[array(b, s, a, d, dtype=jnp.bfloat16)] * 3)
    assert flops(operators, "dot_general") == 4 * b * a * s * s * d
    assert flops(operators, "exp") == b * a * s * s
    assert flops(operators, "reduce_sum") == b * a * s * s  # per input element
    assert flops(operators, "transpose") == 0


@pytest.mark.parametrize("length", [1, 7])
def test_scan_counts_its_body_length_times(length):
    def stack(x, weights):
        return jax.lax.scan(lambda carry, w: (jnp.tanh(carry @ w), None), x, weights)[0]

    operators = operators_of(stack, array(8, 16), array(length, 16, 16))
    product = next(operator for operator in operators if operator.primitive == "dot_general")
    assert product.count == length and product.flops == length * 2 * 8 * 16 * 16
    assert flops(operators, "tanh") == length * 8 * 16


@pytest.mark.parametrize("groups", [1, 4])
def test_convolution(groups):
    n, c, o, w, k = 2, 8, 12, 10, 3

    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=groups)

    operators = operators_of(convolve, array(n, c, w, w), array(o, c // groups, k, k))
    assert flops(operators, "conv_general_dilated") == 2 * n * o * w * w * (c // groups) * k * k


def test_cond_counts_its_dearest_branch_and_checkpoint_is_looked_into():
    def choose(flag, x):
        return jax.lax.cond(flag, lambda y: y @ y, lambda y: y, jax.checkpoint(jnp.sin)(x))

    operators = operators_of(choose, array(dtype=bool), array(16, 16))
    assert flops(operators, "dot_general") == 2 * 16**3
    assert flops(operators, "sin") == 16 * 16
