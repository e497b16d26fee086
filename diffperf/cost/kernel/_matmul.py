"""Time of one matrix multiplication kernel from its shape: tiles, waves, split-K, cache residency, streaming and launch.

A work unit is one tile of the output, or one of `s` splits of its contraction. Units run in waves over the processors; a unit multiplies at a
share of the processor's rate and streams its operands at a multiple of its share of memory bandwidth, and the whole cannot be faster than device
memory delivers. The library takes the fastest of (tile, split). Leaves out the library's own heuristics (it does not always choose the fastest),
sparsity, and clocks beyond one smooth throttle for long kernels.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import ceil, maximum, minimum, pnorm, safe_divide
from ._constants import Prior
from ._device import Device

TILES = ((64, 32), (64, 64), (64, 128), (128, 128), (128, 256), (256, 128), (256, 256))
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)


class MatmulShape(NamedTuple):
    """`batch` products `C[m, n] = A[m, k] B[k, n]`.

    Attributes:
      m: rows of A: tokens. [1]
      n: columns of B: output width. [1]
      k: contracted width. [1]
      batch: independent products. [1]
      a_bytes: bytes per element of A; b_bytes: of B; c_bytes: of C. [B]
      cold: 1 where B surely comes from device memory (a layer's weights in a model), 0 where a benchmark may have left it in the cache. [1]
    """

    m: ArrayLike
    n: ArrayLike
    k: ArrayLike
    batch: ArrayLike = 1.0
    a_bytes: ArrayLike = 2.0
    b_bytes: ArrayLike = 2.0
    c_bytes: ArrayLike = 2.0
    cold: ArrayLike = 1.0


class MatmulConstants(NamedTuple):
    """Behaviour of a library on a chip for one datatype.

    Attributes:
      launch: time from one kernel's start to the next for empty kernels. [s]
      fill: further time until device memory streams at its rate. [s]
      overlap: power of the norm that joins arithmetic and memory time: 1 adds them, more hides one behind the other. [1]
      rate_64x32 .. rate_256x256: share of the peak reached inside a unit of that tile. [1]
      stream_k: 0: partly filled waves cost a whole one; 1: work is spread evenly. [1]
      ramp: contraction steps a unit loses to start and end its pipeline, in elements of k. [1]
      near_hot, near_cold: a unit's operand bandwidth over its share of memory bandwidth, cached and not. [1]
      split_sync: time a split kernel takes longer. [s]
      split_bandwidth: bandwidth at which partial sums are written and read over memory bandwidth. [1]
      memory: share of the memory bandwidth that streaming reaches. [1]
      cached: cache bandwidth over memory bandwidth. [1]
      output: traffic per byte of C. [1]
      cache_step: sharpness of the cache's limit. [1]
      cache_share: cache that activations fill before they fall out. [1]
      rotation: the same for weights: what a benchmark rotates between calls, in multiples of B. [1]
      throttle: how much longer a long arithmetic-bound kernel takes at the power limit. [1]
      throttle_after: duration at which half of that has set in. [s]
      quantise: traffic per byte of A of the pass that quantises it inside the timed call. [1]
    """

    launch: ArrayLike
    fill: ArrayLike
    overlap: ArrayLike
    rate_64x32: ArrayLike
    rate_64x64: ArrayLike
    rate_64x128: ArrayLike
    rate_128x128: ArrayLike
    rate_128x256: ArrayLike
    rate_256x128: ArrayLike
    rate_256x256: ArrayLike
    stream_k: ArrayLike
    ramp: ArrayLike
    near_hot: ArrayLike
    near_cold: ArrayLike
    split_sync: ArrayLike
    split_bandwidth: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    output: ArrayLike
    cache_step: ArrayLike
    cache_share: ArrayLike
    rotation: ArrayLike
    throttle: ArrayLike
    throttle_after: ArrayLike
    quantise: ArrayLike


MATMUL_PRIORS = {
    "launch": Prior(2.2e-6, "positive", 0.4), "fill": Prior(0.4e-6, "positive", 0.5), "overlap": Prior(2.2, "power", 0.7),
    "rate_64x32": Prior(0.35, "share", 0.7), "rate_64x64": Prior(0.55, "share", 0.7), "rate_64x128": Prior(0.65, "share", 0.7),
    "rate_128x128": Prior(0.75, "share", 0.7), "rate_128x256": Prior(0.75, "share", 0.7), "rate_256x128": Prior(0.75, "share", 0.7),
    "rate_256x256": Prior(0.75, "share", 0.7), "stream_k": Prior(0.6, "share", 1.0), "ramp": Prior(100.0, "positive", 1.0),
    "near_hot": Prior(6.0, "positive", 0.5), "near_cold": Prior(7.0, "positive", 0.6), "split_sync": Prior(2.7e-6, "positive", 0.4),
    "split_bandwidth": Prior(1.0, "positive", 0.8), "memory": Prior(0.81, "share", 0.3), "cached": Prior(1.2, "positive", 0.5),
    "output": Prior(1.1, "positive", 0.4), "cache_step": Prior(8.0, "positive", 0.7), "cache_share": Prior(1.0, "positive", 0.5),
    "rotation": Prior(7.0, "positive", 0.5), "throttle": Prior(0.13, "positive", 0.7), "throttle_after": Prior(1e-3, "positive", 1.0),
    "quantise": Prior(0.01, "positive", 0.3),
}  # fmt: skip
"""Start values: our fits to public kernel timings of six GPUs; the launch floor is that of a kernel inside a CUDA graph."""

_A = np.array([a for a, _ in TILES], float)
_B = np.array([b for _, b in TILES], float)
_S = np.array(SPLITS, float)


def matmul_traffic(shape: MatmulShape) -> Float[Array, "..."]:
    """Compulsory traffic: A and B read and C written once. [B]"""
    m, n, k = si(shape.m), si(shape.n), si(shape.k)
    return shape.batch * (m * k * shape.a_bytes + k * n * shape.b_bytes + m * n * shape.c_bytes)


def matmul_kernel_time(shape: MatmulShape, device: Device, constants: MatmulConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of the kernel, launch included.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip, for the datatype that is multiplied.
      constants: the library on that chip.
      temperature: 0 is exact; above 0 tile and wave counts, and the choice of tile and split, are smooth.
    Returns:
      Time; 0 where a size is 0. [s]
    """
    c, (peak, bandwidth, processors, cache) = constants, device
    m, n, k, batch = si(shape.m), si(shape.n), si(shape.k), si(shape.batch)
    some = (m > 0) & (n > 0) & (k > 0) & (batch > 0)
    m, n, k, batch = (jnp.where(some, x, 1.0) for x in (m, n, k, batch))
    a, b, d = batch * m * k * shape.a_bytes, batch * k * n * shape.b_bytes, batch * m * n * shape.c_bytes

    room = c.cache_share * si(cache)
    hot = lambda nbytes: sigmoid(c.cache_step * jnp.log(room / nbytes))
    hot_a, hot_b = hot(a + d), (1 - si(shape.cold)) * hot(c.rotation * b + a + d)

    # device memory
    at_cache, at_memory = 1 / (c.cached * bandwidth), 1 / (c.memory * bandwidth)
    blend = lambda share: share * at_cache + (1 - share) * at_memory
    memory = c.fill + (a + c.output * d) * blend(hot_a) + b * blend(hot_b)

    # one unit on one processor, axes (..., split, tile)
    rates = jnp.stack(jnp.broadcast_arrays(*(si(getattr(c, f"rate_{x}x{y}")) for x, y in TILES)), axis=-1)[..., None, :]
    out = lambda x: si(x)[..., None, None]
    units = out(batch) * ceil(out(m) / _A, temperature) * ceil(out(n) / _B, temperature) * _S[:, None] / out(processors)
    even = maximum(jnp.stack([units, jnp.ones_like(units)], axis=-1), temperature)
    waves = (1 - out(c.stream_k)) * ceil(units, temperature) + out(c.stream_k) * even
    depth = out(k) / _S[:, None]
    arithmetic = 2 * _A * _B * (depth + out(c.ramp)) * out(si(processors) / peak) / rates
    per_byte = lambda share: out((share / c.near_hot + (1 - share) / c.near_cold) * processors / bandwidth)
    rows, columns = jnp.minimum(_A, out(m)), jnp.minimum(_B, out(n))
    streaming = depth * (rows * out(shape.a_bytes) * per_byte(hot_a) + columns * out(shape.b_bytes) * per_byte(hot_b))
    unit = waves * _eighth_norm(arithmetic, streaming)
    reduction = c.split_sync + 8 * batch * m * n / (c.split_bandwidth * bandwidth) * si(_S).reshape((-1,) + (1,) * jnp.ndim(m))
    best = minimum(unit, temperature) + jnp.moveaxis(jnp.where((_S > 1).reshape((-1,) + (1,) * jnp.ndim(m)), reduction, 0.0), 0, -1)
    busy = pnorm(minimum(best, temperature), memory, c.overlap)

    intensity = 2 * batch * m * n * k / (a + b + d) * bandwidth / peak
    busy = busy * (1 + c.throttle * sigmoid(1.5 * jnp.log(busy / c.throttle_after)) * sigmoid(3 * jnp.log(intensity)))
    cast = c.quantise * a / bandwidth
    return jnp.where(some, c.launch + busy + cast, 0.0)


def _eighth_norm(x: Array, y: Array) -> Array:
    """`(x^8 + y^8)^(1/8)` of positive numbers, by products and roots only: close to the maximum, and smooth."""
    peak, low = jnp.maximum(x, y), jnp.minimum(x, y)
    ratio = (low / peak) ** 2
    ratio = ratio * ratio
    return peak * jnp.sqrt(jnp.sqrt(jnp.sqrt(1 + ratio * ratio)))


def matmul_bound(shape: MatmulShape, device: Device) -> Float[Array, "..."]:
    """Roofline: the larger of arithmetic at the datasheet peak and compulsory traffic at the datasheet bandwidth. [s]"""
    flops = 2 * si(shape.batch) * shape.m * shape.n * shape.k
    return jnp.maximum(safe_divide(flops, device.peak), matmul_traffic(shape) / device.bandwidth)


def matmul_features(shape: MatmulShape, device: Device) -> Float[Array, "... 7"]:
    """Dimensionless numbers of order one for the correction: log sizes, waves, intensity over the ridge point, footprint over cache."""
    m, n, k = (jnp.maximum(si(x), 1.0) for x in (shape.m, shape.n, shape.k))
    traffic = jnp.maximum(matmul_traffic(shape), 1.0)
    units = shape.batch * jnp.ceil(m / 128) * jnp.ceil(n / 128) / si(device.processors)
    columns = (
        jnp.log(m) / 4 - 1.2, jnp.log(n) / 4 - 1.9, jnp.log(k) / 4 - 1.9, jnp.log(2 * shape.batch * m * n * k / traffic * device.bandwidth / device.peak) / 4,
        jnp.log(traffic / device.cache) / 4, jnp.log(units) / 4, units / jnp.ceil(units) - 0.8,
    )  # fmt: skip
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)
