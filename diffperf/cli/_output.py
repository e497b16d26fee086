"""Where output goes: results on stdout, everything else on stderr; JSON is one document without NaN."""

import contextlib
import json
import math
import os
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
    """What every command that computes does first: double precision, and compiled code kept between calls.

    `DIFFPERF_CACHE` is the folder for it, `off` for none.
    """
    import jax

    jax.config.update("jax_enable_x64", True)
    folder = os.environ.get("DIFFPERF_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "diffperf")
    if folder != "off":
        with contextlib.suppress(OSError):  # a read-only home costs time, nothing else
            os.makedirs(folder, exist_ok=True)
            if os.access(folder, os.W_OK):
                jax.config.update("jax_compilation_cache_dir", folder)
                jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def out() -> Console:
    """For results."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=False)


def err() -> Console:
    """For progress and notes."""
    return Console(file=sys.stderr, highlight=False)


def note(text: str) -> None:
    """One remark on stderr."""
    err().print(f"note: {text}", style="dim", markup=False)


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
