"""Tables of `accuracy.py` and `accuracy_kernels.py`: on the screen, as Markdown, and the figures behind them as JSON."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from kernel_tables import table as markdown_table
from rich.console import Console
from rich.table import Table

from diffperf._files import write_atomic

TitledTable = tuple[str, list[str], list[list[str]]]
"""Title, header and lines."""


def percent(x: float | None) -> str:
    """A fraction in per cent with one decimal, or a dash."""
    return "-" if x is None or not np.isfinite(x) else f"{100 * x:.1f}"


def show(tables: Sequence[TitledTable], result: Mapping[str, Any], options: Namespace, console: Console) -> None:
    """Prints the tables; writes `result` to the file of `--json` and the tables to that of `--markdown`."""
    for title, header, body in tables:
        view = Table(*header, title=title)
        for line in body:
            view.add_row(*line)
        console.print(view)
    if options.json:
        write_atomic(options.json, json.dumps(result, indent=1))
    if options.markdown:
        write_atomic(options.markdown, "\n".join(f"**{title}**\n\n{markdown_table(header, body)}\n" for title, header, body in tables))
