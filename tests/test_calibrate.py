"""Fit, posterior and the three doors behind the command line. Small fits stand in for the shipped one wherever the claim allows it."""

import dataclasses
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from diffperf.calibrate import Calibration, build_posterior, calibrate_runs, fit_runs, load_calibration, predict_step, prepare, validate_runs
from diffperf.calibrate._calibration import constant_efficiency, constants_with_interval, lower_bounds
from diffperf.calibrate._choice import choose
from diffperf.calibrate._constants import CONSTANTS, FEATURE_EFFECTS, HARDWARE, NAMES, apply_to_system, natural, stack_from, unconstrained
from diffperf.calibrate._design import LEVELS, build_design
from diffperf.calibrate._evaluate import error_summary, update
from diffperf.calibrate._fit import balanced_weights, log_time_and_gradient
from diffperf.calibrate._memory_fit import FITTED, fit_memory, log_peak
from diffperf.calibrate._posterior import ROW_NOISE, UNSEEN_SHARE, Z80, Posterior
from diffperf.calibrate._residual import EXPERTS, points, residual_kernel
from diffperf.calibrate._user import OTHER, relabel
from diffperf.estimate import train_step
from diffperf.hardware import DATATYPES, describe, load_system, system_names
from diffperf.io import COLUMNS, RunFileError, read_runs, runs_from_records
from diffperf.parallel import make_plan
from diffperf.stack import describe_stack, load_stack, stack_names
from diffperf.workload import load_model

# -- fixtures -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shipped():
    return load_calibration()


@pytest.fixture(scope="session")
def posterior(few_rows, few_fit):
    return build_posterior(few_fit, few_rows)


@pytest.fixture(scope="session")
def small(few_rows, posterior):
    """A calibration of a few rows."""
    return Calibration(posterior, fit_memory(few_rows), constant_efficiency(few_rows), dict(date="today", data="a few runs"))


@pytest.fixture(scope="session")
def strangers(published_rows):
    """Ten runs of one stack, relabelled as a stack that nobody has seen."""
    at = [i for i in range(len(published_rows)) if published_rows.stack[i] == "nemo" and published_rows.weight[i] == 1]
    return relabel(published_rows.take(np.array(at[::4][:10])), "mine", "mcore")


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


# -- saved calibrations ---------------------------------------------------------------------------------------------------------------------


def test_saved_calibration_predicts_the_same(tmp_path, small, few_rows, strangers):
    path = tmp_path / "own.npz"
    small.save(path)
    back = load_calibration(path)
    for rows in (few_rows.take(slice(None, None, 9)), strangers):
        a, b = small.posterior.predict(rows), back.posterior.predict(rows)
        assert_allclose(b.mean, a.mean, atol=1e-4)
        assert_allclose(b.sd, a.sd, atol=1e-4)
    assert back.memory == small.memory and back.efficiency == small.efficiency and back.meta == small.meta
    observed = dataclasses.replace(small, posterior=small.posterior.observe(strangers))
    observed.save(path)
    assert load_calibration(path).posterior.rows.stack.count("mine") == len(strangers)  # the new file, not the one read before


def test_files_that_are_no_calibration_are_refused(tmp_path, small):
    good = tmp_path / "good.npz"
    small.save(good)
    whole = good.read_bytes()
    arrays = dict(np.load(good))
    bad = {
        "empty": b"",
        "text": b"date,time\n1,2\n",
        "truncated": whole[: len(whole) // 2],
        "head only": whole[:30],
        "flipped": whole[:2000] + bytes(255 - b for b in whole[2000:2400]) + whole[2400:],
    }
    for name, content in bad.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.npz: cannot be read as a calibration"):
            load_calibration(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "lacking.npz", **{k: v for k, v in arrays.items() if k != "width"})
    np.savez(tmp_path / "about.npz", **arrays | {"about": np.array("{}")})
    for name in ("one.npy", "lacking.npz", "about.npz", "missing.npz"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read as a calibration"):
            load_calibration(tmp_path / name)


def test_calibration_of_other_constants_is_refused(tmp_path, small):
    small.save(tmp_path / "good.npz")
    arrays = dict(np.load(tmp_path / "good.npz"))
    other_names = arrays | {"names": np.array(["speed", *NAMES[1:]])}
    effect = next(i for i, key in enumerate(arrays["keys"]) if "\tfeature\t" in key)
    other_keys = arrays | {name: np.delete(arrays[name], effect) for name in ("keys", "mean", "width", "parameters")}
    for i, changed in enumerate((other_names, other_keys)):
        np.savez(tmp_path / f"{i}.npz", **changed)
        with pytest.raises(ValueError, match="other constants than this version's"):
            load_calibration(tmp_path / f"{i}.npz")


# -- the shipped fit --------------------------------------------------------------------------------------------------------------------------

HANDFUL = ("tr0075", "tr0529", "tr1041", "tr1103", "tr1141", "tr1165", "tr1224", "tr1518", "tr1877", "tr2198", "vt0796")
"""One run each of MosaicML, Megatron-Bridge, NeMo, Megatron-Core, Korthikanti et al., SimuMax, torchtitan, BLOOM, MaxText, Neuron and vTrain."""


def test_shipped_calibration_knows_its_runs(shipped, published_rows):
    at = np.array([i for i, run in enumerate(published_rows.runs) if run.id in HANDFUL])
    assert len(at) == len(HANDFUL)
    rows = published_rows.take(at)
    prediction = shipped.posterior.predict(rows)
    assert_allclose(np.exp(prediction.mean - rows.log_time), 1.0, atol=0.25)
    assert_allclose(np.exp(prediction.physics - rows.log_time), 1.0, atol=0.35)
    assert (prediction.sd < 0.15).all()
    assert {"date", "data", "version", "jax"} <= set(shipped.meta)


def test_shipped_calibration_was_fitted_to_these_rows(shipped, published_rows):
    assert sorted(set(shipped.posterior.rows.stack)) == sorted(set(published_rows.stack))
    assert sorted(set(shipped.posterior.rows.accelerator)) == sorted(set(published_rows.accelerator))
    assert_allclose(shipped.efficiency, constant_efficiency(published_rows), rtol=0.02)


def test_fitted_rates_stay_below_the_datasheet(published_rows):
    """No rate of a chip above its datasheet; none under a stack that was measured on it by more than the interval of a fit."""
    fitted = {chip: load_system(chip) for chip in set(published_rows.accelerator)}
    stacks = {name: load_stack(name) for name in stack_names()}
    low_bits = {"fp8", "mxfp8", "nvfp4", "int8"}
    for chip, system in fitted.items():
        efficiency = dict(zip(DATATYPES, np.asarray(system.chip.matmul_efficiency), strict=True))
        assert max(efficiency.values()) <= 1.0 and system.chip.memory_efficiency <= 1 and system.chip.attention_efficiency <= 1, chip
        assert max(float(t.efficiency) for t in (system.scale_up, system.scale_out, system.spine)) <= 1, chip
    used = np.asarray(published_rows.plan.precision).argmax(axis=1)
    seen = {(c, s, DATATYPES[d]) for c, s, d, w in zip(published_rows.accelerator, published_rows.stack, used, published_rows.weight, strict=True) if w > 0}
    above = []
    for chip, name, datatype in sorted(seen):
        stack = stacks[name]
        share = float(fitted[chip].chip.matmul_efficiency[DATATYPES.index(datatype)] * stack.matmul_factor)
        share *= float(stack.low_precision_factor) if datatype in low_bits else 1.0
        if share > 1:
            above.append((chip, name, datatype, round(share, 3)))
    # the sum of arithmetic and traffic overcharges what overlaps; 8-bit matmuls on Hopper and vTrain's fp16 take it out of the rate
    assert all(share < 1.1 for *_, share in above) and len(above) <= 8, above


def test_interval_of_a_constant_covers_its_mode_and_widens_without_a_stack(few_fit, few_rows):
    own = constants_with_interval(few_fit, dict(family="fsdp", stack="torchtitan"))
    family = constants_with_interval(few_fit, dict(family="fsdp"))
    assert np.isfinite(own[0]).all() and (own[1] > 0).all()
    c = NAMES.index("matmul_factor")
    assert family[1][c] > own[1][c]


# -- validate ---------------------------------------------------------------------------------------------------------------------------------

KEYS = {"n_rows", "n_modelled", "skipped", "error", "baseline", "memory", "groups", "rows"}
ERROR = {"median", "mean", "p90", "bias"}
REQUIRED = dict(model_name="Llama 3.1 8B", accelerator="H100-80GB-SXM", num_devices=8)
PLAIN = REQUIRED | dict(id="a", source="me", year=2025, global_batch=64, seq_len=8192, step_time_s=4.5, tp=2, pp=1, micro_batch=1, framework="NeMo")


def table(*records):
    return runs_from_records(list(records))


def check_shape(result):
    assert KEYS <= set(result)
    assert result["n_rows"] == result["n_modelled"] + sum(result["skipped"].values())
    assert set(result["error"]) == set(result["baseline"]) == ERROR and ERROR <= set(result["memory"])
    assert len(result["rows"]) == result["n_modelled"] == sum(group["n"] for group in result["groups"])
    for row in result["rows"]:
        assert {"id", "measured_s", "predicted_s", "low_s", "high_s"} <= set(row)
        assert 0 < row["low_s"] < row["predicted_s"] < row["high_s"] < np.inf
    for group in result["groups"]:
        assert {"group", "n", "median", "bias"} <= set(group) and isinstance(group["group"], dict)
    json.dumps(result)


def test_validation_of_a_file_with_everything_in_it(tmp_path, small):
    cells = {
        "plain": {},
        "no degrees": dict(tp="", pp="", micro_batch=""),
        "unknown chip": dict(accelerator="Abacus"),
        "image model": dict(family="cnn", model_name="ResNet-50"),
        "unknown framework": dict(framework="my own trainer"),
        "no framework": dict(framework=""),
        "no time": dict(step_time_s=""),
        "no batch": dict(global_batch=""),
        "no architecture": dict(model_name="mystery"),
        "with memory": dict(peak_mem_gb=55),
        "not a number": dict(step_time_s="fast"),
        "not a time": dict(step_time_s=-1),
    }
    header = [*PLAIN, "family", "peak_mem_gb", "colour"]
    lines = [",".join(header)]
    lines += [",".join(str((PLAIN | dict(family="", peak_mem_gb="", colour="red") | new | dict(id=name))[h]) for h in header) for name, new in cells.items()]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    result = validate_runs(path, calibration=small)
    check_shape(result)
    assert {row["id"] for row in result["rows"]} == {"plain", "no degrees", "unknown framework", "no framework", "with memory"}
    assert result["n_rows"] == len(cells)
    assert result["skipped"]["accelerator 'Abacus' not in the catalog"] == 1 and result["skipped"]["no step time"] == 1
    assert sum(count for reason, count in result["skipped"].items() if reason.startswith("cell cannot be read")) == 2
    assert result["memory"]["n"] == 1 and 0 < result["memory"]["median"] < 1
    rows = {row["id"]: row for row in result["rows"]}
    width = {name: np.log(row["high_s"] / row["low_s"]) for name, row in rows.items()}
    assert width["unknown framework"] > width["plain"] and width["no framework"] > width["plain"]
    assert result["error"]["median"] < result["baseline"]["median"] + 0.5


def test_validation_of_a_single_row_and_of_only_the_required_columns(small):
    result = validate_runs(table(PLAIN), calibration=small)
    check_shape(result)
    assert result["n_modelled"] == 1 and result["error"]["median"] == result["error"]["mean"] == result["error"]["p90"]
    bare = validate_runs(table(REQUIRED), calibration=small)
    check_shape(bare)
    assert bare["n_modelled"] == 0 and bare["skipped"] == {"no step time": 1} and bare["rows"] == []
    assert all(np.isnan(bare["error"][key]) for key in ERROR)


def test_validation_uses_the_shipped_fit(shipped):
    result = validate_runs(table(PLAIN, PLAIN | dict(id="b", step_time_s=9.0)))
    check_shape(result)
    assert result["calibration"] == shipped.meta and result["groups"][0]["n"] == 2
    assert {row["measured_s"] for row in result["rows"]} == {4.5, 9.0}


def test_files_that_are_no_tables_are_refused(tmp_path):
    wrong_header = tmp_path / "wrong.csv"
    wrong_header.write_text("a,b\n1,2\n")
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    for path in (wrong_header, empty):
        with pytest.raises(RunFileError, match=path.name):
            validate_runs(path)
    with pytest.raises(FileNotFoundError, match="none.csv"):
        validate_runs(tmp_path / "none.csv")


# -- a user's own runs --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def own_runs(strangers):
    return tuple(strangers.runs)


@pytest.fixture(scope="session")
def report(own_runs, small):
    return calibrate_runs(own_runs[:3], family="mcore", stack="mine", calibration=small)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_calibration_from_one_row_upwards(own_runs, small, count):
    report = calibrate_runs(own_runs[:count], family="mcore", stack="mine", calibration=small)
    assert [row["id"] for row in report.rows] == [run.id for run in own_runs[:count]]
    for row in report.rows:
        assert 0 < row["after_low_s"] < row["after_s"] < row["after_high_s"] and row["before_low_s"] < row["before_s"] < row["before_high_s"]
        assert abs(np.log(row["after_s"] / row["measured_s"])) <= abs(np.log(row["before_s"] / row["measured_s"])) + 0.02
        assert np.log(row["after_high_s"] / row["after_low_s"]) < np.log(row["before_high_s"] / row["before_low_s"])
    assert len(report.proposals) == count and all(p["expected_error_after"] < p["expected_error_now"] for p in report.proposals)
    assert {c["name"] for c in report.constants} == set(describe_field_names())
    for c in report.constants:
        assert 0 < c["low"] <= c["value"] <= c["high"] and c["learned"] == (c["name"] not in report.unidentified)
    assert f"{count} runs used" in report.summary[0]
    json.dumps([report.rows, report.constants, report.proposals, report.summary, report.meta])


def describe_field_names():
    return [c.name for c in describe_stack("typical")[1]]


@pytest.mark.parametrize("family", [OTHER, ""])
def test_software_of_no_family(own_runs, small, family):
    report = calibrate_runs(own_runs[:2], family=family, stack="mine", calibration=small)
    assert report.meta["family"] == OTHER and any("weak prior" in line for line in report.summary)


def test_unknown_family_and_shipped_names_are_refused(own_runs, small):
    with pytest.raises(ValueError, match="family is 'mcroe'; it should be one of mcore"):
        calibrate_runs(own_runs[:1], family="mcroe", stack="mine", calibration=small)
    with pytest.raises(ValueError, match="'torchtitan', the name of a shipped stack.*my-torchtitan"):
        calibrate_runs(own_runs[:1], family="fsdp", stack="torchtitan", calibration=small)
    with pytest.raises(ValueError, match="stack is ''"):
        calibrate_runs(own_runs[:1], family="fsdp", stack="", calibration=small)
    with pytest.raises(ValueError, match="can be modelled"):
        calibrate_runs(table(REQUIRED), family="fsdp", stack="mine", calibration=small)


def test_candidates_are_proposed_without_times(own_runs, small):
    wished = [dataclasses.replace(run, id=f"wish {i}", step_time_s=None) for i, run in enumerate(own_runs[3:])]
    report = calibrate_runs(own_runs[:2], family="mcore", stack="mine", calibration=small, candidates=wished, propose=2)
    assert len(report.proposals) == 2 and all(p["id"].startswith("wish") and "devices" in p["reason"] for p in report.proposals)


def test_an_odd_cluster_widens_its_own_intervals(own_runs, small):
    twice = [dataclasses.replace(run, step_time_s=run.step_time_s * (3.0 if i % 2 else 0.4)) for i, run in enumerate(own_runs[:6])]
    calm, odd = (calibrate_runs(runs, family="mcore", stack="mine", calibration=small) for runs in (own_runs[:6], twice))
    width = lambda report: np.mean([np.log(row["after_high_s"] / row["after_low_s"]) for row in report.rows])
    assert width(odd) > 1.5 * width(calm)
    assert any("does not look like its family" in line for line in odd.summary)


def test_written_stack_is_used_and_narrows_the_interval(tmp_path, report, own_runs, small):
    path = tmp_path / "mine.toml"
    report.write(path)
    assert {p.name for p in tmp_path.iterdir()} == {"mine.toml", "mine.npz"}
    assert_allclose(float(load_stack(path).launch_time), float(report.stack.launch_time), rtol=1e-4)
    rows = relabel(prepare(own_runs[:1]), "mine", "mcore")
    model, system, plan = (jax.tree.map(lambda x: x[0], tree) for tree in (rows.model, rows.system, rows.plan))
    ask = lambda stack, calibration: predict_step(
        model, rows.accelerator[0], plan, stack, system=system, calibration=calibration, model_name=own_runs[0].model_name
    )
    for name in (path, str(path)):
        mine = ask(name, None)
        family = ask("family-mcore", small)
        assert np.log(mine.high_s / mine.low_s) < 0.8 * np.log(family.high_s / family.low_s)
        assert mine.low_s < own_runs[0].step_time_s < mine.high_s
    assert not any("no measured stack" in note for note in mine.notes) and any("no measured stack" in note for note in family.notes)


def test_a_stack_is_written_only_under_a_name_that_reads_as_one(tmp_path, report):
    with pytest.raises(ValueError, match="should end in .toml"):
        report.write(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


# -- one wished configuration -------------------------------------------------------------------------------------------------------------------


def llama(devices):
    return load_model("llama-3.1-8b"), make_plan(global_batch_size=128, data_parallel=devices // 2, tensor_parallel=2)


def test_prediction_of_a_measured_configuration_is_that_of_the_posterior(few_rows, small):
    at = next(i for i, s in enumerate(few_rows.stack) if s == "nemo")
    rows = few_rows.take(np.array([at]))
    rows = dataclasses.replace(rows, features=0 * rows.features)
    model, system, plan = (jax.tree.map(lambda x: x[0], tree) for tree in (rows.model, rows.system, rows.plan))
    step = predict_step(model, rows.accelerator[0], plan, "nemo", system=system, calibration=small, model_name=rows.runs[0].model_name)
    expected = small.posterior.predict(rows)
    assert_allclose(np.log([step.step_time_s, step.high_s / step.low_s]), [expected.mean[0], 2 * Z80 * expected.sd[0]], rtol=1e-9)
    assert step.low_s < step.step_time_s < step.high_s


def test_prediction_with_the_shipped_fit():
    model, plan = llama(64)
    step = predict_step(model, "h100_sxm", plan, "nemo", num_devices=64)
    assert 1 < step.low_s < step.step_time_s < step.high_s < 30
    assert float(step.estimate.lower_bound) < step.low_s
    assert abs(np.log(step.step_time_s / float(step.estimate.step_time))) < 0.3  # the estimate is the same model without its neighbours
    typical = predict_step(model, "h100_sxm", plan, num_devices=64)
    assert np.log(typical.high_s / typical.low_s) > np.log(step.high_s / step.low_s)
    assert any("no measured stack was named" in note for note in typical.notes)


@pytest.mark.parametrize("chip", ["gaudi2", "tpu_v3", "mi250x_gcd", "l4", "cpu"])
def test_chips_without_a_measured_run_are_predicted_and_said_to_be(chip, small):
    assert chip in system_names()
    model, plan = llama(8)
    step = predict_step(model, chip, plan, num_devices=8, calibration=small)
    assert 0 < step.low_s < step.step_time_s < step.high_s < np.inf
    assert any(f"no measured run on {chip}" in note for note in step.notes)
    measured = predict_step(model, "h100_sxm", plan, num_devices=8, calibration=small)
    assert np.log(step.high_s / step.low_s) > np.log(measured.high_s / measured.low_s)


def test_prediction_in_single_precision_agrees(small):
    model, plan = llama(8)
    double = predict_step(model, "h100_sxm", plan, "nemo", num_devices=8, calibration=small)
    with jax.enable_x64(False):
        model, plan = llama(8)
        single = predict_step(model, "h100_sxm", plan, "nemo", num_devices=8, calibration=small)
    assert_allclose([single.step_time_s, single.low_s, single.high_s], [double.step_time_s, double.low_s, double.high_s], rtol=1e-4)


# -- memory ---------------------------------------------------------------------------------------------------------------------------------------


def with_peaks(rows, log_peaks):
    runs = tuple(dataclasses.replace(run, peak_mem_gb=float(np.exp(p)) / 1e9) for run, p in zip(rows.runs, log_peaks, strict=True))
    return dataclasses.replace(rows, runs=runs)


def test_memory_fit_recovers_known_constants(published_rows):
    at = [i for i, s in enumerate(published_rows.stack) if s in ("torchtitan", "nemo", "llm-foundry")]
    rows = published_rows.take(np.array(at[::2]))
    truth = fit_memory(dataclasses.replace(rows, runs=tuple(dataclasses.replace(run, peak_mem_gb=None) for run in rows.runs)))
    truth["torchtitan"] |= dict(activation_memory=1.15, memory_fixed=1.2e9)
    truth["nemo"] |= dict(logit_bytes=8.0)
    noise = 0.01 * np.random.default_rng(0).normal(size=len(rows))
    measured = with_peaks(rows, log_peak(rows, truth) + noise)
    found = fit_memory(measured)
    assert np.abs(log_peak(rows, found) - log_peak(rows, truth)).mean() < 0.01
    assert_allclose(found["torchtitan"]["activation_memory"], 1.15, rtol=0.05)
    assert set(found) == {*rows.stack, ""}  # "": of a stack not among these


def test_memory_fit_ignores_one_wrong_peak_and_needs_none(few_rows):
    start = fit_memory(dataclasses.replace(few_rows, runs=tuple(dataclasses.replace(run, peak_mem_gb=None) for run in few_rows.runs)))
    assert set(start) == set(few_rows.stack)
    peaks = log_peak(few_rows, start)
    wrong = peaks.copy()
    wrong[10] += np.log(4)
    a, b = (fit_memory(with_peaks(few_rows, p)) for p in (peaks, wrong))
    assert np.abs(log_peak(few_rows, a) - log_peak(few_rows, b)).max() < 0.05
    assert np.abs(log_peak(few_rows, a) - peaks).max() < 0.01


def test_shipped_memory_constants_are_positive_and_near_their_physics(shipped):
    for stack, memory in shipped.memory.items():
        assert all(np.isfinite(v) and v > 0 for v in memory.values()), stack
        assert 0.5 < memory["activation_memory"] < 2 and 2 < memory["logit_bytes"] < 20 and memory["selective_memory"] < 1.5, (stack, memory)
        assert set(FITTED) <= set(memory)
    assert shipped.memory_of("never heard of", "mcore")["low_precision_storage"] == 1.0
    assert set(shipped.memory) == {*shipped.posterior.rows.stack, ""}


# -- files and columns ----------------------------------------------------------------------------------------------------------------------------


def test_prediction_uses_only_columns_of_the_table():
    assert {"zero_stage_or_fsdp", "inter_node_net", "framework", "notes"} <= set(COLUMNS)


def test_shipped_table_is_the_one_the_fit_names(shipped):
    from diffperf.io import published_runs_path

    runs = [run for run in read_runs(published_runs_path()) if run.family in ("dense-decoder", "moe") and run.weight > 0 and run.step_time_s]
    assert abs(int(str(shipped.meta["data"]).split()[0]) - len(runs)) <= 0.05 * len(runs)
