"""`predict --trace`: the predicted step as a file that Perfetto opens, and what its critical path consists of."""

import os
from pathlib import Path
from typing import Any


def check_trace(path: Path | None) -> None:
    """Refuses a trace file that could not be written, before any work is done.

    Raises:
      ValueError: for a name that ends in neither `.json` nor `.json.gz`, a folder that may not be written to, and what `check_target` raises.
    """
    from ._fits import check_target

    if path is None:
        return
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"--trace is {str(path)!r}; give a file that ends in .json.gz, or .json for one that is not compressed.")
    check_target(str(path))
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--trace is {str(path)!r}; the folder {folder} may not be written to. Choose another.")


def write_timeline(inputs: Any, path: Path) -> dict[str, Any]:
    """Writes the trace of a predicted step, and gives what there is to say of it.

    Raises:
      PlanError: for a plan whose schedule cannot be laid out.
      OSError: when the file cannot be written.
    """
    from ..estimate.timeline import critical_path, step_timeline

    timeline = step_timeline(inputs.model, inputs.system, inputs.plan, inputs.stack)
    timeline.write_trace(path)
    return {
        "trace": str(path),
        "tasks": len(timeline.graph.tasks),
        "step_time_s": float(timeline.makespan),
        "closed_form_s": float(timeline.closed_form),
        "critical_path": [row._asdict() for row in critical_path(timeline)],
    }


def timeline_report(facts: dict[str, Any]) -> Any:
    """The critical path by kind, and how the timeline compares with the closed form, for the terminal."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from .._units import percent, time_text

    path = Table(title="Critical path of the timeline", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("kind", "time", "share", "tasks"):
        path.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in facts["critical_path"]:
        path.add_row(row["kind"], time_text(row["time"]), percent(row["share"]), str(row["tasks"]))
    step, closed = facts["step_time_s"], facts["closed_form_s"]
    return Group(path, Text(f"Timeline {time_text(step)}, closed form {time_text(closed)} before measured neighbours ({step / closed - 1:+.1%})."),
                 Text(f"{facts['tasks']:,} tasks in {facts['trace']}; open it at https://ui.perfetto.dev"))  # fmt: skip
