"""Constants of a kernel library on a chip: how each is constrained, where it starts and how far it may move.

Every family of kernels (`_matmul.py`, `_attention.py`, ...) has a `NamedTuple` of constants and a dictionary of `Prior`s with the same names.
A fit moves unconstrained numbers, 0 at the start of every prior; `constrain` turns them into constants. Rates and bandwidths are multiples
of the datasheet's, so that a constant means the same on every chip.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MOST = 9.0  # unconstrained numbers beyond this say no more: exp(9) and sigmoid(9) are at the end of their ranges
POWER_MOST = 8.0  # p-norms beyond this power are a maximum, and overflow


class Prior(NamedTuple):
    """Prior of one constant.

    Attributes:
      start: its usual value, in its own unit.
      kind: `positive` (start * exp(u)), `share` (between 0 and 1, sigmoid) or `power` (1 to 8, 1 + exp, bounded).
      spread: standard deviation, between chips and libraries, of the unconstrained number. [1]
    """

    start: float
    kind: str
    spread: float


Constants = TypeVar("Constants", bound=tuple)


def constrain(kind: type[Constants], priors: Mapping[str, Prior], free: Float[Array, "*batch n"]) -> Constants:
    """Constants from unconstrained numbers, the last axis in the order of the fields of `kind`."""
    free = jnp.clip(free, -MOST, MOST)
    values = []
    for i, name in enumerate(kind._fields):  # type: ignore[attr-defined]
        prior, u = priors[name], free[..., i]
        if prior.kind == "positive":
            values.append(prior.start * jnp.exp(u))
        elif prior.kind == "share":
            values.append(jax.nn.sigmoid(math.log(prior.start / (1 - prior.start)) + u))
        else:
            values.append(1 + (POWER_MOST - 1) * jax.nn.sigmoid(math.log((prior.start - 1) / (POWER_MOST - prior.start)) + u))
    return kind(*values)
