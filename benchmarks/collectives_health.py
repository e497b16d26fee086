"""Detection and false alarms of the health verdict: on published logs, and on healthy logs degraded by what the model says a fault costs.

    python benchmarks/collectives_health.py DATA

Each healthy log is multiplied, size by size, by the ratio of a degraded to a healthy system (lost NICs, PCIe instead of NVLink, TCP instead of the
network's transport); its own scatter, offsets and version effects stay. A threshold is then scored on all of them; `leave one log out` chooses the
threshold without a log and applies it to that log.
"""

import sys
from pathlib import Path

import numpy as np

from diffperf.calibrate.collectives import _study as study
from diffperf.calibrate.collectives._predict import times_of
from diffperf.calibrate.collectives._verdict import CHECK, FAST, SICK, degradations, judge_rows, log_ratio

GRID = np.round(np.exp(np.linspace(np.log(1.1), np.log(8), 60)), 3)
SEVERE = ("TCP", "PCIe", "peer access", "one NIC of 8 in use", "one NIC of 4 in use")


def ratios(log):
    """Ratio of a healthy log, and of its degraded copies by name."""
    rows = study.log_rows([log])
    cases = degradations(log.setting, float(rows.ranks[0]))
    base, present = np.array([c[1] for c in cases]), np.array([c[2] for c in cases])
    present[:, -5] = False
    times = times_of(rows, base, present)
    healthy = rows.log_time - times[0]
    return log_ratio(rows.nbytes, healthy), {c[0]: log_ratio(rows.nbytes, healthy + t - times[0]) for c, t in zip(cases[1:], times[1:])}


def study_health(folder, out):
    """Rows of the table: label, values, reach."""
    logs = study.published_logs(Path(folder))
    own, degraded, verdicts = {}, {}, {}
    for log in logs:
        rows = study.log_rows([log])
        verdict = judge_rows(rows, log.setting, log.name)
        verdicts[log.name] = verdict
        out[log.name] = dict(label=log.health, state=verdict.state, ratio=verdict.ratio, cause=verdict.cause, evidence=verdict.evidence)
        if log.health == "healthy":
            own[log.name], degraded[log.name] = ratios(log)
    healthy = [log.name for log in logs if log.health == "healthy"]
    sick = [log.name for log in logs if log.health != "healthy"]
    flagged = [name for name in healthy if verdicts[name].state in ("unhealthy", "invalid")]
    checked = [name for name in healthy if verdicts[name].state == "check"]
    found = [name for name in sick if verdicts[name].state in ("unhealthy", "invalid")]
    kinds = sorted({kind for cases in degraded.values() for kind in cases})
    out["simulated"] = {}
    for kind in kinds:
        values = np.array([cases[kind] for cases in degraded.values() if kind in cases])
        caught, warned = float(np.mean(values > SICK)), float(np.mean(values > CHECK))
        out["simulated"][kind] = dict(logs=len(values), unhealthy=caught, at_least_check=warned, median_ratio=float(np.median(values)))
    severe = [(name, value) for name, cases in degraded.items() for kind, value in cases.items() if kind.startswith(SEVERE)]
    score = lambda limit, skip: sum(own[n] > limit for n in own if n != skip) * 5 + sum(v <= limit for n, v in severe if n != skip)
    alarms = missed = 0
    for name in own:
        limit = np.median([x for x in GRID if score(x, name) == min(score(g, name) for g in GRID)])
        alarms += own[name] > limit
        missed += sum(v <= limit for n, v in severe if n == name)
    best = [x for x in GRID if score(x, "") == min(score(g, "") for g in GRID)]
    out["threshold"] = dict(sick=SICK, check=CHECK, fast=FAST, best_from=float(min(best)), best_to=float(max(best)))
    out["threshold"] |= dict(alarms=int(alarms), missed=missed / len(severe))
    yield f"health: healthy logs flagged of {len(healthy)}; sick and invalid found of {len(sick)}", [len(flagged), len(found)], (0, 4)
    yield f"... healthy logs to check (above {CHECK})", [len(checked)], (5,)
    yield f"... leave one log out: false alarms of {len(own)}, severe faults missed, % of {len(severe)}", [alarms, 100 * missed / len(severe)], (0, None)


if __name__ == "__main__":
    result: dict = {}
    for line in study_health(sys.argv[1], result):
        print(*line)
    for kind, entry in result["simulated"].items():
        shares = f"unhealthy {entry['unhealthy']:4.0%}  at least check {entry['at_least_check']:4.0%}"
        print(f"{kind:70s} logs {entry['logs']:3d}  {shares}  ratio {entry['median_ratio']:.2f}")
    print(result["threshold"])
    for name, entry in result.items():
        if entry.get("state", "healthy") != "healthy" or entry.get("label", "healthy") != "healthy":
            print(name, entry)
