"""Fitting the law of lost processors to overlap slowdowns: what is learned, from which rows, and bad input."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from typer.testing import CliRunner

from diffperf.calibrate import calibrate_overlap, load_overlap_fit
from diffperf.calibrate._overlap import is_tiled
from diffperf.cli._app import app
from diffperf.cli._main import is_users
from diffperf.cost.contention import NOMINAL_CONTENTION, sm_loss_ratio, taken_processors
from diffperf.io import RunFileError
from diffperf.io.traces import Slowdown, read_slowdowns, write_slowdowns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import overlap_law  # noqa: E402

LAUNCH_S = 3e-6


def rows_of(per_channel=1.4, evenness=0.2, noise=0.0, processors=132, channels=16, count=60, seed=0):
    """Kernels of 100 us alone, slowed as the law says."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(processors // 2, 6 * processors, count)
    law = np.asarray(sm_loss_ratio(blocks, processors, taken_processors(channels, 512, per_channel), evenness))
    beside = (LAUNCH_S + (100e-6 - LAUNCH_S) * law) * np.exp(noise * rng.standard_normal(count))
    return [Slowdown("sm90_xmma_gemm", int(b), 256, 1.0, 100e-6, float(t), 2, 2, "all_gather", channels, 512, "position", 0, "H", processors)
            for b, t in zip(blocks, beside)]  # fmt: skip


def test_constants_are_recovered():
    fit = calibrate_overlap(rows_of(noise=0.03))
    assert_allclose(fit.constants.processors_per_channel, 1.4, rtol=0.06)
    assert_allclose(fit.constants.evenness, 0.2, rtol=0.35)
    assert abs(np.log(fit.constants.evenness / 0.2)) < 3 * fit.sd.evenness < 1.2
    assert fit.held_out < 0.035 < fit.before and fit.held_out < fit.constant / 2
    assert fit.constants.spill == NOMINAL_CONTENTION.spill  # not determined by slowdowns
    draws = fit.draws(2000)
    assert_allclose(np.std(np.log(draws.processors_per_channel)), fit.sd.processors_per_channel, rtol=0.1)


def test_few_rows_stay_near_the_prior_and_know_less():
    few, many = calibrate_overlap(rows_of(noise=0.05, count=4)), calibrate_overlap(rows_of(noise=0.05))
    away = lambda fit: abs(np.log(fit.constants.processors_per_channel / NOMINAL_CONTENTION.processors_per_channel))
    assert away(few) < away(many) and few.sd.processors_per_channel > many.sd.processors_per_channel


def test_one_wild_kernel_hardly_moves_the_fit():
    rows = rows_of(noise=0.02)
    wild = [*rows[:-1], dataclasses.replace(rows[-1], time_with_s=4e-4)]
    assert_allclose(calibrate_overlap(wild).constants.processors_per_channel, calibrate_overlap(rows).constants.processors_per_channel, rtol=0.02)


def test_which_rows_are_used():
    rows = rows_of(count=10)
    replaced = [dataclasses.replace(rows[0], time_alone_s=5e-6), dataclasses.replace(rows[1], blocks=0), dataclasses.replace(rows[2], pairing="name"),
                dataclasses.replace(rows[3], kernel="vectorized_elementwise_kernel", time_with_s=1.5e-4)]  # fmt: skip
    fit = calibrate_overlap([*replaced, *rows[4:]])
    assert fit.rows == 6 and sorted(fit.left_out.values()) == [1, 1, 1]
    assert fit.others["count"] == 1 and fit.others["median"] == pytest.approx(1.5)
    assert calibrate_overlap([dataclasses.replace(row, pairing="name") for row in rows]).rows == 10  # better than nothing
    assert is_tiled("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64>") and is_tiled("Cijk_Ailk_Bljk_HHS_BH_MT256x128x32")
    assert not is_tiled("splitKreduce_gemm_kernel") and not is_tiled("cudnn::ops::nchwToNhwcKernel")


def test_a_kernel_as_short_as_its_launch_is_not_slowed():
    rows = rows_of(count=6)
    ratios = calibrate_overlap(rows).ratios([dataclasses.replace(rows[0], blocks=132, time_alone_s=time) for time in (1e-6, 3e-6, 30e-6)])
    assert_allclose(ratios[:2], 1.0, rtol=1e-9)
    assert ratios[2] > 1.2


def test_published_kernels():
    law = overlap_law.measure({"A100": overlap_law.published_rows()})["A100"]
    errors = law["errors"]
    assert errors["law of waves"] < 0.058 and errors["law of waves"] < min(errors["one ratio"], errors["share of processors"]) / 2.9
    assert 1.0 < law["processors_per_channel"] <= 1.5  # 96 blocks fit beside 8 channels of 108 processors, 100 do not
    assert 0.03 < law["floor"] < errors["law of waves"]


@pytest.mark.skipif(not overlap_law.FOLDER.is_dir(), reason="the shared traces (../shared/data/traces) are not on this machine")
def test_constants_of_one_gpu_hold_on_another():
    rows = overlap_law.read_rows(overlap_law.FOLDER)
    assert set(rows) == set(overlap_law.TRACES)
    for of in overlap_law.measure(rows).values():
        other = next(error for name, error in of["errors"].items() if name.startswith("law with constants"))
        assert other < 0.055 and other < of["errors"]["one ratio"] / 1.7


def test_files_round_trip(tmp_path):
    rows = rows_of(count=8)
    write_slowdowns(tmp_path / "overlap.csv", rows)
    again = read_slowdowns(tmp_path / "overlap.csv")
    assert [row.kernel for row in again] == [row.kernel for row in rows]
    assert_allclose([row.time_with_s for row in again], [row.time_with_s for row in rows], rtol=1e-6)
    fit = calibrate_overlap(again)
    fit.write(tmp_path / "fit.json")
    loaded = load_overlap_fit(tmp_path / "fit.json")
    assert_allclose(loaded.constants, fit.constants, rtol=1e-4)
    assert loaded.used == list(fit.used) and loaded.chip == "H"
    assert_allclose(loaded.ratios(again[:3]), fit.ratios(again[:3]), rtol=1e-3)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(time_alone_us="0"), "time_alone_us is 0"),
        (dict(time_with_us="fast"), "time_with_us is 'fast'"),
        (dict(blocks="1.5"), "blocks is 1.5; it should be whole"),
        (dict(channels=""), "channels is empty"),
        (dict(pairing="luck"), "pairing is 'luck'; it should be one of position, name"),
        (dict(time_alone_us="nan"), "time_alone_us is nan"),
    ],
)
def test_bad_cells_are_named(tmp_path, change, said):
    good = dict(kernel="gemm", blocks="200", time_alone_us="50", time_with_us="60", channels="8", channel_threads="512", pairing="position")
    lines = [",".join(good), ",".join(good.values()), ",".join((good | change).values())]
    (tmp_path / "overlap.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunFileError, match="line 3: ") as caught:
        read_slowdowns(tmp_path / "overlap.csv")
    assert said in str(caught.value)


def test_bad_rows_are_refused():
    rows = rows_of(count=6)
    with pytest.raises(ValueError, match="2 matmul or convolution kernels.*three are the least; 4 left out: alone shorter"):
        calibrate_overlap([*rows[:2], *[dataclasses.replace(row, time_alone_s=1e-6) for row in rows[2:]]])
    with pytest.raises(ValueError, match="several chips: 'A', 'H'"):
        calibrate_overlap([dataclasses.replace(rows[0], accelerator="A"), *rows[1:]])
    with pytest.raises(ValueError, match="no row is of the chip 'B'; the rows are of 'H'"):
        calibrate_overlap(rows, chip="B")
    with pytest.raises(ValueError, match="the rows say nothing for the processors"):
        calibrate_overlap([dataclasses.replace(row, num_sms=0) for row in rows])
    assert calibrate_overlap([dataclasses.replace(row, num_sms=0) for row in rows], processors=132).processors == 132
    with pytest.raises(ValueError, match="the rows and `processors` say 80 and 132"):
        calibrate_overlap(rows, processors=80)


def test_command(tmp_path):
    write_slowdowns(tmp_path / "overlap.csv", rows_of(count=20))
    run = lambda *words: CliRunner().invoke(app, ["calibrate", "overlap", *words])
    shown = run(str(tmp_path / "overlap.csv"), "--out", str(tmp_path / "fit.json"))
    assert shown.exit_code == 0 and "processors_per_channel" in shown.output and load_overlap_fit(tmp_path / "fit.json").rows == 20
    document = json.loads(run(str(tmp_path / "overlap.csv"), "--json").stdout)
    assert document["processors"] == 132 and len(document["predicted"]) == 20
    (tmp_path / "runs.csv").write_text("a,b\n1,2\n")
    refused = run(str(tmp_path / "runs.csv"))
    assert refused.exception is not None and is_users(refused.exception) and "has no column kernel" in str(refused.exception)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="is no overlap fit"):
        load_overlap_fit(tmp_path / "bad.json")
