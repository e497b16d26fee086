"""Traces that are damaged, odd or hostile: one line says what is wrong and where, what can be read is reported, and nothing is half-written."""

import gzip
import json
import os
import tracemalloc

import pytest
from numpy.testing import assert_allclose

from diffperf.cli import main
from diffperf.cli._trace_tables import labels
from diffperf.io.traces import ExecutionGraph, RankTrace, TraceError, left_out_dict, match_collectives, read_trace, read_traces, step_times, times_of

GEMM, NCCL = "sgemm_128x64", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def kernel(name, ts, dur, stream=7, correlation=1, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur,
            "args": {"device": 0, "stream": stream, "correlation": correlation, "grid": [64, 1, 1], "block": [256, 1, 1], **args}}  # fmt: skip


def job(rank=0, world=2):
    """Matmuls at 20-50 and 80-90, an all-reduce at 40-70 us; the first matmul is event 4."""
    call = {"pid": 1, "tid": 1}
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 100, "args": {}} | call,
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 5, "dur": 10, "args": {"Input Dims": [[8, 4], [4, 2]], "Input type": ["float"] * 2}} | call,
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 6, "dur": 2, "args": {"correlation": 1}} | call,
        kernel(GEMM, 20, 30),
        kernel(NCCL, 40, 30, 20, 2, **{"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2, "dtype": "Float"}),
        kernel(GEMM, 80, 10, correlation=3),
    ]
    return {"distributedInfo": {"rank": rank, "world_size": world}, "deviceProperties": [{"id": 0, "name": "NVIDIA A100", "numSms": 108}],
            "traceEvents": events}  # fmt: skip


def write(path, document):
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def run(capsys, *words):
    """Exit code, output, and the errors of `diffperf trace`."""
    with pytest.raises(SystemExit) as stop:
        main(["trace", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "failure inside diffperf" not in err, err
    return stop.value.code, out, err


def every(**values):
    return lambda document: [event.update(values) for event in document["traceEvents"]]


def args_of(number, **values):
    return lambda document: document["traceEvents"][number - 1]["args"].update(values)


def one(number, **values):
    return lambda document: document["traceEvents"][number - 1].update(values)


def info(**values):
    return lambda document: document["distributedInfo"].update(values)


WHOLE = (70e-6, 10e-6, 40e-6, 30e-6)  # span, idle, compute, communication
WITHOUT = (50e-6, 10e-6, 10e-6, 30e-6)  # without event 4
NUMBER = "an event without a time or duration that is a number"
FAR = "an event of more than a day, or more than a day away from the others"

ODD = [
    ("times as text", lambda d: [event.update(ts=str(event["ts"]), dur=str(event["dur"])) for event in d["traceEvents"]], WHOLE, None),
    ("no time", one(4, ts="soon"), WITHOUT, NUMBER),
    ("time NaN", one(4, ts=float("nan")), WITHOUT, NUMBER),
    ("duration null", one(4, dur=None), WITHOUT, NUMBER),
    ("duration a list", one(4, dur=[1]), WITHOUT, NUMBER),
    ("duration infinite", one(4, dur=float("inf")), WITHOUT, NUMBER),
    ("more digits than a float", one(4, dur=10**400), WITHOUT, NUMBER),
    ("duration negative", one(4, dur=-5), WITHOUT, "clock running backwards: an event ends before it starts"),
    ("duration huge", one(4, dur=1e18), WITHOUT, FAR),
    ("time huge", one(4, ts=1e300), WITHOUT, FAR),
    ("time of another year", one(4, ts=20 + 365 * 86400e6), WITHOUT, FAR),
    ("name a number", one(4, name=5), WITHOUT, "an event without a name"),
    ("no arguments", every(args=None), WHOLE, None),
    ("process a list", every(pid=[1], tid={"a": 2}), WHOLE, None),
    ("stream as text", args_of(4, stream="7", device="0", correlation="1"), WHOLE, None),
    ("stream a word", args_of(4, stream="default", device=[1], correlation={}, grid=5), WHOLE,
     "a kernel without a stream number, kept, its overlap with others not checked"),
    ("kernels at once on a stream", lambda d: d["traceEvents"].append(kernel("other", 25, 20)), WHOLE, "overlapping kernels on one stream, kept"),
    ("clock of the host ahead", one(3, ts=60), WHOLE, "clock running backwards: a kernel starts before the host launches it, kept"),
    ("items that are no events", lambda d: d["traceEvents"].extend([None, 1, "x", []]), WHOLE, "an item of traceEvents is no event"),
    ("shapes as text", args_of(2, **{"Input Dims": "[[8, 4]]"}), WHOLE, None),
    ("shapes that are objects", args_of(2, **{"Input Dims": [{"a": 1}]}), WHOLE, "an operator whose inputs are no lists"),
    ("shapes negative and huge", args_of(2, **{"Input Dims": [[-8, 10**30], [10**30, -2]]}), WHOLE, None),
    ("size negative", args_of(5, **{"In msg nelems": -5}), WHOLE, "a collective whose size or group is no number, not used"),
    ("types that are no names", args_of(5, dtype=5, **{"Collective name": [7], "Process Group Ranks": {"a": 1}}), WHOLE, None),
    ("rank a word", info(rank="one"), WHOLE, "a rank that is no whole number from 0 on, not used"),
    ("rank a half", info(rank=1.5), WHOLE, "a rank that is no whole number from 0 on, not used"),
    ("rank outside the job", info(rank=7), WHOLE, "a rank outside its job, whose size is not used"),
    ("ranks by the billion", info(world_size=10**12), WHOLE, "missing ranks"),
    ("no job", lambda d: d.update(distributedInfo=[1]), WHOLE, None),
    ("device of another form", lambda d: d.update(deviceProperties=[None, {"id": [1], "name": [2], "numSms": "many"}]), WHOLE, None),
    ("base no time", lambda d: d.update(baseTimeNanoseconds=10**400), WHOLE, "a baseTimeNanoseconds that is no time, taken as 0"),
    ("step without end", lambda d: d["traceEvents"][0].pop("dur"), WHOLE, NUMBER),
    ("step of many digits", one(1, name="ProfilerStep#" + "9" * 5000), WHOLE, None),
]


@pytest.mark.parametrize("change, times, reason", [pytest.param(*rest, id=name) for name, *rest in ODD])
def test_odd_values_leave_the_rest(tmp_path, capsys, change, times, reason):
    document = job()
    change(document)
    code, out, _ = run(capsys, write(tmp_path / "odd.json", document), "--json", tmp_path / "out.json")
    assert code == 0 and "Kernels" in out
    found = json.loads((tmp_path / "out.json").read_text())
    (rank,) = found["ranks"]
    names = ("span_s", "idle_time_s", "compute_time_s", "communication_time_s")
    assert_allclose([rank[name] for name in names], times, atol=1e-12)
    if reason is None:
        assert not set(found["left_out"]) - {"missing ranks"}
    else:
        assert found["left_out"][reason]["count"] >= 1 and reason in out


@pytest.mark.parametrize("name", ["ядро 核 😀 \ud800", "[bold]x[/] [link] \x1b[31m\n\t\u202e", "", "k" * 5000])
def test_names_are_printed_and_written_whatever_they_hold(tmp_path, capsys, name):
    document = job()
    document["traceEvents"][3]["name"] = name
    code, out, _ = run(capsys, write(tmp_path / "names.json", document), "--json", tmp_path / "out.json", "--measurements", tmp_path / "measured")
    assert code == 0 and "\x1b[31m" not in out
    kept = [item["name"] for item in json.loads((tmp_path / "out.json").read_text())["ranks"][0]["kernels"]]
    assert any(item.startswith(name[:4]) if "\ud800" not in name else item == "ядро 核 😀 ?" for item in kept) or name == ""
    assert "[bold]x[/]" in out or "bold" not in name
    assert "unnamed" in kept or name != ""


REFUSED = [
    ("", "is empty"), ("  \n", "is empty"), ("null", "is not JSON of a profiler: it begins with 'null'"), ("12", "begins with '12'"), ("a,b\n1,2", "a,b"),
    ("[]", "traceEvents is empty"), ("{}", "its members are none"), ('{"traceEvents": 0}', "traceEvents is '0', no list"),
    ('{"traceEvents": null}', "traceEvents is 'None', no list"), ('{"nodes": 5}', "nodes is '5', no list"), ('{"a": 1}\n{"b": 2}', "its members are a"),
    ('{"workload_graph": [1, {"id": "x", "name": "y"}]}', "2 x a node without id and name"), (b"\x00" * 64, "a node without id and name"),
    ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}', "has no GPU events"),
    ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": "x", "dur": 1}]}', "left out: 1 x an event without a time"),
    ('{"traceEvents": [{"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/device:GPU:0"}}, {"ph": "X", "pid": 2, "ts": NaN, "dur": 1}]}',
     "/device:GPU:0 ran nothing that could be read"),
    ('{"traceEvents": [{"ph"', "Copy the whole file"), ("[", "the file ends"), (json.dumps(job()).encode("utf-16"), "UTF-16"),
    (b"\x1f\x8b", "is not a complete gzip file"), (gzip.compress(b"", mtime=0), "is empty"), (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "is no trace"),
    (b"PK\x03\x04" + b"\0" * 50, "is no trace"), (b"\x0a\xff\xff\xff\x7f", "XSpace"), (b"\x80" * 40, "is no trace"),
]  # fmt: skip


@pytest.mark.parametrize("content, message", REFUSED)
def test_what_is_no_trace_is_refused_by_name(tmp_path, capsys, content, message):
    path = tmp_path / "some.file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run(capsys, path, "--json", tmp_path / "out.json")
    assert (code, out) == (2, "") and "some.file" in err and message in err and err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


def test_files_that_cannot_be_opened(tmp_path, capsys):
    good = write(tmp_path / "rank0.json", job())
    for path, message in ((tmp_path / "absent.json", "does not exist"), (tmp_path, "is a folder")):
        code, _, err = run(capsys, path)
        assert code == 2 and str(path) in err and message in err
        code, out, _ = run(capsys, good, path)
        assert code == 0 and "a file that could not be used" in out and message in out


@pytest.mark.parametrize("tail, reason", [(" {}", "something behind the end"), ("\n \n", None)])
def test_text_behind_the_end_is_named(tmp_path, tail, reason):
    (trace,) = read_trace(write(tmp_path / "tail.json", "\ufeff" + json.dumps(job()) + tail))
    assert [item.reason.startswith(reason or "") for item in trace.left_out] == ([True] if reason else [])


def test_a_wrong_checksum_is_named(tmp_path):
    path = tmp_path / "sum.json.gz"
    path.write_bytes(gzip.compress(json.dumps(job()).encode())[:-8] + bytes(8))
    (trace,) = read_trace(path)
    assert isinstance(trace, RankTrace) and len(trace.events) == 3 and "CRC" in trace.left_out[0].examples[0]


def test_json_that_nests_too_deep_is_left_out(tmp_path):
    (trace,) = read_trace(write(tmp_path / "deep.json", json.dumps(job())[:-1] + ', "x": ' + "[" * 100_000))
    assert isinstance(trace, RankTrace) and len(trace.events) == 3


# Ranks


def test_a_file_given_twice_counts_once(tmp_path):
    path = write(tmp_path / "rank0.json", job())
    os.symlink(path, tmp_path / "link.json")
    found, left = read_traces([path, path, tmp_path / "link.json"])
    assert len(found) == 1 and left_out_dict(left)["a file given more than once, read once"]["count"] == 2


def test_two_traces_of_one_rank_are_not_compared_with_each_other(tmp_path):
    paths = [write(tmp_path / f"{k}.json", job(rank)) for k, rank in enumerate((0, 1, 0))]
    found, left = read_traces(paths)
    matched, _ = match_collectives(found)
    assert len(found) == 3 and matched is not None and [found[i].rank for i in matched.ranks] == [0, 1]
    described = left_out_dict(left)
    assert "missing ranks" not in described
    assert described["several traces of one rank, each shown, the first compared with other ranks"]["examples"] == ["all files: rank 0"]


def test_ranks_as_text_and_of_several_jobs(tmp_path):
    document = job()
    document["distributedInfo"] = {"rank": "1", "world_size": "4"}
    found, left = read_traces([write(tmp_path / "a.json", document), write(tmp_path / "b.json", job(0, 2))])
    assert [(trace.rank, trace.world_size) for trace in found if isinstance(trace, RankTrace)] == [(0, 2), (1, 4)]
    described = left_out_dict(left)
    assert described["missing ranks"]["count"] == 2
    assert "files that differ in the number of ranks, hence perhaps of several jobs" in described


# Where the output goes, and the plan


def test_places_that_cannot_be_written_are_refused_before_the_work(tmp_path, capsys):
    trace, file = write(tmp_path / "rank0.json", job()), write(tmp_path / "file", "mine")
    before = trace.read_bytes()
    for words, message in (
        (["--json", tmp_path / "no" / "out.json"], "does not exist"), (["--json", tmp_path], "is a folder"), (["--json", trace], "one of the traces"),
        (["--measurements", file], "is a file; it should be a folder"), (["--measurements", tmp_path / "no" / "m"], "does not exist"),
        (["--json", tmp_path / "out.json", "--measurements", file], "is a file"),
    ):  # fmt: skip
        code, out, err = run(capsys, trace, *words)
        assert (code, out) == (2, "") and message in err and str(words[-1]) in err
    assert trace.read_bytes() == before and file.read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["file", "rank0.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_named(tmp_path, capsys):
    code, _, err = run(capsys, write(tmp_path / "rank0.json", job()), "--json", "/dev/full")
    assert code == 2 and "/dev/full cannot be written" in err


def test_a_folder_for_nothing_says_so(tmp_path, capsys):
    document = job()
    document["traceEvents"] = document["traceEvents"][3:4]
    code, _, err = run(capsys, write(tmp_path / "rank0.json", document), "--measurements", tmp_path / "measured")
    assert code == 0 and "nothing was written" in err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--system", "h100", "--gbs", 8, "--model", "gpt-9000"], "gpt-9000"),
        (["--model", "llama-3.2-1b", "--gbs", 8, "--system", "abacus"], "abacus"),
        (["--model", "llama-3.2-1b"], "--system and --gbs"),
        (["--model", "llama-3.2-1b", "--system", "h100", "--gbs", 8, "--devices", 8], "--devices is 8"),
    ],
)
def test_plans_that_do_not_fit_the_trace(tmp_path, capsys, words, message):
    code, out, err = run(capsys, write(tmp_path / "rank0.json", job()), *words, "--json", tmp_path / "out.json")
    assert (code, out) == (2, "") and message in err and not (tmp_path / "out.json").exists()


# Protocol buffers as streams


def varint(value):
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes((*data, value))


def message(*fields):
    data = b""
    for number, value in fields:
        value = value.encode() if isinstance(value, str) else value
        data += varint(number << 3) + varint(value) if isinstance(value, int) else varint(number << 3 | 2) + varint(len(value)) + value
    return data


def xspace(events=3, host=0):
    """One device with kernels of 8 us every 10 us, every third under another name; `host` bytes on the host."""
    event = lambda k: (4, message((1, 1 + k % 3 // 2), (2, 10_000_000 * k), (3, 8_000_000), (4, message((1, 1), (3, 70 + k)))))
    body = message((2, "Stream #7(Kernel)"), (3, 1000), *map(event, range(events)))
    names = [(4, message((1, key), (2, message((1, key), (2, name))))) for key, name in ((1, "fusion"), (2, "all-reduce.1"))]
    stats = (5, message((1, 1), (2, message((1, 1), (2, "correlation_id")))))
    device = message((2, "/device:GPU:0"), (3, body), *names, stats)
    return message((1, message((2, "/host:CPU"), (3, bytes([0x7A, 0x02, 0, 0]) * (host // 4)))), (1, device))


@pytest.mark.parametrize("packed", [False, True])
def test_xspace_is_read_as_a_stream(tmp_path, packed):
    """8 MB, of which the reader holds the columns of some thousand events and a few chunks."""
    path = tmp_path / "host.xplane.pb"
    data = xspace(3000, 8_000_000)
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    del data
    tracemalloc.start()
    (trace,) = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(trace, RankTrace) and len(trace.events) == 3000 and peak < 4.5e6
    assert trace.names == ("fusion", "all-reduce.1") and trace.events.correlation[:3].tolist() == [70, 71, 72]
    assert_allclose([times_of(trace).communication_time_s, times_of(trace).idle_time_s], [8e-3, 2e-6 * 2999], rtol=1e-9)


def test_a_cut_packed_xspace_says_where(tmp_path):
    path = tmp_path / "host.xplane.pb.gz"
    path.write_bytes(gzip.compress(xspace(300))[:-30])
    with pytest.raises(TraceError, match=r"host\.xplane\.pb\.gz.*gzip stream is damaged or cut"):
        read_trace(path)
    path.write_bytes(gzip.compress(xspace(3) + message((1, os.urandom(50_000))))[:-3000])
    (trace,) = read_trace(path)
    assert isinstance(trace, RankTrace) and len(trace.events) == 3 and "cut" in trace.left_out[0].reason


def test_events_of_xspace_that_cannot_be(tmp_path):
    event = lambda *fields: (4, message((1, 1), *fields))
    line = message((2, "Stream #7"), event((2, 0), (3, 8_000_000)), event((2, 10**18), (3, 1)), event((2, 0), (3, 2**64 - 5)), (4, b"\x22\x7f"), event((5, 3)))
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(message((1, message((2, "/device:GPU:0"), (3, line)))))
    (trace,) = read_trace(path)
    assert isinstance(trace, RankTrace) and len(trace.events) == 1
    assert {item.reason: item.count for item in trace.left_out} == {
        "a damaged event": 1, "an event that sums up several, without times": 1, "clock running backwards: an event ends before it starts": 1,
        FAR: 1}  # fmt: skip


def test_chakra_is_read_as_a_stream(tmp_path):
    nodes = [message((1, "0.0.4"))] + [message((1, k), (2, GEMM), (3, 4), (5, varint(k - 1)), (7, 5), (9, bytes(2000))) for k in range(1, 4001)]
    path = tmp_path / "rank3.et"
    path.write_bytes(b"".join(varint(len(node)) + node for node in nodes))
    tracemalloc.start()
    (graph,) = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 8e6 and peak < 4.5e6
    assert isinstance(graph, ExecutionGraph) and (graph.rank, len(graph)) == (3, 4000)
    assert graph.parents[:3].tolist() == [-1, 0, 1] and "node 1 waits for node 0" in graph.left_out[0].examples[0]
    path.write_bytes(path.read_bytes()[:-100])
    (graph,) = read_trace(path)
    assert len(graph) == 3999 and "after node 3999" in graph.left_out[0].examples[0]


def test_chakra_nodes_of_other_forms(tmp_path):
    nodes = [{"id": "7", "name": "a", "attr": 5, "data_deps": 3, "runtime": "5"}, {"id": 2**64 - 1, "name": "b", "type": [1], "data_deps": ["7", None, 99]},
             {"id": 2**70, "name": "c"}, {"id": 8, "name": "d", "runtime": 1e300, "is_cpu_op": False, "type": 4}]  # fmt: skip
    (graph,) = read_trace(write(tmp_path / "chakra.json", {"workload_graph": nodes}))
    assert isinstance(graph, ExecutionGraph) and graph.ids.tolist() == [7, -1, 8] and graph.parents.tolist() == [0, -1]
    assert_allclose(graph.duration_s, [5e-6, float("nan"), float("nan")])


# What is printed


def test_labels_stay_apart_and_within_their_width():
    names = [f"void at::native::vectorized_elementwise_kernel<4, at::native::{word}<float>, std::array<char*, 3ul>>(int)" for word in ("Add", "Mul", "Mul")]
    names += [f"{'cutlass_80_tensorop_s1688gemm_' * 3}{tile}_tn_align4" for tile in ("64x64", "128x64")] + ["Memcpy HtoD (Pinned -> Device)"]
    names += [f"split_{'embedding_' * 8}{word}_kernel(int)" for word in ("cta", "warp")]
    for width in (20, 36, 56):
        found = labels(names, width)
        assert len(set(found)) == len(names) and max(map(len, found)) <= width
    assert labels(["void foo<int>(int, float)", "bar"], 36) == ["foo<int>", "bar"]


def test_a_copy_fetched_ahead_does_not_start_a_step(tmp_path):
    """Step 2 copies on stream 9 while step 1 still computes; its own compute starts at 130 us. Idle and busy time of a step make up its period."""
    call = lambda ts, number: {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": ts, "dur": 1,
                               "args": {"correlation": number}}  # fmt: skip
    step = lambda k: {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{k}", "pid": 1, "tid": 1, "ts": 50 * (k - 1), "dur": 50}
    events = [step(1), step(2), call(1, 1), call(2, 2), call(51, 3), call(52, 4), kernel(GEMM, 10, 40, 7, 1), kernel(GEMM, 60, 65, 7, 2),
              kernel("Memcpy HtoD (Pinned -> Device)", 55, 10, 9, 3), kernel(GEMM, 130, 20, 7, 4)]  # fmt: skip
    (trace,) = read_trace(write(tmp_path / "ahead.json", {"traceEvents": events}))
    assert isinstance(trace, RankTrace)
    first, second = step_times(trace)
    assert_allclose([first.period_s, first.times.idle_time_s, first.times.compute_time_s, first.times.memory_time_s], [120e-6, 5e-6, 105e-6, 10e-6], rtol=1e-9)
    assert_allclose([second.start_s, second.times.span_s, second.times.memory_time_s], [120e-6, 20e-6, 0], atol=1e-12)
    assert (first.kernels, second.kernels) == (2, 2)
