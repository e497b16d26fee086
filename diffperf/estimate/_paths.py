"""Dotted names of the numbers that a prediction is made from, such as `system.chip.peak_flops_per_s.bf16`, and where each lies in one vector.

The four inputs of `train_step` are flattened, in that order, into one vector, the "packed" inputs. Elements of a leaf with a named axis carry
the name (`bf16`), those of a model with several kinds of layer the position (`model.blocks.num_heads.0`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..hardware import DATATYPES
from ..parallel._plan import SCHEDULES

INPUTS = ("model", "system", "plan", "stack")
_AXES = {"peak_flops_per_s": DATATYPES, "matmul_efficiency": DATATYPES, "precision": DATATYPES, "schedule": SCHEDULES}


class Layout(NamedTuple):
    """Structure of the inputs without their numbers; equal and hashable for models with the same number of kinds of layer."""

    tree: Any
    shapes: tuple[tuple[int, ...], ...]


def layout_of(inputs: tuple) -> Layout:
    """The structure of `(model, system, plan, stack)`."""
    leaves, tree = jax.tree.flatten(inputs)
    return Layout(tree, tuple(np.shape(leaf) for leaf in leaves))


def pack(inputs: tuple) -> np.ndarray:
    """`(model, system, plan, stack)` as one vector, in the dtype of their leaves."""
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(inputs)])


def unpack(layout: Layout, packed: Float[Array, " numbers"] | list[Float[Array, ""]]) -> tuple:
    """Inverse of `pack`, also for a list of numbers, which is cheaper to differentiate in some of them."""
    leaves, at = [], 0
    for shape in layout.shapes:
        size = math.prod(shape)
        leaves.append(jnp.reshape(jnp.asarray(packed[at : at + size]), shape))
        at += size
    return jax.tree.unflatten(layout.tree, leaves)


def path_names(inputs: tuple) -> tuple[str, ...]:
    """One dotted name per element of the packed inputs."""
    names = []
    for key, leaf in jax.tree_util.tree_flatten_with_path(inputs)[0]:
        parts = [INPUTS[key[0].idx], *(k.name for k in key[1:])]
        stem, shape = ".".join(parts), np.shape(leaf)
        if shape == () or (shape == (1,) and parts[-1] not in _AXES):
            names.append(stem)
        else:
            names += [f"{stem}.{element}" for element in _AXES.get(parts[-1], range(shape[0]))]
    return tuple(names)


def slots_of(names: Sequence[str], path: str) -> list[int]:
    """Positions in the packed inputs of one number, or of all kinds of layer of one `model.blocks` leaf.

    Raises:
      ValueError: for an unknown path, with near ones; for a whole table over datatypes or schedules, with its elements.
    """
    if path in names:
        return [list(names).index(path)]
    inside = [i for i, name in enumerate(names) if name.startswith(path + ".")]
    elements = [names[i][len(path) + 1 :] for i in inside]
    if inside and all(element.isdigit() for element in elements):
        return inside
    if inside and path not in INPUTS:
        raise ValueError(f"{path!r} is not one number. Add one of: {', '.join(elements)}.")
    from rapidfuzz import process

    near = [match[0] for match in process.extract(path, list(names), limit=4)]
    raise ValueError(f"unknown path {path!r}. Near paths: {', '.join(near)}. A path starts with {', '.join(INPUTS[:-1])} or {INPUTS[-1]}.")
