"""Where output goes: results on stdout, everything else on stderr; JSON is one document without NaN."""

import json
import math
import sys
from typing import Any

from rich.console import Console


def version() -> str:
    """The installed version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("diffperf")
    except PackageNotFoundError:
        return "unknown"


def start() -> None:
    """What every command that computes does first: double precision.

    Compiled code is not kept between calls: XLA's cache for CPUs warns on every load that another machine's code might not run here.
    """
    import jax

    jax.config.update("jax_enable_x64", True)


def out() -> Console:
    """For results."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=False)


def err() -> Console:
    """For progress and notes."""
    return Console(file=sys.stderr, highlight=False)


def note(text: str) -> None:
    """One remark on stderr, wrapped by the terminal alone, so that paths in it stay whole."""
    err().print(f"note: {text}", style="dim", markup=False, soft_wrap=True)


def plain(value: Any) -> Any:
    """`value` with only what JSON knows: numbers of NumPy and JAX become numbers, NaN and infinities null, mappings and sequences their like."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def json_text(value: Any) -> str:
    """`value` as one JSON document."""
    return json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False)


def print_json(value: Any) -> None:
    """`value` on stdout, and nothing else."""
    print(json_text(value))
