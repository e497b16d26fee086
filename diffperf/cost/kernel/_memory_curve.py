"""The published curve of memory time against bytes of arXiv 2404.12674, as a reference: its three pieces do not join, so nothing is fitted with it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si


class SigmoidCurve(NamedTuple):
    """Published curve of bandwidth against log2 of bytes.

    Attributes:
      flat_until: log2 of bytes up to which the time is flat; saturated_from: beyond which bandwidth is `most`. [1]
      most: saturated bandwidth. [B/s]
      overhead: time of the smallest transfer. [s]
      height, centre, slope, floor: of the sigmoid in log10 of bandwidth in GB/s. [1]
    """

    flat_until: ArrayLike
    saturated_from: ArrayLike
    most: ArrayLike
    overhead: ArrayLike
    height: ArrayLike
    centre: ArrayLike
    slope: ArrayLike
    floor: ArrayLike


MEMORY_CURVES = {
    "a100": SigmoidCurve(14, 29, 1391.103638e9, 6.450239e-6, 2.20955621, 20.35203082, 0.62528837, 0.93242722),
    "v100": SigmoidCurve(16, 30, 816.953003e9, 4.83328223e-6, 1.9472268, 19.81699009, 0.55556443, 0.95523816),
    "gv100": SigmoidCurve(15, 28, 601.045715e9, 6.963206e-6, 2.56635526, 18.54562595, 0.4196576, 0.27275451),
}
"""Constants in the repository of arXiv 2404.12674."""


def sigmoid_curve_time(curve: SigmoidCurve, nbytes: ArrayLike, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
    """Time to move `nbytes` by a published curve. [s]

    At temperature 0 the three pieces as published, which jump where they meet; above it only the middle one with the overhead added, smooth and growing.
    """
    nbytes = si(nbytes)
    x = jnp.log2(jnp.maximum(nbytes, 1.0))
    rate = 1e9 * 10 ** (curve.height * sigmoid(curve.slope * (x - curve.centre)) + curve.floor)
    middle, large = nbytes / rate, nbytes / curve.most + curve.overhead
    pieces = jnp.where(x <= curve.flat_until, curve.overhead, jnp.where(x > curve.saturated_from, large, middle))
    return jnp.where(si(temperature) > 0, curve.overhead + middle, pieces)
