"""Tables of collective times: uniform columns, expert exchanges and raw logs end in one table; what is missing or in a wrong unit is named."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.io import CollectiveFileError, bus_factor, read_collectives, write_collectives

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "collectives"
shared = pytest.mark.skipif(not DATA.is_dir(), reason="the shared tables of collective times (../shared/data/collectives) are not on this machine")

NAMES = "op,dtype,bytes,n_ranks,n_nodes,algo,proto,time_us,algbw_GBps,busbw_GBps,gpu,interconnect,source,flag"
GOOD = "alltoall,half,1048576,8,1,auto,unstated,50,20.97,18.35,h100_sxm,NVLink4,me,"


@pytest.fixture
def table_of(tmp_path):
    def read(*lines, name="a.csv"):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return read_collectives(tmp_path / name)

    return read


def test_uniform_columns(table_of):
    table = table_of(NAMES, GOOD, "all_reduce,float,0,8,1,auto,auto,12,0,0,h100_sxm,NVLink4,me,slow")
    assert len(table) == 1 and len(table.zero_byte) == 1 and table.zero_byte.flag[0] == "slow"
    assert (table.op[0], table.datatype[0], table.nbytes[0], table.ranks[0], table.nodes[0]) == ("all_to_all", "fp16", 2**20, 8, 1)
    assert (table.algorithm[0], table.protocol[0], table.accelerator[0], table.log[0], table.line[0]) == ("auto", "", "h100_sxm", "a", 2)
    assert_allclose([table.time_s[0], table.bus_bandwidth[0], table.bus_rate[0]], [50e-6, 18.35e9, 2**20 / 50e-6 * 7 / 8])


def test_extra_columns_and_units_of_time(table_of):
    table = table_of("op,bytes,n_ranks,time_ms,buffer,health,log_id,impl", "all_gather,1048576,4,0.05,in_place,unhealthy,one,nccl 2.27")
    assert table.time_s[0] == 50e-6 and table.in_place[0] and (table.health[0], table.log[0], table.library[0]) == ("unhealthy", "one", "nccl 2.27")
    table = table_of("op,bytes,n_ranks,time_us,time_min_us,time_max_us,time_inplace_us,busbw_inplace_GBps", "all_reduce,1048576,2,50,40,60,45,23.3")
    assert table.in_place.tolist() == [False, True]
    assert_allclose(table.time_s, [50e-6, 45e-6])
    assert_allclose([table.time_min_s[0], table.time_max_s[0], table.bus_bandwidth[1]], [40e-6, 60e-6, 23.3e9])


@pytest.mark.parametrize("cells, words", [
    ("frobnicate,half,1048576,8,1,auto,auto,50,20.97,18.35,g,i,s,", "op is 'frobnicate'"),
    ("all_reduce,half,many,8,1,auto,auto,50,20.97,18.35,g,i,s,", "bytes is 'many'"),
    ("all_reduce,half,1048576,1,1,auto,auto,50,20.97,0,g,i,s,", "n_ranks is 1: nothing is sent"),
    ("all_reduce,half,1048576,2.5,1,auto,auto,50,20.97,0,g,i,s,", "n_ranks is '2.5'"),
    ("all_reduce,half,1048576,8,1,auto,auto,nan,20.97,18.35,g,i,s,", "time_us is 'nan'"),
    ("all_reduce,half,1048576,8,1,auto,auto,-1,20.97,18.35,g,i,s,", "time_us is '-1'"),
    ("all_reduce,half,1048576", "the row has 3 cells, the header 14"),
])  # fmt: skip
def test_a_bad_row_never_loses_the_rest(table_of, cells, words):
    table = table_of(NAMES, GOOD, cells, GOOD)
    assert len(table) == 2
    (problem,) = table.problems
    assert problem.line == 3 and problem.kind == "row left out" and words in str(problem)


def test_a_contradiction_is_flagged(table_of):
    table = table_of(NAMES, GOOD, GOOD.replace("20.97", "41.9"), GOOD)
    assert table.flag.tolist() == ["", "algbw_mismatch", ""] and "bytes over time is 20.97 GB/s" in str(table.problems[0])


@pytest.mark.parametrize("lines, words", [
    (("op,dtype,n_ranks,time_us", "all_reduce,half,8,50"), "the column 'bytes' is missing"),
    (("op,bytes,n_ranks,time", "all_reduce,8,8,50"), "If 'time' is the time, put its unit into the name"),
    (("op,bytes,n_ranks,time_us,time_ms", "all_reduce,8,8,50,0.05"), "mixed units: the columns time_us and time_ms"),
    ((NAMES, GOOD.replace(",50,", ",0.05,")), "wrong units: algbw_GBps is 0.001 times bytes over time_us"),
    ((NAMES, GOOD.replace("alltoall", "?")), "op is '\\?'"),
    ((NAMES,), "no rows"),
    (("a,b,c", "1,2,3"), "not an nccl-tests log"),
    (("",), "is empty"),
])  # fmt: skip
def test_what_cannot_be_used(table_of, lines, words):
    with pytest.raises(CollectiveFileError, match=words):
        table_of(*lines)


def test_several_files_of_several_kinds(tmp_path):
    (tmp_path / "a.csv").write_text(NAMES + "\n" + GOOD + "\n", encoding="utf-8")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((NAMES + "\n" + GOOD + "\n").encode()))
    row = "1048576 262144 float sum -1 50.00 20.97 31.46 0 40.00 26.21 39.32 0\n"
    (tmp_path / "c.txt").write_text(row, encoding="utf-8")
    (tmp_path / "d.log").write_text(row, encoding="utf-8")
    table = read_collectives([tmp_path / name for name in ("a.csv", "b.csv.gz", "c.txt", "d.log")])
    assert table.log.tolist() == ["a", "b", "c", "c", "d", "d"] and table.header.tolist() == [-1, -1, 0, 0, 1, 1]
    assert [table.headers[k].file for k in table.header[2:]] == table.file[2:].tolist()
    assert len(table.take(table.op == "all_reduce")) == 4
    with pytest.raises(CollectiveFileError, match="no file"):
        read_collectives([])
    with pytest.raises(OSError):
        read_collectives(tmp_path / "absent.csv")


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_written_tables_read_back(tmp_path, ending):
    (tmp_path / "c.txt").write_text("1048576 262144 float sum -1 50.00 20.97 31.46 0 40.00 26.21 39.32 0\n", encoding="utf-8")
    table = read_collectives(tmp_path / "c.txt")
    write_collectives(tmp_path / f"out{ending}", table)
    again = read_collectives(tmp_path / f"out{ending}")
    for name in ("op", "datatype", "in_place", "log"):
        assert getattr(again, name).tolist() == getattr(table, name).tolist()
    for name in ("nbytes", "ranks", "time_s", "bus_rate"):
        assert_allclose(getattr(again, name), getattr(table, name), rtol=1e-8)
    with pytest.raises(ValueError, match="ending"):
        write_collectives(tmp_path / "out.txt", table)


def test_expert_exchanges(table_of):
    names = "framework,op_name,kernel_source,comm_backend,phase,comm_dtype,ep_size,node_num,hidden_size,topk,num_experts,num_tokens,sms,transmit_us"
    names += ",notify_us,gpu,latency_us"
    table = table_of(names, "x 1,moe_a2a,deepep,deepep_ht,combine,bfloat16,8,1,3072,8,256,16,20,50,5,h100_sxm,55",
                     "x 1,moe_a2a,deepep,deepep_ht,combine,bfloat16,8,1,3072,8,256,0,20,50,5,h100_sxm,55")  # fmt: skip
    assert len(table) == 1 and "num_tokens is '0'" in str(table.problems[0])
    columns = ("op", "datatype", "kernel", "tokens", "hidden", "experts_per_token", "num_experts", "sms", "ranks", "nodes", "nbytes")
    got = [getattr(table, name)[0] for name in columns]
    assert got == ["moe_combine", "bf16", "deepep_ht", 16, 3072, 8, 256, 20, 8, 1, 16 * 3072 * 2]
    names = "framework,op_name,kernel_source,node_num,hidden_size,num_token,num_topk,num_experts,combine_avg_t_us,combine_bandwidth_gbps"
    names += ",dispatch_avg_t_us,dispatch_bandwidth_gbps,gpu"
    table = table_of(names, "x 1,ll,deepep,2,2048,4,8,128,16,1,15,1,h100_sxm")
    assert table.op.tolist() == ["moe_dispatch", "moe_combine"]
    assert table.ranks.tolist() == [16, 16] and table.datatype.tolist() == ["fp8", "bf16"]  # two nodes of eight


@shared
def test_all_shared_tables_load():
    rows = {}
    for path in sorted(DATA.glob("*.csv*")):
        if path.name == "reported_points.csv":  # single numbers without size or time
            with pytest.raises(CollectiveFileError, match="'bytes' is missing"):
                read_collectives(path)
            continue
        table = read_collectives(path)
        rows[path.name] = table
        with (gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8")) as file:
            lines = sum(1 for line in file) - 1
        twice = "wideep" in path.name or "vtrain" in path.name  # dispatch and combine, or both buffers, in one row
        assert len(table) + len(table.zero_byte) == lines * (2 if twice else 1), path.name
        assert table.problems == () and np.all(table.time_s > 0) and "" not in table.op
    assert np.sum(rows["aic_nccl_and_custom_ar_l40s.csv.gz"].flag == "unhealthy_slow") == 92
    assert len(set(rows["nccl_tests_parsed.csv"].log)) == 58


@shared
def test_bandwidths_of_shared_tables_follow_from_their_times():
    table = read_collectives(DATA / "aic_nccl_and_custom_ar_h100_sxm.csv.gz")
    assert_allclose(table.bus_rate, table.bus_bandwidth, rtol=1e-3)


@shared
def test_low_latency_exchanges_send_fp8_and_combine_bf16():
    """The published bandwidths say how many bytes per element moved."""
    import csv

    with gzip.open(DATA / "aic_wideep_deepep_ll_h100_sxm.csv.gz", "rt") as file:
        rows = [{k: float(v) for k, v in row.items() if k not in ("framework", "op_name", "kernel_source", "gpu")} for row in csv.DictReader(file)]
    for phase, expected in (("dispatch", 1.03125), ("combine", 2.0)):
        moved = [row[f"{phase}_bandwidth_gbps"] * row[f"{phase}_avg_t_us"] * 1e3 / (row["num_token"] * row["num_topk"] * row["hidden_size"]) for row in rows]
        assert_allclose(np.median(moved), expected, rtol=0.02)


def test_bus_factors():
    assert [bus_factor(op, 8) for op in ("all_reduce", "all_gather", "broadcast", "send_recv")] == [1.75, 0.875, 1.0, 1.0]
    assert np.isnan(bus_factor("moe_dispatch", 8))
