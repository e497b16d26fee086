"""Traces written here, whose times are known by hand, for tests."""

import json

from diffperf.io.traces import read_trace

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
