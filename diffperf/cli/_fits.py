"""What the commands that fit (`calibrate`) and score (`validate`) measurements share: options, checks before the work, remarks, documents and tables."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

JSON_OUT = Annotated[str | None, typer.Option("--json", metavar="OUT", help="Write the result as JSON to OUT; - for stdout.")]
"""For a command that prints tables too, with `deliver`; `_show.JSON` is for one that prints either tables or JSON."""

_MOST_GROUPS = 15
_SCORES = ("median", "mean", "p90", "bias")


def check_target(path: str | None, ending: str | None = None) -> None:
    """Refuses a file that could not be written, before any work is done. None is no file.

    Raises:
      ValueError: for a wrong ending, a missing folder, or a folder of that name.
    """
    if path is None:
        return
    target = Path(path)
    if ending is not None and target.suffix != ending:
        raise ValueError(f"{path}: the name of this file should end in {ending}.")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{path}: the folder {target.absolute().parent} does not exist. Create it first.")
    if target.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file in it.")


def check_json_out(path: str | None) -> None:
    """`check_target` for the word after `JSON_OUT`: any file, or - for stdout."""
    check_target(None if path == "-" else path)


def notes(lines: Iterable[str], most: int | None = None) -> None:
    """Remarks of a reader on stderr; past `most` only how many more."""
    from . import _output

    said = list(lines)
    for line in said[:most]:
        _output.note(line)
    if most is not None and len(said) > most:
        _output.note(f"and {len(said) - most} more remarks on these files")


def note_left_out(counts: Mapping[str, int]) -> None:
    """Rows not used, by reason, on stderr."""
    notes(f"{count} rows left out: {reason}" for reason, count in counts.items())


def deliver(document: Mapping[str, Any], json_out: str | None, show: Callable[[], None]) -> None:
    """A result as the user asked for it: JSON alone for -, else what `show` prints, and the same as JSON in a file."""
    from . import _output

    if json_out == "-":
        _output.print_json(document)
        return
    if json_out is not None:
        from ..io import write_atomic

        write_atomic(json_out, _output.json_text(document) + "\n")
    show()
    if json_out is not None:
        _output.note(f"wrote {json_out}")


def picked(item: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Some keys of a mapping, in this order."""
    return {name: item[name] for name in names}


def score(item: Mapping[str, Any]) -> dict[str, Any]:
    """The agreed figures of an error."""
    return picked(item, *_SCORES)


def validation_document(result: Mapping[str, Any], errors: Iterable[str] = ("error", "baseline")) -> dict[str, Any]:
    """The agreed keys of a validation, which other tools read; the functions of Python say more.

    Args:
      result: of `validate_runs` and its like.
      errors: keys of errors.
    """
    rows = [picked(row, "id", "measured_s", "predicted_s", "low_s", "high_s") for row in result["rows"]]
    scores = {name: score(result[name]) for name in errors}
    return {**picked(result, "n_rows", "n_modelled", "skipped"), **scores, "groups": result["groups"], "rows": rows}


def groups_table(groups: Iterable[Mapping[str, Any]]) -> Any:
    """The groups of a validation that fare worst."""
    from ..report._tables import percent_of, table

    result = table("Groups, the worst first")
    result.add_column("group", overflow="fold")
    for name in ("n", "median", "bias"):
        result.add_column(name, justify="right")
    for row in sorted(groups, key=lambda row: -(row["median"] or 0.0))[:_MOST_GROUPS]:
        label = ", ".join(str(value) for value in row["group"].values() if value)
        result.add_row(label, str(row["n"]), percent_of(row["median"]), percent_of(row["bias"]))
    return result


def constants_table(title: str, rows: Iterable[Mapping[str, Any]], text: Callable[[str, float], str]) -> Any:
    """Fitted constants: prior, value and 80% interval.

    Args:
      rows: each with `name`, `prior`, `value`, `low` and `high`.
      text: a number of a constant, by its name, with its unit.
    """
    from ..report._tables import table

    result = table(title)
    result.add_column("constant", overflow="fold")
    for name in ("prior", "value", "80% from", "to"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        numbers = [row[key] for key in ("prior", "value", "low", "high")]
        result.add_row(row["name"], *("-" if number is None else text(row["name"], number) for number in numbers))
    return result
