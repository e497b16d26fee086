"""The one door through which numbers enter a pytree: strong floating dtype, so that every leaf is traced, batched and differentiated."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def si(x: Any) -> Float[Array, "..."]:
    """`x` as a floating array of the default precision: float64 under x64, else float32."""
    return jnp.asarray(x, float)
