"""What the measured sets of a family say about a set not seen: the prior of a new chip, library or datatype.

A set is one library on one chip for one datatype.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...hardware import generation
from ._family import Family

PRIOR_SETS = 2.0
"""Sets that the family's own prior counts for in a spread; a quarter of that in a mean."""
ELSEWHERE = (0.1, 0.5, 0.3)
"""What a set of another generation of chips, of another library and of another datatype counts against one that agrees."""
LEAST_SPREAD = 0.08
"""No constant is known better than this between chips."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """Fitted sets of one family, as the prior of the next.

    Attributes:
      family: which kernels.
      keys: chip, library and datatype of each set.
      free: unconstrained constants of each, shape (sets, constants).
      said: how much its rows said about each, from 0 (the prior is left as it was) to 1, shape (sets, constants).
      variance: what is left open, shape (sets, constants).
    """

    family: Family
    keys: Sequence[tuple[str, str, str]]
    free: np.ndarray
    said: np.ndarray
    variance: np.ndarray

    def prior(self, chip: str, library: str, datatype: str) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the unconstrained constants of such a set, shape (constants,) each.

        A mean over the sets, in which the family's own prior counts as `PRIOR_SETS`: sets of the same generation of chips, library and
        datatype count in full, others by the shares in `ELSEWHERE`.
        """
        sd0 = self.family.spreads()
        if not self.keys:
            return np.zeros(self.family.size), sd0
        near = np.array([_nearness(key, (chip, library, datatype)) for key in self.keys])[:, None]
        weight = near / near.max() * self.said
        mean = (weight * self.free).sum(0) / (PRIOR_SETS / 4 + weight.sum(0))
        squares = (weight * ((self.free - mean) ** 2 + self.variance)).sum(0)
        return mean, np.maximum(np.sqrt((PRIOR_SETS * sd0**2 + squares) / (PRIOR_SETS + weight.sum(0))), LEAST_SPREAD)


def _nearness(one: tuple[str, str, str], other: tuple[str, str, str]) -> float:
    same = (_generation(one[0]) == _generation(other[0]), one[1] == other[1], one[2] == other[2])
    return float(np.prod([1.0 if equal else share for equal, share in zip(same, ELSEWHERE)]))


def _generation(chip: str) -> str:
    """Generation of a chip; its own name where it is a file that is not here."""
    try:
        return generation(chip)
    except ValueError:
        return chip
