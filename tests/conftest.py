"""Tests run in float64; a test of float32 says so itself.

Most of their time is compilation of functions that run a few times, so they are compiled quickly rather than well: without most of XLA's optimizations, and
by the older emitter of its CPU backend. Workers share the cores, so linear algebra keeps to one thread each: threads that wait for each other cost more than
they save.
"""

import os

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax  # noqa: E402
import pytest  # noqa: E402

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


@pytest.fixture(scope="session")
def shipped():
    from diffperf.calibrate import load_calibration

    return load_calibration()


@pytest.fixture(scope="session")
def posterior(few_rows, few_fit):
    from diffperf.calibrate import build_posterior

    return build_posterior(few_fit, few_rows)


@pytest.fixture(scope="session")
def small(few_rows, posterior):
    """A calibration of a few rows."""
    from diffperf.calibrate import Calibration
    from diffperf.calibrate._calibration import constant_efficiency
    from diffperf.calibrate._memory_fit import fit_memory

    return Calibration(posterior, fit_memory(few_rows), constant_efficiency(few_rows), dict(date="today", data="a few runs"))


@pytest.fixture(scope="session")
def strangers(published_rows):
    """Ten runs of one stack, relabelled as a stack that nobody has seen."""
    import numpy as np

    from diffperf.calibrate._user import relabel

    at = [i for i in range(len(published_rows)) if published_rows.stack[i] == "nemo" and published_rows.weight[i] == 1]
    return relabel(published_rows.take(np.array(at[::4][:10])), "mine", "mcore")
