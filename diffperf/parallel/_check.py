"""Which plans can run: a mask inside `vmap`, and at the Python door an error that names the number to change."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ..hardware import DATATYPES, System
from ..workload import Transformer, num_layers
from ._memory import fits_layers
from ._plan import SCHEDULES, Plan, PlanError, num_devices, num_microbatches

DUALPIPE = SCHEDULES.index("dualpipe")
TOLERANCE = 1e-4  # counts travel as floats; float32 keeps whole numbers and their ratios to this
REST = 0.01  # what may be left of a division between counts; whole numbers below 2**24 leave none in float32


def _divides(divisor: Array, number: Array) -> Array:
    """True where `number` is a multiple of `divisor`, 1 or more times. The rest is compared in units of the number, not of the divisor: a
    batch of 1 is no multiple of 20,000 ranks, though their ratio is close to 0."""
    times = jnp.round(number / jnp.maximum(divisor, 1e-30))
    return (times >= 1) & (jnp.abs(number - times * divisor) < REST)


def legal(model: Transformer, system: System, plan: Plan) -> Bool[Array, ""]:
    """True where the plan can be laid out on model and system, memory aside."""
    b = model.blocks
    some = b.count > 0
    heads = jnp.all(~some | (b.num_heads == 0) | _divides(plan.tensor_parallel, b.num_heads))
    routed = some & (b.num_experts > 0)
    experts = jnp.all(~routed | _divides(plan.expert_parallel, b.num_experts)) & (jnp.any(routed) | (plan.expert_parallel == 1))
    ranks = plan.data_parallel * plan.context_parallel
    return (
        heads
        & experts
        & _divides(plan.expert_parallel, ranks)
        & fits_layers(model, plan)
        & _divides(plan.data_parallel * plan.micro_batch_size, plan.global_batch_size)
        & (num_devices(plan) <= system.num_devices * (1 + TOLERANCE))
        & (plan.context_parallel <= model.seq_len)
        & ((plan.virtual_stages == 1) | ((plan.pipeline_parallel > 1) & _divides(plan.pipeline_parallel, num_microbatches(plan))))
        & ((plan.schedule[..., DUALPIPE] < 0.5) | (_divides(2.0, plan.pipeline_parallel) & (plan.virtual_stages == 1)))
        & (jnp.sum(plan.precision * (system.chip.peak_flops_per_s > 0)) > 0.999)
    )


def check_plan(model: Transformer, system: System, plan: Plan) -> None:
    """Refuses a plan that cannot run on this model and system, memory aside.

    Raises:
      PlanError: naming the number, what it must divide or not exceed, and values that would do.
    """
    value = lambda x: float(np.asarray(x))
    t, p, v = value(plan.tensor_parallel), value(plan.pipeline_parallel), value(plan.virtual_stages)
    d, c, e = value(plan.data_parallel), value(plan.context_parallel), value(plan.expert_parallel)
    batch, micro = value(plan.global_batch_size), value(plan.micro_batch_size)
    count = np.asarray(model.blocks.count)
    for heads in sorted({value(h) for h, n in zip(np.asarray(model.blocks.num_heads), count, strict=True) if n > 0 and h > 0}):
        if heads % t:
            raise PlanError(f"tensor_parallel is {t:g}; it should divide num_heads = {heads:g}. Choose {_choices(heads)}.")
    experts = {value(x) for x, n in zip(np.asarray(model.blocks.num_experts), count, strict=True) if n > 0 and x > 0}
    if not experts and e != 1:
        raise PlanError(f"expert_parallel is {e:g}, but the model has no routed experts. Use 1.")
    for number in sorted(experts):
        if number % e:
            raise PlanError(f"expert_parallel is {e:g}; it should divide num_experts = {number:g}. Choose {_choices(number)}.")
    if (d * c) % e:
        raise PlanError(f"expert_parallel is {e:g}; it should divide data_parallel * context_parallel = {d * c:g}. Choose {_choices(d * c)}.")
    if c > value(model.seq_len):
        raise PlanError(f"context_parallel is {c:g}; it should be at most seq_len = {value(model.seq_len):g}. Lower it, or use longer sequences.")
    layers = value(num_layers(model))
    if v > 1 and p == 1:
        raise PlanError(f"virtual_stages is {v:g} with pipeline_parallel = 1; interleaving needs a pipeline. Use virtual_stages = 1.")
    if not bool(fits_layers(model, plan)):
        options = [q for q in range(1 if v == 1 else 2, int(layers / v) + 1) if any((layers + extra) % (q * v) == 0 for extra in (0, 1, 2))]
        mend = f"With virtual_stages = {v:g} choose pipeline_parallel = {_list(options)}." if options else "Lower virtual_stages."
        raise PlanError(
            f"pipeline_parallel * virtual_stages is {p * v:g}; it should divide num_layers = {layers:g} (or {layers + 1:g}, {layers + 2:g} with "
            f"embedding and output counted as layers). {mend}"
        )
    if batch % (d * micro):
        raise PlanError(
            f"global_batch_size is {batch:g}; data_parallel * micro_batch_size = {d * micro:g} should divide it. "
            f"Use a multiple, for example {math.ceil(batch / (d * micro)) * d * micro:g}, or a micro_batch_size that divides {batch / d:g}."
        )
    batches = batch / (d * micro)
    if v > 1 and batches % p:
        raise PlanError(
            f"virtual_stages is {v:g} with {batches:g} micro-batches; interleaving needs a multiple of pipeline_parallel = {p:g}. "
            f"Change global_batch_size or micro_batch_size, or use virtual_stages = 1."
        )
    if value(plan.schedule[DUALPIPE]) > 0.5 and (p % 2 or v > 1):
        raise PlanError(f"schedule is dualpipe with pipeline_parallel = {p:g}, virtual_stages = {v:g}; it needs an even pipeline without virtual stages.")
    need, have = value(num_devices(plan)), value(system.num_devices)
    if need > have:
        raise PlanError(
            f"the plan needs tensor * pipeline * data * context = {t:g} * {p:g} * {d:g} * {c:g} = {need:g} devices, the system has {have:g}. "
            f"Lower one of them, or give the system more devices."
        )
    peaks = np.asarray(system.chip.peak_flops_per_s)
    wanted = [name for name, weight, peak in zip(DATATYPES, np.asarray(plan.precision), peaks, strict=True) if weight > 0 and not peak > 0]
    if wanted:
        known = ", ".join(name for name, peak in zip(DATATYPES, peaks, strict=True) if peak > 0)
        raise PlanError(f"precision is {wanted[0]}, which this chip has no units for. Choose {known}.")


def _list(values) -> str:
    values = [f"{x:g}" for x in values]
    return values[0] if len(values) == 1 else ", ".join(values[:-1]) + " or " + values[-1]


def _choices(number: float) -> str:
    return _list([d for d in range(1, int(number) + 1) if number % d == 0][:12])
