"""Numbers for people, tables at 80 columns, and a page that needs no network."""

import io
import json
import re

import jax
import numpy as np
import pytest
from rich.console import Console

from diffperf._units import bytes_text, count_text, digits, energy_text, money_text, percent, quantity, time_text
from diffperf.estimate import Elasticity, bind_step, bottleneck, elasticities, train_step
from diffperf.hardware import describe, load_system
from diffperf.parallel import make_plan
from diffperf.report import (
    Report,
    accuracy_table,
    better_by,
    better_table,
    breakdown_table,
    elasticity_table,
    headline_table,
    html_report,
    memory_by_stage,
    memory_table,
    plans_table,
    provenance_table,
    unit_of,
    whole_run,
)
from diffperf.report._figures import Point, error_figure, scatter_figure
from diffperf.report._tables import bar
from diffperf.tune import RankedPlan, describe_plan
from diffperf.workload import load_model


@pytest.fixture(scope="module")
def job(stack):
    model, system = load_model("llama-3.1-8b", 4096), load_system("h100_sxm", num_devices=64)
    plan = make_plan(global_batch_size=128, tensor_parallel=2, pipeline_parallel=8, data_parallel=4)
    return model, system, plan, stack


@pytest.fixture(scope="module")
def estimate(job):
    model, system, plan, stack = job
    return bind_step(model, system, stack)(plan)


def text_of(*parts, width=80):
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in parts:
        console.print(part)
    return console.export_text()


@pytest.mark.parametrize(
    "shown, text",
    [
        (digits(1234.5), "1,230"), (digits(0.99951), "1.00"), (digits(9.996), "10.0"), (digits(0.000123), "0.000123"), (digits(1.5e-7), "1.50e-7"),
        (digits(0), "0"), (digits(float("nan")), "n/a"), (digits(-2.5), "-2.50"), (time_text(0.0172), "17.2 ms"), (time_text(72.25), "72.2 s"),
        (time_text(8400), "2.33 h"), (time_text(9e5), "10.4 d"), (time_text(3e-6), "3.00 us"), (time_text(0), "0 s"), (time_text(0.9999), "1.00 s"),
        (bytes_text(8.55e10), "85.5 GB"), (quantity(9.894e14, "FLOP/s"), "989 TFLOP/s"), (quantity(9.999e11, "B/s"), "1.00 TB/s"), (quantity(8, "1"), "8"),
        (quantity(0.7, "1"), "0.700"), (quantity(12.29, "USD/h"), "$12.3/h"), (quantity(0, "W"), "0 W"), (count_text(15.6e12), "15.6T"),
        (count_text(8.03e9), "8.03B"), (count_text(512), "512"), (money_text(2.5e8), "$250M"), (money_text(0.37), "$0.370"), (percent(0.412), "41.2%"),
        (percent(0.0288), "2.88%"), (percent(0), "0.0%"), (energy_text(7.65e7), "21.2 kWh"), (energy_text(500), "500 J"),
    ],
)  # fmt: skip
def test_three_digits_and_a_unit(shown, text):
    assert shown == text


def test_every_number_of_a_system_and_a_stack_has_its_unit(job):
    for row in describe("h100_sxm"):
        assert unit_of(f"system.{row.path}") == row.unit, row.path
    assert unit_of("stack.launch_time") == "s" and unit_of("stack.memory_fixed") == "B" and unit_of("stack.matmul_factor") == "1"


def test_an_estimate_prints_itself(estimate):
    text = str(estimate)
    assert time_text(float(estimate.step_time)) in text and "MFU" in text and max(map(len, text.splitlines())) <= 80
    page = estimate._repr_html_()
    assert page.count("<table") == 3 and "peak memory" in page and "<script" not in page
    plain = json.loads(json.dumps(estimate.to_dict()))
    assert sum(plain["breakdown_s"].values()) == pytest.approx(plain["step_time_s"])
    assert sum(plain["memory_bytes"].values()) == pytest.approx(plain["peak_memory_bytes"])
    assert set(plain["exposed_communication_s"]) == {"tensor", "context", "expert", "pipeline", "data"}


def test_a_batched_or_traced_estimate_prints_too(job, estimate):
    many = jax.tree.map(lambda leaf: np.stack([leaf] * 3), estimate)
    assert str(many).startswith("Estimate of 3 configurations") and "<pre>" in many._repr_html_()
    assert len(many.to_dict()["breakdown_s"]["matmul"]) == 3
    seen = []
    jax.eval_shape(lambda *inputs: seen.append(str(train_step(*inputs))) or 0.0, *job)
    assert "Estimate(" in seen[0]


def test_stage_memory_peaks_where_the_estimate_says(job, estimate):
    model, _, plan, stack = job
    stages = memory_by_stage(model, plan, stack)
    totals = [sum(stage.values()) for stage in stages]
    assert len(stages) == 8 and max(totals) == pytest.approx(float(estimate.peak_memory)) and np.argmax(totals) == int(estimate.peak_stage)


def test_better_by_never_makes_it_slower(job, estimate):
    rows = elasticities(*job)
    better = better_by(*job, rows[:8], step_time=10.0)
    assert all(row.gain > 0 and row.step_time == pytest.approx(10.0 * (1 - row.gain)) for row in better)
    assert [row.gain for row in better] == sorted((row.gain for row in better), reverse=True)
    share = next(row for row in rows if row.path.endswith("memory_efficiency"))
    assert better_by(*job, [share])[0].better <= 1.0


def test_a_whole_run_is_consistent(estimate):
    run = whole_run(estimate, 1e12)
    assert run["steps"] * float(estimate.step_time) == pytest.approx(run["days"] * 86400)
    assert run["steps"] * 128 * 4096 == pytest.approx(1e12)


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal(job, estimate, width):
    model, _, plan, stack = job
    ranked = RankedPlan(plan, estimate, 1.0, describe_plan(plan))
    rows = elasticities(*job)
    errors = dict(median=0.04, mean=0.07, p90=0.15, bias=-0.01)
    parts = [headline_table(estimate, (1.0, 2.0), whole_run(estimate, 15e12)), breakdown_table(estimate), elasticity_table(rows),
             better_table(better_by(*job, rows[:3])), memory_table(memory_by_stage(model, plan, stack), float(estimate.memory_capacity)),
             plans_table([ranked] * 3, ranked, ranked), provenance_table(describe("gb200_nvl72"), "x"),
             accuracy_table([("MoE on GPU", 9, errors, errors)], "x")]  # fmt: skip
    text = text_of(*parts, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text  # nothing cut off
    assert bottleneck(estimate).startswith("Limited by")


def test_a_deep_pipeline_shows_both_ends_and_the_peak():
    stage = dict(weights=1e9, gradients=0.0, optimizer=0.0, activations=1e9, logits=0.0, gathered=0.0, reserved=0.0)
    stages = [stage | {"activations": 5e9 if i == 20 else 1e9} for i in range(64)]
    text = text_of(memory_table(stages, 80e9))
    assert "*20" in text and "..." in text and " 63 " in text and " 40 " not in text


def test_bars():
    assert bar(1.0, 4) == "████" and bar(0.5, 4) == "██" and bar(0.0, 4) == "" and bar(2.0, 4) == "████" and len(bar(0.03, 4)) == 1


def test_figures_count_every_row():
    points = [Point(f"r{i}", "x", "a" if i % 2 else "b", 1.0, 1.0 + 0.1 * i, 5.0) for i in range(10)]
    drawn = [trace for trace in scatter_figure(points)["data"] if trace.get("mode") == "markers"]
    assert sum(len(trace["x"]) for trace in drawn) == 10
    for trace in error_figure(points)["data"]:
        assert sum(trace["y"]) == pytest.approx(1.0)  # errors beyond the axis are in its last bin


def test_the_page_holds_everything(job, estimate):
    model, _, plan, stack = job
    ranked = RankedPlan(plan, estimate, 1.0, describe_plan(plan))
    evil = "</script><b>x</b>"
    errors = dict(median=0.04, mean=0.07, p90=0.15, bias=-0.01)
    page = html_report(Report(
        title=f"A {evil}", lead="lead", facts=[("a", evil)], estimate=estimate, interval=(1.0, 2.0), measured_s=1.5, bottleneck=bottleneck(estimate),
        elasticities=[Elasticity("system.chip.power", 1.0, -0.1)], stages=memory_by_stage(model, plan, stack),
        points=[Point("r1", evil, "mcore", 1.0, 1.1, 2.0)], accuracy=[("all", 1, errors, errors)], siblings=[("r2", 1.0, 1.1, 0.9, 1.3)],
        plans=[ranked], refined=ranked, reference=ranked, provenance=[("versions", "1")],
    ))  # fmt: skip
    assert len(page.encode()) < 6e6
    assert not re.search(r"<(script|link|img|iframe)[^>]*\b(src|href)\s*=", page) and "@import" not in page
    assert evil not in page.replace("<\\/", "</").split('id="figures">')[0]
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    assert set(figures) == {"scatter", "errors", "breakdown", "elasticities", "memory"}
    for name in figures:
        assert f'id="{name}"' in page
    assert page.count("<script") == 3 + page.count('"<script') or page.count("</script>") == 3


def test_the_smallest_page(estimate):
    page = html_report(Report(title="t", lead="l", facts=[], estimate=estimate))
    assert 'id="breakdown"' in page and 'id="scatter"' not in page and 'id="memory"' not in page
