"""Figures as plain Plotly JSON, without colours of the page: `_page.js` adds them for light and dark and redraws on a change."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._units import bytes_text, percent, quantity, time_text
from ..estimate import Elasticity, Estimate
from ..estimate._render import label, shares
from ._facts import unit_of
from ._tables import kind_of, short_path

BLUE, ORANGE, GREY, GREEN, PURPLE, RED, TEAL, PINK = "#4f86c6", "#e08a3c", "#8d949e", "#3fa37a", "#9877c4", "#cf5c50", "#3aa6b0", "#c9709f"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL, PINK, GREY)
_KIND = {"compute": BLUE, "communication": ORANGE, "idle and overhead": GREY}
_MEMORY = dict(zip(("weights", "gradients", "optimizer", "activations", "logits", "gathered", "reserved"), (BLUE, TEAL, PURPLE, ORANGE, GREEN, PINK, GREY)))


class Point(NamedTuple):
    """One measured run and its prediction.

    Attributes:
      id: of the row.
      label: model and accelerator, for the hover text.
      family: colour group.
      measured_s, predicted_s: step times. [s]
      baseline_s: prediction of the baseline, None where there is none. [s]
    """

    id: str
    label: str
    family: str
    measured_s: float
    predicted_s: float
    baseline_s: float | None = None


def _figure(data: list[dict[str, Any]], height: int, **layout: Any) -> dict[str, Any]:
    shape = {
        "height": height,
        "margin": {"l": 64, "r": 16, "t": 12, "b": 48},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    return {"data": data, "layout": shape | layout}


def scatter_figure(points: Sequence[Point]) -> dict[str, Any]:
    """Predicted over measured step time, both logarithmic; the band is 20% either way."""
    low = min(min(p.measured_s, p.predicted_s) for p in points) / 1.5
    high = max(max(p.measured_s, p.predicted_s) for p in points) * 1.5
    line = lambda factor, name, dash, show: {
        "x": [low, high], "y": [low * factor, high * factor], "mode": "lines", "name": name, "showlegend": show, "hoverinfo": "skip",
        "line": {"color": GREY, "width": 1, "dash": dash},
    }  # fmt: skip
    data = [line(1.0, "equal", "solid", False), line(1.2, "20% off", "dot", True), line(1 / 1.2, "", "dot", False)]
    families = sorted({p.family for p in points}, key=lambda family: -sum(p.family == family for p in points))
    for i, family in enumerate(families):
        own = [p for p in points if p.family == family]
        text = [
            f"{p.id}: {p.label}<br>measured {time_text(p.measured_s)}, predicted {time_text(p.predicted_s)} ({p.predicted_s / p.measured_s - 1:+.1%})"
            for p in own
        ]
        marker = {"size": 5, "opacity": 0.65, "color": PALETTE[i % len(PALETTE)]}
        data.append({"type": "scattergl" if len(own) > 3000 else "scatter", "mode": "markers", "name": family, "x": [p.measured_s for p in own],
                     "y": [p.predicted_s for p in own], "text": text, "hovertemplate": "%{text}<extra></extra>", "marker": marker})  # fmt: skip
    axis = lambda title: {
        "type": "log",
        "title": {"text": title},
        "range": [float(np.log10(low)), float(np.log10(high))],
        "dtick": 1,
        "exponentformat": "power",
    }
    return _figure(data, 460, xaxis=axis("measured step time [s]"), yaxis=axis("predicted step time [s]"))


def error_figure(points: Sequence[Point]) -> dict[str, Any]:
    """Histogram of the relative errors, over the baseline's, in bins of 5%; the last bin holds all beyond."""
    edges = np.arange(-100, 105, 5)
    centres = (edges[:-1] + edges[1:]) / 2

    def bars(errors, name, colour):
        counts, _ = np.histogram(np.clip(100 * np.asarray(errors), -99.9, 99.9), edges)
        text = [f"{left:+d}% to {left + 5:+d}%: {count} of {len(errors)} rows" for left, count in zip(edges[:-1], counts)]
        height = (counts / max(len(errors), 1)).tolist()
        return {"type": "bar", "name": name, "x": centres.tolist(), "y": height, "width": 5, "text": text, "textposition": "none",
                "hovertemplate": "%{text}<extra>" + name + "</extra>", "marker": {"color": colour, "opacity": 0.7}}  # fmt: skip

    data = []
    baseline = [p.baseline_s / p.measured_s - 1 for p in points if p.baseline_s is not None]
    if baseline:
        data.append(bars(baseline, "roofline with one efficiency", GREY))
    data.append(bars([p.predicted_s / p.measured_s - 1 for p in points], "diffperf", BLUE))
    return _figure(data, 460, barmode="overlay", bargap=0,
                   xaxis={"title": {"text": "error of the predicted step time"}, "ticksuffix": "%", "range": [-100, 100]},
                   yaxis={"title": {"text": "share of rows"}, "tickformat": ".0%"})  # fmt: skip


def breakdown_figure(estimate: Estimate) -> dict[str, Any]:
    """Parts of the step time, the largest on top."""
    total = float(estimate.step_time)
    rows = [row for row in shares(estimate.breakdown, total) if row[2] >= 5e-4][::-1]
    data = []
    for kind, colour in _KIND.items():
        own = [(label(name), value, share) for name, value, share in rows if kind_of(name) == kind]
        data.append({"type": "bar", "orientation": "h", "name": kind, "y": [r[0] for r in own], "x": [r[1] for r in own], "marker": {"color": colour},
                     "text": [f"{time_text(value)}  {percent(share)}" for _, value, share in own], "textposition": "outside", "cliponaxis": False,
                     "hovertemplate": "%{y}: %{text}<extra></extra>"})  # fmt: skip
    longest = max(value for _, value, _ in rows)
    return _figure(data, 70 + 27 * len(rows), margin={"l": 170, "r": 20, "t": 12, "b": 44}, barmode="stack",
                   xaxis={"title": {"text": "time in one step [s]"}, "range": [0, 1.25 * longest]},
                   yaxis={"categoryorder": "array", "categoryarray": [label(row[0]) for row in rows], "automargin": True})  # fmt: skip


def elasticity_figure(rows: Sequence[Elasticity], top: int = 16) -> dict[str, Any]:
    """Tornado: left of zero are numbers of which more is faster."""
    shown = list(rows[:top])[::-1]
    names = [short_path(row.path) for row in shown]
    text = [f"{row.path} = {quantity(row.value, unit_of(row.path))}: 1% more changes the step time by {row.elasticity:+.3f}%" for row in shown]
    data = [{"type": "bar", "orientation": "h", "y": names, "x": [row.elasticity for row in shown], "text": text, "textposition": "none",
             "hovertemplate": "%{text}<extra></extra>", "marker": {"color": [GREEN if row.elasticity < 0 else RED for row in shown]}}]  # fmt: skip
    return _figure(data, 70 + 25 * len(shown), margin={"l": 230, "r": 20, "t": 12, "b": 44}, showlegend=False,
                   xaxis={"title": {"text": "change of the step time in % per 1% more"}, "zeroline": True}, yaxis={"automargin": True})  # fmt: skip


def memory_figure(stages: Sequence[Mapping[str, float]], capacity: float) -> dict[str, Any]:
    """Memory of each pipeline stage, stacked by what it consists of, under the capacity of a device."""
    data = []
    for name, colour in _MEMORY.items():
        values = [stage[name] for stage in stages]
        if max(values) < 5e6:
            continue
        text = [f"stage {i}: {name} {bytes_text(value)}" for i, value in enumerate(values)]
        data.append({"type": "bar", "name": name, "x": list(range(len(stages))), "y": [value / 1e9 for value in values], "text": text, "textposition": "none",
                     "hovertemplate": "%{text}<extra></extra>", "marker": {"color": colour}})  # fmt: skip
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": capacity / 1e9, "y1": capacity / 1e9, "line": {"color": RED, "width": 1.5, "dash": "dash"}}
    note = {
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": capacity / 1e9,
        "yanchor": "bottom",
        "text": f"capacity {bytes_text(capacity)}",
        "showarrow": False,
        "font": {"color": RED},
    }
    ticks = {"dtick": 1} if len(stages) <= 24 else {}
    width = {"bargap": 0.35} if len(stages) > 2 else {"bargap": 0.7}
    return _figure(data, 380, barmode="stack", shapes=[line], annotations=[note], xaxis={"title": {"text": "pipeline stage"}, "zeroline": False, **ticks},
                   yaxis={"title": {"text": "memory per device [GB]"}, "rangemode": "tozero"}, **width)  # fmt: skip
