"""Fit, validation and verdict of collectives: recovery of known constants, limits of the verdict, words of logs, errors of the commands."""

import dataclasses
import json

import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.calibrate.collectives import calibrate_collectives, judge_collectives, prior_of, setting_of, validate_collectives
from diffperf.calibrate.collectives._design import CollectiveRows, fit_design, predict_design
from diffperf.calibrate.collectives._levels import node_design
from diffperf.calibrate.collectives._predict import fit_floor, times_of, with_floor
from diffperf.calibrate.collectives._vector import INDEX, constants_of, vector_of
from diffperf.cli import main
from diffperf.io import parse_nccl_tests

SIZES = [float(2**k) for k in range(10, 31, 2)]


def written_log(times, ranks=16, per_host=8, op="AllReduce", device="NVIDIA H100 80GB HBM3", version="2.27.3"):
    """An nccl-tests log as the program prints it, with these seconds by size."""
    lines = [f"# Collective test starting: {op.lower()}_perf", f"NCCL version {version}"]
    lines += [f"#  Rank {r:2d} Group  0 Pid {100 + r} on host{r // per_host} device {r % per_host} [0x1b] {device}" for r in range(ranks)]
    lines.append("#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong")
    for size, t in zip(SIZES, times, strict=True):
        rate = size / t / 1e9
        cells = f"{t * 1e6:.6g} {rate:.2f} {rate * 2 * (ranks - 1) / ranks:.2f} 0"
        lines.append(f"{size:.0f} {size / 4:.0f} float sum -1 {cells} {cells}")
    return "\n".join(lines) + "\n"


def true_times(setting, ranks=16.0, **changes):
    mean, _, present = prior_of(setting)
    mean = mean.copy()
    for leaf, factor in changes.items():
        mean[INDEX[leaf.replace("__", ".")]] += np.log(factor)
    present = present.copy()
    present[INDEX["source.floor"]] = False
    n = len(SIZES)
    rows = CollectiveRows(
        np.array(["all_reduce|auto"] * n), np.array(SIZES), np.full(n, ranks), np.full(n, setting.ranks_per_node), np.zeros(n, int), np.zeros(n), np.ones(n)
    )
    return np.exp(times_of(rows, mean[None], present[None])[0])


H100 = setting_of("H100 SXM", "NVLink4 + IB NDR 8x400G", 16, 2, "NCCL 2.27.3")


@pytest.mark.parametrize(
    "accelerator, interconnect, ranks, nodes, system, nic, fabric",
    [
        ("A100 SXM 80GB", "NVLink3 + EFA 4x100G", 16, 2, "a100_sxm_80", 50e9, "efa"),
        ("H100 SXM", "NVLink4 + EFA 32x100G", 16, 2, "h100_sxm", 400e9, "efa2"),
        ("GH200", "NVLink4 (4 GPU/node) + Slingshot-11 4x200G", 8, 2, "gh200", 100e9, "slingshot"),
        ("NVIDIA H100 80GB HBM3", "", 8, 1, "h100_sxm", 400e9, "unknown"),
        ("H100 SXM", "NVLink4 + GPUDirect-TCPXO 8x200G", 16, 2, "h100_sxm", 200e9, "tcpx"),
    ],
)
def test_words_of_logs(accelerator, interconnect, ranks, nodes, system, nic, fabric):
    setting = setting_of(accelerator, interconnect, ranks, nodes)
    assert (setting.system, setting.fabric, setting.unknown_version) == (system, fabric, True)
    assert_allclose(setting.nic_bandwidth, nic, rtol=1e-6)


def test_versions_are_read_and_strangers_refused():
    assert setting_of("V100 SXM2", "", 8, 1, "NCCL 2.8.4").old
    assert not setting_of("V100 SXM2", "", 8, 1, "NCCL 2.18.3").old
    with pytest.raises(ValueError, match="not in the catalog"):
        setting_of("Abacus 9", "", 8, 1)
    with pytest.raises(ValueError, match="64 ranks in one node of h100_sxm.*number of nodes"):
        setting_of("H100 SXM", "", 64, 1)


def test_vector_and_constants_are_inverse():
    mean, _, present = prior_of(H100)
    back, there = vector_of(constants_of(mean, present))
    assert (there == present).all()
    assert_allclose(back, np.where(present, mean, 0.0), atol=1e-12)


def test_old_and_unknown_versions_widen_the_ramp():
    known, unknown = (prior_of(dataclasses.replace(H100, unknown_version=flag))[1][INDEX["source.ramp"]] for flag in (False, True))
    assert unknown >= known


def test_fit_finds_constants_that_made_the_times():
    """Two rank counts and two operations determine launch, hop and bandwidth; a hiccup of a factor of 3 moves them little."""
    setting = setting_of("H100 SXM", "", 8, 1, "NCCL 2.27.3")
    design = node_design(setting)
    kinds = np.repeat(["all_reduce|auto", "all_gather|auto"], 3 * len(SIZES))
    ranks = np.tile(np.repeat([2.0, 4.0, 8.0], len(SIZES)), 2)
    rows = CollectiveRows(kinds, np.tile(SIZES, 6), ranks, ranks, np.zeros(len(kinds), int), np.zeros(len(kinds)), np.ones(len(kinds)))
    truth = np.zeros(len(design.names))
    moved = {"node.bandwidth": np.log(0.9), "node.launch": np.log(1.1), "node.hop": np.log(1.08)}
    for name, value in moved.items():
        truth[design.names.index(name)] = value
    times, _ = predict_design(rows, design, truth)
    times[7] += np.log(3)
    mode = fit_design(dataclasses.replace(rows, log_time=times), design)
    for name, value in moved.items():
        at = design.names.index(name)
        assert_allclose(mode.parameters[at], value, atol=0.03)
        assert np.linalg.inv(mode.precision)[at, at] < design.width[at] ** 2


def test_floor_is_found_and_not_invented():
    device = np.log(np.geomspace(1e-5, 1e-2, 20))
    assert_allclose(fit_floor(device, with_floor(device, 4e-5)), 4e-5, rtol=0.03)
    assert fit_floor(device, device) == 0.0


def test_healthy_log_is_healthy_and_lost_nics_are_seen():
    times = true_times(H100)
    verdict = judge_collectives(parse_nccl_tests(written_log(times)), interconnect="IB 8x400G")[0]
    assert verdict.state == "healthy" and verdict.cause == "" and abs(verdict.ratio - 1) < 0.02
    assert all(row.state == "healthy" for row in verdict.rows)
    eighth = true_times(H100, network__bandwidth=1 / 8)
    verdict = judge_collectives(parse_nccl_tests(written_log(eighth)), interconnect="IB 8x400G")[0]
    assert verdict.state == "unhealthy" and verdict.cause == "one NIC of 8 in use"
    assert "busbw at large sizes" in verdict.evidence


def test_pcie_and_impossible_rates_are_seen():
    setting = setting_of("H100 SXM", "", 8, 1, "NCCL 2.27.3")
    pcie = [2e-5 + 1.75 * size / 20e9 for size in SIZES]
    verdict = judge_collectives(parse_nccl_tests(written_log(pcie, ranks=8)))[0]
    assert verdict.state == "unhealthy" and "PCIe" in verdict.cause and verdict.setting.system == setting.system
    copy = [5e-6 + size / 2e13 for size in SIZES]
    assert judge_collectives(parse_nccl_tests(written_log(copy, ranks=8)))[0].state == "invalid"


def test_validation_counts_every_row_and_scores_exact_times():
    table = parse_nccl_tests(written_log(true_times(H100)))
    table = dataclasses.replace(table, interconnect=np.array(["IB 8x400G"] * len(table)))
    result = validate_collectives(table)
    assert result["n_rows"] == result["n_modelled"] + sum(result["skipped"].values()) == 2 * len(SIZES)
    assert result["error"]["median"] < 1e-3 < result["baseline"]["median"]
    assert {group["group"]["band"] for group in result["groups"]} == {"< 256 KiB", "256 KiB-16 MiB", ">= 16 MiB"}
    assert all(row["low_s"] < row["measured_s"] < row["high_s"] for row in result["rows"])


def test_calibration_moves_towards_the_log(tmp_path):
    table = parse_nccl_tests(written_log(true_times(H100, network__efficiency=0.8, network__hop=1.3)))
    table = dataclasses.replace(table, interconnect=np.array(["IB 8x400G"] * len(table)))
    result = calibrate_collectives(table)
    fit = result.fits[0]
    assert fit.after["median"] < 0.02 < fit.before["median"]
    hop = next(row for row in fit.constants if row["name"] == "network.hop")
    assert hop["low"] < hop["value"] < hop["high"] and hop["value"] > hop["prior"]
    path = tmp_path / "fit.json"
    result.write(str(path))
    again = validate_collectives(table, fit=json.loads(path.read_text()))
    assert again["error"]["median"] < fit.before["median"]


def test_the_written_fit_has_the_error_that_is_reported():
    """Also where what is peculiar to the log explains it better than the constants do: it holds for further logs of this system and network."""
    table = parse_nccl_tests(written_log(true_times(H100, source__latency=1.6, source__wire=1.15)))
    table = dataclasses.replace(table, interconnect=np.array(["IB 8x400G"] * len(table)))
    result = calibrate_collectives(table)
    after = result.fits[0].after["median"]
    assert after < 0.01 < result.fits[0].before["median"] / 10
    np.testing.assert_allclose(validate_collectives(table, fit=result.document)["error"]["median"], after, rtol=0.2, atol=1e-3)


def test_logs_of_an_old_and_a_new_library_leave_one_set_of_factors(tmp_path):
    """Their priors differ; what is kept is the mean of what they have, so that the reported error is that of the written fit."""
    text = written_log(true_times(H100, source__ramp=1.5))
    assert "2.27.3" in text
    files = [tmp_path / "new.txt", tmp_path / "old.txt"]
    for file, version in zip(files, ("2.27.3", "2.4.2")):
        file.write_text(text.replace("2.27.3", version))
    result = calibrate_collectives(files)
    (fit,) = result.fits
    assert len(fit.logs) == 2
    np.testing.assert_allclose(validate_collectives(files, fit=result.document)["error"]["mean"], fit.after["mean"], rtol=0.01)


def test_times_that_include_waiting_are_left_out_of_fit_and_validation():
    """Of a trace of one rank: nothing can be learned from how long its kernels spun."""
    table = parse_nccl_tests(written_log(true_times(H100)))
    waits = np.arange(len(table)) % 2 == 0
    table = dataclasses.replace(table, flag=np.where(waits, "waiting_included|coalesced", table.flag), time_s=np.where(waits, 1e-2, table.time_s))
    result = calibrate_collectives(table)
    assert result.fits[0].rows == int((~waits).sum()) and not result.fits[0].floors
    (reason,) = result.skipped
    assert "traces of all ranks" in reason and result.skipped[reason] == waits.sum() == validate_collectives(table)["skipped"][reason]
    with pytest.raises(ValueError, match=r"no row can be fitted: time of one rank, which holds its waiting .* traces of all ranks"):
        calibrate_collectives(table.take(waits))


def engine_csv(tmp_path, gpu="H100 SXM", version="9.9"):
    """A table of a made-up engine: 5 us + 0.2 us per peer + one or two shots, handed to nobody; and one row that its source calls unhealthy."""
    lines = ["op,dtype,bytes,n_ranks,n_nodes,algo,proto,time_us,algbw_GBps,busbw_GBps,gpu,interconnect,source,flag,impl"]
    for n in (2, 4, 8):
        for k in range(8, 23, 2):
            one, two = 2**k * (n - 1) / 2.5e11, 8e-6 + 2 * 2**k * (n - 1) / n / 3e11
            t = 5 + 0.2 * (n - 1) + min(one, two) * 1e6
            lines.append(f"all_reduce,bf16,{2**k},{n},1,auto,auto,{t:.6f},,,{gpu},,bench,,custom_allreduce fable {version} fable_graph")
    lines.append(f"all_reduce,bf16,1024,2,1,auto,auto,900,,,{gpu},,bench,unhealthy_slow,custom_allreduce fable {version} fable_graph")
    path = tmp_path / f"engine_{version}.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_engine_kernels_are_fitted_and_scored(tmp_path):
    path = engine_csv(tmp_path)
    result = calibrate_collectives(path)
    assert not result.fits and len(result.engines) == 1 and result.skipped == {"labelled unhealthy or invalid by its source": 1}
    assert result.engines[0].after["median"] < 0.03 and result.engines[0].rows == 24
    own = validate_collectives(path, fit=result.document)
    assert own["n_rows"] == 25 and own["n_modelled"] == 24 and own["error"]["median"] < 0.03
    assert {group["group"]["op"] for group in own["groups"]} == {"all_reduce"}
    unseen = validate_collectives(engine_csv(tmp_path, "H200 SXM", "10.0"), fit=result.document)
    width = lambda score: np.median([np.log(row["high_s"] / row["low_s"]) for row in score["rows"]])
    assert unseen["error"]["median"] < 0.05 and width(unseen) > 2 * width(own)  # the same kernel, of another version and system: sure of less


def test_expert_exchanges_are_scored_with_shipped_constants(tmp_path):
    """Kernels that were measured, in the layout of the tables they came from; twice the tokens at large counts takes about twice the time."""
    lines = ["num_tokens,hidden_size,topk,num_experts,ep_size,comm_backend,phase,comm_dtype,latency_us,framework,gpu"]
    for tokens, t in ((1, 100), (8192, 1000), (16384, 2000)):
        lines.append(f"{tokens},7168,8,256,8,trtllm_deepep_ht,dispatch,bf16,{t},trtllm 1.3.0rc11,h100_sxm")
    path = tmp_path / "moe.csv"
    path.write_text("\n".join(lines) + "\n")
    result = validate_collectives(str(path))
    few, some, many = (row["predicted_s"] for row in result["rows"])
    assert result["n_modelled"] == 3 and few < some < many and 1.7 < many / some < 2.1
    assert all(row["low_s"] < row["predicted_s"] < row["high_s"] for row in result["rows"])


@pytest.mark.parametrize(
    "words, message",
    [
        (["nccl-tests", "LOG", "--system", "abacus"], "abacus"),
        (["nccl-tests", "LOG", "--html", "plot.txt"], "should end in .html"),
        (["validate", "collectives", "LOG", "--fit", "LOG"], "is not JSON"),
        (["nccl-tests", "absent.txt"], "absent.txt"),
    ],
)
def test_mistakes_are_said_in_one_line(words, message, tmp_path, capsys):
    log = tmp_path / "run.log"
    log.write_text(written_log(true_times(H100)))
    with pytest.raises(SystemExit) as stop:
        main([str(log) if word == "LOG" else word for word in words])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_command_prints_fit_plot_and_verdict(tmp_path, capsys):
    log, page = tmp_path / "run.log", tmp_path / "plot.html"
    log.write_text(written_log(true_times(H100, network__bandwidth=1 / 8)))
    with pytest.raises(SystemExit) as stop:
        main(["nccl-tests", str(log), "--interconnect", "IB 8x400G", "--html", str(page)])
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "unhealthy" in said and "one NIC of 8 in use" in said and "busbw in GB/s" in said
    assert page.read_text().lower().count("<html") == 1
