"""Trace files told apart by what is in them, whatever their names, and the ranks of one job put together."""

import os
from collections.abc import Sequence

from ._chakra import GraphBuilder, read_chakra
from ._json import CutError, members, open_bytes
from ._kineto import KinetoBuilder
from ._planes import JaxJsonBuilder, read_xspace
from ._tables import ExecutionGraph, LeftOut, RankTrace, TraceError

_STREAMED = ("traceEvents", "workload_graph", "nodes")


def read_trace(path: str | os.PathLike[str]) -> list[RankTrace | ExecutionGraph]:
    """The ranks in one file: Kineto (`.json`, gzipped or not), JAX profiles (`.xplane.pb`, `trace.json`; gzipped or not), Chakra and PyTorch execution traces.

    JSON is read as a stream: memory goes with the number of kernels and operators, not with the size of the file. Protocol buffers are held as a whole.

    Returns:
      One `RankTrace` for a Kineto file, one per device for a JAX profile, one `ExecutionGraph` for an execution trace. A file that is cut in the
      middle gives what was read before; `left_out` says where it stops.

    Raises:
      TraceError: the file is none of these, or has no GPU events; the message names the file.
      OSError: it cannot be read.
    """
    file = os.fspath(path)
    if os.path.isdir(file):
        raise TraceError(f"{file} is a folder; give the files in it, as {os.path.join(file, '*.json.gz')}.")
    with open_bytes(file) as stream:
        try:
            head = stream.read(64)
        except (OSError, EOFError) as error:
            raise TraceError(f"{file} is not a complete gzip file: {error}. Copy it again.") from None
    first = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not first:
        raise TraceError(f"{file} is empty. Give a trace of a profiler.")
    if first[:1] in b"{[":
        return _read_json(file)
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        raise TraceError(f"{file} is not JSON: it begins with {first[:20].decode()!r}. Give a .json, .json.gz, .xplane.pb or .et file.")
    try:
        with open_bytes(file) as stream:
            data = memoryview(stream.read())
    except EOFError as error:
        raise TraceError(f"{file} is not a complete gzip file: {error}. Copy it again.") from None
    if head[0] == 0x0A and not file.endswith((".et", ".et.gz")):
        return list(read_xspace(file, data))
    return [read_chakra(file, data)]


def read_traces(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[RankTrace | ExecutionGraph], tuple[LeftOut, ...]]:
    """The ranks in several files, in order of rank, and all that was left out. A file that cannot be used is named there, if another one can.

    Raises:
      TraceError: no file can be used.
      OSError: a file cannot be read.
    """
    found: list[RankTrace | ExecutionGraph] = []
    last = TraceError("no trace was given. Give at least one file.")
    failed: list[LeftOut] = []
    for path in paths:
        try:
            found += read_trace(path)
        except TraceError as error:
            failed.append(LeftOut("a file that could not be used", os.fspath(path), 1, (str(error),)))
            last = error
    if not found:
        raise last
    found.sort(key=lambda trace: trace.rank if trace.rank >= 0 else len(found))
    return found, (*failed, *(item for trace in found for item in trace.left_out), *_missing(found))


def _missing(found: Sequence[RankTrace | ExecutionGraph]) -> tuple[LeftOut, ...]:
    """Ranks that the job had and that were not given, and ranks given twice."""
    ranks = [trace.rank for trace in found if trace.rank >= 0]
    world = max((trace.world_size for trace in found if isinstance(trace, RankTrace)), default=-1)
    absent = sorted(set(range(world)) - set(ranks)) if ranks else []
    items = []
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        items.append(LeftOut("missing ranks", f"{len(ranks)} of {world} ranks", len(absent), (shown,)))
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        items.append(LeftOut("several traces of one rank, each shown", "all files", len(twice), (", ".join(map(str, twice[:8])),)))
    return tuple(items)


def _read_json(file: str) -> list[RankTrace | ExecutionGraph]:
    kineto, jax = KinetoBuilder(file), JaxJsonBuilder(file)
    graphs = {"workload_graph": GraphBuilder(file, "chakra-json"), "nodes": GraphBuilder(file, "pytorch-et")}
    counts = dict.fromkeys(_STREAMED, 0)
    keys, cut = [], ""
    try:
        for key, value in members(file, _STREAMED):
            if key not in counts:
                kineto.meta[key] = value
                keys.append(key)
                continue
            counts[key] += 1
            if key == "workload_graph":
                graphs[key].add_chakra(value, counts[key])
            elif key == "nodes":
                graphs[key].add_pytorch(value, counts[key])
            else:
                kineto.add(value, counts[key])
                if isinstance(value, dict) and "cat" not in value:
                    jax.add(value, counts[key])
    except CutError as error:
        cut = error.place
        if not error.started:
            raise TraceError(f"{file} is not JSON: {cut}. Give a whole .json or .json.gz file of a profiler.") from None
    used = max(counts, key=lambda key: counts[key])
    if not counts[used]:
        what = f"it stops: {cut}" if cut else f"its members are {', '.join(keys) or 'none'}; a Kineto trace has traceEvents, Chakra workload_graph or nodes"
        raise TraceError(f"{file} is not a trace: {what}.")
    reason = "the file stops in the middle; what follows is missing"
    if used != "traceEvents":
        if cut:
            graphs[used].remarks.add(reason, f"after node {counts[used]:,}: {cut}")
        return [graphs[used].done()]
    if cut:
        kineto.remarks.add(reason, f"after event {counts[used]:,}: {cut}" + ("" if "baseTimeNanoseconds" in keys else "; times may lack their base"))
    ranks = jax.done()
    if ranks:
        return list(ranks)
    if cut and not len(kineto):
        raise TraceError(f"{file} stops after event {counts[used]:,}, before any GPU event: {cut}. Copy the whole file.")
    return [kineto.done()]
