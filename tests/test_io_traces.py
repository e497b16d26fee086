"""Traces of PyTorch, written here so that their times are known by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from written_traces import GEMM, NCCL, Writer

from diffperf.io.traces import (
    COMMUNICATION,
    COMPUTE,
    MEMORY,
    OTHER,
    SYNCHRONISATION,
    Inputs,
    collective_of_kernel,
    kernel_times,
    kind_of,
    kind_times,
    rank_dict,
    step_times,
    times_of,
    work_of,
)
from diffperf.io.traces._intervals import accompanied, covered, length
from diffperf.io.traces._nesting import innermost, nest

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


@given(PIECES, st.lists(st.integers(-1, 2), min_size=12, max_size=12), st.lists(st.booleans(), min_size=12, max_size=12))
def test_company_agrees_with_looking_at_all(pieces, lanes, by):
    n = len(pieces)
    start, end = np.array([float(a) for a, _ in pieces]), np.array([float(a + size) for a, size in pieces])
    beside = lambda i, j: min(end[i], end[j]) > max(start[i], start[j])
    expected = [any(j != i and by[j] and (lanes[i] != lanes[j] or lanes[i] < 0) and beside(i, j) for j in range(n)) for i in range(n)]
    assert accompanied(start, end, np.array(lanes[:n], int), np.array(by[:n], bool)).tolist() == expected


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
        ("void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("void mscclpp::collective::allreduceAllPairs<(mscclpp::ReduceOp)0, float>()", COMMUNICATION),
        ("all_reduce_kernel", COMMUNICATION),
        ("void quickreduce::allreduce_prototype_twoshot<float>()", COMMUNICATION),
        ("kuserbuffers_pushrecv(int)", COMMUNICATION),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs", COMMUNICATION),
        ("void c10d::symmetric_memory::(anonymous namespace)::multimem_all_gather_kernel<16>(char*)", COMMUNICATION),
        ("void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(aiter::RankData*)", COMMUNICATION),
        ("void tensorrt_llm::kernels::moeAllToAllKernel<8>(int)", COMMUNICATION),
        ("void deep_ep::internode_ll::dispatch<true, 4, 8>(void*)", COMMUNICATION),
        ("void nvshmem_alltoall_kernel(long*)", COMMUNICATION),
        ("triton_poi_fused_all_gather_into_tensor_wait_tensor_1", COMPUTE),
        ("triton_red_fused_all_reduce_add_0", COMPUTE),
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


@pytest.mark.parametrize(
    "name, category, kind", [("Stream Sync", "cuda_sync", SYNCHRONISATION), ("CopyHostToDevice", "gpu_memcpy", MEMORY), ("FillBuffer", "gpu_memset", MEMORY)]
)
def test_the_category_goes_before_the_name(name, category, kind):
    assert kind_of(name, category) == kind


def test_names_of_collective_kernels():
    assert collective_of_kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)") == ("all_reduce", "ring", "ll")
    assert collective_of_kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevComm*)") == ("reduce_scatter", "ring", "ll")
    assert collective_of_kernel("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL128") == ("all_reduce", "tree", "ll128")
    assert collective_of_kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)") == ("send_recv", "", "")  # placeholders
    assert collective_of_kernel("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymkDevWorkArgs4K)")[0] == "all_reduce"
    assert collective_of_kernel("void ncclDevKernel_AllGather_RING_LL(x)") == ("all_gather", "ring", "ll")
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
