"""How long one kernel takes, from its shape, the chip and the constants of the library that ships it."""

from ._device import Device as Device
from ._device import device_of as device_of
from ._matmul import MATMUL_PRIORS as MATMUL_PRIORS
from ._matmul import MatmulConstants as MatmulConstants
from ._matmul import MatmulShape as MatmulShape
from ._matmul import matmul_kernel_time as matmul_kernel_time
