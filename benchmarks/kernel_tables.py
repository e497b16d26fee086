"""Tables of the kernel and collective models for the documentation: held-out errors, errors on a new chip, and fitted constants with their meaning.

Used by `update_docs.py`. Errors come from `docs/data/accuracy_kernels.json` and `docs/data/accuracy_collectives.json`, constants from the fitted files that
ship with the package, their meaning from the docstrings. Where a file is not there yet, the text says which command makes it.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffperf.cost.kernel import CONVOLUTION_PRIORS, FAMILIES, SPARSE_PRIORS, ConvolutionConstants, SparseConstants
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._library import shipped

DATA = Path(__file__).resolve().parent.parent / "docs" / "data"
COMMAND = "python benchmarks/accuracy_{0}.py FOLDER --json docs/data/accuracy_{0}.json"
SAYS = 0.5  # a set says something about a constant where its rows explain more than this share of the prior
GROUPS = {
    "matmul": ("matmul", "matmul_quantised", "matmul_fp32", "mla_bmm"),
    "attention": ("attention_prefill", "encoder_attention", "mla_prefill", "attention_backward"),
    "decode": ("attention_decode",),
    "mla-decode": ("mla_decode",),
    "moe": ("moe_ffn",),
    "grouped": ("grouped_matmul",),
    "streaming": ("streaming",),
}
"""Families that share constants, each group one table of `docs/kernels.md`."""


def table(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *body))


def read(name: str) -> dict[str, Any] | None:
    """The figures of `accuracy_<name>.py`; none where they were not made yet."""
    path = DATA / f"accuracy_{name}.json"
    if not path.exists():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    for row in result.get("transfer", []):  # JSON turned the counts of revealed rows into text
        row["errors"] = {int(count): error for count, error in row["errors"].items()}
    return result


def missing(name: str) -> str:
    """What to write in place of figures that are not there."""
    return f"Not measured yet; `{COMMAND.format(name)}` fills this in."


def kernels_accuracy() -> str:
    """All tables of `accuracy_kernels.py`, with the rows used and left out."""
    result = read("kernels")
    if result is None:
        return missing("kernels")
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import accuracy_kernels

    parts = [f"**{title}**\n\n{table(header, body)}" for title, header, body in accuracy_kernels.tables(result)]
    if "n_rows" in result:
        reasons = "\n".join(f"- {count:,}: {reason}" for reason, count in result["skipped"].items())
        parts.append(f"{result['n_used']:,} of {result['n_rows']:,} measured kernels are modelled. Left out:\n\n{reasons}")
    return "\n\n".join(parts)


def kernels_shortfalls() -> str:
    """Every goal of a kernel set that is missed, one line each; with the correction."""
    result = read("kernels")
    if result is None:
        return missing("kernels")
    name = lambda row: f"{row['family']} of {row['chip']}, {row['library']}" + (f", {row['datatype']}" if "datatype" in row else "")
    lines = []
    for row in result.get("shapes", []):
        if row["goal"] is not None and 100 * row["corrected"]["mean"] > row["goal"]:
            lines.append(f"- {name(row)}: mean {100 * row['corrected']['mean']:.1f}%, goal {row['goal']:g}%")
    for row in result.get("transfer", []):
        for count, goal in zip((0, 32, 128), row["goal"] or ()):
            if goal is not None and 100 * row["errors"][count] > goal:
                lines.append(f"- {name(row)}, held out whole, {count} of its rows: mean {100 * row['errors'][count]:.1f}%, goal {goal:g}%")
    if "speed" in result and result["speed"]["per_second"] < 2e6:
        lines.append(f"- matmul times under vmap: {result['speed']['per_second'] / 1e6:.2f} million/s, goal 2")
    return "\n".join(lines) or "No goal is missed."


def kernels_transfer() -> str:
    """Error on a chip that was not measured, against the number of its own kernels that are."""
    result = read("kernels")
    rows = (result or {}).get("transfer")
    if not rows:
        return missing("kernels")
    counts = sorted(rows[0]["errors"])
    body = [[r["family"], r["chip"], r["others"], *(f"{100 * r['errors'][c]:.1f}" for c in counts)] for r in rows]
    return table(["kernels", "chip held out", "fitted before", *(f"{c} measured" for c in counts)], body)


def collectives_accuracy() -> str:
    """The table of `accuracy_collectives.py`."""
    result = read("collectives")
    if result is None:
        return missing("collectives")
    text = lambda values: " / ".join("-" if v is None else f"{v:.3g}" for v in values) if values else ""
    missed = lambda row: any(g is not None and (x < g if row["at_least"] else x > g) for x, g in zip(row["got"], row["reach"]))
    body = [[row["what"], text(row["got"]), text(row["reach"]), "missed" if missed(row) else "met", text(row["alpha_beta"])] for row in result["table"]]
    return table(["what, mean error in % where nothing else is said", "diffperf", "goal", "", "alpha-beta"], body)


def meanings(kind: type) -> dict[str, str]:
    """Meaning of each constant, from the docstring of its NamedTuple; `a, b:` and `a .. b:` name several."""
    fields, found = kind._fields, {}  # type: ignore[attr-defined]
    section = (kind.__doc__ or "").split("Attributes:")[1]
    for names, text in re.findall(r"^ {6}(\w+(?:(?:, | \.\. )\w+)*): (.*?)(?=^ {6}\w|^ {4}\w|\Z)", section, re.MULTILINE | re.DOTALL):
        own, *others = re.split(r"; (\w+): ", " ".join(text.split()))  # `a: one thing; b: another`
        first, _, last = names.partition(" .. ")
        for name in fields[fields.index(first) : fields.index(last) + 1] if last else names.split(", "):
            found[name] = own
        found |= dict(zip(others[::2], others[1::2]))
    for other in FAMILIES.values():  # constants of a part that has families of its own
        if any(f"see `{other.constants.__name__}`" in text for text in found.values()):
            found |= {name: text for name, text in meanings(other.constants).items() if name in fields}
    return found


def shown(x: float, text: str) -> str:
    """A constant with three digits, a time in a unit that suits it."""
    if "[s]" not in text:
        return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"
    scale, unit = next(((s, u) for s, u in ((1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")) if x >= s), (1e-12, "ps"))
    return f"{float(f'{x / scale:.3g}'):g} {unit}"


def constants(group: str) -> str:
    """Constants of families that share them: meaning, start value, and over the fitted sets the median and the middle 80% of those that determine it."""
    families = [FAMILIES[name] for name in GROUPS[group]]
    kind, values = families[0].constants, []
    text = meanings(kind)
    for family in families:
        fitted = shipped(family.name).shared
        if len(fitted.keys):
            value = np.asarray(constrain(kind, family.priors, jnp.asarray(fitted.free))).T  # sets by constants
            values.append((family, value, fitted.said > SAYS))
    body = []
    for i, name in enumerate(kind._fields):  # type: ignore[attr-defined]
        line = [f"`{name}`", re.sub(r" \[s\]$| \[1\]$", "", text[name]).rstrip("."), shown(families[0].priors[name].start, text[name])]
        for _, value, said in values:
            known = value[said[:, i], i]
            low, mid, high = (shown(float(x), text[name]) for x in np.percentile(known, (10, 50, 90))) if len(known) else ("", "-", "")
            line.append(f"{mid} ({low} to {high})" if len(known) > 2 else mid)
        body.append(line)
    lead = "; ".join(f"{family.name}: {len(value)} sets" for family, value, _ in values)
    head = ["constant", "meaning", "start", *(family.name for family, *_ in values)]
    note = f"Fitted: {lead}. Median, and middle 80%, over the sets whose rows determine the constant; - where none does." if values else "Not fitted yet."
    return f"{note}\n\n{table(head, body)}"


def start_values(kind: type, priors: Any) -> str:
    """Constants that no measurement at hand determines."""
    text = meanings(kind)
    plain = lambda name: re.sub(r" \[s\]$| \[1\]$", "", text[name]).rstrip(".")
    return table(["constant", "meaning", "start"], [[f"`{name}`", plain(name), shown(priors[name].start, text[name])] for name in kind._fields])  # type: ignore[attr-defined]


def kernel_blocks() -> dict[str, str]:
    """Every block of `docs/kernels.md` by name."""
    return {
        **{f"constants-{group}": constants(group) for group in GROUPS},
        "constants-convolution": start_values(ConvolutionConstants, CONVOLUTION_PRIORS),
        "constants-cpu": start_values(FAMILIES["matmul_cpu"].constants, FAMILIES["matmul_cpu"].priors),
        "constants-sparse": start_values(SparseConstants, SPARSE_PRIORS),
    }
