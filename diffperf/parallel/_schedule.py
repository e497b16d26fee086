"""Pipeline schedules in closed form: idle slots and micro-batches in flight.

Sources: Narayanan et al. 2021 (arXiv:2104.04473, section 2.2) for 1F1B and interleaving, Qi et al. 2023 (arXiv:2401.10241, section 3) for
zero bubble H1, Qi et al. 2024 (arXiv:2405.15362) for its V shape, DeepSeek-AI 2024 (arXiv:2412.19437, table 2) for DualPipe. `_order` has
the same schedules pass by pass. Leaves out uneven stages.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._plan import Plan, num_microbatches


def bubble_slots(plan: Plan, weight_gradient_share: Float[Array, ""] | float) -> Float[Array, ""]:
    """Idle time of a pipeline rank per step, in forward-plus-backward times of one micro-batch on one rank.

    1F1B `(p - 1) / v`. Zero bubble H1 `(p - 1) (1 - 2 w) / v` and DualPipe `(p / 2 - 1) (3 - 5 w) / 2`, where `w` is the share of
    forward plus backward that is the weight gradient, which may be put off (a third of matmul time, less of a whole pass), and the forward pass takes as
    long as the input gradient. In the terms of DeepSeek-AI 2024: F = (1 - w) / 2, B = (1 + w) / 2, F&B = F + B = 1, W = w.
    With two virtual stages zero bubble is ZB-V, idle only until its first forward pass arrives, `(p - 1) (1 - w) / 4`; with more there is no
    such schedule, and H1 over `v` stands for it. Zero bubble needs micro-batches to fill its gaps with weight gradients: of one alone all `(p - 1) (1 - w)`
    is idle, and each more takes away `w` up to `p` (H1), `(1 - w) / 2` up to `p` and `w` beyond (ZB-V).

    1F1B and interleaving are exact for any ratio of forward to backward time (interleaving for a multiple of `p` micro-batches), H1 where the
    weight gradient takes no longer than the forward pass and the input gradient. ZB-V and DualPipe are exact where forward pass and input
    gradient take equally long, up to `w = 1/3`; DualPipe needs `2 p` micro-batches. Where the input gradient takes up to twice the forward pass (long
    sequences: attention costs 2.5 times as much backward; recomputation) the whole step is off by up to 2.6% for ZB-V, 8% in steps of fewer than `2 p`
    micro-batches, and 1.4% for DualPipe; `estimate.timeline` has the exact time.

    Returns:
      Slots, at least 0; 0 for one stage. [1]
    """
    p, v, m, w = plan.pipeline_parallel, plan.virtual_stages, num_microbatches(plan), weight_gradient_share
    plain = (p - 1) / v
    alone, more = (p - 1) * (1 - w), jnp.clip(m, 1.0, p) - 1
    one_way = jnp.maximum(alone - more * w, 0.0) / v
    there_and_back = jnp.maximum(alone - more * (1 - w) / 2 - jnp.maximum(m - p, 0.0) * w, alone / 4)
    zero_bubble = jnp.where(v == 2, there_and_back, one_way)
    dualpipe = jnp.maximum(p / 2 - 1, 0.0) * jnp.maximum((3 - 5 * w) / 2, 0.0)
    return jnp.where(p > 1, plan.schedule @ jnp.stack([plain, zero_bubble, dualpipe]), 0.0)


def in_flight(plan: Plan, stage: Float[Array, ""] | float) -> Float[Array, ""]:
    """Micro-batches whose activations pipeline rank `stage` (0 first) holds at its peak, in units of all of its layers.

    1F1B `min(m, p - stage)`; interleaved `min(m, ((v - 1) p + 2 (p - stage - 1) + 1) / v)` (Megatron-LM's warm-up count); zero bubble H1 and
    ZB-V `p` on every rank, as later ranks put off more weight gradients, which need the activations; DualPipe `p + 1`.
    """
    p, v, m = plan.pipeline_parallel, plan.virtual_stages, num_microbatches(plan)
    plain = p - stage
    interleaved = ((v - 1) * p + 2 * (p - stage - 1) + 1) / v
    one_f_one_b = jnp.where(v > 1, interleaved, plain)
    zero_bubble = jnp.where(v > 2, interleaved, p)
    return jnp.minimum(plan.schedule @ jnp.stack([one_f_one_b, zero_bubble, p + 1.0]), jnp.maximum(m, 1.0))


def parameter_copies(plan: Plan) -> Float[Array, ""]:
    """Copies of a rank's weights: 2 for DualPipe (both directions), else 1. [1]"""
    return plan.schedule @ jnp.array([1.0, 1.0, 2.0])
