"""Tables for the terminal, readable at 80 columns: three significant digits and a unit for every number."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .._units import bytes_text, count_text, digits, energy_text, gigabytes, money_text, percent, quantity, time_text
from ..estimate import Elasticity, Estimate
from ..estimate._render import COMMUNICATION, label, shares
from ..hardware import Provenance
from ._facts import What, unit_of

_EIGHTHS = " ▏▎▍▌▋▊▉"
_COMPUTE = ("matmul", "attention", "elementwise", "recompute", "vocabulary", "optimizer")
_SHORT = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "gathered": "gather", "reserved": "reserve"}
_MOST_STAGES = 20


def table(title: str | None = None, **settings: Any) -> Table:
    """An empty table in the house style."""
    return Table(title=title, title_justify="left", title_style="bold", **{"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)} | settings)


def bar(share: float, width: int = 24) -> str:
    """A bar of `share` of `width` characters."""
    eighths = round(max(min(share, 1.0), 0.0) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8].strip())


def kind_of(part: str) -> str:
    """compute, communication or other: the colour of a part of the breakdown."""
    return "compute" if part in _COMPUTE else "communication" if part in COMMUNICATION else "idle and overhead"


_COLOURS = {"compute": "blue", "communication": "dark_orange", "idle and overhead": "bright_black"}


def headline_table(estimate: Estimate, interval: tuple[float, float] | None = None, run: Mapping[str, float] | None = None) -> Table:
    """The numbers a person asks for first.

    Args:
      interval: 80% interval of the step time. [s]
      run: of `whole_run`.
    """
    e = estimate
    total = float(e.step_time)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    between = f"  80% between {time_text(interval[0])} and {time_text(interval[1])}" if interval else ""
    grid.add_row("step time", Text.assemble((time_text(total), "bold green"), between))
    grid.add_row("lower bound", f"{time_text(float(e.lower_bound))}  (all arithmetic at datasheet peak)")
    grid.add_row("throughput", f"{count_text(float(e.tokens_per_s))} tokens/s, {digits(float(e.tokens_per_s_per_device))} per device")
    grid.add_row("MFU / HFU", f"{percent(float(e.mfu))} / {percent(float(e.hfu))}")
    exposed = {name: float(getattr(e.breakdown, name)) for name in COMMUNICATION}
    kinds = ", ".join(f"{name} {time_text(value)}" for name, value in sorted(exposed.items(), key=lambda item: -item[1]) if value > 0)
    grid.add_row("exposed communication", f"{time_text(sum(exposed.values()))} ({percent(sum(exposed.values()) / total)})" + (f": {kinds}" if kinds else ""))
    grid.add_row("pipeline bubble", f"{time_text(float(e.breakdown.bubble))} ({percent(float(e.breakdown.bubble) / total)})")
    over = float(e.peak_memory) > float(e.memory_capacity)
    memory = f"{bytes_text(float(e.peak_memory))} of {bytes_text(float(e.memory_capacity))} on stage {float(e.peak_stage):.0f}"
    grid.add_row("peak memory", Text(memory + (", DOES NOT FIT" if over else ""), style="bold red" if over else ""))
    grid.add_row("energy and cost", f"{energy_text(float(e.energy))}, {money_text(float(e.cost))} per step")
    if run:
        price = f"{money_text(run['cost_usd'])}, {energy_text(run['energy_kwh'] * 3.6e6)}"
        grid.add_row(f"{count_text(run['tokens'])} tokens", f"{digits(run['days'])} days, {count_text(run['steps'])} steps, {price}")
    return grid


def breakdown_table(estimate: Estimate) -> Table:
    """Where the time goes, largest part first."""
    result = table("Where the step time goes", show_header=False)
    result.add_column("part")
    result.add_column("time", justify="right")
    result.add_column("share", justify="right")
    result.add_column("")
    rows = shares(estimate.breakdown, float(estimate.step_time))
    largest = max((share for _, _, share in rows), default=1.0)
    for name, value, share in rows:
        colour = _COLOURS[kind_of(name)]
        result.add_row(label(name), time_text(value), percent(share), Text(bar(share / largest), style=colour))
    return result


def memory_table(stages: Sequence[Mapping[str, float]], capacity: float) -> Table:
    """Memory of every pipeline stage in GB, the fullest marked."""
    totals = [sum(stage.values()) for stage in stages]
    peak = max(range(len(totals)), key=totals.__getitem__)
    parts = [name for name in stages[0] if any(stage[name] >= 5e6 for stage in stages)]
    result = table(f"Memory per device [GB], capacity {gigabytes(capacity)}")
    result.add_column("stage", justify="right")
    for name in parts:
        result.add_column(_SHORT.get(name, name), justify="right")
    result.add_column("total", justify="right", style="bold")
    result.add_column("full", justify="right")
    shown = range(len(stages)) if len(stages) <= _MOST_STAGES else sorted({*range(8), peak, *range(len(stages) - 8, len(stages))})
    before = -1
    for stage in shown:
        if stage != before + 1:
            result.add_row("...", *[""] * (len(parts) + 2))
        mark = "*" if stage == peak else ""
        style = ("red" if totals[stage] > capacity else "yellow") if stage == peak else None
        cells = [gigabytes(stages[stage][name]) for name in parts]
        result.add_row(f"{mark}{stage}", *cells, gigabytes(totals[stage]), percent(totals[stage] / capacity), style=style)
        before = stage
    result.caption, result.caption_justify = "* highest peak", "left"
    return result


def short_path(path: str) -> str:
    """A dotted path for people: what is not of the software or the plan is of the system."""
    return path.removeprefix("system.")


def elasticity_table(rows: Sequence[Elasticity], top: int = 15) -> Table:
    """Percent of change of the step time per percent of each number."""
    result = table("Elasticities: change of the step time in % when a number grows by 1%")
    result.add_column("number", overflow="fold")
    result.add_column("value", justify="right", no_wrap=True)
    result.add_column("effect", justify="right", no_wrap=True)
    result.add_column("", no_wrap=True)
    largest = max((abs(row.elasticity) for row in rows), default=1.0) or 1.0
    for row in rows[:top]:
        style = "green" if row.elasticity < 0 else "red"
        result.add_row(
            short_path(row.path), quantity(row.value, unit_of(row.path)), f"{row.elasticity:+.3f}", Text(bar(abs(row.elasticity) / largest, 14), style=style)
        )
    if len(rows) > top:
        result.caption, result.caption_justify = f"and {len(rows) - top} smaller ones", "left"
    return result


def better_table(rows: Sequence[What], top: int = 8, factor: float = 1.1) -> Table:
    """What one better number at a time would give."""
    result = table(f"What {factor - 1:.0%} better would give, one at a time")
    result.add_column("number", overflow="fold")
    result.add_column("from", justify="right", no_wrap=True)
    result.add_column("to", justify="right", no_wrap=True)
    result.add_column("step time", justify="right", no_wrap=True)
    result.add_column("gain", justify="right", no_wrap=True)
    for row in rows[:top]:
        unit = unit_of(row.path)
        result.add_row(short_path(row.path), quantity(row.value, unit), quantity(row.better, unit), time_text(row.step_time), percent(row.gain))
    return result


PLAN_HEADINGS = ("tp", "pp", "dp", "cp", "ep", "vpp", "mbs", "rec", "zero")
_PLAN_WORDS = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel", "virtual_stages", "micro_batch_size")


def plan_cells(words: Mapping[str, Any]) -> list[str]:
    """A plan in short, in the order of `PLAN_HEADINGS`: degrees, chunks per stage, micro-batch, recompute, ZeRO stage."""
    recompute = words["recompute"]
    short = {"selective": "sel"}.get(recompute, recompute) if isinstance(recompute, str) else f"{recompute:.0%}"
    return [f"{words[name]:g}" for name in _PLAN_WORDS] + [short, str(words["zero_stage"])]


def plan_rows(ranked: Iterable[Any], refined: Any = None, reference: Any = None) -> list[tuple[str, Any]]:
    """Plans with their marks: `+` refined, 1, 2, ... ranked, `run` the reference to compare with."""
    first = [("+", refined)] if refined is not None else []
    last = [("run", reference)] if reference is not None else []
    return first + [(str(i), plan) for i, plan in enumerate(ranked, 1)] + last


def plans_table(ranked: Iterable[Any], refined: Any = None, reference: Any = None) -> Table:
    """The best plans of a search, the one that gradients refined, and one to compare with."""
    rows = plan_rows(ranked, refined, reference)
    cells = [plan_cells(plan.words) for _, plan in rows]
    shown = [
        i for i, name in enumerate(PLAN_HEADINGS) if name in ("tp", "pp", "dp", "mbs", "rec") or any(row[i] != cells[0][i] or row[i] != "1" for row in cells)
    ]
    result = table("Best plans")
    result.add_column("", justify="right", no_wrap=True)
    for name in (*(PLAN_HEADINGS[i] for i in shown), "step", "MFU", "GB", "comm", "bubble"):
        result.add_column(name, justify="right", no_wrap=True)
    for at, (mark, plan) in enumerate(rows):
        e = plan.estimate
        total = float(e.step_time)
        exposed = sum(float(getattr(e.breakdown, name)) for name in COMMUNICATION)
        shares_of = [f"{exposed / total:.0%}", f"{float(e.breakdown.bubble) / total:.0%}"]
        numbers = [time_text(total), f"{100 * float(e.mfu):.1f}%", gigabytes(float(e.peak_memory)), *shares_of]
        result.add_row(mark, *(cells[at][i] for i in shown), *numbers, style="bold green" if at == 0 else "dim" if mark == "run" else None)
    notes = ["rec: recompute; comm, bubble: share of the step exposed or idle"]
    if refined is not None:
        moved = [f"{name} = {refined.words[name]:.3g}" for name in ("optimizer_offload", "activation_offload") if refined.words.get(name)]
        notes.insert(0, "+ refined by gradients" + (f": {', '.join(moved)}" if moved else ""))
    if reference is not None:
        notes.append("run: the layout it was measured with")
    result.caption, result.caption_justify = "; ".join(notes), "left"
    return result


def provenance_table(rows: Iterable[Provenance], title: str) -> Group:
    """Every number of a system: value, prior, fit with interval, and its source by number, with the list of sources below."""
    result = table(title)
    result.add_column("number", no_wrap=True)
    result.add_column("value", justify="right", no_wrap=True)
    result.add_column("prior", justify="right", no_wrap=True)
    result.add_column("fitted (80% interval)", justify="right", overflow="fold")
    result.add_column("source", justify="right", style="dim")
    sources: dict[str, int] = {}
    for row in rows:
        if row.value == 0 and row.path.startswith(("chip.peak", "chip.matmul")):
            continue
        show = lambda value, unit=row.unit: quantity(value, unit)
        fitted = "" if row.fitted is None else show(row.fitted)
        if row.fitted is not None and row.low is not None and row.high is not None:
            fitted += f" ({digits(row.low)}-{digits(row.high)})" if row.unit == "1" else f" ({show(row.low)} - {show(row.high)})"
        source = sources.setdefault(row.source, len(sources) + 1)
        result.add_row(row.path, show(row.value), show(row.prior) if row.fitted is not None else "", fitted, str(source))
    listed = Table.grid(padding=(0, 1))
    listed.add_column(justify="right", style="dim")
    listed.add_column(style="dim", overflow="fold")
    for source, number in sources.items():
        listed.add_row(str(number), Text(source))
    return Group(result, Text("Sources", style="bold"), listed)


def accuracy_table(rows: Iterable[tuple[str, int, Mapping[str, float], Mapping[str, float]]], title: str) -> Table:
    """Errors beside those of the baseline.

    Args:
      rows: label, number of rows, and two mappings with `median`, `mean`, `p90` and `bias` as fractions: ours and the baseline's.
    """
    result = table(title)
    result.add_column("rows of")
    result.add_column("n", justify="right")
    for name in ("median", "mean", "p90", "bias"):
        result.add_column(name, justify="right")
    result.add_column("baseline median", justify="right", style="dim")
    result.add_column("p90", justify="right", style="dim")
    for name, count, ours, baseline in rows:
        cells = [percent_of(ours.get(key)) for key in ("median", "mean", "p90", "bias")]
        result.add_row(name, f"{count:,}", *cells, percent_of(baseline.get("median")), percent_of(baseline.get("p90")))
    return result


def percent_of(value: float | None) -> str:
    """A fraction in percent with one decimal, or a dash."""
    return "-" if value is None else f"{100 * value:.1f}%"
