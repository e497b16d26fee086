"""Fits the kernel libraries that ship with the package: every family over all measured sets of a folder of kernel tables.

    python calibration/fit_kernels.py FOLDER [--family matmul ...]     # the tables of measured kernels; about 20 minutes on two cores for all

Writes `diffperf/cost/kernel/fitted/<family>.json`. The tables themselves are not part of the project; `diffperf import aiconfigurator` makes most of them.
"""

import argparse
import time
from importlib.metadata import version
from pathlib import Path

from diffperf.calibrate.kernels._file import entries, write_kernels_fit
from diffperf.calibrate.kernels._joint import KernelSet, fit_jointly
from diffperf.calibrate.kernels._sets import place
from diffperf.cost.kernel._library import FITTED_DIRECTORY
from diffperf.io import read_kernels

LEAST_ROWS = 100  # sets with fewer say little about 20 constants


def gather(folder: Path) -> tuple[dict, dict[str, list[KernelSet]]]:
    """Families and their sets of every table in a folder."""
    table = read_kernels(sorted(str(p) for p in folder.iterdir() if p.name.endswith((".csv", ".csv.gz", ".parquet"))))
    placed, skipped = place(table)
    for reason, count in skipped.most_common():
        print(f"{count} rows left out: {reason}")
    families, sets = {}, {}
    for one in placed:
        families[one.rows.family.name] = one.rows.family
        sets.setdefault(one.rows.family.name, []).append(one.kernels)
    return families, sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", action="append")
    options = parser.parse_args()
    families, sets = gather(options.folder)
    for name in options.family or families:
        start = time.time()
        used = [s for s in sets[name] if len(s) >= LEAST_ROWS]
        progress = lambda done, total, name=name: print(f"\r{name}: {done} of {total}", end="", flush=True)
        fits, shared = fit_jointly(families[name], used, last=3072 if name == "matmul" else 1536, correction=True, progress=progress)
        meta = dict(rows=sum(map(len, used)), written=time.strftime("%Y-%m-%d"), jax=version("jax"), by="calibration/fit_kernels.py")
        write_kernels_fit(FITTED_DIRECTORY / f"{name}.json", {name: entries(used, fits, shared)}, meta)
        print(f"\r{name}: {len(used)} sets, {meta['rows']} rows, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
