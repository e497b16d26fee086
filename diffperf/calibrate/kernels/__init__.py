"""Fits of kernel libraries to measured kernel times."""

from ._user import KernelCalibration as KernelCalibration
from ._user import calibrate_kernels as calibrate_kernels
from ._validate import validate_kernels as validate_kernels
