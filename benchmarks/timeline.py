"""Speed of the longest path, and closed forms against it: `python benchmarks/timeline.py [--json FILE] [--repeats N] [--tasks N] [--plans N]`.

Speed: a graph of 10,000 tasks, the timeline of a step and random ones, in float64. Compilation is timed apart; clocks stop after `jax.block_until_ready`;
forward and gradient run turn about. Run it with `taskset -c 0` for one core. Agreement: step time of the closed form over that of the timeline, both in times
of one micro-batch, on a grid of stages, micro-batches and virtual stages, for weight-gradient shares of a third, a quarter and a fifth of the passes, and,
where the closed form is for any ratio, forward to backward times of 1:1, 1:2 and 1:3. Below it what a closed form leaves out: input gradients that take
longer than the forward pass. Last, `train_step` against the timeline of whole steps: some by name, and plans drawn at random that run and fit in memory.
"""

import argparse
import json
import platform
import random
import statistics
import time
from importlib.metadata import version

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from diffperf.estimate.timeline import Task, finish_times, makespan, pipeline_timeline, step_timeline, task_graph
from diffperf.estimate.timeline._longest_path import host_schedule
from diffperf.estimate.timeline._step import step_numbers
from diffperf.hardware import load_system
from diffperf.io import write_atomic
from diffperf.parallel import PlanError, make_plan
from diffperf.parallel._schedule import bubble_slots
from diffperf.stack import load_stack
from diffperf.workload import load_model

RELAXED = 0.05  # temperature of the relaxed row
FORWARD_GOAL, GRADIENT_GOAL, AGREEMENT_GOAL = 0.020, 0.060, 0.01
SCHEDULES = (("gpipe", "1f1b", (1, 2)), ("1f1b", "1f1b", (1, 2, 4)), ("zb-h1", "zero-bubble", (1,)), ("zb-v", "zero-bubble", (2,)),
             ("dualpipe", "dualpipe", (1,)))  # fmt: skip
STEPS = {
    "one device": ("llama-3.1-8b", dict(global_batch_size=8)),
    "tensor 4": ("llama-3.1-8b", dict(global_batch_size=32, tensor_parallel=4)),
    "1F1B": ("llama-3.1-8b", dict(global_batch_size=128, tensor_parallel=2, pipeline_parallel=4, data_parallel=4)),
    "interleaved": ("llama-3.1-8b", dict(global_batch_size=128, tensor_parallel=2, pipeline_parallel=4, data_parallel=4, virtual_stages=2)),
    "ZB-H1": ("llama-3.1-8b", dict(global_batch_size=128, tensor_parallel=2, pipeline_parallel=4, data_parallel=4, schedule="zero-bubble")),
    "ZB-V": ("llama-3.1-8b", dict(global_batch_size=128, tensor_parallel=2, pipeline_parallel=4, data_parallel=4, schedule="zero-bubble", virtual_stages=2)),
    "DualPipe": ("llama-3.1-8b", dict(global_batch_size=128, tensor_parallel=2, pipeline_parallel=4, data_parallel=4, schedule="dualpipe")),
    "FSDP": ("llama-3.1-8b", dict(global_batch_size=128, data_parallel=32, zero_stage=3)),
    "ZeRO 2, 1F1B": ("llama-3.1-8b", dict(global_batch_size=128, pipeline_parallel=4, data_parallel=8, zero_stage=2)),
    "ZeRO 2": ("llama-3.1-8b", dict(global_batch_size=128, data_parallel=32, zero_stage=2)),
    "ring": ("llama-3.1-8b", dict(global_batch_size=128, tensor_parallel=2, context_parallel=4, data_parallel=4)),
    "experts, whole": ("mixtral-8x7b", dict(global_batch_size=32, tensor_parallel=8, pipeline_parallel=4)),
    "experts": ("mixtral-8x7b", dict(global_batch_size=128, data_parallel=16, expert_parallel=8, pipeline_parallel=4)),
}


def seconds(fn, *args):
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - start


def random_graph(tasks, streams):
    """Tasks that each wait for two of the 60 before them, besides their stream."""
    rng = np.random.default_rng(0)
    before = [set(rng.integers(max(0, i - 60), i, 2).tolist()) if i else () for i in range(tasks)]
    return task_graph([Task(f"t{i}", "compute", i % streams, "s", tuple(f"t{j}" for j in some)) for i, some in enumerate(before)])


def speed(name, graph, durations, repeats):
    """Median and best seconds of forward and gradient, in turn, with their compile times and the build on the host."""
    row = {"graph": name, "tasks": len(graph.tasks), "rows": int(graph.before.shape[0])}
    relaxed = lambda d: makespan(graph, d, RELAXED)
    programs = {"forward": lambda d: makespan(graph, d), "gradient": jax.value_and_grad(lambda d: makespan(graph, d)), "relaxed": jax.value_and_grad(relaxed)}
    compiled, runs = {}, {key: [] for key in programs}
    for key, fn in programs.items():
        start = time.perf_counter()
        compiled[key] = jax.jit(fn).lower(durations).compile()
        row[f"{key}_compile_s"] = time.perf_counter() - start
        seconds(compiled[key], durations)
    for _ in range(repeats):
        for key in programs:
            runs[key].append(seconds(compiled[key], durations))
    for key, some in runs.items():
        row[f"{key}_s"], row[f"{key}_best_s"] = statistics.median(some), min(some)
    row["gradient_over_forward"] = statistics.median(g / f for f, g in zip(runs["forward"], runs["gradient"], strict=True))
    start = time.perf_counter()
    host = host_schedule(graph, durations)
    row["python_loop_s"] = time.perf_counter() - start
    row["loop_over_scan"] = row["python_loop_s"] / row["forward_s"]
    value, slope = compiled["gradient"](durations)
    on_path = np.zeros(len(graph.tasks))
    on_path[host.critical] = 1
    row["gradient_is_the_critical_path"] = bool(np.array_equal(slope, on_path)) and bool(np.isclose(value, host.finish.max()))
    return row


def agreement():
    """Closed form against timeline for every schedule: the worst over the grid, and how many points it has."""
    rows = []
    for schedule, name, chunks in SCHEDULES:
        worst, points, unlike = 0.0, 0, 0.0
        for p in (2, 4, 8):
            for v in chunks:
                for m in micro_batches(schedule, p, v):
                    splits = [((1 - w) / 2, (1 - w) / 2, w) for w in (1 / 3, 1 / 4, 1 / 5)]
                    if name == "1f1b":
                        splits = [(1 / (1 + ratio), ratio / (1 + ratio), 0.0) for ratio in (1, 2, 3)]
                    for split in splits:
                        worst, points = max(worst, abs(_off(schedule, name, p, m, v, *split))), points + 1
                    if name != "1f1b":
                        for longer in (1.2, 2.0):
                            total = 2.0 + longer
                            unlike = max(unlike, abs(_off(schedule, name, p, m, v, 1 / total, longer / total, 1 / total)))
        rows.append({"schedule": schedule, "points": points, "worst": worst, "met": worst <= AGREEMENT_GOAL, "worst_unequal_passes": unlike or None})
    return rows


def micro_batches(schedule, stages, virtual_stages):
    """Numbers of micro-batches on the grid, short steps included: those that the schedule can run."""
    if schedule == "dualpipe":
        return (2 * stages, 4 * stages)
    if schedule != "zb-v" and virtual_stages > 1:  # interleaved: rounds of as many as there are stages
        return (stages, 2 * stages, 4 * stages)
    return sorted({1, stages // 2, stages, stages * 3 // 2, 2 * stages, 4 * stages})


def _off(schedule, name, p, m, v, forward, backward, weight):
    plan = make_plan(global_batch_size=m, pipeline_parallel=p, virtual_stages=v, schedule=name)
    timeline = pipeline_timeline(schedule, stages=p, micro_batches=m, virtual_stages=v, forward=forward, backward=backward, weight=weight)
    return float((m + bubble_slots(plan, weight)) / jnp.max(finish_times(timeline.graph, timeline.durations)) - 1)


def whole_steps():
    """`train_step` against the timeline, with what the stack says, and with the fitted factor on the bubble taken out."""
    system, stack = load_system("h100_sxm", num_devices=64), load_stack("typical")
    whole = eqx.tree_at(lambda s: s.bubble_factor, stack, jnp.asarray(1.0, float))
    rows = []
    for name, (model, words) in STEPS.items():
        plan = make_plan(**words)
        timeline, unfitted = (step_timeline(load_model(model), system, plan, s) for s in (stack, whole))
        line, form = float(timeline.makespan), float(timeline.closed_form)
        off = float(unfitted.makespan / unfitted.closed_form - 1)
        rows.append({"step": name, "tasks": len(timeline.graph.tasks), "timeline_s": line, "train_step_s": form, "off": line / form - 1,
                     "off_whole_bubble": off})  # fmt: skip
    return rows


DRAWN = dict(
    tensor_parallel=(1, 2, 4, 8), pipeline_parallel=(1, 1, 2, 4, 8), context_parallel=(1, 1, 2), data_parallel=(1, 2, 4, 8, 16), zero_stage=(0, 1, 2, 3),
    micro_batch_size=(1, 2), virtual_stages=(1, 1, 2), schedule=("1f1b", "1f1b", "zero-bubble", "dualpipe"), recompute=("none", "selective", "full"),
)  # fmt: skip
DRAWN_MODELS, DRAWN_SYSTEMS = ("llama-3.1-8b", "mixtral-8x7b", "llama-3.1-70b"), ("h100_sxm", "a100_sxm_80", "mi300x", "b200_sxm")


def drawn_steps(count):
    """Makespan over `train_step` with the whole bubble, less 1, of plans drawn at random, and the plan that is farthest off."""
    draw = random.Random(0)
    whole = eqx.tree_at(lambda s: s.bubble_factor, load_stack("typical"), jnp.asarray(1.0, float))
    models = {name: load_model(name) for name in DRAWN_MODELS}
    found = []
    while len(found) < count:
        words = {name: draw.choice(choices) for name, choices in DRAWN.items()}
        model = draw.choice(DRAWN_MODELS)
        if model == "mixtral-8x7b":
            words["expert_parallel"] = draw.choice((1, 2, 4, 8))
        words["global_batch_size"] = words["data_parallel"] * words["micro_batch_size"] * draw.choice((1, 4, 8, 16))
        devices = words["tensor_parallel"] * words["pipeline_parallel"] * words["context_parallel"] * words["data_parallel"]
        system = load_system(draw.choice(DRAWN_SYSTEMS), num_devices=devices)
        try:
            plan = make_plan(**words)
            if not step_numbers(models[model], system, plan, whole)[1].feasible:
                continue
            timeline = step_timeline(models[model], system, plan, whole)
        except PlanError:
            continue
        used = [f"{name} {value}" for name, value in words.items() if value not in (1, "1f1b", "none")]
        found.append((float(timeline.makespan / timeline.closed_form - 1), ", ".join([model, *used])))
    off = sorted(abs(one) for one, _ in found)
    worst = max(found, key=lambda one: abs(one[0]))
    return {"count": count, "median": statistics.median(off), "p90": off[int(0.9 * count)], "worst": worst[0], "worst_plan": worst[1]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--plans", type=int, default=60, help="drawn at random")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    model, system, stack = load_model("llama-3.1-8b"), load_system("h100_sxm", num_devices=64), load_stack("typical")
    plan = make_plan(global_batch_size=128, tensor_parallel=2, pipeline_parallel=4, data_parallel=4, schedule="zero-bubble")
    start = time.perf_counter()
    step = step_timeline(model, system, plan, stack)
    first = time.perf_counter() - start
    start = time.perf_counter()
    step_timeline(model, system, plan, stack)
    again = time.perf_counter() - start
    durations = jnp.array(np.random.default_rng(1).random(args.tasks))
    fast = [speed(f"random, {streams} streams", random_graph(args.tasks, streams), durations, args.repeats) for streams in (1, 8, 256)]
    fast.append(speed("a step (ZB-H1)", step.graph, step.durations, args.repeats))
    print(f"{platform.processor() or platform.machine()}, jax {version('jax')}, float64, median of {args.repeats} (best)")
    print(f"laying out a step of {len(step.graph.tasks)} tasks: {again:.2f} s, {first:.2f} s with compilation")
    print(f"{'graph':22} {'tasks':>7} {'forward ms':>16} {'gradient ms':>16} {'ratio':>6} {'relaxed gradient':>17} {'compile s':>17} {'Python loop':>12}")
    for row in fast:
        forward, gradient = (f"{row[f'{key}_s'] * 1e3:.2f} ({row[f'{key}_best_s'] * 1e3:.2f})" for key in ("forward", "gradient"))
        print(f"{row['graph']:22} {row['tasks']:7} {forward:>16} {gradient:>16} {row['gradient_over_forward']:6.1f} {row['relaxed_s'] * 1e3:17.2f} "
              f"{row['forward_compile_s']:5.2f} {row['gradient_compile_s']:5.2f} {row['relaxed_compile_s']:5.2f} {row['loop_over_scan']:11.0f}x"
              f"{'' if row['gradient_is_the_critical_path'] else '  GRADIENT IS NOT THE CRITICAL PATH'}")  # fmt: skip
        row["met"] = row["forward_s"] <= FORWARD_GOAL and row["gradient_s"] <= GRADIENT_GOAL
    print(f"goals: forward {FORWARD_GOAL * 1e3:.0f} ms, gradient {GRADIENT_GOAL * 1e3:.0f} ms: {'met' if all(row['met'] for row in fast) else 'MISSED'}\n")
    agree = agreement()
    print(f"{'schedule':10} {'points':>7} {'worst, closed form / timeline':>30} {'longer input gradients':>24}")
    for row in agree:
        unlike = "any ratio is exact" if row["worst_unequal_passes"] is None else f"{row['worst_unequal_passes']:.2%}"
        print(f"{row['schedule']:10} {row['points']:7} {row['worst']:30.4%} {unlike:>24}")
    print(f"goal: {AGREEMENT_GOAL:.0%}: {'met' if all(row['met'] for row in agree) else 'MISSED'}\n")
    steps = whole_steps()
    print(f"{'step on H100':14} {'tasks':>7} {'timeline s':>11} {'train_step s':>13} {'off':>7} {'with the whole bubble':>22}")
    for row in steps:
        print(f"{row['step']:14} {row['tasks']:7} {row['timeline_s']:11.4f} {row['train_step_s']:13.4f} {row['off']:+7.2%} {row['off_whole_bubble']:+22.2%}")
    drawn = drawn_steps(args.plans)
    print(f"{drawn['count']} plans drawn at random, with the whole bubble: half are within {drawn['median']:.1%}, nine of ten within {drawn['p90']:.1%}; "
          f"farthest off, by {drawn['worst']:+.1%}: {drawn['worst_plan']}")  # fmt: skip
    if args.json:
        document = {"machine": platform.machine(), "jax": version("jax"), "repeats": args.repeats, "speed": fast, "layout_s": again, "schedules": agree,
                    "steps": steps, "drawn": drawn}  # fmt: skip
        write_atomic(args.json, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
