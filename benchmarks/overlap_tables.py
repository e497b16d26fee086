"""Tables of overlap and timeline for the documentation, from `docs/data/tuning.json` and `docs/data/timeline.json`; used by `update_docs.py`."""

import json
from collections.abc import Callable
from typing import Any

import timeline
import tuning
from kernel_tables import DATA, table

ABSENT = "Not measured yet: `python benchmarks/{0}.py --json docs/data/{0}.json`."
SEARCHES = {"priority as described": "Lagom's search", "priority": "its best variant", "coordinate": "coordinate", "gradient": "gradient"}


def of(name: str) -> Callable[[Callable[[dict[str, Any]], str]], Callable[[], str]]:
    """A part of the documentation made from the results of one benchmark, or how to get them."""

    def part(make: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
        path = DATA / f"{name}.json"
        return lambda: make(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else ABSENT.format(name)

    return part


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f}"


@of("tuning")
def law(result: dict[str, Any]) -> str:
    """The law of lost processors on kernels of traces."""
    first = next(iter(result["law"].values()))["errors"]
    names = [name for name in first if "constants of" not in name]
    other = lambda law: next((percent(error) for name, error in law["errors"].items() if "constants of" in name), "")
    row = lambda law: [*(percent(law["errors"][name]) for name in names), other(law), percent(law["least"]), percent(law["floor"])]
    head = ["trace", "kernels", *(f"{name}, %" for name in names), "law with the other GPU's constants, %", "law with the best constants, %",
            "any law of blocks at best, %"]  # fmt: skip
    return table(head, [[gpu, str(law["kernels"]), *row(law)] for gpu, law in result["law"].items()])


@of("tuning")
def searches(result: dict[str, Any]) -> str:
    """Every search on every region, and what they add up to."""
    body = []
    for row in result["regions"]:
        cell = lambda name, row=row: f"{percent(row['searches'][name]['makespan_s'] / row['best_s'] - 1, 2)} ({row['searches'][name]['evaluations']})"
        body.append([f"`{row['region']}`", str(row["collectives"]), f"{1e3 * row['best_s']:.2f}", cell("default").split()[0], *map(cell, SEARCHES)])
    head = ["region", "collectives", "best ms", "default", *SEARCHES.values()]
    return table(head, body) + "\n\n" + "\n".join(f"- {line}" for line in tuning.summary(result["regions"])[:2])


@of("tuning")
def robust(result: dict[str, Any]) -> str:
    """Risk and gain of nominal and robust settings on draws that tuning has not seen."""
    body = []
    for row in result["regions"]:
        found = row["robust"]
        numbers = [*(percent(found[key]) for key in ("nominal_expected_gain", "nominal_risk", "robust_expected_gain")), percent(found["robust_risk"], 2)]
        body.append([f"`{row['region']}`", *numbers, "yes" if found["kept_default"] else ""])
    head = ["region", "nominal: expected gain, %", "worse than the default, % of draws", "robust: expected gain, %", "worse than the default, % of draws",
            "keeps the default"]  # fmt: skip
    return table(head, body) + "\n\n" + f"- {tuning.summary(result['regions'])[2]}"


@of("timeline")
def schedules(result: dict[str, Any]) -> str:
    """Closed forms against the timeline, and the speed of the longest path."""
    longer = lambda row: "any ratio is exact" if row["worst_unequal_passes"] is None else percent(row["worst_unequal_passes"], 2)
    closed = table(["schedule", "configurations", "closed form off by at most, %", "with input gradients up to twice the forward pass, %"],
                   [[row["schedule"], str(row["points"]), percent(row["worst"], 4), longer(row)] for row in result["schedules"]])  # fmt: skip
    signed = lambda value: f"{100 * value:+.1f}"
    steps = table(["step on H100", "tasks", "timeline over `train_step`, %", "with `bubble_factor` 1, %"],
                  [[row["step"], f"{row['tasks']:,}", signed(row["off"]), signed(row["off_whole_bubble"])] for row in result["steps"]])
    speed = table(["graph", "tasks", "forward, ms", "gradient, ms", "compilation of both, s"],
                  [[row["graph"], f"{row['tasks']:,}", f"{1e3 * row['forward_s']:.2f}", f"{1e3 * row['gradient_s']:.2f}",
                    f"{row['forward_compile_s'] + row['gradient_compile_s']:.1f}"] for row in result["speed"]])  # fmt: skip
    drawn = result["drawn"]
    others = (f"Of {drawn['count']} plans drawn at random that run and fit in memory, with `bubble_factor` 1, half are within "
              f"{percent(drawn['median'])}%, nine of ten within {percent(drawn['p90'])}%; farthest off, "
              f"by {signed(drawn['worst'])}%, is {drawn['worst_plan']}.")  # fmt: skip
    goals = f"Goals: {1e3 * timeline.FORWARD_GOAL:.0f} ms, {1e3 * timeline.GRADIENT_GOAL:.0f} ms, {percent(timeline.AGREEMENT_GOAL, 0)}%."
    where = f"Longest path, float64, {result['machine']}, jax {result['jax']}, median of {result['repeats']}:"
    return f"{closed}\n\n{steps}\n\n{others}\n\n{where}\n\n{speed}\n\n{goals}"
