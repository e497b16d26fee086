"""Non-dominated points of several costs."""

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Real


def pareto(costs: Real[ArrayLike, "points objectives"]) -> Bool[np.ndarray, " points"]:
    """True for each point that no other point beats: none is at most as costly in every objective and cheaper in one.

    Equal points are kept together. Points with a NaN or infinite cost are never on the front. Two objectives take n log n time by one sort;
    more take n times the size of the front.

    Args:
      costs: what to keep small, one row per point.
    """
    costs = np.asarray(costs, float)
    if costs.ndim != 2:
        raise ValueError(f"costs has shape {costs.shape}; it should be (points, objectives). Stack the objectives along the last axis.")
    finite = np.isfinite(costs).all(axis=1)
    distinct, back = np.unique(costs[finite], axis=0, return_inverse=True)  # sorted by the first objective, then the second, ...
    front = np.zeros(len(distinct), bool)
    if costs.shape[1] <= 2:
        last = distinct[:, -1]
        front = np.concatenate([np.ones(min(len(last), 1), bool), last[1:] < np.minimum.accumulate(last)[:-1]])
        if costs.shape[1] == 1:
            front = np.arange(len(last)) == 0
    else:
        left = np.arange(len(distinct))
        while left.size:  # the first of what is left is dominated by nobody: what could dominate it would sort before it
            point = left[0]
            front[point] = True
            left = left[(distinct[left] < distinct[point]).any(axis=1)]
    mask = np.zeros(len(costs), bool)
    mask[finite] = front[np.ravel(back)]
    return mask
