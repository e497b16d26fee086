"""What to measure: budgets, and designs that cover sizes, operators and ranks."""

import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import qmc

from diffperf.measure import design, operator_names, parse_budget
from diffperf.measure._design import Case, Stream, quasi_random, size, spread, take_turns
from diffperf.measure._operators import OPERATORS

# Budgets


@pytest.mark.parametrize("text, seconds", [("120s", 120), ("2m", 120), ("1.5h", 5400), ("90", 90), (30, 30), (" 0.5 min ", 30), ("1e2s", 100)])
def test_budget(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5s", "soon", "5 days", "nan", "inf", "1e999s", "2m30s"])
def test_bad_budget(text):
    with pytest.raises(ValueError, match="budget is .* such as 120s, 2m or 1.5h"):
        parse_budget(text)


# Designs


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4, 5])
def test_every_prefix_of_the_sequence_covers_each_axis(dimensions):
    """2^p points lie one in each of 2^p equal parts, so n points leave no gap above 4/n; random points leave about ln(n)/n, 7/n at 1000."""
    points = quasi_random(1024, dimensions, "any")
    assert points.shape == (1024, dimensions) and points.min() >= 0 and points.max() < 1
    for n, axis in itertools.product((10, 33, 100, 317, 1000), range(dimensions)):
        assert np.diff(np.sort(points[:n, axis]), prepend=0, append=1).max() <= 4 / n
    for axis in range(dimensions):
        assert set(np.floor(points[:256, axis] * 256)) == set(range(256))


def test_the_sequence_is_that_of_scipy():
    """The same points, there in the order of a Gray code, but for bits that the seed flips."""
    ours = (quasi_random(64, 5, 0) * 2**32).astype(np.uint64)
    theirs = (qmc.Sobol(5, scramble=False, bits=32).random_base2(6) * 2**32).astype(np.uint64)
    assert set(map(tuple, ours ^ ours[0])) == set(map(tuple, theirs ^ theirs[0]))


def test_the_sequence_goes_on_and_shifts_with_the_seed():
    whole = quasi_random(20, 3, 1)
    assert_allclose(quasi_random(12, 3, 1, start=8), whole[8:], atol=1e-12)
    assert np.abs(quasi_random(20, 3, 2) - whole).min() > 1e-6


def test_prefixes_of_the_design_cover_quadrants_of_a_plane():
    points = quasi_random(400, 2, 3)
    for n in range(40, 400, 40):
        counts = np.histogram2d(*points[:n].T, bins=2, range=[[0, 1], [0, 1]])[0]
        assert np.abs(counts / n - 0.25).max() < 0.06


def test_design_names_every_operator_early_and_matmuls_most():
    cases = design(count=120, backend="cpu")
    ops = [case.op for case in cases]
    assert set(ops[:50]) == set(OPERATORS)
    assert len(set(cases)) == 120
    assert max(set(ops), key=ops.count) == "gemm"


def test_matmul_shapes_spread_and_have_thin_ones():
    cases = design(["gemm"], ["float32"], count=200, backend="gpu")
    for name in "mnk":
        values = np.log2([case[name] for case in cases])
        assert values.min() < 6 and values.max() > 13 and values.std() > 2
    assert sum(case["m"] <= 64 for case in cases) > 30
    assert sum(case["n"] % 64 == 0 for case in cases) > 60


def test_fewer_operators_leave_each_walk_as_it_was():
    of = lambda cases: [case for case in cases if case.op == "softmax"]
    every, few = of(design(count=200, backend="cpu")), of(design(["softmax", "norm"], count=60, backend="cpu"))
    shared = min(len(every), len(few))
    assert shared >= 4 and [c for c in every if c.dtype == "float32"][:3] == [c for c in few if c.dtype == "float32"][:3]
    assert design(count=40, backend="cpu") == design(count=40, backend="cpu") != design(count=40, backend="cpu", seed=1)


def test_streams_take_turns_by_weight_and_end():
    stream = lambda name, weight, count: Stream(name, weight, iter([Case(name, "float32", (("m", i),)) for i in range(count)]))
    order = [case.op for case in take_turns([stream("a", 3.0, 1000), stream("b", 1.0, 2)], lambda case: case.op == "b" or case["m"] < 8)]
    assert order.count("b") == 2 and order.count("a") == 8
    assert order[:4].count("a") == 3
    taken = [case["m"] for case in take_turns([stream("a", 1.0, 6)], lambda case: None if case["m"] < 2 else case["m"] % 2 == 0)]
    assert taken == [2, 4]  # 0 and 1 are done already, odd ones are passed over


def test_sizes_are_even_in_the_logarithm():
    assert spread(0.5, 4, 64) == pytest.approx(16)
    values = [size(u, 8, 8192) for u in np.linspace(0, 1, 50, endpoint=False)]
    assert values == sorted(values) and all(v % 64 == 0 for v in values if v >= 512) and all(v % 8 == 0 for v in values if v >= 64)


@pytest.mark.parametrize(
    "words, part",
    [
        (dict(ops=["matmull"]), "op 'matmull' is not known"),
        (dict(datatypes=["fp7"]), "datatype 'fp7' is not known"),
        (dict(datatypes=["tf32"]), "datatype 'tf32' is of GPUs"),
        (dict(ops=["adam"], datatypes=["int8"]), "none of the operators has datatype int8"),
    ],
)
def test_unknown_words(words, part):
    with pytest.raises(ValueError, match=part):
        design(backend="cpu", count=1, **words)


def test_groups_and_short_names_of_datatypes():
    ops = {case.op for case in design(["attention"], ["bf16"], count=9, backend="cpu")}
    assert ops == {"attention_prefill", "attention_backward", "attention_decode"}
    assert {"matmul", "gemm"} <= set(operator_names())
    sources = {case.source for case in design(["attention_decode"], ["bf16"], count=9, backend="gpu")}
    assert sources == {"cudnn", "xla"}
