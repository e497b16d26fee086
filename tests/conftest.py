"""Tests run in float64; a test of float32 says so itself."""

import jax
import pytest

jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="session")
def stack():
    """The prior of the calibration: a plausible stack whose numbers do not move with a fit."""
    from diffperf.calibrate._constants import CONSTANTS, HARDWARE, MEMORY_DEFAULTS
    from diffperf.stack import Stack

    return Stack(**{c.name: c.mean for c in CONSTANTS if c.name not in HARDWARE}, **MEMORY_DEFAULTS)


@pytest.fixture(scope="session")
def published_rows():
    """Every published run that can be modelled; shared, as it takes seconds."""
    from diffperf.calibrate import prepare
    from diffperf.io import published_runs_path, read_runs

    return prepare(read_runs(published_runs_path()))
