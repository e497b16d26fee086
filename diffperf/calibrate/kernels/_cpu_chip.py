"""Chip numbers of a CPU, which no datasheet says, from kernels measured on it.

They are what it was seen to reach over what is usually reached (the catalog's priors for CPUs), so that an efficiency keeps its meaning:
  peak of a datatype: the largest rate of its matmuls over the prior `matmul_efficiency`; a datatype that was not measured has the peak of fp32;
  memory bandwidth: the largest rate of operators that move more than twice the cache over the prior `memory_efficiency`;
  processors: threads of the table; last-level cache: half of the lower quartile of what inputs rotate through, as `diffperf measure` rotates through
    twice the cache, but less of tiny inputs and more of large ones.
The largest is the k-th largest of n, k = 1 + n / 20 but at most 3: a row or two of a hiccup in the clock says nothing. Flagged rows do not count.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ...hardware import DATATYPES, Chip, describe, generation, load_system
from ...io import KernelTable

STREAMS = ("elementwise", "softmax", "layernorm", "rmsnorm", "reduction", "adam", "cross_entropy", "transpose")
LEAST_ROWS = 5
"""Rows from which a rate is taken."""


@dataclasses.dataclass(frozen=True)
class Number:
    """One number of a chip, by the end of its dotted path, and where it is from."""

    value: float
    source: str


def cpu_numbers(table: KernelTable, base: str = "cpu") -> dict[str, Number]:
    """Chip numbers of the CPU that a table was measured on, by dotted path without `chip.`; those that it does not tell are left out.

    Args:
      table: measured kernels of one machine.
      base: catalog system or file whose efficiencies are the priors.
    """
    prior = {row.path.removeprefix("chip."): row.value for row in describe(base, fitted=False)}
    table = table.take(table.flag == "")
    found: dict[str, Number] = {}
    threads, rotated = table["num_threads"], table["rotated_bytes"]
    if np.isfinite(threads).any():
        found["num_processors"] = Number(float(np.nanmax(threads)), "measured table: threads")
    several = rotated[np.isfinite(rotated) & (rotated > 2e6) & np.isin(table.op, ("matmul", *STREAMS))]
    if len(several) >= LEAST_ROWS:
        found["l2_capacity"] = Number(float(np.quantile(several, 0.25) / 2), "measured table: half of what inputs rotate through (lower quartile)")
    for datatype in DATATYPES:
        mine = np.isin(table.op, ("matmul", "batched_matmul")) & (table.datatype == datatype)
        if mine.sum() >= LEAST_ROWS:
            rates = 2 * (np.nan_to_num(table["batch"], nan=1.0) * table["m"] * table["n"] * table["k"])[mine] / table.time_s[mine]
            share = prior[f"matmul_efficiency.{datatype}"]
            found[f"peak_flops_per_s.{datatype}"] = Number(_largest(rates) / share, f"largest rate of {mine.sum()} measured matmuls over {share:g}")
    if "peak_flops_per_s.fp32" in found:
        for datatype in DATATYPES:
            if prior[f"peak_flops_per_s.{datatype}"] > 0:
                found.setdefault(f"peak_flops_per_s.{datatype}", Number(found["peak_flops_per_s.fp32"].value, "not measured: as fp32"))
    cache = found["l2_capacity"].value if "l2_capacity" in found else prior["l2_capacity"]
    streams = np.isin(table.op, STREAMS) & (table["bytes_min"] > 2 * cache)
    if streams.sum() >= LEAST_ROWS:
        share = prior["memory_efficiency"]
        rate = _largest(table["bytes_min"][streams] / table.time_s[streams])
        found["memory_bandwidth"] = Number(rate / share, f"largest rate of {streams.sum()} measured streams over {share:g}")
    return {path: Number(float(f"{x.value:.4g}"), x.source) for path, x in found.items()}


def _largest(rates: np.ndarray) -> float:
    return float(np.sort(rates)[-min(3, 1 + len(rates) // 20)])


def measured_chip(chip: Chip, numbers: Mapping[str, Number]) -> Chip:
    """`chip` with measured numbers in place of its own."""
    peaks = [numbers[path].value if (path := f"peak_flops_per_s.{d}") in numbers else float(old) for d, old in zip(DATATYPES, chip.peak_flops_per_s)]
    plain = {path: x.value for path, x in numbers.items() if "." not in path}
    return dataclasses.replace(chip, peak_flops_per_s=np.array(peaks), **plain)


def chip_of(name: str, table: KernelTable) -> Chip:
    """The chip by its name in the catalog or its file; a CPU of the catalog, which stands for any, takes the numbers that the table tells."""
    chip = load_system(name, fitted=False).chip
    if name.endswith(".toml") or generation(name) != "cpu":
        return chip
    return measured_chip(chip, cpu_numbers(table, name))
