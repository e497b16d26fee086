"""Kernel timings out of an installed package: a small one is laid out here as the real one is."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffperf.cli import main
from diffperf.io import aiconfigurator_tables, read_aiconfigurator, read_kernels

OF_ALL = dict(framework="VLLM", version="0.24.0", device="NVIDIA H200")
GEMM = [
    OF_ALL | dict(op_name="gemm", kernel_source="cublas", gemm_dtype="bfloat16", m=m, n=4096, k=4096, latency=2 * m * 4096**2 / 6e14 * 1e3)
    for m in (4096, 8192)
]
DECODE = [
    OF_ALL | dict(op_name="generation_attention", kernel_source="fa3", batch_size=32, isl=1, num_heads=64, num_key_value_heads=8, head_dim=128, beam_width=1,
                  attn_dtype="bfloat16", kv_cache_dtype="fp8", step=15, window_size=0, latency=0.0111)
]  # fmt: skip
SCALE = [OF_ALL | dict(op_name="compute_scale", kernel_source="x", m=16, k=128, quant_dtype="fp8", latency=latency) for latency in (0.0, 0.00003)]
SPARSE = [OF_ALL | dict(op_name="dsa_context_module", kernel_source="x", mla_dtype="bfloat16", num_heads=128, batch_size=1, isl=64, step=0, latency=1.2)]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with two systems, one of them in the older layout."""
    root = tmp_path / "site" / "aiconfigurator_core"

    def table(rows, place):
        path = root / "systems" / "data" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")
        return path

    table(GEMM, "h200_sxm/gemm/vllm/0.24.0/gemm_perf.parquet")
    table(GEMM[:1], "h200_sxm/gemm/trtllm/1.3.0/gemm_perf.parquet")
    table(DECODE, "h200_sxm/attention/vllm/0.24.0/generation_attention_perf.parquet")
    table(SCALE, "h200_sxm/quantize/vllm/0.24.0/computescale_perf.parquet")
    table(SPARSE, "h200_sxm/sparse_attention/vllm/0.24.0/dsa_context_module_perf.parquet")
    table([dict(nccl_dtype="half", num_gpus=8, message_size=1024, latency=0.1)], "h200_sxm/comm/nccl/2.27.3/nccl_perf.parquet")
    table(GEMM, "a100_sxm/vllm/0.14.0/gemm_perf.txt")
    (root / "systems" / "data" / "a30").mkdir()
    (root / "__init__.py").write_text("raise RuntimeError('the package should be read, not imported')")
    info = tmp_path / "site" / "aiconfigurator_core-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return table


def test_the_tables_of_a_package_are_listed_without_its_collectives(package):
    found = [(item.system, item.op, item.library, item.version) for item in aiconfigurator_tables()]
    assert found == [
        ("a100_sxm", "matmul", "vllm", "0.14.0"),
        ("h200_sxm", "quantize_computescale", "vllm", "0.24.0"),
        ("h200_sxm", "dsa_context_module", "vllm", "0.24.0"),
        ("h200_sxm", "matmul", "trtllm", "1.3.0"),
        ("h200_sxm", "matmul", "vllm", "0.24.0"),
        ("h200_sxm", "attention_decode", "vllm", "0.24.0"),
    ]


def test_a_system_is_read_with_milliseconds_as_seconds(package):
    table = read_aiconfigurator("h200_sxm")
    assert sorted(table.op) == ["attention_decode", "matmul", "matmul", "matmul", "quantize_computescale"]
    matmul = table.select(op="matmul", library="vllm")
    np.testing.assert_allclose(2 * matmul["m"] * matmul["n"] * matmul["k"] / matmul.time_s, 6e14, rtol=1e-12)
    assert set(table.gpu) == {"h200_sxm"} and set(matmul["library_version"]) == {"0.24.0"} and set(matmul["device"]) == {"NVIDIA H200"}
    decode = table.select(op="attention_decode")
    assert [decode[name][0] for name in ("q_len", "kv_len", "n_q_heads", "n_kv_heads", "window_size")] == [1, 16, 64, 8, 0]
    assert decode["kv_cache_datatype"][0] == "fp8"
    assert table.num_rejected == 1 and table.rejected[0].examples == ("h200_sxm/computescale/vllm/0.24.0:1: time_ms is 0",)


def test_operators_and_libraries_are_chosen_by_name(package):
    assert len(read_aiconfigurator("h200_sxm", ops=["matmul"])) == len(read_aiconfigurator("h200_sxm", ops=["gemm"])) == 3
    assert set(read_aiconfigurator("h200_sxm", libraries=["trtllm"]).library) == {"trtllm"}
    assert read_aiconfigurator("h200_sxm", ops=["dsa_context_module"])["num_heads"].tolist() == [128]
    with pytest.raises(ValueError, match="op is 'conv'; the tables of h200_sxm have .*attention_decode.*gemm.*matmul"):
        read_aiconfigurator("h200_sxm", ops=["conv"])
    with pytest.raises(ValueError, match="library is 'mlx'.*trtllm, vllm"):
        read_aiconfigurator("h200_sxm", libraries=["mlx"])
    with pytest.raises(ValueError, match="no table of attention_decode by trtllm"):
        read_aiconfigurator("h200_sxm", ops=["attention_decode"], libraries=["trtllm"])


def test_the_older_layout_is_read(package):
    table = read_aiconfigurator("a100_sxm")
    assert table["m"].tolist() == [4096, 8192] and table["library_version"].tolist() == ["0.14.0"] * 2


def test_a_system_without_data_lists_those_with_data(package):
    with pytest.raises(ValueError, match="system is 'a30'; aiconfigurator-core 9.8.7 has no kernel timings of it. It has a100_sxm, h200_sxm"):
        read_aiconfigurator("a30")


def test_a_table_of_another_make_is_refused(package):
    path = package([OF_ALL | dict(op_name="gemm", gemm_dtype="fp8", m=1, n=1, k=1)], "b200_sxm/gemm/vllm/1/gemm_perf.parquet")
    with pytest.raises(ValueError, match="no column `latency`"):
        read_aiconfigurator("b200_sxm")
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        read_aiconfigurator("b200_sxm")


def _run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["import", "aiconfigurator", *map(str, args)])
    return stop.value.code, *capsys.readouterr()


def test_the_command_lists_reads_and_writes(package, tmp_path, capsys):
    code, out, _ = _run(capsys)
    assert code == 0 and "h200_sxm" in out and "a100_sxm" in out
    code, out, _ = _run(capsys, "--json")
    assert code == 0 and dict(system="a100_sxm", op="matmul", library="vllm", versions=["0.14.0"]) in json.loads(out)
    code, out, _ = _run(capsys, "--system", "h200_sxm", "--op", "computescale", "--json")
    document = json.loads(out)
    assert document["groups"] == [dict(op="quantize_computescale", datatype="fp8", library="vllm", rows=1)] and document["rejected"][0]["count"] == 1
    target = tmp_path / "h200.parquet"
    code, out, err = _run(capsys, "--system", "h200_sxm", "--op", "gemm", "--op", "computescale", "--out", target)
    assert code == 0 and "4 rows read, 1 left out" in out and "time_ms is 0" in out and not err
    again = read_kernels(target)
    assert sorted(again.op) == ["matmul"] * 3 + ["quantize_computescale"]
    np.testing.assert_allclose(sorted(again.time_s), sorted(read_aiconfigurator("h200_sxm", ops=["gemm", "computescale"]).time_s), rtol=1e-14)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--system", "mi300x"], "no kernel timings of it"),
        (["--out", "x.csv"], "--out needs --system"),
        (["--system", "h200_sxm", "--out", "x.json"], "should be .csv"),
        (["--system", "h200_sxm", "--out", "nowhere/x.csv"], "does not exist"),
        (["--system", "h200_sxm", "--op", "conv"], "op is 'conv'"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(package, capsys, args, message):
    code, out, err = _run(capsys, *args)
    assert code == 2 and not out and message in err and err.count("\n") == 1


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr("diffperf.io._aiconfigurator._PACKAGES", ("diffperf_no_such_package",))
    code, _, err = _run(capsys, "--system", "h200_sxm")
    assert code == 2 and "pip install aiconfigurator-core" in err and err.count("\n") == 1


def test_a_package_without_data_says_so(tmp_path, monkeypatch):
    (tmp_path / "empty_package").mkdir()
    (tmp_path / "empty_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("diffperf.io._aiconfigurator._PACKAGES", ("empty_package",))
    with pytest.raises(ValueError, match="empty-package at .* has no folder systems/data.*pip install"):
        aiconfigurator_tables()
