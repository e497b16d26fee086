"""Fits of kernels that are no library collectives: one- and two-shot all-reduce of inference engines, dispatch and combine of experts.

Each (engine, version, GPU) or (kernel, phase, GPU) has constants of its own: between versions of an engine they differ more than between GPUs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ...cost.collective import CustomAllReduceConstants, ExpertExchangeConstants, custom_all_reduce_time, expert_exchange_time
from ._map import fit_map

CUSTOM = ("launch", "hop", "one_shot_bandwidth", "second_shot", "two_shot_bandwidth", "blend")
_CUSTOM_WIDTH = (0.5, 1.0, 0.5, 0.7, 0.4, 0.7)
EXPERT = ("launch", "hop", "bandwidth", "processor_bandwidth", "token_time", "expert_time", "ramp", "network_bandwidth", "network_launch", "network_hop")
_EXPERT_MEAN = (30e-6, 1.5e-6, 4e11, 30e9, 30e-9, 3e-9, 5e-6, 45e9, 40e-6, 20e-6)
_EXPERT_WIDTH = (1.0, 0.7, 0.5, 0.4, 1.0, 1.0, 0.8, 0.3, 0.8, 0.7)


def custom_prior(link_bandwidth: float) -> tuple[np.ndarray, np.ndarray]:
    """Prior of `CustomAllReduceConstants` from the datasheet's link [B/s], as logarithms and widths."""
    mean = (4.5e-6, 0.1e-6, 0.55 * link_bandwidth, 7e-6, 0.67 * link_bandwidth, 6.0)
    return np.log(mean), np.array(_CUSTOM_WIDTH)


def custom_log_time(parameters, inputs):
    """Log time of each row; inputs `(nbytes, ranks)`."""
    constants = CustomAllReduceConstants(*jnp.exp(parameters))
    return jnp.log(jax.vmap(custom_all_reduce_time, (None, 0, 0))(constants, *inputs))


def expert_prior() -> tuple[np.ndarray, np.ndarray]:
    """Prior of `ExpertExchangeConstants`, wide: kernels differ by factors."""
    return np.log(_EXPERT_MEAN), np.array(_EXPERT_WIDTH)


def _expert_log_time(kernel):
    def log_time(parameters, inputs):
        constants = ExpertExchangeConstants(*jnp.exp(parameters))
        return jnp.log(jax.vmap(lambda *row: expert_exchange_time(kernel, constants, *row))(*inputs))

    return log_time


EXPERT_LOG_TIME = {kernel: _expert_log_time(kernel) for kernel in ("low_latency", "high_throughput", "hierarchical")}


def fit_kernel(log_time, inputs, measured, weight, prior, block: int = 128) -> np.ndarray:
    """Parameters of one kernel; rows padded to a multiple of `block`."""
    n = len(measured)
    at = np.minimum(np.arange(-(-n // block) * block), n - 1)
    padded = np.where(np.arange(len(at)) < n, np.asarray(weight, float)[at], 0.0)
    mean, width = prior
    with jax.enable_x64(True):
        mode = fit_map(log_time, tuple(np.asarray(x, float)[at] for x in inputs), np.log(measured)[at], padded, mean, width, steps=40)
        return np.asarray(mode.parameters)
