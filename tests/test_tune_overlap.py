"""Searches find what brute force finds, none loses to the default, robust tuning hardly ever does, errors name what to change."""

import itertools

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.cost.contention import (
    FABRICS,
    OVERLAP_CHIPS,
    TUNING_SD,
    Collective,
    Setting,
    draw_contention,
    ffn_kernels,
    make_settings,
    overlap_makespan,
    overlap_region,
    streaming_kernel,
)
from diffperf.tune import OVERLAP_REGIONS, OverlapSpace, load_overlap_region, overlap
from diffperf.tune._overlap._robust import Judge
from diffperf.tune._overlap._space import Grid

SMALL = OverlapSpace(channels=(1, 2, 4, 8, 16, 61), chunk_bytes=(2**18, 2**20, 2**21), threads=(128, 512))
FEW = dict(space=SMALL, starts=6, steps=25)


def region_of(times=1):
    pair = [Collective(op, 157.3e6, 16, FABRICS["a40_ib"]) for op in ("all_gather", "reduce_scatter")]
    return overlap_region(ffn_kernels(4096, 2560, 10240) * 2, (pair * times)[: max(2 * times, 1)], OVERLAP_CHIPS["a40"])


@pytest.fixture(scope="module")
def two():
    return region_of()


@pytest.fixture(scope="module")
def by_hand(two):
    """Makespans of all settings of two collectives, one by one."""
    time = jax.jit(jax.vmap(lambda settings: overlap_makespan(two, settings)))
    each = [Setting(*knobs) for knobs in itertools.product(SMALL.channels, SMALL.chunk_bytes, SMALL.threads)]
    pairs = list(itertools.product(each, repeat=2))
    rows = [make_settings(two, pair) for pair in pairs[:: len(pairs) // 40]]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    return pairs, pairs[:: len(pairs) // 40], np.asarray(time(stacked))


def test_exhaustive_search_is_the_minimum_and_auto_takes_it(two, by_hand):
    pairs, some, times = by_hand
    found = overlap(two, space=SMALL)
    assert found.method == "exhaustive" and found.evaluations == len(pairs) == 36**2
    assert found.makespan <= times.min()
    assert_allclose(overlap_makespan(two, make_settings(two, list(found.settings.values()))), found.makespan, rtol=1e-12)  # settings say what was found
    grid = Grid(two, SMALL)
    every = [tuple(s[:3] for s in grid.describe(point)) for point in grid.every(0, grid.num_points)]
    assert sorted(every) == sorted(tuple(s[:3] for s in pair) for pair in pairs)


@pytest.mark.parametrize("method", ["gradient", "priority", "coordinate"])
def test_every_search_stays_between_the_best_and_the_default(two, method):
    best = overlap(two, space=SMALL)
    found = overlap(two, method=method, **FEW)
    assert best.makespan <= found.makespan * (1 + 1e-12) and found.makespan <= found.default_makespan
    assert found.evaluations < best.evaluations / 4 and 0 <= found.gain < 1
    if method == "gradient":
        assert found.makespan < best.makespan * 1.002


def test_the_optimum_is_not_what_makes_communication_alone_fastest(two):
    """Section 2 of Lagom: fewer channels than NCCL's 8 where compute is the longer stream."""
    found = overlap(two, space=SMALL)
    assert max(setting.channels for setting in found.settings.values()) < 8 and found.gain > 0.1


def test_nothing_to_gain_keeps_the_default():
    idle = overlap_region([streaming_kernel(1e3)], [Collective("all_gather", 0.0, 8, FABRICS["a40_ib"])], OVERLAP_CHIPS["a40"])
    found = overlap(idle, space=SMALL)
    assert found.kept_default and found.gain == 0 and list(found.settings.values()) == [Setting()] and found.evaluations == 36


def test_robust_tuning_hardly_ever_loses_where_the_nominal_optimum_does(two):
    fit, unseen = draw_contention(128, sd=TUNING_SD, seed=1), draw_contention(1000, sd=TUNING_SD, seed=2)
    nominal, robust = overlap(two, space=SMALL), overlap(two, draws=fit, risk=0.008, **FEW)
    time = jax.jit(jax.vmap(lambda settings, draws: overlap_makespan(two, settings, draws), (None, 0)))
    of = lambda settings: np.asarray(time(make_settings(two, settings), unseen))
    default = of(Setting())
    risk = lambda result: float((of(list(result.settings.values())) > default * (1 + 1e-9)).mean())
    assert robust.evaluations > nominal.evaluations and not robust.kept_default and robust.risk <= 0.008 and robust.expected_gain > 0.05
    assert risk(robust) <= 0.02 < risk(nominal)
    assert nominal.makespan <= robust.makespan


def test_rounding_is_no_loss():
    """Exchanged settings of two alike collectives that run after all compute, in the precision that users have."""
    with jax.enable_x64(False):
        region = overlap_region([streaming_kernel(1e4)], [Collective("all_gather", 1e9, 16, FABRICS["a40_ib"])] * 3, OVERLAP_CHIPS["a40"])
        grid = Grid(region, SMALL)
        few, many = Setting(4), Setting(8)
        judge = Judge(grid, draw_contention(256, sd=TUNING_SD), grid.place((few, few, many)))
        judged = judge.judge(np.stack([grid.place((few, many, few)), grid.place((few, few, few))]))
    assert judged.risk[0] == 0 and judged.risk[1] > 0.9


def test_a_threshold_above_the_gain_keeps_the_default(two):
    kept = overlap(two, draws=draw_contention(128, sd=TUNING_SD, seed=1), threshold=0.9, **FEW)
    assert kept.kept_default and kept.risk == 0 and kept.expected_gain == 0 and kept.makespan == kept.default_makespan


def test_algorithm_and_protocol_are_chosen():
    """A short all-reduce between many ranks is bound by latency, which LL and trees have less of."""
    choices = (("ring", "simple"), ("ring", "ll"), ("tree", "ll"))
    reduce = [Collective("all_reduce", 1e4, 256, FABRICS["a40_ib_100g"], choices=choices)] * 2
    hidden = overlap_region(ffn_kernels(4096, 2560, 10240) * 2, reduce, OVERLAP_CHIPS["a40"])
    found = overlap(hidden, method="gradient", **FEW)
    assert found.makespan <= found.default_makespan
    exposed = overlap_region([streaming_kernel(1e3)] * 8, reduce, OVERLAP_CHIPS["a40"])
    assert {(s.algorithm, s.protocol) for s in overlap(exposed, method="gradient", **FEW).settings.values()} == {("tree", "ll")}


def test_every_named_region_can_be_made():
    counts = [len(load_overlap_region(name).collective_names) for name in OVERLAP_REGIONS]
    assert len(counts) >= 15 and min(counts) == 1 and max(counts) == 12
    with pytest.raises(ValueError, match="no overlap region 'phi3'"):
        load_overlap_region("phi3")


@pytest.mark.parametrize("options, message", [
    (dict(method="genetic"), "method is 'genetic'; it should be one of auto"),
    (dict(space=OverlapSpace(channels=(8, 128))), "all_gather 0 has 128 channels; it should have 1 to 64"),
    (dict(space=OverlapSpace(threads=(100, 512))), "all_gather 0 has 100 threads"),
    (dict(space=OverlapSpace(channels=(8, 4))), "channels of the space is"),
    (dict(space=OverlapSpace(channels=())), "channels of the space is"),
    (dict(space=OverlapSpace(channels=(1, 2))), "is not in the space"),
    (dict(default=Setting(99)), "all_gather 0 has 99 channels"),
    (dict(default=[Setting()]), "1 settings for 2 collectives"),
    (dict(method="priority", draws=draw_contention(2)), "tuned over by gradients"),
])  # fmt: skip
def test_bad_input_says_what_to_change(two, options, message):
    with pytest.raises(ValueError, match=message):
        overlap(two, **options)


def test_too_many_points_to_evaluate_all():
    with pytest.raises(ValueError, match="cannot all be evaluated; take method 'gradient'"):
        overlap(load_overlap_region("olmoe_expert_forward"), method="exhaustive")
