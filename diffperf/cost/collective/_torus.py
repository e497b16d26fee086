"""Collectives on a torus: rings along each axis that run in both directions at once, several axes together, and slices joined by the data-centre network.

On one axis of n chips a shard travels `n / 2` hops where the ends are joined (both directions share the work) and `n - 1` where they are not:

    all-gather = max(hops latency, hops / n * nbytes / link),    hops = min(n - 1, n / 2) or n - 1

Axes carry pieces of the buffer in proportion to their rates, so rates add up, and hops as well. An all-to-all is bound by the links in the middle of its
longest axis. Latency hides behind the transfer, so the larger counts. Leaves out that the first axis of a piece moves smaller shards than the last (the
published approximation, exact for long axes), odd rings' spare half hop, and contention with other groups.

References:
  Austin et al. 2025, "How To Scale Your Model", chapters "How to Think About TPUs" and "Sharded Matrices".
"""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ... import smooth
from ..._arrays import si
from ...hardware import Tier


class Torus(eqx.Module):
    """The chips of one group.

    Attributes:
      extents: chips along each axis, at least 1; 1 for an axis that the group does not span, shape (axes,). [1]
      wrap: 1 where the ends of the axis are joined, 0 where not, shape (axes,). [1]
      link_bandwidth: of one link in one direction; a chip has two links per axis. [B/s]
      latency: of one hop. [s]
    """

    extents: Float[Array, " axes"] = eqx.field(converter=si)
    wrap: Float[Array, " axes"] = eqx.field(converter=si)
    link_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    latency: Float[Array, ""] = eqx.field(converter=si)

    def __check_init__(self) -> None:
        if self.extents.ndim != 1 or self.extents.shape != self.wrap.shape:
            raise ValueError(
                f"Torus: extents has shape {self.extents.shape} and wrap {self.wrap.shape}; both should be (axes,). Give one number per axis to each."
            )


def torus_of(tier: Tier, extents: Real[ArrayLike, " axes"], wrap: Real[ArrayLike, " axes"]) -> Torus:
    """A group on a torus tier of the catalog, whose axes share the device's bandwidth evenly over two links each."""
    return Torus(extents, wrap, tier.bandwidth * tier.efficiency / (2 * jnp.maximum(tier.torus_axes, 1.0)), tier.latency)


def torus_all_gather_time(torus: Torus, nbytes: Real[ArrayLike, ""], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, ""]:
    """Time to gather a full buffer of `nbytes` [B] on every chip of the group; 0 for one chip, the latency for 0 bytes. [s]

    Args:
      torus: the group.
      nbytes: the gathered buffer.
      temperature: above 0, the larger of latency and transfer becomes a smooth maximum that errs high.
    """
    hops = _hops(torus)
    rate = jnp.sum(smooth.safe_divide(torus.link_bandwidth * torus.extents, hops))
    return smooth.maximum(jnp.stack([torus.latency * jnp.sum(hops), smooth.safe_divide(si(nbytes), rate)]), temperature)


def torus_reduce_scatter_time(torus: Torus, nbytes: Real[ArrayLike, ""], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, ""]:
    """Time to sum buffers of `nbytes` [B] and leave a shard on each chip; that of `torus_all_gather_time`. [s]"""
    return torus_all_gather_time(torus, nbytes, temperature)


def torus_all_reduce_time(torus: Torus, nbytes: Real[ArrayLike, ""], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, ""]:
    """Time to sum buffers of `nbytes` [B] on every chip: a reduce-scatter and an all-gather. [s]"""
    return 2 * torus_all_gather_time(torus, nbytes, temperature)


def torus_all_to_all_time(torus: Torus, nbytes: Real[ArrayLike, ""], temperature: Real[ArrayLike, ""] = 0.0) -> Float[Array, ""]:
    """Time of an all-to-all in which each chip holds `nbytes` [B] for all chips together, its own share included. [s]

    A link in the middle of a joined axis of n chips carries `n / 8` of what one chip holds in either direction, of an open one `n / 4`: a quarter of
    the all-gather of the same array on a joined axis.
    """
    n = torus.extents
    crossing = jnp.where(torus.wrap > 0, n / 8, n / 4) * jnp.clip(n - 1, 0.0, 1.0)
    transfer = smooth.maximum(crossing, temperature) * si(nbytes) / torus.link_bandwidth
    return smooth.maximum(jnp.stack([torus.latency * jnp.sum(_hops(torus)), transfer]), temperature)


def torus_send_time(torus: Torus, nbytes: Real[ArrayLike, ""], distance: Real[ArrayLike, " axes"]) -> Float[Array, ""]:
    """Time to send `nbytes` [B] to a chip `distance` hops away along each axis, over one path per axis that it differs in; 0 for no distance. [s]"""
    away = jnp.abs(si(distance))
    paths = jnp.sum(jnp.clip(away, 0.0, 1.0))
    return torus.latency * jnp.sum(away) + smooth.safe_divide(si(nbytes), paths * torus.link_bandwidth)


def multislice_all_reduce_time(
    torus: Torus,
    nbytes: Real[ArrayLike, ""],
    slices: Real[ArrayLike, ""],
    network_bandwidth: Real[ArrayLike, ""],
    network_latency: Real[ArrayLike, ""] = 0.0,
    temperature: Real[ArrayLike, ""] = 0.0,
) -> Float[Array, ""]:
    """All-reduce over equal slices: reduce-scatter inside, a ring of each chip's shard over the data-centre network, all-gather inside. [s]

    Args:
      torus: the chips of one slice.
      nbytes: buffer of each chip. [B]
      slices: slices, at least 1. [1]
      network_bandwidth: data-centre network of one chip, one direction. [B/s]
      network_latency: of one message between slices. [s]
      temperature: as in `torus_all_gather_time`.
    """
    s = jnp.maximum(si(slices), 1.0)
    shard = si(nbytes) / jnp.prod(torus.extents)
    between = 2 * (s - 1) * (shard / s / si(network_bandwidth) + si(network_latency))
    return torus_all_reduce_time(torus, nbytes, temperature) + between


def _hops(torus: Torus) -> Float[Array, " axes"]:
    line = jnp.maximum(torus.extents - 1, 0.0)
    return jnp.where(torus.wrap > 0, jnp.minimum(line, torus.extents / 2), line)
