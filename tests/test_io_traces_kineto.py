"""Kineto files as profilers, versions and tools vary them: steps, categories, streams, and several ranks or devices in one file."""

import pytest
from numpy.testing import assert_allclose
from written_traces import GEMM, NCCL, Writer, reasons

from diffperf.io.traces import TraceError, hta_times, kernel_measurements, match_collectives, overlap_slowdowns, read_trace, read_traces, step_times, times_of

SHAPE = {"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]}
TAKEN = "no step marked by the profiler; annotations with rising numbers are taken for steps"
PARTS = "several ranks or devices in one file, the number of the device is taken for the rank"

# Steps


@pytest.mark.parametrize("category", ["user_annotation", "cpu_op", "Operator"])
def test_steps_are_known_by_name_in_every_category(tmp_path, category):
    w = Writer().device(GEMM, 20, 5, call=10).device(GEMM, 120, 5, call=110)
    for number, start in ((1, 0), (2, 100)):
        w.host(f"ProfilerStep#{number}", start, 100, category).host(f"ProfilerStep#{number}", start, 99, "cpu_op")  # some versions write both
    assert [(step.name, step.kernels) for step in step_times(w.read(tmp_path))] == [("ProfilerStep#1", 1), ("ProfilerStep#2", 1)]


@pytest.mark.parametrize("text", ["iteration {}", "## iteration {} ##", "epoch 1, train_step {}"])
def test_numbered_annotations_stand_for_steps(tmp_path, text):
    """Layers have numbers too, but hold less time."""
    w = Writer()
    for number, start in ((9, 0), (10, 100), (11, 200)):
        w.host(text.format(number), start, 100, "user_annotation").host(f"layer {number}", start + 5, 60, "user_annotation")
        w.device(GEMM, start + 20, 5, call=start + 10)
    trace = w.read(tmp_path)
    assert [step.name for step in step_times(trace)] == [text.format(number) for number in (9, 10, 11)]
    assert reasons(trace)[TAKEN].count == 3 and text.format(9) in reasons(trace)[TAKEN].examples[0]


@pytest.mark.parametrize(
    "marks",
    [
        [("layer 0", 0, 10), ("layer 1", 10, 10)],  # most launches fall outside
        [("layer 0", 0, 40), ("layer 1", 40, 40), ("layer 0", 100, 40), ("layer 1", 140, 40)],  # numbers begin again
        [("step 0", 0, 150), ("step 1", 100, 100)],  # overlapping
        [("step 0", 0, 200)],
        [("forward", 0, 100), ("forward", 100, 100)],
    ],
)
def test_other_annotations_are_no_steps(tmp_path, marks):
    w = Writer()
    for name, start, duration in marks:
        w.host(name, start, duration, "user_annotation")
    for start in range(5, 200, 20):
        w.device(GEMM, start + 3, 5, call=start)
    trace = w.read(tmp_path)
    assert not trace.steps and not trace.left_out


def test_marks_of_the_profiler_go_before_other_annotations(tmp_path):
    w = Writer().step(1, 0, 100).host("iteration 5", 0, 50, "user_annotation").host("iteration 6", 50, 50, "user_annotation").device(GEMM, 20, 5, call=10)
    trace = w.read(tmp_path)
    assert [step.name for step in trace.steps] == ["ProfilerStep#1"] and not trace.left_out


def test_the_last_step_of_hta_is_that_drawn_over_the_kernels(tmp_path):
    """It leaves out what was launched in the last step, which to it begins with the last event named so, here at 130 us and not at 100."""
    w = Writer().step(1, 0, 100).step(2, 100, 100).device(GEMM, 20, 5, call=10).device(GEMM, 125, 5, call=120).device(GEMM, 150, 5, call=140)
    for number, start in ((1, 20), (2, 130)):
        w.host(f"ProfilerStep#{number}", start, 50, "gpu_user_annotation")
    trace = w.read(tmp_path)
    assert_allclose(hta_times(trace).compute_time_s, 10e-6, rtol=1e-9)
    assert len(trace.steps) == 2


# Categories and streams


def test_categories_of_other_versions_are_read(tmp_path):
    w = Writer().device(GEMM, 20, 5, cat="kernel,cuda", call=10).device("CopyHostToDevice", 30, 5, cat="GPU_Memcpy")
    trace = w.device(GEMM, 40, 5, cat="Concurrent_kernel").read(tmp_path)
    times = times_of(trace)
    assert_allclose([times.compute_time_s, times.memory_time_s], [5e-6, 5e-6], rtol=1e-9)
    left = reasons(trace)["an event with a stream in a category that is not read"]
    assert left.count == 1 and "Concurrent_kernel" in left.examples[0]
    with pytest.raises(TraceError, match="Concurrent_kernel"):
        Writer().device(GEMM, 40, 5, cat="Concurrent_kernel").read(tmp_path)


@pytest.mark.parametrize("category", ["xpu_driver", "some_driver"])
def test_what_has_a_correlation_is_a_call(tmp_path, category):
    trace = Writer().device(GEMM, 20, 5).host("launch", 10, 2, category, correlation=1).read(tmp_path)
    assert_allclose(trace.events.launch_start_s, [-10e-6], rtol=1e-9)
    assert len(trace.launches) == 1 and not trace.left_out


def test_streams_in_words(tmp_path):
    w = Writer().device(GEMM, 0, 5, stream="7").device(GEMM, 10, 5)
    del w.events[1]["args"]["stream"]
    w.events[1]["tid"] = "stream 20"
    assert w.read(tmp_path).events.stream.tolist() == [7, 20]


@pytest.mark.parametrize("streams, alone", [((7, 7, 20, 7), 3), ((-1, -1, -1, -1), 2), ((7, 7, -1, 7), 3), ((-1, -1, 7, -1), 3)])
def test_a_kernel_without_a_stream_is_not_alone_beside_others(tmp_path, streams, alone):
    """Matmuls at 10, 30, 50 and 70 us; the copy at 35 us covers the second, and one more kernel the third where streams are not known."""
    w = Writer()
    mine, _, copy, _ = streams
    for start in (10, 30, 50, 70):
        w.host("aten::mm", start - 5, 3, **SHAPE).device(GEMM, start, 10, stream=mine, call=start - 4)
    w.device("Memcpy DtoD", 35, 10, stream=copy, cat="gpu_memcpy").device("other", 55, 10, stream=mine)
    trace = w.read(tmp_path)
    kernels, left = kernel_measurements([trace])
    assert kernels is not None and left[0].count == 4 - (alone if mine >= 0 else 2)
    assert not overlap_slowdowns(trace)


# Several ranks or devices in one file


def devices(*numbers, **meta):
    """A matmul of 10 us and an all-reduce of 20 us on each device, launched by one process; the first begins 5 us earlier from device to device."""
    w = Writer(**meta).step(1, 0, 200)
    for k, number in enumerate(numbers):
        w.device(GEMM, 50 - 5 * k, 10 + 10 * k, device=number, call=10 + k).device(NCCL, 80, 20, 20, device=number, call=30 + k)
    return w


def test_devices_of_a_file_without_a_rank_are_ranks(tmp_path):
    path = devices(0, 1, deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B"}]).write(tmp_path / "some.json")
    found = read_trace(path)
    assert [(trace.rank, trace.device, trace.accelerator, len(trace.events)) for trace in found] == [(0, -1, "A", 2), (1, -1, "B", 2)]
    assert_allclose([times_of(trace).compute_time_s for trace in found], [10e-6, 20e-6], rtol=1e-9)
    assert all(len(trace.steps) == 1 and not (trace.events.launch_start_s > trace.events.start_s).any() for trace in found)
    assert [item.reason for trace in found for item in trace.left_out] == [PARTS]
    matched, _ = match_collectives(found)
    assert matched is not None and matched.row.shape == (1, 2)


def test_devices_of_one_rank_keep_its_number(tmp_path):
    """The busiest first, which is the one compared with other ranks; a rank with several devices is not several traces of a rank."""
    for rank in (0, 1):
        devices(2 * rank, 2 * rank + 1, distributedInfo={"rank": rank, "world_size": 2}).write(tmp_path / f"rank{rank}.json")
    found, left = read_traces([tmp_path / "rank0.json", tmp_path / "rank1.json"])
    assert [(trace.rank, trace.device) for trace in found] == [(0, 1), (0, 0), (1, 3), (1, 2)]
    assert {item.reason for item in left} == {"several devices of one rank in one file, each shown for itself"}
    matched, _ = match_collectives(found)
    assert matched is not None and matched.ranks.tolist() == [0, 2]


@pytest.mark.parametrize("apart", ["devices", "processes", "both"])
def test_merged_ranks_are_taken_apart(tmp_path, apart):
    """Two ranks with the same correlations, the second 7 us later, so that its calls lie between those of the first and their kernels."""
    w = Writer(distributedInfo={"rank": 0, "world_size": 2})
    for rank in (0, 1):
        own, late = Writer(), 7 * rank
        own.step(1, late, 100).step(2, 100 + late, 100)
        for start in (10, 40, 110, 140):
            own.host("aten::mm", start + late, 5, **SHAPE).device(GEMM, start + 20 + late, 12, call=start + 1 + late)
        for event in own.events:
            on_host = "device" not in event["args"]
            event["pid"] += 1000 * rank if on_host or apart != "devices" else rank
            if not on_host and apart != "processes":
                event["args"]["device"] = rank
        w.events += own.events
    found = read_trace(w.write(tmp_path / "merged.json"))
    assert [(trace.rank, trace.device) for trace in found] == ([(0, -1), (1, -1)] if apart != "processes" else [(-1, 0), (-1, 0)])
    for trace in found:
        assert_allclose(trace.events.start_s - trace.events.launch_start_s, 19e-6, rtol=1e-9)
        assert [step.kernels for step in step_times(trace)] == [2, 2] and (trace.events.operator >= 0).all()
        assert not {item.reason for item in trace.left_out if "backwards" in item.reason or "overlapping" in item.reason}


def test_records_of_waiting_are_no_rank(tmp_path):
    w = Writer().device(GEMM, 20, 5, device=3).device("Context Sync", 30, 5, stream=-1, cat="cuda_sync", device=-1).device(GEMM, 40, 5, device=None)
    trace = w.device("Stream Sync", 30, 5, cat="cuda_sync", device=2).read(tmp_path)
    assert (trace.rank, trace.device, len(trace.events)) == (-1, -1, 4) and not trace.left_out


@pytest.mark.parametrize(
    "name, rank",
    [("rank7", 7), ("Rank7", 7), ("rank=7", 7), ("node0-rank_7.pt.trace", 7), ("worker7.1698001122.pt.trace", 7), ("trace_7", 7), ("worker3_rank7", 7),
     ("my_rank10_test_rank7", 7), ("rank7_of_8", 7), ("trace_20240131", -1), ("host_123.1698001122.pt.trace", -1), ("trace", -1)],
)  # fmt: skip
def test_rank_from_the_name_of_a_file(tmp_path, name, rank):
    (trace,) = read_trace(Writer().device(GEMM, 0, 5).write(tmp_path / f"{name}.json"))
    assert trace.rank == rank
