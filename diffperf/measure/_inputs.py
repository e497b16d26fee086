"""Inputs made on the device by an integer hash of the index: cheap to compile and to run. Neither zero nor constant, as power of a chip depends on the data."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def uniform(seed: Any, salt: int, shape: Sequence[int], dtype: Any) -> Any:
    """Numbers of `shape` that differ by `seed` (uint32, may be traced) and `salt`. Floats in [-1, 1); int8 in [-128, 128)."""
    count = 1
    for extent in shape:
        count *= extent
    x = lax.iota(jnp.uint32, count) * jnp.uint32(2654435761) + seed * jnp.uint32(40503) + jnp.uint32(salt * 97 + 1)
    x = ((x ^ (x >> 15)) * jnp.uint32(0x45D9F3B)).reshape(tuple(shape))
    if dtype == jnp.int8:
        return (x >> 24).astype(jnp.int8)
    return (x.astype(jnp.float32) * (2.0 / 2**32) - 1.0).astype(dtype)


def indices(seed: Any, count: int, below: int) -> Any:
    """`count` numbers in [0, `below`), int32."""
    return ((uniform(seed, 7, (count,), jnp.float32) * 0.5 + 0.5) * below).astype(jnp.int32) % below
