"""Measuring collectives over the devices JAX has, into a table of collectives.

`bytes` is the size of nccl-tests (NVIDIA, nccl-tests, doc/PERFORMANCE.md): the larger of a rank's send and receive buffers; so the buffer of each rank for
all_reduce, alltoall and sendrecv, and the full buffer for all_gather and reduce_scatter. Bus bandwidth is `bytes / time` times 2 (n-1)/n, (n-1)/n, or 1 for
sendrecv. A time is that of one jitted call, its dispatch included. sendrecv is a ring: each rank sends to the next one.

With several processes every process calls `measure_collectives`; they agree on each case and its number of samples, and process 0 writes the table.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ._design import Case, Stream, take_turns
from ._device import Device, this_device, today
from ._kernels import Measurement, Progress
from ._operators import ALIASES
from ._table import GrowingTable
from ._timing import calls_per_sample, compile_time, time_calls

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv")
COLLECTIVE_ALIASES = {"psum": "all_reduce", "psum_scatter": "reduce_scatter", "all_to_all": "alltoall", "ppermute": "sendrecv", "send_recv": "sendrecv"}
COLUMNS = (
    "op", "dtype", "bytes", "n_ranks", "n_nodes", "algo", "proto", "time_us", "algbw_GBps", "busbw_GBps", "gpu", "interconnect", "source", "flag",
    "time_min_us", "time_p10_us", "time_p90_us", "spread", "iterations", "calls_per_sync", "compile_s", "n_processes", "device", "device_kind", "backend",
    "jax", "jaxlib", "driver", "num_threads", "date",
)  # fmt: skip
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "int32": jnp.int32}
_SMALLEST, _LARGEST = 8, 32  # powers of two of `bytes`
_NOISY = 0.1
_IN_FLIGHT = 16


def bus_factor(op: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, by nccl-tests' definitions. [1]"""
    n = float(num_ranks)
    return {"all_reduce": 2 * (n - 1) / n, "sendrecv": 1.0}.get(op, (n - 1) / n)


def collective_design(
    devices: int, ops: Sequence[str] | None = None, datatypes: Sequence[str] | None = None, processes: int = 1, count: int | None = None
) -> list[Case] | Iterator[Case]:
    """The cases in the order in which they are measured: sizes of each collective and rank count by bit reversal, so that every prefix spreads over them.

    Args:
      devices: ranks at most; rank counts are 2, 4, 8, ... and this one, in multiples of `processes`.
      ops: collectives; None for all.
      datatypes: None for float32.
      count: how many cases; None for an iterator over all.
    Raises:
      ValueError: for fewer than two devices, or an unknown collective or datatype.
    """
    cases = take_turns(_streams(devices, ops, datatypes, processes), lambda case: True)
    return cases if count is None else list(islice(cases, count))


def measure_collectives(
    budget_s: float = 120.0,
    out: str | os.PathLike = "measured_collectives.csv",
    devices: int | None = None,
    ops: Sequence[str] | None = None,
    datatypes: Sequence[str] | None = None,
    interconnect: str = "",
    processes_per_node: int = 1,
    force_new: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Measurement:
    """Measures until the budget is used or every case is done, adding each row to `out` at once. A later call with the same file goes on.

    Args:
      budget_s: wall-clock time of this call. [s]
      out: table, created if it is not there; written by process 0.
      devices: ranks at most; None for all that JAX has.
      ops, datatypes: see `collective_design`.
      interconnect: what links the devices, for the column of that name.
      processes_per_node: for `n_nodes`; 1 when each process is a node of its own.
      force_new, on_progress: as in `measure_kernels`.
    Raises:
      ValueError: for a bad budget, collective, datatype or file, or more devices than there are.
    """
    if not 0 < budget_s < math.inf:
        raise ValueError(f"budget_s is {budget_s}; it should be above zero and finite.")
    if processes_per_node < 1:
        raise ValueError(f"processes_per_node is {processes_per_node}; it should be at least 1.")
    begin = time.perf_counter()
    there = len(jax.devices())
    count = there if devices is None else devices
    if count > there:
        how = "Start JAX with jax.config.update('jax_num_cpu_devices', N) before its first use." if jax.default_backend() == "cpu" else "Ask for fewer."
        raise ValueError(f"devices is {count}, but JAX has {there} of kind {jax.devices()[0].device_kind}. {how}")
    device, processes = this_device(), jax.process_count()
    streams = _streams(count, ops, datatypes, processes)
    table = _opened(out, device.columns() | {"n_processes": processes}, force_new)
    run = _Run(device, table, budget_s, begin, interconnect, math.ceil(processes / processes_per_node))
    with jax.enable_x64(False):
        for case in take_turns(streams, run.wanted):
            if on_progress is not None:
                on_progress(Progress(run.elapsed(), budget_s, run.added, f"{case.op} {case.dtype} {case['n_ranks']} x {case['bytes']} B"))
            run.measure(case)
    if on_progress is not None:
        on_progress(Progress(run.elapsed(), budget_s, run.added, ""))
    by_op = {op: sum(key[0] == op for key in run.done) for op in COLLECTIVES}
    before = 0 if table is None else len(table.rows)
    repaired = 0 if table is None else table.repaired
    counts = {op: number for op, number in by_op.items() if number}
    return Measurement(str(out), before, run.added, counts, run.passed_over, {}, repaired, run.elapsed(), device)


def _opened(out: str | os.PathLike, fixed: dict[str, Any], force_new: bool) -> GrowingTable | None:
    """The table in process 0. Every process learns whether it could be opened, so that none waits for the others."""
    table, problem = None, None
    if jax.process_index() == 0:
        try:
            table = GrowingTable(out, COLUMNS, fixed, force_new)
        except (ValueError, OSError) as error:
            problem = error
    failed = _from_first(int(problem is not None))
    if problem is not None:
        raise problem
    if failed:
        raise ValueError(f"process 0 could not open {out}; it says why.")
    return table


def _from_first(number: int) -> int:
    """Process 0's number, in every process."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _streams(devices: int, ops: Sequence[str] | None, datatypes: Sequence[str] | None, processes: int) -> list[Stream]:
    if devices < 2:
        raise ValueError(f"devices is {devices}; a collective needs at least 2. On a CPU, `--devices 4` makes four of it.")
    names = tuple(COLLECTIVES) if ops is None else tuple(dict.fromkeys(COLLECTIVE_ALIASES.get(op, op) for op in ops))
    for name in names:
        if name not in COLLECTIVES:
            raise ValueError(f"op {name!r} is not known; choose from {', '.join(COLLECTIVES)}.")
    wanted = ("float32",) if datatypes is None else tuple(dict.fromkeys(ALIASES.get(name, name) for name in datatypes))
    for name in wanted:
        if name not in _DTYPES:
            raise ValueError(f"datatype {name!r} is not known; choose from {', '.join(_DTYPES)}.")
    counts = sorted({*(2**power for power in range(1, devices.bit_length()) if 2**power <= devices), devices})
    ranks = [count for count in counts if count % processes == 0]
    return [Stream(f"{op} {dtype} {n}", 1.0, _sizes(op, dtype, n)) for n in ranks for op in names for dtype in wanted]


def _sizes(op: str, dtype: str, ranks: int) -> Iterator[Case]:
    """Powers of two, rounded so that every rank's part is whole."""
    steps = _LARGEST - _SMALLEST + 1
    bits = (steps - 1).bit_length()
    unit = ranks * jnp.dtype(_DTYPES[dtype]).itemsize
    seen: set[int] = set()
    for at in range(2**bits):
        step = int(f"{at:0{bits}b}"[::-1], 2)
        nbytes = max(round(2 ** (_SMALLEST + step) / unit), 1) * unit
        if step < steps and nbytes not in seen:
            seen.add(nbytes)
            yield Case(op, dtype, (("bytes", nbytes), ("n_ranks", ranks)))


def _program(op: str, ranks: int) -> Callable[[Any], Any]:
    """What one rank runs on its part."""
    ring = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return {
        "all_reduce": lambda x: lax.psum(x, "ranks"),
        "all_gather": lambda x: lax.all_gather(x, "ranks", tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, "ranks", tiled=True),
        "alltoall": lambda x: lax.all_to_all(x, "ranks", 0, 0, tiled=True),
        "sendrecv": lambda x: lax.ppermute(x, "ranks", ring),
    }[op]


def collective_call(case: Case, devices: Sequence[Any]) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The jitted collective of a case over `devices`, and what makes its input there."""
    ranks, dtype = case["n_ranks"], _DTYPES[case.dtype]
    mesh = Mesh(np.asarray(devices), ("ranks",))
    send = case["bytes"] // (ranks if case.op == "all_gather" else 1) // jnp.dtype(dtype).itemsize  # elements that each rank holds
    function = jax.jit(jax.shard_map(_program(case.op, ranks), mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False))
    make = jax.jit(lambda: (lax.iota(jnp.int32, ranks * send) % 251).astype(dtype), out_shardings=NamedSharding(mesh, P("ranks")))
    return function, make


class _Run:
    """The state of one call. With several processes, process 0 decides."""

    def __init__(self, device: Device, table: GrowingTable | None, budget: float, begin: float, interconnect: str, nodes: int):
        self.device, self.table, self.budget, self.begin, self.interconnect, self.nodes = device, table, budget, begin, interconnect, nodes
        rows = [] if table is None else table.rows
        self.done = {(row["op"], row["dtype"], int(row["bytes"]), int(row["n_ranks"])) for row in rows}
        self.added = 0
        self.passed_over: dict[str, int] = {}
        self.rate = 1e9 if device.is_cpu else 1e10  # [B/s], a first guess

    def elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def wanted(self, case: Case) -> bool | None:
        """See `take_turns`."""
        left = self.budget - self.elapsed()
        nbytes, ranks = case["bytes"], case["n_ranks"]
        held = 3.0 * nbytes * (ranks if self.device.is_cpu else 1)
        fits = held < self.device.memory_bytes and 10.0 * nbytes / self.rate < min(0.03 * self.budget, left)
        verdict = 2 if _key(case) in self.done else 1 if left > 0 and fits else 0
        verdict = _from_first(verdict)
        if verdict == 0 and left > 0:
            self.passed_over[case.op] = self.passed_over.get(case.op, 0) + 1
        return {0: False, 1: True, 2: None}[verdict]

    def measure(self, case: Case) -> None:
        """Measures one case and adds its row."""
        function, make = collective_call(case, _chosen(case["n_ranks"]))
        nbytes, ranks = case["bytes"], case["n_ranks"]
        sets = [(make(),), (make(),)]
        jax.block_until_ready(sets)
        compiled = compile_time(function, sets[0])
        cap = min(max(self.budget / 400, 0.05), 1.0)
        agreed = self._counts(function, sets, cap) if jax.process_count() > 1 else None
        timing = time_calls(function, sets, cap, asynchronous=not self.device.is_cpu, most_in_flight=_IN_FLIGHT, agreed=agreed)
        self.done.add(_key(case))
        self.added += 1
        self.rate = max(self.rate / 2, min(self.rate * 2, nbytes / timing.median)) if nbytes > 2**20 else self.rate
        if self.table is None:
            return
        bandwidth = nbytes / timing.median / 1e9
        self.table.append(
            {
                **self.device.columns(), "op": case.op, "dtype": case.dtype, "bytes": nbytes, "n_ranks": ranks, "n_nodes": self.nodes, "algo": "auto",
                "proto": "auto", "time_us": timing.median * 1e6, "algbw_GBps": bandwidth, "busbw_GBps": bandwidth * bus_factor(case.op, ranks),
                "interconnect": self.interconnect or ("memory of one host" if self.device.is_cpu and self.nodes == 1 else "unstated"),
                "source": "diffperf measure collectives", "flag": "noisy_median" if timing.spread > _NOISY else "", "time_min_us": timing.least * 1e6,
                "time_p10_us": timing.p10 * 1e6, "time_p90_us": timing.p90 * 1e6, "spread": timing.spread, "iterations": timing.iterations,
                "calls_per_sync": timing.calls, "compile_s": compiled, "n_processes": jax.process_count(), "date": today(),
            }
        )  # fmt: skip

    def _counts(self, function: Callable[..., Any], sets: Sequence[tuple[Any, ...]], cap: float) -> tuple[int, int]:
        """Samples and calls in each, by the time that a call takes process 0."""
        jax.block_until_ready(function(*sets[0]))
        begin = time.perf_counter()
        jax.block_until_ready(function(*sets[1]))
        took = time.perf_counter() - begin
        calls = 1 if self.device.is_cpu else _from_first(calls_per_sample(took, _IN_FLIGHT))
        return _from_first(int(np.clip(cap / took / calls, 5, 500))), calls


def _key(case: Case) -> tuple[str, str, int, int]:
    return (case.op, case.dtype, case["bytes"], case["n_ranks"])


def _chosen(ranks: int) -> list[Any]:
    """The first devices of each process, equally many."""
    each = ranks // jax.process_count()
    taken: dict[int, int] = {}
    chosen = []
    for device in jax.devices():
        if taken.get(device.process_index, 0) < each:
            taken[device.process_index] = taken.get(device.process_index, 0) + 1
            chosen.append(device)
    return chosen
