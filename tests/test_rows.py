"""Measured runs as inputs: nothing dropped silently, rows stay aligned."""

import jax
import numpy as np
import pytest
from one_run import one, run

from diffperf.calibrate import SkipRun, prepare
from diffperf.calibrate._frameworks import FAMILIES
from diffperf.io import published_runs_path, read_runs
from diffperf.workload import num_parameters

# -- the published table --------------------------------------------------------------------------------------------------------------


def test_every_published_row_is_modelled_or_counted(published_rows):
    runs = read_runs(published_runs_path())
    assert len(published_rows) + published_rows.skipped.total() == len(runs)
    decoders = [r for r in runs if r.family in ("dense-decoder", "moe") and r.step_time_s]
    not_decoders = sum(n for reason, n in published_rows.skipped.items() if reason.startswith("family"))
    assert not_decoders == sum(r.family not in ("dense-decoder", "moe") for r in runs)
    assert len(published_rows) >= 0.95 * len(decoders)  # at most 5% skipped


def test_leaves_share_the_leading_axis_and_hold_no_nan(published_rows):
    n = len(published_rows)
    for tree in (published_rows.model, published_rows.system, published_rows.plan):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path)
            assert leaf.shape[0] == n and leaf.dtype == np.float64, name
            assert not np.isnan(leaf).any() and (leaf >= 0).all(), name
            assert np.isfinite(leaf).all() or name in (".blocks.window", ".shard_group"), name  # inf: all keys, all ranks
    for field in ("runs", "log_time", "weight", "stack", "family", "generation", "accelerator", "features", "groups"):
        assert len(getattr(published_rows, field)) == n, field
    assert np.isfinite(published_rows.log_time).all() and np.isfinite(published_rows.features).all()
    assert set(published_rows.family) <= {*FAMILIES, ""} and "" not in published_rows.stack


def test_degrees_multiply_to_the_devices_and_the_batch_divides(published_rows):
    p = published_rows.plan
    devices = p.tensor_parallel * p.pipeline_parallel * p.context_parallel * p.data_parallel
    np.testing.assert_allclose(devices, [r.num_devices for r in published_rows.runs], rtol=1e-9)
    micro_batches = p.global_batch_size / (p.data_parallel * p.micro_batch_size)
    assert (micro_batches >= 1 - 1e-9).all()


def test_printed_architecture_is_kept(published_rows):
    m = published_rows.model
    for i, r in enumerate(published_rows.runs):
        for printed, used in ((r.layers, m.blocks.count[i].sum()), (r.hidden, m.hidden[i]), (r.vocab, m.vocab[i])):
            assert printed is None or printed == used, r.id
    parameters = np.asarray(jax.vmap(num_parameters)(m)) / 1e9
    printed = np.array([r.params_b or np.nan for r in published_rows.runs])
    off = np.abs(parameters / printed - 1)
    assert np.nanmedian(off) < 0.01
    # vTrain's counts leave out the embedding, and MosaicML's small models print counts of another vocabulary
    stray = {r.model_name for r, o in zip(published_rows.runs, off, strict=True) if o > 0.1 and not r.model_name.startswith("GPT-h")}
    assert stray <= {"MPT-125m", "MPT-350m", "BLOOM-candidate-18B"}


def test_take_keeps_rows_aligned(published_rows):
    mask = np.array([s == "torchtitan" for s in published_rows.stack])
    picks = (slice(3, 9), np.array([5, 2, 2, 7]), mask, slice(None, None, -400))
    for index in picks:
        taken, where = published_rows.take(index), np.arange(len(published_rows))[index]
        assert [r.id for r in taken.runs] == [published_rows.runs[i].id for i in where]
        np.testing.assert_array_equal(taken.log_time, published_rows.log_time[where])
        np.testing.assert_array_equal(taken.plan.global_batch_size, [r.global_batch for r in taken.runs])
        np.testing.assert_array_equal(taken.features, published_rows.features[where])
        assert taken.stack == tuple(published_rows.stack[i] for i in where)
        assert taken.groups == tuple(r.group for r in taken.runs)
        assert jax.tree.leaves(taken.model)[0].shape[0] == len(taken) == len(where)
    assert len(published_rows.take(np.zeros(len(published_rows), bool))) == 0


def test_a_row_does_not_depend_on_the_rows_beside_it(published_rows):
    known = [r for r in published_rows.runs if r.tp and r.pp][::200]
    together = prepare(tuple(known))
    for i, r in enumerate(known):
        alone, beside = prepare((r,)), together.take(np.array([i]))
        for a, b in zip(jax.tree.leaves((alone.model, alone.system, alone.plan)), jax.tree.leaves((beside.model, beside.system, beside.plan)), strict=True):
            np.testing.assert_array_equal(a, b)


# -- rows that cannot be modelled ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cells, reason",
    [
        (dict(accelerator="Abacus 9000"), "accelerator 'Abacus 9000' not in the catalog"),
        (dict(accelerator=""), "accelerator '' not in the catalog"),
        (dict(model_name="mystery", layers=None, hidden=None), "no architecture"),
        (dict(model_name="mystery", layers=None, hidden=None, params_b=8, experts=8), "mixture of experts without an architecture"),
        (dict(num_devices=None), "no device count"),
        (dict(num_devices=0.0), "no device count"),
        (dict(global_batch=None), "no global batch"),
        (dict(step_time_s=None), "no step time"),
        (dict(precision="bf17"), "precision 'bf17' is not known; it should be one of fp32, tf32, fp16, bf16"),
        (dict(family="cnn"), "family cnn is not modelled"),
        (dict(family="Diffusion-Transformer"), "family diffusion-transformer is not modelled"),
        (dict(notes="STEP TIME NOT SEPARABLE: includes evaluation"), "step time not separable"),
        (dict(model_name="mine", experts=8.0, topk=9.0), "no model or plan fits the row: transformer: experts_per_token is 9.0"),
    ],
)
def test_reason_of_a_skipped_run(cells, reason):
    with pytest.raises(SkipRun, match=reason) as caught:
        one(**cells)
    assert caught.value.reasons.total() == 1 and next(iter(caught.value.reasons)).startswith(reason.split(":")[0])
    rows = prepare((run(**cells), run(id="good")))  # one bad run does not take the others with it
    assert len(rows) == 1 and rows.runs[0].id == "good" and rows.skipped == caught.value.reasons


def test_wished_runs_need_no_step_time():
    rows = prepare((run(step_time_s=None),), need_time=False)
    assert len(rows) == 1 and np.isnan(rows.log_time[0])


def test_markers_set_the_weight():
    rows = prepare((run(), run(notes="WEIGHT 0.3: one of two readings"), run(notes="LEFT OUT: duplicate")))
    np.testing.assert_array_equal(rows.weight, [1.0, 0.3, 0.0])


def test_no_runs_at_all():
    with pytest.raises(SkipRun, match="none of 0 rows"):
        prepare(())
