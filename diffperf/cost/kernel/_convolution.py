"""Time of a convolution in two or three dimensions, forward and backward, as an implicit matrix multiplication.

The library multiplies a matrix of patches, one row per output position, by the matrix of filters, without storing the patches: the multiplication has
m = batch * output positions, n = output channels / groups, k = input channels / groups * kernel volume, and `groups` products. Its constants are those of
the library's matmul. Each input element is used by several patches: the first use comes from device memory, the others from the cache. A depthwise
convolution (one channel per group) does not fill a matrix unit: it streams, at the vector units' rate.
Leaves out Winograd and FFT algorithms (they may beat the direct FLOP count), layout changes between kernels, and bias or activation fused in or not.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import ceil, maximum, minimum, pnorm, safe_divide
from ._constants import Prior
from ._device import Device
from ._matmul import MatmulConstants, MatmulShape, matmul_features, matmul_kernel_time

PASSES = ("forward", "input_gradient", "weight_gradient")


class ConvolutionShape(NamedTuple):
    """A convolution over depth, height and width; in two dimensions depth and kernel depth are 1, in one height too.

    Attributes:
      batch: images. [1]
      in_channels, out_channels: channels; multiples of `groups`. [1]
      depth, height, width: of the input. [1]
      kernel_depth, kernel_height, kernel_width: of the filter. [1]
      stride, dilation: in every direction with a kernel wider than 1. [1]
      padding: zeros on each side, in every direction with a kernel wider than 1. [1]
      groups: channels are split into so many convolutions; `in_channels` for a depthwise one. [1]
      element_bytes: of input, filter and output. [B]
    """

    batch: ArrayLike
    in_channels: ArrayLike
    out_channels: ArrayLike
    depth: ArrayLike
    height: ArrayLike
    width: ArrayLike
    kernel_depth: ArrayLike
    kernel_height: ArrayLike
    kernel_width: ArrayLike
    stride: ArrayLike = 1.0
    dilation: ArrayLike = 1.0
    padding: ArrayLike = 0.0
    groups: ArrayLike = 1.0
    element_bytes: ArrayLike = 2.0


class ConvolutionConstants(NamedTuple):
    """What a convolution adds to the library's matmul.

    Attributes:
      gather: share of the matmul's rate that remains where operands are gathered from an image. [1]
      reuse: bandwidth at which patches are read beyond the first use of each element, over memory bandwidth. [1]
      depthwise: share of the memory bandwidth that a convolution on the vector units reaches. [1]
      vector: rate of the vector units over that of the matrix units. [1]
    """

    gather: ArrayLike
    reuse: ArrayLike
    depthwise: ArrayLike
    vector: ArrayLike


CONVOLUTION_PRIORS = {
    "gather": Prior(0.9, "share", 0.7), "reuse": Prior(6.0, "positive", 0.6), "depthwise": Prior(0.6, "share", 0.7), "vector": Prior(1 / 15, "positive", 0.7),
}  # fmt: skip
"""No public table of convolutions was at hand: `reuse` starts at the matmul's `near_hot`, `vector` at H100's ratio of fp32 to dense bf16 (67 over 989
TFLOP/s, NVIDIA H100 datasheet), the shares at round numbers."""


def output_size(size: ArrayLike, kernel: ArrayLike, shape: ConvolutionShape) -> Float[Array, "..."]:
    """Output positions along one direction, `floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1`; 0 where the filter does not fit."""
    size, kernel = si(size), si(kernel)
    moves = kernel > 1
    stride = jnp.where(moves, shape.stride, 1.0)
    room = size + jnp.where(moves, 2 * si(shape.padding), 0.0) - jnp.where(moves, shape.dilation, 1.0) * (kernel - 1) - 1
    return jnp.maximum(jnp.floor(room / stride) + 1, 0.0)


def _counts(shape: ConvolutionShape) -> tuple[Array, Array, Array]:
    """Elements of the input, of the filters and of the output."""
    pairs = zip((shape.depth, shape.height, shape.width), (shape.kernel_depth, shape.kernel_height, shape.kernel_width))
    positions = jnp.prod(jnp.stack(jnp.broadcast_arrays(*(output_size(size, kernel, shape) for size, kernel in pairs))), axis=0)
    inputs = si(shape.batch) * shape.in_channels * shape.depth * shape.height * shape.width
    filters = si(shape.out_channels) * safe_divide(shape.in_channels, shape.groups) * shape.kernel_depth * shape.kernel_height * shape.kernel_width
    return inputs, filters, si(shape.batch) * shape.out_channels * positions


def convolution_flops(shape: ConvolutionShape) -> Float[Array, "..."]:
    """FLOP of one pass, the same for forward and both gradients: 2 per output element and filter element of its group. [FLOP]"""
    _, filters, outputs = _counts(shape)
    return 2 * outputs * safe_divide(filters, shape.out_channels)


def convolution_bytes(shape: ConvolutionShape) -> Float[Array, "..."]:
    """Compulsory traffic of one pass: of input, filters and output, two are read and one is written. [B]"""
    return sum(_counts(shape)) * si(shape.element_bytes)


def convolution_matmul(shape: ConvolutionShape, which: str = "forward") -> MatmulShape:
    """The implicit multiplication: sizes of the product, bytes per element such that the traffic is that of the images, not of the patches.

    Args:
      shape: the convolution.
      which: one of `PASSES`. The input gradient multiplies output gradients by filters (n = input channels), the weight gradient contracts over all
        output positions (k = batch * positions), which asks for splits.
    Raises:
      ValueError: for another pass.
    """
    if which not in PASSES:
        raise ValueError(f"pass {which!r} is unknown; one of {', '.join(PASSES)}.")
    inputs, filters, outputs = _counts(shape)
    groups, e = si(shape.groups), si(shape.element_bytes)
    volume = si(shape.kernel_depth) * shape.kernel_height * shape.kernel_width
    c_in, c_out = safe_divide(shape.in_channels, groups), safe_divide(shape.out_channels, groups)
    rows = safe_divide(outputs, shape.out_channels)  # batch * output positions
    if which == "forward":
        m, n, k, read, written = rows, c_out, c_in * volume, inputs, outputs
    elif which == "input_gradient":
        m, n, k, read, written = safe_divide(inputs, shape.in_channels), c_in, c_out * volume, outputs, inputs
        k = k * safe_divide(rows, m)  # a strided filter touches each input position in only so many of its places
    else:
        m, n, k, read, written = c_in * volume, c_out, rows, inputs, filters
    b_read = outputs if which == "weight_gradient" else filters
    size = lambda elements, product: safe_divide(elements * e, groups * product)
    cold = 0.0 if which == "weight_gradient" else 1.0  # filters come from device memory, an output gradient has just been written
    return MatmulShape(m, n, k, groups, size(read, m * k), size(b_read, k * n), size(written, m * n), cold)


def convolution_kernel_time(
    shape: ConvolutionShape, device: Device, constants: ConvolutionConstants, matmul: MatmulConstants, which: str = "forward", temperature: ArrayLike = 0.0
) -> Float[Array, "..."]:
    """Time of one pass, launch included. A filter of one element at stride 1 takes the matmul's time, but for `gather`.

    Args:
      shape: sizes, which broadcast against each other.
      device: the chip, for the datatype.
      constants: the library's convolutions on that chip.
      matmul: the library's matmul on that chip.
      which: one of `PASSES`.
      temperature: 0 is exact; above 0 the matmul's counts and the choice of units are smooth. Output sizes stay whole.
    Returns:
      Time; 0 where the output is empty. [s]
    Raises:
      ValueError: for another pass.
    """
    product = convolution_matmul(shape, which)
    flops, nbytes, bandwidth = convolution_flops(shape), convolution_bytes(shape), si(device.bandwidth)
    some = flops > 0
    product = MatmulShape(*(jnp.where(some, x, 1.0) for x in product))
    dense = matmul_kernel_time(product, device._replace(peak=si(device.peak) * constants.gather), matmul, temperature)
    again = si(product.batch) * product.m * product.k * jnp.maximum(si(shape.element_bytes) - product.a_bytes, 0.0) * ceil(si(product.n) / 128, temperature)
    dense = matmul.launch + pnorm(dense - matmul.launch, again / (constants.reuse * bandwidth), matmul.overlap)
    pair = jnp.broadcast_arrays(nbytes / (constants.depthwise * bandwidth), flops / (constants.vector * si(device.peak)))
    vector = matmul.launch + maximum(jnp.stack(pair, axis=-1), temperature)
    fastest = minimum(jnp.stack(jnp.broadcast_arrays(dense, vector), axis=-1), temperature)
    return jnp.where(some, fastest, 0.0)


def convolution_roofline(shape: ConvolutionShape, device: Device) -> Float[Array, "..."]:
    """The larger of arithmetic at the datasheet peak and compulsory traffic at the datasheet bandwidth. [s]"""
    return jnp.maximum(convolution_flops(shape) / device.peak, convolution_bytes(shape) / device.bandwidth)


def convolution_bound(shape: ConvolutionShape, device: Device, constants: ConvolutionConstants | None = None) -> Float[Array, "..."]:
    """What no direct convolution can beat: arithmetic at the datasheet peak, and traffic beyond the cache at the datasheet bandwidth. [s]"""
    beyond = jnp.maximum(convolution_bytes(shape) - device.cache, 0.0)
    return jnp.maximum(convolution_flops(shape) / device.peak, beyond / device.bandwidth)


def convolution_features(shape: ConvolutionShape, device: Device, which: str = "forward") -> Float[Array, "... f"]:
    """Those of the implicit matmul."""
    return matmul_features(convolution_matmul(shape, which), device)
