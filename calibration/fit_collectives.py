"""Fits the shipped constants of collectives to published measurements and writes them into the package.

    python calibration/fit_collectives.py DATA       # about three minutes on two cores

DATA holds `collectives/` (tables of aiconfigurator-core 0.12.0 and the parsed logs) and `nccl_tests_logs/INDEX.csv`. Node constants come from NCCL in
CUDA graphs, half type; network constants from 21 published nccl-tests logs on top of them; engines' all-reduce and the exchanges of experts from the other
tables of aiconfigurator, a set of constants per kernel, version and system. Nothing of an unhealthy log or host is used.
"""

import argparse
import datetime
import json
from pathlib import Path

from diffperf._files import write_atomic
from diffperf.calibrate.collectives._engines import engine_rows, fit_engines
from diffperf.calibrate.collectives._priors import FITTED
from diffperf.calibrate.collectives._ship import network_fit, nodes_fit
from diffperf.calibrate.collectives._study import NODE_TABLES, log_rows, network_logs, node_rows, published_logs
from diffperf.io import read_collectives

HEALTHY_L40S = "sglang 0.5.12"
"""All other collections on L40S ran on a sick host: 1-5 GB/s where this one has 20."""


def engines(folder):
    """Constants of the kernels of engines in all tables."""
    out = []
    for file in sorted((folder / "collectives").glob("aic_*.csv.gz")):
        rows = engine_rows(read_collectives(file))
        out += [entry for entry in fit_engines(rows) if entry["system"] != "l40s" or entry["version"] == HEALTHY_L40S]
    return out


def text(document):
    """JSON with one line per kernel of an engine."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in document["engines"])
    body = json.dumps({key: value for key, value in document.items() if key != "engines"}, indent=1)
    return f'{body[:-2]},\n "engines": [\n{lines}\n ]\n}}\n'


def rounded(value):
    """Five significant digits, which is more than any width deserves."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the measurements")
    parser.add_argument("--out", type=Path, default=FITTED)
    options = parser.parse_args()
    nodes = nodes_fit({system: node_rows(options.data, system) for system in NODE_TABLES})
    logs = network_logs(published_logs(options.data))
    rows = log_rows(logs)
    _, network = network_fit(rows, [log.setting for log in logs], nodes)
    meta = dict(
        date=datetime.date.today().isoformat(), script="calibration/fit_collectives.py",
        units="SI; each entry is a value and the standard deviation of its logarithm",
        nodes="aiconfigurator-core 0.12.0, NCCL " + ", ".join(f"{name} {library}" for name, (_, library) in NODE_TABLES.items()),
        network="nccl-tests logs: " + ", ".join(log.name for log in logs), rows=len(rows),
    )  # fmt: skip
    write_atomic(str(options.out), text(rounded(dict(meta=meta) | nodes | network | dict(engines=engines(options.data)))))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
