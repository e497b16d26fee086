"""What a trace is read into: frozen tables of numpy columns, one set per rank, times in seconds from an origin that is kept in exact nanoseconds.

Plain data without a model. What was not used stays countable in `left_out`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._classify import KINDS


class TraceError(ValueError):
    """A trace that cannot be used at all; the message names the file and the event."""


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Something that was not read, or that makes what was read doubtful.

    Attributes:
      reason: what, in words.
      file: of which file.
      count: how often. [1]
      examples: up to three places.
    """

    reason: str
    file: str
    count: int
    examples: tuple[str, ...]


class Remarks:
    """Collects `LeftOut` while a file is read."""

    def __init__(self, file: str):
        self.file = file
        self._found: dict[str, list[Any]] = {}

    def add(self, reason: str, example: str, count: int = 1) -> None:
        entry = self._found.setdefault(reason, [0, []])
        entry[0] += count
        if len(entry[1]) < 3 and example:
            entry[1].append(example)

    def why(self) -> str:
        """What was left out so far, as the end of an error: `; left out: 3 x ... (event 1 ...)`."""
        parts = [f"{count:,} x {reason} ({', '.join(examples[:1])})" for reason, (count, examples) in self._found.items()]
        return f"; left out: {', '.join(parts)}" if parts else ""

    def done(self) -> tuple[LeftOut, ...]:
        return tuple(LeftOut(reason, self.file, count, tuple(examples)) for reason, (count, examples) in self._found.items())


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceEvents:
    """Kernels and copies of one rank, in order of their start; every column has shape (n,).

    Attributes:
      start_s: from the origin of the rank. [s]
      duration_s: [s]
      name: index into `RankTrace.names`.
      kind: index into `KINDS`.
      stream: as recorded, -1 where not.
      device: as recorded, -1 where not.
      correlation: number that the launching call has too, -1 where not recorded.
      blocks, threads: of the grid, and of each block; 0 where not recorded. [1]
      channels: first dimension of the grid, which for a collective of NCCL is the number of channels; 0 where not recorded. [1]
      launch: index into `RankTrace.launch_shapes`: grid, block, registers and shared memory as one; -1 where not recorded.
      nbytes: moved by a copy, NaN where not recorded. [B]
      launch_start_s: when the host called, NaN where not recorded. [s]
      operator: innermost operator that launched it, index into `RankTrace.operators`, -1 for none.
      step: index into `RankTrace.steps`, -1 outside.
      event: its number in the file, from 1.
    """

    start_s: np.ndarray
    duration_s: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    stream: np.ndarray
    device: np.ndarray
    correlation: np.ndarray
    blocks: np.ndarray
    threads: np.ndarray
    channels: np.ndarray
    launch: np.ndarray
    nbytes: np.ndarray
    launch_start_s: np.ndarray
    operator: np.ndarray
    step: np.ndarray
    event: np.ndarray

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def end_s(self) -> np.ndarray:
        """When each ended. [s]"""
        return self.start_s + self.duration_s

    def take(self, at: Any) -> "DeviceEvents":
        """The rows at `at`, indices or a mask."""
        return DeviceEvents(**{field.name: getattr(self, field.name)[at] for field in dataclasses.fields(self)})


def grids(shapes: Sequence[tuple[Any, ...]], launch: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`blocks`, `threads` and `channels` of `DeviceEvents` for numbers of launch shapes (grid, block, ...). [1]"""
    size = lambda shape: math.prod(shape) if shape else 0
    table = np.array([(size(grid), size(block), grid[0] if grid else 0) for grid, block, *_ in shapes] + [(0, 0, 0)], np.int64)  # -1 is the last row
    blocks, threads, channels = (table if table.max() > 2**31 - 1 else table.astype(np.int32))[launch].T
    return blocks, threads, channels


@dataclasses.dataclass(frozen=True, eq=False)
class Operators:
    """Operators of the framework on the host, in order of thread and start; every column has shape (n,).

    Attributes:
      start_s, duration_s: [s]
      name: index into `RankTrace.names`.
      parent: the operator around it, -1 for none.
      inputs: index into `RankTrace.inputs`, -1 where no shapes were recorded.
    """

    start_s: np.ndarray
    duration_s: np.ndarray
    name: np.ndarray
    parent: np.ndarray
    inputs: np.ndarray

    def __len__(self) -> int:
        return len(self.start_s)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What an operator was given.

    Attributes:
      shapes: of each argument, () for one that is no tensor; a list of tensors as a tuple of shapes.
      types: of each argument as PyTorch writes it.
      values: of the arguments that are no tensors, as text; empty where not recorded.
    """

    shapes: tuple[Any, ...]
    types: tuple[str, ...]
    values: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CollectiveCall:
    """One collective or point-to-point kernel.

    Attributes:
      row: index into the device events of its rank.
      op: as in `diffperf.io`'s tables of collectives; "" where neither recorded nor in the name.
      datatype: "" where not recorded.
      nbytes: nccl-tests' size, the larger of send and receive buffer of a rank; NaN where not recorded. [B]
      ranks: of the group; of the whole job where no group is recorded, NaN where that is not either. [1]
      group: name of the process group, "" where not recorded.
      members: ranks of the group, empty where not recorded.
      algorithm, protocol: from the name of the kernel, "" where it does not say.
      channels: grid of the kernel, 0 where not recorded. [1]
      coalesced: several operations joined into one kernel.
      peer: the other rank of a point-to-point operation, -1 otherwise.
      recorded: "kernel" if the size stands with the kernel, "operator" if it was taken from the launching operator, "" if there is none.
    """

    row: int
    op: str
    datatype: str = ""
    nbytes: float = float("nan")
    ranks: float = float("nan")
    group: str = ""
    members: tuple[int, ...] = ()
    algorithm: str = ""
    protocol: str = ""
    channels: int = 0
    coalesced: bool = False
    peer: int = -1
    recorded: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step as the profiler marked it on the host.

    Attributes:
      name: such as "ProfilerStep#12".
      start_s, end_s: on the host, from the origin of the rank. [s]
    """

    name: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class RankTrace:
    """The trace of one rank.

    Attributes:
      file: where it is from.
      format: "kineto", "jax-json" or "xspace".
      rank: -1 where the file does not say.
      device: number of the device where one rank (or a file that names none) has several, -1 otherwise.
      world_size: -1 where the file does not say. [1]
      accelerator: name of the device, "" where not recorded.
      num_sms: processors of the device, 0 where not recorded. [1]
      library: such as "NCCL 2.17.1", "" where not recorded.
      origin_ns: time 0 of all columns, in exact nanoseconds; since 1970 if the file says so (`baseTimeNanoseconds`, or times that are).
      names: of kernels and operators.
      launch_shapes: (grid, block, registers, shared memory) of kernels.
      inputs: of operators.
      events, operators: the tables.
      collectives: one per communication kernel, in their order.
      steps: in order of time.
      last_step_s: start of the last of several steps over all events named so, also those drawn over the kernels; NaN for less than two. [s]
      launches: calls of the host that launched work, (start, duration), shape (n, 2). [s]
      left_out: what was not read, and doubts about what was.
    """

    file: str
    format: str
    rank: int
    device: int
    world_size: int
    accelerator: str
    num_sms: int
    library: str
    origin_ns: int
    names: tuple[str, ...]
    launch_shapes: tuple[tuple[Any, ...], ...]
    inputs: tuple[Inputs, ...]
    events: DeviceEvents
    operators: Operators
    collectives: tuple[CollectiveCall, ...]
    steps: tuple[Step, ...]
    last_step_s: float
    launches: np.ndarray
    left_out: tuple[LeftOut, ...]

    def of_kind(self, *kinds: int) -> np.ndarray:
        """Mask of the events of these kinds."""
        return np.isin(self.events.kind, kinds)


@dataclasses.dataclass(frozen=True, eq=False)
class ExecutionGraph:
    """A Chakra or PyTorch execution trace: operations and what each waits for; without start times, often without durations.

    Attributes:
      file: where it is from.
      format: "chakra-json", "chakra" or "pytorch-et".
      rank: from the name of the file (`rank0`, `.0.et`), -1 where it does not say.
      ids: of the nodes, shape (n,).
      names: of the nodes.
      kind: index into `KINDS`, shape (n,).
      on_device: kernels, not operators of the host, shape (n,).
      duration_s: NaN where not recorded, shape (n,). [s]
      parents: index of each dependency, shape (m,), -1 for a node that is not in the file; those of node i are `parents[offsets[i]:offsets[i + 1]]`.
      offsets: shape (n + 1,).
      nbytes: of communication, NaN where not recorded, shape (n,). [B]
      left_out: what was not read.
    """

    file: str
    format: str
    rank: int
    ids: np.ndarray
    names: tuple[str, ...]
    kind: np.ndarray
    on_device: np.ndarray
    duration_s: np.ndarray
    parents: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    left_out: tuple[LeftOut, ...]

    def __len__(self) -> int:
        return len(self.ids)


def left_out_dict(items: Sequence[LeftOut]) -> dict[str, Mapping[str, Any]]:
    """Reason -> how often and where, over all files."""
    result: dict[str, dict[str, Any]] = {}
    for item in items:
        entry = result.setdefault(item.reason, {"count": 0, "examples": []})
        entry["count"] += item.count
        named = [example if example.startswith(item.file) else f"{item.file}: {example}" for example in item.examples]
        entry["examples"] += named[: max(0, 3 - len(entry["examples"]))]
    return result


assert len(KINDS) < 128, "kinds are stored as int8"
