"""Time of one fused attention kernel over many queries (prefill, training forward, encoder): blocks, waves, softmax and traffic.

The kernel keeps a block of query rows on a processor and streams keys and values past it (Dao et al. 2022, FlashAttention). A block multiplies
`Q K^T` and `P V` on the matrix units and takes one exponential per score on the special function units; the two hide each other in part. Blocks
run in waves over the processors, no wave is shorter than the longest block, and the whole is not faster than device memory. Query heads that share
a key head may be packed into one block. The library takes the fastest of (block, packing). Leaves out splits of the keys over processors (few
queries against many keys), masks other than causal and window, and dropout.
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

BLOCKS = (64, 128, 256)
TILE = 128  # keys per step of a block
STEP = 32  # head widths a kernel is built for
BACKWARD = 2.5
"""Multiplications of the backward pass over those of the forward pass: five products instead of two (Dao 2023, FlashAttention-2)."""


class AttentionShape(NamedTuple):
    """`batch` sequences of `queries` new tokens that attend to `keys` tokens (the new ones are the last of them).

    Attributes:
      batch: sequences. [1]
      queries: new tokens per sequence. [1]
      keys: tokens attended to per sequence, at least `queries` where causal. [1]
      heads: query heads; kv_heads: key and value heads. [1]
      head_dim: width of a query and key; value_dim: of a value. [1]
      causal: 1: a token sees itself and what is before it; 0: all. [1]
      window: most keys a causal query sees; infinite for all. [1]
      q_bytes: bytes per element of the queries and of the output; kv_bytes: of keys and values. [B]
      append: 1 where the call also rotates and splits Q, K, V and writes them to the cache (serving), 0 for the kernel alone. [1]
    """

    batch: ArrayLike
    queries: ArrayLike
    keys: ArrayLike
    heads: ArrayLike
    kv_heads: ArrayLike
    head_dim: ArrayLike
    value_dim: ArrayLike
    causal: ArrayLike = 1.0
    window: ArrayLike = np.inf
    q_bytes: ArrayLike = 2.0
    kv_bytes: ArrayLike = 2.0
    append: ArrayLike = 0.0


class AttentionConstants(NamedTuple):
    """Behaviour of a library on a chip for one datatype of the cache.

    Attributes:
      launch: time of the call for one token and one head. [s]
      overlap: power of the norm that joins arithmetic and memory time: 1 adds them, more hides one behind the other. [1]
      rate: share of the matrix units' peak while they multiply. [1]
      softmax: time per score and processor outside the matrix units: scaling, exponential, sums. [s]
      hide: power of the norm that joins a score's multiplications and its softmax: 1 in turn, more side by side. [1]
      block_64 .. block_256: share of that speed which a block of so many query rows reaches; only products with `rate` are identified. [1]
      pack: how much slower a block is in which several query heads share one key head. [1]
      even: 0: partly filled waves cost a whole one; 1: work is spread evenly. [1]
      ramp: keys' worth of time that a block loses to its start and end. [1]
      near: bandwidth at which a processor reads keys and values from the cache, over its share of memory bandwidth. [1]
      memory: share of the memory bandwidth that streaming reaches. [1]
      throttle: how much longer a long kernel takes at the power limit. [1]
      throttle_after: duration at which half of that has set in. [s]
      rotate: traffic per 16-bit element of Q, K and V of the passes that split and rotate them. [1]
      store: traffic per byte that is written to the cache. [1]
      entry: least bytes that the write of a token and head costs. [B]
      per_sequence: time per sequence: metadata and page tables. [s]
    The last four count only where `append` is 1.
    """

    launch: ArrayLike
    overlap: ArrayLike
    rate: ArrayLike
    softmax: ArrayLike
    hide: ArrayLike
    block_64: ArrayLike
    block_128: ArrayLike
    block_256: ArrayLike
    pack: ArrayLike
    even: ArrayLike
    ramp: ArrayLike
    near: ArrayLike
    memory: ArrayLike
    throttle: ArrayLike
    throttle_after: ArrayLike
    rotate: ArrayLike
    store: ArrayLike
    entry: ArrayLike
    per_sequence: ArrayLike


ATTENTION_PRIORS = {
    "launch": Prior(9e-6, "positive", 0.4), "overlap": Prior(1.2, "power", 0.7), "rate": Prior(0.85, "share", 0.7), "softmax": Prior(42e-12, "positive", 0.3),
    "hide": Prior(2.0, "power", 0.7), "block_64": Prior(0.67, "share", 0.5), "block_128": Prior(0.8, "share", 0.5), "block_256": Prior(0.9, "share", 0.5),
    "pack": Prior(0.15, "positive", 1.0), "even": Prior(0.2, "share", 1.0), "ramp": Prior(150.0, "positive", 0.8), "near": Prior(60.0, "positive", 1.0),
    "memory": Prior(0.83, "share", 0.3), "throttle": Prior(0.1, "positive", 0.7), "throttle_after": Prior(15e-3, "positive", 1.0),
    "rotate": Prior(0.5, "positive", 1.0), "store": Prior(0.7, "positive", 1.0), "entry": Prior(400.0, "positive", 0.7),
    "per_sequence": Prior(0.01e-6, "positive", 1.0),
}  # fmt: skip
"""Start values: our fits to public timings of vLLM's and TensorRT-LLM's prefill kernels on six GPUs, rounded. `softmax` is close to one exponential per
special function unit and cycle: 16 of them per processor at 1.7 GHz take 37 ps per score (NVIDIA, CUDA C++ Programming Guide, arithmetic throughput)."""

ATTENTION_BACKWARD_PRIORS = {**ATTENTION_PRIORS, "rate": Prior(0.65, "share", 0.5), "softmax": Prior(80e-12, "positive", 0.3)}
"""The backward pass shares the forward pass's constants; its five products and atomic sums reach a lower rate."""

_BLOCK = np.repeat(np.array(BLOCKS, float), 2)  # candidates: block x (query heads apart, query heads packed)
_PACKED = np.tile([0.0, 1.0], len(BLOCKS))


def _tidy(shape: AttentionShape) -> tuple[Array, Any]:
    """Where the kernel does something, and the shape with 1 for sizes where it does not."""
    s: Any = AttentionShape(*jnp.broadcast_arrays(*map(si, shape)))
    some = (s.batch > 0) & (s.queries > 0) & (s.keys > 0) & (s.heads > 0) & (s.kv_heads > 0) & (s.head_dim > 0) & (s.value_dim > 0) & (s.window > 0)
    one = lambda x: jnp.where(some, x, 1.0)
    sizes = ("batch", "queries", "keys", "heads", "kv_heads", "head_dim", "value_dim", "window")
    return some, s._replace(**{name: one(getattr(s, name)) for name in sizes})


def _seen(queries: Array, keys: Array, window: Array) -> Array:
    """Mean keys of a causal query: query i of L sees min(window, keys - L + i), here for continuous i."""
    most = jnp.minimum(window, keys)
    rising = jnp.clip(most - (keys - queries), 0.0, queries)
    return most - rising**2 / (2 * queries)


def attention_flops(shape: AttentionShape) -> Float[Array, "..."]:
    """Arithmetic of both products, masked scores left out: `2 batch queries heads (head_dim + value_dim)` times the mean keys per query. [FLOP]"""
    some, s = _tidy(shape)
    seen = s.causal * _seen(s.queries, s.keys, s.window) + (1 - s.causal) * s.keys
    return jnp.where(some, 2 * s.batch * s.queries * s.heads * seen * (s.head_dim + s.value_dim), 0.0)


def attention_traffic(shape: AttentionShape) -> Float[Array, "..."]:
    """Compulsory traffic: Q, K and V read and the output written once. [B]"""
    some, s = _tidy(shape)
    return jnp.where(some, s.batch * (s.head_dim + s.value_dim) * (s.queries * s.heads * s.q_bytes + s.keys * s.kv_heads * s.kv_bytes), 0.0)


def attention_kernel_time(
    shape: AttentionShape, device: Device, constants: AttentionConstants, temperature: ArrayLike = 0.0
) -> Float[Array, "..."]:  # fmt: skip
    """Time of a forward pass, launch included.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip, for the datatype that is multiplied.
      constants: the library on that chip.
      temperature: 0 is exact; above 0 block and wave counts, and the choice of block and packing, are smooth.
    Returns:
      Time; 0 where a size is 0. [s]
    """
    return _time(shape, device, constants, temperature, 1.0, 1.0)


def attention_backward_kernel_time(
    shape: AttentionShape, device: Device, constants: AttentionConstants, temperature: ArrayLike = 0.0
) -> Float[Array, "..."]:  # fmt: skip
    """Time of a backward pass: as the forward pass, with `BACKWARD` times the multiplications and twice the traffic (inputs and their gradients). [s]"""
    return _time(shape, device, constants, temperature, BACKWARD, 2.0)


def _time(shape: AttentionShape, device: Device, constants: AttentionConstants, temperature: ArrayLike, products: float, passes: float) -> Array:
    c, bandwidth, processors = constants, si(device.bandwidth), si(device.processors)
    some, s = _tidy(shape)
    out = lambda x: si(x)[..., None]  # axes (..., candidate)

    shared = 1 + _PACKED * (out(s.heads / s.kv_heads) - 1)  # query heads in one block
    units = ceil(out(s.queries) * shared / _BLOCK, temperature) * out(s.batch * s.heads / processors) / shared
    evenly = maximum(jnp.stack([units, jnp.ones_like(units)], axis=-1), temperature)
    waves = (1 - out(c.even)) * ceil(units, temperature) + out(c.even) * evenly

    padded = TILE * ceil(s.keys / TILE, temperature)
    height = _BLOCK / shared  # tokens in a block
    most = jnp.minimum(s.window, padded)
    edge = jnp.minimum(TILE + height, out(padded)) / 2  # masked scores in the tiles that the mask cuts
    queries = s.queries + padded - s.keys  # shifted with the keys: rows that fill up the last tile change nothing
    causal = jnp.minimum(out(_seen(queries, padded, s.window)) + edge, out(padded + TILE))
    mean = out(s.causal) * causal + out((1 - s.causal) * padded)
    longest = out(s.causal) * jnp.minimum(out(most) + height, out(padded)) + out((1 - s.causal) * padded)

    slower = 1 + out(c.pack) * jnp.where(out(s.heads > s.kv_heads), _PACKED, 0.0)
    column = _column(s, device, c, temperature, products) * slower
    busy = pnorm(waves * (mean + out(c.ramp)) * column, (longest + out(c.ramp)) * column, 4.0)
    busy = pnorm(minimum(busy, temperature), passes * attention_traffic(s) / (c.memory * bandwidth), c.overlap)
    busy = busy * (1 + c.throttle * sigmoid(1.5 * jnp.log(busy / c.throttle_after)))

    width = s.head_dim + s.value_dim
    moved = c.rotate * 2 * (s.heads * s.head_dim + s.kv_heads * width) + c.store * s.kv_heads * pnorm(width * s.kv_bytes, c.entry, 4.0)
    prepare = s.batch * (s.queries * moved / bandwidth + c.per_sequence)
    return jnp.where(some, c.launch + busy + s.append * prepare, 0.0)


def _column(s: Any, device: Any, c: Any, temperature: ArrayLike, products: float) -> Array:
    """Time that each candidate's block spends on one key, shape (..., candidates). [s] Kernels exist for head widths in steps of `STEP`."""
    out = lambda x: si(x)[..., None]
    width = STEP * (ceil(s.head_dim / STEP, temperature) + ceil(s.value_dim / STEP, temperature))
    score = pnorm(products * 2 * width * device.processors / (device.peak * c.rate), c.softmax, c.hide)
    share = jnp.repeat(jnp.stack(jnp.broadcast_arrays(*(si(getattr(c, f"block_{b}")) for b in BLOCKS)), axis=-1), 2, axis=-1)
    return _BLOCK * out(score) / share + out(width * s.kv_bytes * device.processors / (c.near * device.bandwidth))


def attention_peak_share(
    head_dim: ArrayLike, value_dim: ArrayLike, device: Device, constants: AttentionConstants, *, backward: bool = False, kv_bytes: ArrayLike = 2.0
) -> Float[Array, "..."]:  # fmt: skip
    """Share of the datasheet peak that a large kernel reaches: the limit of `attention_flops / peak / time` for many queries, keys and heads. [1]

    Args:
      head_dim: width of a query and key; value_dim: of a value. [1]
      backward: of the backward pass, whose arithmetic is `BACKWARD` times `attention_flops`.
      kv_bytes: bytes per element of keys and values.
    Returns:
      The share, below 1: what masked scores, waves and launches cost is a matter of size and not in it.
    """
    one, products = jnp.ones(()), BACKWARD if backward else 1.0
    s: Any = AttentionShape(one, one, one, one, one, si(head_dim), si(value_dim), kv_bytes=si(kv_bytes))
    per_row = jnp.min(_column(s, device, constants, 0.0, products) / _BLOCK, axis=-1)
    ideal = products * 2 * (s.head_dim + s.value_dim) * si(device.processors) / device.peak
    return ideal / (per_row * (1 + si(constants.throttle)))


def attention_bound(shape: AttentionShape, device: Device, constants: AttentionConstants | None = None) -> Float[Array, "..."]:
    """Arithmetic at the datasheet peak: what no forward kernel beats even if all its operands are cached. [s]"""
    return safe_divide(attention_flops(shape), device.peak)


def attention_backward_bound(shape: AttentionShape, device: Device, constants: AttentionConstants | None = None) -> Float[Array, "..."]:
    """The same for a backward kernel. [s]"""
    return BACKWARD * attention_bound(shape, device)


def attention_roofline(shape: AttentionShape, device: Device) -> Float[Array, "..."]:
    """The larger of arithmetic at the datasheet peak and compulsory traffic at the datasheet bandwidth, forward. [s]"""
    return jnp.maximum(attention_bound(shape, device), attention_traffic(shape) / device.bandwidth)


def attention_features(shape: AttentionShape, device: Device) -> Float[Array, "... 8"]:
    """Dimensionless numbers of order one for the correction: log sizes, window, blocks per processor, intensity over the ridge point."""
    _, s = _tidy(shape)
    intensity = attention_flops(s) / attention_traffic(s)
    units = s.batch * s.heads * jnp.ceil(s.queries / 128) / si(device.processors)
    seen = jnp.minimum(s.window, s.keys) / s.keys
    columns = (
        jnp.log(s.queries) / 4 - 1.6, jnp.log(s.batch) / 4 - 0.6, jnp.log(s.heads) / 2 - 1.4, jnp.log(s.heads / s.kv_heads) / 2 - 1,
        jnp.log(s.head_dim / 128), jnp.log(seen) / 2, jnp.log(units) / 4, jnp.log(intensity * device.bandwidth / device.peak) / 4,
    )  # fmt: skip
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)
