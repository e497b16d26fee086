"""The collectives of a trace: operation, size and group of each communication kernel, from what stands with it or with the operator that launched it."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._collective_table import element_bytes
from ._classify import COMMUNICATION, collective_of_kernel, collective_of_record, type_name
from ._numbers import amount, clean, ranks
from ._tables import CollectiveCall, DeviceEvents, Inputs, Operators

Record = Mapping[str, Any]


def collective_calls(
    events: DeviceEvents,
    names: Sequence[str],
    shapes: Sequence[Any],
    operators: Operators,
    inputs: Sequence[Inputs],
    recorded: Mapping[int, Record],
    op_recorded: Mapping[int, Record],
    groups: Mapping[str, tuple[int, ...]],
    world_size: int,
) -> tuple[CollectiveCall, ...]:
    """One call per communication kernel, in their order.

    Args:
      recorded: device event -> "Collective name", "In msg nelems" and so on, as they stand with the kernel.
      op_recorded: operator -> the same.
      groups: name of a process group -> its ranks.
      world_size: -1 where not known.
    """
    calls = []
    for row in np.flatnonzero(events.kind == COMMUNICATION).tolist():
        op, algorithm, protocol = collective_of_kernel(names[events.name[row]])
        words: dict[str, Any] = dict(op=op, algorithm=algorithm, protocol=protocol, channels=int(events.channels[row]))
        record, source = recorded.get(row), "kernel"
        around = _around(operators, int(events.operator[row]))
        if record is None:
            record, source = next((op_recorded[i] for i in around if i in op_recorded), None), "operator"
        if record is not None:
            words |= _of_record(record, groups) | {"recorded": source}
        else:
            words |= _of_operators([(names[operators.name[i]], inputs[operators.inputs[i]] if operators.inputs[i] >= 0 else None) for i in around], world_size)
        words["op"] = words["op"] or op
        if not words.get("ranks", 0) > 0:
            words["ranks"] = float(world_size) if world_size > 0 else math.nan
        calls.append(CollectiveCall(row=row, **words))
    return tuple(calls)


def _around(operators: Operators, at: int) -> list[int]:
    """The operator and those around it, from the inside out."""
    found = []
    while at >= 0:
        found.append(at)
        at = int(operators.parent[at])
    return found


def _of_record(record: Record, groups: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    op, coalesced = collective_of_record(str(record.get("Collective name", "")))
    datatype = type_name(clean(str(record.get("dtype", ""))))
    group = clean(str(record.get("Process Group Name", "")))
    elements = [amount(record.get(key)) for key in ("In msg nelems", "Out msg nelems")]
    sized = max((count for count in elements if count > 0), default=math.nan)
    peers = [record.get(key) for key in ("Dst Rank", "Src Rank")]
    return dict(
        op=op,
        datatype=datatype,
        nbytes=sized * element_bytes(datatype) if sized > 0 else math.nan,
        ranks=amount(record.get("Group size")),
        group=group,
        members=_ranks(record.get("Process Group Ranks")) or groups.get(group, ()),
        coalesced=coalesced,
        peer=next((int(peer) for peer in peers if isinstance(peer, int) and peer >= 0), -1) if op == "send_recv" else -1,
    )


def _ranks(text: Any) -> tuple[int, ...]:
    """`"[0, 1]"`; a long list is written with dots, and then not known."""
    try:
        return ranks(json.loads(text) if isinstance(text, str) else text)
    except json.JSONDecodeError:
        return ()


def _of_operators(around: Sequence[tuple[str, Inputs | None]], world_size: int) -> dict[str, Any]:
    """From the annotation `nccl:...`, whose input is the tensor that is sent; grouped calls leave the list empty."""
    for name, inputs in around:
        op, coalesced = collective_of_record(name) if name.startswith(("nccl:", "rccl:")) else ("", False)
        if not op:
            continue
        words: dict[str, Any] = dict(op=op, coalesced=coalesced)
        sizes = [(math.prod(shape), type_name(kind)) for shape, kind in zip(inputs.shapes, inputs.types) if shape and _flat(shape)] if inputs else []
        if not sizes:
            return words
        datatype = sizes[0][1]
        elements = sum(count for count, kind in sizes if kind == datatype)
        per_rank = world_size if op == "all_gather" else 1  # its input is one rank's part
        nbytes = elements * per_rank * element_bytes(datatype) if per_rank > 0 and elements else math.nan
        return words | dict(datatype=datatype, nbytes=nbytes, recorded="operator")
    return {}


def _flat(shape: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in shape)
