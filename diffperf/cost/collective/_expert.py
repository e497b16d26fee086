"""Dispatch and combine of a mixture of experts: tokens to the ranks of their experts and back.

    time = launch + hop log2(ranks) + x + ramp x / (x + ramp),    x = bytes / bandwidth + tokens * token_time

High-throughput kernels send a token once to each rank that holds one of its experts, low-latency kernels once per expert; hierarchical kernels cross the
network once per node and forward inside it. Routing is uniform. Leaves out load imbalance (scale `tokens` by the busiest rank's share).
"""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ... import smooth
from ..._arrays import si
from ._saturating import least

ExchangeKernel = Literal["low_latency", "high_throughput", "hierarchical"]
EXCHANGE_KERNELS: tuple[ExchangeKernel, ...] = ("low_latency", "high_throughput", "hierarchical")


class ExpertExchangeConstants(eqx.Module):
    """One kernel (dispatch and combine differ) on one system.

    Attributes:
      launch: latency without hops. [s]
      hop: latency per doubling of the ranks. [s]
      bandwidth: rate of one device's link that large exchanges reach. [B/s]
      processor_bandwidth: rate that one streaming multiprocessor moves. [B/s]
      token_time: index work per token. [s]
      expert_time: index work per token and destination. [s]
      ramp: cost of filling the pipeline. [s]
      network_bandwidth: NICs of one device, in one direction. [B/s]
      network_launch: latency added between nodes. [s]
      network_hop: latency per doubling of the nodes. [s]
    """

    launch: Float[Array, ""] = eqx.field(converter=si)
    hop: Float[Array, ""] = eqx.field(converter=si)
    bandwidth: Float[Array, ""] = eqx.field(converter=si)
    processor_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    token_time: Float[Array, ""] = eqx.field(converter=si)
    expert_time: Float[Array, ""] = eqx.field(converter=si)
    ramp: Float[Array, ""] = eqx.field(converter=si)
    network_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    network_launch: Float[Array, ""] = eqx.field(converter=si)
    network_hop: Float[Array, ""] = eqx.field(converter=si)


def distinct_destinations(groups: Real[ArrayLike, ""], experts_per_token: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Expected groups (ranks or nodes) that hold an expert of one token under uniform routing, `g (1 - (1 - 1/g)^k)`. [1]"""
    g, k = jnp.maximum(si(groups), 1.0), si(experts_per_token)
    miss = jnp.where(g > 1, jnp.exp(k * jnp.log1p(-1 / jnp.where(g > 1, g, 2.0))), 0.0)
    return g * (1 - miss)


def expert_exchange_time(
    kernel: ExchangeKernel,
    constants: ExpertExchangeConstants,
    tokens: Real[ArrayLike, ""],
    hidden_bytes: Real[ArrayLike, ""],
    experts_per_token: Real[ArrayLike, ""],
    ranks: Real[ArrayLike, ""],
    ranks_per_node: Real[ArrayLike, ""],
    processors: Real[ArrayLike, ""] = jnp.inf,
) -> Float[Array, ""]:
    """Time of one dispatch or combine.

    Args:
      kernel: one of `EXCHANGE_KERNELS`.
      constants: of this kernel and system.
      tokens: tokens per rank; 0 costs the latency. [1]
      hidden_bytes: bytes of one token's hidden state: width times 2 for bf16, 1.03 for fp8 with scales, 0.5625 for nvfp4. [B]
      experts_per_token: k. [1]
      ranks, ranks_per_node: of the expert-parallel group, and how many of them share a domain of fast links. [1]
      processors: streaming multiprocessors given to the kernel; infinite for all. [1]
    Returns:
      Time; 0 for one rank. [s]
    Raises:
      ValueError: for an unknown kernel.
    """
    if kernel not in EXCHANGE_KERNELS:
        raise ValueError(f"expert_exchange_time: kernel is {kernel!r}; it should be one of {', '.join(EXCHANGE_KERNELS)}.")
    t, token, k = jnp.maximum(si(tokens), 1e-6), si(hidden_bytes), si(experts_per_token)
    n = jnp.maximum(si(ranks), 1.0)
    p = jnp.clip(si(ranks_per_node), 1.0, n)
    nodes = n / p
    many = nodes > 1
    far = jnp.where(many, nodes, 2.0)
    limit = jnp.minimum(constants.processor_bandwidth * si(processors), 1e3 * constants.bandwidth)
    link = least(limit, constants.bandwidth, 4.0)
    copies = k * (n - 1) / n if kernel == "low_latency" else distinct_destinations(n, k)
    inside = t * token * copies / link
    if kernel == "hierarchical":
        crossing = distinct_destinations(far, k) * (far - 1) / far
        between = smooth.pnorm(inside, t * token * crossing / constants.network_bandwidth, 2.0)
    else:
        between = t * token * k * (far - 1) / far / constants.network_bandwidth
    wire = jnp.where(many, between, inside) + t * (constants.token_time + constants.expert_time * copies)
    latency = constants.launch + constants.hop * jnp.log2(jnp.where(n > 1, n, 2.0))
    latency = latency + jnp.where(many, constants.network_launch + constants.network_hop * jnp.log2(far), 0.0)
    time = latency + wire + constants.ramp * wire / (wire + constants.ramp)
    return jnp.where(n > 1, time, 0.0)
