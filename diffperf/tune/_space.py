"""Which plans are tried: knobs, their default values, and all their legal combinations as one batched plan.

Divisibility is decided in one place, `parallel.legal`; this file only proposes. One rule is the search's own: interleaving is tried only where
`num_microbatches` is a multiple of `pipeline_parallel`, as that schedule needs (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ..hardware import System
from ..parallel import Plan, PlanError
from ..parallel._check import legal
from ..parallel._plan import plan_numbers
from ..workload import Transformer, num_layers

_DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "virtual_stages", "expert_parallel", "micro_batch_size")
_MODES = ("recompute", "zero_stage", "sequence_parallel", "schedule")
_MODE_COLUMNS = ("recompute_full", "recompute_selective", "shard_optimizer", "shard_gradients", "shard_parameters", "sequence_parallel", "schedule")
_LEGAL_ROWS = 4096
_MIN_TOKENS_PER_RANK = 2048  # context parallelism below this many positions per rank is proposed only on request


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """Values tried for each knob; a single value holds it fixed, None proposes values from model, system and number of devices.

    Attributes:
      tensor_parallel: None for powers of two up to the scale-up domain. [1]
      pipeline_parallel: None for divisors of the number of devices up to the layers. [1]
      context_parallel: None for powers of two that leave each rank 2,048 positions. [1]
      virtual_stages: None for every number that fits the layers. [1]
      expert_parallel: None for the common divisors of all kinds of routed experts. [1]
      data_parallel: None for what the devices leave; values keep only these. [1]
      micro_batch_size: sequences per micro-batch. [1]
      recompute: "none", "selective", "full" or the part of the layers.
      zero_stage: 0 to 3.
      sequence_parallel: None for on exactly when `tensor_parallel > 1`.
      schedule: names of `SCHEDULES`.
    """

    tensor_parallel: Any = None
    pipeline_parallel: Any = None
    context_parallel: Any = None
    virtual_stages: Any = None
    expert_parallel: Any = None
    data_parallel: Any = None
    micro_batch_size: Any = (1, 2, 4, 8, 16)
    recompute: Any = ("none", "selective", 0.25, 0.5, 0.75, "full")
    zero_stage: Any = (0, 1, 2, 3)
    sequence_parallel: Any = (None,)
    schedule: Any = ("1f1b",)


KNOBS = tuple(field.name for field in dataclasses.fields(PlanSpace))


class Plans(NamedTuple):
    """Legal plans in compact form.

    Attributes:
      base: numbers of `Plan` that all share.
      columns: numbers that differ, each of shape (plans,) or, for `schedule`, (plans, schedules).
      tried: combinations that use all devices, legal or not.
    """

    base: dict[str, Any]
    columns: dict[str, np.ndarray]
    tried: int

    @property
    def count(self) -> int:
        return len(self.columns["tensor_parallel"])

    def take(self, rows: np.ndarray) -> Plan:
        """The plans at `rows`, batched."""
        shared = {name: np.broadcast_to(value, (len(rows), *np.shape(value))) for name, value in self.base.items()}
        return Plan(**shared | {name: column[rows] for name, column in self.columns.items()})


def enumerate_plans(
    model: Transformer,
    system: System,
    space: PlanSpace | None = None,
    *,
    num_devices: int,
    global_batch_size: int,
    fixed: Mapping[str, Any] | None = None,
) -> tuple[Plan, int]:
    """Every legal plan of a space that uses `num_devices`, memory aside.

    Args:
      space: values per knob; None for `PlanSpace()`.
      global_batch_size: sequences per step. [1]
      fixed: restrictions by name: for a knob of `PlanSpace` a value, several values, or a `range` that keeps the proposed values inside it;
        for any other word of `make_plan`, such as `precision`, its one value.
    Returns:
      The plans, each leaf with a leading axis, and how many there are.
    Raises:
      ValueError: for an unknown or malformed restriction, or when no plan is left, saying which restriction left none.
    """
    plans = legal_plans(model, system, space, num_devices=num_devices, global_batch_size=global_batch_size, fixed=fixed)
    return plans.take(np.arange(plans.count)), plans.count


def legal_plans(model, system, space=None, *, num_devices, global_batch_size, fixed=None) -> Plans:
    """`enumerate_plans` in compact form."""
    for name, value in {"num_devices": num_devices, "global_batch_size": global_batch_size}.items():
        if not value >= 1 or value != int(value):
            raise ValueError(f"{name} is {value!r}; it should be a whole number of at least 1.")
    have = float(system.num_devices)
    if num_devices > have:
        raise ValueError(f"num_devices is {num_devices}; the system has {have:g}. Load it with `load_system(..., num_devices={num_devices})`.")
    space, words, restricted = _restrict(space or PlanSpace(), dict(fixed or {}))
    words["global_batch_size"] = global_batch_size
    plans = _combine(model, system, space, words, int(num_devices))
    if not plans.count:
        raise ValueError(_emptied(model, system, space, words, int(num_devices), restricted))
    return plans


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The words of `make_plan` that matter when comparing plans, for one plan."""
    number = lambda x: int(x) if float(x).is_integer() else float(x)
    degrees = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel", "virtual_stages", "micro_batch_size")
    words: dict[str, Any] = {name: number(np.asarray(getattr(plan, name))) for name in degrees}
    full, selective = float(plan.recompute_full), float(plan.recompute_selective)
    words["recompute"] = "full" if full == 1 else "selective" if selective and not full else "none" if not full else full
    words["zero_stage"] = round(float(plan.shard_optimizer + plan.shard_gradients + plan.shard_parameters))
    words["sequence_parallel"] = bool(plan.sequence_parallel > 0)
    for name in ("optimizer_offload", "activation_offload"):
        if float(getattr(plan, name)):
            words[name] = float(getattr(plan, name))
    return words


def _values(name: str, given: Any) -> tuple:
    values = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    values = tuple(v.item() if isinstance(v, np.generic) else v for v in values)
    if not values:
        raise ValueError(f"{name} has no values; give at least one, or leave it out for the proposed ones.")
    if name in _DEGREES or name == "data_parallel":
        for value in values:
            if isinstance(value, (bool, str)) or not value >= 1 or (value != int(value) and name != "micro_batch_size"):
                raise ValueError(f"{name} is {value!r}; it should be a whole number of at least 1, or several.")
    elif name in _MODES:
        for value in values:
            plan_numbers(global_batch_size=1, **{name: value})  # raises with what is accepted
    return values


def _restrict(space: PlanSpace, fixed: dict[str, Any]) -> tuple[PlanSpace, dict[str, Any], list[str]]:
    """The space with its restrictions, words that hold for all plans, and the names of what the user restricted."""
    words = set(inspect.signature(plan_numbers).parameters) - {"global_batch_size"}
    for name in fixed:
        if name not in words:
            from rapidfuzz import process

            near = [match[0] for match in process.extract(name, sorted(words), limit=3)]
            raise ValueError(f"fixed holds {name!r}, which is no knob. Near names: {', '.join(near)}. All: {', '.join(sorted(words))}.")
    values = {name: getattr(space, name) for name in KNOBS} | {name: value for name, value in fixed.items() if name in KNOBS}
    resolved = {name: value if value is None or isinstance(value, range) else _values(name, value) for name, value in values.items()}
    if resolved["sequence_parallel"] is None:
        resolved["sequence_parallel"] = (None,)
    default = PlanSpace()
    restricted = [name for name in KNOBS if name in fixed or getattr(space, name) != getattr(default, name)]
    base = {name: value for name, value in fixed.items() if name not in KNOBS}
    plan_numbers(global_batch_size=1, **base)  # raises with what is accepted
    return PlanSpace(**resolved), base, restricted


def _proposed(model: Transformer, system: System, n: int) -> dict[str, tuple[int, ...]]:
    """Values of the degrees where the user gives none."""
    blocks = model.blocks
    doubled = lambda limit: tuple(2**k for k in range(max(int(limit), 1).bit_length()))
    divisors = lambda number: tuple(k for k in range(1, int(number) + 1) if number % k == 0)
    layers = int(num_layers(model))
    experts = np.asarray(blocks.num_experts)[(np.asarray(blocks.count) > 0) & (np.asarray(blocks.num_experts) > 0)]
    return {
        "tensor_parallel": doubled(min(float(system.scale_up.domain), n)),
        "pipeline_parallel": tuple(k for k in divisors(n) if k <= layers),
        "context_parallel": doubled(min(float(model.seq_len) / _MIN_TOKENS_PER_RANK, n)),
        "virtual_stages": tuple(range(1, max(layers // 2, 1) + 1)),
        "expert_parallel": divisors(np.gcd.reduce(experts.astype(int))) if experts.size else (1,),
        "micro_batch_size": PlanSpace().micro_batch_size,
    }


def _combine(model: Transformer, system: System, space: PlanSpace, words: dict[str, Any], n: int) -> Plans:
    proposed = _proposed(model, system, n)
    options = {}
    for name in _DEGREES:
        given = getattr(space, name)
        options[name] = proposed[name] if given is None else tuple(v for v in proposed[name] if v in given) if isinstance(given, range) else given
    grid = np.meshgrid(*(np.array(options[name], float) for name in _DEGREES), indexing="ij")
    degrees = dict(zip(_DEGREES, (axis.ravel() for axis in grid)))
    parts = degrees["tensor_parallel"] * degrees["pipeline_parallel"] * degrees["context_parallel"]
    keep = n % parts == 0
    degrees["data_parallel"] = n / parts
    if space.data_parallel is not None:
        keep &= np.isin(degrees["data_parallel"], np.array(list(space.data_parallel), float))
    interleaved = (degrees["virtual_stages"] > 1) & (degrees["pipeline_parallel"] > 1)
    group = degrees["data_parallel"] * degrees["micro_batch_size"] * degrees["pipeline_parallel"]
    keep &= ~interleaved | (words["global_batch_size"] % group == 0)
    degrees = {name: column[keep] for name, column in degrees.items()}
    base = plan_numbers(**words)
    lawful = _legal_rows(model, system, base, degrees)
    degrees = {name: column[lawful] for name, column in degrees.items()}

    asked = list(itertools.product(*(getattr(space, name) for name in _MODES)))
    modes = [plan_numbers(global_batch_size=1, **dict(zip(_MODES, words))) for words in asked]
    rows, combinations = len(degrees["tensor_parallel"]), len(modes)
    columns = {name: np.repeat(column, combinations) for name, column in degrees.items()}
    for name in _MODE_COLUMNS:
        table = np.array([mode[name] for mode in modes], float)
        columns[name] = np.tile(table, (rows, 1) if table.ndim > 1 else rows)
    repeated = {name: np.tile(np.array([f(words) for words in asked], bool), rows) for name, f in {
        "tied": lambda words: words[2] is None,
        "zero": lambda words: words[1] != space.zero_stage[0],
        "sequence": lambda words: words[2] != space.sequence_parallel[0],
    }.items()}  # fmt: skip
    alone = columns["data_parallel"] * columns["context_parallel"] == 1
    columns["sequence_parallel"] = np.where(repeated["tied"], columns["tensor_parallel"] > 1, columns["sequence_parallel"])
    # left out is what differs in name only: ZeRO stages where nothing is replicated, sequence parallelism of one rank
    keep = ~(alone & repeated["zero"]) & ~((columns["tensor_parallel"] == 1) & repeated["sequence"])
    return Plans(base, {name: column[keep] for name, column in columns.items()}, int(np.sum(n % parts == 0)) * combinations)


def _legal_rows(model: Transformer, system: System, base: dict[str, Any], degrees: dict[str, np.ndarray]) -> np.ndarray:
    rows = len(degrees["tensor_parallel"])
    lawful = np.zeros(rows, bool)
    names = sorted(degrees)
    for start in range(0, rows, _LEGAL_ROWS):
        part = slice(start, min(start + _LEGAL_ROWS, rows))
        padded = [np.resize(degrees[name][part], _LEGAL_ROWS) for name in names]
        lawful[part] = np.asarray(_legal_block(tuple(names))(model, system, Plan(**base), padded))[: part.stop - part.start]
    return lawful


@functools.lru_cache(maxsize=4)
def _legal_block(names: tuple[str, ...]):
    def one(model, system, plan, values):
        return legal(model, system, dataclasses.replace(plan, **dict(zip(names, values))))

    return jax.jit(jax.vmap(one, in_axes=(None, None, None, 0)))


def _emptied(model, system, space: PlanSpace, words: dict[str, Any], n: int, restricted: list[str]) -> str:
    """Which restriction leaves no plan, found by lifting each alone."""
    batch = words["global_batch_size"]
    head = f"no legal plan for {n} devices and global_batch_size = {batch:g}"
    default = PlanSpace()
    for name in restricted:
        freed = _combine(model, system, dataclasses.replace(space, **{name: getattr(default, name)}), words, n)
        if freed.count:
            given = getattr(space, name)
            shown = f"{given.start} to {given.stop - 1}" if isinstance(given, range) else " or ".join(f"{v}" for v in given)
            found = freed.columns.get(name)
            which = "" if found is None else f", with {name} = {', '.join(f'{v:g}' for v in np.unique(found)[:12])}"
            return f"{head} with {name} = {shown}. Without that restriction there are {freed.count}{which}."
    if restricted and _combine(model, system, default, words, n).count:
        return f"{head} with {', '.join(restricted)} restricted together. Lift one of them."
    try:
        from ..parallel import check_plan

        check_plan(model, system, Plan(**(plan_numbers(**words) | {"data_parallel": float(n)})))
    except PlanError as error:
        return f"{head}. With data parallelism alone: {error}"
    return f"{head}. Change the number of devices or the batch so that they share more factors."
