"""A sweep's rows are the step's own predictions, from one compilation, and a file is whole or absent."""

import dataclasses
import json
import os
import subprocess
import sys

import chex
import equinox as eqx
import jax
import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from diffperf.estimate import _batch, elasticities, train_step
from diffperf.hardware import load_system
from diffperf.parallel import make_plan
from diffperf.stack import Stack
from diffperf.sweep import sweep
from diffperf.workload import transformer, with_seq_len

# Plausible numbers, not a fit: what is tested here holds for any stack. Factors not named are 1.
NUMBERS = {
    "attention_backward_ratio": 2.7, "attention_head_half": 24, "weight_traffic": 1.6, "activation_traffic": 2.6, "elementwise_bytes": 16,
    "launch_time": 1.3e-3, "tensor_exposed": 0.25, "collective_latency": 3e-5, "expert_latency": 1e-5, "shard_overlap": 0.5, "step_overhead": 15e-3,
    "scale_jitter": 0.01, "memory_fixed": 1.5e9,
}  # fmt: skip
STACK = Stack(**{field.name: NUMBERS.get(field.name, 1.0) for field in dataclasses.fields(Stack)})
MODEL = transformer(hidden=4096, layers=32, num_heads=32, num_kv_heads=8, ffn_hidden=14336, vocab=128256, seq_len=4096)
SYSTEM = load_system("h100", num_devices=64)
PLAN = make_plan(global_batch_size=256, tensor_parallel=4, data_parallel=16, zero_stage=3)
INPUTS = (MODEL, SYSTEM, PLAN, STACK)
BANDWIDTHS = (1e10, 5e10, 1e11)
step = jax.jit(train_step)


def test_rows_equal_the_step_in_the_order_of_the_axes():
    table = sweep(*INPUTS, {"plan.micro_batch_size": [1, 2], "system.scale_out.bandwidth": BANDWIDTHS, "model.seq_len": [2048, 4096.0]}, block=5)
    assert table.num_rows == 12
    row = 0
    for micro in (1, 2):
        for bandwidth in BANDWIDTHS:
            for seq_len in (2048, 4096):
                plan = dataclasses.replace(PLAN, micro_batch_size=micro)
                system = eqx.tree_at(lambda s: s.scale_out.bandwidth, SYSTEM, np.asarray(bandwidth))
                one, got = step(with_seq_len(MODEL, seq_len), system, plan, STACK), table.slice(row, 1).to_pylist()[0]
                assert (got["plan.micro_batch_size"], got["system.scale_out.bandwidth"], got["model.seq_len"]) == (micro, bandwidth, seq_len)
                expected = {
                    "step_time_s": one.step_time, "tokens_per_s": one.tokens_per_s, "mfu": one.mfu, "energy_j": one.energy,
                    "peak_memory_gb": one.peak_memory / 1e9, "cost_usd": one.cost,
                }  # fmt: skip
                np.testing.assert_allclose([got[name] for name in expected], list(expected.values()), rtol=1e-5)
                assert got["feasible"] == one.feasible
                row += 1


def test_all_sweeps_share_one_compilation(monkeypatch, tmp_path):
    _batch._executable.cache_clear()
    monkeypatch.setattr(_batch, "train_step", chex.assert_max_traces(train_step, n=1))
    sweep(*INPUTS, {"plan.micro_batch_size": [1, 2, 4, 8], "system.scale_out.bandwidth": BANDWIDTHS}, block=5)  # three blocks
    other = (MODEL, load_system("a100", num_devices=64), PLAN, STACK)
    sweep(*other, {"stack.step_overhead": [0, 1e-2], "plan.recompute": ["none", "full"]}, block=5, out=tmp_path / "b.csv")


def test_words_and_degrees_that_follow():
    axes = {"plan.recompute": ["none", "selective", 0.5], "plan.tensor_parallel": [1, 8, 48], "plan.data_parallel": "auto", "plan.sequence_parallel": "auto"}
    table = sweep(*INPUTS, axes, quantities=("step_time_s", "peak_memory_gb", "feasible"))
    assert table["plan.recompute"].to_pylist()[::3] == ["none", "selective", "0.5"]
    np.testing.assert_allclose(table["plan.data_parallel"].to_numpy()[:3], [64, 8, 64 / 48])
    plan = make_plan(global_batch_size=256, tensor_parallel=8, data_parallel=8, zero_stage=3, recompute=0.5)
    np.testing.assert_allclose(table["step_time_s"].to_pylist()[7], step(MODEL, SYSTEM, plan, STACK).step_time, rtol=1e-5)
    assert not any(table["feasible"].to_pylist()[2::3])  # 48 leaves a fraction of a data-parallel rank
    precisions = sweep(*INPUTS, {"plan.precision": ["bf16", "fp8"], "plan.zero_stage": [0, 3]})
    assert precisions["plan.zero_stage"].to_pylist() == [0, 3, 0, 3]
    assert precisions["step_time_s"][1].as_py() > precisions["step_time_s"][3].as_py()


def test_zip_goes_row_by_row():
    table = sweep(*INPUTS, {"plan.tensor_parallel": [2, 4, 8], "plan.data_parallel": [32, 16, 8]}, mode="zip")
    assert table["plan.data_parallel"].to_pylist() == [32, 16, 8]
    with pytest.raises(ValueError, match="axes of equal length.*plan.tensor_parallel: 1"):
        sweep(*INPUTS, {"plan.tensor_parallel": [2], "plan.data_parallel": [32, 16]}, mode="zip")


def test_gradient_columns_are_the_elasticities():
    path = "system.scale_out.bandwidth"
    table = sweep(*INPUTS, {path: BANDWIDTHS, "plan.micro_batch_size": [1]}, gradients=(path, "model.seq_len", path))
    for row, bandwidth in enumerate(BANDWIDTHS):
        system = eqx.tree_at(lambda s: s.scale_out.bandwidth, SYSTEM, np.asarray(bandwidth))
        expected = {e.path: e.elasticity for e in elasticities(MODEL, system, PLAN, STACK, wrt=("system", "model"))}
        for name in (path, "model.seq_len"):
            np.testing.assert_allclose(table[f"elasticity.{name}"][row].as_py(), expected[name], rtol=1e-4)


def test_files_hold_what_the_table_holds(tmp_path):
    axes = {"plan.recompute": ["none", "full"], "system.scale_out.bandwidth": np.geomspace(1e9, 1e11, 7)}
    table = sweep(*INPUTS, axes, block=4, quantities=("step_time_s", "feasible", "breakdown", "memory"))
    np.testing.assert_allclose(sum(table[n].to_numpy() for n in table.column_names if n.startswith("breakdown_")), table["step_time_s"].to_numpy(), rtol=1e-5)
    for suffix, read in ((".parquet", pyarrow.parquet.read_table), (".csv", pyarrow.csv.read_csv)):
        out = tmp_path / f"sweep{suffix}"
        assert sweep(*INPUTS, axes, block=4, quantities=("step_time_s", "feasible", "breakdown", "memory"), out=out) == out
        got = read(out)
        assert got.column_names == table.column_names and got.num_rows == 14
        np.testing.assert_allclose(got["step_time_s"].to_numpy(), table["step_time_s"].to_numpy(), rtol=1e-6)
        assert got["plan.recompute"].to_pylist() == table["plan.recompute"].to_pylist()
    assert sorted(os.listdir(tmp_path)) == ["sweep.csv", "sweep.parquet"]


def test_a_folder_is_no_output_file(tmp_path):
    (tmp_path / "sweep.csv").mkdir()
    with pytest.raises(IsADirectoryError, match="which is a folder"):
        sweep(*INPUTS, {"plan.micro_batch_size": [1, 2]}, out=tmp_path / "sweep.csv")
    assert os.listdir(tmp_path) == ["sweep.csv"]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_sweep_that_breaks_off_leaves_the_old_file(tmp_path, monkeypatch, suffix):
    out = tmp_path / f"sweep{suffix}"
    out.write_text("old")
    calls, real = [], _batch.BatchStep.__call__

    def breaks(self, *arguments):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(_batch.BatchStep, "__call__", breaks)
    with pytest.raises(KeyboardInterrupt):
        sweep(*INPUTS, {"plan.micro_batch_size": [1, 2, 4, 8] * 4}, block=5, out=out)
    assert out.read_text() == "old" and os.listdir(tmp_path) == [out.name]


@pytest.mark.parametrize(
    "axes, options, message",
    [
        ({"plan.micro_batchsize": [1]}, {}, "Near paths: plan.micro_batch_size"),
        ({"bandwidth": [1e9]}, {}, "unknown path 'bandwidth'.*bandwidth.*starts with model, system, plan or stack"),
        ({"system.chip.peak_flops_per_s": [1e15]}, {}, "is not one number. Add one of: fp32"),
        ({"system.scale_out.bandwidth": [1e9, 0]}, {}, "value 0; it should be finite and positive"),
        ({"model.seq_len": [float("nan")]}, {}, "value nan; it should be finite"),
        ({"stack.step_overhead": [-1.0]}, {}, "value -1.0; it should be finite and 0 or more"),
        ({"plan.data_parallel": ["all"]}, {}, 'value \'all\'; it should be a number or "auto" alone'),
        ({"plan.precision": ["bf17"]}, {}, "precision is 'bf17'"),
        ({"plan.recompute": ["none"], "plan.recompute_full": [1]}, {}, "both set plan.recompute_full"),
        ({"plan.micro_batch_size": []}, {}, "has no values"),
        ({"plan.data_parallel": "auto"}, {}, 'only "auto"'),
        ({}, {}, "axes is empty"),
        ({"plan.micro_batch_size": [1]}, {"quantities": ("speed",)}, "quantities holds 'speed'.*step_time_s"),
        ({"plan.micro_batch_size": [1]}, {"gradients": ("model.seqlen",)}, "Near paths: model.seq_len"),
        ({"plan.micro_batch_size": [1]}, {"mode": "grid"}, "mode is 'grid'"),
        ({"plan.micro_batch_size": [1]}, {"out": "sweep.xlsx"}, "should end in .parquet or .csv"),
        ({"stack.step_overhead": np.ones(6000), "stack.scale_jitter": np.ones(6000)}, {}, "36,000,000 rows, too many for a table"),
    ],
)
def test_errors_say_what_to_change(axes, options, message):
    with pytest.raises(ValueError, match=message):
        sweep(*INPUTS, axes, **options)


def test_rows_are_split_over_all_devices():
    """In a process whose CPU is parted into two devices, and which compiles as users do, with all optimizations."""
    program = """
import json, jax, numpy as np
import test_sweep as t
assert len(jax.devices()) == 2
from diffperf.estimate import BatchStep
batch = BatchStep(*t.INPUTS, block=7)
result = batch(np.array([batch.names.index("plan.micro_batch_size")]), np.array([[1.0, 2, 4]]))
assert batch.block == 8 and len(result.estimate.step_time.sharding.device_set) == 2
print(json.dumps(t.sweep(*t.INPUTS, {"plan.micro_batch_size": [1, 2, 4]}, block=7)["step_time_s"].to_pylist()))
"""
    flags = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    flags["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
    flags["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.getcwd()])
    done = subprocess.run([sys.executable, "-c", program], env=flags, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = sweep(*INPUTS, {"plan.micro_batch_size": [1, 2, 4]})["step_time_s"].to_pylist()
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), expected, rtol=1e-6)
