"""The tables of `trace`."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from .._units import bytes_text, digits, percent, quantity, time_text
from ..report._tables import table

_MOST_ROWS = 16


def tables(document: dict[str, Any], ranks: Sequence[Any], top: int) -> Iterator[Table]:
    """All that there is something to say about."""
    timed = [rank for rank in document["ranks"] if "nodes" not in rank]
    yield _ranks(timed)
    yield _kinds(timed)
    if document["steps"]:
        yield _steps(document["steps"])
    if document["stragglers"]:
        yield _stragglers(document["stragglers"])
    yield _kernels(timed, top)
    if any(rank["collectives"] for rank in timed):
        yield _collectives(timed)
    if document["comparison"] is not None:
        yield _comparison(document["comparison"])


def _columns(title: str, first: str, *rest: str) -> Table:
    result = table(title)
    result.add_column(first, overflow="fold")
    for name in rest:
        result.add_column(name, justify="right")
    return result


def _name(rank: dict[str, Any]) -> str:
    return "-" if rank["rank"] is None else str(rank["rank"])


def _ranks(ranks: Sequence[dict[str, Any]]) -> Table:
    result = _columns("Ranks", "rank", "span", "idle", "compute", "communic.", "exposed", "overlap", "memory", "launch wait")
    for rank in ranks[:_MOST_ROWS]:
        shares = [f"{time_text(rank[f'{part}_s'])}" for part in ("idle_time", "compute_time", "communication_time", "exposed_communication_time")]
        overlap = rank["overlap_fraction"]
        result.add_row(_name(rank), time_text(rank["span_s"]), *shares, "-" if math.isnan(overlap) else percent(overlap), time_text(rank["memory_time_s"]),
                       _time(rank["host"]["launch_to_start_s"]))  # fmt: skip
    if len(ranks) > _MOST_ROWS:
        result.caption = f"{len(ranks) - _MOST_ROWS} more in the JSON document"
    return result


def _kinds(ranks: Sequence[dict[str, Any]]) -> Table:
    result = _columns("By kind, mean over ranks", "kind", "busy", "beside another kind", "alone", "alone, of the span")
    span = sum(rank["span_s"] for rank in ranks)
    for kind in dict.fromkeys(kind for rank in ranks for kind in rank["by_kind"]):
        sums = [sum(rank["by_kind"].get(kind, {}).get(part, 0.0) for rank in ranks) for part in ("busy_s", "overlapped_s", "exposed_s")]
        result.add_row(kind, *(time_text(value / len(ranks)) for value in sums), percent(sums[-1] / span) if span > 0 else "-")
    return result


def _steps(steps: Sequence[dict[str, Any]]) -> Table:
    result = _columns("Steps", "rank, step", "to the next", "on the host", "idle", "compute", "exposed", "overlap")
    for step in steps[:_MOST_ROWS]:
        overlap = step["overlap_fraction"]
        result.add_row(f"{_name(step)} {step['name']}", *(time_text(step[part]) for part in ("period_s", "host_s", "idle_time_s", "compute_time_s")),
                       time_text(step["exposed_communication_time_s"]), "-" if math.isnan(overlap) else percent(overlap))  # fmt: skip
    if len(steps) > _MOST_ROWS:
        result.caption = f"{len(steps) - _MOST_ROWS} more in the JSON document"
    return result


def _stragglers(late: Sequence[dict[str, Any]]) -> Table:
    result = _columns("Stragglers: how late ranks came to the collectives they share", "rank", "came last", "mean lateness", "waited for others")
    for item in late[:_MOST_ROWS]:
        result.add_row(str(item["rank"]), f"{item['last']} of {item['collectives']}", time_text(item["mean_late_s"]), time_text(item["waited_s"]))
    return result


def _kernels(ranks: Sequence[dict[str, Any]], top: int) -> Table:
    result = _columns("Kernels, all ranks", "kernel", "kind", "count", "total", "mean", "beside", "TFLOP/s", "GB/s")
    sums: dict[tuple[str, str], list[float]] = {}
    rates: dict[tuple[str, str], tuple[float, float]] = {}
    for rank in ranks:
        for kernel in rank["kernels"]:
            key = kernel["name"], kernel["kind"]
            entry = sums.setdefault(key, [0, 0.0, 0.0])
            for k, value in enumerate((kernel["count"], kernel["total_s"], kernel["covered_share"] * kernel["total_s"])):
                entry[k] += value
            rates.setdefault(key, (kernel["flops_per_s"], kernel["bytes_per_s"]))
    rows = sorted(((key, value) for key, value in sums.items() if key[1] != "synchronisation"), key=lambda item: -item[1][1])
    for (name, kind), (count, total, beside) in rows[:top]:
        flops, moved = rates[name, kind]
        result.add_row(_short(name), kind[:7], f"{int(count):,}", time_text(total), time_text(total / count), percent(beside / total) if total else "-",
                       digits(flops / 1e12) if flops > 0 else "-", digits(moved / 1e9) if moved > 0 else "-")  # fmt: skip
    return result


def _collectives(ranks: Sequence[dict[str, Any]]) -> Table:
    from ..io import bus_factor

    result = _columns("Collectives by size, all ranks; the shortest waited least", "operation", "size", "ranks", "count", "shortest", "mean", "bus bandwidth")
    groups: dict[tuple[str, float, float], list[float]] = {}
    for rank in ranks:
        for call in rank["collectives"]:
            nbytes = -1.0 if math.isnan(call["nbytes"]) else call["nbytes"]
            groups.setdefault((call["op"] or "unknown", nbytes, call["ranks"]), []).append(float(call["duration_s"]))
    for (op, nbytes, members), times in sorted(groups.items(), key=lambda item: -sum(item[1]))[:_MOST_ROWS]:
        shortest = min(times)
        bus = nbytes / shortest * bus_factor(op, members) if nbytes > 0 and shortest > 0 else math.nan
        result.add_row(op, bytes_text(nbytes) if nbytes > 0 else "not recorded", digits(members) if members > 0 else "-", str(len(times)), time_text(shortest),
                       time_text(sum(times) / len(times)), quantity(bus, "B/s") if bus > 0 else "-")  # fmt: skip
    return result


def _comparison(compared: dict[str, Any]) -> Table:
    measured, predicted = compared["measured"], compared["predicted"]
    title = f"Beside the prediction of {compared['model']} on {compared['num_devices']} x {compared['system']}"
    result = _columns(title, "part", "recorded", "predicted", "ratio")
    for name, part in (("step", "step_time_s"), ("compute", "compute_s"), ("exposed communication", "exposed_communication_s"),
                       ("idle and overhead", "idle_and_overhead_s")):  # fmt: skip
        ratio = measured[part] / predicted[part] if predicted[part] > 0 else math.nan
        result.add_row(name, time_text(measured[part]), time_text(predicted[part]), "-" if math.isnan(ratio) else digits(ratio))
    result.caption = f"80% between {time_text(predicted['low_s'])} and {time_text(predicted['high_s'])}"
    return result


def _short(name: str) -> str:
    """The telling part of a kernel's name."""
    for word in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(word, "")
    return name[:56]


def _time(seconds: float) -> str:
    return "-" if math.isnan(seconds) else time_text(seconds)
