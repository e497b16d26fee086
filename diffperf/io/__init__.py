"""Readers of measured data and writers of results. They give plain tables and know no model."""
from ._chrome_trace import (
    ChromeTrace as ChromeTrace,
    TraceCounter as TraceCounter,
    TraceSlice as TraceSlice,
    write_chrome_trace as write_chrome_trace,
)
from ._collective_table import (
    CollectiveFileError as CollectiveFileError,
    CollectiveTable as CollectiveTable,
    LogHeader as LogHeader,
    LogProblem as LogProblem,
    bus_factor as bus_factor,
)
from ._collectives import read_collectives as read_collectives, write_collectives as write_collectives
from ._aiconfigurator import (
    AiconfiguratorTable as AiconfiguratorTable,
    aiconfigurator_tables as aiconfigurator_tables,
    read_aiconfigurator as read_aiconfigurator,
)
from ._kernel_table import (
    KERNEL_SIZES as KERNEL_SIZES,
    KERNEL_TEXTS as KERNEL_TEXTS,
    KernelTable as KernelTable,
    Rejection as Rejection,
    write_kernels as write_kernels,
)
from ._kernels import read_kernels as read_kernels
from ._nccl_tests import parse_nccl_tests as parse_nccl_tests, read_nccl_tests as read_nccl_tests
from ._published import published_runs_path as published_runs_path
from ._runs import (
    ARCHITECTURE_COLUMNS as ARCHITECTURE_COLUMNS,
    COLUMNS as COLUMNS,
    Run as Run,
    RunTable as RunTable,
    read_runs as read_runs,
    runs_from_records as runs_from_records,
    source_repository as source_repository,
    write_runs as write_runs,
)
from ._tables import RunFileError as RunFileError
from ._topology import (
    Device as Device,
    Link as Link,
    Topology as Topology,
    TopologyError as TopologyError,
    read_topology as read_topology,
)
from .._files import write_atomic as write_atomic

__all__ = ["ARCHITECTURE_COLUMNS", "AiconfiguratorTable", "COLUMNS", "ChromeTrace", "CollectiveFileError", "CollectiveTable", "Device",
           "KERNEL_SIZES", "KERNEL_TEXTS", "KernelTable", "Link", "LogHeader", "LogProblem", "Rejection", "Run", "RunFileError",
           "RunTable", "Topology", "TopologyError", "TraceCounter", "TraceSlice", "aiconfigurator_tables", "bus_factor",
           "parse_nccl_tests", "published_runs_path", "read_aiconfigurator", "read_collectives", "read_kernels", "read_nccl_tests",
           "read_runs", "read_topology", "runs_from_records", "source_repository", "write_atomic", "write_chrome_trace",
           "write_collectives", "write_kernels", "write_runs"]
