"""Search finds what brute force finds, refinement never loses, errors name what to change, explanations equal finite differences."""

import itertools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffperf.estimate import _batch, bind_step, bottleneck, elasticities, train_step
from diffperf.hardware import DATATYPES, load_system
from diffperf.parallel import PlanError, check_plan, make_plan
from diffperf.tune import NoFeasiblePlan, PlanSpace, enumerate_plans, evaluate_plans, pareto, tune_plan
from diffperf.workload import transformer


def llama_8b(seq_len=8192):
    return transformer(hidden=4096, layers=32, num_heads=32, num_kv_heads=8, ffn_hidden=14336, vocab=128256, seq_len=seq_len)


def mixture():
    return transformer(
        hidden=2048, layers=24, num_heads=16, head_dim=128, num_experts=32, experts_per_token=4, expert_hidden=1024, vocab=32000, seq_len=4096
    )


step = jax.jit(train_step)
SMALL = PlanSpace(micro_batch_size=(1, 2), recompute=("none", "full"), zero_stage=(1, 3), virtual_stages=(1, 2), context_parallel=(1, 2))


@pytest.mark.parametrize("model", [llama_8b(), mixture()], ids=["dense", "experts"])
def test_the_search_finds_what_brute_force_finds(model, stack):
    system, n, batch = load_system("h100", num_devices=8), 8, 16
    best, feasible, legal = np.inf, 0, 0
    degrees = itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2), (1, 2, 4, 8, 16, 32), (1, 2))
    for t, p, c, v, e, micro in degrees:
        d = n // (t * p * c)
        if t * p * c * d != n or (v > 1 and (batch % (d * micro * p))):
            continue
        for recompute, zero in itertools.product(("none", "full"), (1, 3)):
            if d * c == 1 and zero != 1:
                continue
            plan = make_plan(
                global_batch_size=batch, tensor_parallel=t, pipeline_parallel=p, data_parallel=d, context_parallel=c, virtual_stages=v,
                expert_parallel=e, micro_batch_size=micro, recompute=recompute, zero_stage=zero,
            )  # fmt: skip
            try:
                check_plan(model, system, plan)
            except PlanError:
                continue
            estimate = step(model, system, plan, stack)
            legal += 1
            if estimate.feasible:
                feasible += 1
                best = min(best, float(estimate.step_time))
    found = tune_plan(model, system, stack, num_devices=n, global_batch_size=batch, space=SMALL, refine=False)
    assert (found.num_legal, found.num_feasible) == (legal, feasible) and feasible > 0
    np.testing.assert_allclose(found.best.objective, best, rtol=1e-5)
    np.testing.assert_allclose(step(model, system, found.best.plan, stack).step_time, best, rtol=1e-5)
    check_plan(model, system, make_plan(global_batch_size=batch, **found.best.words))  # words make the plan again
    order = [ranked.objective for ranked in found.ranked]
    assert order == sorted(order)


def test_every_enumerated_plan_uses_all_devices_and_passes_the_door():
    model, system = mixture(), load_system("a100", num_devices=64)
    plans, count = enumerate_plans(model, system, num_devices=64, global_batch_size=128)
    assert count == len(plans.tensor_parallel) > 100
    np.testing.assert_array_equal(plans.tensor_parallel * plans.pipeline_parallel * plans.context_parallel * plans.data_parallel, 64)
    for row in np.random.default_rng(0).choice(count, 30, replace=False):
        check_plan(model, system, jax.tree.map(lambda leaf, row=row: leaf[row], plans))
    rows = np.unique(np.stack([np.asarray(leaf).reshape(count, -1).sum(1) for leaf in jax.tree.leaves(plans)]), axis=1)
    assert rows.shape[1] > count / 4  # mostly distinct already by these coarse sums


def test_batched_evaluation_equals_single_calls_and_compiles_once(monkeypatch, stack):
    model, system = llama_8b(), load_system("h100", num_devices=32)
    plans, count = enumerate_plans(model, system, num_devices=32, global_batch_size=64)
    _batch._executable.cache_clear()
    monkeypatch.setattr(_batch, "train_step", chex.assert_max_traces(train_step, n=1))
    estimates = evaluate_plans(model, system, plans, stack)
    tune_plan(model, system, stack, num_devices=32, global_batch_size=64, refine=False)
    tune_plan(llama_8b(4096), load_system("a100", num_devices=64), stack, num_devices=64, global_batch_size=256, refine=False)
    for row in np.random.default_rng(1).choice(count, 5, replace=False):
        one = step(model, system, jax.tree.map(lambda leaf, row=row: leaf[row], plans), stack)
        for name in ("step_time", "peak_memory", "mfu", "energy"):
            np.testing.assert_allclose(getattr(estimates, name)[row], getattr(one, name), rtol=1e-5)
        assert estimates.feasible[row] == one.feasible


def test_objectives_rank_by_what_they_say(stack):
    model, system = llama_8b(), load_system("h100", num_devices=16)
    arguments = dict(num_devices=16, global_batch_size=64, refine=False)
    fast = tune_plan(model, system, stack, **arguments)
    lean = tune_plan(model, system, stack, objective="peak_memory", **arguments)
    own = tune_plan(model, system, stack, objective=lambda estimate: jnp.log(estimate.peak_memory), **arguments)
    assert lean.best.estimate.peak_memory < fast.best.estimate.peak_memory
    np.testing.assert_allclose(own.best.estimate.peak_memory, lean.best.estimate.peak_memory, rtol=1e-6)
    with pytest.raises(ValueError, match="objective is 'speed'.*step_time"):
        tune_plan(model, system, stack, objective="speed", **arguments)


def test_refinement_gains_where_memory_is_tight_and_never_loses(stack):
    # 40 GB hold this model only with most layers recomputed, or with a share of the activations on the host, which the space does not try.
    model, system = llama_8b(16384), load_system("a100_sxm_40", num_devices=16)
    fixed = {"context_parallel": 1, "pipeline_parallel": 1, "tensor_parallel": 1, "micro_batch_size": 1}
    found = tune_plan(model, system, stack, num_devices=16, global_batch_size=64, fixed=fixed)
    exhaustive = tune_plan(model, system, stack, num_devices=16, global_batch_size=64, fixed=fixed, refine=False)
    assert found.ranked[0].objective == exhaustive.best.objective
    assert found.best.objective <= exhaustive.best.objective
    assert found.best.estimate.feasible
    assert found.gain == pytest.approx(1 - found.best.objective / exhaustive.best.objective) and found.gain > 0
    layers = 32 * float(found.best.plan.recompute_full)
    assert layers == pytest.approx(round(layers), abs=1e-3)
    check_plan(model, system, found.best.plan)
    np.testing.assert_allclose(step(model, system, found.best.plan, stack).step_time, found.best.objective, rtol=1e-6)


def test_refinement_leaves_fixed_knobs_alone(stack):
    model, system = llama_8b(16384), load_system("a100_sxm_40", num_devices=16)
    fixed = {"pipeline_parallel": 1, "recompute": 0.5, "optimizer_offload": 0.0, "activation_offload": 0.0}
    found = tune_plan(model, system, stack, num_devices=16, global_batch_size=64, fixed=fixed)
    assert found.refined is None and found.gain == 0
    assert found.best.words["recompute"] == 0.5


def test_nothing_fits_says_by_how_much_and_what_would(stack):
    model, system = llama_8b(), load_system("h100", num_devices=64)
    fixed = {"tensor_parallel": 1, "pipeline_parallel": 1, "zero_stage": 0}
    with pytest.raises(NoFeasiblePlan, match=r"GB on pipeline stage 0, \d+\.\d GB more than the 8\d\.\d GB") as caught:
        tune_plan(model, system, stack, num_devices=64, global_batch_size=64, fixed=fixed)
    assert caught.value.shortfall > 0
    assert any(change.startswith("zero_stage") for change in caught.value.changes)
    for change in caught.value.changes:  # each change was evaluated: it does fit
        name, _, value = change.partition(" = ")
        if name in fixed:
            kept = fixed | {name: float(value) if name != "zero_stage" else int(value)}
            assert tune_plan(model, system, stack, num_devices=64, global_batch_size=64, fixed=kept, refine=False).num_feasible > 0


def test_nothing_fits_on_one_node_names_more_devices(stack):
    model = transformer(hidden=8192, layers=80, num_heads=64, num_kv_heads=8, ffn_hidden=28672, vocab=32000, seq_len=4096)
    with pytest.raises(NoFeasiblePlan, match="16 devices") as caught:
        tune_plan(model, load_system("h100", num_devices=8), stack, num_devices=8, global_batch_size=64, refine=False)
    assert "16 devices" in caught.value.changes


@pytest.mark.parametrize(
    "fixed, message",
    [
        ({"tensor_paralel": 8}, "tensor_paralel.*Near names: tensor_parallel"),
        ({"tensor_parallel": 3}, "with tensor_parallel = 3.*Without that restriction there are"),
        ({"tensor_parallel": range(1, 9), "micro_batch_size": 3}, "with micro_batch_size = 3"),
        ({"zero_stage": 7}, "zero_stage is 7; it should be 0, 1, 2 or 3"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0; it should be a whole number"),
        ({"recompute": "half"}, "recompute is 'half'"),
        ({"pipeline_parallel": []}, "pipeline_parallel has no values"),
        ({"precision": "nvfp4"}, "nvfp4, which this chip has no units for"),
    ],
)
def test_bad_restrictions_are_named(fixed, message):
    with pytest.raises(ValueError, match=message):
        enumerate_plans(llama_8b(), load_system("h100", num_devices=16), num_devices=16, global_batch_size=32, fixed=fixed)


def test_more_devices_than_the_system_has_are_refused(stack):
    with pytest.raises(ValueError, match="num_devices is 32; the system has 16"):
        tune_plan(llama_8b(), load_system("h100", num_devices=16), stack, num_devices=32, global_batch_size=32)


def test_float32_finds_the_same_plan(stack):
    arguments = dict(num_devices=16, global_batch_size=64, refine=False)
    double = tune_plan(llama_8b(), load_system("h100", num_devices=16), stack, **arguments)
    with jax.enable_x64(False):
        narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), stack)
        single = tune_plan(llama_8b(), load_system("h100", num_devices=16), narrow, **arguments)
    assert single.best.estimate.step_time.dtype == np.float32
    assert (single.num_legal, single.num_feasible) == (double.num_legal, double.num_feasible)
    np.testing.assert_allclose(single.best.objective, double.best.objective, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3).flatmap(lambda k: st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 2.0, 3.0, np.inf, np.nan])] * k), min_size=1, max_size=20)))
def test_pareto_keeps_exactly_the_points_that_nothing_beats(points):
    costs = np.array(points)
    finite = np.isfinite(costs).all(1)
    beaten = lambda x: any((y <= x).all() and (y < x).any() for y in costs[finite])
    np.testing.assert_array_equal(pareto(costs), [ok and not beaten(x) for ok, x in zip(finite, costs)])


def test_elasticities_equal_finite_differences(stack):
    with jax.enable_x64(True):
        model, system = llama_8b(), load_system("h100", num_devices=64)
        plan = make_plan(global_batch_size=128, tensor_parallel=4, pipeline_parallel=2, data_parallel=8)
        found = elasticities(model, system, plan, stack, wrt=("system", "stack", "plan"))
        magnitudes = [abs(row.elasticity) for row in found]
        assert magnitudes == sorted(magnitudes, reverse=True) and all(magnitudes)
        by_path = {row.path: row for row in found}
        inputs = (model, system, plan, stack)
        log_time = lambda inputs: float(jnp.log(step(*inputs).step_time))
        places = {
            "system.chip.peak_flops_per_s.bf16": (lambda i: i[1].chip.peak_flops_per_s, DATATYPES.index("bf16")),
            "system.chip.memory_bandwidth": (lambda i: i[1].chip.memory_bandwidth, ()),
            "system.scale_up.bandwidth": (lambda i: i[1].scale_up.bandwidth, ()),
            "stack.layer_factor": (lambda i: i[3].layer_factor, ()),
            "plan.micro_batch_size": (lambda i: i[2].micro_batch_size, ()),
        }
        h = 1e-5
        for path, (where, element) in places.items():
            moved = [eqx.tree_at(where, inputs, where(inputs).at[element].multiply(1 + step)) for step in (h, -h)]
            numeric = (log_time(moved[0]) - log_time(moved[1])) / (2 * h)
            assert by_path[path].elasticity == pytest.approx(numeric, rel=1e-5, abs=1e-7)
    assert "system.chip.peak_flops_per_s.fp8" not in by_path  # not used by a bf16 plan
    assert by_path["system.scale_up.bandwidth"].elasticity < 0


def test_explanations_name_their_arguments_when_wrong(stack):
    model, system, plan = llama_8b(), load_system("h100"), make_plan(global_batch_size=8, data_parallel=8)
    with pytest.raises(ValueError, match="wrt holds 'hardware'"):
        elasticities(model, system, plan, stack, wrt=("hardware",))
    with pytest.raises(ValueError, match="quantity is 'time'.*step_time"):
        elasticities(model, system, plan, stack, quantity="time")


def test_the_bottleneck_is_the_largest_part_or_the_missing_memory(stack):
    model, system = llama_8b(), load_system("h100", num_devices=64)
    fits = step(model, system, make_plan(global_batch_size=64, tensor_parallel=4, data_parallel=16, zero_stage=3), stack)
    assert bottleneck(fits).startswith("Limited by compute: matmuls take")
    bubbly = step(model, system, make_plan(global_batch_size=4, pipeline_parallel=16, data_parallel=4, zero_stage=3), stack)
    assert "bubble takes" in bottleneck(bubbly)
    full = step(model, system, make_plan(global_batch_size=64, data_parallel=64, zero_stage=0), stack)
    assert "Does not fit" in bottleneck(full) and "optimizer" in bottleneck(full)


def test_a_bound_step_is_the_step(stack):
    model, system, plan = llama_8b(), load_system("h100"), make_plan(global_batch_size=8, data_parallel=8, zero_stage=3)
    bound, plain = bind_step(model, system, stack)(plan), step(model, system, plan, stack)
    for one, other in zip(jax.tree.leaves(bound), jax.tree.leaves(plain)):
        np.testing.assert_allclose(one, other, rtol=1e-6)
