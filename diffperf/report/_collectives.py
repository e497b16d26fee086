"""Plots of a log of collectives: bus bandwidth measured and expected over the size, in a terminal and as one HTML page."""

import math
from collections.abc import Sequence
from typing import Any

_WIDTH, _HEIGHT = 64, 14


def terminal_plot(verdict: Any) -> str:
    """Bus bandwidth over size, both logarithmic: `o` measured, `-` expected, `=` the link's peak."""
    rows = sorted(verdict.rows, key=lambda row: row.nbytes)
    factor = [row.bus_rate * row.measured_s for row in rows]
    expected = [f / row.expected_s for f, row in zip(factor, rows, strict=True)]
    rates = [value for value in [*expected, *(row.bus_rate for row in rows), verdict.link_peak] if value > 0]
    low, high = math.log(max(min(rates), max(rates) / 1e5)), math.log(max(rates))
    first, last = math.log(rows[0].nbytes), math.log(rows[-1].nbytes)
    column = lambda size: round((math.log(size) - first) / max(last - first, 1e-9) * (_WIDTH - 1))
    line = lambda rate: round((high - math.log(max(rate, math.exp(low)))) / max(high - low, 1e-9) * (_HEIGHT - 1))
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    grid[line(verdict.link_peak)] = ["="] * _WIDTH
    for row, rate in zip(rows, expected, strict=True):
        grid[line(rate)][column(row.nbytes)] = "-"
    for row in rows:
        grid[line(row.bus_rate)][column(row.nbytes)] = "o"
    top, bottom = math.exp(high) / 1e9, math.exp(low) / 1e9
    labels = [f"{top:8.3g} " if k == 0 else f"{bottom:8.3g} " if k == _HEIGHT - 1 else " " * 9 for k in range(_HEIGHT)]
    text = "\n".join(label + "|" + "".join(cells) for label, cells in zip(labels, grid, strict=True))
    return f"busbw in GB/s over {rows[0].nbytes:.0f} B to {rows[-1].nbytes:.4g} B; o measured, - expected, = link\n{text}"


def verdict_page(verdicts: Sequence[Any]) -> str:
    """One HTML page, all scripts inside: measured and expected time and bus bandwidth of each log."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = [f"{v.operation} of {v.name}: {kind}" for v in verdicts for kind in ("time", "bus bandwidth")]
    figure = make_subplots(rows=len(verdicts), cols=2, subplot_titles=titles)
    for k, verdict in enumerate(verdicts, 1):
        rows = sorted(verdict.rows, key=lambda row: row.nbytes)
        sizes = [row.nbytes for row in rows]
        text = [row.text for row in rows]
        expected = [row.bus_rate * row.measured_s / row.expected_s for row in rows]
        pairs = (([row.measured_s for row in rows], [row.expected_s for row in rows]), ([row.bus_rate for row in rows], expected))
        for column, (measured, wanted) in enumerate(pairs, 1):
            first = k == 1 and column == 1
            figure.add_trace(go.Scatter(x=sizes, y=measured, mode="markers", name="measured", text=text, marker_color="#d62728", showlegend=first), k, column)
            figure.add_trace(go.Scatter(x=sizes, y=wanted, mode="lines", name="expected", line_color="#1f77b4", showlegend=first), k, column)
        figure.add_hline(verdict.link_peak, line_dash="dot", row=k, col=2)
        figure.update_xaxes(type="log", title_text="bytes", row=k)
        figure.update_yaxes(type="log", title_text="s", row=k, col=1)
        figure.update_yaxes(type="log", title_text="B/s", row=k, col=2)
    figure.update_layout(height=420 * len(verdicts), title="; ".join(f"{v.name}: {v.state}" + (f" ({v.cause})" if v.cause else "") for v in verdicts))
    return figure.to_html(include_plotlyjs=True, full_html=True)
