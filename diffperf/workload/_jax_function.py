"""The operators of a JAX function, read from its jaxpr before any compilation.

Exact for matrix products and convolutions. Leaves out fusion (each operator reads its inputs and writes its outputs), and counts a
`while_loop` once, since its trips are not known.
"""
# JAX types every abstract value as one without shape:
# pyright: reportAttributeAccessIssue=false

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

_MOVES = frozenset(
    "broadcast_in_dim bitcast_convert_type concatenate convert_element_type copy copy_p device_put dynamic_slice dynamic_update_slice"
    " expand_dims gather iota pad reshape rev slice split squeeze stop_gradient transpose".split()
)
"""Primitives that move data and compute nothing."""


@dataclass(frozen=True)
class Operator:
    """One primitive of a function, summed over the trips of the loops around it.

    Attributes:
      primitive: its name in the jaxpr.
      flops: operations; a multiply and an add are 2. [FLOP]
      nbytes: inputs and outputs. [B]
      input_shapes: shapes of its inputs.
      output_shapes: shapes of its outputs.
      count: times it runs. [1]
    """

    primitive: str
    flops: float
    nbytes: float
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    count: int


def operators_of(fn: Callable[..., Any], *args: Any) -> list[Operator]:
    """The operators that `fn(*args)` runs.

    `dot_general` costs 2 FLOP per output element and contracted element, a convolution 2 per output element and weight that meets it, a
    reduction 1 per input element, any other arithmetic 1 per output element, and moving data 0. `scan` counts its body `length` times,
    `cond` its branch with most FLOP; calls (`jit`, `checkpoint`, `custom_vjp`) are looked into.

    Args:
      fn: a function of arrays.
      args: arrays, or `jax.ShapeDtypeStruct`s, since nothing is computed.
    Returns:
      One `Operator` per primitive, in program order.
    """
    return list(_walk(jax.make_jaxpr(fn)(*args).jaxpr, 1))


def _walk(jaxpr: Jaxpr, count: int) -> Iterator[Operator]:
    for eqn in jaxpr.eqns:
        inner = [_open(value) for value in eqn.params.values() if isinstance(value, (Jaxpr, ClosedJaxpr))]
        if eqn.primitive.name == "cond":
            branches = [list(_walk(_open(branch), count)) for branch in eqn.params["branches"]]
            yield from max(branches, key=lambda operators: sum(operator.flops for operator in operators))
        elif inner and not eqn.primitive.name.startswith(("reduce", "scatter", "select_and")):  # those hold a scalar rule, not a body
            trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for body in inner:
                yield from _walk(body, count * trips)
        else:
            yield _operator(eqn, count)


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _operator(eqn: JaxprEqn, count: int) -> Operator:
    arrays_in = [var.aval for var in eqn.invars if hasattr(var.aval, "shape")]
    arrays_out = [var.aval for var in eqn.outvars if hasattr(var.aval, "shape")]
    nbytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays_in + arrays_out)
    shapes_in, shapes_out = (tuple(tuple(array.shape) for array in arrays) for arrays in (arrays_in, arrays_out))
    return Operator(eqn.primitive.name, float(_flops(eqn) * count), float(nbytes * count), shapes_in, shapes_out, count)


def _flops(eqn: JaxprEqn) -> int:
    name = eqn.primitive.name
    written = sum(math.prod(var.aval.shape) for var in eqn.outvars if hasattr(var.aval, "shape"))
    if name in _MOVES:
        return 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * written * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, rhs_spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
        return 2 * written * math.prod(kernel) // kernel[rhs_spec[0]]  # per output channel: its input channels times the window
    if name.startswith(("reduce", "arg", "cum")):
        return math.prod(eqn.invars[0].aval.shape)
    return written
