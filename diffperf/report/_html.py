"""One HTML file with everything inside: text, tables, figures and the library that draws them. Opens without a network."""

import dataclasses
import functools
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._units import bytes_text, count_text, digits, energy_text, gigabytes, money_text, percent, quantity, time_text
from ..estimate import Elasticity, Estimate
from ..estimate._render import COMMUNICATION
from ._facts import What, unit_of
from ._figures import Point, breakdown_figure, elasticity_figure, error_figure, memory_figure, scatter_figure
from ._tables import PLAN_HEADINGS, percent_of, plan_cells, plan_rows, short_path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a report shows; parts that are empty are left out.

    Attributes:
      title: heading of the page.
      lead: one or two sentences below it.
      facts: label and text of the run: model, system, layout, source.
      estimate: the prediction.
      interval: its 80% interval. [s]
      measured_s: measured step time. [s]
      siblings: further runs predicted by the same held-out fit: name, measured, predicted, low, high. [s]
      bottleneck: a sentence.
      elasticities, better: what it hangs on.
      stages: memory by stage. [B]
      points: measured runs with their held-out predictions.
      accuracy: label, number of rows, errors and the baseline's errors, as `accuracy_table` takes them.
      accuracy_note: how the rows were held out.
      plans, refined, reference: best plans of a search, the refined one, and one to compare with.
      plans_note: what was searched.
      provenance: label and text for the footer: versions, data, date.
    """

    title: str
    lead: str
    facts: Sequence[tuple[str, str]]
    estimate: Estimate
    interval: tuple[float, float] | None = None
    measured_s: float | None = None
    siblings: Sequence[tuple[str, float, float, float, float]] = ()
    bottleneck: str = ""
    elasticities: Sequence[Elasticity] = ()
    better: Sequence[What] = ()
    stages: Sequence[Mapping[str, float]] = ()
    points: Sequence[Point] = ()
    accuracy: Sequence[tuple[str, int, Mapping[str, float], Mapping[str, float]]] = ()
    accuracy_note: str = ""
    plans: Sequence[Any] = ()
    refined: Any = None
    reference: Any = None
    plans_note: str = ""
    provenance: Sequence[tuple[str, str]] = ()


def html_report(report: Report) -> str:
    """The file's text."""
    figures: dict[str, dict[str, Any]] = {}
    body = [_header(report)]
    if report.siblings:
        body.append(_siblings(report))
    if report.points:
        body.append(_accuracy(report, figures))
    body.append(_breakdown(report, figures))
    if report.elasticities:
        body.append(_sensitivity(report, figures))
    if report.stages:
        figures["memory"] = memory_figure(report.stages, float(report.estimate.memory_capacity))
        body.append(_section("Memory per pipeline stage", "Peak of one device of each stage.", _plot("memory")))
    if report.plans:
        body.append(_plans(report))
    footer = "".join(f"<dt>{_e(name)}</dt><dd>{_e(text)}</dd>" for name, text in report.provenance)
    data = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    read = lambda name: Path(__file__).with_name(name).read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(report.title)}</title><style>{read('_page.css')}</style></head><body><main>{''.join(body)}"
        f'<footer><dl class="facts">{footer}</dl></footer></main>'
        f'<script type="application/json" id="figures">{data}</script><script>{_plotly()}</script><script>{read("_page.js")}</script></body></html>\n'
    )


@functools.lru_cache(maxsize=1)
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


def _e(text: Any) -> str:
    return html.escape(str(text))


def _plot(name: str) -> str:
    return f'<div class="plot" id="{name}"></div>'


def _section(title: str, text: str, *content: str) -> str:
    return f'<section><h2>{_e(title)}</h2><p class="lead">{_e(text)}</p>{"".join(content)}</section>'


def _table(headings: Iterable[str], rows: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Rows are (class, cells); the first column is text."""
    head = "".join(f"<th>{_e(name)}</th>" for name in headings)
    body = "".join(f'<tr class="{kind}">' + "".join(f"<td>{_e(cell)}</td>" for cell in cells) + "</tr>" for kind, cells in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _header(report: Report) -> str:
    e = report.estimate
    total = float(e.step_time)
    exposed = sum(float(getattr(e.breakdown, name)) for name in COMMUNICATION)
    tiles = []
    between = f"80%: {time_text(report.interval[0])} to {time_text(report.interval[1])}" if report.interval else ""
    tiles.append(("predicted step", time_text(total), between))
    if report.measured_s:
        tiles.append(("measured step", time_text(report.measured_s), f"prediction is {total / report.measured_s - 1:+.1%}"))
    tiles += [
        ("tokens/s", count_text(float(e.tokens_per_s)), f"{digits(float(e.tokens_per_s_per_device))} per device"),
        ("MFU", percent(float(e.mfu)), f"HFU {percent(float(e.hfu))}"),
        ("exposed comm.", percent(exposed / total), f"bubble {percent(float(e.breakdown.bubble) / total)}"),
        ("peak memory", bytes_text(float(e.peak_memory)), f"of {bytes_text(float(e.memory_capacity))}, stage {float(e.peak_stage):.0f}"),
        ("cost of a step", money_text(float(e.cost)), energy_text(float(e.energy))),
    ]
    cards = "".join(f'<div class="tile"><span class="what">{_e(a)}</span><b>{_e(b)}</b><span>{_e(c)}</span></div>' for a, b, c in tiles)
    facts = "".join(f"<dt>{_e(name)}</dt><dd>{_e(text)}</dd>" for name, text in report.facts)
    return (
        f'<header><div class="brand">diffperf</div><h1>{_e(report.title)}</h1><p class="lead">{_e(report.lead)}</p>'
        f'<div class="tiles">{cards}</div><dl class="facts">{facts}</dl></header>'
    )


def _accuracy(report: Report, figures: dict[str, Any]) -> str:
    figures["scatter"], figures["errors"] = scatter_figure(report.points), error_figure(report.points)
    rows = []
    for name, count, ours, baseline in report.accuracy:
        cells = [percent_of(ours.get(key)) for key in ("median", "mean", "p90", "bias")]
        rows.append(("", [name, f"{count:,}", *cells, percent_of(baseline.get("median")), percent_of(baseline.get("p90"))]))
    headings = ("rows of", "rows", "median error", "mean", "p90", "bias", "baseline median", "baseline p90")
    return _section(
        "Accuracy on runs the fit has not seen",
        report.accuracy_note,
        f'<div class="pair"><div>{_plot("scatter")}</div><div>{_plot("errors")}</div></div>',
        _table(headings, rows) if rows else "",
    )


def _siblings(report: Report) -> str:
    rows = [("", [n, time_text(m), time_text(p), f"{time_text(low)} to {time_text(high)}", f"{p / m - 1:+.1%}"]) for n, m, p, low, high in report.siblings]
    text = "From the same source, predicted by the same fit, which has seen none of them."
    return _section("Other runs of the same model", text, _table(("run", "measured", "predicted", "80% interval", "error"), rows))


def _breakdown(report: Report, figures: dict[str, Any]) -> str:
    figures["breakdown"] = breakdown_figure(report.estimate)
    lower = float(report.estimate.lower_bound)
    text = f"{report.bottleneck} No implementation of this layout can take less than {time_text(lower)}, all arithmetic at datasheet peak."
    return _section("Where the step time goes", text.strip(), _plot("breakdown"))


def _sensitivity(report: Report, figures: dict[str, Any]) -> str:
    figures["elasticities"] = elasticity_figure(report.elasticities)
    rows = [
        ("", [short_path(r.path), quantity(r.value, unit_of(r.path)), quantity(r.better, unit_of(r.path)), time_text(r.step_time), percent(r.gain)])
        for r in report.better[:8]
    ]
    table = "<h3>10% better, one at a time</h3>" + _table(("number", "from", "to", "step time", "gain"), rows) if rows else ""
    text = "Derivatives of the whole model by one reverse-mode gradient. Left: more of it is faster. Right: more of it is slower."
    return _section("What the step time hangs on", text, _plot("elasticities"), table)


def _plans(report: Report) -> str:
    rows = []
    for at, (mark, plan) in enumerate(plan_rows(report.plans, report.refined, report.reference)):
        e = plan.estimate
        total = float(e.step_time)
        exposed = sum(float(getattr(e.breakdown, name)) for name in COMMUNICATION)
        numbers = [time_text(total), percent(float(e.mfu)), f"{gigabytes(float(e.peak_memory))} GB", percent(exposed / total),
                   percent(float(e.breakdown.bubble) / total), money_text(float(e.cost))]  # fmt: skip
        rows.append(("best" if at == 0 else "quiet" if mark == "run" else "", [mark, *plan_cells(plan.words), *numbers]))
    headings = ("", *PLAN_HEADINGS, "step time", "MFU", "memory", "exposed", "bubble", "cost")
    legend = (
        "tp, pp, dp, cp, ep: tensor, pipeline, data, context and expert parallel degree; vpp: chunks per stage; mbs: micro-batch; "
        "rec: recompute; zero: ZeRO stage."
    )
    if report.refined is not None:
        legend += " + is refined by gradients on the continuous knobs."
    if report.reference is not None:
        legend += " The last line is the layout it was measured with."
    return _section("Best plans for the same devices and batch", report.plans_note, _table(headings, rows), f'<p class="note">{_e(legend)}</p>')
