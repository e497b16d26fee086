"""Puts measured figures into the documentation, so that no number there is typed by hand.

    python benchmarks/accuracy.py --json docs/data/accuracy.json          # then
    python benchmarks/throughput.py --json docs/data/throughput.json      # then
    python benchmarks/update_docs.py [--outputs] [--check]

Rewrites what lies between `<!-- NAME:begin -->` and `<!-- NAME:end -->` in README.md and in pages of docs; the tables of kernels and collectives come from
`kernel_tables.py`, those of overlap and timeline from `overlap_tables.py`. `--outputs` also runs every example whose output a page
shows, and puts the new output in: a `console` block under a comment `<!-- output: 1-20 -->` (lines kept; all without numbers), and a `text` block under
`<!-- prints -->`, which holds what the Python block before it prints. `--check` writes nothing and fails when the blocks of figures are not those of the
JSON files.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import accuracy
import kernel_tables
import overlap_tables
from kernel_tables import table

from diffperf.io import write_atomic

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BRIEF = ("all runs", "without vTrain", "dense on GPU", "mixture of experts on GPU", "TPU", "Korthikanti et al. 2022, eight table points")
SOURCE_GOALS = {"random": {0: 11, 3: 9, 10: 6}, "chosen": {3: 7.5, 10: 5}}  # per cent, median
_FENCE = re.compile(r"^```(?P<language>\w*)[ \t]*(?P<info>[^\n]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page.

    Attributes:
      language: the word after the fence.
      title: file that the block is the content of, "" for none.
      body: its text.
      mark: comment on the line above it, without the arrows, "" for none.
      start, end: where the body lies in the page.
    """

    language: str
    title: str
    body: str
    mark: str
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["info"])
        mark = re.search(r"<!-- (.*?) -->\n$", text[: match.start()])
        found.append(Block(match["language"], title[1] if title else "", match["body"], mark[1] if mark else "", match.start("body"), match.end("body")))
    return found


def commands(block: Block) -> list[list[str]]:
    """The `$ diffperf` command lines of a console block, split into words, without the program."""
    joined = block.body.replace("\\\n", " ")
    return [shlex.split(line[2:], comments=True)[1:] for line in joined.splitlines() if line.startswith("$ diffperf")]


def write_files(text: str, folder: Path) -> None:
    """Writes the blocks of a page that are files, such as `title="runs.csv"`."""
    for block in blocks(text):
        if block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")


def read_accuracy() -> dict[str, Any]:
    """The figures of `accuracy.py`; JSON turned the counts of revealed rows into text."""
    result = json.loads((DATA / "accuracy.json").read_text(encoding="utf-8"))
    for source in result.get("sources", []):
        for how in ("random", "chosen"):
            source[how] = {int(count): value for count, value in source[how].items()}
    return result


def coverage_of_rows(result: dict[str, Any]) -> str:
    skipped = sum(result["skipped"].values())
    reasons = "; ".join(f"{reason}: {count}" for reason, count in result["skipped"].items())
    return f"{result['n_rows']:,} of {result['n_rows'] + skipped:,} published decoder rows are modelled. Left out: {reasons}."


def accuracy_tables(result: dict[str, Any]) -> str:
    """All tables of `accuracy.py`."""
    parts = [f"**{title}**\n\n{table(header, body)}" for title, header, body in accuracy.tables(result)]
    return "\n\n".join([coverage_of_rows(result), *parts])


def accuracy_brief(result: dict[str, Any]) -> str:
    """The rows of the first table that a reader looks for, and a user's own cluster."""
    three = lambda e: " / ".join(accuracy.percent(e[key]) for key in ("median", "mean", "p90"))
    rows = {row["name"]: row for row in result["folds"]}
    body = [[name, str(rows[name]["n"]), three(rows[name]["error"]), three(rows[name]["baseline"]), accuracy.percent(rows[name]["coverage"])] for name in BRIEF]
    text = table(["runs", "n", "diffperf: median / mean / p90 error, %", "roofline with one efficiency", "80% intervals cover, %"], body)
    if "sources" not in result:
        return text
    mean = result["sources"][-1]
    at = lambda how, count: accuracy.percent(mean[how][count]["median"])
    own = [["0", at("random", 0), ""], *([str(c), at("random", c), at("chosen", c)] for c in accuracy.COUNTS[1:])]
    head = ["runs of the unseen source", "median error, runs drawn at random, %", "runs chosen by diffperf, %"]
    lead = f"A whole source (its software and cluster) held out, then predicted after a few of its own runs, mean over {len(result['sources']) - 1} sources:"
    return f"{text}\n\n{lead}\n\n{table(head, own)}"


def shortfalls(result: dict[str, Any]) -> str:
    """Every goal that the figures miss, one line each."""
    lines = []
    for row in result["folds"]:
        for key, goal in zip(("median", "mean", "p90"), accuracy.TARGETS.get(row["name"], ())):
            if goal is not None and 100 * row["error"][key] > goal:
                lines.append(f"- {row['name']}: {key} {accuracy.percent(row['error'][key])}%, goal {goal:g}%")
    for how, goals in SOURCE_GOALS.items() if "sources" in result else ():
        for count, goal in goals.items():
            median = result["sources"][-1][how][count]["median"]
            if 100 * median > goal:
                lines.append(f"- whole sources held out, {count} runs {how}: median {accuracy.percent(median)}%, goal {goal:g}%")
    for row in result["families"]:
        if not 0.7 <= row["coverage"] <= 0.9:
            lines.append(f"- 80% intervals of `{row['family']}` cover {accuracy.percent(row['coverage'])}% of {row['n']} rows, goal 70 to 90%")
    for row in result["memory"]:
        goal = 8 if row["name"] == "all" else 15
        if 100 * row["error"]["median"] > goal:
            name = "all rows" if row["name"] == "all" else f"`{row['name']}`"
            lines.append(f"- peak memory, {name}: median {accuracy.percent(row['error']['median'])}% held out, goal {goal}%")
    return "\n".join(lines) or "No goal is missed."


def throughput_tables() -> str:
    """All rows of `throughput.py`, with the machine."""
    result = json.loads((DATA / "throughput.json").read_text(encoding="utf-8"))
    number = lambda x: "" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
    target = lambda r: "" if r["target"] is None else f"{r['target_is']} {number(r['target'])}: {'met' if r['met'] else 'missed'}"
    where = ", ".join(f"{name} {value}" for name, value in result["where"].items())
    body = [[r["what"], number(r["value"]), number(r["best"]), r["unit"], target(r)] for r in result["rows"]]
    return f"Measured on: {where}.\n\n{table(['what', 'median', 'best', 'unit', 'goal'], body)}"


def throughput_brief() -> str:
    """The two rates."""
    result = json.loads((DATA / "throughput.json").read_text(encoding="utf-8"))
    rate = lambda text: next(r for r in result["rows"] if text in r["what"])
    plain, slope = rate("train_step under vmap"), rate("its gradient in all")
    numbers = re.search(r"all (\d+) numbers", slope["what"])
    rates = lambda r: f"{r['value']:,.0f}/s (best {r['best']:,.0f}/s)"
    return (
        f"Measured on a {result['where']['processor']} CPU in float32, median call: {rates(plain)} configurations for the full `train_step` under `jax.vmap`; "
        f"{rates(slope)} with the gradient in all {numbers[1] if numbers else ''} numbers of the system."
    )


def filled() -> dict[Path, str]:
    """Pages with their blocks of figures as the JSON files say."""
    result = read_accuracy()
    parts = {
        (ROOT / "README.md", "accuracy"): accuracy_brief(result),
        (ROOT / "README.md", "throughput"): throughput_brief(),
        (ROOT / "docs" / "accuracy.md", "accuracy"): accuracy_tables(result),
        (ROOT / "docs" / "accuracy.md", "shortfalls"): shortfalls(result),
        (ROOT / "docs" / "accuracy.md", "throughput"): throughput_tables(),
        (ROOT / "docs" / "accuracy.md", "kernels"): kernel_tables.kernels_accuracy(),
        (ROOT / "docs" / "accuracy.md", "kernels-shortfalls"): kernel_tables.kernels_shortfalls(),
        (ROOT / "docs" / "accuracy.md", "collectives"): kernel_tables.collectives_accuracy(),
        (ROOT / "docs" / "accuracy.md", "overlap-law"): overlap_tables.law(),
        (ROOT / "docs" / "accuracy.md", "overlap-searches"): overlap_tables.searches(),
        (ROOT / "docs" / "accuracy.md", "overlap-robust"): overlap_tables.robust(),
        (ROOT / "docs" / "accuracy.md", "timeline"): overlap_tables.schedules(),
        (ROOT / "docs" / "own-gpu.md", "transfer"): kernel_tables.kernels_transfer(),
        **{(ROOT / "docs" / "kernels.md", name): content for name, content in kernel_tables.kernel_blocks().items()},
    }
    pages: dict[Path, str] = {}
    for (page, name), content in parts.items():
        text = pages.get(page) or page.read_text(encoding="utf-8")
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page}: has no block <!-- {name}:begin --> ... <!-- {name}:end -->. Put it back.")
        pages[page] = pattern.sub(lambda m, c=content: f"{m[1]}\n{c}\n\n{m[2]}", text)
    return pages


def pick(output: str, mark: str) -> str:
    """The lines of an output that a mark such as `output: 1-4, 9-12` keeps, with `...` where some are left out."""
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    spans = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?:-(\d+))?", mark)] or [(1, len(lines))]
    kept: list[str] = []
    end = 0
    for first, last in spans:
        kept += ["..."] if first > end + 1 else []
        kept += lines[first - 1 : last]
        end = last
    return "\n".join(kept + (["..."] if end < len(lines) else [])) + "\n"


def outputs(page: Path) -> Iterator[tuple[int, int, str]]:
    """(start, end, new body) of the blocks of a page that show an output, the page's examples run in order in one folder."""
    text = page.read_text(encoding="utf-8")
    if "<!-- prints" not in text and "<!-- output" not in text:
        return
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        write_files(text, Path(folder))
        os.chdir(folder)
        try:
            namespace: dict[str, Any] = {"__name__": "__main__"}
            printed = ""
            for block in blocks(text):
                if block.language == "python" and "# not run" not in block.body:
                    with contextlib.redirect_stdout(io.StringIO()) as stream:
                        exec(compile(block.body, str(page), "exec"), namespace)
                    printed = stream.getvalue()
                elif block.mark.startswith("prints"):
                    yield block.start, block.end, pick(printed, block.mark)
                elif block.mark.startswith("output"):
                    shown = []
                    for line in re.findall(r"^\$ (?:.*\\\n)*.*$", block.body, re.MULTILINE):
                        words = [f"{Path(sys.executable).parent}/diffperf", *shlex.split(line[2:].replace("\\\n", " "))[1:]]
                        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"})
                        shown.append(line + "\n" + pick(done.stdout or done.stderr, block.mark))
                    yield block.start, block.end, "".join(shown)
        finally:
            os.chdir(here)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", action="store_true", help="also run the examples and renew the outputs shown")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when figures and JSON differ")
    parser.add_argument("--page", help="with --outputs, only this page, such as tuning.md")
    options = parser.parse_args()
    pages = filled()
    if options.check:
        stale = [page.name for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
        sys.exit(f"out of step with docs/data: {', '.join(stale)}. Run `python benchmarks/update_docs.py`." if stale else 0)
    for page, text in pages.items():
        write_atomic(page, text)
    for page in PAGES if options.outputs else ():
        if options.page and page.name != options.page:
            continue
        text = page.read_text(encoding="utf-8")
        for start, end, body in reversed(list(outputs(page))):
            text = text[:start] + body + text[end:]
        write_atomic(page, text)
        print(page.name)


if __name__ == "__main__":
    main()
