"""Readers of traces, against traces written here whose times are known by hand, and against HolisticTraceAnalysis on recorded ones."""

import gzip
import json
import logging
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.io import read_collectives, read_kernels, write_collectives, write_kernels
from diffperf.io.traces import (
    COMMUNICATION,
    COMPUTE,
    MEMORY,
    OTHER,
    SYNCHRONISATION,
    ExecutionGraph,
    Inputs,
    RankTrace,
    TraceError,
    collective_measurements,
    collective_of_kernel,
    hta_times,
    kernel_measurements,
    kernel_times,
    kind_of,
    kind_times,
    left_out_dict,
    match_collectives,
    overlap_slowdowns,
    rank_dict,
    read_trace,
    read_traces,
    step_times,
    stragglers,
    times_of,
    work_of,
    write_slowdowns,
)
from diffperf.io.traces._intervals import covered, length
from diffperf.io.traces._nesting import innermost, nest

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "traces"
shared = pytest.mark.skipif(not DATA.is_dir(), reason="the shared traces (../shared/data/traces) are not on this machine")
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
GEMM = "ampere_sgemm_128x64_tn"


class Writer:
    """A Kineto trace, times in microseconds."""

    def __init__(self, **meta):
        self.meta, self.events, self.calls = {"schemaVersion": 1, **meta}, [], 0

    def device(self, name, ts, dur, stream=7, cat="kernel", call=None, tid=1, grid=(64, 1, 1), **args):
        """A kernel, launched at `call` unless that is None."""
        self.calls += 1
        where = {"device": 0, "stream": stream, "correlation": self.calls, "grid": list(grid), "block": [256, 1, 1]} | args
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": where})
        if call is not None:
            self.host("cudaLaunchKernel", call, 1, "cuda_runtime", tid, correlation=self.calls)
        return self

    def host(self, name, ts, dur, cat="cpu_op", tid=1, **args):
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})
        return self

    def step(self, number, ts, dur):
        return self.host(f"ProfilerStep#{number}", ts, dur, "user_annotation")

    def text(self):
        return json.dumps({"schemaVersion": 1, **self.meta, "traceEvents": self.events})

    def write(self, path):
        path.write_text(self.text())
        return path

    def read(self, folder):
        (trace,) = read_trace(self.write(folder / "trace.json"))
        return trace


def reasons(trace):
    return {item.reason: item for item in trace.left_out}


# Intervals


PIECES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), max_size=12)


def grid_of(pieces):
    cells = np.zeros(60, bool)
    for start, size in pieces:
        cells[start : start + size] = True
    return cells


@given(PIECES, PIECES)
def test_intervals_agree_with_counting_cells(first, second):
    columns = lambda pieces: (np.array([float(a) for a, _ in pieces]), np.array([float(a + n) for a, n in pieces]))
    assert length(*columns(first)) == grid_of(first).sum()
    expected = [grid_of([piece]) @ grid_of(second).astype(int) for piece in first]
    assert_allclose(covered(*columns(first), *columns(second)), expected)


@st.composite
def nested(draw):
    """Intervals that nest, as (start, end), and a time."""
    spans, stack = [], [(0, 64)]
    while stack and len(spans) < 12:
        low, high = stack.pop()
        if high - low < 4:
            continue
        start = draw(st.integers(low, high - 2))
        end = draw(st.integers(start + 1, high - 1))
        spans.append((start, end))
        stack += [(start + 1, end - 1), (end + 1, high)]
    return spans


@given(st.lists(nested(), min_size=1, max_size=2), st.integers(0, 64))
def test_innermost_operator_agrees_with_looking_at_all(threads, time):
    rows = sorted((thread, start, -(end - start), end) for thread, spans in enumerate(threads) for start, end in spans)
    thread, start, _, end = np.array(rows, float).reshape(-1, 4).T
    at = np.array([float(time)] * len(threads))
    found = innermost(thread, start, end, np.arange(len(threads), dtype=float), at)
    parent = nest(thread, start, end)

    def smallest(lane, low, high, but=-1):
        holding = [i for i in range(len(rows)) if i != but and thread[i] == lane and start[i] <= low and end[i] >= high]
        return min(holding, key=lambda i: end[i] - start[i], default=-1)

    assert found.tolist() == [smallest(lane, time, time) for lane in range(len(threads))]
    assert parent.tolist() == [smallest(thread[i], start[i], end[i], i) for i in range(len(rows))]


# Kinds


@pytest.mark.parametrize(
    "name, kind",
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", COMMUNICATION),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", COMMUNICATION),
        ("all-reduce.3", COMMUNICATION),
        ("Memcpy HtoD (Pinned -> Device)", MEMORY),
        ("Memset (Device)", MEMORY),
        ("__amd_rocclr_copyBuffer", MEMORY),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float>>", COMPUTE),
        ("void splitKreduce_kernel<32, 16, int, float>", COMPUTE),
        ("my_batchedMemcpyKernel", OTHER),
        ("all-reduce-fusion.1", COMPUTE),
    ],
)
def test_kinds_go_by_name(name, kind):
    assert kind_of(name) == kind


def test_waiting_for_a_stream_is_not_work():
    assert kind_of("Stream Sync", synchronisation=True) == SYNCHRONISATION


def test_names_of_collective_kernels():
    assert collective_of_kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)") == ("all_reduce", "ring", "ll")
    assert collective_of_kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)") == ("reduce_scatter", "ring", "ll")
    assert collective_of_kernel("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL128") == ("all_reduce", "tree", "ll128")
    assert collective_of_kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)") == ("send_recv", "", "")  # placeholders
    assert collective_of_kernel("collective-permute.2")[0] == ""
    assert collective_of_kernel("all-gather-start.1")[0] == "all_gather"


# Kineto


def test_times_of_a_rank_by_hand(tmp_path):
    """Compute 0-10 and 12-20 (a second stream 15-18 inside it), communication 5-15, a copy 22-25, idle 20-22."""
    w = Writer().device(GEMM, 100, 10).device(GEMM, 112, 8).device(GEMM, 115, 3, stream=9).device(NCCL, 105, 10, stream=20)
    w.device("Memcpy DtoH (Device -> Pinned)", 122, 3, cat="gpu_memcpy", bytes=3000).device("Stream Sync", 130, 50, cat="cuda_sync")
    trace = w.read(tmp_path)
    times = times_of(trace)
    assert_allclose([times.span_s, times.idle_time_s, times.compute_time_s], [25e-6, 2e-6, 18e-6], rtol=1e-9)
    assert_allclose([times.communication_time_s, times.exposed_communication_time_s, times.memory_time_s], [10e-6, 2e-6, 3e-6], rtol=1e-9)
    assert_allclose(times.overlap_fraction, 0.8, rtol=1e-9)
    kinds = kind_times(trace)
    assert_allclose([kinds["compute"][part] for part in ("busy_s", "overlapped_s", "exposed_s")], [18e-6, 8e-6, 10e-6], rtol=1e-9)
    assert set(kinds) == {"compute", "communication", "memory"}
    gemm = next(kernel for kernel in kernel_times(trace) if kernel.name == GEMM)
    assert gemm.count == 3
    assert_allclose([gemm.total_s, gemm.mean_s, gemm.covered_share], [21e-6, 7e-6, 8 / 21], rtol=1e-9)
    copy = next(kernel for kernel in kernel_times(trace) if kernel.kind == "memory")
    assert_allclose(copy.bytes_per_s, 1e9, rtol=1e-9)


def test_absolute_time_is_exact_to_the_nanosecond(tmp_path):
    base = 1_711_964_646_000_000_000
    trace = Writer(baseTimeNanoseconds=base).device(GEMM, 4458676522690.655, 2.5).device(GEMM, 4458676522700.125, 1).read(tmp_path)
    assert trace.origin_ns == base + 4458676522690 * 1000
    assert_allclose(trace.events.start_s, [0.655e-6, 10.125e-6], atol=1e-9)
    epoch = Writer().device(GEMM, 1694128201428006, 1).read(tmp_path)
    assert epoch.origin_ns == 1694128201428006 * 1000


def test_kernel_is_traced_to_the_innermost_operator_of_its_thread(tmp_path):
    shape = {"Input Dims": [[128, 64], [64, 32]], "Input type": ["float", "float"]}
    w = Writer().host("aten::linear", 0, 100).host("aten::mm", 10, 50, **shape).host("aten::add", 15, 5, tid=2)
    w.device(GEMM, 200, 10, call=17).device("other_kernel", 220, 4, call=80)
    trace = w.read(tmp_path)
    names = [trace.names[trace.operators.name[i]] for i in trace.events.operator]
    assert names == ["aten::mm", "aten::linear"]
    gemm = next(kernel for kernel in kernel_times(trace) if kernel.name == GEMM)
    assert_allclose(gemm.flops_per_s, 2 * 128 * 64 * 32 / 10e-6, rtol=1e-9)
    assert_allclose(gemm.bytes_per_s, 4 * (128 * 64 + 64 * 32 + 128 * 32) / 10e-6, rtol=1e-9)
    assert_allclose(rank_dict(trace)["host"]["launch_to_start_s"], (183 + 140) / 2 * 1e-6, rtol=1e-9)


def test_steps_hold_what_they_launched(tmp_path):
    w = Writer().step(7, 0, 100).step(8, 100, 100)
    w.device(GEMM, 50, 20, call=10).device(GEMM, 130, 20, call=60).device(GEMM, 180, 30, call=120)
    first, second = step_times(w.read(tmp_path))
    assert (first.name, first.kernels, second.kernels) == ("ProfilerStep#7", 2, 1)
    assert_allclose([first.start_s, first.end_s, first.period_s, first.times.idle_time_s], [0, 100e-6, 130e-6, 60e-6], atol=1e-12)
    assert_allclose([second.period_s, second.host_s], [30e-6, 100e-6], rtol=1e-9)


def test_size_and_group_of_collectives(tmp_path):
    record = {"Collective name": "_allgather_base", "In msg nelems": 1000, "Out msg nelems": 4000, "Group size": 4, "dtype": "BFloat16",
              "Process Group Name": "2", "Process Group Ranks": "[0, 2, 4, 6]"}  # fmt: skip
    w = Writer(distributedInfo={"rank": 0, "world_size": 8}).device("ncclDevKernel_AllGather_RING_LL(x)", 0, 9, 20, grid=(24, 1, 1), **record)
    send = {"Collective name": "send", "In msg nelems": 10, "Out msg nelems": 10, "Group size": 8, "dtype": "Float", "Dst Rank": 3}
    w.device("ncclDevKernel_SendRecv(x)", 20, 9, 20, **send)
    w.device("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 9, 20, **record | {"Collective name": "allreduce_coalesced", "Process Group Ranks": "[0, 1, ...]"})
    w.host("c10d::_allgather_base_", 60, 20).host("nccl:_all_gather_base", 62, 10, "user_annotation", **{"Input Dims": [[25, 40]], "Input type": ["float"]})
    w.device("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", 80, 9, 20, call=65)
    gather, p2p, reduced, by_operator = w.read(tmp_path).collectives
    assert (gather.op, gather.datatype, gather.nbytes, gather.ranks, gather.members, gather.channels) == ("all_gather", "bf16", 8000, 4, (0, 2, 4, 6), 24)
    assert (p2p.op, p2p.peer, p2p.nbytes) == ("send_recv", 3, 40)
    assert (reduced.op, reduced.coalesced, reduced.members) == ("all_reduce", True, ())
    assert (by_operator.op, by_operator.nbytes, by_operator.ranks, by_operator.recorded) == ("all_gather", 25 * 40 * 4 * 8, 8, "operator")


def test_work_of_operators():
    mm = work_of("aten::addmm", Inputs(((5,), (3, 4), (4, 5), (), ()), ("c10::BFloat16",) * 3 + ("Scalar",) * 2))
    assert mm is not None
    assert (mm.op, mm.datatype, dict(mm.sizes), mm.flops, mm.nbytes) == ("matmul", "bf16", dict(m=3, n=5, k=4), 120, 2 * (12 + 20 + 15))
    bmm = work_of("aten::bmm", Inputs(((2, 3, 4), (2, 4, 5)), ("float", "float")))
    assert bmm is not None and (bmm.op, bmm.flops, bmm.sizes["batch"]) == ("batched_matmul", 240, 2)
    heads = ((2, 8, 128, 64), (2, 4, 128, 64), (2, 4, 128, 64), (), (), (), ())
    flash = work_of("aten::_scaled_dot_product_flash_attention", Inputs(heads, ("c10::Half",) * 7, ("", "", "", "0.", "True", "False", "0.125")))
    assert flash is not None and (flash.op, flash.flops) == ("attention_prefill", 4 * 2 * 8 * 64 * 128 * 128 / 2)
    add = work_of("aten::add", Inputs(((64, 32), (32,)), ("float", "float")))
    assert add is not None and (dict(add.sizes), add.nbytes) == (dict(m=2048), 4 * (2048 + 32 + 2048))
    images = ((4, 6, 9, 9), (8, 3, 3, 3), (), (), (), ())
    conv = work_of("aten::cudnn_convolution", Inputs(images, ("float",) * 6, ("", "", "[1, 1]", "[2, 2]", "[1, 1]", "2")))  # 5 x 5 outputs, 2 groups
    assert conv is not None and (conv.flops, conv.nbytes) == (2 * 4 * 8 * 25 * 27, 4 * (4 * 6 * 81 + 8 * 27 + 4 * 8 * 25))
    assert work_of("aten::mm", Inputs(((3, 4),), ("float",))) is None
    assert work_of("aten::mm", Inputs(((3, 4), (5, 6)), ("float", "float"))) is None
    assert work_of("aten::topk", Inputs(((3, 4),), ("float",))) is None


# Damaged files


def whole():
    w = Writer()
    for k in range(6):
        w.device(f"kernel_{k}", 10 * k, 5)
    return w.text()


@settings(max_examples=60)
@given(data=st.data())
def test_a_cut_trace_gives_what_comes_before(data, tmp_path_factory):
    text = whole()
    at = data.draw(st.integers(1, len(text) - 1))
    path = tmp_path_factory.mktemp("cut") / "cut.json"
    path.write_text(text[:at])
    events = json.loads(text)["traceEvents"]
    ends = [text.index(json.dumps(event)) + len(json.dumps(event)) for event in events]
    complete = sum(end <= at for end in ends)
    if not complete:
        with pytest.raises(TraceError, match=r"cut\.json"):
            read_trace(path)
        return
    (trace,) = read_trace(path)
    assert isinstance(trace, RankTrace) and len(trace.events) == complete
    left = reasons(trace)["the file stops in the middle; what follows is missing"]
    assert f"after event {complete}" in left.examples[0] and "character" in left.examples[0]


@settings(max_examples=80)
@given(data=st.data())
def test_damaged_bytes_raise_nothing_else(data, tmp_path_factory):
    w = Writer(distributedInfo={"rank": 0, "world_size": 2}).device(GEMM, 100, 10, call=17).step(3, 0, 50)
    w.host("aten::mm", 10, 50, **{"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]})
    w.device(NCCL, 120, 10, 20, **{"Collective name": "allreduce", "In msg nelems": 8, "Group size": 2, "Process Group Ranks": "[0, 1]", "dtype": "Float"})
    content = bytearray(data.draw(st.sampled_from([w.text().encode(), xspace()])))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "damaged.json"
    path.write_bytes(bytes(content))
    try:
        for trace in read_trace(path):
            rank_dict(trace)
    except TraceError as error:
        assert "damaged.json" in str(error)


def test_a_cut_gzip_file_gives_what_comes_before(tmp_path):
    w = Writer()
    for k in range(4000):
        w.device(f"kernel_{k * 7919 % 4001}", 10 * k, 5)
    data = gzip.compress(w.text().encode())
    path = tmp_path / "cut.json.gz"
    path.write_bytes(data[: len(data) // 2])
    (trace,) = read_trace(path)
    assert isinstance(trace, RankTrace) and 0 < len(trace.events) < 4000
    assert "gzip" in reasons(trace)["the file stops in the middle; what follows is missing"].examples[0]


def test_damage_in_the_middle_is_no_end(tmp_path):
    text = whole()
    at = text.index('"kernel_3"')
    path = tmp_path / "broken.json"
    path.write_text(text[:at] + "@@@" + text[at:] + " " * 10000)
    (trace,) = read_trace(path)
    assert isinstance(trace, RankTrace) and len(trace.events) == 3
    assert "no JSON" in trace.left_out[0].examples[0]


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "is empty"),
        ("<html>not a trace</html>", "is not JSON"),
        ("{not json", "is not JSON"),
        ('{"hello": 1}', "is not a trace: its members are hello"),
        ('{"traceEvents": []}', "is not a trace"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]}', "has no GPU events"),
        (b"\x0a\xff\xff\xff", "is neither JSON nor a profile of JAX"),
        (b"\x99\x99\x01", "is no trace"),
        (b"\x1f\x8b\x08\x00\x00", "is not a complete gzip file"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, content, message):
    path = tmp_path / "some.file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError, match=message) as error:
        read_trace(path)
    assert "some.file" in str(error.value)


def test_doubtful_events_are_named_and_counted(tmp_path):
    w = Writer().device("backward", 50, -5).device("nameless time", "soon", 5).device("first", 0, 10).device("second", 8, 10)
    w.device("early", 100, 5, call=120).step(4, 0, 50).step(3, 60, 50)
    w.events += ["not an event", {"ph": "X", "cat": "kernel", "name": "no time"}]
    trace = w.read(tmp_path)
    found = reasons(trace)
    assert len(trace.events) == 3
    assert "event 1 ('backward')" in found["clock running backwards: an event ends before it starts"].examples[0]
    assert found["an event without a time or duration that is a number"].count == 2
    overlap = found["overlapping kernels on one stream, kept"]
    assert overlap.count == 1 and "event 4 ('second') on stream 7 starts 2 us early" in overlap.examples[0]
    assert "event 5 ('early') by 20 us" in found["clock running backwards: a kernel starts before the host launches it, kept"].examples[0]
    assert "clock running backwards: steps out of order, kept" in found
    assert "an item of traceEvents is no event" in found


def test_missing_and_unusable_ranks_are_named(tmp_path):
    for rank in (0, 2):
        Writer(distributedInfo={"rank": rank, "world_size": 4}).device(GEMM, 0, 5).write(tmp_path / f"rank{rank}.json")
    (tmp_path / "rank1.json").write_text("oops")
    found, left = read_traces([tmp_path / f"rank{k}.json" for k in (2, 1, 0)])
    assert [trace.rank for trace in found] == [0, 2]
    described = left_out_dict(left)
    assert described["missing ranks"] == {"count": 2, "examples": ["2 of 4 ranks: 1, 3"]}
    assert "rank1.json" in described["a file that could not be used"]["examples"][0]
    with pytest.raises(TraceError, match=r"rank1\.json"):
        read_traces([tmp_path / "rank1.json"])


def test_frames_of_python_take_no_memory(tmp_path):
    frame = json.dumps({"ph": "X", "cat": "python_function", "name": "module.py(1): _call_impl " + "x" * 800, "ts": 1.5, "dur": 2.25, "args": {}})
    path = tmp_path / "long.json"
    with open(path, "w") as file:
        file.write('{"traceEvents": [' + (frame + ",\n") * 10_000)
        file.write(json.dumps(Writer().device(GEMM, 0, 5).events[0]) + "]}")
    assert path.stat().st_size > 8e6
    tracemalloc.start()
    (trace,) = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(trace, RankTrace) and trace.events.event.tolist() == [10_001]
    assert peak < 6e6


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


# JAX and Chakra


def varint(value):
    data = b""
    while value > 127:
        data, value = data + bytes([value & 127 | 128]), value >> 7
    return data + bytes([value])


def message(*fields):
    """Fields (number, value) in the wire format of protocol buffers."""
    data = b""
    for number, value in fields:
        if isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            value = value.encode() if isinstance(value, str) else value
            data += varint(number << 3 | 2) + varint(len(value)) + value
    return data


def xspace():
    details = (4, message((1, 1), (5, " grid:80,2,1 block:256,1,1")))
    event = lambda name, start_ps, duration_ps: (4, message((1, name), (2, start_ps), (3, duration_ps), details))
    names = [(4, message((1, key), (2, message((1, key), (2, name))))) for key, name in ((1, "fusion.1"), (2, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"))]
    stats = [(5, message((1, key), (2, message((1, key), (2, name))))) for key, name in ((1, "kernel_details"), (2, "core_count"), (3, "profile_start_time"))]
    first = message((1, 7), (2, "Stream #7(Kernel)"), (3, 1000), event(1, 0, 10_000_000), event(1, 12_000_000, 8_000_000))
    second = message((1, 9), (2, "Stream #9(Kernel)"), (3, 3000), event(2, 3_000_000, 10_000_000))
    again = message((2, "XLA Ops"), (3, 1000), event(1, 0, 90_000_000))  # says the same again
    device = message((2, "/device:GPU:3"), (3, first), (3, second), (3, again), *names, *stats, (6, message((1, 2), (4, 132))))
    start = message((2, "Task Environment"), stats[2], (6, message((1, 3), (3, 1_700_000_000_000_000_000))))
    return message((1, message((2, "/host:CPU"))), (1, device), (1, start))


def test_xspace_by_hand(tmp_path):
    """Compute 0-10 and 12-20, communication 5-15 (its line begins 2 us later)."""
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(xspace())
    (trace,) = read_trace(path)
    assert isinstance(trace, RankTrace)
    assert (trace.rank, trace.num_sms, len(trace.events), trace.origin_ns) == (3, 132, 3, 1_700_000_000_000_001_000)
    times = times_of(trace)
    assert_allclose([times.span_s, times.compute_time_s, times.exposed_communication_time_s], [20e-6, 18e-6, 2e-6], rtol=1e-9)
    assert trace.events.blocks.tolist() == [160] * 3 and trace.events.stream.tolist() == [7, 9, 7]
    for cut in range(1, len(xspace())):
        path.write_bytes(xspace()[:cut])
        try:
            (trace,) = read_trace(path)
        except TraceError as error:
            assert "host.xplane.pb" in str(error)
        else:
            assert isinstance(trace, RankTrace) and len(trace.events) == 3


def test_jax_json_is_read_by_its_device_streams(tmp_path):
    meta = lambda kind, name, **where: {"ph": "M", "name": kind, "args": {"name": name}, **where}
    run = lambda tid, name, ts, dur, pid=2: {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name}
    events = [meta("process_name", "/device:GPU:1", pid=2), meta("process_name", "/host:CPU", pid=9), meta("thread_name", "Stream #5(Compute)", pid=2, tid=1),
              meta("thread_name", "Stream #6(Memcpy)", pid=2, tid=2), meta("thread_name", "XLA Modules", pid=2, tid=3),
              run(1, "fusion", 10.5, 4), run(2, "MemcpyH2D", 16, 2), run(3, "jit_step", 0, 99), run(1, "python", 0, 99, 9)]  # fmt: skip
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}).encode()))
    (trace,) = read_trace(path)
    assert isinstance(trace, RankTrace) and (trace.format, trace.rank, trace.events.stream.tolist()) == ("jax-json", 1, [5, 6])
    times = times_of(trace)
    assert_allclose([times.span_s, times.compute_time_s, times.memory_time_s], [7.5e-6, 4e-6, 2e-6], rtol=1e-9)


def test_execution_graphs(tmp_path):
    nodes = [
        {"Id": 1, "Name": "aten::mm", "NodeType": 4, "runtime": 50, "data_deps": [], "is_cpu_op": True},
        {"Id": 2, "Name": GEMM, "NodeType": 4, "runtime": 7, "data_deps": [1], "is_cpu_op": False},
        {"Id": 3, "Name": NCCL, "NodeType": 7, "runtime": 9, "data_deps": [2, 99], "is_cpu_op": False, "comm_size": 4096},
        {"Name": "nobody"},
    ]
    path = tmp_path / "chakra.json"
    path.write_text(json.dumps({"workload_graph": nodes}))
    (graph,) = read_trace(path)
    assert isinstance(graph, ExecutionGraph)
    assert graph.kind.tolist() == [COMPUTE, COMPUTE, COMMUNICATION] and graph.parents.tolist() == [0, 1, -1] and graph.offsets.tolist() == [0, 0, 1, 3]
    described = rank_dict(graph)
    assert_allclose([described["compute_time_s"], described["communication_time_s"]], [7e-6, 9e-6])
    assert described["idle_time_s"] is None and {item.reason for item in graph.left_out} == {
        "a node without id and name", "a dependency on a node that is not in the file"}  # fmt: skip

    flag = lambda value: (10, message((1, "is_cpu_op"), (27, value)))
    parts = [message((1, "0.0.4")), message((1, 1), (2, "aten::mm"), (3, 4), (7, 50), flag(1)),
             message((1, 2), (2, GEMM), (3, 4), (5, b"\x01"), (7, 7), flag(0)),
             message((1, 3), (2, NCCL), (3, 7), (5, 2), (7, 9), (10, message((1, "comm_size"), (9, 4096))), flag(0))]  # fmt: skip
    path = tmp_path / "chakra.0.et"
    path.write_bytes(b"".join(varint(len(part)) + part for part in parts))
    (graph,) = read_trace(path)
    assert isinstance(graph, ExecutionGraph)
    assert (graph.format, graph.rank, graph.parents.tolist(), graph.on_device.tolist()) == ("chakra", 0, [0, 1], [False, True, True])
    assert graph.nbytes[2] == 4096
    assert_allclose(graph.duration_s, [50e-6, 7e-6, 9e-6])
    path.write_bytes(path.read_bytes()[:-5])
    (graph,) = read_trace(path)
    assert len(graph) == 2 and "cut" in graph.left_out[0].reason

    path = tmp_path / "pytorch.json"
    path.write_text(json.dumps({"schema": "1.0.3", "nodes": [{"id": 1, "name": "root", "ctrl_deps": 1}, {"id": 2, "name": "aten::mm", "ctrl_deps": 1}]}))
    (graph,) = read_trace(path)
    assert isinstance(graph, ExecutionGraph) and graph.parents.tolist() == [0] and rank_dict(graph)["compute_time_s"] is None


# Recorded traces


def traces_of(*patterns):
    return sorted(str(path.relative_to(DATA)) for pattern in patterns for path in DATA.glob(pattern)) if DATA.is_dir() else []


SMALL = [name for name in traces_of("*.gz", "*/rank0.json.gz") if (DATA / name).stat().st_size < 800_000]


@shared
@pytest.mark.parametrize("name", SMALL)
def test_shared_traces_load(name):
    for trace in read_trace(DATA / name):
        described = rank_dict(trace)
        if isinstance(trace, RankTrace):
            times = times_of(trace)
            assert 0 <= times.idle_time_s < times.span_s and times.compute_time_s + times.idle_time_s <= times.span_s * (1 + 1e-9)
            assert times.exposed_communication_time_s <= times.communication_time_s
            assert sum(kernel["count"] for kernel in described["kernels"]) == len(trace.events) > 0
        else:
            assert len(trace) > 1000


@shared
def test_ranks_of_one_machine_agree():
    """Eight ranks of one job: the ends of their collectives agree to microseconds, their starts to milliseconds."""
    found, left = read_traces(sorted((DATA / "dlrm_v100_8ranks").glob("*.gz")))
    matched, _ = match_collectives(found)
    assert matched is not None and matched.agree and matched.row.shape == (8, 8) and not left
    assert matched.spread_s < 10e-6 and np.ptp(matched.start_s, axis=1).max() > 5e-3
    duration = matched.end_s - matched.start_s
    assert (duration.max(axis=1) / matched.transfer_s).max() > 100  # what one rank alone shows is mostly waiting


@shared
def test_kernels_lose_whole_processors_to_a_collective():
    """A100, 108 processors, 8 channels: matrix kernels of 96, 128 or 192 blocks run as if alone, others take a further wave. Ratios of another program."""
    (trace,) = read_trace(DATA / "hta_a100_ddp_nccl_metadata_rank0of2.json.gz")
    assert isinstance(trace, RankTrace)
    pairs = [pair for pair in overlap_slowdowns(trace) if pair.time_alone_s > 15e-6 and re.search("cutlass|xmma", pair.kernel) and pair.blocks < 2000]
    assert all((pair.pairing, pair.num_sms, pair.channels) == ("position", 108, 8) for pair in pairs)
    ratios = sorted((pair.blocks, pair.time_with_s / pair.time_alone_s) for pair in pairs)
    assert [blocks for blocks, _ in ratios] == [96, 100, 100, 128, 192, 200, 208, 216, 400, 512, 512]
    assert_allclose([ratio for _, ratio in ratios], [1.01, 1.61, 1.76, 0.99, 1.00, 1.30, 1.37, 1.33, 1.32, 1.13, 1.45], atol=0.006)


HTA = traces_of("dlrm*/rank[07].json.gz", "hta_sampled*/*.gz", "hta_a100_*", "hta_v100*", "tracelens_h100_bert*")


@shared
@pytest.mark.filterwarnings("ignore")  # of pandas, which it uses in an old way
@pytest.mark.parametrize("name", HTA)
@pytest.mark.parametrize("defaults", [True, False])
def test_times_are_those_of_holistic_trace_analysis(name, defaults, monkeypatch):
    """Its defaults against `hta_times`; and its analyses of all kernels, without rounding to microseconds, against `times_of`."""
    hta = pytest.importorskip("hta.trace_analysis", reason="needs the hta extra")
    from hta.analyzers.breakdown_analysis import BreakdownAnalysis
    from hta.analyzers.communication_analysis import CommunicationAnalysis
    from hta.common.trace import Trace

    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "0" if defaults else "1")
    logging.disable(logging.CRITICAL)
    files, (trace,) = {0: str(DATA / name)}, read_trace(DATA / name)
    assert isinstance(trace, RankTrace)
    if defaults:
        theirs = hta.TraceAnalysis(trace_files=files, trace_dir="").t
    else:
        theirs = Trace(trace_files=files, trace_dir="")
        theirs.parse_traces(use_multiprocessing=False)
        theirs.traces[0]["ts"] -= theirs.traces[0]["ts"].min()
    row = BreakdownAnalysis.get_temporal_breakdown(theirs, visualize=False).iloc[0]
    found = hta_times(trace) if defaults else times_of(trace)
    waits = (trace.events.kind == SYNCHRONISATION).any() and not defaults  # it takes records of synchronisation for kernels
    if not waits:
        assert_allclose(found.idle_time_s, row["idle_time(us)"] * 1e-6, rtol=0.01)
    assert_allclose(found.compute_time_s, row["compute_time(us)"] * 1e-6, rtol=0.01)
    if trace.collectives:
        overlap = CommunicationAnalysis.get_comm_comp_overlap(theirs, visualize=False).iloc[0]["comp_comm_overlap_pctg"]
        assert_allclose(100 * found.overlap_fraction, overlap, rtol=0.01, atol=0.01)
    logging.disable(logging.NOTSET)
