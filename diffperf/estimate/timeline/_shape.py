"""What of a model and a plan decides which tasks a step has: host numbers, read and checked once."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from ...parallel._order import Pass, pipeline_order, splits_backward
from ...parallel._plan import SCHEDULES, Plan, PlanError
from ...workload import Transformer
from ._layers import Layout


class StepShape(NamedTuple):
    """Structure of a step.

    Attributes:
      schedule, stages, micro_batches, virtual_stages: of the pipeline.
      layers: layers of one chunk, may be fractional. [1]
      order: passes of every rank.
      layout: communication of a group of layers.
      shard_parameters: whether parameters are gathered for each use.
      trained: whether any weight is trained.
      reduce: whether gradients are reduced over replicas, `reduce_every`: after every micro-batch.
      update: whether updated parameters are gathered.
      overlap_gradient: whether the two run beside compute.
      host: whether optimizer states are on the host.
    """

    schedule: str
    stages: int
    micro_batches: int
    virtual_stages: int
    layers: float
    order: tuple[tuple[Pass, ...], ...]
    layout: Layout
    shard_parameters: bool
    trained: bool
    reduce: bool
    reduce_every: bool
    update: bool
    overlap_gradient: bool
    host: bool

    @property
    def chunks(self) -> int:
        """Chunks of weights on a rank."""
        return 2 if self.schedule == "dualpipe" else self.virtual_stages

    @property
    def last_position(self) -> int:
        return self.stages * self.virtual_stages - 1

    @property
    def gradient_pass(self) -> str:
        """Kind of the pass that makes weight gradients."""
        return "W" if splits_backward(self.schedule) else "B"

    def rank_of(self, position: int, chunk: int) -> int:
        """Pipeline rank that holds a position of the model, for the micro-batches of a chunk."""
        p = self.stages
        if self.schedule == "zb-v" and position >= p:
            return 2 * p - 1 - position
        if self.schedule == "dualpipe" and chunk == 1:
            return p - 1 - position
        return position % p


def step_shape(model: Transformer, plan: Plan, schedule: str | None) -> StepShape:
    """Reads the structure of a step; raises what `step_timeline` raises."""
    try:  # NumPy, as under jit even plain arrays are traced by what jax.numpy does to them
        q = SimpleNamespace(**{name: float(leaf) for name, leaf in vars(plan).items() if name not in ("precision", "schedule")})
        weights = np.asarray(plan.schedule, float).tolist()
        layers = float(np.sum(np.asarray(model.blocks.count, float)))
        experts = bool(np.any(np.asarray(model.blocks.num_experts, float) > 0))
    except (TypeError, ValueError) as error:  # of traced, and of batched numbers
        raise PlanError("step_timeline reads the structure of the step from model and plan, so they should hold plain numbers. Build them outside "
                        "of jit, grad and vmap, and trace only system and stack.") from error  # fmt: skip
    m = q.global_batch_size / (q.data_parallel * q.micro_batch_size)
    if abs(m - round(m)) > 1e-6 or round(m) < 1:
        raise PlanError(f"a step has {m:g} micro-batches per data-parallel rank; make global_batch_size a multiple of data_parallel * micro_batch_size.")
    if max(weights) < 1:
        blend = ", ".join(f"{w:g} {name}" for w, name in zip(weights, SCHEDULES, strict=True))
        raise PlanError(f"the plan blends schedules ({blend}); give one of them weight 1.")
    p, v, m, c = (round(x) for x in (q.pipeline_parallel, q.virtual_stages, m, q.context_parallel))
    if schedule is None:
        schedule = SCHEDULES[weights.index(max(weights))]
        if schedule == "zero-bubble":
            schedule = "zb-h1" if v == 1 else "zb-v"
    if schedule == "dualpipe" and p == 1:
        schedule = "1f1b"  # no second direction
    replicas = q.data_parallel * c
    trained = q.trainable > 0
    sharded = q.shard_parameters > 0 and replicas > 1
    reduce = trained and replicas > 1 and not (sharded and q.shard_group >= replicas)
    repeats_core = q.recompute_selective > 0 and q.fused_attention < 1
    return StepShape(
        schedule=schedule,
        stages=p,
        micro_batches=m,
        virtual_stages=v,
        layers=layers / (p * v),
        order=pipeline_order(schedule, p, m, v),
        layout=Layout(
            tensor=q.tensor_parallel > 1,
            context=c > 1,
            ring=c if q.context_all_to_all == 0 else 1,
            experts=experts,
            expert=experts and q.expert_parallel > 1,
            offload=q.activation_offload > 0,
            recompute=q.recompute_full > 0 or repeats_core,
        ),
        shard_parameters=sharded,
        trained=trained,
        reduce=reduce,
        reduce_every=reduce and not sharded and q.shard_gradients > 0,
        update=reduce and not sharded and q.shard_optimizer > 0,
        overlap_gradient=q.overlap_gradient > 0,
        host=q.optimizer_offload > 0,
    )
