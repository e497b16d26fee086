"""Energy and money of a step."""

from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..hardware import System


def step_energy(system: System, num_devices: Real[ArrayLike, ""], step_time: Real[ArrayLike, ""], busy_time: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Facility energy of one step: board power between idle and full in proportion to busy time, plus host, times the facility factor. [J]

    Args:
      step_time: wall time. [s]
      busy_time: part of it in which the device computes. [s]
    """
    chip = system.chip
    device = chip.idle_power * step_time + (chip.power - chip.idle_power) * busy_time
    return num_devices * (device + system.host.power * step_time) * system.power_usage_effectiveness


def step_cost(system: System, num_devices: Real[ArrayLike, ""], step_time: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Price of the devices for one step. [USD]"""
    return num_devices * system.price_per_hour * step_time / 3600
