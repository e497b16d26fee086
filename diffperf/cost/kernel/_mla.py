"""Time of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): prefill, decode, and the batched products around decode.

Keys and values of a token are one latent vector of `RANK` numbers and one rotated key of `ROPE`, shared by all heads. Decode multiplies with the latent
itself (weights absorbed): every head attends with a query of `RANK + ROPE` to one key, which is also the value, so the cache is read once for all heads.
Prefill either expands keys and values per head, or works on the latent too; both are fused attention (`_attention.py`) with their own widths.
Leaves out the projections around attention (matrix multiplications) and sparse attention over selected tokens.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import ceil, maximum, minimum, pnorm, safe_divide
from ._attention import AttentionShape, attention_flops
from ._constants import Prior
from ._device import Device
from ._matmul import MatmulShape

RANK, ROPE, NOPE, VALUE = 512.0, 64.0, 128.0, 128.0
"""Widths of DeepSeek-V2 and V3: latent, rotated key, unrotated query and key of a head, value of a head (config.json of the models)."""
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
HEADS = (16, 64, 128)  # heads that one block may serve


def mla_prefill_shape(
    batch: ArrayLike, queries: ArrayLike, keys: ArrayLike, heads: ArrayLike, absorbed: ArrayLike = 0.0, kv_bytes: ArrayLike = 2.0
) -> AttentionShape:
    """Prefill of latent attention as fused attention, cache write included.

    Args:
      batch: sequences; queries: new tokens of each; keys: tokens attended to; heads: query heads. [1]
      absorbed: 1 where queries attend to the latent, 0 where keys and values are expanded per head. [1]
      kv_bytes: bytes per cached element. [B]
    """
    absorbed, heads = si(absorbed), si(heads)
    pick = lambda latent, expanded: absorbed * latent + (1 - absorbed) * expanded
    return AttentionShape(
        batch, queries, keys, heads, pick(1.0, heads), pick(RANK + ROPE, NOPE + ROPE), pick(RANK, VALUE), 1.0, np.inf, 2.0, kv_bytes, 1.0
    )


def mla_prefill_features(shape: AttentionShape, device: Device) -> Float[Array, "... 6"]:
    """Dimensionless numbers of order one for the correction: log sizes, arithmetic time, waves, bytes of the cache."""
    batch, queries, heads = (jnp.maximum(si(x), 1.0) for x in (shape.batch, shape.queries, shape.heads))
    blocks = jnp.ceil(queries / 128) * batch * heads / device.processors
    columns = (
        jnp.log(batch) / 4 - 0.7, jnp.log(queries) / 4 - 1.6, jnp.log(heads) / 4 - 0.6,
        jnp.log(jnp.maximum(attention_flops(shape), 1.0) / device.peak / 1e-5) / 6, jnp.log(blocks) / 4, si(shape.kv_bytes) - 1.5,
    )  # fmt: skip
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)


def mla_bmm_shape(tokens: ArrayLike, heads: ArrayLike, after: ArrayLike, a_bytes: ArrayLike = 2.0, b_bytes: ArrayLike = 2.0) -> MatmulShape:
    """The batched product that moves queries into the latent before decode (`after` 0), or values out of it after (`after` 1), one per head."""
    after = si(after)
    n, k = after * VALUE + (1 - after) * RANK, after * RANK + (1 - after) * NOPE
    return MatmulShape(tokens, n, k, heads, a_bytes, b_bytes, 2.0, 0.0)


class MlaDecodeShape(NamedTuple):
    """One new token for each of `batch` sequences, weights absorbed.

    Attributes:
      batch: sequences. [1]
      keys: tokens attended to per sequence. [1]
      heads: query heads on this rank. [1]
      kv_bytes: bytes per cached element. [B]
      rank: width of the latent; rope: of the rotated key. [1]
    """

    batch: ArrayLike
    keys: ArrayLike
    heads: ArrayLike
    kv_bytes: ArrayLike = 2.0
    rank: ArrayLike = RANK
    rope: ArrayLike = ROPE


class MlaDecodeConstants(NamedTuple):
    """Behaviour of a library's latent decode kernel on a chip for one type of cache.

    Attributes:
      launch: fixed time of the call. [s]
      sequence: time per sequence: its metadata. [s]
      block: time of a block beside its keys: query load, pipeline fill, output. [s]
      rate: share of the peak that a block reaches. [1]
      near: bandwidth at which a block streams keys over its share of memory bandwidth. [1]
      stream: 0: partly filled waves cost a whole one; 1: work is spread evenly. [1]
      split_sync: time that splitting the keys over blocks costs. [s]
      split_bandwidth: bandwidth at which partial results are written and read over memory bandwidth. [1]
      overlap: power of the norm that joins block and memory time. [1]
      memory: share of the memory bandwidth that streaming reaches. [1]
      cached: cache bandwidth over memory bandwidth. [1]
      cache_share: cache that keys fill before they fall out. [1]
      convert: further traffic per cached byte, where the library converts the cache to another type first. [1]
      output: traffic per byte of queries and output: rotation, quantisation, cache write. [1]
    """

    launch: ArrayLike
    sequence: ArrayLike
    block: ArrayLike
    rate: ArrayLike
    near: ArrayLike
    stream: ArrayLike
    split_sync: ArrayLike
    split_bandwidth: ArrayLike
    overlap: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    cache_share: ArrayLike
    convert: ArrayLike
    output: ArrayLike


MLA_DECODE_PRIORS = {
    "launch": Prior(9e-6, "positive", 0.5), "sequence": Prior(5e-9, "positive", 1.0), "block": Prior(1.5e-6, "positive", 0.7), "rate": Prior(0.5, "share", 0.7),
    "near": Prior(4.0, "positive", 1.0), "stream": Prior(0.4, "share", 1.0), "split_sync": Prior(2e-6, "positive", 0.7),
    "split_bandwidth": Prior(0.8, "positive", 0.8), "overlap": Prior(2.0, "power", 0.7), "memory": Prior(0.85, "share", 0.3),
    "cached": Prior(1.2, "positive", 0.5), "cache_share": Prior(0.6, "positive", 0.5), "convert": Prior(0.05, "positive", 1.5),
    "output": Prior(2.0, "positive", 0.7),
}  # fmt: skip
"""Start values: our fits to public timings of latent decode kernels on six GPUs."""

_SPLIT = np.repeat(np.array(SPLITS, float), len(HEADS))
_HEADS = np.tile(np.array(HEADS, float), len(SPLITS))
_LEAST = 64.0  # keys of the smallest piece


def _safe(shape: MlaDecodeShape) -> tuple[Array, list[Array]]:
    """Where there is work, and the sizes with ones elsewhere."""
    s = jnp.broadcast_arrays(*map(si, shape))
    some = (s[0] > 0) & (s[1] > 0) & (s[2] > 0)
    return some, [jnp.where(some, x, 1.0) for x in s]


def mla_decode_kernel_time(shape: MlaDecodeShape, device: Device, constants: MlaDecodeConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of the call, launch included.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip, for the datatype that is multiplied.
      constants: the library on that chip.
      temperature: 0 is exact; above 0 block and wave counts, and the choice of block and split, are smooth.
    Returns:
      Time; 0 where a size is 0. [s]
    """
    c, (peak, bandwidth, processors, cache) = constants, map(si, device)
    some, (batch, keys, heads, kv_bytes, rank, rope) = _safe(shape)
    out = lambda x: si(x)[..., None]
    width = rank + rope
    served = jnp.minimum(_HEADS, out(heads))
    blocks = out(batch) * ceil(out(heads) / _HEADS, temperature) * _SPLIT / out(processors)
    even = maximum(jnp.stack([blocks, jnp.ones_like(blocks)], axis=-1), temperature)
    waves = (1 - out(c.stream)) * ceil(blocks, temperature) + out(c.stream) * even
    piece = maximum(jnp.stack(jnp.broadcast_arrays(out(keys) / _SPLIT, jnp.full_like(_SPLIT, _LEAST)), axis=-1), temperature)
    multiply = 2 * served * out((width + rank) * processors / (peak * c.rate))
    stream = out(width * kv_bytes * processors / (c.near * bandwidth))
    merge = out(c.split_sync) + 8 * out(batch * heads * rank / (c.split_bandwidth * bandwidth)) * _SPLIT
    busy = waves * (out(c.block) + piece * pnorm(multiply, stream, 4.0)) + jnp.where(_SPLIT > 1, merge, 0.0)
    busy = minimum(busy, temperature)

    nbytes = batch * keys * width * kv_bytes
    hot = sigmoid(4 * jnp.log(c.cache_share * cache / nbytes))
    memory = nbytes * (hot / c.cached + (1 - hot) / c.memory) / bandwidth
    other = (c.convert * nbytes + c.output * batch * heads * (width + rank) * 2) / bandwidth + c.sequence * batch
    return jnp.where(some, c.launch + pnorm(busy, memory, c.overlap) + other, 0.0)


def mla_decode_flops(shape: MlaDecodeShape) -> Float[Array, "..."]:
    """Multiplications and additions of both products. [FLOP]"""
    return 2 * si(shape.batch) * shape.keys * shape.heads * (2 * si(shape.rank) + shape.rope)


def mla_decode_traffic(shape: MlaDecodeShape) -> Float[Array, "..."]:
    """Compulsory traffic: the cache read once for all heads, queries read and outputs written. [B]"""
    width = si(shape.rank) + shape.rope
    return si(shape.batch) * (shape.keys * width * shape.kv_bytes + shape.heads * (width + shape.rank) * 2)


def mla_decode_roofline(shape: MlaDecodeShape, device: Device) -> Float[Array, "..."]:
    """The larger of arithmetic at the peak and compulsory traffic at the datasheet bandwidth. [s]"""
    return jnp.maximum(safe_divide(mla_decode_flops(shape), device.peak), mla_decode_traffic(shape) / device.bandwidth)


def mla_decode_bound(shape: MlaDecodeShape, device: Device, constants: MlaDecodeConstants | None = None) -> Float[Array, "..."]:
    """What no such kernel can beat: arithmetic at the peak, and the keys beyond the cache at the datasheet bandwidth. [s]"""
    keys = si(shape.batch) * shape.keys * (si(shape.rank) + shape.rope) * shape.kv_bytes
    return jnp.maximum(safe_divide(mla_decode_flops(shape), device.peak), jnp.maximum(keys - device.cache, 0.0) / device.bandwidth)


def mla_decode_features(shape: MlaDecodeShape, device: Device) -> Float[Array, "... 6"]:
    """Dimensionless numbers of order one for the correction: log sizes, blocks, footprint over cache, bytes of the cache."""
    _, (batch, keys, heads, kv_bytes, rank, rope) = _safe(shape)
    nbytes = batch * keys * (rank + rope) * kv_bytes
    columns = (
        jnp.log(batch) / 4 - 0.8, jnp.log(keys) / 6 - 1.1, jnp.log(heads) / 4 - 0.6, jnp.log(batch * jnp.ceil(heads / 64) / device.processors) / 4,
        jnp.log(nbytes / device.cache) / 8, kv_bytes - 1.5,
    )  # fmt: skip
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)
