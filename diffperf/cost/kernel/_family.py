"""What every family of kernels offers: its constants and their priors, its time, its bound, its features."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._constants import Prior


@dataclass(frozen=True, eq=False)
class Family:
    """One family of kernels.

    Attributes:
      name: as in fitted files.
      constants: NamedTuple of its constants.
      priors: of each constant.
      time: `time(shape, device, constants)`. [s]
      bound: `bound(shape, device, constants)`, what no such kernel can beat. [s]
      roofline: `roofline(shape, device)`: arithmetic at the datasheet peak or compulsory traffic at the datasheet bandwidth. [s]
      features: `features(shape, device)`, for the correction, shape (..., features).
    """

    name: str
    constants: type
    priors: Mapping[str, Prior]
    time: Callable[..., Any]
    bound: Callable[..., Any]
    features: Callable[..., Any]
    roofline: Callable[..., Any]

    @property
    def size(self) -> int:
        """Number of constants."""
        return len(self.constants._fields)  # type: ignore[attr-defined]

    def spreads(self) -> np.ndarray:
        """Prior standard deviations of the unconstrained constants, shape (constants,)."""
        return np.array([self.priors[name].spread for name in self.constants._fields])  # type: ignore[attr-defined]
