"""The tables of `trace`."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from .._units import bytes_text, digits, percent, quantity, time_text
from ..report._tables import table

_MOST_ROWS = 16
_WIDE = 100  # characters from which on a kernel's row has room for kind and mean
_WRAPPER = re.compile(
    r"^(void )?(cutlass::Kernel2?<(?=cutlass_))?|at::native::|\(anonymous namespace\)::|(?<=elementwise)_kernel(?=<)|\b(vectorized|unrolled)_(?=elementwise)"
)
_KINDS = {"communication": "comm."}


def tables(document: dict[str, Any], top: int, width: int) -> Iterator[Table]:
    """All that there is something to say about, for a terminal of `width` characters."""
    timed = [rank for rank in document["ranks"] if "nodes" not in rank]
    yield _ranks(timed)
    yield _kinds(timed)
    if document["steps"]:
        yield _steps(document["steps"])
    if document["stragglers"]:
        yield _stragglers(document["stragglers"])
    yield _kernels(timed, top, width)
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
    return ("-" if rank["rank"] is None else str(rank["rank"])) + ("" if rank["device"] is None else f", device {rank['device']}")


def _ranks(ranks: Sequence[dict[str, Any]]) -> Table:
    result = _columns("Ranks", "rank", "span", "idle", "compute", "comm.", "exposed", "overlap", "memory", "launch wait")
    for rank in ranks[:_MOST_ROWS]:
        shares = [f"{time_text(rank[f'{part}_s'])}" for part in ("idle_time", "compute_time", "communication_time", "exposed_communication_time")]
        overlap = rank["overlap_fraction"]
        result.add_row(_name(rank), time_text(rank["span_s"]), *shares, "-" if math.isnan(overlap) else percent(overlap), time_text(rank["memory_time_s"]),
                       _time(rank["host"]["launch_to_start_s"]))  # fmt: skip
    notes = [f"{len(ranks) - _MOST_ROWS} more in the JSON document"] if len(ranks) > _MOST_ROWS else []
    if any(rank["format"] == "kineto" for rank in ranks):
        notes.append("over all steps, unrounded; with the defaults of HolisticTraceAnalysis: as_hta in --json")
    result.caption = "; ".join(notes) or None
    return result


def _kinds(ranks: Sequence[dict[str, Any]]) -> Table:
    result = _columns("By kind" + (", mean over ranks" if len(ranks) > 1 else ""), "kind", "busy", "beside another kind", "alone", "alone, of the span")
    span = sum(rank["span_s"] for rank in ranks)
    for kind in dict.fromkeys(kind for rank in ranks for kind in rank["by_kind"]):
        sums = [sum(rank["by_kind"].get(kind, {}).get(part, 0.0) for rank in ranks) for part in ("busy_s", "overlapped_s", "exposed_s")]
        result.add_row(kind, *(time_text(value / len(ranks)) for value in sums), percent(sums[-1] / span) if span > 0 else "-")
    return result


def _steps(steps: Sequence[dict[str, Any]]) -> Table:
    result = _columns("Steps", "rank, step", "to the next", "on the host", "idle", "compute", "exposed", "overlap")
    for k, step in enumerate(steps[:_MOST_ROWS]):
        overlap, last = step["overlap_fraction"], k + 1 == len(steps) or _name(steps[k + 1]) != _name(step)
        name = Text(f"{_name(step)}  {step['name'].removeprefix('ProfilerStep').removeprefix('step ')}")
        result.add_row(name, "-" if last else time_text(step["period_s"]), *(time_text(step[part]) for part in ("host_s", "idle_time_s", "compute_time_s")),
                       time_text(step["exposed_communication_time_s"]), "-" if math.isnan(overlap) else percent(overlap))  # fmt: skip
    if len(steps) > _MOST_ROWS:
        result.caption = f"{len(steps) - _MOST_ROWS} more in the JSON document"
    return result


def _stragglers(late: Sequence[dict[str, Any]]) -> Table:
    result = _columns("Stragglers: how late ranks came to the collectives they share", "rank", "came last", "mean lateness", "waited for others")
    for item in late[:_MOST_ROWS]:
        result.add_row(str(item["rank"]), f"{item['last']} of {item['collectives']}", time_text(item["mean_late_s"]), time_text(item["waited_s"]))
    return result


def _kernels(ranks: Sequence[dict[str, Any]], top: int, width: int) -> Table:
    wide = width >= _WIDE
    result = _columns("Kernels" + (", all ranks" if len(ranks) > 1 else ""), "kernel", *(["kind"] if wide else []), "count", "total",
                      *(["mean"] if wide else []), "beside", "TFLOP/s", "GB/s")  # fmt: skip
    sums: dict[tuple[str, str], list[float]] = {}
    rates: dict[tuple[str, str], list[list[tuple[float, float]]]] = {}
    for rank in ranks:
        for kernel in rank["kernels"]:
            key = kernel["name"], kernel["kind"]
            entry = sums.setdefault(key, [0, 0.0, 0.0])
            for k, value in enumerate((kernel["count"], kernel["total_s"], kernel["covered_share"] * kernel["total_s"])):
                entry[k] += value
            for known, rate in zip(rates.setdefault(key, [[], []]), (kernel["flops_per_s"], kernel["bytes_per_s"])):
                known += [(rate, kernel["total_s"])] if rate > 0 else []
    rows = sorted(((key, value) for key, value in sums.items() if key[1] != "synchronisation"), key=lambda item: -item[1][1])[:top]
    names = labels([name for (name, _), _ in rows], max(width - (64 if wide else 44), 20))
    for label, ((name, kind), (count, total, beside)) in zip(names, rows):
        flops, moved = (sum(rate * time for rate, time in known) / max(sum(time for _, time in known), 1e-300) for known in rates[name, kind])
        waits = kind == "communication"  # its time holds the waiting for other ranks
        result.add_row(Text(label), *([_KINDS.get(kind, kind)] if wide else []), f"{int(count):,}", time_text(total),
                       *([time_text(total / count)] if wide else []), percent(beside / total) if total else "-",
                       digits(flops / 1e12) if flops > 0 else "-", digits(moved / 1e9) if moved > 0 and not waits else "-")  # fmt: skip
    return result


def _collectives(ranks: Sequence[dict[str, Any]]) -> Table:
    from ..io import bus_factor

    result = _columns("Collectives by size, all ranks; the shortest waited least", "operation", "size", "ranks", "count", "shortest", "mean", "bus bandwidth")
    groups: dict[tuple[str, float, float, bool], list[float]] = {}
    for rank in ranks:
        for call in rank["collectives"]:
            nbytes = -1.0 if math.isnan(call["nbytes"]) else call["nbytes"]
            guessed = call["recorded"] != "kernel" and not call["group"]
            groups.setdefault((call["op"] or "unknown", nbytes, call["ranks"] if call["ranks"] > 0 else -1.0, guessed), []).append(float(call["duration_s"]))
    shown = sorted(groups.items(), key=lambda item: -sum(item[1]))
    for (op, nbytes, members, guessed), times in shown[:_MOST_ROWS]:
        shortest = min(times)
        bus = nbytes / shortest * bus_factor(op, members) if nbytes > 0 and members > 0 and shortest > 0 else math.nan
        result.add_row(op, bytes_text(nbytes) if nbytes > 0 else "not recorded", f"{members:,.0f}{'?' * guessed}" if members > 0 else "-", f"{len(times):,}",
                       time_text(shortest), time_text(sum(times) / len(times)), quantity(bus, "B/s") if bus > 0 else "-")  # fmt: skip
    notes = [f"{len(shown) - _MOST_ROWS} more in the JSON document"] if len(shown) > _MOST_ROWS else []
    if any(key[3] and key[2] > 0 for key, _ in shown[:_MOST_ROWS]):
        notes.append("?: no group was recorded, the whole job is taken; rates of smaller groups are lower")
    result.caption = "; ".join(notes) or None
    return result


def _comparison(compared: dict[str, Any]) -> Table:
    measured, predicted = compared["measured"], compared["predicted"]
    title = f"Beside the prediction of {compared['model']} on {compared['num_devices']} x {compared['system']}"
    result = _columns(title, "part", "recorded", "predicted", "ratio")
    for name, part in (("step", "step_time_s"), ("compute", "compute_s"), ("exposed communication", "exposed_communication_s"),
                       ("idle and overhead", "idle_and_overhead_s")):  # fmt: skip
        ratio = measured[part] / predicted[part] if predicted[part] > 0 else math.nan
        result.add_row(name, time_text(measured[part]), time_text(predicted[part]), "-" if math.isnan(ratio) else digits(ratio))
    recorded = f"; recorded on {compared['recorded_on']}" if compared["recorded_on"] else ""
    result.caption = f"80% between {time_text(predicted['low_s'])} and {time_text(predicted['high_s'])}{recorded}"
    return result


def labels(names: Sequence[str], width: int) -> list[str]:
    """The telling part of each kernel's name, at most `width` characters. Names that differ stay different: long ones lose the middle, or what they share."""
    plain = [_plain(name) for name in names]
    tail = width // 3
    result = [name if len(name) <= width else f"{name[: width - tail - 1]}…{name[-tail:]}" for name in plain]
    for label in {label for label in result if result.count(label) > 1}:
        at = [i for i, other in enumerate(result) if other == label]
        same = len(os.path.commonprefix([plain[i] for i in at]))
        for k, i in enumerate(at, 1):
            head = f"{plain[i][: width // 3]}…{plain[i][max(same - 4, width // 3) :]}"[: width - 4]
            result[i] = head if sum(plain[j] == plain[i] for j in at) == 1 else f"{head[: width - 4]} ({k})"
    for label in {label for label in result if result.count(label) > 1}:
        for k, i in enumerate([i for i, other in enumerate(result) if other == label], 1):
            result[i] = f"{label[: width - 4]} ({k})"
    return result


def _plain(name: str) -> str:
    """Without words that stand in most names, and without the arguments of a C++ function."""
    if name.startswith("Mem"):  # a copy, which says in brackets between which memories
        return name
    short = _WRAPPER.sub("", name)
    depth = 0
    for i in range(len(short) - 1, -1, -1) if short.endswith(")") else ():
        depth += (short[i] == ")") - (short[i] == "(")
        if depth == 0:
            return short[:i] or short
    return short


def _time(seconds: float) -> str:
    return "-" if math.isnan(seconds) else time_text(seconds)
