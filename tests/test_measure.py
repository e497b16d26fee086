"""Measuring this machine: budgets, designs, counts, timing, tables that grow, and both commands. No test asserts a wall time."""

import csv
import getpass
import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose
from scipy.stats import qmc

from diffperf.cli import main
from diffperf.io import read_kernels
from diffperf.measure import _kernels as kernels
from diffperf.measure import bus_factor, collective_design, design, measure_collectives, measure_kernels, operator_names, parse_budget
from diffperf.measure._design import Case, Stream, quasi_random, size, spread, take_turns
from diffperf.measure._inputs import indices, uniform
from diffperf.measure._operators import OPERATORS, Work
from diffperf.measure._table import GrowingTable
from diffperf.measure._timing import spread_of_median, time_calls
from diffperf.measure._transformer import SmallTransformer, adam_update, initial_parameters, initial_state, logits, train_step


@pytest.fixture
def run(capsys):
    """Runs the command line in this process; returns exit code, stdout and stderr."""

    def call(*args):
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return call


def rows_of(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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


# Timing


def test_rotation_calls_every_set_in_turn():
    called = []
    timing = time_calls(lambda x: called.append(x), [(i,) for i in range(5)], cap=1.0, agreed=(10, 3))
    assert timing.iterations == 10 and timing.calls == 3
    assert called == [i for i, _ in zip(itertools.cycle(range(5)), range(len(called)))] and len(called) >= 30


def test_carried_state_goes_through_every_call():
    seen = []
    time_calls(lambda state, x: (seen.append(state) or state + 1, x), [(0, "x"), (100, "y")], cap=1.0, carry=True, agreed=(6, 1))
    assert seen == [at // 2 + 100 * (at % 2) for at in range(len(seen))]


def test_sampling_stops_at_the_cap_or_when_steady():
    unsteady = time_calls(lambda: None, [()], cap=0.0)
    assert unsteady.iterations == 3
    assert unsteady.least <= unsteady.p10 <= unsteady.median <= unsteady.p90


def test_interval_of_the_median():
    """100 values 101 to 200: ranks 40 and 60, so half of (160 - 140) over 150.5."""
    assert spread_of_median(list(range(101, 201))) == pytest.approx(10 / 150.5)
    assert spread_of_median([2.0] * 9) == 0


# Tables


FIXED = {"device": "X", "version": "1"}


def test_table_grows_and_is_read_back(tmp_path):
    path = tmp_path / "t.csv"
    table = GrowingTable(path, ("device", "version", "m", "note"), FIXED)
    table.append({**FIXED, "m": 3, "note": 'a, "b"\nc'})
    again = GrowingTable(path, ("device", "version", "m", "note"), FIXED)
    assert again.rows == [{"device": "X", "version": "1", "m": "3", "note": 'a, "b" c'}] and again.repaired == 0


def test_a_table_that_vanished_does_not_come_back_without_header(tmp_path):
    table = GrowingTable(tmp_path / "t.csv", ("device", "version", "m"), FIXED)
    (tmp_path / "t.csv").unlink()
    with pytest.raises(FileNotFoundError):
        table.append(FIXED | {"m": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_unfinished_row_is_cut_off(tmp_path, cut):
    path = tmp_path / "t.csv"
    table = GrowingTable(path, ("device", "version", "m"), FIXED)
    table.append(FIXED | {"m": 1})
    whole = path.read_bytes()
    table.append(FIXED | {"m": 222})
    path.write_bytes(path.read_bytes()[:-cut])
    again = GrowingTable(path, ("device", "version", "m"), FIXED)
    assert path.read_bytes() == whole and [row["m"] for row in again.rows] == ["1"] and again.repaired == len("X,1,222\n") - cut
    path.write_bytes(b"device,ver")  # interrupted in the header
    assert GrowingTable(path, ("device", "version", "m"), FIXED).rows == [] and path.read_bytes() == b"device,version,m\n"


def test_other_tables_are_left_alone(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,2\n")
    for force in (False, True):
        with pytest.raises(ValueError, match="is another table: it begins with 'a,b'"):
            GrowingTable(path, ("device", "version", "m"), FIXED, force)
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(ValueError, match="does not exist. Create it first"):
        GrowingTable(tmp_path / "no" / "t.csv", ("device",), FIXED)


def test_another_device_is_refused_or_replaced(tmp_path):
    path = tmp_path / "t.csv"
    columns = ("device", "version", "m")
    GrowingTable(path, columns, FIXED).append(FIXED | {"m": 1})
    with pytest.raises(ValueError, match="version is 1 there and 2 here"):
        GrowingTable(path, columns, FIXED | {"version": "2"})
    assert len(GrowingTable(path, columns, FIXED).rows) == 1
    assert GrowingTable(path, columns, FIXED | {"version": "2"}, force_new=True).rows == []
    assert path.read_text() == "device,version,m\n"


# measure_kernels


FEW = ("launch", "add")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A table of three rows, interrupted and continued."""
    path = tmp_path_factory.mktemp("measured") / "k.csv"

    def stop(progress):
        if progress.rows_added == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_kernels(60.0, path, FEW, ["float32"], on_progress=stop)
    interrupted = path.read_text()
    last = []

    def end(progress):
        last.append(progress)
        if progress.rows_added == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_kernels(60.0, path, FEW, ["float32"], on_progress=end)
    return path, interrupted, last


def test_interrupted_rows_stay_and_are_not_measured_again(measured):
    path, interrupted, last = measured
    rows = rows_of(path)
    assert len(rows) == 3 and path.read_text().startswith(interrupted)
    assert len({(row["op"], row["m"], row["n"]) for row in rows}) == 3
    assert last[0].rows_added == 0 and last[0].budget_s == 60 and last[0].label.startswith("add float32")


def test_rows_say_how_they_were_made(measured):
    for row in rows_of(measured[0]):
        number = lambda name, row=row: float(row[name])
        assert 0 < number("time_min_us") <= number("time_p10_us") <= number("time_us") <= number("time_p90_us")
        assert number("gbps") == pytest.approx(number("bytes_min") / number("time_us") / 1e3, rel=1e-4)
        assert number("compile_s") > 0 and number("iterations") >= 3 and number("calls_per_sync") == 1
        assert number("rotated_bytes") >= 2 * 4 and row["backend"] == "cpu" and row["jax"] == jax.__version__ and row["num_threads"]
        assert row["gpu"] == "cpu" and row["device"] and row["date"].count("-") == 2 and row["framework"] == f"jax {jax.__version__}"


def test_table_names_no_host_or_user(measured):
    text = measured[0].read_text()
    assert socket.gethostname() not in text and str(measured[0].parent) not in text
    assert len(getpass.getuser()) < 4 or getpass.getuser() not in text


def test_reader_of_kernels_takes_the_table(measured):
    table = read_kernels(str(measured[0]))
    assert len(table) == 3 and table.num_rejected == 0
    assert list(table.op).count("elementwise") == 2 and set(table.datatype) == {"fp32"} and set(table.library) == {"jax"}
    assert_allclose(np.sort(table.time_s), np.sort([float(row["time_us"]) for row in rows_of(measured[0])]) * 1e-6)


def test_what_the_backend_cannot_run_is_noted(tmp_path, monkeypatch):
    def broken(case):
        def run(x):
            raise NotImplementedError("no such unit")

        return Work(run, lambda seed: (uniform(seed, 1, (4,), jnp.float32),), 1.0, 16.0)

    sizes = tuple({"m": m, "n": 8} for m in range(9))
    monkeypatch.setitem(OPERATORS, "add", OPERATORS["add"]._replace(build=broken, fixed=sizes))
    result = measure_kernels(30.0, tmp_path / "k.csv", FEW, ["float32"])
    assert result.unavailable == {"add float32 xla": "no such unit"} and result.by_op == {"launch": 1} and result.rows_added == 1


def test_a_size_that_fails_does_not_end_its_operator(tmp_path, monkeypatch):
    whole = OPERATORS["add"].build
    seen = []

    def some(case):
        work = whole(case)
        fails = len(seen) % 2 == 0

        def run(x, y):
            if fails:
                raise ValueError("this width is not supported")
            return x + y

        return work._replace(run=run)

    def count(progress):
        seen.append(progress.label)
        if progress.rows_added == 2:
            raise KeyboardInterrupt

    monkeypatch.setitem(OPERATORS, "add", OPERATORS["add"]._replace(build=some))
    with pytest.raises(KeyboardInterrupt):
        measure_kernels(60.0, tmp_path / "k.csv", ["add"], ["float32"], on_progress=count)
    assert len(rows_of(tmp_path / "k.csv")) == 2


def test_cases_above_the_budget_are_passed_over(tmp_path, monkeypatch):
    slow = lambda case: Work(lambda x: x, lambda seed: (uniform(seed, 1, (4,), jnp.float32),), 1e18, 16.0)
    monkeypatch.setitem(OPERATORS, "launch", OPERATORS["launch"]._replace(build=slow))
    result = measure_kernels(30.0, tmp_path / "k.csv", ["launch"], ["float32"])
    assert result.rows_added == 0 and result.passed_over == {"launch": 1}


def test_costs_are_learned_from_the_table(measured):
    """A row that took a hundred times the first guess makes the next guess larger; two of them more so."""
    device = kernels.this_device()
    table = GrowingTable(measured[0], kernels.COLUMNS, device.columns())
    fresh = lambda rows: kernels._Run(device, type("T", (), {"rows": rows})(), 60.0, 0.0, 0)
    row = table.rows[0]
    pair, counts = f"{row['op']} {row['dtype']} xla", (float(row["flops"]), float(row["bytes_min"]))
    first = fresh([]).expected(pair, *counts)
    slow = row | {"time_us": str(first * 100 * 1e6)}
    assert_allclose([fresh([slow] * n).expected(pair, *counts) for n in (1, 2)], [first * 10, first * 10**1.5], rtol=1e-3)


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf")])
def test_budget_of_the_python_door(tmp_path, budget):
    for measure in (measure_kernels, measure_collectives):
        with pytest.raises(ValueError, match="budget_s is .* above zero and finite"):
            measure(budget, tmp_path / "k.csv")
    assert not list(tmp_path.iterdir())


# Collectives


def test_bus_factors():
    """nccl-tests: 2 (n-1)/n for all-reduce, (n-1)/n for gather, scatter and all-to-all, 1 for send and receive."""
    assert [bus_factor(op, 4) for op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv")] == [1.5, 0.75, 0.75, 0.75, 1.0]


def test_prefixes_of_the_collective_design_spread_over_sizes_and_ranks():
    cases = list(collective_design(6))
    assert {case["n_ranks"] for case in cases} == {2, 4, 6} and len(set(cases)) == len(cases)
    assert all(case["bytes"] % (4 * case["n_ranks"]) == 0 for case in cases)
    first = [np.log2(case["bytes"]) for case in cases if case.op == "all_reduce" and case["n_ranks"] == 4]
    for n in (4, 8, 16):
        assert np.diff(np.sort(first[:n])).max() <= 2 * 32 / n
    assert len({(case.op, case["n_ranks"]) for case in cases[:15]}) == 15
    assert {case["n_ranks"] for case in collective_design(8, processes=4)} == {4, 8}
    assert {case.op for case in collective_design(2, ["psum", "ppermute"])} == {"all_reduce", "sendrecv"}


@pytest.mark.parametrize(
    "words, part",
    [(dict(devices=1), "needs at least 2"), (dict(devices=2, ops=["sum"]), "op 'sum' is not known"), (dict(devices=2, datatypes=["fp8"]), "datatype 'fp8'")],
)
def test_bad_words_of_collectives(words, part):
    with pytest.raises(ValueError, match=part):
        collective_design(**words)


def test_more_devices_than_there_are(tmp_path):
    with pytest.raises(ValueError, match="devices is 4096, but JAX has .*jax_num_cpu_devices"):
        measure_collectives(1.0, tmp_path / "c.csv", devices=4096)


COLLECTIVES_COMPUTE = """
import sys
import jax
import numpy as np
from diffperf.cli import main
from diffperf.measure._collectives import COLLECTIVES, collective_call
from diffperf.measure._design import Case
jax.config.update("jax_num_cpu_devices", 4)
for op in COLLECTIVES:
    function, make = collective_call(Case(op, "float32", (("bytes", 64), ("n_ranks", 4))), jax.devices())
    x = make()
    sent, got = np.asarray(x).reshape(4, -1), np.asarray(function(x)).reshape(4, -1)
    assert max(sent.nbytes, got.nbytes) == 4 * 64, op
    expected = {
        "all_reduce": np.tile(sent.sum(0), (4, 1)), "all_gather": np.tile(sent.ravel(), (4, 1)), "reduce_scatter": sent.sum(0).reshape(4, -1),
        "alltoall": sent.reshape(4, 4, -1).swapaxes(0, 1).reshape(4, -1), "sendrecv": np.roll(sent, 1, axis=0),
    }[op]
    np.testing.assert_array_equal(got, expected, err_msg=op)
main(["measure", "collectives", "--budget", "3s", "--ops", "psum,all_gather", "--out", sys.argv[1], "--json"])
"""


def test_collectives_compute_and_are_measured(tmp_path):
    """In a process of its own, whose CPU is parted into four devices."""
    from diffperf.io import read_collectives

    path = tmp_path / "c.csv"
    done = subprocess.run([sys.executable, "-W", "error", "-c", COLLECTIVES_COMPUTE, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, rows = json.loads(done.stdout), rows_of(path)
    assert said["rows_added"] == len(rows) >= 1
    for row in rows:
        assert float(row["algbw_GBps"]) == pytest.approx(float(row["bytes"]) / float(row["time_us"]) / 1e3, rel=1e-4)
        assert float(row["busbw_GBps"]) == pytest.approx(float(row["algbw_GBps"]) * bus_factor(row["op"], int(row["n_ranks"])), rel=1e-4)
    table = read_collectives(path)
    assert len(table) == len(rows) and not [problem for problem in table.problems if "left out" in problem.kind]


# What is committed


def test_committed_tables_are_read_whole():
    from diffperf.io import read_collectives

    folder = Path(__file__).resolve().parent.parent / "calibration" / "measured"
    table, rows = read_kernels(str(folder / "cpu_kernels.csv")), rows_of(folder / "cpu_kernels.csv")
    assert tuple(rows[0]) == kernels.COLUMNS and len(table) == len(rows) and table.num_rejected == 0
    assert {row["op"] for row in rows} == set(OPERATORS)
    assert len(read_collectives(folder / "cpu_collectives.csv")) == len(rows_of(folder / "cpu_collectives.csv"))


# Command line


@pytest.mark.parametrize(
    "args, parts",
    [
        (("kernels", "--budget", "0"), ("budget is '0'", "120s")),
        (("kernels", "--budget", "soon"), ("budget is 'soon'", "1.5h")),
        (("kernels", "--ops", "matmull"), ("'matmull' is not known", "matmul")),
        (("kernels", "--ops", ","), ("names nothing",)),
        (("kernels", "--datatypes", "fp7"), ("'fp7'", "bfloat16")),
        (("kernels", "--out", "x.txt"), ("x.txt", ".csv")),
        (("kernels", "--out", "nowhere/x.csv"), ("nowhere", "does not exist")),
        (("kernels", "--out", "other.csv"), ("other.csv is another table",)),
        (("collectives", "--budget", "-1h"), ("budget is '-1h'",)),
        (("collectives", "--devices", "1"), ("--devices",)),
        (("collectives", "--coordinator", "localhost:1"), ("--process-id", "all three")),
        (("collectives", "--coordinator", "localhost:1", "--process-id", "2", "--num-processes", "2"), ("--process-id is 2",)),
        (("collectives", "--devices", "3", "--coordinator", "localhost:1", "--process-id", "0", "--num-processes", "2"), ("multiple of --num-processes",)),
    ],
)
def test_mistakes_of_the_command_line(run, tmp_path, monkeypatch, args, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    code, out, err = run("measure", *args)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and err.startswith("error: "), err
    for part in parts:
        assert part in err
    assert [file.name for file in tmp_path.iterdir()] == ["other.csv"]


@pytest.mark.parametrize("command", ["kernels", "collectives"])
def test_help(run, command):
    code, out, _ = run("measure", command, "--help")
    assert code == 0 and "--budget" in out and "--force-new" in out and "--json" in out


def test_command_measures_and_goes_on(run, tmp_path, monkeypatch):
    path = tmp_path / "k.csv"
    code, out, _ = run("measure", "kernels", "--budget", "30s", "--ops", "launch", "--datatypes", "fp32", "--out", path, "--json")
    first = json.loads(out)
    assert code == 0 and first["rows_added"] == 1 and first["by_op"] == {"launch": 1}
    with open(path, "ab") as file:
        file.write(b"AMD,half a ro")
    code, out, err = run("measure", "kernels", "--budget", "30s", "--ops", "launch", "--datatypes", "fp32", "--out", path)
    assert code == 0 and "0 new rows" in out and "unfinished row" in err and len(rows_of(path)) == 1


def test_interrupt_says_how_to_go_on(run, tmp_path, monkeypatch):
    def stop(self, case):
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels._Run, "measure", stop)
    code, out, err = run("measure", "kernels", "--budget", "30s", "--ops", "launch", "--out", tmp_path / "k.csv")
    assert code == 130 and out == "" and "The same command goes on" in " ".join(err.split()) and "interrupted" in err
