"""Which operator was running on a thread at a time, and which operator is around which: intervals that nest, walked once in order."""

import numpy as np


def nest(thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """For each interval the smallest one around it on its thread, -1 for none.

    Args:
      thread, start, end: shape (n,), in order of thread, start, and length from long to short.
    """
    return _walk(thread, start, end, thread, start, end, strict=True)


def innermost(thread: np.ndarray, start: np.ndarray, end: np.ndarray, at_thread: np.ndarray, at: np.ndarray) -> np.ndarray:
    """For each time `at` on `at_thread`, shape (m,), in any order, the smallest interval that holds it, -1 for none. Intervals as in `nest`."""
    order = np.lexsort((at, at_thread))
    result = np.full(len(at), -1, np.int64)
    result[order] = _walk(thread, start, end, at_thread[order], at[order], at[order], strict=False)
    return result


def _walk(
    thread: np.ndarray, start: np.ndarray, end: np.ndarray, at_thread: np.ndarray, at: np.ndarray, until: np.ndarray, *, strict: bool
) -> np.ndarray:
    """`strict`: the queries are the intervals themselves, and each is asked before it is entered."""
    threads, starts, ends = thread.tolist(), start.tolist(), end.tolist()
    found = np.full(len(at), -1, np.int64)
    stack: list[int] = []
    current, k, count = None, 0, len(starts)
    for i, (lane, time, last) in enumerate(zip(at_thread.tolist(), at.tolist(), until.tolist(), strict=True)):
        if lane != current:
            stack, current = [], lane
        while k < count and (threads[k] < lane or (threads[k] == lane and (k < i if strict else starts[k] <= time))):
            if threads[k] == lane:
                while stack and ends[stack[-1]] < ends[k]:  # ended, or crossing, which is not around anything that follows
                    stack.pop()
                stack.append(k)
            k += 1
        while stack and ends[stack[-1]] < last:
            stack.pop()
        if stack:
            found[i] = stack[-1]
    return found
