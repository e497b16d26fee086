"""Calibration of measured kernels: what is placed and why not, fits before and after, files that round-trip, a system of one's own, and bad input."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffperf.calibrate.kernels import calibrate_kernels, validate_kernels
from diffperf.calibrate.kernels._cpu_chip import cpu_numbers
from diffperf.calibrate.kernels._sets import place
from diffperf.cli._kernels import as_document
from diffperf.cli._main import main
from diffperf.cost.kernel import AttentionShape, DecodeShape, Device, MatmulShape, StreamingShape
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._families import ON_CPU
from diffperf.hardware import DATATYPES, UnknownNameError, load_system
from diffperf.io import read_kernels

MEASURED = Path(__file__).parents[1] / "calibration/measured/cpu_kernels.csv"
SHARED = Path(__file__).parents[2] / "shared/data/kernels/aic_gemm_h100_sxm.csv.gz"


def products(count=24, gpu="h100_sxm", datatype="bf16", rate=6e14, launch=8e-6) -> list[dict[str, Any]]:
    """Matmuls that run at a constant rate after a launch: slower to start than any shipped library."""
    sizes = [(256 * (1 + i % 6), 1024 + 128 * i, 2048) for i in range(count)]
    return [dict(gpu=gpu, op="gemm", library="mine", datatype=datatype, m=m, n=n, k=k, time_us=1e6 * (launch + 2 * m * n * k / rate)) for m, n, k in sizes]


def cpu_rows() -> list[dict[str, Any]]:
    """A CPU of 4 threads and 16 MB that multiplies at 400 GFLOP/s and streams at 30 GB/s."""
    common = dict(gpu="cpu", library="jax", datatype="fp32", num_threads=4, rotated_bytes=32e6)
    matmuls = [{**row, **common} for row in products(24, rate=4e11)]
    nbytes = [3 * 4 * 1000 * (i + 1) * 8192 for i in range(8)]  # two inputs and an output of 4-byte elements
    return matmuls + [{**common, "op": "add", "m": 1000 * (i + 1), "n": 8192, "bytes_min": b, "time_us": b / 30e9 * 1e6} for i, b in enumerate(nbytes)]


def write_csv(path, rows):
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.write_text("\n".join([",".join(columns), *(",".join(str(row.get(c, "")) for c in columns) for row in rows)]) + "\n")
    return str(path)


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["calibrate" if args[0] == "calibrate" else "validate", "kernels", *map(str, args[1:])])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.fixture(scope="module")
def mine():
    """A calibration of one library on a GPU of the catalog, closed form alone."""
    return calibrate_kernels(read_kernels(products()), correction=False)


def test_rows_are_placed_or_counted_with_a_reason():
    rows = products(6) + products(2, datatype="bf17") + products(3, gpu="v100_sxm2_16", datatype="fp8") + products(4, rate=5e15, launch=0)
    rows += [{**products(1)[0], "op": "sorting"}, {**products(1)[0], "flag": "noisy_median", "time_us": 77.0}]
    placed, skipped = place(read_kernels(rows))
    assert sum(len(one.kernels) for one in placed) == 6 and sum(skipped.values()) == len(rows) - 6
    said = " ".join(skipped)
    for word in ("v100_sxm2_16 has no unit for fp8", "datasheet peak", "no model of this operator", "noisy_median"):
        assert word in said
    (of_datatype,) = (reason for reason in skipped if "bf17" in reason)
    assert of_datatype.startswith("datatype of matmuls 'bf17' has no model, as in records:7; it should be one of fp32, tf32") and skipped[of_datatype] == 2
    assert skipped["faster than arithmetic at the chip's datasheet peak"] == 4


def test_short_durations_of_traces_are_left_out_as_they_lack_the_launch():
    rows = [{**row, "flag": "device_time|several_kernels", "time_us": time} for row, time in zip(products(3), (9.0, 14.9, 400.0))]
    placed, skipped = place(read_kernels([*rows, {**products(1)[0], "time_us": 9.0}]))
    assert sum(len(one.kernels) for one in placed) == 2
    (reason,) = skipped
    assert "below 15 us" in reason and skipped[reason] == 2


def test_a_datatype_without_a_model_is_named_with_its_row_and_what_is_accepted(tmp_path, capsys):
    file = write_csv(tmp_path / "kernels.csv", products(3) + products(2, datatype="bf17"))
    code, _, err = run(capsys, "validate", file, "--no-correction")
    said = " ".join(err.split())
    assert code == 0 and "2 rows left out: datatype of matmuls 'bf17'" in said and "kernels.csv:5; it should be one of fp32, tf32, fp16, bf16" in said


def test_rows_know_their_place_in_the_table_although_noisy_ones_are_gone():
    table = read_kernels([{**products(1)[0], "flag": "noisy_median"}, *products(8)[1:]])
    (one,), _ = place(table)
    np.testing.assert_allclose(table.time_s[one.at], np.exp(one.kernels.log_time), rtol=1e-12)


def test_a_fit_learns_what_the_shipped_libraries_do_not_know(mine):
    (one,) = mine.sets
    assert 0 < one["held_out"] < one["rows"] == 24
    assert one["after"]["mean"] < 0.05 and one["after"]["mean"] < one["before"]["mean"]


def test_a_written_fit_predicts_its_rows_again_and_the_document_has_the_agreed_keys(mine, tmp_path):
    mine.write(tmp_path / "mine.json")
    table = read_kernels(products())
    result = validate_kernels(table, fitted=tmp_path / "mine.json", correction=False)
    assert result["error"]["mean"] < 0.05
    document = as_document(result)
    score = {"median", "mean", "p90", "bias"}
    assert set(document) == {"n_rows", "n_modelled", "skipped", "error", "baseline", "groups", "rows"}
    assert set(document["error"]) == set(document["baseline"]) == score
    assert set(document["groups"][0]) == {"group", "n", "baseline", *score}
    assert set(document["rows"][0]) == {"id", "measured_s", "predicted_s", "low_s", "high_s"}
    row = document["rows"][0]
    assert row["low_s"] < row["predicted_s"] < row["high_s"] and row["measured_s"] == pytest.approx(table.time_s[0])


def test_a_cpu_is_described_by_what_it_reached():
    found = {path: number.value for path, number in cpu_numbers(read_kernels(cpu_rows())).items()}
    assert found["num_processors"] == 4 and found["l2_capacity"] == 16e6
    best = max(2 * r["m"] * r["n"] * r["k"] / r["time_us"] * 1e6 for r in cpu_rows()[:24])
    assert 0.95 * best / 0.8 < found["peak_flops_per_s.fp32"] <= best / 0.8  # the catalog's efficiency of large fp32 matmuls on CPUs is 0.8
    assert found["memory_bandwidth"] == pytest.approx(30e9 / 0.75, rel=1e-3)
    assert found["peak_flops_per_s.bf16"] == found["peak_flops_per_s.fp32"]  # not measured


def test_the_system_of_a_cpu_loads_with_its_efficiencies(tmp_path):
    own = tmp_path / "own.toml"
    report = calibrate_kernels(read_kernels(cpu_rows()), system_out=own, correction=False)
    report.write(tmp_path / "own.json")
    chip, plain = load_system(own).chip, load_system(own, fitted=False).chip
    reached = chip.matmul_efficiency[DATATYPES.index("fp32")] * plain.peak_flops_per_s[DATATYPES.index("fp32")]
    assert float(reached) == pytest.approx(4e11, rel=0.2)
    assert float(chip.memory_efficiency * chip.memory_bandwidth) == pytest.approx(30e9, rel=0.25)
    again = validate_kernels(read_kernels(cpu_rows()), system=own, fitted=tmp_path / "own.json")
    assert again["n_modelled"] == 32 and again["error"]["mean"] < 0.1


def test_a_gpu_that_the_catalog_lacks_needs_a_file(tmp_path):
    table = read_kernels(products(gpu="h101_sxx"))
    with pytest.raises(UnknownNameError, match=r"h100_sxm.*--system FILE.toml"):
        validate_kernels(table)
    file = tmp_path / "my.toml"
    file.write_text('base = "h100_sxm"\n')
    assert validate_kernels(table, system=file, correction=False)["n_modelled"] == 24
    with pytest.raises(ValueError, match="2 chips"):
        calibrate_kernels(read_kernels(products() + products(gpu="h101_sxx")), system=file, system_out=tmp_path / "out.toml")
    assert not (tmp_path / "out.toml").exists()


def test_mistakes_are_one_line(tmp_path, capsys):
    good = write_csv(tmp_path / "good.csv", products(4))
    late = write_csv(tmp_path / "unit.csv", [{**row, "time_us": row["time_us"] / 1e3} for row in products(12)])
    short = write_csv(tmp_path / "short.csv", [{k: v for k, v in row.items() if k != "time_us"} for row in products(4)])
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "bytes.csv").write_bytes(bytes(range(256)))
    (tmp_path / "wrong.json").write_text('{"a": 1}')
    lacks = write_csv(tmp_path / "lacks.csv", products(4, gpu="v100_sxm2_16", datatype="fp8"))
    cases = [
        (("validate", late), "cannot be in its unit"), (("validate", short), "'time_us' is missing"), (("validate", tmp_path / "empty.csv"), "is empty"),
        (("validate", tmp_path / "bytes.csv"), "not CSV"), (("validate", good, "--json", tmp_path / "no/x.json"), "does not exist"),
        (("validate", good, "--kernels", tmp_path / "wrong.json"), "not a file of fitted kernels"), (("calibrate", lacks), "no unit for fp8"),
        (("calibrate", good, "--system-out", tmp_path / "x.txt"), "end in .toml"),
    ]  # fmt: skip
    for words, said in cases:
        code, _, err = run(capsys, *words)
        assert code == 2 and said in err and "Traceback" not in err and err.strip().count("error:") == 1, (words, err)


def test_bad_rows_are_counted(tmp_path, capsys):
    rows = products(8)
    for row, m in zip(rows, (0, -5, 12.5)):
        row["m"] = m
    code, out, err = run(capsys, "validate", write_csv(tmp_path / "t.csv", [*rows, rows[-1]]), "--json", "-", "--no-correction")
    document = json.loads(out)
    assert code == 0 and document["n_modelled"] == 5 and sum(document["skipped"].values()) == 3 and "1 exact duplicates dropped" in " ".join(err.split())


@pytest.mark.parametrize("name", ["matmul", "streaming", "attention_prefill", "attention_backward", "attention_decode"])
def test_cpu_kernels_take_no_time_for_nothing_longer_for_more_and_have_gradients(name):
    family, device = ON_CPU[name], Device(2.5e11, 6e10, 2.0, 3.2e7)
    start = constrain(family.constants, family.priors, jnp.zeros(family.size))
    shape = {"matmul": MatmulShape, "streaming": StreamingShape, "attention_decode": DecodeShape}.get(name, AttentionShape)
    sizes = 7 if shape is AttentionShape else {"matmul": 3, "streaming": 2, "attention_decode": 5}[name]
    time = jax.jit(lambda x: family.time(shape(*x), device, start))
    assert float(time(jnp.array([0.0] + [64.0] * (sizes - 1)))) == 0
    slope = jax.jit(jax.grad(lambda x: jnp.log(time(x))))
    for x in (jnp.full(sizes, 64.0), jnp.full(sizes, 700.0)):
        step = 1e-5 * x
        numbers = [(jnp.log(time(x + step * e)) - jnp.log(time(x - step * e))) / (2 * step[0]) for e in jnp.eye(sizes)]
        np.testing.assert_allclose(slope(x), numbers, rtol=1e-4, atol=1e-9)
        assert float(time(2 * x)) > float(time(x))
    assert np.isfinite(np.asarray(jax.grad(time)(jnp.zeros(sizes)))).all()


def test_the_measured_cpu_is_placed_without_its_whole_programs():
    table = read_kernels(MEASURED)
    placed, skipped = place(table)
    assert not any(op.startswith("transformer") for one in placed for op in table.op[one.at])
    families = {one.rows.family.name for one in placed}
    assert {"matmul_cpu", "streaming_cpu", "attention_prefill_cpu", "attention_backward_cpu", "attention_decode_cpu"} <= families
    assert skipped["no model of this operator"] > 0


@pytest.mark.skipif(not SHARED.exists(), reason="the measured kernels of other projects are not here")
def test_shipped_libraries_beat_the_roofline_on_measured_kernels():
    table = read_kernels(SHARED).select(datatype="bf16", library="trtllm")
    result = validate_kernels(table.take(np.arange(0, len(table), max(len(table) // 200, 1))), correction=False)
    assert result["n_modelled"] > 100 and result["error"]["mean"] < result["baseline"]["mean"] / 2
