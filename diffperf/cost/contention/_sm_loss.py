"""Processors that a collective takes from kernels beside it, with rounding to whole waves.

Matrix and convolution kernels feel a collective as a loss of whole streaming multiprocessors: a kernel whose blocks just filled the chip needs a second
wave once some are taken, and takes up to twice as long; one with a block to spare per processor is not slowed at all. Memory-bound kernels do not follow this.
Leaves out occupancy (a kernel of few blocks spreads one per processor) and channels that end at different times.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ...smooth import ceil

FEWEST_PROCESSORS = 4.0
"""Compute keeps these however many channels run: collectives are launched into what is free, they do not evict running kernels."""

_TIE = 1e-5  # relative: blocks so little beyond whole waves fill them, so that rounding of float32 makes no wave


def taken_processors(channels: Real[ArrayLike, "..."], threads: Real[ArrayLike, "..."], per_channel: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
    """Processors that a collective holds, `per_channel * channels * 1.25 threads / (threads + 128)`: `per_channel` each at 512 threads. [1]"""
    threads = si(threads)
    return per_channel * si(channels) * 1.25 * threads / (threads + 128)


def left_processors(processors: Real[ArrayLike, "..."], taken: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
    """Processors left to compute, at least `FEWEST_PROCESSORS` of a chip that has them. [1]"""
    processors = si(processors)
    return jnp.maximum(processors - taken, jnp.minimum(processors, FEWEST_PROCESSORS))


def waves(
    blocks: Real[ArrayLike, "..."], processors: Real[ArrayLike, "..."], evenness: Real[ArrayLike, "..."], temperature: Real[ArrayLike, ""] = 0.0
) -> Float[Array, "..."]:
    """Rounds of blocks, `(1 - evenness) ceil(blocks / processors) + evenness blocks / processors`, neither below 1. [1]

    Args:
      blocks: thread blocks, at least 1. [1]
      processors: processors that take them. [1]
      evenness: 0: a partly filled wave costs a whole one; 1: work spreads evenly. [1]
      temperature: of the ceiling; above 0 it errs low.
    """
    filled = si(blocks) / processors
    whole = jnp.round(filled)
    rounds = ceil(jnp.where((si(temperature) <= 0) & (jnp.abs(filled - whole) <= _TIE * whole), whole, filled), temperature)
    return (1 - evenness) * jnp.maximum(rounds, 1.0) + evenness * jnp.maximum(filled, 1.0)


def sm_loss_ratio(
    blocks: Real[ArrayLike, "..."], processors: Real[ArrayLike, "..."], taken: Real[ArrayLike, "..."], evenness: Real[ArrayLike, "..."] = 0.35
) -> Float[Array, "..."]:
    """How much longer a compute-bound kernel takes while `taken` processors belong to a collective.

    Args:
      blocks: thread blocks of the kernel. [1]
      processors: of the chip. [1]
      taken: by the collective, as `taken_processors` has it. [1]
      evenness: see `waves`; the default is the fit to eleven kernels of an A100 under an all-reduce of 8 channels (HolisticTraceAnalysis example trace).
    Returns:
      At least 1. [1]
    """
    left = left_processors(processors, taken)
    return waves(blocks, left, evenness) / waves(blocks, processors, evenness)
