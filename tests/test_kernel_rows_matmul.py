"""From a table of matmuls to rows that can be fitted: family, peak, bytes, library, groups, and what is left out."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.calibrate.kernels import _rows_matmul
from diffperf.io import read_kernels


def table(**columns):
    count = max(len(x) for x in columns.values())
    usual = dict(gpu=["h100"], op=["gemm"], dtype=["bf16"], library=["trtllm"], m=[128.0], n=[4096.0], k=[2048.0], time_us=[50.0], flag=[""])
    return read_kernels({name: list(values) * (count if len(values) == 1 else 1) for name, values in {**usual, **columns}.items()})


@pytest.mark.parametrize(
    ("datatype", "library", "family", "peak", "key", "nbytes"),
    [
        ("bf16", "trtllm", "matmul", "bf16", "trtllm", (2, 2, 2)),
        ("float16", "vidur", "matmul", "fp16", "vidur", (2, 2, 2)),
        ("fp8", "vllm", "matmul_quantised", "fp8", "vllm", (1, 1, 2)),  # the timed call quantises
        ("fp8", "infersim", "matmul", "fp8", "infersim", (1, 1, 2)),  # it multiplies only
        ("fp8_block", "trtllm", "matmul_quantised", "fp8", "trtllm/fp8_block", (1, 1, 2)),
        ("nvfp4", "trtllm", "matmul_quantised", "nvfp4", "trtllm", (0.5625, 0.5625, 2)),
        ("sq", "trtllm", "matmul_quantised", "int8", "trtllm", (1, 1, 2)),
        ("int4_wo", "trtllm", "matmul", "fp16", "trtllm/int4_weight_only", (2, 0.5, 2)),
        ("float32", "torch", "matmul_fp32", "fp32", "torch", (4, 4, 4)),
        ("bf16xbf16->f32", "xla", "matmul", "bf16", "xla", (2, 2, 4)),
    ],
)
def test_family_peak_library_and_bytes(datatype, library, family, peak, key, nbytes):
    (found,) = _rows_matmul.rows(table(dtype=[datatype], library=[library]))
    assert (found.family.name, found.datatype[0], found.library[0], found.group[0]) == (family, peak, key, "4096x2048")
    assert_allclose((found.shape.a_bytes[0], found.shape.b_bytes[0], found.shape.c_bytes[0]), nbytes)
    assert_allclose(found.time, 50e-6)
    assert found.shape.cold[0] == 0 and found.shape.batch[0] == 1


def test_batches_of_torch_are_another_library():
    (found,) = _rows_matmul.rows(table(op=["linear", "bmm"], b=[1.0, 12.0], library=["torch"], time_us=[50.0, 600.0]))
    assert list(found.library) == ["torch", "torch/bmm"] and list(found.shape.batch) == [1, 12]


def test_what_is_left_out_is_counted():
    m = [16.0, 32.0, 64.0, 128.0, 256.0]
    spike = table(m=m, time_us=[10.0, 11.0, 40.0, 13.0, 14.0])
    (found,) = _rows_matmul.rows(spike)
    assert list(found.shape.m) == [16, 32, 128, 256] and list(found.row) == [0, 1, 3, 4] and list(found.left_out.values()) == [1]
    growing = table(m=m, time_us=[10.0, 30.0, 90.0, 270.0, 800.0])
    assert len(_rows_matmul.rows(growing)[0]) == 5
    flagged = table(m=m, flag=["above_peak_flops", "above_peak (efficiency>1)", "dispatch_overhead_dominated", "host_launch_overhead_suspected", "slow"])
    (found,) = _rows_matmul.rows(flagged)
    assert list(found.shape.m) == [256] and sorted(found.left_out.values()) == [2, 2]
    (host,) = _rows_matmul.rows(table(dtype=["fp8_block"], library=["vllm"]))
    assert len(host) == 0 and sum(host.left_out.values()) == 1
    (unknown,) = _rows_matmul.rows(table(dtype=["fp6"]))
    assert len(unknown) == 0 and sum(unknown.left_out.values()) == 1


def test_a_table_without_matmuls_has_no_rows():
    assert _rows_matmul.rows(table(op=["softmax"])) == []
    assert np.isin(_rows_matmul.OPERATORS, ("matmul", "batched_matmul")).all()
