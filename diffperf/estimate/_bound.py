"""`train_step` for many plans, one call at a time, with little Python between them.

Flattening four modules of some 130 numbers costs more than the arithmetic (4 us on a CPU): a call of `jax.jit(train_step)` spends most of its time there.
"""

import functools
from collections.abc import Callable

import jax

from ..hardware import System
from ..parallel._plan import Plan
from ..stack import Stack
from ..workload import Transformer
from ._estimate import Estimate
from ._train import train_step


def bind_step(model: Transformer, system: System, stack: Stack) -> Callable[[Plan], Estimate]:
    """`train_step` of one model on one system, for plans that come one after the other.

    The three are flattened once; calls flatten only the plan. Bound steps share one compilation for models with the same number of kinds of layer.

    Returns:
      A function of a plan; its result is that of `jax.jit(train_step)(model, system, plan, stack)`.
    """
    leaves, tree = jax.tree.flatten((model, system, stack))
    return functools.partial(_compiled(tree), leaves)


@functools.lru_cache(maxsize=8)
def _compiled(tree):
    @jax.jit
    def step(leaves, plan):
        model, system, stack = jax.tree.unflatten(tree, leaves)
        return train_step(model, system, plan, stack)

    return step
