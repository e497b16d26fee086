"""Time of a kernel that moves its data once: element-wise, normalisation, softmax, reduction, cross-entropy, optimizer update, cast, quantisation.

One form: launch, then the larger of what device memory (or the cache) delivers and what the processors' rows take. A row is what one block works on: a
row of a normalisation, or 1024 elements of an element-wise kernel. Rows cost a latency each, of which a processor hides several; a processor streams at
a multiple of its share of the bandwidth, so few long rows leave the chip idle; rows that outgrow a block's registers and shared memory are read again.
Leaves out arithmetic (no such kernel is bound by it), strided and random access (`_sparse.py`), and two kernels fused into one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import maximum, pnorm, safe_divide
from ._constants import Prior
from ._device import Device

BLOCK = 1024.0
"""Elements that one block of an element-wise kernel works on."""


class StreamingShape(NamedTuple):
    """`rows` rows of `columns` elements, each read and written so often.

    Attributes:
      rows: rows: tokens, or blocks of an element-wise kernel. [1]
      columns: elements of a row. [1]
      read_bytes: read per element, all inputs together. [B]
      write_bytes: written per element, all outputs together; less than an element's where a row is reduced. [B]
      cold: 1 where the inputs surely come from device memory, 0 where the kernel before has just written them or a benchmark repeats itself. [1]
    """

    rows: ArrayLike
    columns: ArrayLike
    read_bytes: ArrayLike = 2.0
    write_bytes: ArrayLike = 2.0
    cold: ArrayLike = 0.0


class StreamingConstants(NamedTuple):
    """Behaviour of one kind of kernel of a library on a chip.

    Attributes:
      launch: time from one kernel's start to the next for empty kernels. [s]
      row_latency: time of one row in an otherwise idle processor, beside its bytes. [s]
      resident: rows whose latencies a processor hides behind each other. [1]
      near: bandwidth of one processor over its share of the memory bandwidth. [1]
      memory: share of the memory bandwidth that streaming reaches. [1]
      cached: cache bandwidth over memory bandwidth. [1]
      output: traffic per byte written. [1]
      cache_step: sharpness of the cache's limit. [1]
      cache_share: cache that a kernel fills before its data falls out. [1]
      row_store: bytes of a row that a block holds on chip. [B]
      reread: times that the inputs of longer rows are read again. [1]
      overlap: power of the norm that joins memory and processor time. [1]
    """

    launch: ArrayLike
    row_latency: ArrayLike
    resident: ArrayLike
    near: ArrayLike
    memory: ArrayLike
    cached: ArrayLike
    output: ArrayLike
    cache_step: ArrayLike
    cache_share: ArrayLike
    row_store: ArrayLike
    reread: ArrayLike
    overlap: ArrayLike


STREAMING_PRIORS = {
    "launch": Prior(2.2e-6, "positive", 0.6), "row_latency": Prior(0.5e-6, "positive", 1.0), "resident": Prior(12.0, "positive", 0.8),
    "near": Prior(4.0, "positive", 0.8), "memory": Prior(0.85, "share", 0.4), "cached": Prior(1.8, "positive", 0.5), "output": Prior(1.0, "positive", 0.3),
    "cache_step": Prior(4.0, "positive", 0.7), "cache_share": Prior(0.8, "positive", 0.5), "row_store": Prior(65536.0, "positive", 0.7),
    "reread": Prior(0.2, "positive", 1.0), "overlap": Prior(2.5, "power", 0.7),
}  # fmt: skip
"""Start values: round numbers near our fits to public timings; the launch floor is that of a kernel inside a CUDA graph."""


def elementwise_shape(elements: ArrayLike, inputs: ArrayLike = 1.0, outputs: ArrayLike = 1.0, element_bytes: ArrayLike = 2.0) -> StreamingShape:
    """Activation (1 input), residual addition or gated activation (2), scale, copy."""
    elements = si(elements)
    columns = jnp.minimum(elements, BLOCK)
    return StreamingShape(safe_divide(elements, columns), columns, si(inputs) * element_bytes, si(outputs) * element_bytes)


def cast_shape(elements: ArrayLike, from_bytes: ArrayLike, to_bytes: ArrayLike) -> StreamingShape:
    """Cast, or quantisation with a scale that is known."""
    return elementwise_shape(elements)._replace(read_bytes=si(from_bytes), write_bytes=si(to_bytes))


def normalisation_shape(tokens: ArrayLike, width: ArrayLike, element_bytes: ArrayLike = 2.0, backward: bool = False) -> StreamingShape:
    """Layer or RMS norm over `width`, or a softmax over it: reads and writes each element once; backward reads input and gradient."""
    reads = 2.0 if backward else 1.0
    return StreamingShape(si(tokens), si(width), reads * si(element_bytes), si(element_bytes))


def reduction_shape(rows: ArrayLike, columns: ArrayLike, element_bytes: ArrayLike = 2.0) -> StreamingShape:
    """Sum, maximum or mean of each row."""
    return StreamingShape(si(rows), si(columns), si(element_bytes), safe_divide(element_bytes, columns))


def cross_entropy_shape(tokens: ArrayLike, vocabulary: ArrayLike, element_bytes: ArrayLike = 2.0, backward: bool = False) -> StreamingShape:
    """Cross-entropy of logits: forward reads them and writes a loss per token (4 B), backward reads them and writes their gradient."""
    return StreamingShape(si(tokens), si(vocabulary), si(element_bytes), si(element_bytes) if backward else safe_divide(4.0, vocabulary))


def adam_shape(
    parameters: ArrayLike, gradient_bytes: ArrayLike = 4.0, master_bytes: ArrayLike = 4.0, moment_bytes: ArrayLike = 8.0, weight_bytes: ArrayLike = 2.0
) -> StreamingShape:
    """Adam: reads gradient, master weight and both moments, writes master weight, moments and the working copy of the weight. Bytes per parameter."""
    state = si(master_bytes) + moment_bytes
    return elementwise_shape(parameters)._replace(read_bytes=state + gradient_bytes, write_bytes=state + weight_bytes)


def streaming_kernel_time(shape: StreamingShape, device: Device, constants: StreamingConstants, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time of the kernel, launch included.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip; its peak is not used.
      constants: this kind of kernel in the library on that chip.
      temperature: 0 is exact; above 0 the limit of one row per processor is smooth.
    Returns:
      Time; 0 where there is nothing to move. [s]
    """
    c, bandwidth, processors = constants, si(device.bandwidth), si(device.processors)
    some = (si(shape.rows) > 0) & (si(shape.columns) > 0)
    rows, columns = (jnp.where(some, si(x), 1.0) for x in (shape.rows, shape.columns))
    row_read, row_write = columns * shape.read_bytes, columns * shape.write_bytes
    again = c.reread * sigmoid(4 * jnp.log(jnp.maximum(row_read, 1.0) / c.row_store))

    footprint = jnp.maximum(rows * (row_read + row_write), 1.0)
    hot = sigmoid(c.cache_step * jnp.log(c.cache_share * si(device.cache) / footprint))
    hot_in = (1 - si(shape.cold)) * hot
    blend = lambda share: share / c.cached + (1 - share) / c.memory
    read_time = row_read * (blend(hot_in) + again * blend(hot))  # per row, over the bandwidth: what is read again has just been there
    memory = rows * (read_time + row_write * c.output * blend(hot)) / bandwidth

    limit = lambda x: maximum(jnp.stack([x, jnp.ones_like(x)], axis=-1), temperature)
    share = rows / processors  # of a processor
    busy = limit(share / c.resident) * c.row_latency + limit(share) * ((1 + again) * row_read + row_write) * processors / (c.near * bandwidth)
    return jnp.where(some, c.launch + pnorm(memory, busy, c.overlap), 0.0)


def streaming_bytes(shape: StreamingShape) -> Float[Array, "..."]:
    """Compulsory traffic: inputs read and outputs written once. [B]"""
    return si(shape.rows) * shape.columns * (si(shape.read_bytes) + shape.write_bytes)


def streaming_roofline(shape: StreamingShape, device: Device) -> Float[Array, "..."]:
    """Compulsory traffic at the datasheet bandwidth. [s]"""
    return streaming_bytes(shape) / device.bandwidth


def streaming_bound(shape: StreamingShape, device: Device, constants: StreamingConstants | None = None) -> Float[Array, "..."]:
    """What no such kernel can beat: the traffic that cannot all have stayed in the cache, at the datasheet bandwidth. [s]"""
    inputs = si(shape.rows) * shape.columns * shape.read_bytes * shape.cold
    return jnp.maximum(inputs, jnp.maximum(streaming_bytes(shape) - device.cache, 0.0)) / device.bandwidth


def streaming_features(shape: StreamingShape, device: Device) -> Float[Array, "... 6"]:
    """Dimensionless numbers of order one for the correction: log sizes, rows over processors, footprint over cache, how full the last wave and vector are."""
    rows, columns = jnp.maximum(si(shape.rows), 1.0), jnp.maximum(si(shape.columns), 1.0)
    share = rows / device.processors
    vectors = columns / 4
    features = (
        jnp.log(rows) / 4 - 1.7, jnp.log(columns) / 4 - 1.7, jnp.log(share) / 4, jnp.log(jnp.maximum(streaming_bytes(shape), 1.0) / device.cache) / 4,
        share / jnp.ceil(share) - 0.8, (vectors != jnp.floor(vectors)) * 1.0,
    )  # fmt: skip
    return jnp.stack(jnp.broadcast_arrays(*features), axis=-1)
