"""Axes of a sweep: from a dotted path and its values to the numbers they set."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..estimate._paths import slots_of
from ..parallel._plan import plan_numbers

# Words of `make_plan` that are no number of a `Plan`, or stand for several, and the numbers they set.
_WORDS = {
    "plan.zero_stage": ("shard_optimizer", "shard_gradients", "shard_parameters"),
    "plan.recompute": ("recompute_full", "recompute_selective"),
    "plan.precision": ("precision",),
    "plan.schedule": ("schedule",),
    "plan.context_mode": ("context_all_to_all",),
    "plan.optimizer": ("optimizer_bytes",),
}
AUTOMATIC = ("plan.data_parallel", "plan.sequence_parallel")
_MAY_BE_INFINITE = ("plan.shard_group", "model.blocks.window")
# last part of a path -> 0 would divide by zero or mean a machine that does not exist
_POSITIVE = {
    "tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "virtual_stages", "expert_parallel", "shard_group",
    "micro_batch_size", "global_batch_size", "hidden", "seq_len", "seq_share", "window", "bandwidth", "efficiency", "memory_bandwidth",
    "memory_efficiency", "memory_capacity", "attention_efficiency", "link_bandwidth", "domain", "num_devices", "num_processors",
    "power_usage_effectiveness", "matmul_factor", "attention_factor", "expert_factor", "low_precision_factor", "expert_low_precision_factor",
}  # fmt: skip


class Axis(NamedTuple):
    """One axis.

    Attributes:
      path: as the user wrote it; the name of the column.
      labels: what the column shows, shape (values,).
      slots: positions in the packed inputs that it sets.
      table: what it sets them to, shape (values, slots).
    """

    path: str
    labels: np.ndarray
    slots: tuple[int, ...]
    table: np.ndarray


def read_axes(names: Sequence[str], axes: Mapping[str, Any]) -> tuple[list[Axis], frozenset[str]]:
    """Axes in order, and the paths of `AUTOMATIC` whose value is "auto".

    Args:
      names: dotted name of each packed number.
    Raises:
      ValueError: for an unknown path, a value out of range, an axis without values, or two axes that set the same number.
    """
    if not axes:
        raise ValueError('axes is empty; give at least one, such as {"plan.micro_batch_size": [1, 2, 4]}.')
    found, automatic, owner = [], set(), {}
    for path, given in axes.items():
        values = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
        if not values:
            raise ValueError(f"{path} has no values; give at least one.")
        if path in AUTOMATIC and values == ["auto"]:
            automatic.add(path)
            continue
        axis = _word_axis(names, path, values) if path in _WORDS else _number_axis(names, path, values)
        for slot in axis.slots:
            if slot in owner:
                raise ValueError(f"{path} and {owner[slot]} both set {names[slot]}. Keep one of them.")
            owner[slot] = path
        found.append(axis)
    for path in automatic & set(owner.values()):
        raise ValueError(f"{path} is given twice.")
    if not found:
        raise ValueError('axes holds only "auto"; give at least one axis with values.')
    return found, frozenset(automatic)


def _word_axis(names: Sequence[str], path: str, values: list) -> Axis:
    word = path.split(".")[1]
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    numbers = [plan_numbers(global_batch_size=1, **{word: value}) for value in values]  # raises with what is accepted
    slots = [slot for leaf in _WORDS[path] for slot, name in enumerate(names) if name == f"plan.{leaf}" or name.startswith(f"plan.{leaf}.")]
    table = np.array([np.concatenate([np.ravel(row[leaf]) for leaf in _WORDS[path]]) for row in numbers], float)
    words = [str(value) for value in values] if any(isinstance(value, str) for value in values) else values
    return Axis(path, np.array(words), tuple(slots), table)


def _number_axis(names: Sequence[str], path: str, values: list) -> Axis:
    slots = slots_of(names, path) if not path.startswith("plan.") else slots_of([*names, *_WORDS], path)
    last = next(part for part in reversed(path.split(".")) if not part.isdigit())
    for value in values:
        if isinstance(value, str) or not np.isscalar(value):
            extra = ' or "auto" alone' if path in AUTOMATIC else ""
            raise ValueError(f"{path} has the value {value!r}; it should be a number{extra}.")
        finite = math.isfinite(value) or (value == math.inf and path.startswith(_MAY_BE_INFINITE))
        if not finite or value < 0 or (value == 0 and last in _POSITIVE):  # pyright: ignore[reportOperatorIssue]
            wanted = "positive" if last in _POSITIVE else "0 or more"
            raise ValueError(f"{path} has the value {value!r}; it should be finite and {wanted}. SI units: B/s, B, s, FLOP/s.")
    labels = np.array(values)
    return Axis(path, labels.astype(float) if labels.dtype == bool else labels, tuple(slots), np.repeat(np.array(values, float)[:, None], len(slots), axis=1))
