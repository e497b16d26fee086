"""The linear map from all parameters (shared values, offsets, feature effects) to the constants of each row.

The map is sparse (a constant of a row is a sum of at most six parameters), so it is kept as positions and coefficients.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ._constants import CONSTANTS, FEATURE_EFFECTS, NAMES, unconstrained
from ._frameworks import FEATURES
from ._rows import Rows

if TYPE_CHECKING:
    from ._residual import Points

LEVELS = ("generation", "chip", "family", "stack")
Key = tuple[str, str, str]
"""(constant, level, label): ("matmul_factor", "stack", "torchtitan"); shared values have level "shared" and label ""."""


@dataclasses.dataclass(frozen=True)
class Design:
    """Parameters and the rows' use of them.

    Attributes:
      keys: one per parameter.
      mean: prior means on the scale of the fit, shape (parameters,).
      width: prior widths, shape (parameters,).
    """

    keys: tuple[Key, ...]
    mean: np.ndarray
    width: np.ndarray

    @cached_property
    def index(self) -> dict[Key, int]:
        """Position of each key."""
        return {key: i for i, key in enumerate(self.keys)}

    def _terms(self, rows: "Rows | Points") -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(constant, position of a parameter per row or -1, coefficient per row); labels the design does not know add nothing."""
        ones = np.ones(len(rows))
        labels = labels_of(rows)
        for c, constant in enumerate(CONSTANTS):
            yield c, np.full(len(rows), self.index[constant.name, "shared", ""]), ones
            for level in LEVELS:
                if getattr(constant, level) > 0:
                    yield c, np.array([self.index.get((constant.name, level, label), -1) for label in labels[level]], int), ones
        for feature, name, _, _ in FEATURE_EFFECTS:
            position = np.full(len(rows), self.index[name, "feature", feature])
            yield NAMES.index(name), position, rows.features[:, FEATURES.index(feature)]

    def constants(self, rows: "Rows | Points", parameters: np.ndarray) -> np.ndarray:
        """Constants of each row, shape (rows, constants)."""
        out = np.zeros((len(rows), len(NAMES)))
        for c, position, coefficient in self._terms(rows):
            out[:, c] += np.where(position >= 0, parameters[position], 0.0) * coefficient
        return out

    def jacobian(self, rows: "Rows | Points", gradient: np.ndarray) -> np.ndarray:
        """Gradient of each row in the parameters, shape (rows, parameters), from that in its constants, shape (rows, constants)."""
        out = np.zeros((len(rows), len(self.keys)))
        row = np.arange(len(rows))
        for c, position, coefficient in self._terms(rows):
            known = position >= 0
            out[row[known], position[known]] += gradient[known, c] * coefficient[known]
        return out


def labels_of(rows: "Rows | Points") -> dict[str, Sequence[str]]:
    """The rows' labels by level."""
    return {"generation": rows.generation, "chip": rows.accelerator, "family": rows.family, "stack": rows.stack}


def build_design(rows: Rows) -> Design:
    """The parameters that the rows can speak to: every shared value and feature effect, and an offset for each label that occurs."""
    keys, mean, width = [], [], []

    def add(key, m, w):
        keys.append(key)
        mean.append(m)
        width.append(w)

    labels = {level: sorted(set(names) - {""}) for level, names in labels_of(rows).items()}
    for constant in CONSTANTS:
        add((constant.name, "shared", ""), unconstrained(constant.name, constant.mean), max(constant.shared, 1e-4))
        for level in LEVELS:
            spread = getattr(constant, level)
            if spread > 0:
                for label in labels[level]:
                    add((constant.name, level, label), 0.0, spread)
    for feature, name, m, w in FEATURE_EFFECTS:
        add((name, "feature", feature), m, w)
    return Design(tuple(keys), np.array(mean), np.array(width))
