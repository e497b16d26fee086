"""From a table of measured kernels to sets that are fitted: rows by family, chip by name, one set per (chip, library, datatype)."""

import dataclasses
import os
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ...cost.kernel._device import device_of
from ...cost.kernel._families import ON_CPU
from ...hardware import UnknownNameError, generation, resolve_name
from ...io import KernelTable
from . import _rows_attention, _rows_matmul, _rows_mla, _rows_moe, _rows_streaming
from ._cpu_chip import chip_of
from ._families import FamilyRows
from ._fit import least_time
from ._joint import KernelSet

READERS = (_rows_matmul.rows, _rows_attention.rows, _rows_moe.rows, _rows_mla.rows, _rows_streaming.rows)
TOO_FAST = 0.98
"""A row below this share of the time that arithmetic takes at the datasheet peak is no time of this kernel on this chip."""

NOISY = "noisy_median"
"""Flag of `diffperf measure` for rows whose median is not steady."""

DEVICE_TIME = "device_time"
"""Flag of `diffperf trace` for a kernel's own duration."""

SHORTEST_S = 15e-6
"""A kernel's own duration says little of a shorter one: the models are of times per call, in which its launch shows."""


@dataclass(frozen=True)
class PlacedSet:
    """One set, the family it belongs to, and the numbers of its rows in the table, shape (rows,)."""

    kernels: KernelSet
    rows: FamilyRows
    at: np.ndarray


def family_rows(table: KernelTable) -> list[FamilyRows]:
    """The rows of a table by family; `left_out` of each says what is not used and why."""
    return [rows for reader in READERS for rows in reader(table)]


def place(table: KernelTable, system: str | os.PathLike[str] | None = None) -> tuple[list[PlacedSet], Counter]:
    """Sets of all families, and reasons -> rows that are not used.

    Args:
      table: measured kernels.
      system: TOML file (or catalog name) of the chip, for rows whose `gpu` is not in the catalog, and for CPUs, of which the catalog knows none in
        particular. Without it a CPU's numbers are taken from the table itself.
    Raises:
      UnknownNameError: for a GPU that the catalog does not know, without `system`; names near ones and says how to add a file.
      ValueError: for a file of a system that is not one.
    """
    names = {gpu: chip_name(gpu, system) for gpu in dict.fromkeys(table.gpu)}
    chips = {name: chip_of(name, table) for name in dict.fromkeys(names.values())}
    noisy, device_time = (np.array([word in flag for flag in table.flag], bool) for word in (NOISY, DEVICE_TIME))
    short = device_time & (table.time_s < SHORTEST_S) & ~noisy
    steady = np.flatnonzero(~noisy & ~short)
    placed, skipped, used = [], Counter(), len(table) - len(steady)
    if noisy.any():
        skipped["flagged noisy_median: the samples spread too far to say a time"] = int(noisy.sum())
    if short.any():
        skipped["a kernel's own duration (of a trace) below 15 us: times per call, which the models are of, hold its launch too"] = int(short.sum())
    for rows in family_rows(table.take(steady)):
        skipped.update(rows.left_out)
        used += len(rows) + sum(rows.left_out.values())
        by: dict[tuple[str, str, str], list[int]] = {}
        for i, key in enumerate(zip((names[gpu] for gpu in table.gpu[steady[rows.row]]), rows.library, rows.datatype)):
            by.setdefault(key, []).append(i)
        for (name, library, datatype), at in sorted(by.items(), key=lambda item: -len(item[1])):
            try:
                device = device_of(chips[name], datatype)
            except ValueError:
                skipped[f"{os.path.basename(name)} has no unit for {datatype}"] += len(at)
                continue
            part = rows.take(np.array(at))
            if generation(name) == "cpu":
                part = dataclasses.replace(part, family=ON_CPU.get(rows.family.name, rows.family))
            fast = part.time < TOO_FAST * least_time(part.family, part.shape, device)
            if fast.any():
                skipped["faster than arithmetic at the chip's datasheet peak"] += int(fast.sum())
                part = part.take(~fast)
            if len(part):
                numbers = type(device)(*(float(x) for x in device))
                placed.append(PlacedSet(KernelSet(name, library, datatype, part.shape, numbers, np.log(part.time), part.group), part, steady[part.row]))
    if other := len(table) - used:
        skipped["no model of this operator"] += other
    return placed, skipped


def chip_name(gpu: str, system: str | os.PathLike[str] | None) -> str:
    """Catalog name, or path where `system` is one, of what a table calls `gpu`.

    Raises:
      UnknownNameError: not in the catalog, and no `system`.
    """
    try:
        name = resolve_name(gpu)
    except UnknownNameError as error:
        if system is None:
            raise UnknownNameError(f"the table's gpu is unknown: {error} Here: --system FILE.toml, or system= in Python.") from None
        return _given(system)
    return _given(system) if system is not None and generation(name) == "cpu" else name


def _given(system: str | os.PathLike[str]) -> str:
    text = os.fspath(system)
    return text if text.endswith(".toml") else resolve_name(text)
