"""Fitted stacks by name: what Megatron-Core, FSDP, DeepSpeed, MaxText and others were measured to achieve, one TOML file each.

`typical` is the mean over all stacks, `family-mcore` and its like the mean of one code base: use them for software not measured yet.
"""

import dataclasses
import difflib
import functools
import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from .._files import write_atomic
from ._stack import Stack

FITTED_DIRECTORY = Path(__file__).with_name("fitted")
ALIASES = {
    "megatron": "megatron-core", "megatron-lm": "megatron-core", "mcore": "family-mcore", "fsdp": "family-fsdp", "pytorch-fsdp": "family-fsdp",
    "pytorch": "family-fsdp", "deepspeed": "megatron-deepspeed-vtrain", "zero": "family-zero", "xla": "family-maxtext", "jax": "family-maxtext",
    "maxtext": "family-maxtext", "mlperf": "mlperf-nvidia", "default": "typical", "megatron-deepspeed": "family-megatron-deepspeed",
    "vtrain": "megatron-deepspeed-vtrain", "rocm": "rocm-training",
}  # fmt: skip
_NUMBERS = ("value", "low", "high", "prior")
FIELDS = tuple(field.name for field in dataclasses.fields(Stack))


class UnknownStackError(ValueError):
    """No stack of that name; the message lists near names."""


@dataclasses.dataclass(frozen=True)
class FittedConstant:
    """One constant of a stack: its fitted value with an 80% interval, and the prior median it started from; in the unit of `Stack`."""

    name: str
    value: float
    low: float
    high: float
    prior: float


def stack_names() -> tuple[str, ...]:
    """Names of the shipped stacks, sorted."""
    return tuple(sorted(path.stem for path in FITTED_DIRECTORY.glob("*.toml")))


def resolve_stack_name(name: str) -> str:
    """Catalog name of a stack; case, spaces and underscores do not matter.

    Raises:
      UnknownStackError: with near names.
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    names = stack_names()
    if key in names:
        return key
    if ALIASES.get(key) in names:
        return ALIASES[key]
    near = difflib.get_close_matches(key, [*names, *ALIASES], n=4, cutoff=0.3)
    raise UnknownStackError(f"no software stack is called {name!r}; near names: {', '.join(near) or 'none'}. All: {', '.join(names)}.")


@functools.lru_cache(maxsize=256)
def _read(path: Path) -> tuple[dict, dict[str, dict[str, float]]]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a stack: {error}. Write it with `diffperf calibrate runs`.") from error
    values, meta = table.get("values", {}), table.get("fit", {})
    if not isinstance(values, dict) or not isinstance(meta, dict):
        raise ValueError(f"{path}: [fit] and [values] should be tables. Write the file with `diffperf calibrate runs`.")
    missing, unknown = sorted(set(FIELDS) - set(values)), sorted(set(values) - set(FIELDS))
    if missing or unknown:
        raise ValueError(f"{path}: [values] lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}; it should name each field of Stack once.")
    for name, item in values.items():
        if not (isinstance(item, dict) and "value" in item and all(_positive(item[key]) for key in _NUMBERS if key in item)):
            raise ValueError(f"{path}: {name} is {item!r}; it should be a table of value, low, high and prior, each a positive, finite number.")
    return meta, values


def _positive(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x > 0


def _path(name_or_path: str | os.PathLike[str]) -> Path:
    if isinstance(name_or_path, os.PathLike) or str(name_or_path).endswith(".toml"):
        return Path(name_or_path)
    return FITTED_DIRECTORY / f"{resolve_stack_name(name_or_path)}.toml"


def load_stack(name_or_path: str | os.PathLike[str] = "typical") -> Stack:
    """A fitted stack by name or alias, or from a TOML file that a calibration wrote.

    Raises:
      UnknownStackError: for an unknown name.
      ValueError: for a file that is not a stack.
    """
    _, values = _read(_path(name_or_path))
    return Stack(**{name: values[name]["value"] for name in FIELDS})


def describe_stack(name_or_path: str | os.PathLike[str]) -> tuple[dict, list[FittedConstant]]:
    """What is known of a stack's fit (date, data, rows, quality), and its constants in the order of `Stack`."""
    meta, values = _read(_path(name_or_path))
    get = lambda item, key: float(item.get(key, item["value"]))
    return meta, [FittedConstant(n, *(get(values[n], k) for k in _NUMBERS)) for n in FIELDS]


def write_stack(path: str | os.PathLike[str], constants: Mapping[str, FittedConstant], meta: Mapping[str, str | float]) -> None:
    """Writes a stack file, atomically.

    Args:
      path: a `.toml` file.
      constants: one per field of `Stack`.
      meta: date, data, quality and whatever else is worth keeping.
    Raises:
      ValueError: when a field is missing, or a number is not positive and finite; nothing is written then.
    """
    missing = sorted(set(FIELDS) - set(constants))
    if missing:
        raise ValueError(f"write_stack: constants lack {', '.join(missing)}; give every field of Stack.")
    for name in FIELDS:
        wrong = {key: getattr(constants[name], key) for key in _NUMBERS if not _positive(float(getattr(constants[name], key)))}
        if wrong:
            raise ValueError(f"write_stack: {name} has {', '.join(f'{k} {v}' for k, v in wrong.items())}; give positive, finite numbers.")
    lines = ["# Fitted by the calibration. SI units; low and high bound the 80% interval.", "[fit]"]
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in meta.items()] + ["", "[values]"]
    for name in FIELDS:
        c = constants[name]
        lines.append(f"{name} = {{ value = {c.value:.6g}, low = {c.low:.6g}, high = {c.high:.6g}, prior = {c.prior:.6g} }}")
    write_atomic(path, "\n".join(lines) + "\n")
    _read.cache_clear()
