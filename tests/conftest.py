"""Tests run in float64; a test of float32 says so itself."""

import jax

jax.config.update("jax_enable_x64", True)
