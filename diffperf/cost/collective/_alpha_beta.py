"""Collectives over up to three network tiers, by the alpha-beta model with hierarchical rings.

A ring that spans several scale-up domains crosses each boundary once per NIC, so its rate is the smaller of the scale-up rate and of the
NIC rate times the ring's members inside one domain. On a torus a group uses as many axes as it spans. Steps are counted by tier, for rings, and for trees
between domains. `collective_time` has the calibrated curves. Leaves out congestion, protocols, reduction in switches and reduction arithmetic.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ...hardware import System, Tier
from ._saturating import saturating_ramp

EXCHANGE_HOP = 0.4
"""Step of an all-to-all to one more peer, over a step of a ring: 0.4 us of 1 us on NVLink. [1]"""
FILL, FILL_HALF, FILL_POWER = 5.9, 1.0, 0.5
"""Filling the pipeline of a large message over the latency of its steps, the transfer over that cost at which half is paid, and how it rises: published
nccl-tests logs between nodes, as `calibrate/collectives` fits them (5.9, 1.1, 0.43). [1]"""


def tier_rate(tier: Tier, ranks: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Rate of one device in one direction for a group of `ranks` on one tier. [B/s]

    Switched: the device's rate. Torus: axes are filled one after the other, so a group of n among `domain` devices spans
    `log n / log domain` of the axes, at least one.
    """
    spanned = spanned_axes(tier, ranks) / jnp.maximum(tier.torus_axes, 1.0)
    return tier.bandwidth * tier.efficiency * jnp.where(tier.torus_axes > 0, spanned, 1.0)


def spanned_axes(tier: Tier, ranks: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Axes of a torus that a group of `ranks` spans, at least one; 1 on a switched tier. [1]"""
    axes = jnp.maximum(tier.torus_axes, 1.0)
    share = jnp.log(jnp.maximum(ranks, 1.0)) / jnp.log(jnp.maximum(tier.domain, 2.0))
    return jnp.clip(share * axes, 1.0, axes)


def members_inside(tier: Tier, ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Ranks of a group that share one domain of `tier`, when neighbours in the group are `stride` devices apart; between 1 and `ranks`. [1]"""
    return jnp.clip(tier.domain / si(stride), 1.0, jnp.maximum(si(ranks), 1.0))


def group_rate(system: System, ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0) -> Float[Array, ""]:
    """Bus rate per device of a ring over `ranks` that are `stride` devices apart. [B/s]"""
    ranks = si(ranks)
    rate = tier_rate(system.scale_up, ranks * si(stride))
    inside = members_inside(system.scale_up, ranks, stride)
    out = inside * system.scale_out.bandwidth * system.scale_out.efficiency
    rate = jnp.where(ranks > inside, jnp.minimum(rate, out), rate)
    beyond = ranks * si(stride) > system.scale_out.domain
    spine = inside * system.spine.bandwidth * system.spine.efficiency
    return jnp.where(beyond, jnp.minimum(rate, spine), rate)


def group_latency(system: System, ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0) -> Float[Array, ""]:
    """Time per step of a collective for its slowest hop. [s]"""
    ranks = si(ranks)
    inside = members_inside(system.scale_up, ranks, stride)
    latency = jnp.where(ranks > inside, system.scale_out.latency, system.scale_up.latency)
    return jnp.where(ranks * si(stride) > system.scale_out.domain, system.spine.latency, latency)


def ring_latency(system: System, ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0) -> Float[Array, ""]:
    """Time of the steps of a ring all-gather or reduce-scatter without its transfer; 0 for one rank. [s]

    With d domains `out (d - 1) + up (n - d)` of a switched tier; on a torus shards go both ways along each spanned axis, half its extent.
    """
    ranks = jnp.maximum(si(ranks), 1.0)
    tier = system.scale_up
    inside = members_inside(tier, ranks, stride)
    domains = ranks / inside
    axes = spanned_axes(tier, inside)
    extent = inside ** (1 / axes)
    steps = jnp.where(tier.torus_axes > 0, axes * jnp.minimum(extent - 1, extent / 2), ranks - domains)
    return tier.latency * steps + system.scale_out.latency * (domains - 1)


def tree_latency(system: System, ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0) -> Float[Array, ""]:
    """The same for an all-reduce up and down a tree between domains, above a chain in each: `2 (up (i - 1) + out log2 d)`. [s]"""
    ranks = jnp.maximum(si(ranks), 1.0)
    inside = members_inside(system.scale_up, ranks, stride)
    return 2 * (system.scale_up.latency * (inside - 1) + system.scale_out.latency * jnp.log2(ranks / inside))


def exchange_latency(system: System, ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0) -> Float[Array, ""]:
    """The same for an all-to-all: one step per peer inside a domain, and one per doubling of the domains. [s]"""
    ranks = jnp.maximum(si(ranks), 1.0)
    domains = ranks / members_inside(system.scale_up, ranks, stride)
    return EXCHANGE_HOP * system.scale_up.latency * (ranks - domains) + system.scale_out.latency * jnp.log2(domains)


def fill_time(wire: Real[ArrayLike, "..."], latency: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
    """What filling its pipeline adds to a message with transfer time `wire` [s] whose steps take `latency` [s]; 0 for no bytes, at most `FILL` of them. [s]"""
    return saturating_ramp(si(wire), FILL * si(latency), si(FILL_HALF), si(FILL_POWER))


def _ring(factor: float, system: System, nbytes, ranks, stride) -> Float[Array, ""]:
    n = jnp.maximum(si(ranks), 1.0)
    return factor * (n - 1) * (si(nbytes) / n / group_rate(system, n, stride) + group_latency(system, n, stride))


def all_reduce_time(system: System, nbytes: Real[ArrayLike, ""], ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0) -> Float[Array, ""]:
    """Ring all-reduce of a buffer of `nbytes` [B] on each of `ranks`, `2 (n - 1) (nbytes / n / rate + latency)`; 0 for one rank. [s]

    References:
      NVIDIA, nccl-tests, doc/PERFORMANCE.md: bus-bandwidth factor `2 (n - 1) / n`.
    """
    return _ring(2.0, system, nbytes, ranks, stride)


def all_gather_time(system: System, nbytes: Real[ArrayLike, ""], ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0) -> Float[Array, ""]:
    """Ring all-gather to a full buffer of `nbytes` [B], `(n - 1) (nbytes / n / rate + latency)`; 0 for one rank. [s]"""
    return _ring(1.0, system, nbytes, ranks, stride)


def reduce_scatter_time(system: System, nbytes: Real[ArrayLike, ""], ranks: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0) -> Float[Array, ""]:
    """Ring reduce-scatter of a full buffer of `nbytes` [B]; the time of `all_gather_time`. [s]"""
    return _ring(1.0, system, nbytes, ranks, stride)


def expert_exchange_time_per_byte(
    system: System, ranks: Real[ArrayLike, ""], experts_per_token: Real[ArrayLike, ""], stride: Real[ArrayLike, ""] = 1.0
) -> Float[Array, "..."]:
    """Time to send one byte of a token to its experts on `ranks`, `r_out / out + k (i - 1) / i / up`.

    A token crosses the network once per remote domain that holds one of its k experts, not once per expert: with d domains and
    uniform routing `r_out = (d - 1) (1 - (1 - 1/d)^k)`. It lands on the device of its sender's place in the domain and goes on over the
    scale-up tier to each expert that sits on another of the i devices there (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2). Leaves
    out that experts of one token differ, which matters when a domain holds few of them, and the spine.

    Returns:
      Time per byte of hidden state and token; 0 for one rank. [s/B]
    """
    n = jnp.maximum(si(ranks), 1.0)
    k = si(experts_per_token)
    inside = members_inside(system.scale_up, n, stride)
    domains = n / inside
    remote = (domains - 1) * (1 - jnp.exp(k * jnp.log1p(-1 / jnp.maximum(domains, 1.0 + 1e-6))))
    remote = jnp.where(domains > 1, remote, 0.0)
    within = k * (inside - 1) / inside
    out = system.scale_out.bandwidth * system.scale_out.efficiency
    return remote / out + within / tier_rate(system.scale_up, n * si(stride))


def point_to_point_time(system: System, nbytes: Real[ArrayLike, ""], stride: Real[ArrayLike, ""], ranks: Real[ArrayLike, ""] = 2.0) -> Float[Array, ""]:
    """One message of `nbytes` [B] between neighbours of a chain of `ranks` that are `stride` devices apart, over its slowest hop. [s]

    A chain that does not fit into a domain has a hop that leaves it, also where `stride` is short.
    """
    span = si(stride) * si(ranks)
    far, beyond = span > system.scale_up.domain, span > system.scale_out.domain
    out, spine = (tier.bandwidth * tier.efficiency for tier in (system.scale_out, system.spine))
    rate = jnp.where(far, jnp.where(beyond, jnp.minimum(out, spine), out), tier_rate(system.scale_up, si(stride) + 1))
    latency = jnp.where(far, jnp.where(beyond, system.spine.latency, system.scale_out.latency), system.scale_up.latency)
    return si(nbytes) / rate + latency
