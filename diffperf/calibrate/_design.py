"""The linear map from all parameters (shared values, offsets, feature effects) to the constants of each row."""

import dataclasses
from collections.abc import Sequence
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

    def index(self) -> dict[Key, int]:
        """Position of each key."""
        return {key: i for i, key in enumerate(self.keys)}

    def matrix(self, rows: "Rows | Points") -> np.ndarray:
        """Map `constants = matrix @ parameters`, shape (rows, constants, parameters); labels the design does not know add nothing."""
        index = self.index()
        out = np.zeros((len(rows), len(NAMES), len(self.keys)))
        for c, constant in enumerate(CONSTANTS):
            out[:, c, index[(constant.name, "shared", "")]] = 1.0
            for level, labels in _labels(rows).items():
                if getattr(constant, level) > 0:
                    for r, label in enumerate(labels):
                        at = index.get((constant.name, level, label))
                        if at is not None:
                            out[r, c, at] = 1.0
        for feature, name, _, _ in FEATURE_EFFECTS:
            out[:, NAMES.index(name), index[(name, "feature", feature)]] += rows.features[:, FEATURES.index(feature)]
        return out


def _labels(rows: "Rows | Points") -> dict[str, Sequence[str]]:
    return {"generation": rows.generation, "chip": rows.accelerator, "family": rows.family, "stack": rows.stack}


def build_design(rows: Rows) -> Design:
    """The parameters that the rows can speak to: every shared value and feature effect, and an offset for each label that occurs."""
    keys, mean, width = [], [], []

    def add(key, m, w):
        keys.append(key)
        mean.append(m)
        width.append(w)

    for constant in CONSTANTS:
        add((constant.name, "shared", ""), unconstrained(constant.name, constant.mean), max(constant.shared, 1e-4))
        for level, labels in _labels(rows).items():
            spread = getattr(constant, level)
            if spread > 0:
                for label in sorted(set(labels) - {""}):
                    add((constant.name, level, label), 0.0, spread)
    for feature, name, m, w in FEATURE_EFFECTS:
        add((name, "feature", feature), m, w)
    return Design(tuple(keys), np.array(mean), np.array(width))
