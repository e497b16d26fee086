"""An `Estimate` as plain numbers, as text and as HTML, without any library but NumPy.

Names of `to_dict` carry the unit, since they leave the library: `step_time_s`, `peak_memory_bytes`, `energy_j`, `cost_usd`.
"""

import html
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer

from .._units import bytes_text, digits, energy_text, money_text, percent, quantity, time_text

if TYPE_CHECKING:
    from ._estimate import Estimate

COMMUNICATION = ("tensor", "context", "expert", "pipeline", "data")
"""Parts of `Breakdown` that are exposed communication."""

_NAMES = {
    "step_time": "step_time_s",
    "tokens_per_s": "tokens_per_s",
    "tokens_per_s_per_device": "tokens_per_s_per_device",
    "mfu": "mfu",
    "hfu": "hfu",
    "peak_memory": "peak_memory_bytes",
    "peak_stage": "peak_stage",
    "memory_capacity": "memory_capacity_bytes",
    "energy": "energy_j",
    "cost": "cost_usd",
    "lower_bound": "lower_bound_s",
    "feasible": "feasible",
}


def is_traced(estimate: "Estimate") -> bool:
    """True inside `jit`, `vmap` or `grad`, where the numbers are not known."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(estimate))


def to_dict(estimate: "Estimate") -> dict[str, Any]:
    """Python numbers, or nested lists for a batched estimate."""
    plain = lambda leaf: np.asarray(leaf).tolist()
    parts = lambda module: {name: plain(getattr(module, name)) for name in _names(module)}
    result = {name: plain(getattr(estimate, field)) for field, name in _NAMES.items()}
    result["breakdown_s"] = parts(estimate.breakdown)
    result["exposed_communication_s"] = {name: result["breakdown_s"][name] for name in COMMUNICATION}
    result["memory_bytes"] = parts(estimate.memory)
    return result


def summary(estimate: "Estimate") -> list[tuple[str, str]]:
    """Label and value of the headline numbers of one estimate."""
    e = estimate
    exposed = {name: float(getattr(e.breakdown, name)) for name in COMMUNICATION}
    total = float(e.step_time)
    fits = "fits" if float(e.peak_memory) <= float(e.memory_capacity) else "DOES NOT FIT"
    rows = [
        ("step time", f"{time_text(total)}  (lower bound {time_text(float(e.lower_bound))})"),
        ("tokens per second", f"{quantity(float(e.tokens_per_s), '1')}  ({digits(float(e.tokens_per_s_per_device))} per device)"),
        ("MFU / HFU", f"{percent(float(e.mfu))} / {percent(float(e.hfu))}"),
        ("exposed communication", f"{time_text(sum(exposed.values()))}  ({percent(sum(exposed.values()) / total)})"),
        ("pipeline bubble", f"{time_text(float(e.breakdown.bubble))}  ({percent(float(e.breakdown.bubble) / total)})"),
        ("peak memory", f"{bytes_text(float(e.peak_memory))} of {bytes_text(float(e.memory_capacity))} on stage {float(e.peak_stage):.0f}  ({fits})"),
        ("energy / cost per step", f"{energy_text(float(e.energy))} / {money_text(float(e.cost))}"),
    ]
    if not bool(e.feasible):
        rows.append(("feasible", "no: the plan is not legal for this model and system" if fits == "fits" else "no: out of memory"))
    return rows


def _names(parts: Any) -> tuple[str, ...]:
    """Field names of a `Breakdown` or a `StageMemory`."""
    return getattr(parts, "_fields", None) or tuple(parts.__dataclass_fields__)


def shares(module: Any, total: float) -> list[tuple[str, float, float]]:
    """Name, value and share of the parts that are not zero, the largest first."""
    parts = [(name, float(getattr(module, name))) for name in _names(module)]
    return sorted(((name, value, value / total if total else 0.0) for name, value in parts if value), key=lambda row: -row[1])


def label(part: str) -> str:
    """A part of `Breakdown` or `StageMemory` in words: communication says so."""
    return f"{part} communication" if part in COMMUNICATION else part


def to_text(estimate: "Estimate") -> str:
    """A table of at most 80 columns; for a batch, its shape and the range of step times."""
    if np.ndim(estimate.step_time):
        times, fits = np.asarray(estimate.step_time), np.asarray(estimate.feasible)
        span = f"step time {time_text(times.min())} to {time_text(times.max())}"
        return f"Estimate of {times.size} configurations, shape {times.shape}: {span}, {fits.sum()} feasible"
    lines = [f"{title:<26}{value}" for title, value in summary(estimate)]
    lines.append("time")
    for name, value, share in shares(estimate.breakdown, float(estimate.step_time)):
        lines.append(f"  {label(name):<24}{time_text(value):>10}{percent(share):>8}  {'#' * round(30 * share)}".rstrip())
    lines.append("memory of the fullest stage")
    for name, value, share in shares(estimate.memory, float(estimate.peak_memory)):
        lines.append(f"  {name:<24}{bytes_text(value):>10}{percent(share):>8}  {'#' * round(30 * share)}".rstrip())
    return "\n".join(lines)


def to_html(estimate: "Estimate") -> str:
    """The same for notebooks; colours follow the page."""
    if np.ndim(estimate.step_time):
        return f"<pre>{html.escape(to_text(estimate))}</pre>"
    cell = '<td style="text-align:{};padding:2px 12px 2px 0">{}</td>'
    row = lambda *cells: "<tr>" + "".join(cell.format(align, html.escape(text)) for align, text in cells) + "</tr>"
    bar = lambda share: f'<td style="width:180px"><div style="background:#4c78a8;height:9px;width:{100 * share:.1f}%"></div></td>'

    def table(title, parts, total, text):
        body = "".join(
            row(("left", label(name)), ("right", text(value)), ("right", percent(share)))[:-5] + bar(share) + "</tr>"
            for name, value, share in shares(parts, total)
        )
        return (
            f'<table style="display:inline-table;margin-right:24px;vertical-align:top"><caption style="text-align:left"><b>{title}</b></caption>{body}</table>'
        )

    head = "".join(row(("left", title), ("left", value)) for title, value in summary(estimate))
    return (
        f"<div><table>{head}</table>"
        + table("Time", estimate.breakdown, float(estimate.step_time), time_text)
        + table("Memory of the fullest stage", estimate.memory, float(estimate.peak_memory), bytes_text)
        + "</div>"
    )
