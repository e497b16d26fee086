"""Relaxations: exact at temperature 0, inside the bounds of their docstrings above it, with true gradients, also at the edges."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from numpy.testing import assert_allclose

from diffperf import smooth

relaxed = settings(deadline=None, max_examples=60, derandomize=True)
floats = functools.partial(st.floats, allow_subnormal=False)  # XLA flushes subnormal numbers to 0
TIMES = st.lists(floats(0.0, 1e3) | floats(1e-7, 1e-3), min_size=3, max_size=3)
POSITIVE = st.lists(floats(1e-7, 1e3), min_size=3, max_size=3)
TEMPERATURE = floats(1e-3, 2.0)
SLACK = 1 + 1e-12  # rounding of a power and its root

maximum, minimum, ceil, choice = (jax.jit(f) for f in (smooth.maximum, smooth.minimum, smooth.ceil, smooth.choice))
pnorm, where, path_split = (jax.jit(f) for f in (smooth.pnorm, smooth.where, smooth.path_split))

OVER_VALUES = (smooth.maximum, smooth.minimum, smooth.choice)
EDGES = ([0.0, 0.0, 0.0], [0.0, 1e-6, 2.0], [2.0, 2.0, 2.0], [1e-7, 1e3, 1e3], [5.0])


@relaxed
@given(TIMES)
def test_temperature_zero_is_exact(values):
    assert maximum(jnp.array(values)) == max(values)
    assert minimum(jnp.array(values)) == min(values)
    assert_allclose(choice(jnp.array(values)), np.eye(3)[np.argmin(values)])
    assert ceil(values[0]) == np.ceil(values[0])


@relaxed
@given(TIMES, TEMPERATURE)
def test_maximum_errs_high_by_at_most_n_to_the_temperature(values, temperature):
    value, exact = float(maximum(jnp.array(values), temperature)), max(values)
    assert exact / SLACK <= value <= 3**temperature * exact * SLACK


@relaxed
@given(POSITIVE, TEMPERATURE)
def test_minimum_errs_low_by_at_most_n_to_the_temperature(values, temperature):
    value, exact = float(minimum(jnp.array(values), temperature)), min(values)
    assert 3**-temperature * exact / SLACK <= value <= exact * SLACK


def test_limits_of_maximum_and_minimum():
    values = jnp.array([1.0, 2.0, 4.0])
    assert_allclose(maximum(values, 1.0), 7.0, rtol=1e-14)  # the sum
    assert_allclose(minimum(values, 1.0), 4 / 7, rtol=1e-14)  # 1 / (1 + 1/2 + 1/4)
    assert_allclose([maximum(values, 1e-4), minimum(values, 1e-4)], [4.0, 1.0], rtol=1e-14)
    assert_allclose(maximum(jnp.array([2.0, 2.0]), 0.1), 2 * 2**0.1, rtol=1e-14)  # two equal times: 7% over
    assert minimum(jnp.array([0.0, 1.0]), 0.5) == 0


@relaxed
@given(floats(0.0, 1e4), floats(1e-3, 1e3))
def test_ceil_lies_between_its_argument_and_the_exact_ceiling(x, temperature):
    assert x - 1e-9 <= float(ceil(x, temperature)) <= np.ceil(x) + 1e-9


def test_limits_of_ceil():
    x = jnp.array([0.25, 3.5, 7.0])
    assert_allclose(ceil(x, 1e-3), jnp.ceil(x), rtol=1e-14)
    assert_allclose(ceil(x, 1e6), x, rtol=1e-6)
    assert_allclose(ceil(jnp.arange(5.0), 0.3), jnp.arange(5.0), rtol=0)  # exact at every integer
    assert_allclose(ceil(jnp.array([2 - 1e-12, 2 + 1e-12]), 0.3), 2.0, rtol=1e-10)  # continuous there


@relaxed
@given(floats(0.0, 1e3), floats(0.0, 1e3), floats(1.0, 60.0))
def test_pnorm_lies_between_maximum_and_sum(a, b, power):
    value = float(pnorm(a, b, power))
    assert max(a, b) / SLACK <= value <= (a + b) * SLACK
    assert_allclose(pnorm(b, a, power), value, rtol=1e-14)


def test_limits_of_pnorm():
    assert_allclose(pnorm(3.0, 4.0, jnp.array([1.0, 2.0, 200.0])), [7.0, 5.0, 4.0], rtol=1e-14)
    assert_allclose(jax.grad(pnorm, (0, 1))(0.0, 0.0, 4.0), (1.0, 1.0))
    assert_allclose(jax.grad(pnorm, (0, 1))(0.0, 2.0, 4.0), (0.0, 1.0))
    assert_allclose(pnorm(1e-30, 1e-30, 4.0), 2**0.25 * 1e-30, rtol=1e-12)  # no underflow: 1e-120 in the fourth power


@relaxed
@given(floats(-10, 10), floats(0, 1e3), floats(0, 1e3), TEMPERATURE)
def test_where_lies_between_its_branches(margin, above, below, temperature):
    low, high = sorted((above, below))
    assert low - 1e-9 <= float(where(margin, above, below, temperature)) <= high + 1e-9
    assert where(margin, above, below) == (above if margin >= 0 else below)


def test_limits_of_where():
    assert_allclose(where(jnp.array([-0.1, 0.0, 0.1]), 1.0, 3.0, 0.0), [3.0, 1.0, 1.0])
    assert_allclose(where(jnp.array([-0.1, 0.0, 0.1]), 1.0, 3.0, 1e-4), [3.0, 2.0, 1.0], rtol=1e-14)
    assert_allclose(where(0.1, 1.0, 3.0, 1e6), 2.0, rtol=1e-6)


@relaxed
@given(POSITIVE, TEMPERATURE, floats(1e-6, 1e6))
def test_choice_is_a_distribution_that_ignores_the_unit_of_cost(costs, temperature, unit):
    costs = np.array(costs)
    weights = choice(costs, temperature)
    assert_allclose(jnp.sum(weights), 1.0, rtol=1e-12)
    assert_allclose(choice(costs * unit, temperature), weights, rtol=1e-8, atol=1e-12)
    assert costs.min() / SLACK <= float(weights @ costs) <= costs.max() * SLACK
    order = np.argsort(costs)
    assert np.all(np.diff(np.asarray(weights)[order]) <= 1e-12)  # the cheaper, the heavier


def test_choice_takes_the_first_of_equals():
    assert_allclose(choice(jnp.array([2.0, 1.0, 1.0])), [0.0, 1.0, 0.0])
    assert_allclose(choice(jnp.array([2.0, 1.0, 1.0]), 1e-3), [0.0, 0.5, 0.5], atol=1e-12)
    assert_allclose(choice(jnp.array([1.0, 3.0]), 1.0), [0.75, 0.25], rtol=1e-12)  # softmax(-log c) = (1/c) / sum(1/c)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("function", OVER_VALUES, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_value(function, temperature):
    values = jnp.array([1.1, 1.3, 0.9])
    check_grads(function, (values, temperature), order=1, modes=("fwd", "rev"), rtol=1e-4, eps=1e-6)


def test_gradients_of_scalar_relaxations():
    check_grads(smooth.ceil, (2.3, 0.4), order=1, modes=("fwd", "rev"), rtol=1e-5)
    check_grads(smooth.where, (0.2, 3.0, 5.0, 0.4), order=1, modes=("fwd", "rev"), rtol=1e-5)
    check_grads(smooth.pnorm, (2.0, 3.0, 4.0), order=1, modes=("fwd", "rev"), rtol=1e-5)
    check_grads(smooth.safe_divide, (2.0, 3.0), order=1, modes=("fwd", "rev"), rtol=1e-5)
    check_grads(smooth.safe_power, (2.0, 3.0), order=1, modes=("fwd", "rev"), rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.3, 1.0])
@pytest.mark.parametrize("values", EDGES, ids=str)
@pytest.mark.parametrize("function", OVER_VALUES, ids=lambda f: f.__name__)
def test_values_and_gradients_are_finite_at_edges(function, values, temperature):
    first = lambda x, t: jnp.ravel(function(x, t))[0]
    chex.assert_tree_all_finite(jax.value_and_grad(first, (0, 1))(jnp.array(values), temperature))


def test_safe_operations_at_zero():
    assert smooth.safe_divide(1.0, 0.0) == 0
    assert_allclose(jax.grad(smooth.safe_divide, (0, 1))(1.0, 0.0), (0.0, 0.0))
    assert smooth.safe_divide(1.0, 0.0, otherwise=7.0) == 7.0
    assert smooth.safe_power(0.0, 0.5) == 0
    assert_allclose(jax.grad(smooth.safe_power, (0, 1))(0.0, 0.5), (0.0, 0.0))
    assert_allclose(jax.grad(smooth.ceil, (0, 1))(3.0, 0.0), (0.0, 0.0))


@pytest.mark.parametrize("function", OVER_VALUES, ids=lambda f: f.__name__)
def test_eager_jit_and_vmap_agree(function):
    rows = jnp.array([[1e-6, 2e-6, 3.0], [0.0, 1.0, 1.0], [4.0, 4.0, 4.0]])
    temperatures = jnp.array([0.0, 0.2, 1.0])
    eager = jnp.stack([function(row, t) for row, t in zip(rows, temperatures, strict=True)])
    assert_allclose(jax.jit(jax.vmap(function))(rows, temperatures), eager, rtol=1e-13)
    assert_allclose(jax.jit(function)(rows[1], temperatures[1]), eager[1], rtol=1e-13)


def finish_by_bisection(latency, time_per_share):
    """The finish time T at which the paths together carry the whole job: sum of max(0, T - latency) / time_per_share = 1."""
    low, high = np.min(latency), np.min(np.add(latency, time_per_share))
    for _ in range(200):
        middle = (low + high) / 2
        carried = np.sum(np.maximum(middle - latency, 0) / time_per_share)
        low, high = (middle, high) if carried < 1 else (low, middle)
    return high


@relaxed
@given(st.lists(floats(0.0, 1e-2), min_size=4, max_size=4), st.lists(floats(1e-5, 1.0), min_size=4, max_size=4))
def test_path_split_finishes_as_early_as_bisection_says(latency, time_per_share):
    latency, time_per_share = np.array(latency), np.array(time_per_share)
    finish, shares = path_split(latency, time_per_share)
    assert_allclose(finish, finish_by_bisection(latency, time_per_share), rtol=1e-9)
    assert_allclose(jnp.sum(shares), 1.0, rtol=1e-12)
    assert jnp.all(shares >= 0)
    done = latency + time_per_share * shares
    assert_allclose(done[shares > 1e-9], finish, rtol=1e-9)  # all used paths finish together
    assert np.all(latency[np.asarray(shares) == 0] >= finish * (1 - 1e-9))  # the others would have started too late


def test_path_split_by_hand():
    # 900 MB over 90 GB/s and 10 GB/s without latency is 900 MB over 100 GB/s
    finish, shares = smooth.path_split([0.0, 0.0], [900e6 / 90e9, 900e6 / 10e9])
    assert_allclose(finish, 9e-3, rtol=1e-14)
    assert_allclose(shares, [0.9, 0.1], rtol=1e-14)
    finish, shares = smooth.path_split([0.0, 1.0], [0.5, 0.5])
    assert_allclose((finish, *shares), (0.5, 1.0, 0.0))  # the second path starts after the first has finished
    assert_allclose(smooth.path_split([2.0], [3.0])[0], 5.0)


def test_path_split_gradient_is_the_multiplier():
    latency, time_per_share = jnp.array([1e-5, 3e-5, 1.0]), jnp.array([1e-3, 2e-3, 1e-3])
    finish = lambda a, b: path_split(a, b)[0]
    by_latency, by_time = jax.grad(finish, (0, 1))(latency, time_per_share)
    step = 1e-6
    for i, unit in enumerate(jnp.eye(3)):
        moved = lambda sign, unit=unit: latency + sign * step * 1e-3 * unit
        assert_allclose(by_latency[i], (finish(moved(1), time_per_share) - finish(moved(-1), time_per_share)) / (2e-3 * step), rtol=1e-6, atol=1e-9)
        scaled = lambda sign, unit=unit: time_per_share * (1 + sign * step * unit)
        numeric = (finish(latency, scaled(1)) - finish(latency, scaled(-1))) / (2 * step * time_per_share[i])
        assert_allclose(by_time[i], numeric, rtol=1e-6, atol=1e-9)
    assert_allclose(by_latency, [2 / 3, 1 / 3, 0.0], rtol=1e-12)  # in proportion to the rates of the used paths
    _, shares = path_split(latency, time_per_share)
    assert_allclose(by_time, by_latency * shares, rtol=1e-12)  # envelope theorem: the multiplier times the share


@pytest.mark.parametrize("latency, time", [([0.0, 0.0], [1.0, 1.0]), ([1.0, 2.0], [1.0, 1.0]), ([0.3], [1.0]), ([5.0, 5.0, 5.0], [1e-9, 1.0, 1e9])])
def test_path_split_is_finite_at_ties(latency, time):
    chex.assert_tree_all_finite(jax.value_and_grad(smooth.path_split, (0, 1), has_aux=True)(jnp.array(latency), jnp.array(time)))


def test_path_split_of_a_short_transfer_in_float32():
    """One byte over paths of 10 us: the transfer is lost beside the latency, the split is not."""
    latency, time = jnp.array([1e-5, 1e-5], jnp.float32), jnp.array([1e-12, 3e-12], jnp.float32)
    with jax.enable_x64(False):
        finish, shares = smooth.path_split(latency, time)
    assert finish.dtype == jnp.float32
    assert_allclose(finish, 1e-5, rtol=1e-6)
    assert_allclose(shares, [0.75, 0.25], rtol=1e-6)
