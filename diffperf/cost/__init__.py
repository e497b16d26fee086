"""How long one thing takes."""

from ._compute import attention_time as attention_time
from ._compute import matmul_time as matmul_time
from ._compute import streaming_time as streaming_time
from ._energy import step_cost as step_cost
from ._energy import step_energy as step_energy
from .overlap import blended_overlap as blended_overlap
from .overlap import exposed_time as exposed_time
from .overlap import two_streams as two_streams
