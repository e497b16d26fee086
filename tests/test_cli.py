"""The command line: exit codes, one line per mistake, JSON and nothing else, nothing half-written."""

import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

from diffperf.cli import _calibrate, _demo, _tour, main
from diffperf.cli._main import _one_line, is_users
from diffperf.cli._options import OPTIONS, Job
from diffperf.cli._predict import token_count
from diffperf.cli._search import read_axis
from diffperf.estimate import bind_step, elasticities
from diffperf.hardware import load_system
from diffperf.io import Run
from diffperf.parallel import PlanError, make_plan
from diffperf.report import better_by, memory_by_stage
from diffperf.report._figures import Point
from diffperf.tune import RankedPlan, TuneResult, describe_plan
from diffperf.workload import load_model

SMALL = ("llama-3.1-8b", "h100_sxm", "--devices", "16", "--gbs", "128", "--tp", "2", "--pp", "2", "--seq", "4096")
HEADER = "id,model_name,accelerator,num_devices,global_batch,micro_batch,tp,pp,dp,seq_len,precision,framework,step_time_s,year\n"
ROW = "a,Llama-3.1-8B,H100-80GB-SXM,16,128,1,2,2,4,4096,bf16,Megatron-LM,{},2024\n"


@pytest.fixture
def run(capsys):
    """Runs the command line in this process; returns exit code, stdout and stderr."""

    def call(*args):
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return call


def one_mistake(result, *parts):
    """Exit code 2, an empty stdout, and one line on stderr, without a traceback, that holds each of `parts`."""
    code, out, err = result
    lines = [line for line in err.splitlines() if not line.startswith("note:")]
    assert code == 2 and out == "", err
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in err, err
    for part in parts:
        assert part in lines[0], lines[0]


def test_help_needs_no_jax():
    code = "import sys\nfrom diffperf.cli import main\ntry:\n    main(['--help'])\nfinally:\n    assert 'jax' not in sys.modules, 'jax was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("demo", "predict", "explain", "tune", "sweep", "show", "models", "calibrate", "validate"):
        assert name in done.stdout


WITH_JSON = (
    "predict", "explain", "tune", "sweep", "show", "models", "demo", "calibrate runs", "validate runs", "calibrate kernels", "validate kernels",
    "calibrate collectives", "validate collectives", "import aiconfigurator", "nccl-tests", "trace",
)  # fmt: skip


@pytest.mark.parametrize("command", WITH_JSON)
def test_every_command_has_help(run, command):
    code, out, _ = run(*command.split(), "--help")
    assert code == 0 and "--json" in out


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0 and out.startswith("diffperf ")


def test_importing_the_command_line_changes_no_jax_setting():
    code = "import jax, diffperf.cli._app\nassert not jax.config.jax_enable_x64"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "args, parts",
    [
        (("predict", "llama-9", "h100_sxm", "-n", 8, "--gbs", 8), ("llama-9", "Near")),
        (("predict", "llama-3.1-8b", "h100sx", "-n", 8, "--gbs", 8), ("h100sx", "h100_sxm")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--stack", "megatrn"), ("megatrn", "megatron")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 9, "--gbs", 9, "--tp", 3), ("tensor_parallel is 3", "num_heads = 32", "1, 2, 4, 8, 16 or 32")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 10, "--gbs", 8, "--tp", 4), ("should divide devices = 10", "Use 8 devices")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 12), ("global_batch_size is 12", "16")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--dp", 4), ("uses 4 of 8 devices",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--dp", 16), ("global_batch_size",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--tp", 0), ("tensor_parallel is 0",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--ep", 2), ("no routed experts",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--pp", 8, "--vpp", 3), ("virtual_stages", "num_layers = 32")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--precision", "fp7"), ("fp7", "bf16")),
        (("predict", "llama-3.1-8b", "a100_sxm_80", "-n", 8, "--gbs", 8, "--precision", "fp8"), ("fp8", "no units")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--recompute", "some"), ("recompute is 'some'", "selective")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--recompute", "nan"), ("recompute is nan",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--mbs", "nan"), ("micro_batch_size is nan",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--nic-gbps", "inf"), ("--nic-gbps is inf",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--domain", "0"), ("--domain is 0",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--zero", "4"), ("zero_stage is 4",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--days-for", "many"), ("--days-for is 'many'", "15T")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 0, "--gbs", 8), ("--devices",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "--gbs", 8), ("--devices",)),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", "eight", "--gbs", 8), ("--devices", "integer")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--tensor", 2), ("--tensor",)),
        (("predict", "missing/config.json", "h100_sxm", "-n", 8, "--gbs", 8), ("missing/config.json", "no such file")),
        (("predict", "llama-3.1-8b", "missing.toml", "-n", 8, "--gbs", 8), ("missing.toml", "no such file")),
        (("predict", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--stack", "missing.toml"), ("missing.toml",)),
        (("tune", "llama-3.1-8b", "h100_sxm", "-n", 8, "--gbs", 8, "--objective", "joy"), ("objective is 'joy'", "step_time")),
        (("tune", "llama-3.1-8b", "h100_sxm", "-n", 9, "--gbs", 8, "--no-refine"), ("no legal plan for 9 devices",)),
        (("sweep", *SMALL, "--over", "plan.micro_batch_size"), ("--over is", "1,2,4")),
        (("sweep", *SMALL, "--over", "plan.micro_batch_size=1:2:x"), ("--over is",)),
        (("sweep", *SMALL, "--over", "plan.micro_batch_size=1:2:0"), ("COUNT should be at least 1", "PATH=FROM:TO:COUNT")),
        (("sweep", *SMALL, "--over", "plan.micro_batch_size=1:2:999999999"), ("COUNT should be at most 10,000,000",)),
        (("sweep", *SMALL, "--over", "plan.micro_batch=1,2"), ("plan.micro_batch", "plan.micro_batch_size")),
        (("sweep", *SMALL, "--over", "system.scale_out.bandwidth=nan"), ("nan", "finite")),
        (("sweep", *SMALL, "--over", "plan.micro_batch_size=1,2", "--out", "x.txt"), (".parquet or .csv",)),
        (("sweep", *SMALL, "--over", "plan.micro_batch_size=1,2", "--out", "nowhere/x.csv"), ("nowhere", "does not exist")),
        (("show", "h100x9"), ("neither a system nor a software stack", "h100_sxm")),
        (("models", "lama-3"), ("lama-3", "llama")),
        (("models", "zzzz"), ("zzzz", "`diffperf models`")),
        (("dmeo",), ("dmeo",)),
        (("demo", "--out", "nowhere/at/all"), ("does not exist",)),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(run, args, parts):
    one_mistake(run(*args), *parts)


@pytest.mark.parametrize(
    "text, parts",
    [
        ("", ("is empty",)),
        ("model,chips\nx,8\n", ("num_devices", "missing")),
        (HEADER + ROW.format("fast"), ("row 2", "step_time_s is 'fast'", "positive number of seconds")),
        (HEADER + ROW.format("-3"), ("row 2", "step_time_s is '-3'")),
        (HEADER + ROW.format("nan"), ("row 2", "step_time_s is 'nan'", "Leave the cell empty")),
        (HEADER + ROW.format("1.0").replace(",16,", ",sixteen,", 1), ("row 2", "num_devices is 'sixteen'")),
        (HEADER + ROW.format("-3") + ROW.format("-4").replace("a,", "b,", 1), ("row 2", "1 more")),
    ],
)
def test_a_bad_table_is_one_line_with_file_and_row(run, tmp_path, text, parts):
    file, out = tmp_path / "runs.csv", tmp_path / "out.toml"
    file.write_text(text, encoding="utf-8")
    one_mistake(run("calibrate", "runs", file, "--family", "mcore", "--stack", "mine", "--out", out), "runs.csv", *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["runs.csv"]


def test_a_missing_table(run, tmp_path):
    one_mistake(run("validate", "runs", tmp_path / "no.csv"), "no.csv", "no such file")
    one_mistake(run("calibrate", "runs", tmp_path / "no.csv", "--family", "mcore", "--stack", "mine"), "no.csv")


def test_an_output_that_cannot_be_written_is_refused_first(run, tmp_path):
    file = tmp_path / "runs.csv"
    file.write_text(HEADER + ROW.format("2.0"), encoding="utf-8")
    one_mistake(run("validate", "runs", file, "--json", tmp_path / "no" / "x.json"), "does not exist")
    one_mistake(run("calibrate", "runs", file, "--family", "mcore", "--stack", "mine", "--out", tmp_path / "x.yaml"), ".toml")
    one_mistake(run("calibrate", "runs", file, "--family", "mcoer", "--stack", "mine"), "family is 'mcoer'", "mcore")


CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 100}


@pytest.mark.parametrize(
    "content, part",
    [
        ("{", "config.json"),
        ('{"model_type": "flying"}', "lacks hidden_size"),
        ('{"model_type": "llama"}', "config.json"),
        ("[]", "holds a list"),
        ("null", "holds a NoneType"),
        (json.dumps(CONFIG | {"model_type": 3}), "model_type of"),
        (json.dumps(CONFIG | {"hidden_size": "64"}), "hidden_size of"),
        (json.dumps(CONFIG | {"intermediate_size": [256]}), "should be a finite number"),
        (json.dumps(CONFIG | {"vocab_size": float("nan")}), "vocab_size of"),
        (json.dumps(CONFIG | {"num_hidden_layers": 10**30}), "a whole number of at most 100,000"),
        (json.dumps(CONFIG | {"num_hidden_layers": 1.5}), "num_hidden_layers of"),
        (json.dumps(CONFIG | {"tie_word_embeddings": "maybe"}), "true or false"),
    ],
)
def test_a_broken_config_names_the_file(run, tmp_path, content, part):
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    one_mistake(run("models", tmp_path / "config.json"), part)


@pytest.mark.parametrize(
    "content, part",
    [
        ("base = ", "not a TOML file"),
        ('base = "h100_sxm"\nname = "x"\n[chip]\nmemory_bandwidth = { value = nan, source = "x" }', "chip.memory_bandwidth.value is nan"),
        ('base = "h100_sxm"\nname = "x"\n[chip]\nmemory_bandwith = { value = 1e12, source = "x" }', "memory_bandwith"),
    ],
)
def test_a_broken_system_names_the_file_and_key(run, tmp_path, content, part):
    file = tmp_path / "own.toml"
    file.write_text(content, encoding="utf-8")
    one_mistake(run("show", file), "own.toml", part)
    one_mistake(run("predict", "llama-3.1-8b", file, "-n", 8, "--gbs", 8), "own.toml", part)


def test_show_system_and_stack(run):
    code, out, _ = run("show", "h100", "--json")
    rows = {row["path"]: row for row in json.loads(out)["numbers"]}
    assert code == 0 and rows["chip.memory_bandwidth"]["value"] == 3.35e12 and rows["chip.memory_bandwidth"]["source"]
    code, out, _ = run("show", "h100_sxm")
    assert code == 0 and "989 TFLOP/s" in out and "3.35 TB/s" in out and "datasheet" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = run("show", "megatron-core", "--json")
    names = [constant["name"] for constant in json.loads(out)["constants"]]
    assert code == 0 and "matmul_factor" in names
    code, out, _ = run("show", "list", "--json")
    listed = json.loads(out)
    assert code == 0 and len(listed["systems"]) >= 40 and any(stack["name"] == "typical" for stack in listed["stacks"])
    assert run("show", "typical")[0] == run("show")[0] == 0


def test_models(run, tmp_path):
    code, out, _ = run("models", "deepseek-v3", "--json")
    facts = json.loads(out)
    assert code == 0 and abs(facts["parameters"] / facts["published_parameters"] - 1) < 0.005 and len(facts["blocks"]) == 2
    assert facts["active_parameters"] < 0.06 * facts["parameters"]
    code, out, _ = run("models", "llama-3.1-8b")
    assert code == 0 and "8.03B" in out
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
              "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code, out, _ = run("models", tmp_path / "config.json", "--json")
    assert code == 0 and abs(json.loads(out)["parameters"] / 8.03e9 - 1) < 0.001


def test_predict_and_explain_agree(run):
    code, out, err = run("predict", *SMALL, "--json", "--days-for", "1T")
    p = json.loads(out)
    assert code == 0 and p["plan"]["data_parallel"] == 4 and 0 < p["low_s"] < p["step_time_s"] < p["high_s"]
    e = p["estimate"]
    assert e["step_time_s"] == pytest.approx(p["step_time_s"]) and sum(e["breakdown_s"].values()) == pytest.approx(p["step_time_s"])
    assert e["tokens_per_s"] == pytest.approx(128 * 4096 / p["step_time_s"])
    assert len(p["memory_by_stage_bytes"]) == 2 and max(sum(s.values()) for s in p["memory_by_stage_bytes"]) == pytest.approx(e["peak_memory_bytes"])
    assert p["run"]["days"] == pytest.approx(1e12 / e["tokens_per_s"] / 86400)
    assert p["run"]["cost_usd"] == pytest.approx(e["cost_usd"] * p["run"]["steps"])
    code, out, err = run("explain", *SMALL, "--json")
    x = json.loads(out)
    assert code == 0 and x["step_time_s"] == p["step_time_s"] and x["bottleneck"].startswith("Limited by")
    slopes = {row["path"]: row["elasticity"] for row in x["elasticities"]}
    assert slopes["system.chip.peak_flops_per_s.bf16"] < 0
    gains = {row["path"]: row for row in x["ten_percent_better"]}
    for path, row in gains.items():  # 10% is near enough to the slope
        assert row["gain"] == pytest.approx(abs(slopes[path]) * 0.095, rel=0.25, abs=2e-3), path
        assert row["step_time_s"] == pytest.approx(x["step_time_s"] * (1 - row["gain"]))
    code, out, err = run("predict", *SMALL)
    assert code == 0 and "Memory per device" in out and max(map(len, out.splitlines())) <= 80
    code, out, _ = run("explain", *SMALL)
    assert code == 0 and "Elasticities" in out and max(map(len, out.splitlines())) <= 80


def test_overrides_change_the_cluster_only(run):
    slow = json.loads(run("predict", *SMALL, "--json", "--nic-gbps", "25")[1])
    fast = json.loads(run("predict", *SMALL, "--json", "--nic-gbps", "800")[1])
    assert slow["step_time_s"] > fast["step_time_s"] and slow["estimate"]["lower_bound_s"] == fast["estimate"]["lower_bound_s"]


def test_own_system_file(run, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('base = "h100_sxm"\nname = "own"\n[chip]\nmemory_capacity = { value = 2e11, source = "wish" }\n', encoding="utf-8")
    code, out, err = run("predict", "llama-3.1-8b", file, *SMALL[2:], "--json")
    p = json.loads(out)
    assert code == 0 and p["estimate"]["memory_capacity_bytes"] == 2e11 and any("h100_sxm" in text for text in p["notes"])


def test_out_of_memory_says_what_would_fit(run):
    job = ("llama-3.1-70b", "h100_sxm", "-n", "64", "--gbs", "64", "--tp", "8", "--seq", "8192")
    one_mistake(run("predict", *job, "--zero", "0"), "out of memory: pipeline stage 0 needs", "GB more than", "zero_stage", "--allow-oom")
    code, out, _ = run("predict", *job, "--zero", "0", "--allow-oom", "--json")
    assert code == 0 and json.loads(out)["estimate"]["feasible"] is False


def test_tune_and_sweep(run, tmp_path):
    code, out, err = run("tune", "llama-3.1-8b", "h100_sxm", "-n", 16, "--gbs", 128, "--seq", 4096, "--no-refine", "--top", 3, "--json")
    found = json.loads(out)
    times = [row["estimate"]["step_time_s"] for row in found["plans"]]
    assert code == 0 and len(times) == 3 and times == sorted(times) and found["num_feasible"] <= found["num_legal"] <= found["num_tried"]
    code, out, _ = run("tune", "llama-3.1-8b", "h100_sxm", "-n", 16, "--gbs", 128, "--seq", 4096, "--no-refine", "--tp", 2)
    *lines, last = out.splitlines()
    assert code == 0 and "are legal" in out and max(map(len, lines)) <= 80
    command = last.partition("with measured neighbours: diffperf ")[2].split()
    assert command[:3] == ["predict", "llama-3.1-8b", "h100_sxm"] and command[command.index("--tp") + 1] == "2" and "--seq" in command
    code, out, _ = run(*command, "--json")
    assert code == 0 and {"tensor_parallel": 2}.items() <= json.loads(out)["plan"].items()
    file = tmp_path / "grid.csv"
    code, out, _ = run("sweep", *SMALL, "--over", "plan.micro_batch_size=1,2,4", "--over", "system.scale_out.bandwidth=25e9:100e9:3:log", "--out", file)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert code == 0 and len(lines) == 10 and "plan.micro_batch_size" in lines[0] and [path.name for path in tmp_path.iterdir()] == ["grid.csv"]
    code, out, _ = run("sweep", *SMALL, "--over", "plan.micro_batch_size=1,2", "--json")
    assert code == 0 and [row["plan.micro_batch_size"] for row in json.loads(out)["rows"]] == [1, 2]


def test_validate_and_calibrate(run, tmp_path):
    rows = [("a", 16, 4, 2.0), ("b", 32, 8, 1.1), ("c", 64, 16, None)]
    text = HEADER + "".join(f"{name},Llama-3.1-8B,H100-80GB-SXM,{n},128,1,2,2,{dp},4096,bf16,Megatron-LM,{t or ''},2024\n" for name, n, dp, t in rows)
    file, out = tmp_path / "runs.csv", tmp_path / "result.json"
    file.write_text(text, encoding="utf-8")
    code, _, _ = run("validate", "runs", file, "--json", tmp_path / "no_ending")
    assert code == 0 and json.loads((tmp_path / "no_ending").read_text(encoding="utf-8"))["n_rows"] == 3
    code, printed, _ = run("validate", "runs", file, "--json", out)
    result = json.loads(out.read_text(encoding="utf-8"))
    assert code == 0 and result["n_rows"] == 3 and result["n_modelled"] == 2 and sum(result["skipped"].values()) == 1
    assert set(result) == {"n_rows", "n_modelled", "skipped", "error", "baseline", "memory", "groups", "rows"}
    assert all(set(result[key]) == {"median", "mean", "p90", "bias"} for key in ("error", "baseline", "memory"))
    assert all(set(row) == {"id", "measured_s", "predicted_s", "low_s", "high_s"} for row in result["rows"])
    assert {row["id"] for row in result["rows"]} == {"a", "b"}
    assert all(row["low_s"] < row["predicted_s"] < row["high_s"] for row in result["rows"]) and "2 modelled" in printed
    assert "nan" not in printed and "memory" not in printed and ", Llama" not in printed  # no row has a peak or a source
    file.write_text("".join(text.splitlines(keepends=True)[:3]), encoding="utf-8")
    toml = tmp_path / "mine.toml"
    code, printed, _ = run("calibrate", "runs", file, "--family", "mcore", "--stack", "mine", "--out", toml, "--propose", 1, "--json")
    report = json.loads(printed)
    assert code == 0 and toml.exists() and {row["id"] for row in report["rows"]} == {"a", "b"}
    for row in report["rows"]:
        assert abs(np.log(row["after_s"] / row["measured_s"])) <= abs(np.log(row["before_s"] / row["measured_s"])) + 0.01
    console = Console(width=80, record=True, file=io.StringIO())
    for part in (_calibrate._rows_table(report["rows"]), _calibrate._constants_table(report["constants"]), _calibrate._proposals_table(report["proposals"])):
        console.print(part)
    assert "2.00 s" in console.export_text() and report["proposals"][0]["id"] in "ab"
    code, printed, _ = run("predict", *SMALL, "--stack", toml, "--json")
    assert code == 0 and json.loads(printed)["step_time_s"] == pytest.approx(2.0, rel=0.35)


@pytest.fixture
def tour(stack):
    model, system = load_model("llama-3.1-8b", 4096), load_system("h100_sxm", num_devices=16)
    plan = make_plan(global_batch_size=128, tensor_parallel=2, pipeline_parallel=2, data_parallel=4)
    estimate = bind_step(model, system, stack)(plan)
    slopes = elasticities(model, system, plan, stack)
    ranked = RankedPlan(plan, estimate, float(estimate.step_time), describe_plan(plan))
    errors = dict(median=0.04, mean=0.07, p90=0.15, bias=0.0)
    return _tour.Tour(
        run=Run(id="tr1", source="a <source>", model_name="Llama", accelerator="H100", framework="NeMo", step_time_s=2.0, num_devices=16.0),
        title="Llama on 16 H100", layout="tensor 2", model=model, system=system, plan=plan, stack=stack, estimate=estimate, interval=(1.5, 2.5),
        elasticities=slopes, better=better_by(model, system, plan, stack, slopes[:3]), stages=memory_by_stage(model, plan, stack),
        siblings=[("tr2", 1.0, 1.1, 0.9, 1.3)], tuned=TuneResult((ranked,), ranked, 0.01, "step_time", 100, 50, 20, 1.0, 0.1), tuned_note="",
        reference=ranked, accuracy=[("all runs", 100, errors, errors)], accuracy_note="held out", held_out_rows=2, meta={},
        points=[Point("tr1", "Llama", "mcore", 2.0, 2.1, 3.0), Point("tr2", "Llama", "fsdp", 20.0, 21.0, 30.0)],
    )  # fmt: skip


def test_demo_writes_one_page(run, tmp_path, monkeypatch, tour):
    monkeypatch.setattr(_tour, "run", lambda tell: tour)
    code, out, err = run("demo", "--out", tmp_path / "demo", "--json")
    result = json.loads(out)
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert code == 0 and result["report"].endswith("report.html") and "a &lt;source&gt;" in page
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["report.html"]
    code, out, _ = run("demo", "--out", tmp_path / "demo")
    assert code == 0 and "row tr1" in out and max(map(len, out.splitlines())) <= 80
    one_mistake(run("demo", "--out", tmp_path / "demo" / "report.html"), "is a file")


def test_failures_of_ours_are_not_blamed_on_the_user(run, monkeypatch):
    monkeypatch.setattr(_demo, "Path", lambda _: np.ones(2) @ np.ones(3))
    code, out, err = run("demo")
    assert code == 1 and err.startswith("error: failure inside diffperf") and "Traceback" not in err and len(err.splitlines()) == 1


def test_interrupt_is_quiet(run, monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_demo, "Path", stop)
    code, out, err = run("demo")
    assert code == 130 and err.strip() == "interrupted"


def test_whose_mistake():
    def caught(call):
        with pytest.raises(Exception) as error:  # noqa: PT011
            call()
        return error.value

    assert is_users(caught(lambda: make_plan(global_batch_size=-1)))
    assert is_users(caught(lambda: open("/no/such/file")))
    assert not is_users(caught(lambda: np.ones(2) @ np.ones(3)))
    assert not is_users(caught(lambda: {}["x"]))
    assert _one_line("a\nb\n... and 3 more problems like these.") == "a. (4 more like this.)"


def test_words():
    assert token_count("15T") == 15e12 and token_count("300b") == 300e9 and token_count("1e12") == 1e12
    assert read_axis("plan.recompute=none,full") == ("plan.recompute", ["none", "full"])
    path, values = read_axis("system.scale_out.bandwidth=1e9:1e11:3:log")
    np.testing.assert_allclose(values, [1e9, 1e10, 1e11])
    assert read_axis("a=1:2:1")[1] == [1.0] and read_axis("plan.data_parallel=auto")[1] == ["auto"]
    assert Job(**{name: None for name in OPTIONS}).plan_words() == {}
    with pytest.raises(PlanError):
        make_plan(global_batch_size=8, **Job(**({name: None for name in OPTIONS} | {"tp": -1})).plan_words())
    assert jax.config.jax_enable_x64
