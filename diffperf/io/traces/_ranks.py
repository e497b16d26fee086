"""The ranks of one job side by side: the same collective on each, whether their clocks agree, who comes late, and how long the transfer itself took.

A collective ends on all ranks at once; its kernel on an early rank spins until the last rank arrives. So the ends align the clocks, the last start is
the straggler, and the transfer is what is left after it. Point-to-point kernels end when their own peer is done, and are left out.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ._tables import LeftOut, RankTrace

_TOGETHER = 0.2  # of a collective's duration: ends further apart than this are not of one collective
CLOCKS_AGREE_S = 50e-6  # ranks of one host agree within some microseconds, those of several hosts within milliseconds


@dataclasses.dataclass(frozen=True, eq=False)
class Matched:
    """Collectives that several ranks of a job took part in; m of them on r ranks, NaN where a rank has none.

    Attributes:
      ranks: index of each trace that takes part, shape (r,).
      row: index into the collectives of each trace, -1 for none, shape (m, r).
      start_s, end_s: from the earliest origin, by the host's clock, shape (m, r). [s]
      clock_s: what to take off each rank's times so that the ends agree, shape (r,). [s]
      agree: the clocks agree without that.
      spread_s: median spread of the ends over ranks once aligned. [s]
    """

    ranks: np.ndarray
    row: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    clock_s: np.ndarray
    agree: bool
    spread_s: float

    @property
    def aligned_start_s(self) -> np.ndarray:
        """Starts on one clock: the host's if the ends agree, else shifted. [s]"""
        return self.start_s - (0.0 if self.agree else self.clock_s)

    @property
    def transfer_s(self) -> np.ndarray:
        """Shortest duration over the ranks, shape (m,): the rank that came last did not wait. [s]"""
        return np.nanmin(self.end_s - self.start_s, axis=1)


def match_collectives(traces: Sequence[RankTrace]) -> tuple[Matched | None, tuple[LeftOut, ...]]:
    """The k-th collective of each operation and group on each rank taken as one; None if no two ranks share any, or if most do not end together even on
    aligned clocks (uneven all-to-alls, other parts of a run). Of several traces of one rank the first counts. What could not be matched is left out."""
    first = {trace.rank: i for i, trace in reversed(list(enumerate(traces))) if trace.rank >= 0}
    several = [i for i, trace in enumerate(traces) if trace.collectives and first.get(trace.rank, i) == i]
    lists = []
    for i in several:
        found: dict[tuple[object, ...], list[int]] = {}
        for k, call in enumerate(traces[i].collectives):
            if call.op != "send_recv" and call.peer < 0:
                found.setdefault((call.op, call.members or call.group, call.ranks if call.ranks > 0 else 0), []).append(k)
        lists.append(found)
    rows, left = [], []
    for key in dict.fromkeys(key for found in lists for key in found):
        counts = [len(found.get(key, ())) for found in lists]
        taking = [count for count in counts if count]
        if len(taking) < 2:
            continue
        if len(set(taking)) > 1:
            left.append(LeftOut("ranks differ in how many collectives of a group they ran, none of it compared", "all files", max(taking) - min(taking),
                                (f"{key[0] or 'unknown'}: {min(taking)} to {max(taking)}",)))  # fmt: skip
            continue
        rows += [[found[key][k] if key in found else -1 for found in lists] for k in range(max(taking))]
    if len(several) < 2 or not rows:
        return None, tuple(left)
    table = np.array(rows)
    sharing = np.flatnonzero((table >= 0).any(axis=0))  # a rank whose counts differ from the others' shares none
    table, several = table[:, sharing], [several[r] for r in sharing]
    start, end = np.full(table.shape, np.nan), np.full(table.shape, np.nan)
    origin = min(traces[i].origin_ns for i in several)
    for r, i in enumerate(several):
        e, calls = traces[i].events, traces[i].collectives
        at = np.array([calls[k].row for k in table[:, r]])
        shift = (traces[i].origin_ns - origin) * 1e-9
        start[:, r] = np.where(table[:, r] >= 0, e.start_s[at] + shift, np.nan)
        end[:, r] = np.where(table[:, r] >= 0, e.end_s[at] + shift, np.nan)
    clock = np.nanmedian(end - np.nanmedian(end, axis=1, keepdims=True), axis=0)
    aligned = end - clock
    spread = float(np.median(np.nanmax(aligned, axis=1) - np.nanmin(aligned, axis=1)))
    duration = float(np.median(np.nanmax(end - start, axis=1)))
    if spread > max(CLOCKS_AGREE_S, _TOGETHER * duration):
        left.append(LeftOut("ranks whose collectives do not end together on aligned clocks, not compared", "all files", len(several),
                            (f"the ends differ by {spread * 1e3:.3g} ms, the collectives take {duration * 1e3:.3g} ms",)))  # fmt: skip
        return None, tuple(left)
    return Matched(np.array(several), table, start, end, clock, bool(np.max(np.abs(clock)) <= CLOCKS_AGREE_S), spread), tuple(left)


@dataclasses.dataclass(frozen=True)
class Straggler:
    """How late one rank came to the collectives that it shares with others.

    Attributes:
      rank: as recorded; the index of the file where not.
      last: collectives to which it came last. [1]
      collectives: that it took part in. [1]
      mean_late_s: behind the first rank, mean. [s]
      waited_s: for the last rank, in all. [s]
    """

    rank: int
    last: int
    collectives: int
    mean_late_s: float
    waited_s: float


def stragglers(traces: Sequence[RankTrace], matched: Matched) -> list[Straggler]:
    """The ranks, the latest first."""
    start = matched.aligned_start_s
    first, last = np.nanmin(start, axis=1, keepdims=True), np.nanmax(start, axis=1, keepdims=True)
    result = []
    for r, i in enumerate(matched.ranks.tolist()):
        there = ~np.isnan(start[:, r])
        late = (start[:, r : r + 1] - first)[there]
        rank = traces[i].rank if traces[i].rank >= 0 else i
        result.append(Straggler(rank, int((start[there, r] == last[there, 0]).sum()), int(there.sum()), float(late.mean()),
                                float((last[there, 0] - start[there, r]).sum())))  # fmt: skip
    return sorted(result, key=lambda item: -item.mean_late_s)
