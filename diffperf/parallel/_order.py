"""Pipeline schedules as what they are in a program: for every pipeline rank the order of its forward, backward and weight-gradient passes.

Sources: Huang et al. 2019 (arXiv:1811.06965) for GPipe, Narayanan et al. 2021 (arXiv:2104.04473) for 1F1B and its interleaved form, Qi et al.
2023 (arXiv:2401.10241) for ZB-H1, Qi et al. 2024 (arXiv:2405.15362) for ZB-V, DeepSeek-AI 2024 (arXiv:2412.19437) for DualPipe. Orders are
static: they do not adapt to uneven stages, as a schedule found by search would.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ._plan import PlanError

ORDERS = ("gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe")
"""Schedules that can be laid out. `gpipe` and `1f1b` are interleaved when there are several virtual stages."""


class Pass(NamedTuple):
    """One pass of one micro-batch through one chunk of layers.

    Attributes:
      kind: "F" forward, "B" backward (the input gradient alone where the schedule has "W" passes), "W" weight gradient.
      batch: micro-batch, 0 first.
      chunk: which of the rank's chunks, 0 first.
      position: place of the chunk in the model, 0 first; the forward pass goes up through the positions.
      paired: True for the first of two passes, one forward and one backward, that DualPipe runs as one: both wait for the inputs of both,
        and the results of both are ready when both are done.
    """

    kind: Literal["F", "B", "W"]
    batch: int
    chunk: int
    position: int
    paired: bool = False


def pipeline_order(schedule: str, stages: int, micro_batches: int, virtual_stages: int = 1) -> tuple[tuple[Pass, ...], ...]:
    """The passes of every pipeline rank, in the order in which it runs them.

    Args:
      schedule: one of `ORDERS`.
      stages, micro_batches, virtual_stages: at least 1.
    Raises:
      PlanError: for an unknown schedule and for numbers it has no order for: ZB-H1 with virtual stages, ZB-V without two of them, DualPipe with
        virtual stages, an odd number of stages or of micro-batches, or fewer than two micro-batches per stage; interleaved 1F1B with
        micro-batches that its stages do not divide.
    """
    p, m, v = stages, micro_batches, virtual_stages
    if schedule not in ORDERS:
        raise PlanError(f"schedule is {schedule!r}; it should be one of {', '.join(ORDERS)}.")
    if min(p, m, v) < 1:
        raise PlanError(f"a pipeline of {p} stages, {m} micro-batches and {v} virtual stages has nothing to run; each should be at least 1.")
    if schedule == "zb-h1" and v != 1:
        raise PlanError(f"virtual_stages is {v}; ZB-H1 has one chunk per stage. Choose 1, or 2 for ZB-V.")
    if schedule == "zb-v" and v != 2:
        raise PlanError(f"virtual_stages is {v}; ZB-V has two chunks per stage. Choose 2, or 1 for ZB-H1.")
    if schedule == "1f1b" and v > 1 and p > 1 and m % p:
        near = max(m // p, 1) * p
        raise PlanError(f"the step has {m} micro-batches; interleaved 1F1B needs a multiple of the {p} pipeline stages, such as {near}.")
    if schedule == "dualpipe":
        if v != 1:
            raise PlanError(f"virtual_stages is {v}; DualPipe has one chunk per direction. Choose 1.")
        if p % 2 or m % 2 or m < 2 * p:
            raise PlanError(f"DualPipe with {p} stages and {m} micro-batches: it needs even numbers of both and at least two micro-batches per stage.")
    if schedule == "gpipe":
        return tuple(tuple(_gpipe(r, p, m, v)) for r in range(p))
    if schedule == "1f1b":
        return tuple(tuple(_interleaved(r, p, m, v)) for r in range(p))
    if schedule == "zb-h1":
        return tuple(tuple(_zb_h1(r, p, m)) for r in range(p))
    if schedule == "zb-v":
        return tuple(tuple(_zb_v(r, p, m)) for r in range(p))
    return tuple(tuple(_dualpipe(r, p, m)) for r in range(p))


def splits_backward(schedule: str) -> bool:
    """True for schedules that put off the weight gradient, so that their "B" is the input gradient alone at least in places."""
    return schedule in ("zb-h1", "zb-v", "dualpipe")


def _gpipe(r: int, p: int, m: int, v: int) -> Iterator[Pass]:
    """All forward passes, chunk by chunk, then all backward passes the other way round."""
    for chunk in range(v):
        for batch in range(m):
            yield Pass("F", batch, chunk, chunk * p + r)
    for chunk in reversed(range(v)):
        for batch in reversed(range(m)):
            yield Pass("B", batch, chunk, chunk * p + r)


def _interleaved(r: int, p: int, m: int, v: int) -> Iterator[Pass]:
    """Micro-batches in groups of one per stage, each group through all chunks; a warm-up of forward passes, then forward and backward in turn."""
    forward = [(batch, chunk) for first in range(0, m, p) for chunk in range(v) for batch in range(first, min(first + p, m))]
    backward = [(batch, v - 1 - chunk) for batch, chunk in forward]
    warm_up = min(len(forward), p - 1 - r if v == 1 else 2 * (p - 1 - r) + (v - 1) * p)
    for i in range(len(forward) + warm_up):
        if i < len(forward):
            batch, chunk = forward[i]
            yield Pass("F", batch, chunk, chunk * p + r)
        if i >= warm_up:
            batch, chunk = backward[i - warm_up]
            yield Pass("B", batch, chunk, chunk * p + r)


def _zb_h1(r: int, p: int, m: int) -> Iterator[Pass]:
    """1F1B of input gradients; rank r puts off r weight gradients, so that every rank has p micro-batches in memory, and fills its end with them."""
    for i in range(m + p - 1 - r):
        if i < m:
            yield Pass("F", i, 0, r)
        batch = i - (p - 1 - r)
        if batch >= 0:
            yield Pass("B", batch, 0, r)
            if batch >= r:
                yield Pass("W", batch - r, 0, r)
    for batch in range(max(m - r, 0), m):
        yield Pass("W", batch, 0, r)


def _zb_v(r: int, p: int, m: int) -> Iterator[Pass]:
    """Two chunks, the second on the way back, so that rank 0 has the first and the last of the model. Passes beyond the last micro-batch of a
    short step are left out."""
    done = {(kind, chunk): 0 for kind in "FBW" for chunk in (0, 1)}
    batches = max(2 * p - 1, m)

    def take(kind, chunk):
        batch = done[kind, chunk]
        done[kind, chunk] += 1
        return [Pass(kind, batch, chunk, r if chunk == 0 else 2 * p - 1 - r)] if batch < m else []

    for _ in range(2 * (p - r) - 1):
        yield from take("F", 0)
    for _ in range(r):
        yield from take("F", 1)
        yield from take("F", 0)
    for _ in range(p - r):
        yield from take("F", 1)
        yield from take("B", 1)
        yield from take("W", 1)
    while done["F", 1] < done["F", 0] or done["F", 0] < batches:
        if done["F", 0] < batches:
            yield from take("F", 0)
        yield from take("B", 0)
        yield from take("W", 0)
        yield from take("F", 1)
        yield from take("B", 1)
        yield from take("W", 1)
    for _ in range(r):
        yield from take("B", 0)
        yield from take("B", 1)
    for _ in range(p - r):
        yield from take("B", 0)
        yield from take("W", 0)
    for chunk in (1, 0):
        while done["W", chunk] < done["B", chunk]:
            yield from take("W", chunk)


def _dualpipe(r: int, p: int, m: int) -> Iterator[Pass]:
    """Half of the micro-batches enters at each end. `near` is the direction that enters at the rank's own half of the pipeline.

    A backward pass is whole ("B" and "W" of it at once) but where the order puts the weight gradient off.
    """
    half, from_end = p // 2, min(r, p - 1 - r)
    near, far = (0, 1) if r < half else (1, 0)
    done = {(kind, chunk): 0 for kind in "FB" for chunk in (0, 1)}
    put_off: list[Pass] = []

    def take(kind, chunk, paired=False):
        batch = done[kind, chunk] + chunk * (m // 2)
        done[kind, chunk] += 1
        return Pass(kind, batch, chunk, r if chunk == 0 else p - 1 - r, paired)

    def backward(chunk, later=False):
        b = take("B", chunk)
        yield b
        if later:
            put_off.append(b._replace(kind="W"))
        else:
            yield b._replace(kind="W")

    def pair(forward_chunk, backward_chunk):
        yield take("F", forward_chunk, True)
        yield from backward(backward_chunk)

    for _ in range(2 * (half - from_end - 1)):
        yield take("F", near)
    for _ in range(from_end + 1):
        yield take("F", near)
        yield take("F", far)
    for _ in range(half - from_end - 1):
        yield from backward(far, later=True)
        yield put_off.pop(0)
        yield take("F", far)
    for i in range(m // 2 - p + from_end + 1):
        if i == 0 and r in (half - 1, half):  # the two middle ranks have nothing to pair yet
            yield take("F", near)
            yield from backward(far)
        else:
            yield from pair(near, far)
        yield from pair(far, near)
    for _ in range(half - from_end - 1):
        yield from backward(far)
        yield from pair(far, near)
    for i in range(from_end + 1):
        later = i >= (from_end + 1) // 2
        yield from backward(far, later or (i == (from_end + 1) // 2 and from_end % 2 == 1))
        yield from backward(near, later)
    for _ in range(half - from_end - 1):
        yield put_off.pop(0)
        yield from backward(near, later=True)
    yield from put_off
