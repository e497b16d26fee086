"""Traces of JAX and execution graphs of Chakra, written here."""

import gzip
import json

from numpy.testing import assert_allclose
from written_traces import GEMM, NCCL, message, varint, xspace

from diffperf.io.traces import COMMUNICATION, COMPUTE, ExecutionGraph, RankTrace, TraceError, rank_dict, read_trace, times_of


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
