"""Damaged and doubtful traces: what can be read is read, and the rest is named."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_traces import GEMM, NCCL, Writer, message, reasons, xspace

from diffperf.io.traces import RankTrace, TraceError, left_out_dict, rank_dict, read_trace, read_traces


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


def test_a_plane_whose_statistics_are_damaged_is_named(tmp_path):
    damaged = message((1, message((2, "/device:GPU:0"), (6, bytes([0x11, 1])))))  # a number of eight bytes, of which one is there
    path = tmp_path / "some.xplane.pb"
    path.write_bytes(damaged + xspace())
    (trace,) = read_trace(path)
    assert trace.rank == 3 and reasons(trace)["a damaged plane"].examples[0].startswith("/device:GPU:0: ")


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
