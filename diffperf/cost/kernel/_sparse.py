"""Time of kernels that gather rows: embedding bags with a cache (DLRM), embedding look-up, scatter-add, and SpMM-like aggregation over a graph (GNN).

Gathered rows are read in whole sectors. A share of them hits the cache: where rows are drawn evenly, what of the table the cache holds; where few rows
are drawn often, more (a power law). Rows that miss come from device memory at a random-access share of its bandwidth, all come through the cache.
Source of the embedding bag: the performance model for DLRM of arXiv 2404.12674 (hit rate from table against cache, sectors of 32 B, the larger of
device memory and cache time, longer for narrow rows); here the narrow-row factor is smooth, and the hit rate a closed form instead of a sum over a binomial.
Leaves out prefetching by software caches over PCIe, and sorted or fused multi-table variants.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import ceil, maximum, pnorm, safe_divide, safe_power
from ._constants import Prior
from ._device import Device

SECTOR = 32.0
"""Bytes that device memory delivers at least. [B] (NVIDIA, CUDA C++ Best Practices Guide: 32-byte transactions)"""


class EmbeddingBagShape(NamedTuple):
    """`bags` sums over `pooling` rows each of a table; one row each is an embedding look-up.

    Attributes:
      bags: batch size times tables. [1]
      pooling: rows summed per bag. [1]
      table_rows: rows of all tables together that indices may name. [1]
      width: elements of a row. [1]
      element_bytes: of table and output; index_bytes: of an index. [B]
      skew: exponent s of a power law of popularity, rank^-s, 0 for even, below 1. [1]
      write_back: 0 for the sum; 1 for its gradient, a scatter-add, which reads and writes the gathered rows. [1]
    """

    bags: ArrayLike
    pooling: ArrayLike
    table_rows: ArrayLike
    width: ArrayLike
    element_bytes: ArrayLike = 4.0
    index_bytes: ArrayLike = 8.0
    skew: ArrayLike = 0.0
    write_back: ArrayLike = 0.0


class AggregationShape(NamedTuple):
    """Sum over the neighbours of each node: a sparse times a dense matrix.

    Attributes:
      nodes: rows of the output. [1]
      sources: rows of the features that edges may name. [1]
      edges: non-zeros. [1]
      features: elements of a feature row. [1]
      element_bytes: of a feature; edge_bytes: of an edge's index and weight. [B]
      skew: exponent of a power law of how often a source is named, below 1. [1]
      imbalance: edges of the busiest node over the mean. [1]
    """

    nodes: ArrayLike
    sources: ArrayLike
    edges: ArrayLike
    features: ArrayLike
    element_bytes: ArrayLike = 4.0
    edge_bytes: ArrayLike = 8.0
    skew: ArrayLike = 0.0
    imbalance: ArrayLike = 1.0


class SparseConstants(NamedTuple):
    """Behaviour of a library's gathering kernels on a chip.

    Attributes:
      launch: time from one kernel's start to the next for empty kernels. [s]
      memory: share of the memory bandwidth that streams (indices, outputs) reach. [1]
      random: share that gathered rows reach. [1]
      cached: cache bandwidth over memory bandwidth. [1]
      resident: share of the cache that holds gathered rows. [1]
      narrow: time that rows narrower than a warp's access add, over that of their sectors. [1]
      narrow_width: width at which half of that is added. [B]
      near: bandwidth of one processor over its share of the memory bandwidth; bounds the busiest node. [1]
      overlap: power of the norm that joins device memory and cache time. [1]
    """

    launch: ArrayLike
    memory: ArrayLike
    random: ArrayLike
    cached: ArrayLike
    resident: ArrayLike
    narrow: ArrayLike
    narrow_width: ArrayLike
    near: ArrayLike
    overlap: ArrayLike


SPARSE_PRIORS = {
    "launch": Prior(2.5e-6, "positive", 0.6), "memory": Prior(0.85, "share", 0.4), "random": Prior(0.7, "share", 0.6), "cached": Prior(1.7, "positive", 0.5),
    "resident": Prior(0.8, "share", 0.7), "narrow": Prior(0.6, "positive", 0.5), "narrow_width": Prior(180.0, "positive", 0.4),
    "near": Prior(4.0, "positive", 0.6), "overlap": Prior(4.0, "power", 0.7),
}  # fmt: skip
"""From arXiv 2404.12674: cache over memory bandwidth (A100 2271 / 1391 GB/s), and 1.55 times longer for at most 32, 1.1 for at most 64 floats a row,
of which `narrow` and `narrow_width` are a smooth version. The others are round numbers."""


def cache_hit_rate(draws: ArrayLike, rows: ArrayLike, held: ArrayLike, skew: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Share of row accesses that find their row in the cache.

    A row is named `draws / rows` times on average, and the first time is a miss: with even popularity `rows * (1 - exp(-draws / rows))` distinct rows are
    named (the limit of the binomial for many rows). A repeat hits if the row is still held: the `held` most popular of `rows` draw the share
    `(held / rows)^(1 - skew)` of accesses under a power law of exponent `skew` (integral of rank^-skew).

    Args:
      draws: accesses. [1]
      rows: rows that they name. [1]
      held: rows that the cache holds. [1]
      skew: exponent, at least 0 and below 1. [1]
    Returns:
      Between 0 and 1; 0 without accesses.
    """
    draws, rows = si(draws), jnp.maximum(si(rows), 1.0)
    share = jnp.clip(held / rows, 0.0, 1.0)
    kept = safe_power(share, 1 - si(skew))
    mean = draws / rows
    repeats = 1 - safe_divide(-jnp.expm1(-mean), mean, 1.0)
    return jnp.clip(kept, 0.0, 1.0) * repeats


def _sectors(width: ArrayLike, element_bytes: ArrayLike, temperature: ArrayLike) -> Array:
    """Bytes of a row in whole sectors."""
    return SECTOR * ceil(si(width) * element_bytes / SECTOR, temperature)


def _gather(
    accesses: Array, rows: ArrayLike, row: Array, width_bytes: Array, skew: ArrayLike, passes: ArrayLike, stream: Array, device: Device, c: SparseConstants
) -> Array:
    """Time of gathered rows and streams, without launch. [s]"""
    hit = cache_hit_rate(accesses, rows, c.resident * si(device.cache) / row, skew)
    at_memory = (accesses * row * (1 - hit) * passes / c.random + stream / c.memory) / device.bandwidth
    slow = 1 + c.narrow * sigmoid(6 * jnp.log(c.narrow_width / width_bytes))
    at_cache = (accesses * row * passes + stream) / (c.cached * si(device.bandwidth))
    return pnorm(at_memory, at_cache, c.overlap) * slow


def embedding_bag_kernel_time(shape: EmbeddingBagShape, device: Device, constants: SparseConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of an embedding bag or its gradient, launch included.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip; its peak is not used.
      constants: the library on that chip.
      temperature: 0 is exact; above 0 the count of sectors is smooth.
    Returns:
      Time; 0 where no row is named. [s]
    """
    accesses = si(shape.bags) * shape.pooling
    some = (accesses > 0) & (si(shape.width) > 0)
    accesses, width = jnp.where(some, accesses, 1.0), jnp.where(some, shape.width, 1.0)
    output = jnp.where(some, shape.bags, 1.0) * width * shape.element_bytes
    stream = accesses * shape.index_bytes + output
    row = _sectors(width, shape.element_bytes, temperature)
    busy = _gather(accesses, shape.table_rows, row, width * shape.element_bytes, shape.skew, 1 + si(shape.write_back), stream, device, constants)
    return jnp.where(some, constants.launch + busy, 0.0)


def aggregation_kernel_time(shape: AggregationShape, device: Device, constants: SparseConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of an aggregation over a graph, launch included; the busiest node is one processor's, so that a hub may take longer than all the others.

    Arguments and result as of `embedding_bag_kernel_time`; 0 without edges.
    """
    c = constants
    some = (si(shape.edges) > 0) & (si(shape.features) > 0) & (si(shape.nodes) > 0)
    edges, features, nodes = (jnp.where(some, x, 1.0) for x in (shape.edges, shape.features, shape.nodes))
    row = _sectors(features, shape.element_bytes, temperature)
    stream = edges * shape.edge_bytes + nodes * features * shape.element_bytes
    spread = _gather(edges, shape.sources, row, features * shape.element_bytes, shape.skew, 1.0, stream, device, c)
    hub = edges / nodes * shape.imbalance * row * si(device.processors) / (c.near * si(device.bandwidth))
    busy = maximum(jnp.stack(jnp.broadcast_arrays(spread, hub), axis=-1), temperature)
    return jnp.where(some, c.launch + busy, 0.0)


def embedding_bag_bytes(shape: EmbeddingBagShape) -> Float[Array, "..."]:
    """Traffic without any cache: every named row, every index, every sum. [B]"""
    accesses = si(shape.bags) * shape.pooling
    return accesses * (shape.width * shape.element_bytes * (1 + si(shape.write_back)) + shape.index_bytes) + shape.bags * si(shape.width) * shape.element_bytes


def aggregation_bytes(shape: AggregationShape) -> Float[Array, "..."]:
    """Traffic without any cache: a feature row and an index for every edge, a row for every node. [B]"""
    return (si(shape.edges) + shape.nodes) * shape.features * shape.element_bytes + shape.edges * si(shape.edge_bytes)


def sparse_bound(shape: EmbeddingBagShape | AggregationShape, device: Device, constants: SparseConstants | None = None) -> Float[Array, "..."]:
    """What no such kernel can beat: indices and outputs beyond what the cache holds, at the datasheet bandwidth (every gathered row may be cached). [s]"""
    if isinstance(shape, EmbeddingBagShape):
        stream = si(shape.bags) * (si(shape.pooling) * shape.index_bytes + si(shape.width) * shape.element_bytes)
    else:
        stream = si(shape.edges) * shape.edge_bytes + si(shape.nodes) * shape.features * shape.element_bytes
    return jnp.maximum(stream - device.cache, 0.0) / device.bandwidth


def sparse_roofline(shape: EmbeddingBagShape | AggregationShape, device: Device) -> Float[Array, "..."]:
    """Traffic without a cache at the datasheet bandwidth. [s]"""
    return (embedding_bag_bytes(shape) if isinstance(shape, EmbeddingBagShape) else aggregation_bytes(shape)) / device.bandwidth


def sparse_features(shape: EmbeddingBagShape | AggregationShape, device: Device) -> Float[Array, "... 5"]:
    """Dimensionless numbers of order one for the correction: log accesses, width, table over cache, repeats, skew."""
    bag = isinstance(shape, EmbeddingBagShape)
    accesses = si(shape.bags) * shape.pooling if bag else si(shape.edges)
    rows, width = (si(shape.table_rows), si(shape.width)) if bag else (si(shape.sources), si(shape.features))
    log = lambda x: jnp.log(jnp.maximum(x, 1.0))
    table = jnp.maximum(rows * width * shape.element_bytes, 1.0) / device.cache
    features = (log(accesses) / 4 - 3, log(width) / 4 - 1.2, jnp.log(table) / 4, (log(accesses) - log(rows)) / 4, si(shape.skew))
    return jnp.stack(jnp.broadcast_arrays(*features), axis=-1)
