"""Which cases to measure, and in which order: a design of which every prefix covers the space.

Each pair of operator and datatype walks through its space along a Sobol sequence, shifted by the seed, whose first n points leave no large gap for any n
and lie evenly in every power-of-two part of an axis. Coordinates are the logarithms of sizes. The pairs take turns by weight, the one furthest behind its
share first, so that a budget may end anywhere.
"""

import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BITS = 32
# Per axis: inner coefficients of the primitive polynomial as bits, and the first direction numbers (Joe and Kuo 2008, SIAM J. Sci. Comput. 30, table of
# directions for projections of two axes, axes 1 to 5).
_SOBOL: tuple[tuple[int, tuple[int, ...]], ...] = ((0, ()), (0, (1,)), (1, (1, 3)), (1, (1, 3, 1)), (2, (1, 1, 1)))

Sizes = tuple[tuple[str, int | str], ...]


class Case(NamedTuple):
    """One row to measure.

    Attributes:
      op: operator, as the tables name it.
      dtype: datatype of the operands.
      sizes: (column, value) pairs.
      source: who makes the kernel: `xla` or `cudnn`.
    """

    op: str
    dtype: str
    sizes: Sizes
    source: str = "xla"

    def __getitem__(self, name: str) -> int:  # type: ignore[override]
        return next(value for key, value in self.sizes if key == name)  # type: ignore[return-value]


class Stream(NamedTuple):
    """The cases of one operator and datatype, in order. `weight` is its share of the turns."""

    name: str
    weight: float
    cases: Iterator[Case]


def quasi_random(count: int, dimensions: int, seed: int | str = 0, start: int = 0) -> NDArray[np.float64]:
    """Points `start` to `start + count - 1` of the Sobol sequence in the unit cube, shape (count, dimensions); `seed` flips the same bits of all points.

    Raises:
      ValueError: for more than 5 dimensions, or points beyond 2^32.
    """
    if not 0 <= dimensions <= len(_SOBOL) or start + count > 2**_BITS:
        raise ValueError(f"{dimensions} dimensions and {start + count} points; at most {len(_SOBOL)} and 2**{_BITS} are known.")
    flipped = np.random.default_rng(zlib.crc32(str(seed).encode())).integers(0, 2**_BITS, dimensions, dtype=np.uint64)
    index, points = np.arange(start, start + count, dtype=np.uint64), np.empty((count, dimensions))
    for axis in range(dimensions):
        bits = np.zeros(count, np.uint64)
        for place, direction in enumerate(_directions(*_SOBOL[axis])):
            bits ^= np.where((index >> np.uint64(place)) & np.uint64(1), np.uint64(direction), np.uint64(0))
        points[:, axis] = (bits ^ flipped[axis]) / 2.0**_BITS
    return points


def _directions(coefficients: int, start: Sequence[int]) -> list[int]:
    """Direction numbers of one axis, by the recurrence of its primitive polynomial (Bratley and Fox 1988, ACM TOMS algorithm 659)."""
    odd, degree = list(start), len(start)
    for at in range(len(odd), _BITS):
        value = odd[at - degree] ^ (odd[at - degree] << degree) if degree else 1
        for k in range(1, degree):
            value ^= ((coefficients >> (degree - 1 - k)) & 1) * (odd[at - k] << k)
        odd.append(value)
    return [value << (_BITS - 1 - at) for at, value in enumerate(odd)]


def walk(op: str, dtype: str, source: str, dimensions: int, place: Callable[[Sequence[float]], dict[str, int | str]], seed: int) -> Iterator[Case]:
    """Cases of one operator and datatype without end, but for repetitions: `place` turns a point of the unit cube into sizes."""
    seen: set[Sizes] = set()
    for start in range(0, 2**20, 256):
        for point in quasi_random(256, dimensions, f"{seed} {op} {dtype}", start):
            sizes = tuple(place([float(u) for u in point]).items())
            if sizes not in seen:
                seen.add(sizes)
                yield Case(op, dtype, sizes, source)


def take_turns(streams: Sequence[Stream], wanted: Callable[[Case], bool | None]) -> Iterator[Case]:
    """The cases of all streams, each stream as often as its weight says.

    Args:
      wanted: True to take a case; False to pass it over and try the next of the stream; None when it is in the table already, and counts as taken. A stream
        that is passed over 200 times in a row is over.
    """
    queue = [((0.5 / stream.weight), at) for at, stream in enumerate(streams)]
    heapq.heapify(queue)
    while queue:
        due, at = heapq.heappop(queue)
        for _ in range(200):
            case = next(streams[at].cases, None)
            if case is None:
                break
            verdict = wanted(case)
            if verdict is not False:
                heapq.heappush(queue, (due + 1 / streams[at].weight, at))
                if verdict:
                    yield case
                break


def spread(u: float, low: float, high: float) -> float:
    """The point at `u` in [0, 1) between `low` and `high`, even in the logarithm."""
    return low * (high / low) ** u


def size(u: float, low: float, high: float) -> int:
    """A size at `u` between `low` and `high`, even in the logarithm: a multiple of 64 from 512 on, of 8 from 64 on, as sizes of models are."""
    value = spread(u, low, high)
    step = 64 if value >= 512 else 8 if value >= 64 else 1
    return max(step * round(value / step), 1)


def choose(u: float, values: Sequence[int]) -> int:
    """The value at `u` of a list."""
    return values[min(int(u * len(values)), len(values) - 1)]
