"""Time of kernels that XLA compiles for a CPU: matmul, attention and operators that move their data once.

No tiles in waves: threads share the work evenly, above a size from which work is shared at all. A matmul packs its operands; edges of the register block
cost a few rows, columns and steps. Attention is not fused: all scores, masked ones too, are computed, written, and read back by a softmax. Data moves at a
rate that depends on whether it fits the last-level cache, and results may cost more than reads: the operating system provides their pages. Leaves out
remote memory of several sockets, vector widths of other datatypes (each datatype has constants of its own), and turbo clocks.

Nothing here is discrete, so `temperature` has no effect.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import pnorm
from ._attention import AttentionShape
from ._constants import Prior
from ._decode import DecodeShape
from ._device import Device
from ._matmul import MatmulShape
from ._streaming import StreamingShape


class CpuMatmulConstants(NamedTuple):
    """Behaviour of the matmul of a library on a CPU for one datatype.

    Attributes:
      launch: time of the call for an empty product. [s]
      fork: further time of a product that is handed to the library of threads. [s]
      fork_from: FLOP from which it is; below, the calling thread multiplies. [FLOP]
      parallel: FLOP at which half of the gain by threads has set in. [FLOP]
      rate: share of the peak in the middle of large products. [1]
      edge_m, edge_n: rows of A and columns of B lost at the edges of register blocks; ramp: steps of k lost to start and end them. [1]
      pack_a, pack_b: traffic per byte of A and of B beside reading it, to pack it where several rows and columns reuse it. [1]
      memory: share of the memory bandwidth that streaming reaches. [1]
      cached: cache bandwidth over memory bandwidth. [1]
      output: traffic per byte of C while it fits the cache; fresh: beyond. [1]
      cache_step: sharpness of the cache's limit. [1]
      cache_share: cache that data fills before it falls out. [1]
      overlap: power of the norm that joins arithmetic and traffic. [1]
    """

    launch: ArrayLike
    fork: ArrayLike
    fork_from: ArrayLike
    parallel: ArrayLike
    rate: ArrayLike
    edge_m: ArrayLike
    edge_n: ArrayLike
    ramp: ArrayLike
    pack_a: ArrayLike
    pack_b: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    output: ArrayLike
    fresh: ArrayLike
    cache_step: ArrayLike
    cache_share: ArrayLike
    overlap: ArrayLike


CPU_MATMUL_PRIORS = {
    "launch": Prior(8e-6, "positive", 0.5), "fork": Prior(15e-6, "positive", 0.7), "fork_from": Prior(5e4, "positive", 0.7),
    "parallel": Prior(2e6, "positive", 1.0), "rate": Prior(0.8, "share", 0.5), "edge_m": Prior(8.0, "positive", 1.0), "edge_n": Prior(16.0, "positive", 1.0),
    "ramp": Prior(16.0, "positive", 1.0), "pack_a": Prior(1.0, "positive", 1.0), "pack_b": Prior(1.0, "positive", 1.0), "memory": Prior(0.75, "share", 0.5),
    "cached": Prior(2.0, "positive", 0.7), "output": Prior(2.0, "positive", 0.7), "fresh": Prior(3.0, "positive", 0.7),
    "cache_step": Prior(4.0, "positive", 0.7), "cache_share": Prior(0.8, "positive", 0.7), "overlap": Prior(1.5, "power", 0.7),
}  # fmt: skip
"""Start values: round numbers for a server core of 2023 and jitted JAX calls; a register block of AVX-512 kernels holds about 8 to 14 rows of 16 or 32."""


class CpuStreamingConstants(NamedTuple):
    """Behaviour of one kind of operator that moves its data once.

    Attributes:
      launch, fork: as of the matmul. [s]
      parallel: bytes at which half of the gain by threads, and of `fork`, has set in. [B]
      step: sharpness of that. [1]
      element: time of one thread per element: its arithmetic. [s]
      row: time of one thread per row. [s]
      memory, cached, cache_step, cache_share, overlap: as of the matmul. [1]
      fresh: traffic per byte written, where results do not fit the cache. [1]
    """

    launch: ArrayLike
    fork: ArrayLike
    parallel: ArrayLike
    step: ArrayLike
    element: ArrayLike
    row: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    fresh: ArrayLike
    cache_step: ArrayLike
    cache_share: ArrayLike
    overlap: ArrayLike


CPU_STREAMING_PRIORS = {
    "launch": Prior(9e-6, "positive", 0.5), "fork": Prior(2e-5, "positive", 0.7), "parallel": Prior(1e5, "positive", 1.0), "step": Prior(1.0, "positive", 0.5),
    "element": Prior(6e-10, "positive", 1.2), "row": Prior(2e-9, "positive", 1.0), "memory": Prior(0.75, "share", 0.4), "cached": Prior(2.0, "positive", 0.5),
    "fresh": Prior(2.5, "positive", 0.7), "cache_step": Prior(4.0, "positive", 0.7), "cache_share": Prior(0.8, "positive", 0.5),
    "overlap": Prior(2.0, "power", 0.7),
}  # fmt: skip


class CpuAttentionConstants(NamedTuple):
    """Behaviour of attention that is not fused.

    Attributes:
      launch, fork: as of the matmul. [s]
      parallel: FLOP at which half of the gain by threads, and of `fork`, has set in. [FLOP]
      rate: share of the peak that both products reach for wide heads. [1]
      edge: width of a head at which they reach half of it; edge_q: queries per head, the same. [1]
      score: time of one thread per score beside the products: mask, exponential, sums. [s]
      score_traffic: bytes moved per score. [B]
      move: traffic per byte of Q, K, V and the output, whose axes are swapped. [1]
      memory, cached, cache_step, cache_share, overlap: as of the matmul. [1]
    """

    launch: ArrayLike
    fork: ArrayLike
    parallel: ArrayLike
    rate: ArrayLike
    edge: ArrayLike
    edge_q: ArrayLike
    score: ArrayLike
    score_traffic: ArrayLike
    move: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    cache_step: ArrayLike
    cache_share: ArrayLike
    overlap: ArrayLike


CPU_ATTENTION_PRIORS = {
    "launch": Prior(2e-5, "positive", 0.5), "fork": Prior(5e-5, "positive", 0.7), "parallel": Prior(2e6, "positive", 1.0), "rate": Prior(0.6, "share", 0.7),
    "edge": Prior(16.0, "positive", 0.8), "edge_q": Prior(8.0, "positive", 0.8), "score": Prior(2e-9, "positive", 1.0),
    "score_traffic": Prior(32.0, "positive", 0.7), "move": Prior(3.0, "positive", 0.8), "memory": Prior(0.75, "share", 0.4),
    "cached": Prior(2.0, "positive", 0.5), "cache_step": Prior(4.0, "positive", 0.5), "cache_share": Prior(0.8, "positive", 0.5),
    "overlap": Prior(1.3, "power", 0.7),
}  # fmt: skip
CPU_BACKWARD_PRIORS = {**CPU_ATTENTION_PRIORS, "score": Prior(4e-9, "positive", 1.0), "score_traffic": Prior(64.0, "positive", 0.7)}
BACKWARD = 2.0
"""Products of the backward pass that reads the kept scores, over those of the forward pass: four instead of two."""


def cpu_matmul_time(shape: MatmulShape, device: Device, constants: CpuMatmulConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of a matmul; 0 where a size is 0. Arguments as of `matmul_kernel_time`. [s]"""
    c, (peak, bandwidth, processors, cache) = constants, map(si, device)
    some, (m, n, k, batch) = _positive(shape.m, shape.n, shape.k, shape.batch)
    a, b, d = batch * m * k * shape.a_bytes, batch * k * n * shape.b_bytes, batch * m * n * shape.c_bytes
    flops = 2 * batch * m * n * k
    alone = flops * processors / (peak * c.rate) * (1 + c.edge_m / m) * (1 + c.edge_n / n) * (1 + c.ramp / k)
    arithmetic = alone / _threads(flops / c.parallel, processors)
    reused = jnp.clip(m - 1, 0.0, 1.0) * jnp.clip(n - 1, 0.0, 1.0)  # a vector times a matrix packs nothing
    hot, hot_out = _hot(a + b + d, cache, c), _hot(d, cache, c)
    read = (a * (1 + reused * c.pack_a) + b * (1 + reused * c.pack_b)) * (hot / c.cached + (1 - hot) / c.memory)
    write = d * (hot_out * c.output / c.cached + (1 - hot_out) * c.fresh / c.memory)
    fork = c.fork * sigmoid(8 * jnp.log(flops / c.fork_from))
    return jnp.where(some, c.launch + fork + pnorm(arithmetic, (read + write) / bandwidth, c.overlap), 0.0)


def cpu_streaming_time(shape: StreamingShape, device: Device, constants: CpuStreamingConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of an element-wise operator, norm, softmax, reduction or update; 0 where there is nothing to move. [s]"""
    c, (_, bandwidth, processors, cache) = constants, map(si, device)
    some, (rows, columns) = _positive(shape.rows, shape.columns)
    read, write = rows * columns * shape.read_bytes, rows * columns * shape.write_bytes
    share = (read + write) / c.parallel
    arithmetic = (rows * columns * c.element + rows * c.row) / _threads(share, processors, c.step)
    hot, hot_out = _hot(read + write, cache, c), _hot(write, cache, c)
    moved = read * (hot / c.cached + (1 - hot) / c.memory) + write * (hot_out / c.cached + (1 - hot_out) * c.fresh / c.memory)
    return jnp.where(some, c.launch + c.fork * _forked(share, c.step) + pnorm(arithmetic, moved / bandwidth, c.overlap), 0.0)


def cpu_attention_time(shape: AttentionShape, device: Device, constants: CpuAttentionConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of a forward pass over many queries; 0 where a size is 0. [s]"""
    return _attention(shape, shape.queries, shape.value_dim, device, constants, 1.0, 1.0)


def cpu_attention_backward_time(
    shape: AttentionShape, device: Device, constants: CpuAttentionConstants, temperature: ArrayLike = 0.0
) -> Float[Array, "..."]:  # fmt: skip
    """Time of a backward pass alone: `BACKWARD` times the products, inputs and their gradients moved. [s]"""
    return _attention(shape, shape.queries, shape.value_dim, device, constants, BACKWARD, 2.0)


def cpu_decode_time(shape: DecodeShape, device: Device, constants: CpuAttentionConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of a few queries against a cache. [s]"""
    return _attention(shape, shape.queries, shape.head_dim, device, constants, 1.0, 1.0)


def _attention(
    shape: AttentionShape | DecodeShape, queries: ArrayLike, value_dim: ArrayLike, device: Device, c: CpuAttentionConstants, products: float, passes: float
) -> Array:
    peak, bandwidth, processors, cache = map(si, device)
    some, (batch, q, keys, heads, kv_heads, width, wide) = _positive(
        shape.batch, queries, shape.keys, shape.heads, shape.kv_heads, shape.head_dim, value_dim
    )  # fmt: skip
    scores = batch * heads * q * keys
    flops = 2 * products * scores * (width + wide)
    alone = processors * flops / (peak * c.rate) * (1 + c.edge / width) * (1 + c.edge_q / q) + passes * scores * c.score
    operands = passes * batch * (width + wide) * (q * heads * shape.q_bytes + keys * kv_heads * shape.kv_bytes)
    traffic = operands * c.move + passes * scores * c.score_traffic
    hot = _hot(operands + 4 * passes * scores, cache, c)
    moved = traffic * (hot / c.cached + (1 - hot) / c.memory) / bandwidth
    share = flops / c.parallel
    return jnp.where(some, c.launch + c.fork * _forked(share) + pnorm(alone / _threads(share, processors), moved, c.overlap), 0.0)


def _positive(*sizes: ArrayLike) -> tuple[Array, list[Array]]:
    """Where all sizes are positive, and the sizes with 1 where not."""
    arrays = jnp.broadcast_arrays(*map(si, sizes))
    some = jnp.all(jnp.stack([x > 0 for x in arrays]), axis=0)
    return some, [jnp.where(some, x, 1.0) for x in arrays]


def _forked(share: Array, step: ArrayLike = 2.0) -> Array:
    return sigmoid(step * jnp.log(share))


def _threads(share: Array, processors: Array, step: ArrayLike = 2.0) -> Array:
    """Threads' worth of speed: 1 far below `share` 1, all far above."""
    forked = _forked(share, step)
    return 1 / (forked / processors + 1 - forked)


def _hot(nbytes: Array, cache: Array, c: Any) -> Array:
    """Share of a transfer that the cache serves."""
    return sigmoid(c.cache_step * jnp.log(c.cache_share * cache / jnp.maximum(nbytes, 1.0)))
