"""Sets of time: unions of intervals, their length, how much of other intervals they cover, and which of them have company."""

import numpy as np

_RESOLUTION = 0.5e-9  # profilers record nanoseconds [s]


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


def accompanied(start: np.ndarray, end: np.ndarray, lane: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Whether an interval of another lane runs beside each of them, shape (n,).

    Args:
      start, end, lane: shape (n,); a lane of -1 is not known, and each interval there counts as on a lane of its own. [s]
      by: mask of the intervals that count as company, shape (n,).
    """
    result = np.zeros(len(start), bool)
    for number in np.unique(lane):
        at, others = lane == number, by & (lane != number)
        result[at] = covered(start[at], end[at], start[others], end[others]) > 0
    lost = np.flatnonzero(lane < 0)
    lost = lost[np.argsort(start[lost], kind="stable")]
    begin, until = start[lost], end[lost]
    company = by[lost] & (until > begin)
    before = np.maximum.accumulate(np.concatenate([[-np.inf], np.where(company, until, -np.inf)]))[:-1]
    after = np.minimum.accumulate(np.concatenate([[np.inf], np.where(company, begin, np.inf)[::-1]]))[:-1][::-1]
    result[lost] |= ((before > begin + _RESOLUTION) | (after < until - _RESOLUTION)) & (until > begin)
    return result
