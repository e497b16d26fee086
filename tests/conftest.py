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


@pytest.fixture(scope="session")
def few_rows(published_rows):
    """Up to eight ordinary runs of each stack: enough for a fit in two seconds."""
    import numpy as np

    of_stack: dict[str, list[int]] = {}
    for i in np.flatnonzero(published_rows.weight == 1):
        of_stack.setdefault(published_rows.stack[i], []).append(i)
    return published_rows.take(np.array([i for at in of_stack.values() for i in at[:: max(1, len(at) // 8)][:8]]))


@pytest.fixture(scope="session")
def few_fit(few_rows):
    """A fit of `few_rows`."""
    from diffperf.calibrate import fit_runs

    return fit_runs(few_rows)
