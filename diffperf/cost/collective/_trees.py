"""Spanning trees packed on an arbitrary topology: the rate they reach in closed form, and the trees themselves.

Trees from one root that share links fairly can carry, all together, the smallest cut between the root and the rest (Edmonds 1973, branching theorem; used by
Blink, Wang et al. 2020, arXiv:1910.04940). `packing_rate` takes that minimum over all cuts, so it is exact, differentiable in each link (1 on the links of
the smallest cut) and fit for `vmap`; it suits nodes of up to 16 devices. `pack_trees` finds the trees on the host by column generation: a linear programme
over the trees found so far, whose prices ask for the cheapest tree of all (Chu and Liu 1965, Edmonds 1967) until none would help. Leaves out the number of
channels and chunking, and trees through switches that copy: `pack_trees` reaches every device, also one that is a switch.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ...smooth import minimum

MOST_DEVICES = 16  # 32768 cuts


class Tree(NamedTuple):
    """One spanning tree.

    Attributes:
      parents: of each device, -1 for the root.
      rate: that it carries. [B/s]
    """

    parents: tuple[int, ...]
    rate: float


def packing_rate(
    capacity: Real[ArrayLike, "n n"], root: int, members: tuple[int, ...] | None = None, temperature: Real[ArrayLike, ""] = 0.0
) -> Float[Array, ""]:
    """Rate at which `root` can send the same data to all: the smallest cut between it and any member, over all cuts. [B/s]

    Reached by packed trees where every device is a member; where others only pass data on (switches), an upper bound.

    Args:
      capacity: rate of the link from each device to each, shape (n, n); 0 for none. [B/s]
      root: index of the sender.
      members: devices that should have the data; all without it.
      temperature: 0 is exact; above it errs low (see `smooth.minimum`).
    Raises:
      ValueError: `capacity` is not square, has more than 16 devices, or `root` or a member is none of them.
    """
    capacity = si(capacity)
    n = _devices(capacity.shape, root)
    if n > MOST_DEVICES:
        raise ValueError(f"capacity has {n} devices; all cuts are looked at, which suits up to {MOST_DEVICES}. Leave out devices that have no links.")
    members = tuple(range(n)) if members is None else members
    if not set(members) <= set(range(n)):
        raise ValueError(f"members are {members}; they should be indices of the {n} devices.")
    inside = _cuts(n, root, members)
    if not len(inside):
        return jnp.asarray(jnp.inf, capacity.dtype)
    across = jnp.sum(((1 - inside) @ capacity) * inside, axis=-1)
    return minimum(across, temperature)


def packed_time(
    nbytes: Real[ArrayLike, ""], rate: Real[ArrayLike, ""], depth: Real[ArrayLike, ""] = 0.0, hop_latency: Real[ArrayLike, ""] = 0.0
) -> Float[Array, ""]:
    """Time to broadcast or reduce a buffer of `nbytes` [B] over packed trees, `depth hop_latency + nbytes / rate`. [s]

    An all-reduce over links of equal rate in both directions reduces up and broadcasts down the same trees at once: the same time with twice the depth.
    """
    return si(depth) * si(hop_latency) + si(nbytes) / si(rate)


def pack_trees(capacity: np.ndarray, root: int, max_trees: int | None = None) -> tuple[Tree, ...]:
    """Trees from `root` and rates that no link's capacity forbids, together as fast as any (on the host, in numpy).

    Args:
      capacity: rate of the link from each device to each, shape (n, n). [B/s]
      root: index of the sender.
      max_trees: keep at most that many, the fastest, and share the links among them anew; fewer trees need fewer channels.
    Returns:
      Trees with positive rates, fastest first; none where a device cannot be reached.
    Raises:
      ValueError: `capacity` is not square, negative or not finite, `root` is not a device, or `max_trees` is below 1.
    """
    capacity = np.asarray(capacity, float)
    n = _devices(capacity.shape, root)
    if not np.all(np.isfinite(capacity)) or np.any(capacity < 0):
        raise ValueError("capacity has a negative or infinite rate; give rates of 0 or more.")
    if max_trees is not None and max_trees < 1:
        raise ValueError(f"max_trees is {max_trees}; it should be at least 1.")
    unit = float(capacity.max(initial=0.0))
    if n < 2 or unit == 0:
        return ()
    capacity = np.where(np.eye(n, dtype=bool), 0.0, capacity) / unit
    tree = _cheapest_tree(np.where(capacity > 0, 1.0, np.inf), root)
    if tree is None:
        return ()
    trees, rates = [tree], np.array([1.0])
    for _ in range(1000 * n):  # ends long before: every pass adds a tree that is new
        rates, prices = _share(trees, capacity)
        tree = _cheapest_tree(np.where(capacity > 0, prices, np.inf), root)
        if tree is None or tree in trees or sum(prices[p, v] for v, p in enumerate(tree) if p >= 0) >= 1 - 1e-9:
            break
        trees.append(tree)
    if max_trees is not None and np.sum(rates > 1e-9) > max_trees:
        trees = [trees[k] for k in np.argsort(-rates)[:max_trees]]
        rates, _ = _share(trees, capacity)
    order = [k for k in np.argsort(-rates, kind="stable") if rates[k] > 1e-9]
    return tuple(Tree(trees[k], float(rates[k]) * unit) for k in order)


def _devices(shape: tuple[int, ...], root: int) -> int:
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ValueError(f"capacity has shape {shape}; it should be square, a rate from each device to each.")
    if not 0 <= root < shape[0]:
        raise ValueError(f"root is {root}; it should be one of the {shape[0]} devices, counted from 0.")
    return shape[0]


def _cuts(n: int, root: int, members: tuple[int, ...]) -> np.ndarray:
    """Membership of every set without the root that holds a member, shape (sets, n)."""
    others = [v for v in range(n) if v != root]
    inside = np.zeros((2 ** len(others) - 1, n))
    inside[:, others] = (np.arange(1, 2 ** len(others))[:, None] >> np.arange(len(others))) & 1
    return inside[np.any(inside[:, [v for v in members if v != root]] > 0, axis=1)] if set(members) - {root} else inside[:0]


def _share(trees: list[tuple[int, ...]], capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rates of the trees with the largest sum that fit the links, and the price of each link (the multipliers)."""
    from scipy.optimize import linprog

    links = np.argwhere(capacity > 0)
    uses = np.array([[float(tree[v] == u) for tree in trees] for u, v in links])
    solved = linprog(-np.ones(len(trees)), A_ub=uses, b_ub=capacity[tuple(links.T)], method="highs")
    prices = np.zeros_like(capacity)
    prices[tuple(links.T)] = np.maximum(-solved.ineqlin.marginals, 0.0)
    return solved.x, prices


def _cheapest_tree(cost: np.ndarray, root: int) -> tuple[int, ...] | None:
    """Parents of the spanning tree from `root` whose links cost least (Chu-Liu-Edmonds); None where there is none. `inf` for no link."""
    n = len(cost)
    best = {v: int(np.argmin(np.where(np.arange(n) == v, np.inf, cost[:, v]))) for v in range(n) if v != root}
    if any(not np.isfinite(cost[u, v]) or u == v for v, u in best.items()):
        return None
    cycle = _cycle(best, root)
    if not cycle:
        return tuple(best.get(v, -1) for v in range(n))
    # The cycle becomes one device, entered at the price of the link that its entry replaces.
    rest = [v for v in range(n) if v not in cycle]
    at, small = {v: k for k, v in enumerate(rest)}, np.full((len(rest) + 1, len(rest) + 1), np.inf)
    inner = np.array(cycle)
    paid = np.array([cost[best[v], v] for v in cycle])
    enter, leave = {}, {}
    for u in rest:
        prices = cost[u, inner] - paid
        enter[u], small[at[u], -1] = int(inner[np.argmin(prices)]), prices.min()
        leave[u], small[-1, at[u]] = int(inner[np.argmin(cost[inner, u])]), cost[inner, u].min()
        for v in rest:
            small[at[u], at[v]] = cost[u, v] if u != v else np.inf
    tree = _cheapest_tree(small, at[root])
    if tree is None:
        return None
    parents = [-1] * n
    for v in cycle:
        parents[v] = best[v]
    for v in rest:
        parent = tree[at[v]]
        parents[v] = -1 if parent < 0 else leave[v] if parent == len(rest) else rest[parent]
    source = rest[tree[-1]]
    parents[enter[source]] = source
    return tuple(parents)


def _cycle(best: dict[int, int], root: int) -> list[int]:
    """Devices of a cycle among the chosen parents; none without one."""
    for start in best:
        seen, v = [], start
        while v != root and v not in seen:
            seen.append(v)
            v = best[v]
        if v != root:
            return seen[seen.index(v) :]
    return []
