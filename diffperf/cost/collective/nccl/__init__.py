"""NCCL's own tuning model, by version: the time it predicts for each algorithm and protocol, its choice, and how it cuts a message into chunks."""

from ._launch import NcclLaunch as NcclLaunch
from ._launch import nccl_launch as nccl_launch
from ._launch import ring_loop_bytes as ring_loop_bytes
from ._model import NcclChoice as NcclChoice
from ._model import NcclCosts as NcclCosts
from ._model import nccl_choice as nccl_choice
from ._model import nccl_costs as nccl_costs
from ._model import nccl_times as nccl_times
from ._tables import ALGORITHMS as ALGORITHMS
from ._tables import COLLECTIVES as COLLECTIVES
from ._tables import PROTOCOLS as PROTOCOLS
from ._tables import VERSIONS as VERSIONS
from ._topology import NcclTopology as NcclTopology
from ._topology import nccl_topology as nccl_topology
