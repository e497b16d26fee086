"""What may be chosen for each collective: a grid of channels, chunk sizes and threads, and the collective's own algorithms and protocols."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...cost.contention import OverlapRegion, Setting, Settings, make_settings
from ...cost.contention._region import check_setting

KIB = 1024


@dataclasses.dataclass(frozen=True)
class OverlapSpace:
    """Values of each knob, rising; the default grid is that of the published studies.

    Attributes:
      channels: [1]
      chunk_bytes: [B]
      threads: per channel. [1]
    """

    channels: tuple[float, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 61)
    chunk_bytes: tuple[float, ...] = tuple(KIB * k for k in (128, 256, 384, 512, 684, 1024, 1366, 2048, 4096))
    threads: tuple[float, ...] = (128, 256, 512)


DEFAULT_SPACE = OverlapSpace()


class Grid:
    """A space for the collectives of one region. A point is an integer array (collectives, 4): places of channels, chunk, threads and choice.

    Attributes:
      axes: values of the three knobs.
      sizes: number of places, shape (collectives, 4).
      groups: indices of collectives that are alike: equal work, equal choices.
    """

    def __init__(self, region: OverlapRegion, space: OverlapSpace):
        """Raises ValueError for values that do not rise or are not whole, and for what the hardware cannot run."""
        if not isinstance(space, OverlapSpace):
            raise ValueError(f"space is {space!r}; give an OverlapSpace.")
        self.axes = tuple(_axis(name, getattr(space, name)) for name in ("channels", "chunk_bytes", "threads"))
        channels, chunks, threads = self.axes
        for name in region.collective_names:
            for setting in (*(Setting(c, chunks[0]) for c in channels), *(Setting(1, c) for c in chunks), *(Setting(1, chunks[0], t) for t in threads)):
                check_setting(region, name, setting)
        self.region, self.count = region, len(region.collective_names)
        self.sizes = np.array([[*map(len, self.axes), len(choices)] for choices in region.choices])
        self.width = region.collectives.wire.shape[-1]
        alike: dict[tuple, list[int]] = {}
        columns = [np.asarray(column) for column in region.collectives]
        for i in range(self.count):
            alike.setdefault((region.choices[i], *(tuple(np.atleast_1d(column[i])) for column in columns)), []).append(i)
        self.groups = [np.array(group) for group in alike.values()]

    @property
    def num_points(self) -> int:
        return math.prod(int(n) for n in self.sizes.ravel())

    def settings(self, points: np.ndarray) -> Settings:
        """Settings of points (..., collectives, 4)."""
        channels, chunk, threads = (jnp.asarray(axis[points[..., i]]) for i, axis in enumerate(self.axes))
        return Settings(channels, chunk, threads, jnp.asarray(np.eye(self.width)[points[..., 3]]))

    def describe(self, point: np.ndarray) -> tuple[Setting, ...]:
        """Settings of one point, in words."""
        knobs = [tuple(int(axis[k]) for axis, k in zip(self.axes, row)) for row in point]
        return tuple(Setting(*knob, *choices[row[3]]) for knob, row, choices in zip(knobs, point, self.region.choices))

    def nearest(self, settings: Settings) -> np.ndarray:
        """Points next to fractional settings, in logs; the choice of most weight."""
        columns = [np.asarray(column)[..., None] for column in settings[:3]]
        places = [np.argmin(np.abs(np.log(column / axis)), axis=-1) for column, axis in zip(columns, self.axes)]
        weights = np.asarray(settings.weights)
        allowed = np.arange(self.width) < self.sizes[:, 3:]
        return np.stack([*places, np.argmax(np.where(allowed, weights, -1.0), axis=-1)], axis=-1)

    def place(self, settings: tuple[Setting, ...]) -> np.ndarray:
        """The point next to checked settings."""
        return self.nearest(make_settings(self.region, settings))

    def every(self, start: int, stop: int) -> np.ndarray:
        """Points `start` to `stop` of all, in order."""
        flat = np.unravel_index(np.arange(start, stop), tuple(self.sizes.ravel()))
        return np.stack(flat, axis=-1).reshape(-1, self.count, 4)


def _axis(name: str, values: Any) -> np.ndarray:
    """Checked values of a knob."""
    try:
        axis = np.array([float(value) for value in values])
    except (TypeError, ValueError):
        raise ValueError(f"{name} of the space is {values!r}; give a tuple of numbers, rising.") from None
    if not len(axis) or not np.isfinite(axis).all() or (axis != np.round(axis)).any() or (np.diff(axis) <= 0).any():
        raise ValueError(f"{name} of the space is {values}; give at least one value, whole numbers, rising.")
    return axis
