"""The documentation: every example runs, every command line parses, every public name is in it, and its figures are those of the scripts."""

import contextlib
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import update_docs  # noqa: E402

PAGES = {page.name: page for page in update_docs.PAGES}
ROOMS = (
    "estimate", "estimate.timeline", "parallel", "hardware", "workload", "stack", "tune", "sweep",
    "calibrate", "calibrate.collectives", "calibrate.kernels", "measure", "io", "cost", "cost.contention", "cost.collective", "cost.kernel", "smooth", "report",
)  # fmt: skip
QUICK = ("show", "models")  # commands that are run too, with the one that is refused; the others are only parsed here
REFUSED = ("predict", "llama-3.1-8b", "h100", "--devices", "48", "--gbs", "96", "--tp", "3")


def text_of(name):
    return PAGES[name].read_text(encoding="utf-8")


def blocks_of(name, language):
    return [block for block in update_docs.blocks(text_of(name)) if block.language == language]


WITH_PYTHON = [name for name in PAGES if blocks_of(name, "python")]
COMMANDS = sorted({tuple(words) for name in PAGES for block in blocks_of(name, "console") for words in update_docs.commands(block)})


@pytest.fixture
def with_files(tmp_path, monkeypatch):
    """A folder with the files that pages show, as the working folder."""
    for page in PAGES.values():
        update_docs.write_files(page.read_text(encoding="utf-8"), tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_examples_run(name, with_files):
    """In order, in one namespace per page, in JAX's default float32."""
    namespace = {"__name__": "__main__"}
    with jax.enable_x64(False), contextlib.redirect_stdout(io.StringIO()):
        for block in blocks_of(name, "python"):
            if "# not run" not in block.body:
                exec(compile(block.body, f"{name}: {block.body.splitlines()[0]}", "exec"), namespace)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_parse(words):
    import typer

    from diffperf.cli._app import app

    command, context, left = typer.main.get_command(app), None, list(words)
    while True:
        context = command.make_context(command.name or "diffperf", left, parent=context)
        left = [*getattr(context, "protected_args", getattr(context, "_protected_args", [])), *context.args] or left
        if not hasattr(command, "resolve_command") or "--version" in words:
            return
        _, command, left = command.resolve_command(context, left)


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] in QUICK or words == REFUSED], ids=" ".join)
def test_quick_commands_run(words, with_files, capsys):
    from diffperf.cli import main

    if any(word.endswith(".toml") and not Path(word).exists() for word in words):
        pytest.skip("needs a file that a command before it writes")
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == (2 if words == REFUSED else 0), capsys.readouterr().err


@pytest.mark.parametrize("room", ROOMS)
def test_api_page_has_every_public_name(room):
    module = importlib.import_module(f"diffperf.{room}")
    listed = re.search(rf"^::: diffperf\.{re.escape(room)}\n.*?members:\n((?: +- \w+\n)+)", text_of("api.md"), re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = {name: value for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)}
    if room == "smooth":  # a file; the others re-export
        names = {name for name, value in names.items() if getattr(value, "__module__", "") == module.__name__}
    assert set(re.findall(r"- (\w+)", listed[1])) == set(names)


def test_nomenclature_has_every_number():
    from diffperf.estimate import Breakdown, Estimate
    from diffperf.hardware import Chip, Host, System, Tier
    from diffperf.parallel import Plan, StageMemory
    from diffperf.stack import Stack
    from diffperf.workload import Blocks, Transformer

    sections = re.split(r"^##+ ", text_of("nomenclature.md"), flags=re.MULTILINE)
    for kind in (Transformer, Blocks, Chip, Tier, Host, System, Plan, Stack, Estimate, Breakdown, StageMemory):
        section = next(part for part in sections if part.splitlines()[0].replace("`", "").split(",")[0] == kind.__name__ and "| name |" in part)
        names = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))))
        assert names == set(getattr(kind, "_fields", None) or kind.__dataclass_fields__), kind.__name__


def test_figures_are_those_of_the_scripts():
    stale = [page.name for page, text in update_docs.filled().items() if page.read_text(encoding="utf-8") != text]
    assert not stale, f"run `python benchmarks/update_docs.py`: {stale}"


def test_links_between_pages_lead_somewhere():
    for name, page in PAGES.items():
        for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text_of(name)):
            assert (page.parent / target).exists(), f"{name}: {target}"


def test_pages_build():
    """Strictly, and without a network."""
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    pytest.importorskip("mkdocstrings_handlers", reason="needs the docs extra")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", os.devnull + "-site"]
    with contextlib.ExitStack() as stack:
        import tempfile

        words[-1] = stack.enter_context(tempfile.TemporaryDirectory())
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
