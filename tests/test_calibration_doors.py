"""Saved and shipped calibrations, and the three doors behind the command line: validate, a user's own runs, one wished configuration."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.calibrate import calibrate_runs, load_calibration, predict_step, prepare, validate_runs
from diffperf.calibrate._calibration import constant_efficiency, constants_with_interval
from diffperf.calibrate._constants import NAMES
from diffperf.calibrate._memory_fit import FITTED, fit_memory, log_peak
from diffperf.calibrate._posterior import Z80
from diffperf.calibrate._user import OTHER, relabel
from diffperf.hardware import DATATYPES, load_system, system_names
from diffperf.io import COLUMNS, RunFileError, read_runs, runs_from_records
from diffperf.parallel import make_plan
from diffperf.stack import describe_stack, load_stack, stack_names
from diffperf.workload import load_model

# -- saved calibrations ---------------------------------------------------------------------------------------------------------------------


def test_saved_calibration_predicts_the_same(tmp_path, small, few_rows, strangers):
    path = tmp_path / "own.npz"
    small.save(path)
    back = load_calibration(path)
    for rows in (few_rows.take(slice(None, None, 9)), strangers):
        a, b = small.posterior.predict(rows), back.posterior.predict(rows)
        assert_allclose(b.mean, a.mean, atol=1e-4)
        assert_allclose(b.sd, a.sd, atol=1e-4)
    assert back.memory == small.memory and back.efficiency == small.efficiency and back.meta == small.meta
    observed = dataclasses.replace(small, posterior=small.posterior.observe(strangers))
    observed.save(path)
    assert load_calibration(path).posterior.rows.stack.count("mine") == len(strangers)  # the new file, not the one read before


def test_files_that_are_no_calibration_are_refused(tmp_path, small):
    good = tmp_path / "good.npz"
    small.save(good)
    whole = good.read_bytes()
    arrays = dict(np.load(good))
    bad = {
        "empty": b"",
        "text": b"date,time\n1,2\n",
        "truncated": whole[: len(whole) // 2],
        "head only": whole[:30],
        "flipped": whole[:2000] + bytes(255 - b for b in whole[2000:2400]) + whole[2400:],
    }
    for name, content in bad.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.npz: cannot be read as a calibration"):
            load_calibration(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "lacking.npz", **{k: v for k, v in arrays.items() if k != "width"})
    np.savez(tmp_path / "about.npz", **arrays | {"about": np.array("{}")})
    for name in ("one.npy", "lacking.npz", "about.npz", "missing.npz"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read as a calibration"):
            load_calibration(tmp_path / name)


def test_calibration_of_other_constants_is_refused(tmp_path, small):
    small.save(tmp_path / "good.npz")
    arrays = dict(np.load(tmp_path / "good.npz"))
    other_names = arrays | {"names": np.array(["speed", *NAMES[1:]])}
    effect = next(i for i, key in enumerate(arrays["keys"]) if "\tfeature\t" in key)
    other_keys = arrays | {name: np.delete(arrays[name], effect) for name in ("keys", "mean", "width", "parameters")}
    for i, changed in enumerate((other_names, other_keys)):
        np.savez(tmp_path / f"{i}.npz", **changed)
        with pytest.raises(ValueError, match="other constants than this version's"):
            load_calibration(tmp_path / f"{i}.npz")


# -- the shipped fit --------------------------------------------------------------------------------------------------------------------------

HANDFUL = ("tr0075", "tr0529", "tr1041", "tr1103", "tr1141", "tr1165", "tr1224", "tr1518", "tr1877", "tr2198", "vt0796")
"""One run each of MosaicML, Megatron-Bridge, NeMo, Megatron-Core, Korthikanti et al., SimuMax, torchtitan, BLOOM, MaxText, Neuron and vTrain."""


def test_shipped_calibration_knows_its_runs(shipped, published_rows):
    at = np.array([i for i, run in enumerate(published_rows.runs) if run.id in HANDFUL])
    assert len(at) == len(HANDFUL)
    rows = published_rows.take(at)
    prediction = shipped.posterior.predict(rows)
    assert_allclose(np.exp(prediction.mean - rows.log_time), 1.0, atol=0.25)
    assert_allclose(np.exp(prediction.physics - rows.log_time), 1.0, atol=0.35)
    assert (prediction.sd < 0.15).all()
    assert {"date", "data", "version", "jax"} <= set(shipped.meta)


def test_shipped_calibration_was_fitted_to_these_rows(shipped, published_rows):
    assert sorted(set(shipped.posterior.rows.stack)) == sorted(set(published_rows.stack))
    assert sorted(set(shipped.posterior.rows.accelerator)) == sorted(set(published_rows.accelerator))
    assert_allclose(shipped.efficiency, constant_efficiency(published_rows), rtol=0.02)


def test_fitted_rates_stay_below_the_datasheet(published_rows):
    """No rate of a chip above its datasheet; none under a stack that was measured on it by more than the interval of a fit."""
    fitted = {chip: load_system(chip) for chip in set(published_rows.accelerator)}
    stacks = {name: load_stack(name) for name in stack_names()}
    low_bits = {"fp8", "mxfp8", "nvfp4", "int8"}
    for chip, system in fitted.items():
        efficiency = dict(zip(DATATYPES, np.asarray(system.chip.matmul_efficiency), strict=True))
        assert max(efficiency.values()) <= 1.0 and system.chip.memory_efficiency <= 1 and system.chip.attention_efficiency <= 1, chip
        assert max(float(t.efficiency) for t in (system.scale_up, system.scale_out, system.spine)) <= 1, chip
    used = np.asarray(published_rows.plan.precision).argmax(axis=1)
    seen = {(c, s, DATATYPES[d]) for c, s, d, w in zip(published_rows.accelerator, published_rows.stack, used, published_rows.weight, strict=True) if w > 0}
    above = []
    for chip, name, datatype in sorted(seen):
        stack = stacks[name]
        share = float(fitted[chip].chip.matmul_efficiency[DATATYPES.index(datatype)] * stack.matmul_factor)
        share *= float(stack.low_precision_factor) if datatype in low_bits else 1.0
        if share > 1:
            above.append((chip, name, datatype, round(share, 3)))
    # the sum of arithmetic and traffic overcharges what overlaps; 8-bit matmuls on Hopper and vTrain's fp16 take it out of the rate
    assert all(share < 1.1 for *_, share in above) and len(above) <= 8, above


def test_interval_of_a_constant_covers_its_mode_and_widens_without_a_stack(few_fit, few_rows):
    own = constants_with_interval(few_fit, dict(family="fsdp", stack="torchtitan"))
    family = constants_with_interval(few_fit, dict(family="fsdp"))
    assert np.isfinite(own[0]).all() and (own[1] > 0).all()
    c = NAMES.index("matmul_factor")
    assert family[1][c] > own[1][c]


# -- validate ---------------------------------------------------------------------------------------------------------------------------------

KEYS = {"n_rows", "n_modelled", "skipped", "error", "baseline", "memory", "groups", "rows"}
ERROR = {"median", "mean", "p90", "bias"}
REQUIRED = dict(model_name="Llama 3.1 8B", accelerator="H100-80GB-SXM", num_devices=8)
PLAIN = REQUIRED | dict(id="a", source="me", year=2025, global_batch=64, seq_len=8192, step_time_s=4.5, tp=2, pp=1, micro_batch=1, framework="NeMo")


def table(*records):
    return runs_from_records(list(records))


def check_shape(result):
    assert KEYS <= set(result)
    assert result["n_rows"] == result["n_modelled"] + sum(result["skipped"].values())
    assert set(result["error"]) == set(result["baseline"]) == ERROR and ERROR <= set(result["memory"])
    assert len(result["rows"]) == result["n_modelled"] == sum(group["n"] for group in result["groups"])
    for row in result["rows"]:
        assert {"id", "measured_s", "predicted_s", "low_s", "high_s"} <= set(row)
        assert 0 < row["low_s"] < row["predicted_s"] < row["high_s"] < np.inf
    for group in result["groups"]:
        assert {"group", "n", "median", "bias"} <= set(group) and isinstance(group["group"], dict)
    json.dumps(result)


def test_validation_of_a_file_with_everything_in_it(tmp_path, small):
    cells = {
        "plain": {},
        "no degrees": dict(tp="", pp="", micro_batch=""),
        "unknown chip": dict(accelerator="Abacus"),
        "image model": dict(family="cnn", model_name="ResNet-50"),
        "unknown framework": dict(framework="my own trainer"),
        "no framework": dict(framework=""),
        "no time": dict(step_time_s=""),
        "no batch": dict(global_batch=""),
        "no architecture": dict(model_name="mystery"),
        "with memory": dict(peak_mem_gb=55),
        "not a number": dict(step_time_s="fast"),
        "not a time": dict(step_time_s=-1),
    }
    header = [*PLAIN, "family", "peak_mem_gb", "colour"]
    lines = [",".join(header)]
    lines += [",".join(str((PLAIN | dict(family="", peak_mem_gb="", colour="red") | new | dict(id=name))[h]) for h in header) for name, new in cells.items()]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    result = validate_runs(path, calibration=small)
    check_shape(result)
    assert {row["id"] for row in result["rows"]} == {"plain", "no degrees", "unknown framework", "no framework", "with memory"}
    assert result["n_rows"] == len(cells)
    assert result["skipped"]["accelerator 'Abacus' not in the catalog"] == 1 and result["skipped"]["no step time"] == 1
    assert sum(count for reason, count in result["skipped"].items() if reason.startswith("cell cannot be read")) == 2
    assert result["memory"]["n"] == 1 and 0 < result["memory"]["median"] < 1
    rows = {row["id"]: row for row in result["rows"]}
    width = {name: np.log(row["high_s"] / row["low_s"]) for name, row in rows.items()}
    assert width["unknown framework"] > width["plain"] and width["no framework"] > width["plain"]
    assert result["error"]["median"] < result["baseline"]["median"] + 0.5


def test_validation_of_a_single_row_and_of_only_the_required_columns(small):
    result = validate_runs(table(PLAIN), calibration=small)
    check_shape(result)
    assert result["n_modelled"] == 1 and result["error"]["median"] == result["error"]["mean"] == result["error"]["p90"]
    bare = validate_runs(table(REQUIRED), calibration=small)
    check_shape(bare)
    assert bare["n_modelled"] == 0 and bare["skipped"] == {"no step time": 1} and bare["rows"] == []
    assert all(np.isnan(bare["error"][key]) for key in ERROR)


def test_validation_uses_the_shipped_fit(shipped):
    result = validate_runs(table(PLAIN, PLAIN | dict(id="b", step_time_s=9.0)))
    check_shape(result)
    assert result["calibration"] == shipped.meta and result["groups"][0]["n"] == 2
    assert {row["measured_s"] for row in result["rows"]} == {4.5, 9.0}


def test_files_that_are_no_tables_are_refused(tmp_path):
    wrong_header = tmp_path / "wrong.csv"
    wrong_header.write_text("a,b\n1,2\n")
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    for path in (wrong_header, empty):
        with pytest.raises(RunFileError, match=path.name):
            validate_runs(path)
    with pytest.raises(FileNotFoundError, match="none.csv"):
        validate_runs(tmp_path / "none.csv")


# -- a user's own runs --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def own_runs(strangers):
    return tuple(strangers.runs)


@pytest.fixture(scope="session")
def report(own_runs, small):
    return calibrate_runs(own_runs[:3], family="mcore", stack="mine", calibration=small)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_calibration_from_one_row_upwards(own_runs, small, count):
    report = calibrate_runs(own_runs[:count], family="mcore", stack="mine", calibration=small)
    assert [row["id"] for row in report.rows] == [run.id for run in own_runs[:count]]
    for row in report.rows:
        assert 0 < row["after_low_s"] < row["after_s"] < row["after_high_s"] and row["before_low_s"] < row["before_s"] < row["before_high_s"]
        assert abs(np.log(row["after_s"] / row["measured_s"])) <= abs(np.log(row["before_s"] / row["measured_s"])) + 0.02
        assert np.log(row["after_high_s"] / row["after_low_s"]) < np.log(row["before_high_s"] / row["before_low_s"])
    assert len(report.proposals) == count and all(p["expected_error_after"] < p["expected_error_now"] for p in report.proposals)
    assert {c["name"] for c in report.constants} == set(describe_field_names())
    for c in report.constants:
        assert 0 < c["low"] <= c["value"] <= c["high"] and c["learned"] == (c["name"] not in report.unidentified)
    assert f"{count} runs used" in report.summary[0]
    json.dumps([report.rows, report.constants, report.proposals, report.summary, report.meta])


def describe_field_names():
    return [c.name for c in describe_stack("typical")[1]]


@pytest.mark.parametrize("family", [OTHER, ""])
def test_software_of_no_family(own_runs, small, family):
    report = calibrate_runs(own_runs[:2], family=family, stack="mine", calibration=small)
    assert report.meta["family"] == OTHER and any("weak prior" in line for line in report.summary)


def test_unknown_family_and_shipped_names_are_refused(own_runs, small):
    with pytest.raises(ValueError, match="family is 'mcroe'; it should be one of mcore"):
        calibrate_runs(own_runs[:1], family="mcroe", stack="mine", calibration=small)
    with pytest.raises(ValueError, match="'torchtitan', the name of a shipped stack.*my-torchtitan"):
        calibrate_runs(own_runs[:1], family="fsdp", stack="torchtitan", calibration=small)
    with pytest.raises(ValueError, match="stack is ''"):
        calibrate_runs(own_runs[:1], family="fsdp", stack="", calibration=small)
    with pytest.raises(ValueError, match="can be modelled"):
        calibrate_runs(table(REQUIRED), family="fsdp", stack="mine", calibration=small)


def test_candidates_are_proposed_without_times(own_runs, small):
    wished = [dataclasses.replace(run, id=f"wish {i}", step_time_s=None) for i, run in enumerate(own_runs[3:])]
    report = calibrate_runs(own_runs[:2], family="mcore", stack="mine", calibration=small, candidates=wished, propose=2)
    assert len(report.proposals) == 2 and all(p["id"].startswith("wish") and "devices" in p["reason"] for p in report.proposals)


def test_an_odd_cluster_widens_its_own_intervals(own_runs, small):
    twice = [dataclasses.replace(run, step_time_s=run.step_time_s * (3.0 if i % 2 else 0.4)) for i, run in enumerate(own_runs[:6])]
    calm, odd = (calibrate_runs(runs, family="mcore", stack="mine", calibration=small) for runs in (own_runs[:6], twice))
    width = lambda report: np.mean([np.log(row["after_high_s"] / row["after_low_s"]) for row in report.rows])
    assert width(odd) > 1.5 * width(calm)
    assert any("does not look like its family" in line for line in odd.summary)


def test_written_stack_is_used_and_narrows_the_interval(tmp_path, report, own_runs, small):
    path = tmp_path / "mine.toml"
    report.write(path)
    assert {p.name for p in tmp_path.iterdir()} == {"mine.toml", "mine.npz"}
    assert_allclose(float(load_stack(path).launch_time), float(report.stack.launch_time), rtol=1e-4)
    rows = relabel(prepare(own_runs[:1]), "mine", "mcore")
    model, system, plan = (jax.tree.map(lambda x: x[0], tree) for tree in (rows.model, rows.system, rows.plan))
    ask = lambda stack, calibration: predict_step(
        model, rows.accelerator[0], plan, stack, system=system, calibration=calibration, model_name=own_runs[0].model_name
    )
    for name in (path, str(path)):
        mine = ask(name, None)
        family = ask("family-mcore", small)
        assert np.log(mine.high_s / mine.low_s) < 0.8 * np.log(family.high_s / family.low_s)
        assert mine.low_s < own_runs[0].step_time_s < mine.high_s
    assert not any("no measured stack" in note for note in mine.notes) and any("no measured stack" in note for note in family.notes)


def test_a_stack_is_written_only_under_a_name_that_reads_as_one(tmp_path, report):
    with pytest.raises(ValueError, match="should end in .toml"):
        report.write(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


# -- one wished configuration -------------------------------------------------------------------------------------------------------------------


def llama(devices):
    return load_model("llama-3.1-8b"), make_plan(global_batch_size=128, data_parallel=devices // 2, tensor_parallel=2)


def test_prediction_of_a_measured_configuration_is_that_of_the_posterior(few_rows, small):
    at = next(i for i, s in enumerate(few_rows.stack) if s == "nemo")
    rows = few_rows.take(np.array([at]))
    rows = dataclasses.replace(rows, features=0 * rows.features)
    model, system, plan = (jax.tree.map(lambda x: x[0], tree) for tree in (rows.model, rows.system, rows.plan))
    step = predict_step(model, rows.accelerator[0], plan, "nemo", system=system, calibration=small, model_name=rows.runs[0].model_name)
    expected = small.posterior.predict(rows)
    assert_allclose(np.log([step.step_time_s, step.high_s / step.low_s]), [expected.mean[0], 2 * Z80 * expected.sd[0]], rtol=1e-9)
    assert step.low_s < step.step_time_s < step.high_s


def test_prediction_with_the_shipped_fit():
    model, plan = llama(64)
    step = predict_step(model, "h100_sxm", plan, "nemo", num_devices=64)
    assert 1 < step.low_s < step.step_time_s < step.high_s < 30
    assert float(step.estimate.lower_bound) < step.low_s
    assert abs(np.log(step.step_time_s / float(step.estimate.step_time))) < 0.3  # the estimate is the same model without its neighbours
    typical = predict_step(model, "h100_sxm", plan, num_devices=64)
    assert np.log(typical.high_s / typical.low_s) > np.log(step.high_s / step.low_s)
    assert any("no measured stack was named" in note for note in typical.notes)


@pytest.mark.parametrize("chip", ["gaudi2", "tpu_v3", "mi250x_gcd", "l4", "cpu"])
def test_chips_without_a_measured_run_are_predicted_and_said_to_be(chip, small):
    assert chip in system_names()
    model, plan = llama(8)
    step = predict_step(model, chip, plan, num_devices=8, calibration=small)
    assert 0 < step.low_s < step.step_time_s < step.high_s < np.inf
    assert any(f"no measured run on {chip}" in note for note in step.notes)
    measured = predict_step(model, "h100_sxm", plan, num_devices=8, calibration=small)
    assert np.log(step.high_s / step.low_s) > np.log(measured.high_s / measured.low_s)


def test_prediction_in_single_precision_agrees(small):
    model, plan = llama(8)
    double = predict_step(model, "h100_sxm", plan, "nemo", num_devices=8, calibration=small)
    with jax.enable_x64(False):
        model, plan = llama(8)
        single = predict_step(model, "h100_sxm", plan, "nemo", num_devices=8, calibration=small)
    assert_allclose([single.step_time_s, single.low_s, single.high_s], [double.step_time_s, double.low_s, double.high_s], rtol=1e-4)


# -- memory ---------------------------------------------------------------------------------------------------------------------------------------


def with_peaks(rows, log_peaks):
    runs = tuple(dataclasses.replace(run, peak_mem_gb=float(np.exp(p)) / 1e9) for run, p in zip(rows.runs, log_peaks, strict=True))
    return dataclasses.replace(rows, runs=runs)


def test_memory_fit_recovers_known_constants(published_rows):
    at = [i for i, s in enumerate(published_rows.stack) if s in ("torchtitan", "nemo", "llm-foundry")]
    rows = published_rows.take(np.array(at[::2]))
    truth = fit_memory(dataclasses.replace(rows, runs=tuple(dataclasses.replace(run, peak_mem_gb=None) for run in rows.runs)))
    truth["torchtitan"] |= dict(activation_memory=1.15, memory_fixed=1.2e9)
    truth["nemo"] |= dict(logit_bytes=8.0)
    noise = 0.01 * np.random.default_rng(0).normal(size=len(rows))
    measured = with_peaks(rows, log_peak(rows, truth) + noise)
    found = fit_memory(measured)
    assert np.abs(log_peak(rows, found) - log_peak(rows, truth)).mean() < 0.01
    assert_allclose(found["torchtitan"]["activation_memory"], 1.15, rtol=0.05)
    assert set(found) == {*rows.stack, ""}  # "": of a stack not among these


def test_memory_fit_ignores_one_wrong_peak_and_needs_none(few_rows):
    start = fit_memory(dataclasses.replace(few_rows, runs=tuple(dataclasses.replace(run, peak_mem_gb=None) for run in few_rows.runs)))
    assert set(start) == set(few_rows.stack)
    peaks = log_peak(few_rows, start)
    wrong = peaks.copy()
    wrong[10] += np.log(4)
    a, b = (fit_memory(with_peaks(few_rows, p)) for p in (peaks, wrong))
    assert np.abs(log_peak(few_rows, a) - log_peak(few_rows, b)).max() < 0.05
    assert np.abs(log_peak(few_rows, a) - peaks).max() < 0.01


def test_shipped_memory_constants_are_positive_and_near_their_physics(shipped):
    for stack, memory in shipped.memory.items():
        assert all(np.isfinite(v) and v > 0 for v in memory.values()), stack
        assert 0.5 < memory["activation_memory"] < 2 and 2 < memory["logit_bytes"] < 20 and memory["selective_memory"] < 1.5, (stack, memory)
        assert set(FITTED) <= set(memory)
    assert shipped.memory_of("never heard of", "mcore")["low_precision_storage"] == 1.0
    assert set(shipped.memory) == {*shipped.posterior.rows.stack, ""}


# -- files and columns ----------------------------------------------------------------------------------------------------------------------------


def test_prediction_uses_only_columns_of_the_table():
    assert {"zero_stage_or_fsdp", "inter_node_net", "framework", "notes"} <= set(COLUMNS)


def test_shipped_table_is_the_one_the_fit_names(shipped):
    from diffperf.io import published_runs_path

    runs = [run for run in read_runs(published_runs_path()) if run.family in ("dense-decoder", "moe") and run.weight > 0 and run.step_time_s]
    assert abs(int(str(shipped.meta["data"]).split()[0]) - len(runs)) <= 0.05 * len(runs)
