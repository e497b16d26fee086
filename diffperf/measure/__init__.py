"""Measuring this machine: operators of JAX and collectives, into tables that the calibration reads."""

from ._budget import parse_budget as parse_budget
from ._design import Case as Case
from ._device import Device as Device
from ._device import this_device as this_device
from ._kernels import Measurement as Measurement
from ._kernels import Progress as Progress
from ._kernels import design as design
from ._kernels import measure_kernels as measure_kernels
from ._kernels import operator_names as operator_names
from ._collectives import bus_factor as bus_factor
from ._collectives import collective_design as collective_design
from ._collectives import measure_collectives as measure_collectives
