"""Time of an overlap region: how much each stream slows the others, and what runs when.

While a kernel and collectives run together, channels take processors from the kernel (whole waves), chunks in flight push its tiles out of the cache, and
the collectives' traffic takes memory bandwidth; the collectives are slowed where the demand on memory exceeds it. Streams share the machine like processors
of one queue: each advances at its slowed rate until the next operation of any stream ends. For one kernel and one collective this is the closed form
`diffperf.cost.two_streams`. Leaves out clocks that fall under power, dependencies between kernels and collectives, and waiting for other ranks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ...smooth import pnorm, safe_divide
from ._collectives import CollectiveRows, Settings, channel_time
from ._constants import NOMINAL_CONTENTION, Contention, OverlapChip
from ._region import KernelRows, OverlapRegion
from ._sm_loss import left_processors, taken_processors, waves

_ALWAYS_MOVING = 0.4  # share of a collective's traffic that reaches device memory even when its buffers fit into the cache
_MOST_TAKEN = 0.5  # share of memory bandwidth that collectives take at most from a kernel


class OverlapTimes(NamedTuple):
    """Times of a region, shape (). [s]

    Attributes:
      overlapped: until all streams are done.
      ideal: the same without contention: the longest stream alone. Where compute is that stream and nothing is exposed, it is
        `overlapped - (compute_beside - compute)`.
      sequential: everything one after the other.
      compute: kernels alone.
      communication: collectives alone, all streams.
      compute_beside: kernels as they run here.
      exposed: while no kernel runs.
    """

    overlapped: Float[Array, "..."]
    ideal: Float[Array, "..."]
    sequential: Float[Array, "..."]
    compute: Float[Array, "..."]
    communication: Float[Array, "..."]
    compute_beside: Float[Array, "..."]
    exposed: Float[Array, "..."]

    @property
    def compute_slowdown(self) -> Float[Array, "..."]:
        """`(compute_beside - compute) / compute`. [1]"""
        return safe_divide(self.compute_beside - self.compute, self.compute)


def kernel_time(
    chip: OverlapChip,
    kernels: KernelRows,
    constants: Contention,
    taken: Real[ArrayLike, "..."] = 0.0,
    in_flight: Real[ArrayLike, "..."] = 0.0,
    traffic: Real[ArrayLike, "..."] = 0.0,
    temperature: Real[ArrayLike, ""] = 0.0,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Time of kernels, alone or beside collectives [s], and the demand of both on memory over its bandwidth [1].

    Args:
      taken: processors that the collectives hold. [1]
      in_flight: bytes of their chunks. [B]
      traffic: theirs with device memory. [B/s]
      temperature: of the rounding to waves.
    """
    share = si(in_flight) / (constants.cache_multiple * chip.l2)
    lost = jnp.where(share > 0, jax.nn.sigmoid(constants.steepness * jnp.log(jnp.where(share > 0, share, 1.0))), 0.0)  # share^k / (1 + share^k)
    moved = kernels.nbytes + constants.spill * lost * (kernels.tile_bytes - kernels.nbytes)
    others, half = si(traffic) * (_ALWAYS_MOVING + (1 - _ALWAYS_MOVING) * lost), chip.bandwidth * _MOST_TAKEN
    bounded = others * half / pnorm(others, half, 6.0)
    rounds = waves(kernels.blocks, left_processors(chip.processors, taken), constants.evenness, temperature)
    arithmetic = rounds * kernels.flops / kernels.blocks * chip.processors / chip.flops_per_s
    time = kernels.launch + pnorm(arithmetic, moved / (chip.bandwidth - bounded), constants.overlap)
    return time, (safe_divide(moved, time) + others) / chip.bandwidth


def overlap_times(
    region: OverlapRegion, settings: Settings, constants: Contention = NOMINAL_CONTENTION, temperature: Real[ArrayLike, ""] = 0.0
) -> OverlapTimes:
    """Times of a region in which all collectives are ready from the start, exact at temperature 0.

    Each operation starts when the one before it on its stream ends. Rates are bounded together so that time alone is worked off at a rate of at least one:
    `ideal <= overlapped <= sequential` always.

    Args:
      region: kernels and collectives.
      settings: of the collectives, from `make_settings`; may be fractional.
      constants: of contention.
      temperature: of the rounding to waves, which above 0 err low, and of the onset of saturated memory, which errs high.
    Raises:
      ValueError: for settings that are none.
    """
    if not isinstance(settings, Settings):
        raise ValueError(f"settings is {settings!r}; give what `make_settings(region, ...)` makes of it.")
    kernels, rows, chip = region.kernels, region.collectives, region.chip
    count, streams = kernels.flops.shape[0], region.order.shape[0]
    alone, _ = kernel_time(chip, kernels, constants)
    transfer, in_flight, traffic = channel_time(rows, settings, constants.channel_rate, constants.sync)
    taken = taken_processors(settings.channels, settings.threads, constants.processors_per_channel)
    order = jnp.concatenate([region.order, jnp.full((streams, 1), rows.wire.shape[0])], axis=1)
    padded = jnp.concatenate([transfer, jnp.zeros(1)])

    def event(carry, _):
        kernel, left, places, lefts, clock, busy, covered = carry
        current = order[jnp.arange(streams), places]
        runs, run = kernel < count, current < transfer.shape[0]
        i, j = jnp.minimum(kernel, count - 1), jnp.minimum(current, transfer.shape[0] - 1)
        of = lambda numbers: jnp.sum(jnp.where(run, numbers[j], 0.0))
        one = KernelRows(*(column[i] for column in kernels))
        on_link = _link_rates(rows, settings, constants, transfer, j, run)
        moved = jnp.sum(jnp.where(run, on_link * traffic[j], 0.0))
        beside, demand = kernel_time(chip, one, constants, of(taken), of(in_flight), moved, temperature)
        beside = jnp.where(alone[i] > 0, beside, 0.0)  # what takes no time alone is done at once
        rate = jnp.where(runs, jnp.minimum(safe_divide(alone[i], beside, otherwise=1.0), 1.0), 0.0)
        slower = 1 + constants.oversubscription * _excess(demand, temperature)
        rates = jnp.where(run, 1 / jnp.where(runs, slower, 1.0), 0.0) * on_link
        total = rate + jnp.sum(rates)
        scale = jnp.maximum(safe_divide(1.0, total, otherwise=1.0), 1.0)
        ends = jnp.concatenate([left[None], lefts]) / jnp.concatenate([jnp.where(runs, rate * scale, 1.0)[None], jnp.where(run, rates * scale, 1.0)])
        ends = jnp.where(jnp.concatenate([runs[None], run]), ends, jnp.inf)
        first = jnp.argmin(ends)
        step = jnp.where(runs | jnp.any(run), ends[first], 0.0)
        left, lefts = jnp.maximum(left - rate * scale * step, 0.0), jnp.maximum(lefts - rates * scale * step, 0.0)
        next_kernel, next_places = kernel + (first == 0), places + (first == 1 + jnp.arange(streams))
        left = jnp.where(first == 0, alone[jnp.minimum(next_kernel, count - 1)], left)
        lefts = jnp.where(first == 1 + jnp.arange(streams), padded[order[jnp.arange(streams), next_places]], lefts)
        covered = covered + jnp.where(runs, 0.0, step)
        return (next_kernel, left, next_places, lefts, clock + step, busy + jnp.where(runs, step, 0.0), covered), None

    zero = jnp.zeros(())
    start = (jnp.array(0), alone[0], jnp.zeros(streams, int), padded[order[:, 0]], zero, zero, zero)
    (_, _, _, _, clock, busy, exposed), _ = lax.scan(event, start, length=count + transfer.shape[0])
    per_stream = jnp.sum(padded[order], axis=1)
    compute, communication = jnp.sum(alone), jnp.sum(transfer)
    return OverlapTimes(clock, jnp.maximum(compute, jnp.max(per_stream)), compute + communication, compute, communication, busy, exposed)


def overlap_makespan(
    region: OverlapRegion, settings: Settings, constants: Contention = NOMINAL_CONTENTION, temperature: Real[ArrayLike, ""] = 0.0
) -> Float[Array, ""]:
    """`overlap_times(...).overlapped`. [s]"""
    return overlap_times(region, settings, constants, temperature).overlapped


def _excess(demand: Float[Array, ""], temperature: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Demand beyond 1; above temperature 0 a softplus."""
    width = jnp.where(si(temperature) > 0, temperature, 1.0) / 4
    return jnp.where(si(temperature) > 0, width * jax.nn.softplus((demand - 1) / width), jnp.maximum(demand - 1, 0.0))


def _link_rates(
    rows: CollectiveRows, settings: Settings, constants: Contention, transfer: Float[Array, " m"], j: Array, run: Array
) -> Float[Array, " streams"] | float:
    """Rates of running collectives that share a link by their channels, relative to each alone."""
    if j.shape[0] == 1:
        return 1.0
    mine, channels = CollectiveRows(*(column[j] for column in rows)), jnp.where(run, settings.channels[j], 0.0)
    together = jnp.sum(jnp.where(mine.link[:, None] == mine.link, channels, 0.0), axis=1)
    share = safe_divide(channels, together, otherwise=1.0)
    time, _, _ = channel_time(mine, Settings(*(column[j] for column in settings)), constants.channel_rate, constants.sync, jnp.where(run, share, 1.0))
    return safe_divide(transfer[j], time, otherwise=1.0)
