"""Measured rows of one family of kernels, in the form that is fitted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...cost.kernel._family import Family as Family
from ...io import KernelTable


@dataclass(frozen=True)
class FamilyRows:
    """Measured rows of one family, ready to fit.

    Attributes:
      family: which kernels.
      shape: the family's shape; every field an array of shape (rows,).
      datatype: what is multiplied or moved, one of `hardware.DATATYPES`, shape (rows,): picks the chip's peak.
      library: rows of one library share constants on one chip: the framework, and the kernel where one framework has several, shape (rows,).
      group: what must stay whole when rows are split: (n, k) pairs, head shapes, models, shape (rows,).
      time: measured. [s] shape (rows,)
      row: number of each row in the table it came from, shape (rows,).
      left_out: reason -> number of rows of the table that belong to this family but are not used.
    """

    family: Family
    shape: Any
    datatype: np.ndarray
    library: np.ndarray
    group: np.ndarray
    time: np.ndarray
    row: np.ndarray
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.time)

    def take(self, which: np.ndarray) -> "FamilyRows":
        """The rows of a mask or of indices."""
        pick = lambda x: x[which]
        shape = type(self.shape)(*(np.broadcast_to(x, len(self))[which] for x in self.shape))
        return FamilyRows(self.family, shape, pick(self.datatype), pick(self.library), pick(self.group), pick(self.time), pick(self.row), self.left_out)


def split_rows(reasons: Mapping[str, np.ndarray], start: np.ndarray) -> tuple[np.ndarray, dict[str, int]]:
    """Which rows of `start` stay, and how many go for each reason, the first one counting."""
    keep, left_out = start.copy(), {}
    for reason, out in reasons.items():
        if count := int((keep & out).sum()):
            left_out[reason] = count
        keep &= ~out
    return keep, left_out


def unknown_words(table: KernelTable, words: np.ndarray, accepted: Iterable[str], what: str) -> dict[str, np.ndarray]:
    """Masks of the rows whose word is not accepted, by a reason that names the word, its first row and what is accepted.

    Args:
      words: one per row.
      what: they are of, such as "datatype of matmuls".
    """
    known = tuple(accepted)
    unknown = dict.fromkeys(word for word in words if word not in known)
    masks = {word: words == word for word in unknown}
    where = table.source_row
    return {
        f"{what} {word!r} has no model, as in {where[int(np.argmax(mask))]}; it should be one of {', '.join(known)}": mask for word, mask in masks.items()
    }
