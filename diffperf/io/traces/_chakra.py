"""Execution traces: graphs of operations with dependencies. Chakra in JSON (`workload_graph`) and as protocol buffers (`.et`), and PyTorch's own (`nodes`).

Durations stand in Chakra's forms; PyTorch's has none. Leaves out tensors and storage operations. Schema: MLCommons, Chakra, et_def.proto.
"""

import math
import re
from typing import Any

import numpy as np

from ._classify import COMMUNICATION, COMPUTE, MEMORY, OTHER, kind_of
from ._tables import ExecutionGraph, Remarks, TraceError
from ._wire import WireError, fields, text, varint

_COMM_TYPES = (5, 6, 7)  # send, receive, collective
_MEMORY_TYPES = (2, 3, 8)  # load, store, storage
_WORDS = {"METADATA_NODE": 1, "MEM_LOAD_NODE": 2, "MEM_STORE_NODE": 3, "COMP_NODE": 4, "COMM_SEND_NODE": 5, "COMM_RECV_NODE": 6, "COMM_COLL_NODE": 7}


class GraphBuilder:
    """Takes nodes one by one, and gives an `ExecutionGraph`."""

    def __init__(self, file: str, format: str):
        self.file, self.format, self.remarks = file, format, Remarks(file)
        found = re.search(r"rank[-_]?(\d+)|\.(\d+)\.et", file.rsplit("/", 1)[-1])
        self.rank = int(found[1] or found[2]) if found else -1
        self._rows: list[tuple[int, str, int, bool, float, float]] = []
        self._parents: list[list[int]] = []

    def add_chakra(self, node: Any, number: int) -> None:
        """An item of `workload_graph`; keys are written in several cases."""
        node = {str(key).lower(): value for key, value in node.items()} if isinstance(node, dict) else {}
        identity, name = node.get("id"), node.get("name")
        if not isinstance(identity, int) or not isinstance(name, str):
            self.remarks.add("a node without id and name", f"node {number}")
            return
        attributes = {str(item.get("name")): next((value for key, value in item.items() if key != "name"), None)
                      for item in node.get("attr") or () if isinstance(item, dict)}  # fmt: skip
        kind = node.get("nodetype", node.get("type", 0))
        duration = node.get("runtime", node.get("duration_micros", node.get("durationmicros")))
        on_host = node.get("is_cpu_op", attributes.get("is_cpu_op", True))
        size = node.get("comm_size", attributes.get("comm_size"))
        self._add(identity, name, _WORDS.get(kind, 0) if isinstance(kind, str) else int(kind), not on_host, duration, size,
                  [*(node.get("data_deps") or node.get("datadeps") or ()), *(node.get("ctrl_deps") or node.get("ctrldeps") or ())])  # fmt: skip

    def add_pytorch(self, node: Any, number: int) -> None:
        """An item of `nodes`: the order is that of the calls, `ctrl_deps` the caller."""
        if not isinstance(node, dict) or not isinstance(node.get("id"), int):
            self.remarks.add("a node without id and name", f"node {number}")
            return
        parent = node.get("ctrl_deps", node.get("parent"))
        name = str(node.get("name", ""))
        self._add(node["id"], name, 7 if name.startswith(("nccl:", "c10d::", "record_param_comms")) else 4, False, None, None,
                  [parent] if isinstance(parent, int) and parent != node["id"] else [])  # fmt: skip

    def _add(self, identity: int, name: str, node_type: int, on_device: bool, duration: Any, size: Any, parents: list[Any]) -> None:
        kind = COMMUNICATION if node_type in _COMM_TYPES else MEMORY if node_type in _MEMORY_TYPES else COMPUTE if node_type == 4 else OTHER
        if on_device and kind == COMPUTE:
            kind = kind_of(name)
        seconds = duration * 1e-6 if isinstance(duration, (int, float)) and duration >= 0 else math.nan
        if isinstance(duration, (int, float)) and duration < 0:
            self.remarks.add("clock running backwards: a node ends before it starts", f"node {identity} ({name[:60]!r})")
        self._rows.append((identity, name, kind, on_device, seconds, float(size) if isinstance(size, (int, float)) else math.nan))
        self._parents.append([parent for parent in parents if isinstance(parent, int)])

    def done(self) -> ExecutionGraph:
        """The graph.

        Raises:
          TraceError: no node.
        """
        if not self._rows:
            raise TraceError(f"{self.file} has no nodes.")
        ids, names, kind, on_device, seconds, nbytes = zip(*self._rows)
        place = {identity: i for i, identity in enumerate(ids)}
        if len(place) < len(ids):
            self.remarks.add("two nodes with one id, the last counts as a dependency", f"{len(ids) - len(place)} nodes")
        for identity, parents in zip(ids, self._parents):
            for parent in parents:
                if parent not in place:
                    self.remarks.add("a dependency on a node that is not in the file", f"node {identity} waits for node {parent}")
        flat = [place.get(parent, -1) for parents in self._parents for parent in parents]
        return ExecutionGraph(
            self.file, self.format, self.rank, np.array(ids, np.uint64).astype(np.int64), names, np.array(kind, np.int8), np.array(on_device, bool),
            np.array(seconds, float), np.array(flat, np.int64), np.cumsum([0, *map(len, self._parents)]), np.array(nbytes, float), self.remarks.done(),
        )  # fmt: skip


def read_chakra(file: str, data: memoryview) -> ExecutionGraph:
    """A Chakra trace of protocol buffers: messages one after the other, each after its length; the first is the metadata.

    Raises:
      TraceError: the bytes are no such file.
    """
    builder, at, number = GraphBuilder(file, "chakra"), 0, 0
    try:
        while at < len(data):
            size, at = varint(data, at)
            if at + size > len(data):
                raise WireError(f"message {number} needs {size:,} bytes, {len(data) - at:,} are left")
            if number:
                builder.add_chakra(_node(data[at : at + size]), number)
            at, number = at + size, number + 1
    except WireError as error:
        if number < 2:
            raise TraceError(f"{file} is no trace: neither JSON, nor XSpace, nor Chakra ({error}). Give a .json, .json.gz, .xplane.pb or .et file.") from None
        builder.remarks.add("the file is cut; what follows is missing", str(error))
    return builder.done()


def _node(message: memoryview) -> dict[str, Any]:
    node: dict[str, Any] = {"name": "", "id": 0, "data_deps": [], "ctrl_deps": [], "attr": []}
    for number, value in fields(message):
        if number in (4, 5):
            node["ctrl_deps" if number == 4 else "data_deps"] += _repeated(value)
        elif number == 2:
            node["name"] = text(value)
        elif number == 10 and isinstance(value, memoryview):
            parts = dict(fields(value))
            rest = [found for key, found in parts.items() if key in (7, 9, 11, 13, 27)]
            node["attr"].append({"name": text(parts.get(1, 0)), "value": rest[0] if rest else None if 29 not in parts else text(parts[29])})
        elif number in (1, 3, 7):
            node[{1: "id", 3: "type", 7: "duration_micros"}[number]] = value
    for item in node["attr"]:
        if item["name"] == "is_cpu_op":  # false is the default, and then not written
            item["value"] = bool(item["value"])
    return node


def _repeated(value: "int | memoryview") -> list[int]:
    """Whole numbers, packed or one by one."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = varint(value, at)
        found.append(number)
    return found
