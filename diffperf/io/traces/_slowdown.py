"""How much compute kernels are slowed by a collective beside them, paired by position: the same place of the step, once covered and once alone.

Kernel sequences of the profiler's steps are aligned (name, grid, block, registers, shared memory); a pair is one position. This holds the shapes fixed even
where none is recorded. With a single step kernels are paired by name and launch shape, which differ in position, hence in cache state and clock: such rows
say so. Only the busiest compute stream, only rows more than 98% or not at all covered, and only while no third stream runs compute or copies. A collective
that still waits for other ranks holds its processors but moves nothing, and one rank's trace cannot tell the two apart.
"""

import dataclasses
import difflib

import numpy as np

from ._analyse import busiest_stream
from ._classify import COMMUNICATION, COMPUTE, SYNCHRONISATION
from ._intervals import accompanied, covered
from ._tables import RankTrace

COVERED = 0.98  # partly covered runs are left out: long kernels are covered more often, and their length would leak into the ratio
_LONGEST = 3000  # kernels of the part of two steps that differs; aligning takes up to the square of it


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """One kernel at one position of the step.

    Attributes:
      kernel: its name.
      blocks, threads: its grid, and threads of a block; 0 where not recorded. [1]
      overlapped_share: covered part of the covered runs, mean. [1]
      time_alone_s, time_with_s: medians alone and covered. [s]
      count_alone, count_with: runs. [1]
      collective: operation of the collective beside it.
      channels, channel_threads: its grid, and threads of a block; 0 where not recorded. [1]
      pairing: "position" or "name".
      rank: of the trace.
      accelerator, num_sms: of the device; 0 where not recorded. [1]
    """

    kernel: str
    blocks: int
    threads: int
    overlapped_share: float
    time_alone_s: float
    time_with_s: float
    count_alone: int
    count_with: int
    collective: str
    channels: int
    channel_threads: int
    pairing: str
    rank: int
    accelerator: str
    num_sms: int


def overlap_slowdowns(trace: RankTrace) -> list[Slowdown]:
    """Pairs of a rank, in order of position; empty without collectives or without a kernel that ran both ways."""
    e, calls = trace.events, trace.collectives
    main = (e.kind == COMPUTE) & (e.stream == busiest_stream(trace)) & (e.duration_s > 0)
    rows = np.flatnonzero(main)
    if not len(rows) or not calls:
        return []
    share = lambda mask: covered(e.start_s[rows], e.end_s[rows], e.start_s[mask], e.end_s[mask]) / e.duration_s[rows]
    third = accompanied(e.start_s, e.end_s, e.stream, (e.kind != COMMUNICATION) & (e.kind != SYNCHRONISATION))[rows]
    beside = share(e.kind == COMMUNICATION)
    usable = ~third
    full, alone = usable & (beside > COVERED), usable & (beside == 0)
    position, pairing = _positions(trace, rows)
    call_rows = np.array([call.row for call in calls])
    call_start = e.start_s[call_rows]
    result = []
    order = np.argsort(position, kind="stable")
    for at in np.split(order, np.flatnonzero(np.diff(position[order])) + 1):
        both, none = at[full[at]], at[alone[at]]
        if position[at[0]] < 0 or not len(both) or not len(none):
            continue
        row = rows[both[0]]
        call = calls[max(int(np.searchsorted(call_start, e.end_s[row], side="left")) - 1, 0)]
        result.append(Slowdown(
            trace.names[e.name[row]], int(e.blocks[row]), int(e.threads[row]), float(beside[both].mean()), float(np.median(e.duration_s[rows[none]])),
            float(np.median(e.duration_s[rows[both]])), len(none), len(both), call.op, call.channels, int(e.threads[call.row]), pairing, trace.rank,
            trace.accelerator, trace.num_sms,
        ))  # fmt: skip
    return result


def _positions(trace: RankTrace, rows: np.ndarray) -> tuple[np.ndarray, str]:
    """A number per row, equal for rows at one position, -1 for none; and what that means."""
    e = trace.events
    _, what = np.unique(np.stack([e.name[rows], e.launch[rows]]), axis=1, return_inverse=True)
    what = what.ravel()
    step = e.step[rows]
    steps = [np.flatnonzero(step == k) for k in np.unique(step[step >= 0])]
    if len(steps) < 2:
        return what, "name"
    reference = max(steps, key=lambda at: (sum(len(other) == len(at) for other in steps), len(at)))
    position = np.full(len(rows), -1, np.int64)
    position[reference] = np.arange(len(reference))
    for at in steps:
        if at is not reference:
            mine, theirs = _align(what[at], what[reference])
            position[at[mine]] = theirs
    return position, "position"


def _align(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of equal elements of two sequences, in order. Where the parts between a common head and tail are long, only head and tail are used."""
    short = min(len(a), len(b))
    equal = a[:short] == b[:short]
    head = short if equal.all() else int(np.argmin(equal))
    rest = short - head
    equal = a[len(a) - rest :][::-1] == b[len(b) - rest :][::-1]
    tail = rest if equal.all() else int(np.argmin(equal))
    first, second = [np.arange(head)], [np.arange(head)]
    inner = a[head : len(a) - tail], b[head : len(b) - tail]
    if 0 < min(map(len, inner)) and max(map(len, inner)) <= _LONGEST:
        for block in difflib.SequenceMatcher(None, inner[0].tolist(), inner[1].tolist(), autojunk=False).get_matching_blocks():
            first.append(head + block.a + np.arange(block.size))
            second.append(head + block.b + np.arange(block.size))
    first.append(np.arange(len(a) - tail, len(a)))
    second.append(np.arange(len(b) - tail, len(b)))
    return np.concatenate(first), np.concatenate(second)
