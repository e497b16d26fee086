"""Overlap tuning: the law of lost processors, searches compared, robust tuning: `python benchmarks/tuning.py [--json FILE] [--regions NAME,...] [--law]`.

Law: `overlap_law.py`.
Searches: makespan over the best that any of them found, and distinct exact evaluations; the best point of regions of up to two collectives is that of all
points, of others the best of all searches here, long ones among them. Priority is Lagom's search, the best of four: two numbers of threads, two orders.
Robust: constants drawn around the nominal ones with a standard deviation of 0.3 in logs, tuned on one set of draws, judged on another.
"""

import argparse
import json
import os
import platform
import statistics
import time
from importlib.metadata import version

import jax
import numpy as np
import overlap_law

from diffperf.cost.contention import DEFAULT_SETTING, NOMINAL_CONTENTION, TUNING_SD, draw_contention
from diffperf.io import write_atomic
from diffperf.tune import OVERLAP_REGIONS, OverlapSpace, load_overlap_region, overlap
from diffperf.tune._overlap._descent import gradient
from diffperf.tune._overlap._evaluate import Evaluator
from diffperf.tune._overlap._robust import Judge
from diffperf.tune._overlap._search import coordinate, exhaustive, priority
from diffperf.tune._overlap._space import Grid

EXCESS_GOAL, EVALUATIONS_GOAL, RISK_GOAL = 0.002, 340, 0.02
EQUAL = 1e-5  # relative: makespans that differ by less are called equal
LONG = dict(starts=256, steps=120, budget=20_000, seed=7)
FIT_DRAWS, TEST_DRAWS = 512, 4000


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
    parser.add_argument("--traces", default=overlap_law.FOLDER)
    parser.add_argument("--law", action="store_true", help="the law of lost processors only; FILE keeps its regions")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    law = overlap_law.measure(overlap_law.read_rows(options.traces))
    overlap_law.show(law)
    document = dict(law=law, regions=[], versions={name: version(name) for name in ("jax", "jaxlib", "optax", "numpy")}, machine=platform.machine())
    if options.law and options.json and os.path.exists(options.json):
        with open(options.json, encoding="utf-8") as file:
            document = json.load(file) | dict(law=law)
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
    print("\n" + "\n".join(summary(rows)))


def summary(rows):
    """What the regions add up to: excess and evaluations, comparison with Lagom's search, robust tuning."""
    verdicts, robust = [verdict(row) for row in rows], [row["robust"] for row in rows]

    def better(what):
        counted = [of[2] for of, row in zip(verdicts, rows) if row[what] >= 8]
        return f"{sum(counted)} of {len(counted)}"

    gains = [of["robust_expected_gain"] for of in robust if not of["kept_default"]]
    return (
        f"largest excess of the gradient {100 * max(v[0] for v in verdicts):.2f}% (goal {100 * EXCESS_GOAL:.1f}%), at most "
        f"{max(row['searches']['gradient']['evaluations'] for row in rows)} evaluations (goal {EVALUATIONS_GOAL})",
        f"what `tune` uses is no worse than Lagom's search in {sum(v[1] for v in verdicts)} of {len(rows)} regions; the gradient is better, or needs "
        f"at most half the evaluations, in {better('collectives')} regions of at least 8 collectives, {better('operators')} of at least 8 operators",
        f"robust: worse than the default in at most {100 * max(of['robust_risk'] for of in robust):.2f}% of draws (goal {100 * RISK_GOAL:.0f}%), "
        f"nominal in up to {100 * max(of['nominal_risk'] for of in robust):.0f}%; default kept in {sum(of['kept_default'] for of in robust)} of {len(rows)}; "
        f"median expected gain of the others {100 * statistics.median(gains or [0.0]):.1f}%",
    )


if __name__ == "__main__":
    main()
