"""Overlap tuning: the law of lost processors, searches compared, robust tuning: `python benchmarks/tuning.py [--json FILE] [--regions NAME,...] [--law]`.

Law: how much longer matrix and convolution kernels take beside an all-reduce of 8 channels, by leaving out one kernel at a time; two baselines beside it.
The kernels are paired by position in the A100 DDP trace of `--traces`, if it is there, else taken from the table below, which was read from that trace.
Searches: makespan over the best that any of them found, and distinct exact evaluations; the best point of regions of up to two collectives is that of all
points, of others the best of all searches here, long ones among them. Priority is Lagom's search, the best of four: two numbers of threads, two orders.
Robust: constants drawn around the nominal ones with a standard deviation of 0.3 in logs, tuned on one set of draws, judged on another.
"""

import argparse
import json
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from diffperf.cost.contention import CONTENTION_SD, DEFAULT_SETTING, NOMINAL_CONTENTION, TUNING_SD, draw_contention, sm_loss_ratio, taken_processors
from diffperf.io import write_atomic
from diffperf.io.traces import overlap_slowdowns, read_trace
from diffperf.tune import OVERLAP_REGIONS, OverlapSpace, load_overlap_region, overlap
from diffperf.tune._overlap._descent import gradient
from diffperf.tune._overlap._evaluate import Evaluator
from diffperf.tune._overlap._robust import Judge
from diffperf.tune._overlap._search import coordinate, exhaustive, priority
from diffperf.tune._overlap._space import Grid

LAW_GOAL, EXCESS_GOAL, EVALUATIONS_GOAL, RISK_GOAL = 0.05, 0.002, 340, 0.02
PROCESSORS, CHANNELS, THREADS = 108, 8, 544
BLOCKS = (96, 100, 100, 128, 192, 200, 208, 216, 400, 512, 512)
RATIOS = (1.01, 1.61, 1.76, 0.99, 1.00, 1.30, 1.37, 1.33, 1.32, 1.13, 1.45)
ALONE_S = tuple(1e-6 * t for t in (51.5, 43.3, 75.6, 58.3, 82.5, 84.4, 36.0, 81.4, 92.5, 76.3, 68.2))
"""Matrix and convolution kernels >= 15 us and < 2000 blocks of the A100 DDP trace of HolisticTraceAnalysis: blocks, time beside an all-reduce over time
alone, time alone."""

LAUNCH_S = 3e-6  # of a matmul, as `matmul_kernel` has it: not slowed

TRACE = "hta_a100_ddp_nccl_metadata_rank0of2.json.gz"
EQUAL = 1e-5  # relative: makespans that differ by less are called equal
LONG = dict(starts=64, steps=120, budget=4000, seed=7)
FIT_DRAWS, TEST_DRAWS = 512, 4000


def law_rows(traces):
    """Blocks, ratios and times alone, and where they come from."""
    path = Path(traces) / TRACE
    if not path.exists():
        return np.array(BLOCKS), np.array(RATIOS), np.array(ALONE_S), "table"
    words = ("gemm", "conv", "xmma", "cutlass", "wgrad", "dgrad", "fprop")
    pairs = [row for trace in read_trace(path) for row in overlap_slowdowns(trace)]
    rows = [row for row in pairs if row.pairing == "position" and row.time_alone_s >= 15e-6 and 0 < row.blocks < 2000
            and any(word in row.kernel.lower() for word in words)]  # fmt: skip
    blocks, alone, beside = np.array([(row.blocks, row.time_alone_s, row.time_with_s) for row in rows]).T
    return blocks, beside / alone, alone, "trace"


def law_errors(blocks, ratios, alone):
    """Mean absolute error of the log ratio, each kernel left out of the fit once: law, constant ratio, share of processors, no contention.

    The law's two constants have the prior of `Contention`, and kernels a noise of 5%. Also the constants and the error with all kernels in the fit.
    """
    kappa, sigma = (grid.ravel() for grid in np.meshgrid(np.linspace(0.1, 1.6, 61), np.linspace(0.02, 1, 50), indexing="ij"))
    taken = taken_processors(CHANNELS, THREADS, kappa)
    mean, sd = NOMINAL_CONTENTION, CONTENTION_SD
    prior = (np.log(kappa / mean.processors_per_channel) / sd.processors_per_channel) ** 2 + (np.log(sigma / mean.evenness) / sd.evenness) ** 2
    log, fixed = np.log(ratios), LAUNCH_S / alone
    law = np.log(fixed + (1 - fixed) * np.asarray(sm_loss_ratio(blocks, PROCESSORS, taken[:, None], sigma[:, None])))
    share = np.log(PROCESSORS / (PROCESSORS - np.asarray(taken_processors(CHANNELS, THREADS, np.linspace(0, 4, 81)))))[:, None] * np.ones(len(blocks))
    errors = {"law of waves": [], "constant ratio": [], "share of processors": [], "no contention": []}
    for i in range(len(blocks)):
        kept = np.arange(len(blocks)) != i
        best = lambda predicted, prior, kept=kept: predicted[np.argmin(np.sum(((predicted - log)[:, kept] / 0.05) ** 2, axis=1) + prior)]
        errors["law of waves"].append(abs(best(law, prior)[i] - log[i]))
        errors["constant ratio"].append(abs(log[kept].mean() - log[i]))
        errors["share of processors"].append(abs(best(share, 0.0)[i] - log[i]))
        errors["no contention"].append(abs(log[i]))
    all_in = int(np.argmin(np.sum(((law - log) / 0.05) ** 2, axis=1) + prior))
    fit = dict(processors_per_channel=float(kappa[all_in]), evenness=float(sigma[all_in]), error=float(np.abs(law[all_in] - log).mean()))
    return {name: float(np.mean(values)) for name, values in errors.items()}, fit


def search_all(name):
    """Makespan and evaluations of every search on one region."""
    grid = Grid(load_overlap_region(name), OverlapSpace())
    settings = (DEFAULT_SETTING,) * grid.count
    at_default, found = grid.place(settings), {}

    def run(label, search):
        evaluator = Evaluator(grid, NOMINAL_CONTENTION)
        start = time.perf_counter()
        point = search(evaluator)
        seconds, evaluations = time.perf_counter() - start, evaluator.evaluations or grid.num_points
        found[label] = dict(makespan_s=float(evaluator.values(point[None])[0]), evaluations=evaluations, seconds=seconds)

    run("default", lambda evaluator: (evaluator.values(at_default[None]), at_default)[1])
    priorities = {}
    for threads in (2, 0):
        for steepest in (False, True):
            start = at_default.copy()
            start[:, 2] = threads
            run("priority", lambda evaluator, start=start, steepest=steepest: priority(evaluator, start, steepest=steepest))
            priorities[f"{threads}{steepest}"] = found.pop("priority")
    found["priority as described"] = min((priorities[key] for key in ("2False", "0False")), key=lambda row: row["makespan_s"])
    found["priority"] = min(priorities.values(), key=lambda row: row["makespan_s"])
    run("coordinate", lambda evaluator: coordinate(grid, evaluator.values, at_default))
    run("gradient", lambda evaluator: gradient(evaluator, settings))
    if grid.count <= 2:
        run("exhaustive", exhaustive)
    else:
        run("long gradient", lambda evaluator: gradient(evaluator, settings, **LONG))
        rng = np.random.default_rng(3)
        for k in range(4):
            start = rng.integers(0, grid.sizes)
            run(f"coordinate from start {k}", lambda evaluator, start=start: coordinate(grid, evaluator.values, start))
    best = min(row["makespan_s"] for row in found.values())
    return dict(region=name, collectives=grid.count, operators=grid.count + len(grid.region.kernel_names), best_s=best, searches=found)


def tune_robustly(name):
    """Nominal and robust settings of one region, judged on draws that tuning has not seen."""
    region = load_overlap_region(name)
    grid, settings = Grid(region, OverlapSpace()), (DEFAULT_SETTING,) * len(region.collective_names)
    nominal = overlap(region)
    chosen = overlap(region, draws=draw_contention(FIT_DRAWS, sd=TUNING_SD, seed=1))
    judge = Judge(grid, draw_contention(TEST_DRAWS, sd=TUNING_SD, seed=2), grid.place(settings))
    judged = judge.judge(np.stack([grid.place(tuple(result.settings.values())) for result in (nominal, chosen)]))
    gains = -np.expm1(judged.expected)
    return dict(nominal_risk=float(judged.risk[0]), nominal_expected_gain=float(gains[0]), nominal_gain=nominal.gain, robust_risk=float(judged.risk[1]),
                robust_expected_gain=float(gains[1]), robust_gain=chosen.gain, kept_default=chosen.kept_default)  # fmt: skip


def verdict(row):
    """What one region says of the goals: excess over the best, no worse than priority, and better or half the evaluations."""
    gradient, other = row["searches"]["gradient"], row["searches"]["priority"]
    used = row["searches"].get("exhaustive", gradient)
    excess = gradient["makespan_s"] / row["best_s"] - 1
    no_worse = used["makespan_s"] <= other["makespan_s"] * (1 + EQUAL)
    better = gradient["makespan_s"] < other["makespan_s"] * (1 - EQUAL) or 2 * gradient["evaluations"] <= other["evaluations"]
    return excess, no_worse, better


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--regions", help="names, with commas between; all by default")
    parser.add_argument("--traces", default=Path(__file__).resolve().parents[2] / "shared" / "data" / "traces")
    parser.add_argument("--law", action="store_true", help="the law of lost processors only")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    blocks, ratios, alone, source = law_rows(options.traces)
    errors, fit = law_errors(blocks, ratios, alone)
    print(f"Kernels beside {CHANNELS} channels, {len(blocks)} of the {source}, left out one by one (goal {100 * LAW_GOAL:.0f}%):")
    print("  " + ", ".join(f"{name} {100 * error:.1f}%" for name, error in errors.items()) + f"\n  all in: {100 * fit['error']:.1f}%, "
          f"{fit['processors_per_channel']:.2f} processors per channel, evenness {fit['evenness']:.2f}")  # fmt: skip
    document = dict(law=dict(errors=errors, fit=fit, kernels=len(blocks), source=source), regions=[],
                    versions={name: version(name) for name in ("jax", "jaxlib", "optax", "numpy")}, machine=platform.machine())  # fmt: skip
    if not options.law:
        compare(options.regions.split(",") if options.regions else OVERLAP_REGIONS, document["regions"])
    if options.json:
        write_atomic(options.json, json.dumps(document, indent=1).encode() + b"\n")


def compare(names, rows):
    columns = ("default", "priority as described", "priority", "coordinate", "gradient")
    print("\nExcess over the best known makespan in % (exact evaluations)")
    print(f"{'region':34}{'m':>3}{'best ms':>10}" + "".join(f"{c[:21]:>23}" for c in columns), end="")
    print(f"{'no worse':>9}{'better':>7}   worse than the default in % of draws: nominal, robust (expected gain %)")
    for name in names:
        row = search_all(name)
        row["robust"] = of = tune_robustly(name)
        rows.append(row)
        cells = [f"{100 * (row['searches'][c]['makespan_s'] / row['best_s'] - 1):.2f} ({row['searches'][c]['evaluations']})" for c in columns]
        _, no_worse, better = verdict(row)
        print(f"{name:34}{row['collectives']:>3}{1e3 * row['best_s']:>10.3f}" + "".join(f"{cell:>23}" for cell in cells), end="")
        print(f"{'yes' if no_worse else 'NO':>9}{'yes' if better else 'no':>7}   {100 * of['nominal_risk']:.1f} ({100 * of['nominal_expected_gain']:.1f}), "
              f"{100 * of['robust_risk']:.2f} ({100 * of['robust_expected_gain']:.1f}){' default kept' * of['kept_default']}", flush=True)  # fmt: skip
    verdicts, many, robust = [verdict(row) for row in rows], [row for row in rows if row["collectives"] >= 8], [row["robust"] for row in rows]
    gains = [of["robust_expected_gain"] for of in robust if not of["kept_default"]]
    print(f"\nlargest excess of the gradient {100 * max(v[0] for v in verdicts):.2f}% (goal {100 * EXCESS_GOAL:.1f}%), at most "
          f"{max(row['searches']['gradient']['evaluations'] for row in rows)} evaluations (goal {EVALUATIONS_GOAL})")  # fmt: skip
    print(f"what tune uses is no worse than priority in {sum(v[1] for v in verdicts)} of {len(rows)} regions; with 8 collectives or more the "
          f"gradient is better, or needs half the evaluations, in {sum(verdict(row)[2] for row in many)} of {len(many)}")  # fmt: skip
    print(f"robust: worse than the default in at most {100 * max(of['robust_risk'] for of in robust):.2f}% of draws (goal {100 * RISK_GOAL:.0f}%), "
          f"nominal in up to {100 * max(of['nominal_risk'] for of in robust):.0f}%; default kept in {sum(of['kept_default'] for of in robust)}; "
          f"median expected gain of the others {100 * statistics.median(gains or [0.0]):.1f}%")


if __name__ == "__main__":
    main()
