"""Which cases to measure, and in which order: a design of which every prefix covers the space.

Each pair of operator and datatype walks through its space along the R-sequence, an additive recurrence `frac(shift + i alpha)` whose `alpha` are powers of
the inverse of the generalised golden ratio (M. Roberts 2018, "The Unreasonable Effectiveness of Quasirandom Sequences"); the root of
`x^(d+1) = x + 1` is the one of d dimensions. Its first n points leave no large gap for any n. Coordinates are the logarithms of sizes. The pairs take turns by
weight, the one furthest behind its share first, so that a budget may end anywhere.
"""

import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """Points `start` to `start + count - 1` of the R-sequence in the unit cube, shape (count, dimensions); `seed` shifts it."""
    ratio = 2.0
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (dimensions + 1))
    alpha = ratio ** -np.arange(1.0, dimensions + 1)
    shift = np.random.default_rng(zlib.crc32(str(seed).encode())).random(dimensions)
    return (shift + np.arange(start + 1, start + count + 1)[:, None] * alpha) % 1.0


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
