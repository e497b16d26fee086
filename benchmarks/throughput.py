"""Speed of diffperf on this machine: `python benchmarks/throughput.py [--json FILE] [--repeats N]`.

Every row says what it times. Compilation is timed apart; clocks stop after `jax.block_until_ready`; rates are of the median call, with the best beside it
(on a shared machine the median is the machine's, the best is the code's). float32, one process.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

import jax
import numpy as np

from diffperf.estimate import BatchStep, bind_step, train_step
from diffperf.hardware import load_system
from diffperf.io import write_atomic
from diffperf.parallel import make_plan
from diffperf.stack import load_stack
from diffperf.tune import tune_plan
from diffperf.workload import transformer

ROWS = 16384
SETUP = "import time, jax; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
ROOMS = ("diffperf", "diffperf.hardware", "diffperf.workload", "diffperf.parallel", "diffperf.stack", "diffperf.estimate", "diffperf.tune", "diffperf.sweep")


def seconds(fn, *args):
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def times(fn, *args, repeats):
    """Median and smallest run time after warm-up. [s]"""
    for _ in range(3):
        seconds(fn, *args)
    runs = [seconds(fn, *args) for _ in range(repeats)]
    return statistics.median(runs), min(runs)


def compiled(fn, *args):
    """The executable and the seconds to trace and compile it."""
    start = time.perf_counter()
    executable = jax.jit(fn).lower(*args).compile()
    return executable, time.perf_counter() - start


def row(what, value, unit, target=None, best=None, higher=True):
    met = None if target is None else bool(value >= target if higher else value <= target)
    return {"what": what, "value": value, "best": best, "unit": unit, "target": target, "target_is": "at least" if higher else "at most", "met": met}


def import_seconds(repeats=3):
    """Best of a few fresh interpreters: importing every room after jax. [s]"""
    program = SETUP.format("; ".join(f"import {room}" for room in ROOMS))
    runs = [float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout) for _ in range(repeats)]
    return statistics.median(runs), min(runs)


def measure(repeats):
    model = transformer(hidden=8192, layers=80, num_heads=64, num_kv_heads=8, ffn_hidden=28672, vocab=32000, seq_len=4096)  # Llama 2 70B
    system, stack = load_system("h100_sxm", num_devices=1024), load_stack("typical")
    plan = make_plan(global_batch_size=1024, tensor_parallel=8, pipeline_parallel=4, data_parallel=32)
    rng = np.random.default_rng(0)
    scaled = lambda x: (np.asarray(x) * rng.choice([1.0, 2.0], (ROWS, *x.shape))).astype(x.dtype)
    plans = jax.tree.map(lambda x: jax.numpy.asarray(scaled(x)), plan)
    rows = []

    batched, compile_batched = compiled(jax.vmap(train_step, (None, None, 0, None)), model, system, plans, stack)
    median, best = times(batched, model, system, plans, stack, repeats=repeats)
    what = f"train_step under vmap: all {len(jax.tree.leaves(plan))} plan leaves batched over {ROWS:,} rows, every Estimate leaf returned"
    rows.append(row(what, ROWS / median, "1/s", 1e6, ROWS / best))

    engine = BatchStep(model, system, plan, stack)
    slots = np.array([engine.names.index(f"plan.{name}") for name in ("micro_batch_size", "recompute_full", "pipeline_parallel", "data_parallel")])
    values = rng.choice([1.0, 2.0, 4.0], (len(slots), engine.block))
    values[1] = rng.random(engine.block)
    median, best = times(lambda: engine(slots, values).estimate, repeats=repeats)
    what = f"the engine of tune and sweep: any numbers of model, system, plan and stack, from NumPy, {engine.block:,} rows"
    rows.append(row(what, engine.block / median, "1/s", None, engine.block / best))

    time_of = lambda system, model, plan, stack: train_step(model, system, plan, stack).step_time
    slope, compile_slope = compiled(jax.vmap(jax.value_and_grad(time_of), (None, None, 0, None)), system, model, plans, stack)
    median, best = times(slope, system, model, plans, stack, repeats=repeats)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(system))
    rows.append(row(f"step time and its gradient in all {numbers} numbers of System, {ROWS:,} rows", ROWS / median, "1/s", 1e5, ROWS / best))

    start = time.perf_counter()
    step = jax.jit(train_step)
    jax.block_until_ready(step(model, system, plan, stack))
    compile_one = time.perf_counter() - start
    bound, alone = bind_step(model, system, stack), jax.jit(time_of)
    median, best = times(step, model, system, plan, stack, repeats=50 * repeats)
    inputs, outputs = len(jax.tree.leaves((model, system, plan, stack))), len(jax.tree.leaves(step(model, system, plan, stack)))
    rows.append(row(f"one warm call, jax.jit(train_step)(model, system, plan, stack): {inputs} leaves in, {outputs} out", median * 1e6, "us", None, best * 1e6))
    median, best = times(bound, plan, repeats=50 * repeats)
    what = f"one warm call, bind_step(model, system, stack)(plan): only the plan's leaves flattened per call, {outputs} out"
    rows.append(row(what, median * 1e6, "us", 200, best * 1e6, False))
    median, best = times(alone, system, model, plan, stack, repeats=50 * repeats)
    rows.append(row(f"one warm call, jax.jit of the step time alone: {inputs} leaves in, 1 out", median * 1e6, "us", None, best * 1e6))

    rows.append(row("trace and compile train_step, first call included", compile_one, "s", 8, higher=False))
    rows.append(row("trace and compile train_step under vmap", compile_batched, "s", 8, higher=False))
    rows.append(row("trace and compile its value and gradient under vmap", compile_slope, "s", 8, higher=False))
    median, best = import_seconds()
    rows.append(row(f"import of {', '.join(ROOMS)}, after jax, fresh interpreter", median, "s", 0.5, best, False))

    tune = lambda: tune_plan(model, system, stack, num_devices=1024, global_batch_size=1024)
    first = tune()
    runs = [tune() for _ in range(5)]
    rows.append(row("tune Llama 2 70B on 1,024 H100: legal plans, all evaluated", first.num_legal, "plans"))
    rows.append(row("the same: first call, compilation apart", first.run_seconds, "s", 5, higher=False))
    rows.append(row("the same: compilation of the first call", first.compile_seconds, "s"))
    later = [result.run_seconds for result in runs]
    rows.append(row("the same: later calls, with refinement by gradients", statistics.median(later), "s", 5, min(later), False))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of a batch; single calls are timed 50 times as often")
    options = parser.parse_args()
    from rich.console import Console
    from rich.table import Table

    rows = measure(options.repeats)
    where = {
        "device": jax.devices()[0].device_kind, "devices": len(jax.devices()), "processor": platform.processor() or platform.machine(),
        "dtype": str(jax.numpy.zeros(()).dtype), "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "equinox", "numpy")},
    }  # fmt: skip
    table = Table(title=", ".join(f"{name} {value}" for name, value in where.items()))
    table.add_column("what", max_width=76)
    for column in ("median", "best", "unit", "target"):
        table.add_column(column, justify="right")
    number = lambda x: "" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
    for r in rows:
        target = "" if r["target"] is None else f"{r['target_is']} {number(r['target'])}: {'met' if r['met'] else 'missed'}"
        table.add_row(r["what"], number(r["value"]), number(r["best"]), r["unit"], target)
    Console(width=160).print(table)
    if options.json:
        write_atomic(options.json, json.dumps({"where": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
