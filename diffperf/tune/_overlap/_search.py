"""Searches that only measure: exhaustive, along coordinates, and by priority."""

import itertools
from collections.abc import Callable

import numpy as np

from ._evaluate import Evaluator, Seen
from ._space import Grid

Values = Callable[[np.ndarray], np.ndarray]
_MOVES = np.array([(1, 0, 0), (0, 1, 0), (1, -1, 0), (0, 0, 1)])  # of channels, chunk and threads; channels times chunk is what contention feels

_REACH = 3  # places between collectives that exchange settings, at most


def exhaustive(evaluator: Evaluator) -> np.ndarray:
    """The best of all points; of equal ones that with fewest channels of the first collectives."""
    best = int(np.argmin(evaluator.all()))
    return evaluator.grid.every(best, best + 1)[0]


def coordinate(grid: Grid, values: Values, start: np.ndarray) -> np.ndarray:
    """Tries all values of one knob of one collective after the other and keeps the best, knob by knob, until a round changes nothing.

    After AutoCCL (NSDI 2025), which tunes each collective so for its own time alone. Chunks first: with channels first the search often ends far off.
    """
    point = start.copy()
    while True:
        before = point.copy()
        for axis, i in itertools.product((1, 0, 2, 3), range(grid.count)):
            line = np.repeat(point[None], grid.sizes[i, axis], axis=0)
            line[:, i, axis] = np.arange(grid.sizes[i, axis])
            times = values(line)
            if times.min() < times[point[i, axis]]:
                point = line[int(np.argmin(times))]
        if (point == before).all():
            return point


def priority(evaluator: Evaluator, start: np.ndarray, *, steepest: bool = False) -> np.ndarray:
    """Priority search after Lagom (arXiv:2602.20656): from fewest channels and smallest chunks, steps one knob of one collective up at a time.

    A candidate's priority is the compute time it costs per communication time it gains; the first one, cheapest first, that shortens the region is kept.
    Ends when communication takes no longer than compute, or nothing helps. Threads, algorithm and protocol stay those of `start`. A collective that runs
    beside no compute costs nothing and goes first, which can end far off where there are several; `steepest` takes what shortens the region most instead.
    """
    grid, point = evaluator.grid, start.copy()
    point[:, :2] = 0
    here = evaluator.seen(point[None])[0]
    while _longest_stream(grid, here.transfer) > here.compute:
        moves = [(i, axis) for i in range(grid.count) for axis in (0, 1) if point[i, axis] + 1 < grid.sizes[i, axis]]
        if not moves:
            break
        candidates = np.repeat(point[None], len(moves), axis=0)
        for k, (i, axis) in enumerate(moves):
            candidates[k, i, axis] += 1
        measured = evaluator.seen(candidates)
        cost = [seen.makespan if steepest else _priority(here, seen, i) for seen, (i, _) in zip(measured, moves)]
        better = [k for k in np.argsort(cost, kind="stable") if measured[k].makespan < here.makespan]
        if not better:
            break
        point, here = candidates[better[0]], measured[better[0]]
    return point


def _priority(here: Seen, candidate: Seen, moved: int) -> float:
    gained = here.transfer[moved] - candidate.transfer[moved]
    return (candidate.compute - here.compute) / gained if gained > 0 else np.inf


def _longest_stream(grid: Grid, transfer: np.ndarray) -> float:
    padded = np.append(transfer, 0.0)
    return float(padded[np.asarray(grid.region.order)].sum(axis=1).max())


def polish(grid: Grid, values: Values, start: np.ndarray, spend: Callable[[], int]) -> np.ndarray:
    """Moves to neighbours while that helps: alike collectives together first, then each alone, then settings exchanged between two.

    A move changes a knob by one place, channels and chunk against each other, or the choice. Exchanges matter where waves make it cheaper to give one
    collective more channels than the others: which one is not felt by moves of one at a time.

    Args:
      grid: of the region.
      values: what to make small, of points (n, collectives, 4).
      start: a point.
      spend: evaluations that are left; polishing ends when a move's neighbours are more.
    """
    point, value = start, float(values(start[None])[0])
    members = [group for group in grid.groups if len(group) > 1] + [np.array([i]) for i in range(grid.count)]
    while True:
        before = value
        for group in members:
            for move in range(len(_MOVES) + 1):
                neighbours = _neighbours(grid, point, group, move)
                if len(neighbours) > spend():
                    return point
                point, value = _better(values, point, value, neighbours)
        exchanged = _exchanged(grid, point)
        if len(exchanged) > spend():
            return point
        point, value = _better(values, point, value, exchanged)
        if value == before:
            return point


def _better(values: Values, point: np.ndarray, value: float, others: np.ndarray) -> tuple[np.ndarray, float]:
    """The best of a point and others, and its value."""
    found = values(others) if len(others) else np.array([np.inf])
    return (others[int(np.argmin(found))], float(found.min())) if found.min() < value else (point, value)


def _exchanged(grid: Grid, point: np.ndarray) -> np.ndarray:
    """Points with the settings of two collectives near each other exchanged, where both may have either."""
    new = []
    for i, j in itertools.combinations(range(grid.count), 2):
        if j - i <= _REACH and (point[i] != point[j]).any() and grid.region.choices[i] == grid.region.choices[j]:
            moved = point.copy()
            moved[[i, j]] = point[[j, i]]
            new.append(moved)
    return np.stack(new) if new else np.zeros((0, *point.shape), int)


def _neighbours(grid: Grid, point: np.ndarray, group: np.ndarray, move: int) -> np.ndarray:
    """Points that differ from `point` by one of `_MOVES`, or in the choice, for all of `group`."""
    new = []
    if move < len(_MOVES):
        for sign in (1, -1):
            moved = point.copy()
            moved[group, :3] = np.clip(moved[group, :3] + sign * _MOVES[move], 0, grid.sizes[group, :3] - 1)
            new.append(moved)
    else:
        for choice in range(grid.sizes[group[0], 3]):
            moved = point.copy()
            moved[group, 3] = choice
            new.append(moved)
    new = [moved for moved in new if (moved != point).any()]
    return np.stack(new) if new else np.zeros((0, *point.shape), int)
