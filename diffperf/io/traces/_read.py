"""Trace files told apart by what is in them, whatever their names, and the ranks of one job put together."""

import dataclasses
import itertools
import math
import os
import zlib
from collections.abc import Sequence

from ._chakra import GraphBuilder, read_chakra
from ._jax_json import JaxJsonBuilder
from ._json import CutError, members, open_bytes
from ._kineto import KinetoBuilder
from ._tables import ExecutionGraph, LeftOut, RankTrace, TraceError
from ._wire import Stream
from ._xspace import read_xspace

_STREAMED = ("traceEvents", "workload_graph", "nodes")


def read_trace(path: str | os.PathLike[str]) -> list[RankTrace | ExecutionGraph]:
    """The ranks in one file: Kineto (`.json`, gzipped or not), JAX profiles (`.xplane.pb`, `trace.json`; gzipped or not), Chakra and PyTorch execution traces.

    Files are read as streams: memory goes with the number of kernels and operators, not with the size of the file.

    Returns:
      One `RankTrace` for a Kineto file of one rank, one per rank or device for others and for JAX profiles, one `ExecutionGraph` for an execution trace.
      A file that is cut in the middle gives what was read before; `left_out` says where it stops.

    Raises:
      TraceError: the file is none of these, has no GPU events, or cannot be read; the message names the file.
    """
    file = os.fspath(path)
    if os.path.isdir(file):
        raise TraceError(f"{file} is a folder; give the files in it, as {os.path.join(file, '*.json.gz')}.")
    try:
        return _read(file)
    except FileNotFoundError:
        raise TraceError(f"{file} does not exist. Give the name of a trace of a profiler.") from None
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror or error}.") from None


def _read(file: str) -> list[RankTrace | ExecutionGraph]:
    with open_bytes(file) as stream:
        try:
            head = stream.read(64)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{file} is not a complete gzip file: {error}. Copy it again.") from None
    first = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not first:
        raise TraceError(f"{file} is empty. Give a trace of a profiler.")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise TraceError(f"{file} is text in UTF-16; a trace is JSON in UTF-8. Save it as UTF-8.")
    if first[:1] in b"{[":
        return _read_json(file)
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        raise TraceError(f"{file} is not JSON of a profiler: it begins with {first[:20].decode()!r}, where {{ or [ should stand. "
                         "Give a .json, .json.gz, .xplane.pb or .et file.")  # fmt: skip
    if head[0] == 0x0A and not file.endswith((".et", ".et.gz")):
        return list(read_xspace(file))
    with open_bytes(file) as stream:
        return [read_chakra(file, Stream(stream))]


def read_traces(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[RankTrace | ExecutionGraph], tuple[LeftOut, ...]]:
    """The ranks in several files, in order of rank, and all that was left out. A file that cannot be used is named there, if another one can.

    Raises:
      TraceError: no file can be used.
    """
    found: list[RankTrace | ExecutionGraph] = []
    last = TraceError("no trace was given. Give at least one file.")
    failed: list[LeftOut] = []
    seen: set[str] = set()
    for path in paths:
        file = os.fspath(path)
        if os.path.realpath(file) in seen:
            failed.append(LeftOut("a file given more than once, read once", file, 1, (file,)))
            continue
        seen.add(os.path.realpath(file))
        try:
            found += read_trace(path)
        except TraceError as error:
            failed.append(LeftOut("a file that could not be used", file, 1, (str(error),)))
            last = error
    if not found:
        raise last if len(failed) < 2 else TraceError(f"none of the {len(seen)} files can be used; of the last: {last}")
    found.sort(key=lambda trace: trace.rank if trace.rank >= 0 else math.inf)
    return found, (*failed, *(item for trace in found for item in trace.left_out), *_missing(found))


def _missing(found: Sequence[RankTrace | ExecutionGraph]) -> tuple[LeftOut, ...]:
    """Ranks that the job had and that were not given, ranks given twice, and files that differ in how many there were."""
    ranks = [rank for rank, _ in {(trace.rank, trace.file) for trace in found if trace.rank >= 0}]  # one rank may have several devices in its file
    given = set(ranks)
    worlds = sorted({trace.world_size for trace in found if isinstance(trace, RankTrace) and trace.world_size > 0})
    world = worlds[-1] if worlds else 0
    items = []
    absent = world - sum(rank < world for rank in given)
    if absent and ranks:
        first = list(itertools.islice((rank for rank in range(world) if rank not in given), 8))
        shown = ", ".join(map(str, first)) + (", ..." if absent > 8 else "")
        items.append(LeftOut("missing ranks", f"{len(given)} of {world} ranks", absent, (shown,)))
    twice = sorted(rank for rank in given if ranks.count(rank) > 1)
    if twice:
        items.append(LeftOut("several traces of one rank, each shown, the first compared with other ranks", "all files", len(twice),
                             ("rank " + ", ".join(map(str, twice[:8])),)))  # fmt: skip
    if len(worlds) > 1:
        items.append(LeftOut("files that differ in the number of ranks, hence perhaps of several jobs", "all files", len(worlds),
                             (", ".join(map(str, worlds)),)))  # fmt: skip
    return tuple(items)


def _read_json(file: str) -> list[RankTrace | ExecutionGraph]:
    kineto, jax = KinetoBuilder(file), JaxJsonBuilder(file)
    graphs = {"workload_graph": GraphBuilder(file, "chakra-json"), "nodes": GraphBuilder(file, "pytorch-et")}
    counts = dict.fromkeys(_STREAMED, 0)
    keys: list[str] = []
    shapes: dict[str, str] = {}  # streamed member -> what it is, where it is no list of items
    cut = behind = ""
    try:
        for key, value, item in members(file, _STREAMED):
            if not item:
                keys.append(key)
                if key in counts:
                    shapes[key] = "empty" if value == [] else f"{str(value)[:40]!r}, no list"
                else:
                    kineto.meta[key] = value
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
        if error.whole:
            behind = error.place
        elif not error.started:
            raise TraceError(f"{file} is not JSON: {error.place}. Give a whole .json or .json.gz file of a profiler.") from None
        else:
            cut = error.place
    used = max(counts, key=lambda key: counts[key])
    if not counts[used]:
        if cut:
            raise TraceError(f"{file} is not a trace: it stops: {cut}. Copy the whole file.")
        what = ", ".join(f"{key} is {what}" for key, what in shapes.items())
        what = what or f"its members are {', '.join(keys[:20]) or 'none'}; a Kineto trace has traceEvents, Chakra workload_graph or nodes"
        raise TraceError(f"{file} is not a trace: {what}. Give a file that the profiler exported, with at least one event.")
    if behind:
        (graphs[used] if used in graphs else kineto).remarks.add("something behind the end of the trace, not read", behind)
    reason = "the file stops in the middle; what follows is missing"
    if used != "traceEvents":
        if cut:
            graphs[used].remarks.add(reason, f"after node {counts[used]:,}: {cut}")
        return [graphs[used].done()]
    if cut:
        kineto.remarks.add(reason, f"after event {counts[used]:,}: {cut}" + ("" if "baseTimeNanoseconds" in keys else "; times may lack their base"))
    ranks = jax.done()
    if ranks:
        return [dataclasses.replace(ranks[0], left_out=(*kineto.remarks.done(), *ranks[0].left_out)), *ranks[1:]]
    if not len(kineto) and jax.devices:
        raise TraceError(f"{file} has no GPU events: {jax.devices} ran nothing that could be read{jax.remarks.why()}. Profile on the device.")
    if cut and not len(kineto):
        raise TraceError(f"{file} stops after event {counts[used]:,}, before any GPU event: {cut}. Copy the whole file.")
    return list(kineto.done())
