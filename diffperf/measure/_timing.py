"""Timing one compiled call: compile time apart, warm-up, rotated inputs, enough samples for a steady median.

A sample is the time of `calls` calls started one after another and waited for once, divided by `calls`: on accelerators several calls are in flight, so
that the way to the device and back is paid once. On a CPU one call is one sample. Each call includes its dispatch; `launch` rows say how much that is.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

STEADY = 0.02  # half-width of the interval of the median, as a part of it, at which sampling stops
FEWEST, MOST = 7, 3000  # samples
_FLIGHT, _IN_FLIGHT = 2e-3, 64  # on accelerators: time of a sample [s], and most calls in it


class Timing(NamedTuple):
    """Time of one call. `median`, `p10`, `p90`, `least` in seconds; `spread` is half the 95% interval of the median, as a part of it."""

    median: float
    p10: float
    p90: float
    least: float
    spread: float
    iterations: int
    calls: int


def compile_time(function: Any, arguments: Sequence[Any]) -> float:
    """Traces and compiles a jitted function for these arguments, so that its first call need not. [s]"""
    begin = time.perf_counter()
    function.lower(*arguments).compile()
    return time.perf_counter() - begin


def time_calls(
    function: Callable[..., Any],
    sets: Sequence[tuple[Any, ...]],
    cap: float,
    carry: bool = False,
    asynchronous: bool = False,
    most_in_flight: int = _IN_FLIGHT,
    agreed: tuple[int, int] | None = None,
) -> Timing:
    """Times `function` over sets of arguments in turn.

    Args:
      function: a jitted function.
      sets: arguments, one tuple per set, rotated call by call.
      cap: time after which sampling stops, though the median is not steady. [s]
      carry: the function updates its first argument in place, and returns the new one first.
      asynchronous: several calls per sample, as on accelerators.
      most_in_flight: at most so many, as their results need memory.
      agreed: exactly so many samples of so many calls, where several processes must call equally often; None to stop when steady or at the cap.
    """
    turn = _Rotation(function, list(sets), carry)
    turn.go(1)
    first = turn.go(1)
    samples, calls = agreed or (MOST, calls_per_sample(first, most_in_flight) if asynchronous else 1)
    if agreed is not None or first < cap / 10:
        turn.go(calls)
    taken: list[float] = []
    enabled, begin = gc.isenabled(), time.perf_counter()
    gc.disable()
    try:
        while len(taken) < samples:
            taken.append(turn.go(calls) / calls)
            count = len(taken)
            if agreed is None and count >= 3:
                late = time.perf_counter() - begin > cap
                if late or (count >= FEWEST and _worth_a_look(count) and spread_of_median(taken) < STEADY):
                    break
    finally:
        if enabled:
            gc.enable()
    low, middle, high = (float(value) for value in np.percentile(taken, (10, 50, 90)))
    return Timing(middle, low, high, min(taken), spread_of_median(taken), len(taken), calls)


def calls_per_sample(one_call: float, most: int = _IN_FLIGHT) -> int:
    """Calls in flight at once on an accelerator, so that a sample lasts 2 ms, by the time of one call [s]."""
    return min(max(1, math.ceil(_FLIGHT / max(one_call, 1e-9))), most)


def spread_of_median(values: Sequence[float]) -> float:
    """Half the 95% interval of the median by order statistics (ranks n/2 -+ 0.98 sqrt(n), the normal approximation of the binomial), over the median."""
    ordered, n = sorted(values), len(values)
    low, high = math.floor(n / 2 - 0.98 * math.sqrt(n)), math.ceil(n / 2 + 0.98 * math.sqrt(n))
    return (ordered[min(high, n) - 1] - ordered[max(low, 1) - 1]) / 2 / max(float(np.median(ordered)), 1e-12)


def _worth_a_look(count: int) -> bool:
    """Sorting is kept rare among thousands of samples."""
    return count < 32 or count % 16 == 0


class _Rotation:
    """Calls a function with one set of arguments after the other."""

    def __init__(self, function: Callable[..., Any], sets: list[tuple[Any, ...]], carry: bool):
        self.function, self.sets, self.carry, self.next = function, sets, carry, 0

    def go(self, calls: int) -> float:
        """Time of `calls` calls, waited for together. [s]"""
        results = []
        begin = time.perf_counter()
        for _ in range(calls):
            at = self.next
            self.next = (at + 1) % len(self.sets)
            result = self.function(*self.sets[at])
            if self.carry:
                self.sets[at] = (result[0], *self.sets[at][1:])
                result = result[1:] or result[0]
            results.append(result)
        jax.block_until_ready(results)
        return time.perf_counter() - begin
