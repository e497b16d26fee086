"""Tables of kernel times: every spelling becomes one, what cannot be used is counted, other units and missing columns are refused."""

import gzip
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffperf.hardware import resolve_name
from diffperf.io import KERNEL_SIZES, KERNEL_TEXTS, KernelTable, RunFileError, read_kernels, write_kernels

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "kernels"
GEMM = """gpu,op,framework,kernel_source,dtype,m,n,k,time_us,flag
h100_sxm,gemm,vllm 0.24.0,cublas,bfloat16,4096,4096,4096,210.5,
h100_sxm,gemm,vllm 0.24.0,cublas,bfloat16,8192,4096,4096,405,far_below_roofline
h100_sxm,gemm,trtllm 1.0.0,cutlass,fp8,16,4096,4096,11.25,
"""
HEADER, *ROWS = GEMM.splitlines()


@pytest.fixture
def write(tmp_path):
    def written(text, name="kernels.csv"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return written


def row(**changes):
    """One good row of a bf16 matmul on H100 at about 650 TFLOP/s, as a dict."""
    return dict(gpu="h100_sxm", op="gemm", framework="vllm 0.24.0", dtype="bf16", m=4096, n=4096, k=4096, time_us=211.0) | changes


def spread(factor=1.0, count=12, **changes):
    """Rows of matmuls of several sizes at about 650 TFLOP/s, times multiplied by `factor`."""
    sizes = [1024 * 2 ** (i % 4) for i in range(count)]
    return [row(m=m + i, n=m, time_us=factor * (2.0 * (m + i) * m * 4096 / 6.5e14 + 4e-6) * 1e6, **changes) for i, m in enumerate(sizes)]


def same(a: KernelTable, b: KernelTable):
    for name in ("gpu", "op", "datatype", "library", "kernel_source", "flag", *KERNEL_TEXTS):
        assert a[name].tolist() == b[name].tolist(), name
    for name in ("time_s", *KERNEL_SIZES):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-14, err_msg=name)


def test_a_csv_file_becomes_columns_of_one_spelling_in_si_units(write):
    path = write(GEMM)
    table = read_kernels(path)
    assert len(table) == 3 and table.num_rejected == 0 and not table.remarks
    assert table.op.tolist() == ["matmul"] * 3 and table["op_name"].tolist() == ["gemm"] * 3
    assert table.datatype.tolist() == ["bf16", "bf16", "fp8"]
    assert table.library.tolist() == ["vllm", "vllm", "trtllm"] and table["library_version"].tolist() == ["0.24.0", "0.24.0", "1.0.0"]
    np.testing.assert_allclose(table.time_s, [210.5e-6, 405e-6, 11.25e-6], rtol=1e-15)
    np.testing.assert_array_equal(table["m"], [4096, 8192, 16])
    assert table.flag.tolist() == ["", "far_below_roofline", ""]
    assert table.source_row == tuple(f"{path}:{line}" for line in (2, 3, 4))
    assert np.isnan(table["head_dim"]).all() and table["distribution"].tolist() == [""] * 3
    with pytest.raises(KeyError, match="'mm' is not a column.*time_s"):
        table["mm"]


def test_all_sources_of_the_same_rows_agree(write, tmp_path):
    expected = read_kernels(write(GEMM))
    cells = [line.split(",") for line in ROWS]
    records = [{key: float(cell) if key in "mnk" or key == "time_us" else cell for key, cell in zip(HEADER.split(","), line)} for line in cells]
    columns_of_table = {key: [record[key] for record in records] for key in records[0]}
    arrow = pa.table(columns_of_table)
    pq.write_table(arrow, tmp_path / "kernels.parquet")

    class Frame:
        """What a pandas DataFrame shows of itself here."""

        iloc = to_dict = None
        columns = tuple(columns_of_table)
        __getitem__ = lambda self, key: columns_of_table[key]

    for source in (write(GEMM, "kernels.csv.gz"), str(tmp_path / "kernels.parquet"), records, columns_of_table, arrow, Frame()):
        same(read_kernels(source), expected)
    two = read_kernels([write(GEMM), tmp_path / "kernels.parquet"])
    same(two, KernelTable.concat([expected, expected]))
    assert two.source_row[0].endswith("kernels.csv:2") and two.source_row[3].endswith("kernels.parquet:1")


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".parquet"])
def test_what_is_written_reads_back(tmp_path, ending):
    rows = [row(), row(dtype="f8e4m3fnxf8e5m2->f32", flag="odd"), row(op="bmm", b=4, time_us=1 / 3)]
    rows += [row(op="generation_attention", batch_size=2, step=1023, num_heads=32, num_key_value_heads=8, head_dim=128, kv_cache_dtype="fp8", time_us=20.0)]
    rows += [row(op="gelu", m=1, time_us=2.0)]
    table = read_kernels(rows)
    write_kernels(tmp_path / f"out{ending}", table)
    again = read_kernels(tmp_path / f"out{ending}")
    same(again, table)
    assert again.op.tolist() == ["matmul", "matmul", "batched_matmul", "attention_decode", "elementwise"] and again["op_name"][4] == "gelu"
    with pytest.raises(ValueError, match="should be .csv"):
        write_kernels(tmp_path / "out.json", table)


@pytest.mark.parametrize(
    "written, datatype, output",
    [
        ("bfloat16", "bf16", ""), ("float32", "fp32", ""), ("bf16xbf16->f32", "bf16", "fp32"), ("f8e4m3fnuzxf8e5m2fnuz->bf16", "fp8", "bf16"),
        ("sq", "int8", ""), ("int8_wo", "int8_weight_only", ""), ("int4_wo", "int4_weight_only", ""), ("fp16_mixed", "fp16", ""), ("NVFP4", "nvfp4", ""),
        ("fp8_block", "fp8_block", ""), ("w4a16_mxfp4", "w4a16_mxfp4", ""),
    ],
)  # fmt: skip
def test_datatypes_have_one_name(written, datatype, output):
    table = read_kernels([row(dtype=written, time_us=5000.0)])
    assert (table.datatype[0], table["out_datatype"][0]) == (datatype, output)
    assert table["datatype_name"][0] == ("" if written == datatype else written)


@pytest.mark.parametrize(
    "changes, op, expected",
    [
        (dict(op="linear"), "matmul", dict(m=4096, batch=np.nan)),
        (dict(op="gemm", b=1), "matmul", dict(batch=np.nan)),
        (dict(op="gemm", b=8), "batched_matmul", dict(batch=8)),
        (dict(op="ln", B=300, H=1024, m=None, n=None, k=None), "layernorm", dict(m=300, n=1024, batch=np.nan)),
        (dict(op="memory_bound", component="input_layernorm", k=0), "layernorm", dict(m=4096, k=np.nan)),
        (dict(op="memory_bound", component="mlp_act", k=0), "elementwise", dict(n=4096, k=np.nan)),
        (dict(op="mha_decode", config="32-8-128", batch_size=4, kv_len=1024), "attention_decode", dict(n_q_heads=32, n_kv_heads=8, head_dim=128, q_len=1)),
        (dict(op="mla_generation", batch_size=4, isl=1, step=1023, num_heads=16), "mla_decode", dict(kv_len=1024, num_heads=16)),
        (dict(op="encoder_attention", batch_size=1, isl=77, num_heads=16, head_dim=64), "encoder_attention", dict(q_len=77, kv_len=77, n_kv_heads=16)),
        (dict(op="New Kernel"), "new_kernel", dict(m=4096)),
    ],
)
def test_operators_have_one_name_and_their_own_sizes(changes, op, expected):
    table = read_kernels([row(**changes)])
    assert table.op[0] == op and table["op_name"][0] == changes.get("component", changes["op"])
    for name, value in expected.items():
        np.testing.assert_equal(table[name][0], value, err_msg=name)


@pytest.mark.parametrize("column, unit", [("time_us", 1e-6), ("latency_us", 1e-6), ("time_ms", 1e-3), ("latency_ms", 1e-3), ("time_s", 1.0), ("time_ns", 1e-9)])
def test_the_unit_is_in_the_name_of_the_time_column(column, unit):
    rows = spread()
    table = read_kernels([{key: value for key, value in item.items() if key != "time_us"} | {column: item["time_us"] * 1e-6 / unit} for item in rows])
    np.testing.assert_allclose(table.time_s, [item["time_us"] * 1e-6 for item in rows], rtol=1e-12)


@pytest.mark.parametrize("gpu", ["h100_sxm", "a chip that nobody knows"])
@pytest.mark.parametrize("factor, looks", [(1e-3, "larger"), (1e-6, "larger"), (1e3, "smaller"), (1e6, "smaller")])
def test_a_file_in_another_unit_is_refused(factor, looks, gpu):
    if gpu != "h100_sxm" and factor == 1e3:
        factor = 1e6  # a thousand times slower than an H100 is still a device that could be
    with pytest.raises(RunFileError, match=rf"'time_us' cannot be in its unit: .*look like a {looks} unit.*Rename the column.*time_ms"):
        read_kernels(spread(factor, gpu=gpu))
    assert len(read_kernels(spread(gpu=gpu))) == 12


@settings(max_examples=15, deadline=None)
@given(st.floats(0.5, 30.0))
def test_no_honest_speed_is_taken_for_another_unit(slower):
    assert len(read_kernels(spread(slower))) == 12


def test_small_kernels_and_one_odd_row_do_not_look_like_another_unit():
    assert len(read_kernels([row(m=m, n=128, k=128, time_us=3.0 + m / 1e3) for m in (1, 2, 4, 8)])) == 4
    assert len(read_kernels([*spread(), row(time_us=0.01), row(m=1, time_us=1e6)])) == 14


@pytest.mark.parametrize(
    "changes, reason, shown",
    [
        (dict(time_us=0), "not positive", "time_us is 0"), (dict(time_us=-5.0), "not positive", "time_us is -5"), (dict(time_us=None), "no time", "empty"),
        (dict(time_us=float("inf")), "not positive and finite", "inf"), (dict(m=0), "below 1", "m is 0"), (dict(n=-4), "below 1", "n is -4"),
        (dict(k=12.5), "not a whole number", "k is 12.5"), (dict(k=None), "missing", "k is empty"), (dict(dtype=""), "no datatype", "datatype is empty"),
        (dict(gpu=None), "no gpu", "gpu is empty"), (dict(op=" "), "no op", "op is empty"),
    ],
)  # fmt: skip
def test_a_bad_row_is_counted_with_an_example_or_refused(changes, reason, shown):
    rows = [row(), row(m=512), row(**changes), row(**changes | dict(framework="xla"))]
    table = read_kernels(rows)
    assert len(table) == 2 and table.num_rejected == 2 and len(table.rejected) == 1
    found = table.rejected[0]
    assert reason in found.reason and found.count == 2 and found.examples[0].startswith("records:3: ") and shown in found.examples[0]
    assert any("2 rows of" in line and reason in line for line in table.remarks)
    with pytest.raises(RunFileError, match="records:3: "):
        read_kernels(rows, strict=True)


def test_text_where_a_number_should_be_is_shown_with_its_line(write):
    table = read_kernels(write(GEMM + "h100_sxm,gemm,vllm,x,bf16,many,4096,4096,10,\nh100_sxm,gemm,vllm,x,bf16,64,4096,4096,fast,\n"))
    shown = {item.examples[0].rsplit(":", 1)[-1] + item.examples[0].split(":")[-2] for item in table.rejected}
    assert len(table) == 3 and shown == {" m is 'many'5", " time_us is 'fast'6"}


def test_exact_duplicates_are_dropped_and_repeats_kept(write):
    table = read_kernels(write(GEMM + ROWS[0] + "\n" + ROWS[0].replace("210.5", "212") + "\n"))
    assert len(table) == 4 and table.line.tolist() == [2, 3, 4, 6]
    assert any("1 exact duplicates dropped (the first is line 5)" in line for line in table.remarks)
    assert any("1 rows repeat a kernel" in line for line in table.remarks)


@pytest.mark.parametrize("column, wanted", [("gpu", "'gpu'"), ("dtype", "'datatype'"), ("time_us", "'time_us'")])
def test_a_missing_column_is_named_with_those_there(column, wanted):
    rows = [{key: value for key, value in row().items() if key != column}]
    with pytest.raises(RunFileError, match=f"column {wanted} is missing; columns there: .*framework"):
        read_kernels(rows)


def test_a_size_that_an_operator_lacks_is_named_with_the_operator():
    with pytest.raises(RunFileError, match="matmul needs m, n, k; no row of it has k. Columns there: .*time_us"):
        read_kernels([{key: value for key, value in row().items() if key != "k"}])
    with pytest.raises(RunFileError, match="moe_ffn needs num_tokens.*no row of it has num_tokens, hidden_size.*Add them"):
        read_kernels([row(), row(op="moe")])
    with pytest.raises(RunFileError, match="'op' is missing"):
        read_kernels([{key: value for key, value in row().items() if key not in ("op", "k")}])


def test_rows_without_an_operator_but_with_m_n_and_k_are_matmuls_and_said_to_be():
    table = read_kernels([{key: value for key, value in row().items() if key != "op"}])
    assert table.op[0] == "matmul" and "taken as matmul" in table.remarks[0]


def test_fp32_beyond_every_fp32_unit_is_tf32():
    fast = [item | dict(dtype="float32") for item in spread(2.0)]  # near 325 TFLOP/s
    table = read_kernels(fast)
    assert set(table.datatype) == {"tf32"} and set(table["datatype_name"]) == {"float32"} and "more than any fp32 unit" in table.remarks[0]
    assert set(read_kernels([item | dict(dtype="float32") for item in spread(12.0)]).datatype) == {"fp32"}


def test_take_select_and_concat(write):
    table = read_kernels(write(GEMM))
    same(table.take([2, 0]), table.take(np.array([2, 0])))
    assert table.take([2, 0]).source_row[0].endswith(":4") and len(table.take([])) == 0
    assert len(table.select(op="matmul", datatype="bf16")) == 2 and len(table.select(datatype=("bf16", "fp8"), library="trtllm")) == 1
    both = KernelTable.concat([table.take([0]), read_kernels([row(op="softmax")])])
    assert np.isnan(both["k"][1]) and both.op.tolist() == ["matmul", "softmax"] and both.source_row[1] == "records:1"
    with pytest.raises(ValueError, match="mask has shape"):
        table.take(np.ones(2, bool))
    with pytest.raises(ValueError, match="no tables"):
        KernelTable.concat([])


@pytest.mark.parametrize(
    "text, name, message",
    [
        ("", "k.csv", "is empty"), (HEADER + "\n", "k.csv", "no rows"), (GEMM + "a,b\n", "k.csv", ":5: the row has 2 cells"),
        (GEMM, "k.txt", "'.txt' is not known"),
        (GEMM.replace(",", ";"), "k.csv", "semicolons"), (HEADER.replace("flag", "M") + "\n" + ROWS[0] + "\n", "k.csv", "'m' appears twice"),
        ("PAR1", "k.parquet", "not a readable Parquet"),
    ],
)  # fmt: skip
def test_files_that_are_no_table_are_refused(write, text, name, message):
    with pytest.raises(RunFileError, match=message):
        read_kernels(write(text, name))


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_kernels(tmp_path / "nothing.csv")
    with pytest.raises(RunFileError, match="is a folder"):
        read_kernels(tmp_path)
    with pytest.raises(TypeError, match="int; it should be a path"):
        read_kernels(3)
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(GEMM.encode())[:-12])
    with pytest.raises(RunFileError, match="not a complete gzip file"):
        read_kernels(tmp_path / "cut.csv.gz")


def test_blank_lines_and_line_breaks_in_cells_keep_line_numbers(write):
    table = read_kernels(write(HEADER + "\n\n" + ROWS[0] + "\n\n" + ROWS[1] + "\n"))
    assert table.line.tolist() == [3, 5] and len(table) == 2


def test_a_column_that_changes_its_type_late_is_read_whole(write):
    lines = [ROWS[0].replace("4096,4096,4096", f"{m},4096,4096") for m in range(1, 30_000)]
    table = read_kernels(write("\n".join([HEADER, *lines, ROWS[1].replace("8192", "8192.0"), ROWS[2].replace("16,", "few,")]) + "\n"))
    assert len(table) == 30_000 and table.num_rejected == 1 and table["m"][-1] == 8192


@pytest.fixture(scope="module")
def published():
    """Every shared table of kernel times, read."""
    if not DATA.is_dir():
        pytest.skip("the shared tables of kernel times (../shared/data/kernels) are not on this machine")
    return {path.name: read_kernels(path) for path in sorted(DATA.iterdir())}


def test_no_row_of_the_published_tables_is_lost_without_a_word(published):
    import pyarrow.csv

    for name, table in published.items():
        rows = pyarrow.csv.read_csv(DATA / name).num_rows
        dropped = sum(int(line.split(": ", 1)[1].split()[0]) for line in table.remarks if "exact duplicates" in line)
        assert len(table) + table.num_rejected + dropped == rows, name
        assert len(table) > 0 and (table.time_s > 0).all(), name


def test_every_device_of_the_published_tables_is_in_the_catalog(published):
    for gpu in {gpu for table in published.values() for gpu in set(table.gpu)}:
        resolve_name(gpu)


def test_the_least_time_of_the_published_matmuls_agrees_with_their_own_rates(published):
    """The files print TFLOP/s beside the time: both must give the 2 m n k that the sizes read here do."""
    import pyarrow.csv

    for name in ("aic_gemm_a100_sxm.csv.gz", "tpu_gemm_v6e.csv", "infersim_gemm_h800.csv"):
        table, raw = published[name], pyarrow.csv.read_csv(DATA / name)
        rate = np.asarray(raw["tflops"], float)[table.line - 2] * 1e12
        np.testing.assert_allclose(rate * table.time_s, 2 * table["m"] * table["n"] * table["k"], rtol=2e-5)


def test_names_of_columns_are_unique_and_public():
    names = list(itertools.chain(KERNEL_SIZES, KERNEL_TEXTS, ("gpu", "op", "datatype", "library", "kernel_source", "flag", "time_s")))
    assert len(names) == len(set(names))
