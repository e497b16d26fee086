"""Time and peak memory of reading a large trace.

    python benchmarks/trace_import.py [--format kineto|xplane|chakra] [--mb 200] [--json OUT]

Writes a synthetic trace of about that size to a temporary folder, reads it in a process of its own, and prints seconds, MB per second and the peak of
resident memory. The mix of events is that of real files: for Kineto Python frames, operators with shapes, launches, flow arrows, kernels, collectives; for
XSpace one half of the bytes on the host and one half kernels of eight devices with seven statistics each (recorded files hold more of the host); for Chakra
operators and kernels with dependencies and attributes.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
DEVICES, STREAMS = 8, (16, 20)


def write_kineto(path: Path, megabytes: float) -> None:
    """A step every 2,000 operators."""
    with open(path, "w") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}, "traceEvents": [\n')
        step = lambda k: {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{k // 2000}", "pid": 1, "tid": 1, "ts": 10.0 * k, "dur": 19999.0}
        k = 0
        while file.tell() < megabytes * 1e6:
            time_us, collective = 10.0 * k, k % 50 == 0
            op = {"External id": k, "Record function id": 0, "Concrete Inputs": ["", ""], "Input type": ["float", "float"], "Ev Idx": k,
                  "Input Dims": [[1024, 64 * (k % 8 + 1)], [64 * (k % 8 + 1), 512]], "Input Strides": [[512, 1], [512, 1]]}  # fmt: skip
            work = {"External id": k, "queued": 0, "device": 0, "context": 1, "stream": 20 if collective else 7, "correlation": k, "registers per thread": 32,
                    "shared memory": 0, "blocks per SM": 4.74, "warps per SM": 75.85, "grid": [512, 1, 1], "block": [256, 1, 1]}  # fmt: skip
            if collective:
                work |= {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": 2, "dtype": "Float"}
            events = [step(k)] if k % 2000 == 0 else []
            events += [{"ph": "X", "cat": "python_function", "name": f"torch/nn/modules/module.py({k % 900}): _call_impl", "pid": 1, "tid": 1, "ts": time_us,
                        "dur": 9.0, "args": {"Python parent id": k, "Python id": 4 * k + j}} for j in range(4)]  # fmt: skip
            events += [
                {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": time_us, "dur": 8.5, "args": op},
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": time_us + 1.25, "dur": 3.125,
                 "args": {"External id": k, "cbid": 211, "correlation": k}},
                {"ph": "s", "id": k, "pid": 1, "tid": 1, "ts": time_us + 1.25, "cat": "ac2g", "name": "ac2g"},
                {"ph": "f", "id": k, "pid": 0, "tid": 7, "ts": time_us + 6.5, "cat": "ac2g", "name": "ac2g", "bp": "e"},
                {"ph": "X", "cat": "kernel", "name": ALL_REDUCE if collective else KERNEL, "pid": 0, "tid": 7, "ts": time_us + 6.5,
                 "dur": 60.0 if collective else 7.5, "args": work},
            ]  # fmt: skip
            file.write(("" if k == 0 else ",\n") + ",\n".join(map(json.dumps, events)))
            k += 1
        file.write("\n]}\n")


def varint(value: int) -> bytes:
    """A number in the wire format of protocol buffers."""
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes((*data, value))


def field(number: int, value: int | bytes | str) -> bytes:
    """A field in the wire format of protocol buffers."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def write_xplane(path: Path, megabytes: float) -> None:
    """Kernels of 8 us on a stream, a collective after every 20, on 32 different launch shapes."""
    words = ["correlation_id", "kernel_details", "tf_op", "name", "hlo_op", "hlo_module", "program_id"]
    details = [f" regs:32 static_shared:0 dynamic_shared:0 grid:{64 * (k + 1)},1,1 block:256,1,1 occ_pct:100" for k in range(32)]
    strings = words + details  # a string of an event is the key of a name
    stats = b"".join(field(5, field(1, key) + field(2, field(1, key) + field(2, name))) for key, name in enumerate(strings, 1))
    stats += field(5, field(1, 99) + field(2, field(1, 99) + field(2, "core_count"))) + field(6, field(1, 99) + field(3, 132))
    names = b"".join(field(4, field(1, key) + field(2, field(1, key) + field(2, ALL_REDUCE if key == 21 else f"fusion.{key}"))) for key in range(1, 22))
    same = b"".join(field(4, field(1, key) + field(7, key)) for key in range(3, 7)) + field(4, field(1, 7) + field(3, 123456))

    def events(nbytes: float, k: int) -> Iterator[bytes]:
        while nbytes > 0:
            own = field(4, field(1, 1) + field(3, k)) + field(4, field(1, 2) + field(7, 8 + k % 32))
            event = field(4, field(1, k % 21 + 1) + field(2, 10_000_000 * k) + field(3, 8_000_000 if k % 21 < 20 else 60_000_000) + own + same)
            nbytes -= len(event)
            k += 1
            yield event

    lines = lambda each: b"".join(field(3, field(1, stream) + field(2, f"Stream #{stream}(Kernel)") + field(3, 1000) + b"".join(events(each, stream)))
                                  for stream in STREAMS)  # fmt: skip
    python = field(4, field(1, 3) + field(2, 123_456_789) + field(3, 987_654) + field(4, field(1, 1) + field(5, "module.py(77): _call_impl")))
    with open(path, "wb") as file:
        for device in range(DEVICES):
            body = lines(megabytes * 1e6 / 2 / DEVICES / len(STREAMS))
            file.write(field(1, field(1, device) + field(2, f"/device:GPU:{device}") + body + names + stats))
        head, name, count = field(2, "/host:CPU"), field(2, "python"), int(megabytes * 1e6 / 2 / len(python))
        line = varint(3 << 3 | 2) + varint(len(name) + count * len(python)) + name
        file.write(varint(1 << 3 | 2) + varint(len(head) + len(line) + count * len(python)) + head + line)
        for first in range(0, count, 10_000):
            file.write(python * min(10_000, count - first))


def write_chakra(path: Path, megabytes: float) -> None:
    """An operator and its kernel in turn, each after the one before."""
    flag = lambda value: field(10, field(1, "is_cpu_op") + field(27, value))
    more = field(10, field(1, "rf_id") + field(9, 12345)) + field(10, field(1, "op_schema") + field(13, "aten::mm(Tensor self, Tensor mat2) -> Tensor"))
    inputs = field(8, field(1, "[[1024, 64], [64, 512]]") + field(2, "[[1024, 64]]") + field(3, "['Tensor(float)']"))
    with open(path, "wb") as file:
        first, k = field(1, "0.0.4"), 1
        file.write(varint(len(first)) + first)
        while file.tell() < megabytes * 1e6:
            waits, host = field(5, varint(k - 1)) if k > 1 else b"", k % 2
            name = "aten::mm" if host else ALL_REDUCE if k % 100 == 0 else KERNEL
            node = field(1, k) + field(2, name) + field(3, 7 if name == ALL_REDUCE else 4) + waits + field(7, 8) + inputs + flag(host) + more
            file.write(varint(len(node)) + node)
            k += 1


FORMATS = {"kineto": (write_kineto, "trace.json"), "xplane": (write_xplane, "host.xplane.pb"), "chakra": (write_chakra, "chakra.0.et")}


def read(path: str) -> dict[str, float]:
    """Seconds and peak memory of reading and summing up, in this process."""
    from diffperf.io.traces import RankTrace, rank_dict, read_trace, step_times

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.process_time()
    found = read_trace(path)
    middle = time.process_time()
    for trace in found:
        rank_dict(trace)
        if isinstance(trace, RankTrace):
            step_times(trace)
    end = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    events = sum(len(trace.events) if isinstance(trace, RankTrace) else len(trace) for trace in found)
    return dict(read_cpu_s=middle - start, summary_cpu_s=end - middle, events=events, peak_bytes=peak, before_bytes=before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=list(FORMATS), default="kineto", help="of the trace")
    parser.add_argument("--mb", type=float, default=200.0, help="size of the trace, 1e6 bytes")
    parser.add_argument("--json", help="also write the figures there")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.read)))
        return
    write, name = FORMATS[args.format]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path, args.mb)
        size = path.stat().st_size
        done = subprocess.run([sys.executable, __file__, "--read", str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout) | {"bytes": size, "format": args.format}
    rate = size / 1e6 / found["read_cpu_s"]
    print(f"{args.format}, {size / 1e6:,.0f} MB, {found['events']:,} kernels or nodes: read in {found['read_cpu_s']:.1f} s of CPU time ({rate:.0f} MB/s), "
          f"summed up in {found['summary_cpu_s']:.1f} s, peak memory {found['peak_bytes'] / 1e6:,.0f} MB, of which {found['before_bytes'] / 1e6:,.0f} MB "
          "before it")  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
