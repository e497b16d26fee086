"""Pipeline schedules: orders of passes against a simulation, greedy schedules and the closed forms of their bubbles."""

import math

import pytest
from numpy.testing import assert_allclose

from diffperf.estimate.timeline import pipeline_timeline
from diffperf.parallel import PlanError, make_plan
from diffperf.parallel._order import ORDERS, pipeline_order, splits_backward
from diffperf.parallel._schedule import bubble_slots


def simulate(order, forward, backward, weight):
    """Ends of the passes of every rank and the makespan, by moving each rank on until its next pass has no input. Independent of the task graph.

    A backward pass that no "W" follows for good is whole; a pair runs as one.
    """
    split = any(one.kind == "W" for passes in order for one in passes)
    time = {"F": forward, "B": backward + (0 if split else weight), "W": weight}
    last = max(one.position for passes in order for one in passes)
    ends, clock, place = {}, [0.0] * len(order), [0] * len(order)
    left = sum(map(len, order))
    while left:
        moved = False
        for rank, passes in enumerate(order):
            while place[rank] < len(passes):
                one = passes[place[rank]]
                together = passes[place[rank] : place[rank] + 3] if one.paired else (one,)
                needs = [("F", x.batch, x.position - 1) for x in together if x.kind == "F" and x.position]
                needs += [("B", x.batch, x.position + 1) if x.position < last else ("F", x.batch, x.position) for x in together if x.kind == "B"]
                if any(need not in ends for need in needs):
                    break
                clock[rank] = max([clock[rank], *(ends[need] for need in needs)]) + sum(time[x.kind] for x in together)
                for x in together:
                    ends[x.kind, x.batch, x.position] = clock[rank]
                place[rank] += len(together)
                left -= len(together)
                moved = True
        assert moved, "deadlock"
    return max(clock)


GRID = [("gpipe", 4, 8, 1), ("gpipe", 2, 4, 3), ("1f1b", 1, 4, 1), ("1f1b", 4, 3, 1), ("1f1b", 8, 16, 1), ("1f1b", 4, 8, 2), ("1f1b", 2, 6, 4),
        ("zb-h1", 2, 5, 1), ("zb-h1", 4, 4, 1), ("zb-h1", 8, 16, 1), ("zb-v", 2, 3, 2), ("zb-v", 4, 12, 2), ("zb-v", 4, 4, 2), ("dualpipe", 2, 6, 1),
        ("dualpipe", 4, 8, 1), ("dualpipe", 8, 20, 1)]  # fmt: skip


@pytest.mark.parametrize("schedule, p, m, v", GRID)
def test_schedules_run_every_pass_once_and_as_a_simulation_does(schedule, p, m, v):
    order = pipeline_order(schedule, p, m, v)
    chunks = 2 if schedule == "dualpipe" else v
    for rank, passes in enumerate(order):
        at = {(x.kind, x.batch, x.chunk): i for i, x in enumerate(passes)}
        kinds = "FBW" if splits_backward(schedule) else "FB"
        assert len(at) == len(passes) == len(kinds) * m * v
        keys = {(x.batch, x.chunk) for x in passes}
        assert all(at["F", *key] < at["B", *key] for key in keys)
        if "W" in kinds:
            assert all(at["B", *key] < at["W", *key] for key in keys)
        if schedule == "dualpipe":
            assert {x.position for x in passes} == ({rank, p - 1 - rank})
        assert len({x.chunk for x in passes}) == chunks
    for forward, backward, weight in ((1.0, 1.0, 1.0), (1.0, 1.7, 0.8)):
        plan = dict(stages=p, micro_batches=m, virtual_stages=v, forward=forward, backward=backward, weight=weight)
        timeline = pipeline_timeline(schedule, **plan)
        assert timeline.makespan == pytest.approx(simulate(order, forward / v, backward / v, weight / v), rel=1e-12)


@pytest.mark.parametrize("name, schedule, p, m, v", [
    ("1f1b", "gpipe", 8, 8, 1), ("1f1b", "1f1b", 8, 24, 1), ("1f1b", "1f1b", 8, 16, 2), ("zero-bubble", "zb-h1", 8, 12, 1), ("zero-bubble", "zb-v", 8, 16, 2),
    ("dualpipe", "dualpipe", 8, 16, 1),
    ("zero-bubble", "zb-h1", 8, 1, 1), ("zero-bubble", "zb-h1", 8, 5, 1), ("zero-bubble", "zb-v", 8, 1, 2), ("zero-bubble", "zb-v", 8, 7, 2),
    ("zero-bubble", "zb-v", 6, 8, 2),
])  # fmt: skip
@pytest.mark.parametrize("w", [1 / 3, 0.22])
def test_closed_forms_are_the_bubbles_of_the_orders(name, schedule, p, m, v, w):
    plan = make_plan(global_batch_size=m, pipeline_parallel=p, virtual_stages=v, schedule=name)
    steps = simulate(pipeline_order(schedule, p, m, v), (1 - w) / 2 / v, (1 - w) / 2 / v, w / v)
    assert_allclose(bubble_slots(plan, w), steps - m, rtol=1e-9)


def test_1f1b_bubble_for_any_ratio():
    for forward, backward in ((1.0, 3.0), (2.0, 1.0)):
        assert simulate(pipeline_order("1f1b", 4, 12, 1), forward, backward, 0.0) == pytest.approx((12 + 3) * (forward + backward))


def greedy_zero_bubble(p, m, limit):
    """A rank takes the first that can run of: input gradient, forward pass with at most `limit` micro-batches in memory, weight gradient; all take 1."""
    done, stored, waiting = {}, [0] * p, [[] for _ in range(p)]
    next_f, next_b, now = [0] * p, [0] * p, 0
    while any(next_b[r] < m or waiting[r] for r in range(p)):
        ready = lambda key, now=now: done.get(key, math.inf) <= now
        chosen = []
        for r in range(p):
            if next_b[r] < m and ready(("B", next_b[r], r + 1) if r < p - 1 else ("F", next_b[r], r)):
                chosen.append((r, "B"))
            elif next_f[r] < m and stored[r] < limit and (r == 0 or ready(("F", next_f[r], r - 1))):
                chosen.append((r, "F"))
            elif waiting[r]:
                chosen.append((r, "W"))
        now += 1
        for r, kind in chosen:
            if kind == "W":
                waiting[r].pop(0)
                stored[r] -= 1
                continue
            count = next_f if kind == "F" else next_b
            done[kind, count[r], r] = now
            if kind == "B":
                waiting[r].append(count[r])
            else:
                stored[r] += 1
            count[r] += 1
    return now


def test_zb_h1_is_as_good_as_a_greedy_schedule_with_its_memory():
    """Found by rules in place of an order: the same memory (p micro-batches on every rank) allows nothing better."""
    for p, m in ((2, 6), (4, 8), (6, 12)):
        assert simulate(pipeline_order("zb-h1", p, m), 1, 1, 1) <= greedy_zero_bubble(p, m, p)


@pytest.mark.parametrize("schedule, p, m, v, parts", [
    ("zigzag", 2, 4, 1, "gpipe"), ("zb-h1", 2, 4, 2, "ZB-V"), ("zb-v", 2, 4, 1, "two chunks"), ("dualpipe", 4, 7, 1, "even"),
    ("dualpipe", 4, 6, 1, "two micro-batches"), ("dualpipe", 4, 8, 2, "virtual_stages is 2"), ("1f1b", 4, 6, 2, "multiple of the 4"),
    ("1f1b", 4, 0, 1, "at least 1"),
])  # fmt: skip
def test_orders_that_do_not_exist(schedule, p, m, v, parts):
    with pytest.raises(PlanError, match=parts):
        pipeline_order(schedule, p, m, v)


def test_a_transfer_delays_the_receiver():
    """GPipe: each of the p - 1 steps up and down waits for one transfer."""
    words = dict(stages=4, micro_batches=6, forward=1.0, backward=2.0)
    assert pipeline_timeline("gpipe", **words, send=0.25).makespan == pytest.approx((6 + 3) * 3 + 2 * 3 * 0.25)


def test_every_order_has_a_test():
    assert {schedule for schedule, *_ in GRID} == set(ORDERS)
