"""Time of a grouped matrix multiplication, and of the feed-forward layer of a mixture of experts made of two of them, from their shapes.

A grouped matmul multiplies the tokens of each expert with that expert's weights. Each expert's rows are padded to whole tiles; tiles run in waves
over the processors; a tile multiplies at a share of the processor's rate and streams its operands at a multiple of its share of memory bandwidth;
the whole is not faster than device memory delivers the weights of all experts with work. The library takes the fastest tile height. The layer
adds routing, permutation, activation, quantisation and the weighted sum as launches and traffic. How many tokens an expert of the busiest rank
gets is in `_expert_load.py`. Leaves out communication between ranks (see the collectives), shared experts, and the choices of tuning tables
other than whether the library has one for the shape.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import ceil, maximum, minimum, pnorm, safe_divide
from ._constants import Prior
from ._device import Device
from ._expert_load import TIED, ExpertLoad, expert_load

HEIGHTS = (16, 32, 64, 128)
WIDTH = 128
UNTUNED = (1.0, 0.0, 1.0, 0.0)
"""Which of `HEIGHTS` a Triton kernel without a tuning table has: 16 rows for few tokens, else 64 (vLLM and SGLang, `get_default_config`)."""


class GroupedMatmulShape(NamedTuple):
    """`groups` products `C[rows, n] = A[rows, k] B[k, n]` in one kernel.

    Attributes:
      groups: experts with work. [1]
      rows: tokens of each. [1]
      n: output width; k: contracted width. [1]
      a_bytes: bytes per element of A; b_bytes: of B; c_bytes: of C. [B]
    """

    groups: ArrayLike
    rows: ArrayLike
    n: ArrayLike
    k: ArrayLike
    a_bytes: ArrayLike = 2.0
    b_bytes: ArrayLike = 2.0
    c_bytes: ArrayLike = 2.0


class GroupedMatmulConstants(NamedTuple):
    """Behaviour of a library's grouped matmul on a chip for one datatype.

    Attributes:
      launch: fixed time of the call. [s]
      rate: share of the peak that very high tiles reach. [1]
      half: tile height at which half of that is reached. [1]
      ramp: contraction steps that a tile loses to start and end its pipeline, in elements of k. [1]
      near: operand bandwidth of a tile over its share of memory bandwidth. [1]
      stream_k: 0: partly filled waves cost a whole one; 1: work is spread evenly. [1]
      overlap: power of the norm that joins arithmetic and memory time. [1]
      memory: share of the memory bandwidth that streaming reaches. [1]
      cached: cache bandwidth over memory bandwidth, for weights that fit. [1]
      cache_share: cache that weights fill before they fall out. [1]
    """

    launch: ArrayLike
    rate: ArrayLike
    half: ArrayLike
    ramp: ArrayLike
    near: ArrayLike
    stream_k: ArrayLike
    overlap: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    cache_share: ArrayLike


class MoeShape(NamedTuple):
    """Feed-forward layer of a mixture of experts on the busiest rank.

    Attributes:
      tokens: tokens routed, over all expert-parallel ranks. [1]
      hidden: width of the model. [1]
      width: intermediate width of one expert, before the tensor split. [1]
      experts: routed experts over all ranks. [1]
      top_k: experts per token. [1]
      tensor_parallel: ranks that share an expert's width; expert_parallel: ranks that share the experts. [1]
      skew: exponent of the power law of expert popularity; 0 for balanced routing. [1]
      weight_bytes: bytes per weight, scales included; input_bytes: per activation as it is multiplied. [B]
      tuned: 1 where the library has a tuning table for the shape, or needs none; 0 where it falls back to its default tile. [1]
      gates: 2 where the first product has a gate beside it (SwiGLU), else 1. [1]
      tied: experts per token, beyond `top_k`, that a group-limited router picks only because their scores tie, always the first ones: benchmarks with
        one-hot router scores do that, models do not. [1]
    """

    tokens: ArrayLike
    hidden: ArrayLike
    width: ArrayLike
    experts: ArrayLike
    top_k: ArrayLike
    tensor_parallel: ArrayLike = 1.0
    expert_parallel: ArrayLike = 1.0
    skew: ArrayLike = 0.0
    weight_bytes: ArrayLike = 2.0
    input_bytes: ArrayLike = 2.0
    tuned: ArrayLike = 1.0
    gates: ArrayLike = 2.0
    tied: ArrayLike = 0.0


class MoeConstants(NamedTuple):
    """Behaviour of a library's fused mixture of experts on a chip for one datatype.

    Attributes:
      launch .. cache_share: of its grouped matmuls, see `GroupedMatmulConstants`; launch is that of the whole call. [s], [1]
      untuned: `rate` of shapes without a tuning table. [1]
      routed: traffic per byte of all tokens times top_k, whether or not their expert is here: permutation, activation and sum of kernels that keep a
        slot for every pair. [1]
      local: traffic per byte of the pairs that this rank works on. [1]
      token: traffic per byte of the tokens' own vectors. [1]
      expert: time per expert on this rank: offsets, tensor maps, empty blocks. [s]
      sort: further fixed time of a call with many tokens, whose pairs no longer sort inside one block. [s]
      sort_after: tokens from which that holds. [1]
    """

    launch: ArrayLike
    rate: ArrayLike
    half: ArrayLike
    ramp: ArrayLike
    near: ArrayLike
    stream_k: ArrayLike
    overlap: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    cache_share: ArrayLike
    untuned: ArrayLike
    routed: ArrayLike
    local: ArrayLike
    token: ArrayLike
    expert: ArrayLike
    sort: ArrayLike
    sort_after: ArrayLike

    def grouped(self) -> GroupedMatmulConstants:
        """The constants of its grouped matmuls, without a launch: for layers whose launch is counted elsewhere."""
        return GroupedMatmulConstants(*self[: len(GroupedMatmulConstants._fields)])._replace(launch=0.0)


GROUPED_MATMUL_PRIORS = {
    "launch": Prior(10e-6, "positive", 0.7), "rate": Prior(0.85, "share", 0.7), "half": Prior(60.0, "positive", 0.7), "ramp": Prior(200.0, "positive", 1.0),
    "near": Prior(10.0, "positive", 1.0), "stream_k": Prior(0.5, "share", 1.0), "overlap": Prior(1.6, "power", 0.7), "memory": Prior(0.83, "share", 0.3),
    "cached": Prior(1.2, "positive", 0.5), "cache_share": Prior(0.5, "positive", 0.7),
}  # fmt: skip
MOE_PRIORS = {
    **GROUPED_MATMUL_PRIORS, "launch": Prior(20e-6, "positive", 0.6), "untuned": Prior(0.3, "share", 0.7), "routed": Prior(0.5, "positive", 1.0),
    "local": Prior(1.0, "positive", 1.0), "token": Prior(1.0, "positive", 1.0), "expert": Prior(0.02e-6, "positive", 1.0),
    "sort": Prior(4e-6, "positive", 0.7), "sort_after": Prior(16.0, "positive", 0.5),
}  # fmt: skip
"""Start values: our fits to public timings of fused layers of three inference frameworks on six GPUs."""


def _grouped(tiles, rows, active, shape, hot, rate, heights_open, device, c, temperature):
    """Time of one grouped matmul without launch: `tiles` over the heights, (..., heights), `rows` and `active` experts over all. [s]"""
    peak, bandwidth, processors, _ = device
    out = lambda x: si(x)[..., None]
    height = si(HEIGHTS)
    units = tiles * out(ceil(shape.n / WIDTH, temperature)) / out(processors)
    even = maximum(jnp.stack([units, jnp.ones_like(units)], axis=-1), temperature)
    waves = (1 - out(c.stream_k)) * ceil(units, temperature) + out(c.stream_k) * even
    reached = out(rate) * height / (height + out(c.half))
    multiply = 2 * height * WIDTH * out(processors / peak) / reached
    stream = (WIDTH * out(shape.b_bytes) + jnp.minimum(height, out(rows / active)) * out(shape.a_bytes)) * out(processors / (c.near * bandwidth))
    busy = waves * out(shape.k + c.ramp) * pnorm(multiply, stream, 4.0)
    busy = minimum(jnp.where(heights_open > 0, busy, 1e6 * busy), temperature)
    weights = active * shape.n * shape.k * shape.b_bytes
    activations = rows * (shape.k * shape.a_bytes + shape.n * shape.c_bytes)
    memory = (weights + activations) * (hot / c.cached + (1 - hot) / c.memory) / bandwidth
    return pnorm(busy, memory, c.overlap)


def grouped_matmul_kernel_time(
    shape: GroupedMatmulShape, device: Device, constants: GroupedMatmulConstants, temperature: ArrayLike = 0.0
) -> Float[Array, "..."]:
    """Time of one grouped matmul, launch included: the large-shape limit of an expert's matmul, with its padding to tiles.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip, for the datatype that is multiplied.
      constants: the library on that chip.
      temperature: 0 is exact; above 0 tile and wave counts, and the choice of tile, are smooth.
    Returns:
      Time; 0 where a size is 0. [s]
    """
    tidy: Any = Device(*map(si, device))
    c: Any = constants
    s: Any = GroupedMatmulShape(*jnp.broadcast_arrays(*map(si, shape)))
    some = (s.groups > 0) & (s.rows > 0) & (s.n > 0) & (s.k > 0)
    s = GroupedMatmulShape(*(jnp.where(some, x, 1.0) for x in s))
    tiles = s.groups[..., None] * ceil(s.rows[..., None] / si(HEIGHTS), temperature)
    hot = sigmoid(4 * jnp.log(c.cache_share * tidy.cache / (s.groups * s.n * s.k * s.b_bytes)))
    busy = _grouped(tiles, s.groups * s.rows, s.groups, s, hot, si(c.rate), 1.0, tidy, c, temperature)
    return jnp.where(some, c.launch + busy, 0.0)


def grouped_matmul_flops(shape: GroupedMatmulShape) -> Float[Array, "..."]:
    """Multiplications and additions. [FLOP]"""
    return 2 * si(shape.groups) * shape.rows * shape.n * shape.k


def grouped_matmul_roofline(shape: GroupedMatmulShape, device: Device) -> Float[Array, "..."]:
    """The larger of arithmetic at the peak and A, B and C moved once. [s]"""
    s: Any = GroupedMatmulShape(*map(si, shape))
    traffic = s.groups * (s.n * s.k * s.b_bytes + s.rows * (s.k * s.a_bytes + s.n * s.c_bytes))
    return jnp.maximum(safe_divide(grouped_matmul_flops(shape), device.peak), traffic / device.bandwidth)


def grouped_matmul_bound(shape: GroupedMatmulShape, device: Device, constants: GroupedMatmulConstants | None = None) -> Float[Array, "..."]:
    """What no such kernel can beat: arithmetic at the peak, and the weights beyond the cache at the datasheet bandwidth. [s]"""
    weights = si(shape.groups) * shape.n * shape.k * shape.b_bytes
    cold = jnp.maximum(weights - device.cache, 0.0) / device.bandwidth
    return jnp.maximum(safe_divide(grouped_matmul_flops(shape), device.peak), cold)


def grouped_matmul_features(shape: GroupedMatmulShape, device: Device) -> Float[Array, "... 6"]:
    """Dimensionless numbers of order one for the correction."""
    groups, rows, n, k = (jnp.maximum(si(x), 1e-3) for x in (shape.groups, shape.rows, shape.n, shape.k))
    units = groups * jnp.ceil(rows / 64) * n / WIDTH / device.processors
    columns = (
        jnp.log(groups) / 4 - 0.8, jnp.log(rows) / 4 - 1.0, jnp.log(n) / 4 - 2.0, jnp.log(k) / 4 - 2.0, jnp.log(units) / 4,
        jnp.log(groups * n * k * shape.b_bytes / device.cache) / 4,
    )  # fmt: skip
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)


def _safe(shape: MoeShape) -> tuple[Array, Any]:
    """Where the layer has work, and its shape with ones elsewhere."""
    s: Any = MoeShape(*jnp.broadcast_arrays(*map(si, shape)))
    some = (s.tokens > 0) & (s.hidden > 0) & (s.width > 0) & (s.experts > 0) & (s.top_k > 0)
    return some, MoeShape(*(jnp.where(some, x, 1.0) for x in s))


def _load(s: Any) -> ExpertLoad:
    return expert_load(s.tokens, s.experts, s.top_k, s.expert_parallel, s.skew, s.tied)


def moe_load(shape: MoeShape) -> ExpertLoad:
    """Pairs, active experts and tokens per expert of the busiest rank."""
    _, s = _safe(shape)
    return _load(s)


def _products(s: Any) -> tuple[Any, Any]:
    """The two grouped matmuls of a rank; groups and rows are left to the load."""
    width = s.width / s.tensor_parallel
    first = GroupedMatmulShape(1.0, 1.0, s.gates * width, s.hidden, s.input_bytes, s.weight_bytes)
    return first, GroupedMatmulShape(1.0, 1.0, s.hidden, width, s.input_bytes, s.weight_bytes)


def moe_kernel_time(shape: MoeShape, device: Device, constants: MoeConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of the layer on the busiest rank, from the router's logits to the weighted sum, without communication.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip, for the datatype that is multiplied.
      constants: the library on that chip.
      temperature: 0 is exact; above 0 tile and wave counts, and the choice of tile, are smooth.
    Returns:
      Time; 0 where a size is 0. [s]
    """
    tidy: Any = Device(*map(si, device))
    c: Any = constants
    some, s = _safe(shape)
    load = _load(s)
    tiles = load.tiles(jnp.array(HEIGHTS, float), temperature)
    products = _products(s)
    weights = sum(load.active * p.n * p.k * p.b_bytes for p in products)
    hot = sigmoid(4 * jnp.log(c.cache_share * tidy.cache / weights))
    rate = s.tuned * c.rate + (1 - s.tuned) * c.untuned
    heights = jnp.maximum(s.tuned[..., None], si(UNTUNED))
    busy = sum(_grouped(tiles, load.pairs, load.active, p, hot, rate, heights, tidy, c, temperature) for p in products)
    per_pair = 2 * (2 * s.hidden + (s.gates + 1) * s.width / s.tensor_parallel)
    also = s.tied * jnp.minimum(s.experts / s.expert_parallel, TIED) / TIED
    traffic = (c.routed * s.tokens * (s.top_k + also) + c.local * load.pairs) * per_pair + c.token * 2 * s.tokens * s.hidden
    other = traffic / tidy.bandwidth + c.expert * s.experts / s.expert_parallel + c.sort * sigmoid(4 * jnp.log(s.tokens / c.sort_after))
    return jnp.where(some, c.launch + busy + other, 0.0)


def moe_flops(shape: MoeShape) -> Float[Array, "..."]:
    """Multiplications and additions of both products on the busiest rank. [FLOP]"""
    some, s = _safe(shape)
    pairs = _load(s).pairs
    return jnp.where(some, 2 * pairs * s.hidden * (s.gates + 1) * s.width / s.tensor_parallel, 0.0)


def _rank_weights(s: Any, active: Array) -> Array:
    """Bytes of the weights of `active` experts on a rank."""
    return active * s.hidden * (s.gates + 1) * s.width / s.tensor_parallel * s.weight_bytes


def moe_roofline(shape: MoeShape, device: Device) -> Float[Array, "..."]:
    """The larger of arithmetic at the peak on a rank's share of the pairs, and its active weights, input and output moved once; routing balanced. [s]"""
    some, s = _safe(shape)
    pairs = s.tokens * (s.top_k + s.tied) / s.expert_parallel
    weights = _rank_weights(s, jnp.minimum(s.experts / s.expert_parallel, pairs))
    flops = 2 * pairs * s.hidden * (s.gates + 1) * s.width / s.tensor_parallel
    time = jnp.maximum(safe_divide(flops, device.peak), (weights + 2 * 2 * s.tokens * s.hidden) / device.bandwidth)
    return jnp.where(some, time, 0.0)


def moe_bound(shape: MoeShape, device: Device, constants: MoeConstants | None = None) -> Float[Array, "..."]:
    """What the layer cannot beat for an even share of the pairs: arithmetic at the peak, weights beyond the cache at the datasheet bandwidth. [s]

    It takes half of the expected active experts, as the draw of a skewed routing scatters around them.
    """
    some, s = _safe(shape)
    pairs = s.tokens * s.top_k / s.expert_parallel
    active = 0.5 * _load(s).active
    cold = jnp.maximum(_rank_weights(s, active) - device.cache, 0.0) / device.bandwidth
    flops = 2 * pairs * s.hidden * (s.gates + 1) * s.width / s.tensor_parallel
    return jnp.where(some, jnp.maximum(safe_divide(flops, device.peak), cold), 0.0)


def moe_features(shape: MoeShape, device: Device) -> Float[Array, "... 8"]:
    """Dimensionless numbers of order one for the correction: log pairs per expert, experts, width, waves, footprint, split, skew."""
    _, s = _safe(shape)
    load = _load(s)
    width = s.width / s.tensor_parallel
    units = load.tiles(jnp.array([64.0]))[..., 0] * s.gates * width / WIDTH / device.processors
    columns = (
        jnp.log(load.pairs / load.active) / 4 - 0.8, jnp.log(load.active) / 4 - 0.6, jnp.log(width) / 4 - 1.5, jnp.log(units) / 4,
        jnp.log(_rank_weights(s, load.active) / device.cache) / 4, jnp.log(s.tokens) / 4 - 1.2, jnp.log(s.expert_parallel) / 4 - 0.4,
        jnp.where(s.skew > 0, s.skew - 0.6, 0.0),
    )  # fmt: skip
    return jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)
