"""How long one device takes for one operator. Closed forms with few parameters; leaves out tile and wave quantisation, which the size terms stand for.

The matrix form is the additive roofline: arithmetic at the rate of a large matmul plus the traffic of the operands at memory rate, each
operand with a factor for what tiles read again. Against tile-and-wave models it loses little on whole training steps (its two traffic
factors are identified to 10% by published runs) and it is smooth in every size.
"""

from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from .._arrays import si
from ..smooth import safe_divide


def matmul_time(
    m: Real[ArrayLike, "..."],
    k: Real[ArrayLike, "..."],
    n: Real[ArrayLike, "..."],
    flops_per_s: Real[ArrayLike, "..."],
    bytes_per_s: Real[ArrayLike, "..."],
    weight_traffic: Real[ArrayLike, "..."] = 1.0,
    activation_traffic: Real[ArrayLike, "..."] = 1.0,
) -> Float[Array, "..."]:
    """Time of `C[m, n] = A[m, k] B[k, n]`, `2 m k n / F + 2 (w k n + a m (k + n)) / W`.

    Elements count 2 bytes also for 8- and 4-bit operands: the passes that quantise them take what the narrower reads save.

    Args:
      m: rows: tokens. [1]
      k: contracted width; n: output width. [1]
      flops_per_s: rate F of a large matmul. [FLOP/s]
      bytes_per_s: memory rate W. [B/s]
      weight_traffic: w, memory traffic per compulsory byte of B. [1]
      activation_traffic: a, the same of A and C. [1]
    Returns:
      Time; 0 when any of m, k, n is 0. [s]
    """
    m, k, n = si(m), si(k), si(n)
    arithmetic = safe_divide(2 * m * k * n, flops_per_s)
    some = (m > 0) & (k > 0) & (n > 0)
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
