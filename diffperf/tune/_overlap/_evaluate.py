"""Exact makespans of points, compiled once per shape of region, remembered and counted."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ...cost.contention import Contention, OverlapRegion, Settings, channel_time, overlap_times
from ...cost.contention._region import KernelRows
from ._space import Grid

_ROWS = 64
_MANY_ROWS = 8192


class Seen(NamedTuple):
    """What a run of one point would measure. [s]

    Attributes:
      makespan: of the region.
      compute: kernels beside the collectives.
      transfer: each collective alone, shape (collectives,).
    """

    makespan: float
    compute: float
    transfer: np.ndarray


def anonymous(region: OverlapRegion) -> OverlapRegion:
    """Without names, and filled up with kernels that do nothing, so that regions of about one size share a compilation."""
    count = region.kernels.flops.shape[0]
    more = next(size for k in range(3, 30) for size in (2**k, 3 * 2 ** (k - 1)) if size >= count) - count
    idle = KernelRows(*(jnp.full(more, fill) for fill in (0.0, 0.0, 0.0, 1.0, 0.0)))
    kernels = jax.tree.map(lambda mine, none: jnp.concatenate([mine, none]), region.kernels, idle)
    return OverlapRegion(region.chip, kernels, region.collectives, region.order, (), (), ())


@eqx.filter_jit
def _measure(region: OverlapRegion, settings: Settings, constants: Contention):
    def one(settings):
        times = overlap_times(region, settings, constants)
        return times.overlapped, times.compute_beside, channel_time(region.collectives, settings, constants.channel_rate, constants.sync)[0]

    return jax.vmap(one)(settings)


class Remembered:
    """Results of points, each computed once.

    Args:
      run: columns of results, the first axis over points, of points (n, collectives, 4).
    """

    def __init__(self, run: Callable[[np.ndarray], Iterable[np.ndarray]]):
        self._run = run
        self._rows: dict[bytes, tuple] = {}

    def __len__(self) -> int:
        """Distinct points so far."""
        return len(self._rows)

    def __call__(self, points: np.ndarray) -> list[tuple]:
        """A row of results for each point."""
        keys = [point.astype(np.int64).tobytes() for point in points]
        new = {key: point for key, point in zip(keys, points) if key not in self._rows}
        if new:
            self._rows.update(zip(new, zip(*self._run(np.stack(list(new.values()))))))
        return [self._rows[key] for key in keys]


def in_batches(run: Callable[[np.ndarray], Iterable], points: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
    """Columns of `run(points)`, which sees `rows` points at a time, the last ones filled up, so that it is compiled once."""
    found = []
    for i in range(0, len(points), rows):
        part = points[i : i + rows]
        padded = np.concatenate([part, np.repeat(part[:1], rows - len(part), axis=0)])
        found.append([np.asarray(column)[: len(part)] for column in run(padded)])
    return tuple(np.concatenate(column) for column in zip(*found))


class Evaluator:
    """Exact evaluations at one set of constants.

    Attributes:
      evaluations: distinct points so far.
    """

    def __init__(self, grid: Grid, constants: Contention):
        self.grid, self.constants, self.region = grid, constants, anonymous(grid.region)
        self._remembered = Remembered(lambda points: self._run(points, _ROWS))

    @property
    def evaluations(self) -> int:
        return len(self._remembered)

    def seen(self, points: np.ndarray) -> list[Seen]:
        """Measures points (n, collectives, 4)."""
        return [Seen(float(makespan), float(compute), transfer) for makespan, compute, transfer in self._remembered(points)]

    def values(self, points: np.ndarray) -> np.ndarray:
        """Makespans of points (n, collectives, 4). [s]"""
        return np.array([seen.makespan for seen in self.seen(points)])

    def all(self) -> np.ndarray:
        """Makespans of every point of the grid. [s]"""
        n = self.grid.num_points
        return np.concatenate([self._run(self.grid.every(i, min(i + _MANY_ROWS, n)), _MANY_ROWS if n > _ROWS else _ROWS)[0] for i in range(0, n, _MANY_ROWS)])

    def _run(self, points: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
        return in_batches(lambda part: _measure(self.region, self.grid.settings(part), self.constants), points, rows)
