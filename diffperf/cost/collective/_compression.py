"""Compression around a transfer: what it costs, and where it pays.

Source: Optimus-CC (Song et al. 2023, arXiv:2301.09830): compress only the transfers that are exposed. Leaves out what compression does to convergence.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ...smooth import maximum, where


class Selection(NamedTuple):
    """Which of several transfers to compress.

    Attributes:
      end: when the last of them is done, shape (). [s]
      compressed: 1 for each that is compressed, 0 for the others; between them at a temperature, shape (n,). [1]
    """

    end: Float[Array, ""]
    compressed: Float[Array, " n"]


def compressed_time(
    nbytes: Real[ArrayLike, "..."],
    ratio: Real[ArrayLike, "..."],
    rate: Real[ArrayLike, "..."],
    compress_rate: Real[ArrayLike, "..."] = jnp.inf,
    decompress_rate: Real[ArrayLike, "..."] = jnp.inf,
    latency: Real[ArrayLike, "..."] = 0.0,
) -> Float[Array, "..."]:
    """Time of a transfer that is compressed before and decompressed after, `latency + nbytes (1 / ratio / rate + 1 / compress + 1 / decompress)`. [s]

    Args:
      nbytes: uncompressed. [B]
      ratio: uncompressed over compressed size, at least 1; 1 with infinite rates is the plain transfer. [1]
      rate: of the transfer. [B/s]
      compress_rate, decompress_rate: uncompressed bytes per time. [B/s]
      latency: of the transfer. [s]
    """
    return si(latency) + si(nbytes) * (1 / (si(ratio) * si(rate)) + 1 / si(compress_rate) + 1 / si(decompress_rate))


def compress_exposed(
    start: Real[ArrayLike, " n"], plain: Real[ArrayLike, " n"], compressed: Real[ArrayLike, " n"], temperature: Real[ArrayLike, ""] = 0.0
) -> Selection:
    """Compresses as few of `n` concurrent transfers as the earliest common end asks for.

    No choice ends before `T = max_i (start_i + min(plain_i, compressed_i))`. It is reached by compressing those alone whose plain end is later than T: the
    others are hidden behind them, and compressing those would only cost accuracy.

    Args:
      start: of each transfer, such as the all-reduce of each pipeline stage. [s]
      plain, compressed: its time without and with compression. [s]
      temperature: relative; 0 is exact, above it the end errs high and the choice is soft.
    Returns:
      The end and the choice.
    """
    start, plain, compressed = jnp.broadcast_arrays(si(start), si(plain), si(compressed))
    faster = jnp.minimum(plain, compressed)
    least = maximum(start + faster, temperature)
    end = start + plain
    margin = jnp.where(least > 0, (end - least) / jnp.where(least > 0, least, 1.0), 0.0)
    tolerance = 8 * jnp.finfo(end.dtype).eps  # a plain end equal to T is not late
    chosen = where(margin - tolerance, 1.0, 0.0, temperature) * (compressed < plain)
    return Selection(maximum(start + plain + chosen * (compressed - plain), temperature), chosen)
