"""A pipeline schedule alone, with given times of its passes: what closed forms of the bubble describe."""

import math

import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Real

from ..._arrays import si
from ...parallel._order import pipeline_order
from ...parallel._plan import PlanError
from ._build import TaskList
from ._layers import Layout
from ._rank import add_rank
from ._shape import StepShape
from ._timeline import Timeline


def pipeline_timeline(
    schedule: str,
    *,
    stages: int,
    micro_batches: int,
    virtual_stages: int = 1,
    forward: Real[ArrayLike, ""],
    backward: Real[ArrayLike, ""],
    weight: Real[ArrayLike, ""] = 0.0,
    send: Real[ArrayLike, ""] = 0.0,
) -> Timeline:
    """The passes of a schedule on even stages, without anything beside them.

    Args:
      schedule: "gpipe", "1f1b" (interleaved with `virtual_stages > 1`), "zb-h1", "zb-v" (two virtual stages) or "dualpipe".
      forward, backward, weight: forward pass, input gradient and weight gradient of one micro-batch through all layers of a rank; schedules
        that do not split the backward pass run the last two as one. [s]
      send: transfer between two ranks, beside compute. [s]
    Raises:
      PlanError: for what has no such order, see `pipeline_order`, numbers of stages or micro-batches that are not whole, and a time that is no single number
        of seconds, 0 or more (traced ones are not checked).
    """
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("virtual_stages", virtual_stages)):
        if not isinstance(value, int | np.integer):
            raise PlanError(f"{name} is {value!r}; it should be a whole number, at least 1.")
    for name, value in (("forward", forward), ("backward", backward), ("weight", weight), ("send", send)):
        if not isinstance(value, Tracer) and not (np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf" and 0 <= float(value) < math.inf):
            raise PlanError(f"{name} is {value!r}; it should be a number of seconds, 0 or more.")
    order = pipeline_order(schedule, stages, micro_batches, virtual_stages)
    shape = StepShape(
        schedule=schedule, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages, layers=1.0, order=order,
        layout=Layout(tensor=False, ring=1, context=False, experts=False, expert=False, offload=False, recompute=False),
        shard_parameters=False, trained=True, reduce=False, reduce_every=False, update=False, overlap_gradient=True, host=False,
    )  # fmt: skip
    tasks = TaskList()
    for rank in range(stages):
        add_rank(tasks, shape, rank, 1)
    forward, backward, weight = (si(x) / virtual_stages for x in (forward, backward, weight))
    nothing = si(0.0)
    costs = {
        "forward layers": forward,
        "backward layers": backward + (weight if shape.gradient_pass == "B" else 0.0),
        "weight": weight,
        "forward pipeline beside": si(send),
        "backward pipeline beside": si(send),
    }
    unused = ("forward attention", "backward attention", "forward vocabulary", "backward vocabulary", "forward pipeline", "backward pipeline", "optimizer",
              "nothing")  # fmt: skip
    return Timeline(tasks.graph(), tasks.durations(costs | dict.fromkeys(unused, nothing)))
