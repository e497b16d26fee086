"""One training step as a task graph: the passes of the pipeline schedule, and data-parallel traffic beside them.

One rank per pipeline stage is drawn; its tensor-, context-, expert- and data-parallel peers do the same at the same time. Durations come
from the cost functions of `train_step`. The two agree on what a micro-batch costs; they differ in what a closed form cannot see:

- the pipeline bubble comes from dependencies, where `train_step` scales its closed form by the fitted `Stack.bubble_factor`;
- the hidden part of a transfer costs nothing in `train_step`; here it must fit under the compute beside it, and a hidden stage-to-stage
  transfer delays its receiver (1F1B waits for it in every micro-batch, as no pass is left to run meanwhile);
- gathering of sharded parameters starts with a gather that nothing hides, and the last reduce-scatter has nothing to hide under; in a pipeline all
  gathers come with the first micro-batches, where `train_step` spreads them over all, so short steps of large models take longer here, up to a third;
- gradient buckets are reduced once they are ready, first come, first served, and updated parameters of the step before are gathered under the first forward
  passes, where `train_step` lets `Stack.data_overlap` of the compute hide them; steps of one micro-batch with much of this traffic are up to a third
  shorter here;
- end stages send to one neighbour, `train_step` charges every stage for two; DualPipe's pass pairs take as long as both passes.
Both leave out uneven stages, stragglers and contention of streams. Jitter is the number of `train_step`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...hardware import System
from ...parallel._plan import Plan, PlanError
from ...stack import Stack
from ...workload import Transformer
from .._estimate import Estimate
from .._train import train_step
from ._build import TaskList
from ._passes import StepTimes, stage_activations, step_times
from ._rank import RankTasks, add_rank
from ._shape import StepShape, step_shape
from ._timeline import Memory, Timeline

MOST_TASKS = 10_000  # layers are grouped so that a step stays below it, where grouping can do that


def step_timeline(model: Transformer, system: System, plan: Plan, stack: Stack, *, schedule: str | None = None, groups: int | None = None) -> Timeline:
    """The tasks of one training step and their durations.

    The structure is read from `model` and `plan`, which must hold plain numbers; durations are differentiable in `system` and `stack` (and,
    as long as the structure stays, in what the caller traces of them).

    Args:
      schedule: one of `parallel._order.ORDERS`; None for that of the plan: "1f1b", "dualpipe", and for "zero-bubble" "zb-h1", or "zb-v" with
        two virtual stages.
      groups: parts into which the layers of a chunk are cut, at least 1; overlap of layers is drawn between them. None for as many as keep the
        step below 10,000 tasks, at most one per layer.
    Raises:
      PlanError: for a plan that is traced, batched, blends schedules or has no such order (see `pipeline_order`), for micro-batches that are not
        whole, and for groups that are no whole number between 1 and the layers of a chunk.
    """
    shape = step_shape(model, plan, schedule)
    most = max(int(shape.layers), 1)
    if groups is None:
        groups = _groups(shape, most)
    elif not isinstance(groups, int | float | np.integer) or not 1 <= groups <= most or groups != int(groups):
        raise PlanError(f"groups is {groups!r}; it should be a whole number between 1 and {most}, the layers of a chunk.")
    groups = int(groups)
    tasks, ranks = _tasks(shape, groups)
    graph = tasks.graph()

    times, estimate = step_numbers(model, system, plan, stack)
    memory = stage_activations(model, plan, stack, shape.stages)
    costs = _costs(times, shape, groups) | {"jitter": estimate.breakdown.jitter}
    index = {task.name: i for i, task in enumerate(graph.tasks)}
    spans = np.array([(i, index[first], index[last]) for i, rank in enumerate(ranks) for first, last in rank.holds], dtype=np.int32)
    return Timeline(graph, tasks.durations(costs), Memory(memory.base, memory.micro_batch / shape.virtual_stages, spans), estimate.step_time)


@jax.jit
def step_numbers(model: Transformer, system: System, plan: Plan, stack: Stack) -> tuple[StepTimes, Estimate]:
    """All that does not depend on the structure, compiled once for steps of any structure."""
    return step_times(model, system, plan, stack), train_step(model, system, plan, stack)


def _tasks(shape: StepShape, groups: int) -> tuple[TaskList, list[RankTasks]]:
    """The tasks of all ranks, and what each begins and ends with."""
    tasks = TaskList()
    ranks = [add_rank(tasks, shape, rank, groups) for rank in range(shape.stages)]
    overhead = tasks.add("overhead @0", "overhead", 0, "host", "overhead", [rank.done for rank in ranks])
    tasks.add("jitter @0", "jitter", 0, "host", "jitter", (overhead,))
    return tasks, ranks


def _groups(shape: StepShape, most: int) -> int:
    """As many as keep the step below `MOST_TASKS`: each after the first adds as many tasks as the second."""
    first = len(_tasks(shape, 1)[0])
    if first >= MOST_TASKS or most == 1:
        return 1
    more = len(_tasks(shape, 2)[0]) - first
    return min(1 + (MOST_TASKS - first) // more, most)


def _costs(t: StepTimes, shape: StepShape, groups: int) -> dict[str, Float[Array, ""]]:
    """Duration of every class of task: costs of a pass per chunk and group of layers, costs of parameters per chunk of weights and group."""
    per_group, per_pass, bucket = 1 / (shape.virtual_stages * groups), 1 / shape.virtual_stages, 1 / (shape.chunks * groups)
    costs = {}
    for direction, one in (("forward", t.forward), ("backward", t.backward)):
        for name, cost in one._asdict().items():
            whole = name in ("vocabulary", "pipeline", "pipeline_beside", "offload")
            costs[f"{direction} {name.replace('_', ' ')}"] = cost * (per_pass if whole else per_group)
    costs["gather"], costs["gather beside"] = t.gather * bucket * t.gather_exposed, t.gather * bucket * (1 - t.gather_exposed)
    costs["scatter"], costs["scatter beside"] = t.scatter * bucket * t.gather_exposed, t.scatter * bucket * (1 - t.gather_exposed)
    if shape.gradient_pass == "B":
        costs["backward layers"] = costs["backward layers"] + t.weight * per_group
    costs["reduce"] = t.reduce * bucket / (shape.micro_batches if shape.reduce_every else 1)
    costs["reduce beside"] = costs["reduce"] * (1 - t.reduce_exposed)
    costs["reduce exposed"] = costs["reduce"] * t.reduce_exposed * groups  # of a whole pass
    return costs | {
        "weight": t.weight * per_group,
        "recompute": t.recompute * per_group,
        "update": t.update * bucket,
        "optimizer": t.optimizer,
        "host": t.host,
        "overhead": t.overhead,
        "nothing": jnp.zeros(()),
    }
