"""What is left of communication when it runs beside compute."""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from .._arrays import si
from ..smooth import pnorm, safe_divide


def exposed_time(communication: Real[ArrayLike, "..."], cover: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
    """Communication time not hidden under `cover` seconds of compute, `X^2 / (X + cover)`.

    Smooth stand-in for `max(0, X - cover)`: short transfers vanish quadratically, long ones tend to `X - cover`; with no cover all of X
    is exposed. A hinge would leave the overlap without a gradient on most measured runs.

    Args:
      communication: X. [s]
      cover: compute under which it may hide. [s]
    Returns:
      Time between 0 and X. [s]
    """
    communication = si(communication)
    return communication * safe_divide(communication, communication + cover, otherwise=1.0)


def blended_overlap(compute: Real[ArrayLike, "..."], communication: Real[ArrayLike, "..."], weight: Real[ArrayLike, "..."]) -> Float[Array, "..."]:
    """Time of compute with communication beside it: `weight` of a perfect overlap (6-norm, close to the maximum) and the rest of none (the sum). [s]"""
    together = si(compute) + communication
    return weight * pnorm(compute, communication, 6.0) + (1 - weight) * together


def two_streams(
    compute: Real[ArrayLike, "..."],
    communication: Real[ArrayLike, "..."],
    compute_slowdown: Real[ArrayLike, "..."],
    communication_slowdown: Real[ArrayLike, "..."],
) -> Float[Array, "..."]:
    """Time until both of two concurrent streams are done, when each runs slower while the other runs.

    While both run, compute takes `1 + compute_slowdown` and communication `1 + communication_slowdown` times as long; when one ends the
    other goes on alone. Slowdown 0 gives `max(C, X)`; slowdown of one without end gives `C + X`. Exact, and piecewise
    smooth; where both end together it has the one-sided gradient of compute ending first.

    Args:
      compute: C, time alone. [s]
      communication: X, time alone. [s]
      compute_slowdown, communication_slowdown: relative, at least 0. [1]
    Returns:
      Time between `max(C, X)` and, for slowdowns whose product is at most 1, `C + X`. [s]
    """
    c, x = si(compute), si(communication)
    a, b = 1 + si(compute_slowdown), 1 + si(communication_slowdown)
    compute_first = x + c * a * (1 - 1 / b)  # c a, then what is left of x; written so that no difference cancels
    communication_first = c + x * b * (1 - 1 / a)
    return jnp.where(c * a <= x * b, compute_first, communication_first)
