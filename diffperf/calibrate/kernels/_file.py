"""Writes fitted sets as the file that `cost.kernel` reads: one line per set, rounded to what the fits determine."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..._files import write_atomic
from ._fit import KernelFit
from ._joint import KernelSet, Shared


def entries(sets: Sequence[KernelSet], fits: Sequence[KernelFit], shared: Shared) -> list[dict[str, Any]]:
    """One entry per set, in the form of a fitted file. A chip that is a file goes by its name without folders."""
    out = []
    for s, fit, said, variance in zip(sets, fits, shared.said, shared.variance, strict=True):
        numbers = dict(free=fit.free, said=said, variance=variance, weights=fit.weights)
        rounded = {name: [float(f"{x:.4g}") for x in np.asarray(values)] for name, values in numbers.items()}
        out.append(dict(chip=os.path.basename(s.chip), library=s.library, datatype=s.datatype, rows=len(s), noise=float(f"{fit.noise:.4g}"), **rounded))
    return out


def write_kernels_fit(path: str | os.PathLike[str], families: Mapping[str, list[dict[str, Any]]], meta: Mapping[str, Any]) -> None:
    """Writes the families' entries with what they rest on, atomically.

    Raises:
      OSError: when the file cannot be written.
    """
    lines = []
    for name, items in families.items():
        body = ",\n  ".join(json.dumps(item, separators=(",", ":")) for item in items)
        lines.append(f'"{name}": [\n  {body}\n ]' if items else f'"{name}": []')
    text = '{"meta": ' + json.dumps(dict(meta)) + ',\n "families": {\n ' + ",\n ".join(lines) + "\n}}\n"
    write_atomic(path, text)
