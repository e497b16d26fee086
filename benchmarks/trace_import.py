"""Time and peak memory of reading a large Kineto trace.

    python benchmarks/trace_import.py [--mb 200] [--json OUT]

Writes a synthetic trace of about that size to a temporary folder, with the mix of events of a real one (Python frames, operators with shapes, launches,
flow arrows, kernels, collectives), reads it in a process of its own, and prints seconds, MB per second and the peak of resident memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float>>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"


def write(path: Path, megabytes: float) -> None:
    """A trace of about `megabytes`, a step every 2,000 operators."""
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


def read(path: str) -> dict[str, float]:
    """Seconds and peak memory of reading and summing up, in this process."""
    from diffperf.io.traces import rank_dict, read_trace

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.process_time()
    (trace,) = read_trace(path)
    middle = time.process_time()
    rank_dict(trace)
    end = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return dict(read_cpu_s=middle - start, summary_cpu_s=end - middle, events=len(trace.events), peak_bytes=peak, before_bytes=before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=200.0, help="size of the trace, 1e6 bytes")
    parser.add_argument("--json", help="also write the figures there")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write(path, args.mb)
        size = path.stat().st_size
        done = subprocess.run([sys.executable, __file__, "--read", str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout) | {"bytes": size}
    rate = size / 1e6 / found["read_cpu_s"]
    print(f"{size / 1e6:,.0f} MB, {found['events']:,} kernels: read in {found['read_cpu_s']:.1f} s of CPU time ({rate:.0f} MB/s), "
          f"summed up in {found['summary_cpu_s']:.1f} s, peak memory {found['peak_bytes'] / 1e6:,.0f} MB, of which {found['before_bytes'] / 1e6:,.0f} MB "
          "before it")  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
