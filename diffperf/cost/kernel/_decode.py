"""Time of one attention kernel for decoding: each sequence's few new tokens against its whole cache of keys and values.

A block reads the cache of one key head (or a split of it) and serves the query heads that share it. Blocks run in waves over the processors; a block
pays a fixed overhead and a time per key, that of its arithmetic and of streaming; device memory, or the cache for a small set, limits the whole. The
library takes the fastest number of splits. Some libraries have a second kernel, one block per query head, which they choose by rules
(`decode_path`). Leaves out uneven lengths in a batch, shared prefixes (cascade attention) and page sizes.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import ceil, maximum, minimum, pnorm, safe_divide
from ._constants import Prior
from ._device import Device

SPLITS = (1, 2, 4, 8, 16, 32, 64)
TILE = 128  # keys per step of a block
LEAST = 32.0  # fewest keys of a split


class DecodeShape(NamedTuple):
    """`batch` sequences with `keys` tokens in the cache.

    Attributes:
      batch: sequences. [1]
      keys: tokens in the cache of each, the new ones included. [1]
      heads: query heads; kv_heads: key and value heads. [1]
      head_dim: width of a query, key and value. [1]
      window: most keys a query sees; infinite for all. [1]
      q_bytes: bytes per element of the queries and of the output; kv_bytes: of the cache. [B]
      queries: new tokens per sequence, more than 1 when a draft is verified. [1]
      alone: 1 where the library runs one block per query head. [1]
      whole: 1 where the library never splits a sequence's keys. [1]
      regroup: 1 where the call first copies the queries so that those of one key head lie together. [1]
    """

    batch: ArrayLike
    keys: ArrayLike
    heads: ArrayLike
    kv_heads: ArrayLike
    head_dim: ArrayLike
    window: ArrayLike = np.inf
    q_bytes: ArrayLike = 2.0
    kv_bytes: ArrayLike = 2.0
    queries: ArrayLike = 1.0
    alone: ArrayLike = 0.0
    whole: ArrayLike = 0.0
    regroup: ArrayLike = 0.0


class DecodeConstants(NamedTuple):
    """Behaviour of a library on a chip for one datatype of the cache.

    Attributes:
      launch: time of the call for one sequence and one head. [s]
      per_sequence: time per sequence: metadata and page tables. [s]
      prepare: traffic per byte of the queries and the output beside the kernel's own: rotation, cache write. [1]
      memory: share of the memory bandwidth that streaming reaches. [1]
      cached: cache bandwidth over memory bandwidth. [1]
      cache_share: cache that keys and values fill before they fall out. [1]
      cache_step: sharpness of that limit. [1]
      overlap: power of the norm that joins the blocks' time and memory time: 1 adds them, more hides one behind the other. [1]
      group: query heads that one pass over a key head serves. [1]
      occupancy: blocks that run on a processor at once. [1]
      block: time of a block without keys. [s]
      per_key: time of a block per key beside arithmetic and streaming. [s]
      near: a processor's streaming bandwidth over its share of memory bandwidth. [1]
      rate: share of the matrix units' peak. [1]
      tile: 0: keys cost one by one; 1: by whole tiles. [1]
      cut: tiles that a window costs beside those of its keys: its ends are masked. [1]
      extra: further keys' worth of time. [1]
      split_sync: time a split kernel takes longer. [s]
      split_bandwidth: bandwidth at which partial outputs are written and read over memory bandwidth. [1]
      even: 0: partly filled waves cost a whole one; 1: work is spread evenly. [1]
      alone_block, alone_rate: `block` and time per key of the kernel with one query head per block, over those of the usual one. [1]
      regroup: time of the copy that regroups queries. [s]
    """

    launch: ArrayLike
    per_sequence: ArrayLike
    prepare: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    cache_share: ArrayLike
    cache_step: ArrayLike
    overlap: ArrayLike
    group: ArrayLike
    occupancy: ArrayLike
    block: ArrayLike
    per_key: ArrayLike
    near: ArrayLike
    rate: ArrayLike
    tile: ArrayLike
    cut: ArrayLike
    extra: ArrayLike
    split_sync: ArrayLike
    split_bandwidth: ArrayLike
    even: ArrayLike
    alone_block: ArrayLike
    alone_rate: ArrayLike
    regroup: ArrayLike


DECODE_PRIORS = {
    "launch": Prior(8.5e-6, "positive", 0.3), "per_sequence": Prior(2e-9, "positive", 0.8), "prepare": Prior(1.5, "positive", 0.8),
    "memory": Prior(0.92, "share", 0.5), "cached": Prior(1.15, "positive", 0.4), "cache_share": Prior(0.7, "positive", 0.5),
    "cache_step": Prior(4.0, "positive", 0.5), "overlap": Prior(1.8, "power", 0.5), "group": Prior(20.0, "positive", 0.7),
    "occupancy": Prior(1.1, "positive", 0.4), "block": Prior(1.3e-6, "positive", 0.7), "per_key": Prior(0.55e-9, "positive", 0.5),
    "near": Prior(5.0, "positive", 0.9), "rate": Prior(0.22, "share", 0.6), "tile": Prior(0.75, "share", 0.8), "cut": Prior(0.5, "positive", 0.5),
    "extra": Prior(5.0, "positive", 0.6),
    "split_sync": Prior(2.5e-6, "positive", 0.5), "split_bandwidth": Prior(1.0, "positive", 0.7), "even": Prior(0.4, "share", 0.8),
    "alone_block": Prior(0.8, "positive", 0.8), "alone_rate": Prior(1.5, "positive", 0.8), "regroup": Prior(5e-6, "positive", 0.4),
}  # fmt: skip
"""Start values: our fits to public timings of vLLM's and TensorRT-LLM's decode kernels on six GPUs, rounded."""

_SPLITS = np.array(SPLITS, float)


def _tidy(shape: DecodeShape) -> tuple[Array, Any]:
    """Where the kernel does something, and the shape with 1 for sizes where it does not."""
    s: Any = DecodeShape(*jnp.broadcast_arrays(*map(si, shape)))
    some = (s.batch > 0) & (s.keys > 0) & (s.heads > 0) & (s.kv_heads > 0) & (s.head_dim > 0) & (s.window > 0) & (s.queries > 0)
    one = lambda x: jnp.where(some, x, 1.0)
    return some, s._replace(**{name: one(getattr(s, name)) for name in ("batch", "keys", "heads", "kv_heads", "head_dim", "window", "queries")})


def decode_path(kernel: str, heads: float, kv_heads: float, batch: float, window: float, blackwell: bool) -> tuple[float, float, float]:
    """`alone`, `whole` and `regroup` of a `DecodeShape`: which path a kernel takes, by rules that its library documents or that its timings show.

    FlashAttention 2 (`mha_varlen_fwd` with one query): query heads of one key head share a block, and keys are split, only where there are several of them
    and no window; with several sequences and key heads the queries are copied into that order first. TensorRT-LLM (`torch_flow`): groups above 32, and
    before Blackwell a single query head per key head, fall back to a kernel with one head per block. Others always share and split.
    """
    group = heads / kv_heads
    if kernel == "vllm_flash_attn_fa2":
        plain = group == 1 or np.isfinite(window)
        return float(plain), float(plain), float(not plain and kv_heads > 1 and batch > 1)
    if kernel == "torch_flow":
        return float(group > 32 or (group == 1 and not blackwell)), 0.0, 0.0
    return 0.0, 0.0, 0.0


def decode_flops(shape: DecodeShape) -> Float[Array, "..."]:
    """Arithmetic of both products: `4 batch queries heads head_dim` times the keys seen. [FLOP]"""
    some, s = _tidy(shape)
    return jnp.where(some, 4 * s.batch * s.queries * s.heads * s.head_dim * jnp.minimum(s.keys, s.window), 0.0)


def decode_traffic(shape: DecodeShape) -> Float[Array, "..."]:
    """Compulsory traffic: the keys and values seen and the queries read, the output written once. [B]"""
    some, s = _tidy(shape)
    cache = 2 * s.kv_heads * s.head_dim * s.kv_bytes * jnp.minimum(s.keys, s.window)
    return jnp.where(some, s.batch * (cache + 2 * s.queries * s.heads * s.head_dim * s.q_bytes), 0.0)


def decode_kernel_time(shape: DecodeShape, device: Device, constants: DecodeConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of the kernel, launch included.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip, for the datatype that is multiplied.
      constants: the library on that chip.
      temperature: 0 is exact; above 0 tile and wave counts, and the choice of splits, are smooth.
    Returns:
      Time; 0 where a size is 0. [s]
    """
    c, peak, bandwidth, processors, cache = constants, *map(si, device)
    some, s = _tidy(shape)
    out = lambda x: si(x)[..., None]  # axes (..., splits)

    seen = jnp.minimum(s.keys, s.window)
    keys = (1 - c.tile) * seen + c.tile * TILE * ceil(seen / TILE, temperature) + TILE * c.cut * jnp.where(s.keys > s.window, 1.0, 0.0) + c.extra

    rows = s.queries * s.heads / s.kv_heads  # query rows that share a key head
    fused = maximum(jnp.stack([rows / c.group, jnp.ones_like(rows)], axis=-1), temperature)
    passes = s.alone * rows + (1 - s.alone) * fused
    units = out(s.batch * s.kv_heads * passes) * _SPLITS / out(processors * c.occupancy)
    evenly = maximum(jnp.stack([units, jnp.ones_like(units)], axis=-1), temperature)
    waves = (1 - out(c.even)) * ceil(units, temperature) + out(c.even) * evenly
    streaming = 2 * s.head_dim * s.kv_bytes * processors / (c.near * bandwidth)
    arithmetic = 4 * (rows / passes) * s.head_dim * processors / (peak * c.rate) + c.per_key
    per_key = pnorm(streaming, arithmetic, 2.0) * (1 + s.alone * (c.alone_rate - 1))
    block = c.block * (1 + s.alone * (c.alone_block - 1))
    each = maximum(jnp.stack(jnp.broadcast_arrays(out(keys) / _SPLITS, LEAST), axis=-1), temperature)
    partial = out(8 * s.batch * s.queries * s.heads * s.head_dim / (c.split_bandwidth * bandwidth)) * _SPLITS
    splitting = jnp.where(_SPLITS > 1, out(c.split_sync) + partial + out(1e3 * s.whole), 0.0)  # 1000 s: never
    busy = waves * (out(block) + each * out(per_key)) + splitting

    traffic = s.batch * (2 * s.kv_heads * s.head_dim * s.kv_bytes * keys + 2 * s.queries * s.heads * s.head_dim * s.q_bytes)
    hot = sigmoid(c.cache_step * jnp.log(c.cache_share * cache / traffic))
    memory = traffic / bandwidth * (hot / c.cached + (1 - hot) / c.memory)
    busy = minimum(pnorm(busy, out(memory), out(c.overlap)), temperature)
    prepare = c.prepare * 2 * s.batch * s.queries * s.heads * s.head_dim * s.q_bytes / bandwidth
    return jnp.where(some, c.launch + busy + prepare + c.per_sequence * s.batch + c.regroup * s.regroup, 0.0)


def decode_bound(shape: DecodeShape, device: Device, constants: DecodeConstants | None = None) -> Float[Array, "..."]:
    """Arithmetic at the datasheet peak: what no kernel beats even if the cache holds all keys and values. [s]"""
    return safe_divide(decode_flops(shape), device.peak)


def decode_roofline(shape: DecodeShape, device: Device) -> Float[Array, "..."]:
    """The larger of arithmetic at the datasheet peak and compulsory traffic at the datasheet bandwidth. [s]"""
    return jnp.maximum(decode_bound(shape, device), decode_traffic(shape) / device.bandwidth)


def decode_features(shape: DecodeShape, device: Device) -> Float[Array, "... 8"]:
    """Dimensionless numbers of order one for the correction: log sizes, window, key heads per processor, footprint over cache."""
    _, s = _tidy(shape)
    seen, traffic = jnp.minimum(s.keys, s.window), decode_traffic(s)
    columns = (
        jnp.log(seen) / 4 - 1.6, jnp.log(s.batch) / 4 - 0.8, jnp.log(s.kv_heads) / 2 - 0.5, jnp.log(s.queries * s.heads / s.kv_heads) / 2 - 1,
        jnp.log(s.head_dim / 128), jnp.log(seen / s.keys) / 4, jnp.log(s.batch * s.kv_heads / si(device.processors)) / 4,
        jnp.log(traffic / device.cache) / 4,
    )  # fmt: skip
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)
