"""A system from measured kernels, as TOML for `load_system`: a CPU's chip numbers (`_cpu_chip.py`), and the efficiencies that fits imply.

Efficiencies are those of one large kernel by the fit, with the 80% interval of its constants: share of the peak for a matmul of 16384^3, share of the
bandwidth for an addition of 2^28 elements, share of the 16-bit peak for causal attention of 4 sequences of 8192 tokens with 32 heads of 128.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._files import write_atomic
from ...cost.kernel._attention import AttentionShape, attention_flops
from ...cost.kernel._matmul import MatmulShape
from ...cost.kernel._streaming import elementwise_shape, streaming_roofline
from ...hardware import DATATYPES, generation, load_system, write_fitted
from ...io import KernelTable
from .._posterior import Z80
from ._cpu_chip import cpu_numbers
from ._fit import KernelFit, predict_rows, slopes_of_rows
from ._rows_matmul import DATATYPES as MATMULS
from ._sets import PlacedSet, chip_name

LARGE = 16384.0
PLAIN = ("/add", "/copy", "/elementwise", "/mul", "/hbm_add", "/hbm_copy")
"""Ends of libraries of operators that stream and compute next to nothing."""


def efficiencies(pairs: Sequence[tuple[PlacedSet, KernelFit]], half_peak: float) -> dict[str, tuple[float, float, float]]:
    """Dotted path -> share, and both ends of its 80% interval: of each datatype or operator the set with most rows counts. `half_peak`: of 16 bits. [FLOP/s]"""
    best: dict[str, tuple[PlacedSet, KernelFit]] = {}
    for one, fit in sorted(pairs, key=lambda pair: -len(pair[0].kernels)):
        name = one.rows.family.name
        if name.startswith("matmul") and one.kernels.datatype in DATATYPES:
            best.setdefault(f"chip.matmul_efficiency.{one.kernels.datatype}", (one, fit))
        elif name.startswith("streaming") and one.kernels.library.endswith(PLAIN):
            best.setdefault("chip.memory_efficiency", (one, fit))
        elif name.startswith("attention_prefill") and one.kernels.datatype in ("bf16", "fp16", "fp32"):
            best.setdefault("chip.attention_efficiency", (one, fit))
    found = {}
    for path, (one, fit) in best.items():
        shape, ideal = _large(path, one, half_peak)
        full = lambda tree: type(tree)(*(np.array([float(x)]) for x in tree))
        shape, device = full(shape), full(one.kernels.device)
        share = ideal / float(np.exp(predict_rows(fit, shape, device)[0]))
        slope = slopes_of_rows(fit, shape, device)[0]
        size = one.rows.family.size
        spread = float(np.exp(Z80 * np.sqrt(max(slope @ np.linalg.inv(fit.precision)[:size, :size] @ slope, 0.0))))
        found[path] = tuple(float(f"{min(x, 1.0):.4g}") for x in (share, share / spread, share * spread))
    return found


def _large(path: str, one: PlacedSet, half_peak: float) -> tuple[Any, float]:
    """A large kernel, and the time that a share of 1 would take. [s]"""
    s, dev = one.kernels, one.kernels.device
    if path.startswith("chip.matmul"):
        _, a, b, c = MATMULS.get(s.datatype, ("", 2.0, 2.0, 2.0))
        return MatmulShape(LARGE, LARGE, LARGE, 1.0, a, b, c), 2 * LARGE**3 / float(dev.peak)
    if path == "chip.memory_efficiency":
        shape = elementwise_shape(2.0**28, 2.0, 1.0, {"fp32": 4.0}.get(s.datatype, 2.0))
        return shape, float(streaming_roofline(shape, dev))
    nbytes = {"fp32": 4.0}.get(s.datatype, 2.0)
    shape = AttentionShape(4.0, 8192.0, 8192.0, 32.0, 32.0, 128.0, 128.0, q_bytes=nbytes, kv_bytes=nbytes)
    return shape, float(attention_flops(shape)) / half_peak


def write_system(path: str | os.PathLike[str], table: KernelTable, system: str | os.PathLike[str] | None) -> Path:
    """Writes the system that a table was measured on: its base and, for a CPU, its measured numbers. A file given as `system` is copied.

    Args:
      path: the TOML file to write.
      table: rows of one GPU or CPU.
      system: catalog name or TOML file of the chip; by default what the table names.
    Raises:
      ValueError: for a table of several chips, or a file that would be written over.
      UnknownNameError: for a chip that is not in the catalog, without `system`.
      OSError: when it cannot be written.
    """
    target = Path(path)
    names = {chip_name(gpu, system) for gpu in dict.fromkeys(table.gpu)}
    if len(names) > 1:
        raise ValueError(f"the table holds kernels of {len(names)} chips ({', '.join(sorted(names))}); one file describes one. Split the table.")
    (base,) = names
    if base.endswith(".toml"):
        source = Path(base)
        if target.resolve() == source.resolve():
            raise ValueError(f"the system to write is {str(target)!r}, the file that was given to read. Choose another name.")
        load_system(source)
        write_atomic(target, source.read_text(encoding="utf-8"))
        return target
    lines = [f"# {base} as measured by diffperf. SI units; what is not said here is the base's.", f'base = "{base}"']
    if generation(base) == "cpu":
        numbers = cpu_numbers(table, base)
        for head, prefix in (("[chip]", ""), ("[chip.peak_flops_per_s]", "peak_flops_per_s.")):
            mine = {p.removeprefix(prefix): x for p, x in numbers.items() if ("." in p) == bool(prefix) and p.startswith(prefix)}
            if mine:
                lines += ["", head, *(f"{name} = {{ value = {x.value!r}, source = {json.dumps(x.source)} }}" for name, x in mine.items())]
    write_atomic(target, "\n".join(lines) + "\n")
    load_system(target, fitted=False)
    return target


def write_efficiencies(path: Path, pairs: Sequence[tuple[PlacedSet, KernelFit]], meta: Mapping[str, str | float]) -> Path:
    """Writes the efficiencies of fits beside a system's file, where `load_system` finds them."""
    peaks = dict(zip(DATATYPES, load_system(path, fitted=False).chip.peak_flops_per_s))
    return write_fitted(path, efficiencies(pairs, max(float(peaks["bf16"]), float(peaks["fp16"]))), meta)
