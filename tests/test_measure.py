"""Measuring this machine: kernels, collectives, the committed tables, and both commands. No test asserts a wall time."""

import csv
import getpass
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.cli import main
from diffperf.io import read_kernels
from diffperf.measure import _kernels as kernels
from diffperf.measure import bus_factor, collective_design, measure_collectives, measure_kernels
from diffperf.measure._inputs import uniform
from diffperf.measure._operators import OPERATORS, Work
from diffperf.measure._table import GrowingTable


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
