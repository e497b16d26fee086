"""From a table of measured kernels to sets that are fitted: rows by family, chip by name, one set per (chip, library, datatype)."""

import os
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ...cost.kernel._device import device_of
from ...hardware import UnknownNameError, load_system, resolve_name
from ...io import KernelTable
from . import _rows_attention, _rows_matmul, _rows_mla, _rows_moe, _rows_streaming
from ._families import FamilyRows
from ._fit import least_time
from ._joint import KernelSet

READERS = (_rows_matmul.rows, _rows_attention.rows, _rows_moe.rows, _rows_mla.rows, _rows_streaming.rows)
TOO_FAST = 0.98
"""A row below this share of the time that arithmetic takes at the datasheet peak is no time of this kernel on this chip."""


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
      system: TOML file (or catalog name) of the chip, for rows whose `gpu` is not in the catalog.
    Raises:
      UnknownNameError: for a GPU that the catalog does not know, without `system`; names near ones and says how to add a file.
    """
    chips = {gpu: _chip(gpu, system) for gpu in dict.fromkeys(table.gpu)}
    placed, skipped, used = [], Counter(), 0
    for rows in family_rows(table):
        skipped.update(rows.left_out)
        used += len(rows) + sum(rows.left_out.values())
        by: dict[tuple[str, str, str], list[int]] = {}
        for i, key in enumerate(zip((chips[gpu] for gpu in table.gpu[rows.row]), rows.library, rows.datatype)):
            by.setdefault(key, []).append(i)
        for (chip, library, datatype), at in sorted(by.items(), key=lambda item: -len(item[1])):
            try:
                device = device_of(load_system(chip, fitted=False).chip, datatype)
            except ValueError:
                skipped[f"{os.path.basename(chip)} has no unit for {datatype}"] += len(at)
                continue
            part = rows.take(np.array(at))
            fast = part.time < TOO_FAST * least_time(part.family, part.shape, device)
            if fast.any():
                skipped["faster than arithmetic at the chip's datasheet peak"] += int(fast.sum())
                part = part.take(~fast)
            if len(part):
                numbers = type(device)(*(float(x) for x in device))
                placed.append(PlacedSet(KernelSet(chip, library, datatype, part.shape, numbers, np.log(part.time), part.group), rows, part.row))
    if other := len(table) - used:
        skipped["no model of this operator"] += other
    return placed, skipped


def _chip(gpu: str, system: str | os.PathLike[str] | None) -> str:
    try:
        return resolve_name(gpu)
    except UnknownNameError:
        if system is None:
            raise
        return os.fspath(system)
