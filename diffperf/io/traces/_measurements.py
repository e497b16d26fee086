"""Measurements that a trace holds, in the tables that calibration reads: kernels whose shapes were recorded, and collectives whose sizes were.

Kernels count only where no other stream ran, so that their times are theirs alone; one without a stream number only where nothing else ran. A collective's
kernel spins until the last rank arrives: with several ranks the shortest of their times is taken, with one rank the row is flagged, as its time holds the
waiting.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._collective_table import CollectiveTable, table_of
from .._kernel_table import KernelTable
from .._kernels import read_kernels
from ._analyse import works
from ._classify import SYNCHRONISATION
from ._intervals import accompanied
from ._ranks import Matched
from ._tables import LeftOut, RankTrace
from ._work import rows_of

WAITING = "waiting_included"
_DEVICE_TIME = "device_time"  # flag of a kernel's own duration, without the launch that times per call contain


def kernel_measurements(traces: Sequence[RankTrace]) -> tuple[KernelTable | None, tuple[LeftOut, ...]]:
    """One row per operator, shape, datatype, kernel and device: the median of its runs over all ranks; None if no shape was recorded."""
    times_of: dict[tuple[Any, ...], list[float]] = {}
    left = []
    for trace in traces:
        e = trace.events
        work = {row: found for row, found in works(trace).items() if found.op != "convolution"}  # for which kernel tables have no sizes
        rows = np.array(sorted(work), int)
        if not len(rows):
            continue
        alone = ~accompanied(e.start_s, e.end_s, e.stream, e.kind != SYNCHRONISATION)[rows] & (e.duration_s[rows] > 0)
        if not alone.all():
            left.append(LeftOut("kernels beside another stream, not among the measured kernels", trace.file, int((~alone).sum()),
                                (f"event {e.event[rows[~alone][0]]} ({trace.names[e.name[rows[~alone][0]]][:60]!r})",)))  # fmt: skip
        launched = np.bincount(e.operator[e.operator >= 0], minlength=1)
        for row in rows[alone].tolist():
            of = work[row]
            tf32 = "tf32" in trace.names[e.name[row]].lower() and of.datatype == "fp32"
            cells = rows_of(of) | (dict(datatype="tf32") if tf32 else {})
            flag = _DEVICE_TIME + "|several_kernels" * int(launched[e.operator[row]] > 1)  # the longest of one call
            key = (trace.accelerator or "unknown", trace.names[e.name[row]][:160], flag, *cells.items())
            times_of.setdefault(key, []).append(float(e.duration_s[row]))
    if not times_of:
        return None, tuple(left)
    records = [dict(gpu=gpu, kernel_source=kernel, flag=flag, library="torch", time_us=float(np.median(times)) * 1e6) | dict(cells)
               for (gpu, kernel, flag, *cells), times in times_of.items()]  # fmt: skip
    return read_kernels(records, name="the trace"), tuple(left)


def collective_measurements(traces: Sequence[RankTrace], matched: Matched | None) -> tuple[CollectiveTable | None, tuple[LeftOut, ...]]:
    """One row per collective with a recorded size, at least two ranks and an operation; None if there is none. With several ranks one row for all of them."""
    rows, unknown = [], 0
    shared = set()
    if matched is not None:
        for of, transfer in zip(matched.row, matched.transfer_s):
            present = [(int(i), int(k)) for i, k in zip(matched.ranks, of) if k >= 0]
            shared.update(present)
            i, k = present[0]
            row = _row(traces[i], k, float(transfer), len(present))
            rows.append(row) if row else None
            unknown += row is None
    for i, trace in enumerate(traces):
        for k, call in enumerate(trace.collectives):
            if (i, k) not in shared:
                row = _row(trace, k, float(trace.events.duration_s[call.row]), 1)
                rows.append(row) if row else None
                unknown += row is None
    left = (LeftOut("collectives without a recorded size or group, not among the measured collectives", "all files", unknown, ()),) if unknown else ()
    return (table_of(rows) if rows else None), left


def _row(trace: RankTrace, k: int, time: float, seen: int) -> dict[str, Any] | None:
    call = trace.collectives[k]
    if not (call.op and call.nbytes > 0 and call.ranks >= 2 and time > 0):
        return None
    flags = [WAITING] if seen == 1 else [] if seen >= call.ranks else [f"seen_on_{seen}_ranks"]
    flags += ["coalesced"] if call.coalesced else []
    flags += ["group_not_recorded"] if call.recorded == "operator" and not call.group else []
    return dict(
        op=call.op, datatype=call.datatype, nbytes=call.nbytes, ranks=call.ranks, nodes=math.nan, time_s=time, algorithm=call.algorithm, protocol=call.protocol,
        accelerator=trace.accelerator, library=trace.library, flag="|".join(flags), source="trace", log="trace", file=trace.file, line=-1,
    )  # fmt: skip
