"""Measuring operators of JAX on the device at hand, within a time budget, into a table of kernels.

A time is that of one jitted call, its dispatch included, with inputs that rotate through more memory than the last-level cache holds where the sizes allow,
and with a fresh result, whose pages the operating system may have to provide on a CPU. Leaves out power and clock, which are not recorded.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._design import Case, Stream, take_turns, walk
from ._device import Device, this_device, today
from ._operators import ALIASES, DTYPES, GROUPS, OPERATORS
from ._table import GrowingTable
from ._timing import compile_time, time_calls

SIZES = (
    "b", "m", "n", "k", "batch_size", "isl", "kv_len", "n_q_heads", "n_kv_heads", "head_dim", "window_size", "num_tokens", "hidden_size", "vocab",
    "elements", "quant_dtype", "layers", "num_heads", "seq_len",
)  # fmt: skip
COLUMNS = (
    "gpu", "op", "framework", "kernel_source", "dtype", *SIZES, "time_us", "flops", "bytes_min", "tflops", "gbps", "flag", "time_min_us", "time_p10_us",
    "time_p90_us", "spread", "iterations", "calls_per_sync", "compile_s", "input_sets", "rotated_bytes", "device", "device_kind", "backend", "jax", "jaxlib",
    "driver", "num_threads", "date", "seed",
)  # fmt: skip

# First guesses: FLOP/s (per thread on CPUs), B/s, and B/s of making inputs.
_RATES = {"cpu": (3e10, 1e10, 1e9), "gpu": (1e14, 1e12, 1e11), "tpu": (1e14, 1e12, 1e11)}
_DISPATCH = 1e-5  # [s], a first guess as well
_LARGEST = {"cpu": 8192}  # widest dimension; on accelerators four times that
_SHARES = (0.015, 0.06)  # of the budget, that one case may cost: ordinary ones, and those of a fixed list
_CALLS = 10.0  # calls that a slow case needs, warm-up included
_NOISY = 0.1
_ON_CPU = {"float32": 1.0, "bfloat16": 0.25, "float16": 0.12, "int8": 0.12}
_ON_ACCELERATOR = {"bfloat16": 1.0, "fp8": 0.5, "tf32": 0.3, "float32": 0.3, "float16": 0.25, "int8": 0.25}


class Progress(NamedTuple):
    """What `on_progress` is told. Times in seconds; `label` is the case under way, "" at the end."""

    elapsed_s: float
    budget_s: float
    rows_added: int
    label: str


class Measurement(NamedTuple):
    """What a call measured.

    Attributes:
      file: the table.
      rows_before, rows_added: rows it held, and those that this call added.
      by_op: rows in the file per operator.
      passed_over: cases too slow or too large for the budget, or that failed, per operator.
      unavailable: operator and datatype -> why the backend does not run it.
      repaired_bytes: of an unfinished last line that was cut off.
      seconds: time it took. [s]
      device: what it was measured on.
    """

    file: str
    rows_before: int
    rows_added: int
    by_op: dict[str, int]
    passed_over: dict[str, int]
    unavailable: dict[str, str]
    repaired_bytes: int
    seconds: float
    device: Device


def operator_names() -> tuple[str, ...]:
    """What `ops` accepts: operators, and names of groups of them."""
    return (*OPERATORS, *GROUPS)


def design(
    ops: Sequence[str] | None = None, datatypes: Sequence[str] | None = None, seed: int = 0, count: int | None = None, backend: str | None = None
) -> list[Case] | Iterator[Case]:
    """The cases in the order in which they are measured, before any is passed over for its cost.

    Args:
      ops: operators or groups; None for all.
      datatypes: None for those usual on the backend.
      seed: shifts the walk of each operator.
      count: how many; None for an iterator without end.
      backend: `cpu`, `gpu` or `tpu`; None for that of JAX.
    Raises:
      ValueError: for an unknown operator or datatype, or when none of the operators has one of the datatypes.
    """
    backend = jax.default_backend() if backend is None else backend
    cases = take_turns(_streams(ops, datatypes, seed, backend), lambda case: True)
    return cases if count is None else list(islice(cases, count))


def measure_kernels(
    budget_s: float = 120.0,
    out: str | os.PathLike = "measured_kernels.csv",
    ops: Sequence[str] | None = None,
    datatypes: Sequence[str] | None = None,
    seed: int = 0,
    force_new: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Measurement:
    """Measures until the budget is used, adding each row to `out` at once. A later call with the same file goes on where this one ended.

    Args:
      budget_s: wall-clock time of this call; the case under way when it ends is finished. [s]
      out: table, created if it is not there.
      ops, datatypes, seed: see `design`.
      force_new: drop the rows of a file of another device or other versions, instead of refusing it.
      on_progress: called before each case and at the end.
    Raises:
      ValueError: for a bad budget, operator or datatype, or a file that cannot be continued.
      KeyboardInterrupt: as it comes; finished rows are in the file.
    """
    if not 0 < budget_s < math.inf:
        raise ValueError(f"budget_s is {budget_s}; it should be above zero and finite.")
    begin = time.perf_counter()
    device = this_device()
    streams = _streams(ops, datatypes, seed, device.backend)
    table = GrowingTable(out, COLUMNS, device.columns(), force_new)
    with jax.enable_x64(False):
        run = _Run(device, table, budget_s, begin, seed)
        for case in take_turns(streams, run.wanted):
            if on_progress is not None:
                on_progress(Progress(run.elapsed(), budget_s, run.added, _label(case)))
            run.measure(case)
    if on_progress is not None:
        on_progress(Progress(run.elapsed(), budget_s, run.added, ""))
    by_op = {op: sum(key[0] == op for key in run.done) for op in OPERATORS}
    counts = {op: count for op, count in by_op.items() if count}
    return Measurement(str(out), len(table.rows), run.added, counts, run.passed_over, run.unavailable(), table.repaired, run.elapsed(), device)


def _streams(ops: Sequence[str] | None, datatypes: Sequence[str] | None, seed: int, backend: str) -> list[Stream]:
    names = list(OPERATORS) if ops is None else list(dict.fromkeys(name for given in ops for name in GROUPS.get(given, (given,))))
    for name in names:
        if name not in OPERATORS:
            raise ValueError(f"op {name!r} is not known; choose from {', '.join(operator_names())}.")
    usual = _ON_CPU if backend == "cpu" else _ON_ACCELERATOR
    wanted = tuple(usual) if datatypes is None else tuple(ALIASES.get(name, name) for name in datatypes)
    for name in wanted:
        if name not in DTYPES:
            raise ValueError(f"datatype {name!r} is not known; choose from {', '.join(DTYPES)}.")
    if "tf32" in wanted and backend != "gpu":
        if datatypes is not None:
            raise ValueError(f"datatype 'tf32' is of GPUs; the backend is {backend}. Choose float32.")
        wanted = tuple(name for name in wanted if name != "tf32")
    streams = []
    for op in names:
        operator = OPERATORS[op]
        own = [name for name in dict.fromkeys(wanted) if name in operator.dtypes]
        if datatypes is None and backend == "cpu" and op not in ("gemm", "bmm"):
            own = [name for name in own if name in ("float32", "bfloat16")]  # a CPU computes the others by conversion
        shares = {name: usual.get(name, 0.25) for name in own}
        for name in own:
            sources = ("cudnn", "xla") if backend == "gpu" and op.startswith("attention") and name in ("bfloat16", "float16") else ("xla",)
            for source in sources:
                weight = operator.weight * shares[name] / sum(shares.values()) / len(sources)
                streams.append(Stream(f"{op} {name} {source}", weight, _cases(op, name, source, backend, seed)))
    if not streams:
        known = "; ".join(f"{op}: {', '.join(OPERATORS[op].dtypes)}" for op in names)
        raise ValueError(f"none of the operators has datatype {' or '.join(wanted)}. Known are {known}.")
    return streams


def _cases(op: str, dtype: str, source: str, backend: str, seed: int) -> Iterator[Case]:
    operator, largest = OPERATORS[op], _LARGEST.get(backend, 32768)
    if operator.fixed:
        return iter([Case(op, dtype, tuple(sizes.items()), source) for sizes in operator.fixed])
    return walk(op, dtype, source, operator.dimensions, lambda point: operator.place(point, largest), seed)


def _label(case: Case) -> str:
    return f"{case.op} {case.dtype} {' '.join(str(value) for _, value in case.sizes)}"


def _key(op: str, dtype: str, source: str, sizes: Mapping[str, object]) -> tuple[str, ...]:
    return (op, dtype, source, *(str(sizes.get(name, "")) for name in SIZES))


class _Run:
    """The state of one call: what is done, and what cases have cost so far."""

    def __init__(self, device: Device, table: GrowingTable, budget: float, begin: float, seed: int):
        self.device, self.table, self.budget, self.begin, self.seed = device, table, budget, begin, seed
        self.done = {_key(row["op"], row["dtype"], row["kernel_source"], row) for row in table.rows}
        self.added = 0
        self.passed_over: dict[str, int] = {}
        self.rows: dict[str, int] = {}  # of this call, per operator, datatype and source
        self.failures: dict[str, list[str]] = {}
        self.corrections: dict[str, float] = {}
        flops, moved, made = _RATES.get(device.backend, _RATES["gpu"])
        self.rates = (flops * max(device.num_threads, 1), moved, made)
        for row in table.rows:
            pair = f"{row['op']} {row['dtype']} {row['kernel_source']}"
            self.learn(pair, float(row["flops"]), float(row["bytes_min"]), float(row["time_us"]) * 1e-6)

    def elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def wanted(self, case: Case) -> bool | None:
        """See `take_turns`. False for every case once the budget is used, so that the streams end."""
        left = self.budget - self.elapsed()
        if left <= 0 or len(self.failures.get(_pair(case), [])) > 2 + self.rows.get(_pair(case), 0):
            return False
        if _key(case.op, case.dtype, case.source, dict(case.sizes)) in self.done:
            return None
        operator = OPERATORS[case.op]
        work = operator.build(case)
        allowed = min(self.budget * _SHARES[bool(operator.fixed)], left)
        held = 2 * (work.bytes_min + work.scratch)
        affordable = held < self.device.memory_bytes and _CALLS * self.expected(_pair(case), work.flops, work.bytes_min) + held / self.rates[2] < allowed
        if not affordable:
            self.passed_over[case.op] = self.passed_over.get(case.op, 0) + 1
        return affordable

    def expected(self, pair: str, flops: float, nbytes: float) -> float:
        """Rough time of a call by what its operator has cost so far. [s]"""
        return self.corrections.get(pair, 1.0) * (_DISPATCH + flops / self.rates[0] + nbytes / self.rates[1])

    def learn(self, pair: str, flops: float, nbytes: float, took: float) -> None:
        """Moves that guess half of the way, in the logarithm, towards a measured time [s]."""
        self.corrections[pair] = self.corrections.get(pair, 1.0) * math.sqrt(max(took / self.expected(pair, flops, nbytes), 0.1))

    def sets(self, nbytes: float, other: float, most: int) -> int:
        """Sets of inputs of `nbytes` each: twice the cache in all, but at least two unless `most` is one."""
        room = max((self.device.memory_bytes - other) / 2, 0.0)
        return int(min(max(2, min(math.ceil(2 * self.device.cache_bytes / nbytes), room // nbytes)), most))

    def measure(self, case: Case) -> None:
        """Measures one case and adds its row; what the backend cannot run is noted instead, and given up after three failures more than rows."""
        work = OPERATORS[case.op].build(case)
        try:
            make, function = jax.jit(work.make), jax.jit(work.run, donate_argnums=(0,) if work.carry else ())
            first = make(jnp.uint32(self.seed))
            nbytes = _nbytes(first)
            result = _nbytes(jax.eval_shape(work.run, *first))
            cap = min(max(self.budget / 400, 0.05), 1.0)
            sets = self._filled(make, first, self.sets(nbytes, result + work.scratch, work.most_sets), cap)
            compiled = compile_time(function, first)
            in_flight = int(max(1, min(64, 0.1 * self.device.memory_bytes // max(result + work.scratch, 1))))
            timing = time_calls(function, sets, cap, work.carry, asynchronous=not self.device.is_cpu, most_in_flight=in_flight)
        except Exception as error:  # whatever a backend says to what it does not know
            self._failed(case, error)
            return
        self.learn(_pair(case), work.flops, work.bytes_min, timing.median)
        self.table.append(
            {
                **self.device.columns(), "op": case.op, "framework": f"jax {self.device.jax}", "kernel_source": case.source, "dtype": case.dtype,
                **dict(case.sizes), "time_us": timing.median * 1e6, "flops": work.flops, "bytes_min": work.bytes_min,
                "tflops": work.flops / timing.median / 1e12, "gbps": work.bytes_min / timing.median / 1e9,
                "flag": "noisy_median" if timing.spread > _NOISY else "", "time_min_us": timing.least * 1e6, "time_p10_us": timing.p10 * 1e6,
                "time_p90_us": timing.p90 * 1e6, "spread": timing.spread, "iterations": timing.iterations, "calls_per_sync": timing.calls,
                "compile_s": compiled, "input_sets": len(sets), "rotated_bytes": int(len(sets) * nbytes), "date": today(), "seed": self.seed,
            }
        )  # fmt: skip
        self.added += 1
        self.rows[_pair(case)] = self.rows.get(_pair(case), 0) + 1
        self.done.add(_key(case.op, case.dtype, case.source, dict(case.sizes)))

    def _filled(self, make: Callable[..., Any], first: Any, count: int, cap: float) -> list[Any]:
        """`count` sets of inputs, or those, at least two, that were made when `cap` seconds had passed: tiny inputs would need very many."""
        sets, begin = [first], time.perf_counter()
        while len(sets) < count and (len(sets) < 2 or time.perf_counter() - begin < cap):
            sets.append(jax.block_until_ready(make(jnp.uint32(self.seed + len(sets)))))
        return sets

    def _failed(self, case: Case, error: Exception) -> None:
        """Some sizes may fail where others run: out of memory, or a width that a kernel does not know."""
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        self.failures.setdefault(_pair(case), []).append(said)
        self.passed_over[case.op] = self.passed_over.get(case.op, 0) + 1

    def unavailable(self) -> dict[str, str]:
        """What failed and never ran, and why."""
        return {pair: said[0] for pair, said in self.failures.items() if not self.rows.get(pair)}


def _pair(case: Case) -> str:
    return f"{case.op} {case.dtype} {case.source}"


def _nbytes(tree: Any) -> float:
    """Bytes of all arrays. [B]"""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return float(sum(math.prod(leaf.shape) * (leaf.dtype.itemsize if hasattr(leaf.dtype, "itemsize") else 4) for leaf in leaves))
