"""`diffperf trace`, on traces written here."""

import json

import pytest
from numpy.testing import assert_allclose

from diffperf.cli import main
from diffperf.io import read_collectives, read_kernels

GEMM, NCCL = "ampere_bf16_s16816gemm_bf16_128x128_tn", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)"


def run(*words):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


def write(folder, rank, late_us=0.0, world=2, name="NVIDIA H100 80GB HBM3"):
    """Two steps of 100 us, each with a matmul from 10 to 40 and one from 40 to 60 us, and an all-reduce that ends at 70 us; idle from 70 on."""
    record = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": world, "dtype": "BFloat16"}
    shape = {"Input Dims": [[1024, 512], [512, 2048]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events, number = [], 0
    for step, origin in enumerate((0.0, 100.0)):
        event = lambda cat, name, ts, dur, tid=1, origin=origin, **args: events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": origin + ts, "dur": dur, "args": args})  # fmt: skip
        event("user_annotation", f"ProfilerStep#{step + 3}", 0, 100)
        for name_, stream, start, duration, extra in ((GEMM, 7, 10, 30, {}), (GEMM, 7, 40, 20, {}), (NCCL, 20, 30 + late_us, 40 - late_us, record)):
            number += 1
            if not extra:
                event("cpu_op", "aten::mm", start - 9, 4, **shape)
            event("cuda_runtime", "cudaLaunchKernel", start - 8, 2, correlation=number)
            event("kernel", name_, start, duration, stream, device=0, stream=stream, correlation=number, grid=[128, 1, 1], block=[256, 1, 1], **extra)
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": name, "numSms": 132}], "distributedInfo": {"rank": rank, "world_size": world},
                                "traceEvents": events}))  # fmt: skip
    return path


def test_json_has_the_figures_of_every_rank(tmp_path, capsys):
    files = [write(tmp_path, 0), write(tmp_path, 1, late_us=10)]
    assert run("trace", *files, "--json", tmp_path / "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1] and found["left_out"] == {}
    for rank, communication in zip(found["ranks"], (80e-6, 60e-6)):
        hidden = 60e-6 if rank["rank"] == 0 else 40e-6
        assert_allclose([rank["span_s"], rank["idle_time_s"], rank["compute_time_s"], rank["memory_time_s"]], [160e-6, 40e-6, 100e-6, 0], atol=1e-12)
        assert_allclose([rank["communication_time_s"], rank["exposed_communication_time_s"]], [communication, 20e-6], rtol=1e-9)
        assert_allclose(rank["overlap_fraction"], hidden / communication, rtol=1e-9)
        gemm = next(kernel for kernel in rank["kernels"] if kernel["name"] == GEMM)
        assert (gemm["kind"], gemm["count"]) == ("compute", 4)
        assert_allclose([gemm["total_s"], gemm["mean_s"], gemm["flops_per_s"]], [100e-6, 25e-6, 4 * 2 * 1024 * 512 * 2048 / 100e-6], rtol=1e-9)
    assert [(step["rank"], step["name"]) for step in found["steps"]] == [(k, f"ProfilerStep#{n}") for k in (0, 1) for n in (3, 4)]
    assert_allclose([step["period_s"] for step in found["steps"]], [100e-6, 60e-6] * 2, rtol=1e-9)
    assert found["clocks"]["agree"] and found["stragglers"][0]["rank"] == 1
    assert_allclose(found["stragglers"][0]["mean_late_s"], 10e-6, rtol=1e-6)
    hta = found["ranks"][0]["as_hta"]  # of the first of two steps, here in whole microseconds
    assert_allclose([hta["span_s"], hta["compute_time_s"], hta["communication_time_s"]], [60e-6, 50e-6, 40e-6], rtol=1e-9)
    out = capsys.readouterr().out
    assert "75.0%" in out and "as_hta" in out and "Stragglers" in out and "wrote" in out


def test_json_on_stdout_is_one_document(tmp_path, capsys):
    assert run("trace", write(tmp_path, 0, world=1), "--json", "-") == 0
    assert set(json.loads(capsys.readouterr().out)) >= {"ranks", "steps", "left_out"}


def test_measurements_are_those_that_calibration_reads(tmp_path, capsys):
    assert run("trace", write(tmp_path, 0), write(tmp_path, 1, late_us=10), "--measurements", tmp_path / "measured") == 0
    collectives = read_collectives(tmp_path / "measured" / "collectives.csv")
    assert set(collectives.op) == {"all_reduce"} and set(collectives.nbytes) == {float(1 << 21)}
    assert_allclose(collectives.time_s, 30e-6, rtol=1e-6)  # of the rank that came last
    kernels = read_kernels(tmp_path / "measured" / "kernels.csv")
    assert kernels.op.tolist() == ["matmul"] and kernels.datatype.tolist() == ["bf16"]
    assert_allclose(kernels.time_s, [30e-6], rtol=1e-9)  # the first one on the late rank; the others ran beside the all-reduce
    assert "beside another stream" in capsys.readouterr().out


def test_trace_beside_a_prediction(tmp_path, capsys, monkeypatch):
    import types

    from diffperf.cli import _inputs
    from diffperf.estimate import Breakdown

    parts = dict.fromkeys(Breakdown.__dataclass_fields__, 0.0) | dict(matmul=30e-6, attention=10e-6, optimizer=5e-6, data=8e-6, launch=20e-6, bubble=7e-6)
    estimate = types.SimpleNamespace(step_time=80e-6, feasible=True, breakdown=Breakdown(**parts))
    monkeypatch.setattr(_inputs, "predict", lambda inputs: _inputs.Prediction(estimate, 70e-6, 90e-6, True, ()))
    files = [write(tmp_path, rank) for rank in (0, 1)]
    assert run("trace", *files, "--model", "llama-3.2-1b", "--system", "h100", "--gbs", 4, "--seq", 2048, "--zero", 3, "--json", tmp_path / "out.json") == 0
    compared = json.loads((tmp_path / "out.json").read_text())["comparison"]
    measured, predicted = compared["measured"], compared["predicted"]
    assert compared["num_devices"] == 2 and compared["steps"] == 2  # the world of the trace; the last step of each rank has no next one
    assert_allclose([measured["step_time_s"], measured["compute_s"], measured["exposed_communication_s"]], [100e-6, 50e-6, 10e-6], rtol=1e-9)
    for side in (measured, predicted):
        assert_allclose(side["compute_s"] + side["exposed_communication_s"] + side["idle_and_overhead_s"], side["step_time_s"], rtol=1e-5)
    assert_allclose([predicted["compute_s"], predicted["exposed_communication_s"], predicted["idle_and_overhead_s"]], [45e-6, 8e-6, 27e-6], rtol=1e-5)
    said = capsys.readouterr()
    assert "Beside the prediction" in said.out and compared["notes"] == [] and "model, batch and plan" not in said.err
    estimate.step_time = 1e-3
    assert run("trace", *files, "--model", "llama-3.2-1b", "--system", "h100", "--gbs", 4, "--zero", 3) == 0
    assert "more than a factor of 3: are model, batch and plan those of the trace?" in capsys.readouterr().err


def test_execution_graph_has_no_times(tmp_path, capsys):
    nodes = [{"id": 1, "name": "root", "ctrl_deps": 1}, {"id": 2, "name": "aten::mm", "ctrl_deps": 1}]
    (tmp_path / "graph.json").write_text(json.dumps({"schema": "1", "nodes": nodes}))
    assert run("trace", tmp_path / "graph.json", "--json", tmp_path / "out.json", "--measurements", tmp_path / "none") == 0
    (rank,) = json.loads((tmp_path / "out.json").read_text())["ranks"]
    assert rank["nodes"] == 2 and rank["idle_time_s"] is None and list((tmp_path / "none").iterdir()) == []
    assert "2 nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["missing.json"], "missing.json"),
        (["."], ". is a folder; give the files in it"),
        (["bad.json"], "bad.json is not JSON"),
        (["rank0.json", "--tp", "2"], "--tp asks for a prediction, which needs --model and --system and --gbs too"),
        (["rank0.json", "--model", "llama-3.2-1b", "--gbs", "4"], "needs --system too"),
        (["rank0.json", "--json", "nowhere/out.json"], "does not exist"),
        (["rank0.json", "--measurements", "nowhere/deep"], "does not exist"),
        (["rank0.json", "--model", "nonsense", "--system", "h100", "--gbs", "4"], "nonsense"),
        ([], "FILE"),
    ],
)
def test_mistakes_take_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 0)
    (tmp_path / "bad.json").write_text("what?")
    assert run("trace", *words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
    assert not (tmp_path / "out.json").exists()


def test_what_is_left_out_is_said(tmp_path, capsys):
    path = write(tmp_path, 0, world=4)
    path.write_text(path.read_text()[:-200])
    assert run("trace", path, "--json", tmp_path / "out.json") == 0
    left = json.loads((tmp_path / "out.json").read_text())["left_out"]
    assert left["missing ranks"]["count"] == 3
    stop = left["the file stops in the middle; what follows is missing"]
    assert "rank0.json: after event 17" in stop["examples"][0]
    assert "stops in the middle" in capsys.readouterr().out


def test_devices_of_one_rank_are_named(tmp_path, capsys):
    path = write(tmp_path, 0)
    document = json.loads(path.read_text())
    for event in [event for event in document["traceEvents"] if event["cat"] == "kernel"]:
        document["traceEvents"].append(event | {"args": event["args"] | {"device": 1}})
    path.write_text(json.dumps(document))
    assert run("trace", path, "--json", tmp_path / "out.json") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(rank["rank"], rank["device"]) for rank in found["ranks"]] == [(0, 0), (0, 1)]
    assert [(step["rank"], step["device"]) for step in found["steps"]] == [(0, 0), (0, 0), (0, 1), (0, 1)]
    out = capsys.readouterr().out
    assert "0, device 1" in out and "several devices of one rank" in out and "several traces of one rank" not in out
