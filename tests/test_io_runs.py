"""The table of published runs and its reader: the repairs are there, and every kind of bad input is named."""
import csv
import gzip
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffperf import io

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ROOT.parent / "shared" / "data" / "training" / "training_runs.csv"
GOOD = {"id": "a", "source": "me image-1", "model_name": "Llama-3.1-8B", "accelerator": "H100-80GB-SXM", "num_devices": "8",
        "step_time_s": "1.5", "tp": "2", "sp": "1", "notes": "first, with a comma"}


@pytest.fixture(scope="module")
def table():
    return io.read_runs(io.published_runs_path())


@pytest.fixture(scope="module")
def repair():
    spec = importlib.util.spec_from_file_location("repair", ROOT / "calibration" / "published" / "repair.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write(tmp_path):
    """Write rows (dicts over GOOD) or text, give the path."""
    def _write(content, name="runs.csv", encoding="utf-8"):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding=encoding, newline="")
        else:
            rows = [GOOD | row for row in content]
            with open(path, "w", newline="", encoding=encoding) as file:
                writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
                writer.writeheader()
                writer.writerows(rows)
        return path
    return _write


# The published table

def test_published_table_loads_strictly(table):
    assert len(table) == 4036 == len({run.id for run in table})
    assert table.rejected == table.ignored_columns == table.hints == ()
    by_id = {run.id: run for run in table}
    first = by_id["tr0001"]
    assert (first.model_name, first.num_devices, first.step_time_s, first.gated_mlp, first.vpp) == (
        "MPT-70b", 512.0, 16.26847, False, None)


def test_counts_of_repairs_agree_with_the_readme(table):
    counts = {"REPAIRED": sum(bool(run.repairs) for run in table), "TREAT AS": sum(bool(run.treat_as) for run in table),
              "LEFT OUT": sum(run.left_out is not None for run in table),
              "WEIGHT": sum(0 < run.weight < 1 for run in table)}
    readme = (ROOT / "calibration" / "published" / "README.md").read_text()
    printed = {word: int(re.search(rf"^\| `{word}\b[^|]*\| (\d+) \|", readme, re.M)[1]) for word in counts}
    assert printed == counts
    assert counts["LEFT OUT"] > 400 and counts["WEIGHT"] > 80


@pytest.mark.parametrize(("row", "column", "value", "reason"), [
    ("tr1488", "global_batch", 512.0, "158 to 187 % of peak"),
    ("tr0944", "vpp", 12.0, "releases before and after"),
    ("tr0827", "pp", 1.0, "typing error"),
    ("tr3597", "precision", "nvfp4", "do not count as held-out evidence"),
    ("tr3701", "precision", "fp8", "equal to the FP8 rows"),
    ("tr1597", "pp", 4.0, "devices/(TP x DP)"),
    ("tr1124", "seq_len", 1024.0, "arXiv 1909.08053"),
    ("tr1454", "layers", 78.0, "printed TFLOP/s"),
    ("tr1144", "peak_mem_gb", 71.458, "GiB"),           # 66.55 GiB * 2**30 / 1e9
])
def test_repairs_are_applied_with_their_reason(table, row, column, value, reason):
    run = next(run for run in table if run.id == row)
    assert getattr(run, column) == value
    assert any(f"{column} " in text and reason in text for text in run.repairs), run.repairs


def test_float8_rowwise_keeps_the_printed_precision(table):
    run = next(run for run in table if run.id == "tr1227")
    assert run.precision == "fp8" and run.treat_as == {"precision": "bf16"}


def test_every_row_without_step_time_or_marked_duplicate_is_left_out(table):
    for run in table:
        if run.step_time_s is None or "DUPLICATE figure of" in run.notes:
            assert run.left_out and run.weight == 0


def test_usable_decoder_rows_are_complete(table):
    usable = [run for run in table if run.left_out is None and run.family in ("dense-decoder", "moe")]
    assert len(usable) > 2400
    for run in usable:
        for column in io.ARCHITECTURE_COLUMNS + ("seq_len", "global_batch", "precision"):
            assert getattr(run, column), (run.id, column)


def test_filled_architectures_reproduce_the_printed_sizes(table):
    """12 layers hidden^2 + vocab hidden is the parameter count of a GPT within a few per cent (sizes are rounded to 1e9)."""
    filled = [run for run in table if any("layers blank->" in text for text in run.repairs) and run.family == "dense-decoder"
              and not run.gated_mlp and run.params_b]
    assert len(filled) > 80
    for run in filled:
        embeddings = 2 if run.model_name.startswith("Nemotron") else 1          # Nemotron does not tie input and output
        size = (12 * run.layers * run.hidden**2 + embeddings * run.vocab * run.hidden) / 1e9
        assert abs(size / run.params_b - 1) < 0.05, (run.id, size, run.params_b)


def test_gshard_experts_reproduce_the_printed_sizes(table):
    """Every second layer holds E experts of 16 hidden^2 (two matrices of width 8 hidden), the others one; attention is 4 hidden^2."""
    filled = [run for run in table if run.model_name.startswith("GShard") and run.layers]
    assert len(filled) == 12
    for run in filled:
        blocks = run.layers / 2 * (run.experts + 1) * 16 + run.layers * 4
        size = (blocks * run.hidden**2 + run.vocab * run.hidden) / 1e9
        assert abs(size / run.params_b - 1) < 0.06, (run.id, size, run.params_b)


@pytest.mark.skipif(not COMPILED.exists(), reason="the unrepaired compilation (../shared/data/training) is absent")
def test_repair_reproduces_the_committed_file(repair, tmp_path, capsys):
    repair.main(str(COMPILED), str(tmp_path / "out.csv"))
    assert (tmp_path / "out.csv").read_bytes() == (ROOT / "calibration" / "published" / "training_runs.csv").read_bytes()


def test_repair_is_idempotent(repair, tmp_path, capsys):
    committed = ROOT / "calibration" / "published" / "training_runs.csv"
    repair.main(str(committed), str(tmp_path / "again.csv"))
    assert (tmp_path / "again.csv").read_bytes() == committed.read_bytes()


def test_repair_stops_when_the_compilation_changed(repair):
    with open(ROOT / "calibration" / "published" / "training_runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    row = next(row for row in rows if row["id"] == "tr1488")
    row["global_batch"], row["notes"] = "1024", ""
    with pytest.raises(SystemExit, match="tr1488: global_batch is '1024', the repair expects '2048'"):
        repair.repair(rows)


def test_peer_errors_name_rows_of_the_table(table):
    ids = [run.id for run in table]
    with open(ROOT / "calibration" / "published" / "peer_errors.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    for row in rows:
        span = ids.index(row["last_id"]) - ids.index(row["first_id"]) + 1
        assert span == int(row["num_rows"]) and 0 < float(row["error_pct"]) < 100 and row["source"]


def test_groups(table):
    groups = {run.group for run in table}
    assert not any("_v" in repository and "mlcommons" in repository for repository, _ in groups)
    assert ("Bang et al.", "GPT-h1024-l24") in groups
    assert io.source_repository("mlcommons/training_results_v5.1 Dell/results") == "mlcommons/training_results"
    assert io.source_repository("Korthikanti et al. 2022 (arXiv 2205.05198)") == "Korthikanti et al."
    assert io.source_repository("Megatron-LM README images") == "NVIDIA/Megatron-LM"
    assert io.source_repository("NVIDIA/NeMo docs/x.md (24.07)") == "NVIDIA/NeMo"
    assert io.source_repository("") == ""


# Round trips

@pytest.mark.parametrize("name", ["runs.csv", "runs.csv.gz", "runs.parquet"])
def test_round_trip(table, tmp_path, name):
    path = tmp_path / name
    io.write_runs(path, table)
    first = path.read_bytes()
    assert io.read_runs(path).runs == table.runs
    io.write_runs(path, table)
    assert path.read_bytes() == first                                   # the same runs give the same bytes
    assert os.listdir(tmp_path) == [name]                               # no temporary file stays


def test_records_from_dicts_pyarrow_and_pandas(table):
    import pyarrow
    rows = [{"model_name": "m", "accelerator": "a", "num_devices": 8, "step_time_s": 0.5},
            {"model_name": "m", "accelerator": "a", "num_devices": 16, "step_time_s": None, "extra": 1}]
    from_dicts = io.runs_from_records(rows)
    assert [run.id for run in from_dicts] == ["row 1", "row 2"] and from_dicts.ignored_columns == ("extra",)
    assert from_dicts[1].step_time_s is None
    assert io.runs_from_records(pyarrow.Table.from_pylist(rows[:1] + [rows[1]])).runs == from_dicts.runs
    pandas = pytest.importorskip("pandas", reason="pandas is not a dependency of diffperf")
    assert io.runs_from_records(pandas.DataFrame(rows)).runs == from_dicts.runs


def test_records_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="list of dicts, a pandas DataFrame or a pyarrow Table"):
        io.runs_from_records("runs.csv")
    with pytest.raises(io.RunFileError, match="records has no rows"):
        io.runs_from_records([])
    with pytest.raises(io.RunFileError, match="row 2.*the record is a int; it should be a dict"):
        io.runs_from_records([{"model_name": "m", "accelerator": "a", "num_devices": 8}, 3])


def test_write_refuses_strangers_and_unknown_endings(tmp_path):
    with pytest.raises(TypeError, match="every item should be a Run"):
        io.write_runs(tmp_path / "x.csv", [{"id": "a"}])
    with pytest.raises(ValueError, match=r"\.csv, \.csv\.gz or \.parquet"):
        io.write_runs(tmp_path / "x.xlsx", [])


# Bad cells

@pytest.mark.parametrize(("cells", "message"), [
    ({"step_time_s": "abc"}, r"runs.csv:row 2 \(id a\): step_time_s is 'abc'; it should be a positive number of seconds"),
    ({"step_time_s": "nan"}, "step_time_s is 'nan'.*Leave the cell empty"),
    ({"step_time_s": "inf"}, "step_time_s is 'inf'"),
    ({"step_time_s": "1e999"}, "step_time_s is '1e999'"),
    ({"step_time_s": "0"}, "step_time_s is '0'; it should be a positive"),
    ({"step_time_s": "-1"}, "step_time_s is '-1'"),
    ({"step_time_s": "1,5"}, "decimal point, not a comma"),
    ({"step_time_s": "3.5 s"}, "the number alone; the unit is in the column name"),
    ({"global_batch": "1,024"}, "without thousands separators"),
    ({"global_batch": "1_024"}, "global_batch is '1_024'"),
    ({"hidden": "-4096"}, "hidden is '-4096'; it should be a whole number of channels, 1 or more"),
    ({"tp": "2.5"}, "tp is '2.5'; it should be a whole number of tensor-parallel ranks"),
    ({"tp": "0"}, "tp is '0'"),
    ({"mfu_pct": "140"}, "mfu_pct is '140'; it should be a percentage above 0, at most 100"),
    ({"sp": "maybe"}, r"sp is 'maybe'; it should be 1 \(sequence parallel\), 0 \(not\) or empty"),
    ({"num_devices": ""}, "num_devices is empty"),
    ({"accelerator": " "}, "accelerator is empty"),
    ({"model_name": ""}, "model_name is empty and so is layers, hidden, heads, ffn_hidden, vocab"),
    ({"id": "", "step_time_s": "x"}, "runs.csv:row 2: step_time_s"),
])
def test_bad_cell(write, cells, message):
    path = write([cells])
    with pytest.raises(io.RunFileError, match=message):
        io.read_runs(path)
    loose = io.read_runs(path, strict=False)
    assert not loose.runs and loose.rejected[0][0] == 2 and re.search(message.split(": ")[-1], loose.rejected[0][2])


def test_model_name_may_be_replaced_by_an_architecture(write):
    shape = {"layers": "32", "hidden": "4096", "heads": "32", "ffn_hidden": "14336", "vocab": "128256", "model_name": ""}
    assert io.read_runs(write([shape]))[0].layers == 32


def test_good_rows_survive_and_problems_are_counted(write):
    path = write([{"id": f"r{k}", "step_time_s": "x" if k else "2"} for k in range(9)])
    loose = io.read_runs(path, strict=False)
    assert [run.id for run in loose] == ["r0"] and [row for row, _, _ in loose.rejected] == list(range(3, 11))
    with pytest.raises(io.RunFileError) as caught:
        io.read_runs(path)
    assert len(caught.value.problems) == 8
    assert len(str(caught.value).splitlines()) == 6 and str(caught.value).endswith("and 3 more problems like these.")


def test_duplicate_ids(write):
    path = write([{}, {"id": "b"}, {}, {}])
    with pytest.raises(io.RunFileError, match=r"row 4 \(id a\): id 'a' is also in row 2"):
        io.read_runs(path)
    assert [run.id for run in io.read_runs(path, strict=False)] == ["a", "b", "a#2", "a#3"]


def test_rows_keep_their_spreadsheet_number(write):
    text = "model_name,accelerator,num_devices\nm,h,8\n\nm,h,x\n"
    with pytest.raises(io.RunFileError, match="row 4: num_devices is 'x'"):
        io.read_runs(write(text))


@pytest.mark.parametrize(("line", "message"), [
    ("m,h,8,9", "row 3: the row has 4 cells, the header 3. The usual cause is a comma inside a cell"),
    ("m,h", "row 3: the row has 2 cells, the header 3.*missing commas"),
])
def test_rows_of_the_wrong_length(write, line, message):
    path = write(f"model_name,accelerator,num_devices\nm,h,8\n{line}\n")
    with pytest.raises(io.RunFileError, match=message):
        io.read_runs(path)
    assert len(io.read_runs(path, strict=False)) == 1


# Bad headers and bad files

def test_missing_column_names_the_closest(write):
    with pytest.raises(io.RunFileError) as caught:
        io.read_runs(write("model,gpu,n_devices,other\nm,h,8,1\n"))
    text = str(caught.value)
    assert "column 'num_devices' is missing. Closest columns in the file: 'n_devices'" in text
    assert "column 'accelerator' is missing" in text and "neither 'model_name' nor the architecture" in text


def test_misspelt_optional_column_is_reported(write):
    table = io.read_runs(write("model_name,accelerator,num_devices,step_time,colour\nm,h,8,1.5,red\n"))
    assert table.ignored_columns == ("step_time", "colour")
    assert table.hints == ("The column 'step_time' was ignored; if it means 'step_time_s', rename it so.",)


def test_column_given_twice(write):
    with pytest.raises(io.RunFileError, match="'accelerator' appears twice"):
        io.read_runs(write("model_name,accelerator,accelerator,num_devices\nm,h,h,8\n"))


@pytest.mark.parametrize(("content", "name", "message"), [
    ("", "runs.csv", "runs.csv is empty. Its first row should hold the column names"),
    ("\n  \n", "runs.csv", "is empty"),
    ("model_name,accelerator,num_devices\n", "runs.csv", "has column names but no rows"),
    ("model_name;accelerator;num_devices\nm;h;8\n", "runs.csv", "has semicolons between its columns; write commas"),
    ("model_name\taccelerator\tnum_devices\nm\th\t8\n", "runs.csv", "has tabs between its columns"),
    (b"model_name,accelerator,num_devices\nm,h\xe9,8\n", "runs.csv", "is not UTF-8 text: byte 0xe9 in line 2"),
    ("model_name,accelerator,num_devices\nm,h,8\n".encode("utf-16"), "runs.csv", "is UTF-16 text; save it as UTF-8"),
    (b"PK\x03\x04....", "runs.csv", "a zip or spreadsheet file, not CSV text; export the sheet as CSV"),
    (gzip.compress(b"a", mtime=0), "runs.csv", "gzip-compressed, not CSV text; end its name with .csv.gz"),
    (b"PAR1....", "runs.csv", "a Parquet file, not CSV text"),
    ("a,b\n1,2\n", "runs.csv.gz", "not a complete gzip file"),
    (gzip.compress(b"model_name,accelerator" * 99, mtime=0)[:-9], "runs.csv.gz", "not a complete gzip file"),
    (b"nonsense", "runs.parquet", "not a readable Parquet file"),
    ('model_name,accelerator,num_devices\n"m,h,8\n', "runs.csv", "not valid CSV.*quotation mark was not closed"),
    ("x", "runs.xlsx", r"the ending '.xlsx' is not known; it should be .csv, .csv.gz or .parquet"),
])
@pytest.mark.parametrize("strict", [True, False])
def test_bad_file(write, content, name, message, strict):
    with pytest.raises(io.RunFileError, match=message):
        io.read_runs(write(content, name), strict)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        io.read_runs(tmp_path / "none.csv")
    with pytest.raises(io.RunFileError, match="is a folder"):
        io.read_runs(tmp_path)


def test_byte_order_mark_and_windows_line_ends_are_fine(write):
    assert io.read_runs(write("model_name,accelerator,num_devices\r\nm,h,8\r\n", encoding="utf-8-sig"))[0].num_devices == 8


# Atomic writing, import

def test_a_binary_file_is_named_as_one(write):
    with pytest.raises(io.RunFileError, match="is a binary file, not CSV text: it holds a zero byte in line 2"):
        io.read_runs(write(b"id,accelerator\n\0\0\0"))


def test_write_atomic(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    io.write_atomic(path, "first\n")
    io.write_atomic(path, b"second\n")
    assert path.read_bytes() == b"second\n"

    def fail(*_):
        raise OSError("disk full")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        io.write_atomic(path, "third")
    assert path.read_bytes() == b"second\n" and os.listdir(tmp_path) == ["a.txt"]
    with pytest.raises(FileNotFoundError, match="does not exist. Create it first"):
        io.write_atomic(tmp_path / "none" / "a.txt", "x")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        io.write_atomic(tmp_path, "x")
    with pytest.raises(TypeError, match="bytes or text"):
        io.write_atomic(path, 3)


def test_write_atomic_follows_links_and_keeps_permissions(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    io.write_atomic(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o640


def test_write_atomic_writes_to_a_pipe_and_leaves_it_there(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    io.write_atomic(pipe, "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)


def test_import_is_light():
    code = "import sys, diffperf.io; print([m for m in ('jax', 'pyarrow', 'pydantic', 'rapidfuzz', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
