"""Traces of profilers: PyTorch (Kineto), JAX (XSpace, trace.json), Chakra; what ran when, what overlapped, and what can be measured from it. No model."""
from ._classify import (
    COMMUNICATION as COMMUNICATION,
    COMPUTE as COMPUTE,
    KINDS as KINDS,
    MEMORY as MEMORY,
    OTHER as OTHER,
    SYNCHRONISATION as SYNCHRONISATION,
    collective_of_kernel as collective_of_kernel,
    kind_of as kind_of,
)
from ._analyse import (
    KernelTimes as KernelTimes,
    StepTimes as StepTimes,
    Times as Times,
    host_times as host_times,
    hta_times as hta_times,
    kernel_times as kernel_times,
    kind_times as kind_times,
    rank_dict as rank_dict,
    step_times as step_times,
    times_of as times_of,
)
from ._measurements import collective_measurements as collective_measurements, kernel_measurements as kernel_measurements
from ._ranks import Matched as Matched, Straggler as Straggler, match_collectives as match_collectives, stragglers as stragglers
from ._slowdown import Slowdown as Slowdown, overlap_slowdowns as overlap_slowdowns
from ._slowdown_file import read_slowdowns as read_slowdowns, write_slowdowns as write_slowdowns
from ._work import Work as Work, work_of as work_of
from ._read import read_trace as read_trace, read_traces as read_traces
from ._tables import (
    CollectiveCall as CollectiveCall,
    DeviceEvents as DeviceEvents,
    ExecutionGraph as ExecutionGraph,
    Inputs as Inputs,
    LeftOut as LeftOut,
    Operators as Operators,
    RankTrace as RankTrace,
    Step as Step,
    TraceError as TraceError,
    left_out_dict as left_out_dict,
)

__all__ = ["COMMUNICATION", "COMPUTE", "CollectiveCall", "DeviceEvents", "ExecutionGraph", "Inputs", "KINDS", "KernelTimes", "LeftOut", "MEMORY",
           "Matched", "OTHER", "Operators", "RankTrace", "SYNCHRONISATION", "Slowdown", "Step", "StepTimes", "Straggler", "Times", "TraceError", "Work",
           "collective_measurements", "collective_of_kernel", "host_times", "hta_times", "kernel_measurements", "kernel_times", "kind_of", "kind_times",
           "left_out_dict", "match_collectives", "overlap_slowdowns", "rank_dict", "read_slowdowns", "read_trace", "read_traces", "step_times", "stragglers",
           "times_of", "work_of", "write_slowdowns"]
