"""Sets of time: unions of intervals, their length, and how much of other intervals they cover."""

import numpy as np


def union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Disjoint intervals in order that cover the same times, (start, end) of shape (m,). Intervals that touch are joined. [s]"""
    if not len(start):
        return np.zeros(0), np.zeros(0)
    order = np.argsort(start, kind="stable")
    first, last = start[order], np.maximum.accumulate(end[order])
    opens = np.concatenate([[True], first[1:] > last[:-1]])
    closes = np.concatenate([np.flatnonzero(opens)[1:] - 1, [len(first) - 1]])
    return first[opens], last[closes]


def length(start: np.ndarray, end: np.ndarray) -> float:
    """Time covered by any of the intervals. [s]"""
    first, last = union(start, end)
    return float(np.sum(last - first))


def covered(start: np.ndarray, end: np.ndarray, by_start: np.ndarray, by_end: np.ndarray) -> np.ndarray:
    """Time of each interval that the union of the others covers, shape (n,). [s]"""
    first, last = union(by_start, by_end)
    if not len(first):
        return np.zeros(len(start))
    times = np.stack([first, last], 1).ravel()
    until = np.repeat(np.cumsum(last - first), 2)
    until[::2] -= last - first
    found = np.interp(end, times, until) - np.interp(start, times, until)
    return np.where(found > 16 * np.finfo(float).eps * until[-1], found, 0.0)  # less is the rounding of the sums
