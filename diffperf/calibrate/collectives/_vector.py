"""The constants of a collective as one vector of logarithms, and back: what the fit moves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ...cost.collective import CollectiveConstants, NetworkConstants, NodeConstants, SourceConstants

_PARTS = (("node", NodeConstants), ("network", NetworkConstants), ("source", SourceConstants))
LEAVES = tuple(f"{part}.{field.name}" for part, cls in _PARTS for field in dataclasses.fields(cls))
"""Names of the constants in the order of the vector."""
INDEX = {name: i for i, name in enumerate(LEAVES)}
NUM_LEAVES = len(LEAVES)
NUM_NODE = len(dataclasses.fields(NodeConstants))
SECONDS = tuple(
    name for name in LEAVES if name.rsplit(".", 1)[1] in ("launch", "hop", "exchange_launch", "exchange_hop", "peer_ceiling", "ramp", "bump_step", "floor")
    and name != "source.ramp"
)  # fmt: skip
"""Those that are times; the others are rates, bytes and ratios."""


def constants_of(log_values: Float[Array, " leaves"], present: Bool[Array, " leaves"]) -> CollectiveConstants:
    """Constants from their logarithms; 0 where not `present`."""
    values = jnp.where(present, jnp.exp(jnp.where(present, log_values, 0.0)), 0.0)
    parts, at = [], 0
    for _, cls in _PARTS:
        count = len(dataclasses.fields(cls))
        parts.append(cls(*values[at : at + count]))
        at += count
    return CollectiveConstants(*parts)


def vector_of(constants: CollectiveConstants) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the constants (0 for a constant that is 0) and which are not 0."""
    values = np.array([float(leaf) for leaf in jax.tree.leaves(constants)])
    present = values > 0
    return np.log(np.where(present, values, 1.0)), present
