"""Execution traces: graphs of operations with dependencies. Chakra in JSON (`workload_graph`) and as protocol buffers (`.et`), and PyTorch's own (`nodes`).

Durations stand in Chakra's forms; PyTorch's has none. Leaves out tensors and storage operations. Schema: MLCommons, Chakra, et_def.proto.
"""

import re
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from ._classify import COMMUNICATION, COMPUTE, MEMORY, OTHER, kind_of
from ._numbers import DAY_S, amount, clean, rank_in_name, real
from ._tables import ExecutionGraph, Remarks, TraceError
from ._wire import Stream, WireError, fields, text, varint

_COMM_TYPES = (5, 6, 7)  # send, receive, collective
_MEMORY_TYPES = (2, 3, 8)  # load, store, storage
_WORDS = {"METADATA_NODE": 1, "MEM_LOAD_NODE": 2, "MEM_STORE_NODE": 3, "COMP_NODE": 4, "COMM_SEND_NODE": 5, "COMM_RECV_NODE": 6, "COMM_COLL_NODE": 7}


class GraphBuilder:
    """Takes nodes one by one, and gives an `ExecutionGraph`."""

    def __init__(self, file: str, format: str):
        self.file, self.format, self.remarks = file, format, Remarks(file)
        found, named = re.search(r"\.(\d{1,9})\.et", file.rsplit("/", 1)[-1]), rank_in_name(file)
        self.rank = int(found[1]) if found and named < 0 else named
        self._names: list[str] = []
        self._known: dict[str, tuple[str, int]] = {}  # name as written -> name, and its kind on the device
        self._ids, self._parents, self._counts = array("q"), array("q"), array("q")
        self._kinds, self._devices = array("b"), array("b")
        self._seconds, self._nbytes = array("d"), array("d")

    def add_chakra(self, node: Any, number: int) -> None:
        """An item of `workload_graph`; keys are written in several cases."""
        node = {str(key).lower(): value for key, value in node.items()} if isinstance(node, dict) else {}
        attributes = {item["name"]: next((value for key, value in item.items() if key != "name"), None)
                      for item in _list(node.get("attr")) if isinstance(item, dict) and isinstance(item.get("name"), str)}  # fmt: skip
        kind = node.get("nodetype", node.get("type", 0))
        duration = node.get("runtime", node.get("duration_micros", node.get("durationmicros")))
        on_host = node.get("is_cpu_op", attributes.get("is_cpu_op", True))
        size = node.get("comm_size", attributes.get("comm_size"))
        parents = [*_list(node.get("data_deps") or node.get("datadeps")), *_list(node.get("ctrl_deps") or node.get("ctrldeps"))]
        kind = _WORDS.get(kind, 0) if isinstance(kind, str) else kind
        self._add(node.get("id"), node.get("name"), number, kind if isinstance(kind, int) else 0, not on_host, duration, size, parents)

    def add_pytorch(self, node: Any, number: int) -> None:
        """An item of `nodes`: the order is that of the calls, `ctrl_deps` the caller."""
        node = node if isinstance(node, dict) else {}
        name, parent = node.get("name"), node.get("ctrl_deps", node.get("parent"))
        kind = 7 if isinstance(name, str) and name.startswith(("nccl:", "c10d::", "record_param_comms")) else 4
        self._add(node.get("id"), name, number, kind, False, None, None, [parent] if parent != node.get("id") else [])

    def _add(self, identity: Any, name: Any, number: int, node_type: int, on_device: bool, duration: Any, size: Any, parents: Iterable[Any]) -> None:
        own = _identity(identity)
        if own is None or not isinstance(name, str) or not name:
            self.remarks.add("a node without id and name", f"node {number}")
            return
        if name not in self._known:
            self._known[name] = clean(name), kind_of(name)
        name, by_name = self._known[name]
        kind = COMMUNICATION if node_type in _COMM_TYPES else MEMORY if node_type in _MEMORY_TYPES else COMPUTE if node_type == 4 else OTHER
        seconds = real(duration) * 1e-6
        if duration is not None and not 0 <= seconds <= DAY_S:
            reason = "clock running backwards: a node ends before it starts" if seconds < 0 else "a node whose duration is not between 0 and a day"
            self.remarks.add(reason, f"node {own} ({name[:60]!r}): {str(duration)[:40]} us")
            seconds = np.nan
        before = [parent for parent in map(_identity, parents) if parent is not None]
        self._names.append(name)
        for column, value in ((self._ids, own), (self._kinds, by_name if on_device and kind == COMPUTE else kind), (self._devices, bool(on_device)),
                              (self._seconds, seconds), (self._nbytes, amount(size)), (self._counts, len(before))):  # fmt: skip
            column.append(value)
        self._parents.extend(before)

    def done(self) -> ExecutionGraph:
        """The graph.

        Raises:
          TraceError: no node.
        """
        if not self._names:
            raise TraceError(f"{self.file} has no nodes{self.remarks.why()}. Give an execution trace with at least one node that has an id and a name.")
        ids, waits = np.array(self._ids), np.array(self._parents)
        order = np.argsort(ids, kind="stable")
        doubles = len(ids) - len(np.unique(ids))
        if doubles:
            self.remarks.add("two nodes with one id, the last counts as a dependency", f"{doubles} nodes", doubles)
        at = np.maximum(np.searchsorted(ids[order], waits, side="right") - 1, 0)
        parents = np.where(ids[order][at] == waits, order[at], -1)
        offsets = np.concatenate([[0], np.cumsum(np.array(self._counts))])
        unknown = np.flatnonzero(parents < 0)
        for i in unknown[:3].tolist():
            node = ids[np.searchsorted(offsets, i, side="right") - 1]
            self.remarks.add("a dependency on a node that is not in the file", f"node {node} waits for node {waits[i]}")
        if len(unknown) > 3:
            self.remarks.add("a dependency on a node that is not in the file", "", len(unknown) - 3)
        return ExecutionGraph(self.file, self.format, self.rank, ids, tuple(self._names), np.array(self._kinds, np.int8), np.array(self._devices, bool),
                              np.array(self._seconds), parents, offsets, np.array(self._nbytes), self.remarks.done())  # fmt: skip


def read_chakra(file: str, stream: Stream) -> ExecutionGraph:
    """A Chakra trace of protocol buffers: messages one after the other, each after its length; the first is the metadata.

    Raises:
      TraceError: the bytes are no such file.
    """
    builder, number = GraphBuilder(file, "chakra"), 0
    try:
        while not stream.ended():
            message = stream.read(stream.varint())
            if number:
                builder.add_chakra(_node(message), number)
            number += 1
    except WireError as error:
        if number < 2:
            raise TraceError(f"{file} is no trace: neither JSON, nor XSpace, nor Chakra ({error}). Give a .json, .json.gz, .xplane.pb or .et file.") from None
        builder.remarks.add("the file is cut; what follows is missing", f"after node {number - 1}: {error}")
    return builder.done()


def _node(message: bytes) -> dict[str, Any]:
    node: dict[str, Any] = {"name": "", "id": 0, "data_deps": [], "ctrl_deps": [], "attr": []}
    for number, value in fields(message):
        if number in (4, 5):
            node["ctrl_deps" if number == 4 else "data_deps"] += _repeated(value)
        elif number == 2:
            node["name"] = text(value)
        elif number == 10 and isinstance(value, bytes):
            parts = dict(fields(value))
            rest = [found for key, found in parts.items() if key in (7, 9, 11, 13, 27)]
            node["attr"].append({"name": text(parts.get(1, 0)), "value": rest[0] if rest else None if 29 not in parts else text(parts[29])})
        elif number in (1, 3, 7):
            node[{1: "id", 3: "type", 7: "duration_micros"}[number]] = value
    for item in node["attr"]:
        if item["name"] == "is_cpu_op":  # false is the default, and then not written
            item["value"] = bool(item["value"])
    return node


def _repeated(value: "int | bytes") -> list[int]:
    """Whole numbers, packed or one by one."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = varint(value, at)
        found.append(number)
    return found


def _identity(value: Any) -> int | None:
    """An id of 64 bits, which Chakra writes without sign, as a signed number; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,20}", value):  # JSON made from protocol buffers
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        return None
    return value - 2**64 if value >= 2**63 else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
