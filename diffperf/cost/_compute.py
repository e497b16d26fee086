"""How long one device takes for one operator of a training step: the large-shape limits of the kernel models in `kernel/`.

The matrix form is an additive roofline: arithmetic at the rate of a large matmul, lengthened by what a pipeline loses per unit and by a partly filled
last wave, plus the traffic of the operands at memory rate, each operand with a factor for what tiles read again. On whole training steps the
full model with its tiles and splits predicts no better, and takes fifty times as long.
"""

from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from .._arrays import si
from ..smooth import safe_divide

RAMP = 150.0
"""Contraction steps that a unit of a matmul loses to start and end its pipeline: median over the 16-bit libraries in `kernel/fitted/matmul.json`. [1]"""
PARTIAL_WAVE = 0.25
"""Share of a wave of units that the last one leaves empty, on average: half for whole waves, less where libraries split work evenly. [1]"""
UNIT = 128.0 * 192.0
"""Elements of C that one processor computes at a time: between tiles of 128 x 128 and 128 x 256, the ones that large matmuls use. [1]"""


def matmul_time(
    m: Real[ArrayLike, "..."],
    k: Real[ArrayLike, "..."],
    n: Real[ArrayLike, "..."],
    flops_per_s: Real[ArrayLike, "..."],
    bytes_per_s: Real[ArrayLike, "..."],
    weight_traffic: Real[ArrayLike, "..."] = 1.0,
    activation_traffic: Real[ArrayLike, "..."] = 1.0,
    processors: Real[ArrayLike, "..."] = 0.0,
) -> Float[Array, "..."]:
    """Time of `C[m, n] = A[m, k] B[k, n]`, `2 (m n + PARTIAL_WAVE UNIT S) (k + RAMP) / F + 2 (w k n + a m (k + n)) / W`.

    Elements count 2 bytes also for 8- and 4-bit operands: the passes that quantise them take what the narrower reads save.

    Args:
      m: rows: tokens. [1]
      k: contracted width; n: output width. [1]
      flops_per_s: rate F of a large matmul. [FLOP/s]
      bytes_per_s: memory rate W. [B/s]
      weight_traffic: w, memory traffic per compulsory byte of B. [1]
      activation_traffic: a, the same of A and C. [1]
      processors: S, streaming multiprocessors, compute units or cores over which the output is tiled. [1]
    Returns:
      Time; 0 when any of m, k, n is 0. [s]
    """
    m, k, n = si(m), si(k), si(n)
    some = (m > 0) & (k > 0) & (n > 0)
    arithmetic = safe_divide(2 * some * (m * n + PARTIAL_WAVE * UNIT * si(processors)) * (k + RAMP), flops_per_s)
    traffic = 2 * (weight_traffic * k * n + activation_traffic * m * (k + n))
    return arithmetic + some * traffic / bytes_per_s


def attention_time(
    flops: Real[ArrayLike, "..."], head_dim: Real[ArrayLike, "..."], flops_per_s: Real[ArrayLike, "..."], head_half: Real[ArrayLike, "..."]
) -> Float[Array, "..."]:
    """Forward time of a fused attention core, `flops / (F x(head_dim) / x(128))` with `x(d) = d / (d + head_half)`.

    Narrow heads give the matrix units short inner products; 128 is the width at which `F` is quoted.

    Args:
      flops: FLOP of scores and weighted values, causal pairs only. [FLOP]
      head_dim: mean of query and value width. [1]
      flops_per_s: rate F at head width 128. [FLOP/s]
      head_half: width at which half of the asymptotic rate is reached. [1]
    Returns:
      Time. [s]
    """
    head_dim, head_half = si(head_dim), si(head_half)
    narrow = safe_divide(head_dim + head_half, head_dim) * 128 / (128 + head_half)
    return safe_divide(flops, flops_per_s) * narrow


def streaming_time(nbytes: Real[ArrayLike, "..."], bytes_per_s: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
    """Time to move `nbytes` [B] through device memory at `bytes_per_s` [B/s]; launches are counted by the layer, not here. [s]"""
    return si(nbytes) / bytes_per_s
