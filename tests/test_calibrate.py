"""Constants, design, fit, residual process, posterior and choice. Small fits stand in for the shipped one wherever the claim allows it."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from diffperf.calibrate import build_posterior, fit_runs, prepare
from diffperf.calibrate._calibration import constant_efficiency, lower_bounds
from diffperf.calibrate._choice import choose
from diffperf.calibrate._constants import CONSTANTS, FEATURE_EFFECTS, HARDWARE, NAMES, apply_to_system, natural, stack_from, unconstrained
from diffperf.calibrate._design import LEVELS, build_design
from diffperf.calibrate._evaluate import error_summary, update
from diffperf.calibrate._fit import balanced_weights, log_time_and_gradient
from diffperf.calibrate._posterior import ROW_NOISE, UNSEEN_SHARE, Z80, Posterior
from diffperf.calibrate._residual import EXPERTS, points, residual_kernel
from diffperf.calibrate._user import OTHER, relabel
from diffperf.estimate import train_step
from diffperf.hardware import DATATYPES, describe, load_system
from diffperf.stack import load_stack


def at_design_mean(posterior, rows):
    return log_time_and_gradient(rows, posterior.design.constants(rows, posterior.design.mean))[0]


# -- constants and design -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", CONSTANTS, ids=NAMES)
def test_natural_inverts_unconstrained(constant):
    c = NAMES.index(constant.name)
    for value in (constant.mean, constant.mean / 3, 0.5):
        free = np.zeros(len(NAMES))
        free[c] = unconstrained(constant.name, value)
        assert_allclose(natural(free)[c], value, rtol=1e-12)
    assert 0 < constant.mean < (1 if constant.logit else np.inf) and constant.source


def test_natural_stays_finite_with_finite_gradient_far_out():
    for extreme in (-60.0, 60.0):
        value, slope = jax.vjp(natural, jnp.full(len(NAMES), extreme))
        assert jnp.isfinite(value).all() and jnp.isfinite(slope(jnp.ones(len(NAMES)))[0]).all()


def test_names_are_fields_of_chip_tier_and_stack():
    system = load_system("h100_sxm")
    stack = load_stack()
    paths = {row.path for row in describe("h100_sxm")}
    for name in NAMES:
        if name in ("chip.low_precision_ratio", "chip.fp4_ratio"):  # ratios of neighbouring entries of `Chip.matmul_efficiency`
            continue
        if name == "chip.matmul_efficiency":
            assert system.chip.matmul_efficiency.shape == (len(DATATYPES),)
        elif name in HARDWARE:
            assert name in paths
        else:
            assert getattr(stack, name).shape == ()
    assert {name for _, name, _, _ in FEATURE_EFFECTS} <= set(NAMES)


def test_applied_constants_reach_the_system():
    constants = np.array([unconstrained(c.name, c.mean) for c in CONSTANTS])
    system = apply_to_system(load_system("b200_sxm"), constants)
    by = dict(zip(DATATYPES, np.asarray(system.chip.matmul_efficiency), strict=True))
    assert_allclose([by["bf16"], by["fp8"], by["nvfp4"]], [0.72, 0.72 * 1.0, 0.72 * 0.75], rtol=1e-12)
    assert_allclose([system.scale_up.efficiency, system.scale_out.efficiency, system.spine.efficiency], [0.7, 0.75, 0.75], rtol=1e-12)
    assert_array_equal(system.chip.peak_flops_per_s, load_system("b200_sxm").chip.peak_flops_per_s)  # datasheet numbers stay


def test_every_constant_moves_the_time_of_some_published_run(published_rows, shipped):
    rows = published_rows.take(slice(None, None, 3))
    _, gradient = log_time_and_gradient(rows, shipped.posterior.design.constants(rows, shipped.posterior.parameters))
    assert np.isfinite(gradient).all()
    idle = [name for name, most in zip(NAMES, np.abs(gradient).max(axis=0), strict=True) if most < 1e-3]
    assert idle == []


def test_gradient_agrees_with_finite_differences(few_rows, few_fit):
    rows = few_rows.take(slice(None, None, 25))
    constants, h = few_fit.constants(rows), 1e-5
    _, gradient = log_time_and_gradient(rows, constants)
    n, k = len(rows), len(NAMES)
    steps = h * np.tile(np.eye(k), (n, 1))
    repeated = rows.take(np.repeat(np.arange(n), k))
    up, down = (log_time_and_gradient(repeated, np.repeat(constants, k, 0) + sign * steps)[0] for sign in (1, -1))
    assert_allclose(gradient.ravel(), (up - down) / (2 * h), atol=2e-6)


def test_compiled_time_is_the_eager_time(few_rows, few_fit):
    rows = few_rows.take(np.array([0, len(few_rows) - 1]))
    constants = few_fit.constants(rows)
    predicted, _ = log_time_and_gradient(rows, constants)
    for i in range(len(rows)):
        model, system, plan = (jax.tree.map(lambda x, i=i: x[i], tree) for tree in (rows.model, rows.system, rows.plan))
        eager = train_step(model, apply_to_system(system, constants[i]), plan, stack_from(constants[i])).step_time
        assert_allclose(np.log(eager), predicted[i], rtol=1e-9)


def test_time_and_gradient_do_not_depend_on_the_block(few_rows, few_fit):
    constants = few_fit.constants(few_rows)
    value, gradient = log_time_and_gradient(few_rows, constants)
    one_value, one_gradient = log_time_and_gradient(few_rows.take(np.array([7])), constants[7:8])
    assert_allclose(one_value[0], value[7], rtol=1e-12)
    assert_allclose(one_gradient[0], gradient[7], atol=1e-10)


def test_fit_runs_in_double_precision_whatever_the_user_chose(few_rows, few_fit):
    rows = few_rows.take(slice(0, 3))
    with jax.enable_x64(False):
        value, gradient = log_time_and_gradient(rows, few_fit.constants(rows))
    assert value.dtype == gradient.dtype == np.float64
    assert_array_equal(value, log_time_and_gradient(rows, few_fit.constants(rows))[0])


def test_design_jacobian_is_the_derivative_of_its_constants(few_rows):
    rows = few_rows.take(slice(None, None, 20))
    design = build_design(few_rows)
    rng = np.random.default_rng(0)
    theta, gradient = rng.normal(size=len(design.keys)), rng.normal(size=(len(rows), len(NAMES)))
    move = rng.normal(size=len(design.keys))
    change = design.constants(rows, theta + move) - design.constants(rows, theta)  # the map is linear: no step size
    assert_allclose(design.jacobian(rows, gradient) @ move, (gradient * change).sum(axis=1), rtol=1e-9, atol=1e-12)
    assert_allclose(design.constants(points(rows), theta), design.constants(rows, theta), rtol=1e-15)


def test_design_has_one_offset_per_label_and_width(few_rows):
    design = build_design(few_rows)
    assert len(set(design.keys)) == len(design.keys) == len(design.mean) == len(design.width) and (design.width > 0).all()
    assert all(key[2] or key[1] == "shared" for key in design.keys)  # no offset for a label that says nothing
    for constant in CONSTANTS:
        for level in LEVELS:
            assert any(key[:2] == (constant.name, level) for key in design.keys) == (getattr(constant, level) > 0)


def test_unknown_labels_add_nothing(few_rows):
    design = build_design(few_rows)
    theta = np.random.default_rng(0).normal(size=len(design.keys))
    rows = few_rows.take(np.array([0]))
    nobody = dataclasses.replace(rows, stack=("nobody",), family=("",), generation=("none",), accelerator=("none",), features=0 * rows.features)
    shared = [theta[design.index[name, "shared", ""]] for name in NAMES]
    assert_allclose(design.constants(nobody, theta)[0], shared, rtol=1e-15)


# -- fit --------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def synthetic(few_rows):
    """Rows with the times of known constants and 5% noise: (rows, parameters)."""
    rng = np.random.default_rng(1)
    design = build_design(few_rows)
    truth = design.mean + 0.7 * design.width * rng.normal(size=len(design.keys))
    clean, _ = log_time_and_gradient(few_rows, design.constants(few_rows, truth))
    return dataclasses.replace(few_rows, log_time=clean + 0.05 * rng.normal(size=len(clean))), truth


def test_fit_recovers_known_constants_within_their_interval(synthetic):
    rows, truth = synthetic
    fit = fit_runs(rows, balance=False)
    sd = np.sqrt(np.diag(fit.covariance()))
    off = (fit.parameters - truth) / sd
    assert 0.75 < (np.abs(off) < Z80).mean() and np.sqrt(np.mean(off**2)) < 1.3
    well_known = [fit.design.index[name, "shared", ""] for name in ("chip.matmul_efficiency", "attention_backward_ratio", "vocabulary_share", "score_bytes")]
    assert (sd[well_known] < fit.design.width[well_known]).all() and (np.abs(off[well_known]) < 3).all()
    error = log_time_and_gradient(rows, fit.constants(rows))[0] - log_time_and_gradient(rows, fit.design.constants(rows, truth))[0]
    assert np.median(np.abs(error)) < 0.04  # below the noise of one run


def test_fit_is_at_a_stationary_point(synthetic):
    rows, _ = synthetic
    once = fit_runs(rows, passes=25)
    again = fit_runs(rows, start=once, passes=3)
    assert np.abs(again.parameters - once.parameters).max() < 5e-3


def test_one_wrong_row_moves_little(synthetic):
    rows, _ = synthetic
    wrong = rows.log_time.copy()
    wrong[20] += np.log(3.0)
    fits = [fit_runs(r) for r in (rows, dataclasses.replace(rows, log_time=wrong))]
    predicted = [log_time_and_gradient(rows, fit.constants(rows))[0] for fit in fits]
    assert np.abs(predicted[1] - predicted[0]).max() < 0.06  # of log 3 = 1.1: seven more rows of its stack speak against it
    assert np.median(np.abs(predicted[1] - predicted[0])) < 2e-3


def test_fit_takes_a_single_run_and_stays_near_the_prior(few_rows):
    fit = fit_runs(few_rows.take(np.array([5])))
    assert np.isfinite(fit.parameters).all()
    assert (np.abs(fit.parameters - fit.design.mean) < 3 * fit.design.width).all()


@pytest.mark.parametrize("broken", ["no rows", "no weight", "no time"])
def test_fit_and_posterior_of_nothing_are_refused(few_rows, few_fit, broken):
    rows = few_rows.take(slice(0, 3))
    rows = {
        "no rows": rows.take(np.zeros(3, bool)),
        "no weight": dataclasses.replace(rows, weight=np.zeros(3)),
        "no time": dataclasses.replace(rows, log_time=np.full(3, np.nan)),
    }[broken]
    with pytest.raises(ValueError, match="Give at least one measured row"):
        fit_runs(rows)
    with pytest.raises(ValueError, match="Give at least one measured row"):
        build_posterior(few_fit, rows)


def test_left_out_and_unmeasured_rows_do_not_touch_the_fit(few_rows):
    rows = few_rows.take(slice(0, 30))
    weight, log_time = rows.weight.copy(), rows.log_time.copy()
    weight[3], log_time[4] = 0.0, np.nan
    keep = np.ones(30, bool)
    keep[[3, 4]] = False
    a = fit_runs(dataclasses.replace(rows, weight=weight, log_time=log_time), balance=False, passes=3)
    b = fit_runs(rows.take(keep), balance=False, passes=3)
    assert_allclose(a.parameters, b.parameters, rtol=1e-9)


def test_no_table_rules_the_fit(published_rows):
    weight = balanced_weights(published_rows)
    assert ((0 <= weight) & (weight <= published_rows.weight)).all()
    totals = Counter()
    for group, w in zip(published_rows.groups, weight, strict=True):
        totals[group[0]] += w
    assert max(totals.values()) < 0.25 * sum(totals.values())
    assert (weight[published_rows.weight == 0] == 0).all()


# -- residual process -------------------------------------------------------------------------------------------------------------------


def test_residual_kernel_is_a_covariance(few_rows):
    at = points(few_rows)
    kernel = residual_kernel(at, at)
    assert_allclose(kernel, kernel.T, rtol=1e-12)
    assert np.linalg.eigvalsh(kernel).min() > -1e-10
    assert (kernel > 0).all() and np.isfinite(kernel).all()
    alike = {}
    for family, experts, value in zip(at.family, at.coordinates[:, EXPERTS], np.diag(kernel), strict=True):
        alike.setdefault((family != "", experts > 0), []).append(value)
    for values in alike.values():
        assert_allclose(values, values[0], rtol=1e-12)  # the same everywhere
    assert (kernel <= np.diag(kernel).max() + 1e-12).all()


def test_residual_kernel_falls_with_distance(few_rows):
    a = points(few_rows.take(np.array([0])))
    far = [residual_kernel(a, dataclasses.replace(a, coordinates=a.coordinates + step))[0, 0] for step in (0, 0.5, 1, 2, 4, 8)]
    assert (np.diff(far) < 0).all()
    assert residual_kernel(a, dataclasses.replace(a, accelerator=("other",)))[0, 0] < far[0]
    assert residual_kernel(a, dataclasses.replace(a, stack=("other",)))[0, 0] < far[0]


# -- posterior ----------------------------------------------------------------------------------------------------------------------------


def test_without_measured_rows_the_posterior_is_the_prior(few_rows, few_fit):
    rows, none = few_rows.take(slice(0, 10)), few_rows.take(np.zeros(len(few_rows), bool))
    design = few_fit.design
    empty = Posterior(design, design.mean, points(none), np.zeros((0, len(NAMES))), np.zeros(0), np.zeros(0))
    mean, covariance, physics = empty.joint(rows)
    assert_allclose(mean, at_design_mean(empty, rows), rtol=1e-9)
    assert_allclose(mean, physics, rtol=1e-12)
    gradient = log_time_and_gradient(rows, design.constants(rows, design.mean))[1]
    jacobian = design.jacobian(rows, gradient)
    assert_allclose(covariance, (jacobian * design.width**2) @ jacobian.T + residual_kernel(points(rows), points(rows)), rtol=1e-9)


def test_observing_a_run_moves_its_prediction_towards_it_and_narrows_it(posterior, strangers):
    one = strangers.take(np.array([2]))
    for shift in (-0.3, 0.3):
        before = posterior.predict(one)
        seen = dataclasses.replace(one, log_time=before.mean + shift)
        after = posterior.observe(seen).predict(one)
        assert 0.2 < (after.mean - before.mean)[0] / shift < 1
        assert after.sd[0] < before.sd[0]


def test_observing_what_was_predicted_moves_nothing(posterior, strangers):
    expected = dataclasses.replace(strangers, log_time=posterior.predict(strangers).mean)
    assert_allclose(posterior.observe(expected).predict(strangers).mean, expected.log_time, atol=5e-3)


def test_deviation_is_never_below_that_of_one_run(posterior, few_rows, strangers):
    assert (posterior.predict(few_rows).sd >= ROW_NOISE).all()
    assert (posterior.predict(strangers).sd >= UNSEEN_SHARE * ROW_NOISE).all()
    assert (posterior.observe(strangers).predict(strangers).sd >= ROW_NOISE).all()


def test_runs_of_a_new_stack_narrow_its_other_runs(posterior, strangers):
    rest = strangers.take(slice(3, None))
    sd = [posterior.predict(rest).sd / UNSEEN_SHARE]
    sd += [posterior.observe(strangers.take(slice(0, k))).predict(rest).sd for k in (1, 3)]
    assert (sd[1] < sd[0]).all() and (sd[2] <= sd[1] + 1e-9).all()
    assert sd[2].mean() < 0.7 * sd[0].mean()
    errors = [np.abs(p.predict(rest).mean - rest.log_time).mean() for p in (posterior, posterior.observe(strangers.take(slice(0, 3))))]
    assert errors[1] < errors[0] + 0.02


def test_a_strange_stack_is_less_certain_than_one_of_a_family_and_both_than_a_known_one(posterior, few_rows):
    known = few_rows.take(np.array([i for i, s in enumerate(few_rows.stack) if s == "torchtitan"][:3]))
    sd = lambda rows, share: posterior.predict(rows).sd.mean() / share
    family, alone = relabel(known, "mine", "fsdp"), relabel(known, "mine", OTHER)
    assert sd(known, 1) < sd(family, UNSEEN_SHARE) < sd(alone, UNSEEN_SHARE)


def test_unknown_software_is_uncertain(posterior, few_rows):
    run = dataclasses.replace(few_rows.runs[0], framework="never heard of", source="my cluster")
    assert posterior.predict(prepare((run,))).sd[0] > 1.3 * posterior.predict(few_rows.take(np.array([0]))).sd[0]


def test_order_of_rows_does_not_matter(few_fit, few_rows, strangers):
    order = np.random.default_rng(0).permutation(len(few_rows))
    a, b = (build_posterior(few_fit, rows).predict(strangers) for rows in (few_rows, few_rows.take(order)))
    assert_allclose(a.mean, b.mean, atol=1e-9)
    assert_allclose(a.sd, b.sd, atol=1e-9)
    posterior = build_posterior(few_fit, few_rows)
    mixed = posterior.predict(strangers.take(slice(None, None, -1)))
    assert_allclose(mixed.mean[::-1], a.mean, atol=1e-12)
    twice = posterior.observe(strangers.take(slice(0, 2))).observe(strangers.take(slice(2, 4))).predict(strangers)
    at_once = posterior.observe(strangers.take(slice(0, 4))).predict(strangers)
    assert_allclose(twice.mean, at_once.mean, atol=1e-9)


def test_odd_row_gets_little_weight(posterior, few_rows, strangers):
    log_time = posterior.predict(strangers).mean.copy()
    log_time[4] += 1.5
    seen = posterior.observe(dataclasses.replace(strangers, log_time=log_time))
    weight = seen.weights[-len(strangers) :]
    assert weight[4] < 0.2 and np.delete(weight, 4).min() > 0.9
    assert seen.standardised[-len(strangers) + 4] > 5


def test_settled_posterior_predicts_the_same(posterior, strangers):
    a, b = posterior.predict(strangers), posterior.settled().predict(strangers)
    assert_allclose(a.mean, b.mean, atol=1e-9)
    assert_allclose(a.sd, b.sd, atol=1e-9)


def test_unmeasured_rows_cannot_be_observed(posterior, strangers):
    with pytest.raises(ValueError, match="no measured step time in"):
        posterior.observe(dataclasses.replace(strangers, log_time=np.full(len(strangers), np.nan)))


def test_predictions_in_blocks_equal_predictions_at_once(posterior, few_rows):
    many = few_rows.take(np.resize(np.arange(len(few_rows)), 600))
    whole, part = posterior.predict(many), posterior.predict(few_rows)
    assert_allclose(whole.mean[: len(few_rows)], part.mean, atol=1e-9)
    assert len(whole.mean) == len(whole.sd) == len(whole.physics) == 600


def test_few_shot_update_is_the_posterior_on_the_target_rows(posterior, strangers):
    mean, covariance, _ = posterior.joint(strangers)
    seen = np.array([0, 3])
    moved, sd = update(mean, covariance, strangers.log_time, seen)
    full = posterior.observe(strangers.take(seen)).predict(strangers)
    assert_allclose(moved, full.mean, atol=0.02)  # the full update also reweights the rows it had
    unseen, wide = update(mean, covariance, strangers.log_time, np.array([], int))
    assert_array_equal(unseen, mean)
    assert_allclose(wide, posterior.predict(strangers).sd, rtol=1e-9)


# -- what to measure next -----------------------------------------------------------------------------------------------------------------


def test_choice_equals_brute_force_and_each_step_helps(posterior, strangers):
    _, covariance, _ = posterior.joint(strangers)
    picks = choose(covariance, 4)
    mean_sd = []
    for i in range(len(strangers)):
        left = covariance - np.outer(covariance[:, i], covariance[i]) / (covariance[i, i] + ROW_NOISE**2)
        mean_sd.append(np.sqrt(np.maximum(np.diag(left), 0)).mean())
    assert picks[0][0] == int(np.argmin(mean_sd))
    assert_allclose(picks[0][2], min(mean_sd), rtol=1e-9)
    assert len({row for row, _, _ in picks}) == 4
    for (_, before, after), (_, later, _) in zip(picks, picks[1:], strict=False):
        assert after < before
        assert_allclose(later, after, rtol=1e-6)


def test_choice_of_more_rows_than_there_are_and_of_none(posterior, strangers):
    _, covariance, _ = posterior.joint(strangers.take(slice(0, 3)))
    assert sorted(row for row, _, _ in choose(covariance, 10)) == [0, 1, 2]
    assert choose(covariance, 0) == []


# -- baseline and error summaries -----------------------------------------------------------------------------------------------------------


def test_lower_bound_is_below_the_measured_time_and_the_baseline_reaches_half_of_it(published_rows):
    rows = published_rows.take(slice(0, None, 7))
    share = lower_bounds(rows) / np.exp(rows.log_time)
    assert ((share > 0) & (share < 0.95))[rows.weight > 0].all()
    assert 0.2 < constant_efficiency(published_rows) < 0.6


def test_error_summary_by_hand():
    summary = error_summary(np.log([1.1, 0.8, 1.0]), np.zeros(3))
    assert_allclose([summary["median"], summary["mean"], summary["bias"]], [0.1, 0.1, 0.0], atol=1e-12)
    assert all(np.isnan(x) for x in error_summary(np.array([]), np.array([])).values())
