"""How the constants of each log follow from the parameters of a fit: log constants = base + matrix @ parameters, priors centred at 0.

One form serves every level: a constant shared by all systems, one of a system, one of a single log. Rows carry the number of their log.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from ...cost.collective import collective_time
from ._map import NOISE, Mode, cpu_options, fit_map
from ._vector import INDEX, NUM_LEAVES, constants_of

BLOCK = 64
"""Rows of one operation are padded to a multiple of this, so that files of like length share a compilation."""


@dataclasses.dataclass(frozen=True)
class CollectiveRows:
    """Measured collectives, numpy columns of equal length.

    Attributes:
      kind: operation and algorithm, such as "all_reduce|auto".
      nbytes, ranks, ranks_per_node: of the message and the group. [B], [1], [1]
      log: number of the log.
      log_time: logarithm of the measured time.
      weight: weight in a fit.
    """

    kind: np.ndarray
    nbytes: np.ndarray
    ranks: np.ndarray
    ranks_per_node: np.ndarray
    log: np.ndarray
    log_time: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.nbytes)

    def take(self, at) -> "CollectiveRows":
        """Some rows."""
        return CollectiveRows(**{field.name: getattr(self, field.name)[at] for field in dataclasses.fields(self)})


@dataclasses.dataclass
class Design:
    """Parameters of a fit and what they move.

    Attributes:
      base: log constants of each log at the prior mean, shape (logs, leaves).
      present: which constants are not 0, shape (logs, leaves).
      names: of the parameters, in order.
      width: prior standard deviation of each.
      matrix: shape (logs, leaves, parameters).
    """

    base: np.ndarray
    present: np.ndarray
    names: list[str] = dataclasses.field(default_factory=list)
    width: list[float] = dataclasses.field(default_factory=list)
    entries: list[tuple[int, int, int, float]] = dataclasses.field(default_factory=list)

    def add(self, name: str, leaf: str, width: float, logs: Sequence[int], factor: float = 1.0) -> None:
        """A parameter `name` (made at its first mention) that moves `leaf` of `logs`, where the constant is present."""
        if name not in self.names:
            self.names.append(name)
            self.width.append(width)
        column, row = self.names.index(name), INDEX[leaf]
        self.entries += [(log, row, column, factor) for log in logs if self.present[log, row]]

    @property
    def matrix(self) -> np.ndarray:
        out = np.zeros((len(self.base), NUM_LEAVES, max(len(self.names), 1)))
        for log, row, column, factor in self.entries:
            out[log, row, column] += factor
        return out


def log_times(parameters, inputs):
    """Predicted log time of every padded row; `inputs` as `pack` makes them."""
    constants = inputs["base"] + inputs["matrix"] @ parameters
    out = []
    for kind, rows in sorted(inputs["rows"].items()):
        operation, algorithm = kind.split("|")

        def one(nbytes, ranks, per_node, log, operation=operation, algorithm=algorithm):
            model = constants_of(constants[log], inputs["present"][log])
            return jnp.log(collective_time(operation, model, nbytes, ranks, per_node, algorithm=algorithm))

        out.append(jax.vmap(one)(*rows))
    return jnp.concatenate(out)


def pack(rows: CollectiveRows, design: Design) -> tuple[dict, np.ndarray]:
    """Inputs of `log_times`, and the index of the row that stands at each padded place."""
    groups, order = {}, []
    for kind in sorted(set(rows.kind)):
        at = np.flatnonzero(rows.kind == kind)
        at = at[np.minimum(np.arange(-(-len(at) // BLOCK) * BLOCK), len(at) - 1)]
        groups[kind] = (rows.nbytes[at], rows.ranks[at], rows.ranks_per_node[at], rows.log[at])
        order.append(at)
    return dict(base=design.base, matrix=design.matrix, present=design.present, rows=groups), np.concatenate(order)


def _first(order: np.ndarray, n: int) -> np.ndarray:
    place = np.full(n, -1)
    place[order[::-1]] = np.arange(len(order))[::-1]
    return place


def fit_design(rows: CollectiveRows, design: Design, weights: np.ndarray | None = None, noise: float = NOISE) -> Mode:
    """Fits a design; with `weights` of shape (folds, rows) one fit per fold, stacked along the first axis."""
    inputs, order = pack(rows, design)
    weight = (rows.weight if weights is None else weights)[..., order] * (_first(order, len(rows))[order] == np.arange(len(order)))
    width = np.array(design.width)
    with jax.enable_x64(True):
        run = lambda w: fit_map(log_times, inputs, rows.log_time[order], w, np.zeros(len(width)), width, noise=noise)
        mode = run(weight) if weight.ndim == 1 else jax.tree.map(lambda *x: np.stack(x), *[run(w) for w in weight])
        return Mode(*(np.asarray(x) for x in mode))


def predict_design(rows: CollectiveRows, design: Design, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predicted log time, shape (rows,), and its gradient in the parameters, shape (rows, parameters)."""
    inputs, order = pack(rows, design)
    place = _first(order, len(rows))
    with jax.enable_x64(True):
        value, gradient = _value_and_jacobian()(jnp.asarray(parameters, float), inputs)
    return np.asarray(value)[place], np.asarray(gradient)[place]


@lru_cache(maxsize=1)
def _value_and_jacobian():
    both = lambda parameters, inputs: (log_times(parameters, inputs), jax.jacfwd(log_times)(parameters, inputs))
    return jax.jit(both, compiler_options=cpu_options())
