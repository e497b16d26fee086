"""From a table of measured kernels to sets that are fitted: rows by family, chip by name, one set per (chip, library, datatype)."""

import numpy as np

from ...cost.kernel._device import device_of
from ...hardware import load_system, resolve_name
from ...io import KernelTable
from . import _rows_matmul
from ._families import FamilyRows
from ._joint import KernelSet

READERS = [_rows_matmul.rows]


def family_rows(table: KernelTable) -> list[FamilyRows]:
    """The rows of a table by family; `left_out` of each says what is not used and why."""
    return [rows for reader in READERS for rows in reader(table)]


def kernel_sets(rows: FamilyRows, table: KernelTable) -> tuple[list[KernelSet], dict[str, int]]:
    """Sets of one family, largest first, and reasons -> rows that cannot be placed (the chip lacks the datatype).

    Raises:
      UnknownNameError: for a GPU that the catalog does not know; the message names near ones and says how to add a TOML file.
    """
    names = {gpu: resolve_name(gpu) for gpu in dict.fromkeys(table.gpu[rows.row])}
    chips = np.array([names[gpu] for gpu in table.gpu[rows.row]], object)
    by: dict[tuple[str, str, str], list[int]] = {}
    for i, key in enumerate(zip(chips, rows.library, rows.datatype)):
        by.setdefault(key, []).append(i)
    sets, lacking = [], {}
    for (chip, library, datatype), at in sorted(by.items(), key=lambda item: -len(item[1])):
        try:
            device = device_of(load_system(chip, fitted=False).chip, datatype)
        except ValueError:
            lacking[f"{chip} has no unit for {datatype}"] = len(at)
            continue
        part = rows.take(np.array(at))
        sets.append(KernelSet(chip, library, datatype, part.shape, type(device)(*(float(x) for x in device)), np.log(part.time), part.group))
    return sets, lacking
