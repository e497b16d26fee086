"""Traces of several ranks, and measurements taken from traces."""

import json

import pytest
from numpy.testing import assert_allclose
from written_traces import GEMM, NCCL, Writer

from diffperf.io import read_collectives, read_kernels, write_collectives, write_kernels
from diffperf.io.traces import (
    collective_measurements,
    kernel_measurements,
    match_collectives,
    overlap_slowdowns,
    read_traces,
    stragglers,
    write_slowdowns,
)

# Several ranks


def two_ranks(folder, skew_us):
    """Three all-reduces that end together; rank 1 comes 30 us late to the first two, rank 0 10 us to the last. Transfers take 5 us."""
    starts = {0: (100, 300, 510), 1: (130, 330, 500)}
    ends = (135, 335, 515)
    record = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2, "dtype": "Float"}
    paths = []
    for rank in (0, 1):
        w, off = Writer(distributedInfo={"rank": rank, "world_size": 2}), rank * skew_us
        for start, end in zip(starts[rank], ends):
            w.device(NCCL, start + off, end - start, 20, **record)
        w.device(GEMM, 50 + off, 20)
        paths.append(w.write(folder / f"rank{rank}.json"))
    return paths


@pytest.mark.parametrize("skew_us, agree", [(0, True), (7, True), (1_000_000, False)])
def test_ranks_are_aligned_by_the_ends_of_collectives(tmp_path, skew_us, agree):
    found, left = read_traces(two_ranks(tmp_path, skew_us))
    matched, unmatched = match_collectives(found)
    assert matched is not None and not left and not unmatched and matched.agree == agree
    assert_allclose(matched.clock_s[1] - matched.clock_s[0], skew_us * 1e-6, atol=1e-10)
    assert_allclose(matched.transfer_s, 5e-6, rtol=1e-6)
    late = {item.rank: item for item in stragglers(found, matched)}
    if skew_us != 7:  # clocks that agree are believed, so that a small skew stays
        assert_allclose([late[1].mean_late_s, late[1].waited_s, late[0].waited_s], [20e-6, 10e-6, 60e-6], rtol=1e-5)
    assert (late[1].last, late[0].last) == (2, 1)
    table, _ = collective_measurements(found, matched)
    assert table is not None and len(table) == 3 and set(table.flag) == {""}
    assert_allclose(table.time_s, 5e-6, rtol=1e-6)


def test_a_rank_of_another_job_is_not_compared(tmp_path):
    paths = two_ranks(tmp_path, 0)
    Writer(distributedInfo={"rank": 2, "world_size": 2}).device("ncclDevKernel_AllGather_RING_LL", 0, 9, 20).write(tmp_path / "rank2.json")
    found, _ = read_traces([*paths, tmp_path / "rank2.json"])
    matched, _ = match_collectives(found)
    assert matched is not None and matched.ranks.tolist() == [0, 1] and matched.agree


def test_unequal_collectives_are_not_compared(tmp_path):
    paths = two_ranks(tmp_path, 0)
    document = json.loads(paths[1].read_text())
    document["traceEvents"] = document["traceEvents"][1:]
    paths[1].write_text(json.dumps(document))
    matched, left = match_collectives(read_traces(paths)[0])
    assert matched is None and left[0].examples == ("all_reduce: 2 to 3",)


def test_ranks_that_do_not_end_together_are_not_compared(tmp_path):
    paths = two_ranks(tmp_path, 0)
    document = json.loads(paths[1].read_text())
    for k, event in enumerate(document["traceEvents"]):
        event["ts"] += 400 * k
    paths[1].write_text(json.dumps(document))
    matched, left = match_collectives(read_traces(paths)[0])
    assert matched is None and "do not end together" in left[0].reason


# Measurements


def test_measurements_are_read_back(tmp_path):
    shape = {"Input Dims": [[512, 256], [256, 128]], "Input type": ["float", "float"]}
    record = {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": 8, "dtype": "Half"}
    w = Writer(deviceProperties=[{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}], distributedInfo={"rank": 0, "world_size": 8})
    for k, start in enumerate((100, 200, 300)):
        w.host("aten::mm", 10 * k, 5, **shape).device(GEMM, start, 10 + 2 * k, call=10 * k + 1)
    w.device(NCCL, 305, 40, 20, **record)  # beside the last matmul
    trace = w.read(tmp_path)
    kernels, left = kernel_measurements([trace])
    assert kernels is not None and left[0].count == 1
    write_kernels(tmp_path / "kernels.csv", kernels)
    again = read_kernels(tmp_path / "kernels.csv")
    assert (again.op.tolist(), again.gpu.tolist(), again.datatype.tolist()) == (["matmul"], ["NVIDIA A100-SXM4-80GB"], ["fp32"])
    assert_allclose(again.time_s, [11e-6], rtol=1e-9)
    assert [again[size][0] for size in "mnk"] == [512, 128, 256]
    table, _ = collective_measurements([trace], None)
    assert table is not None
    write_collectives(tmp_path / "collectives.csv", table)
    back = read_collectives(tmp_path / "collectives.csv")
    assert (back.op[0], back.nbytes[0], back.ranks[0], back.flag[0]) == ("all_reduce", 2 << 20, 8, "waiting_included")
    assert_allclose(back.time_s, [40e-6], rtol=1e-6)


def test_slowdowns_are_paired_by_position(tmp_path):
    """The second of three kernels of a name is covered in step 1 and alone in step 2; the first ones are alone in both."""
    w = Writer().step(1, 0, 1000).step(2, 1000, 1000)
    for origin, second in ((0, 30), (1000, 20)):
        for start, duration in ((100, 10), (200, second), (300, 50)):
            w.device(GEMM, origin + start, duration, call=origin + start - 90)
    w.device(NCCL, 195, 60, stream=20, call=150, grid=(16, 1, 1)).device("halfway", 400, 10, call=350).device(NCCL, 405, 60, stream=20, call=360)
    (pair,) = overlap_slowdowns(w.read(tmp_path))
    assert (pair.kernel, pair.pairing, pair.blocks, pair.channels, pair.collective) == (GEMM, "position", 64, 16, "all_reduce")
    assert_allclose([pair.time_alone_s, pair.time_with_s, pair.overlapped_share], [20e-6, 30e-6, 1], rtol=1e-6)
    write_slowdowns(tmp_path / "overlap.csv", [pair])
    header, row = (tmp_path / "overlap.csv").read_text().splitlines()
    assert header.startswith("kernel,blocks,threads,overlapped_share,time_alone_us,time_with_us") and row.startswith(f"{GEMM},64,256,1,20,30,1,1")
