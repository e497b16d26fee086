"""Steps that a profiler or the program itself marked on the host, and which step a time falls into.

The marks of PyTorch's profiler are called `ProfilerStep#12`, whatever their category. Where there is none, annotations of one text with rising numbers
(`iteration 5`, `## train_step 7 ##`) stand for them: a number of layers or buckets looks the same, so most of the launches must fall into them, and a remark
says what was taken.
"""

import math
import re
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from ._numbers import clean
from ._tables import Remarks, Step

_MOST_FAMILIES = 1000  # texts that are followed, so that names without end take no memory
_LONGEST = 120  # characters of such a text
_NUMBERED = re.compile(r"(?P<before>.*?)(?P<number>\d{1,18})(?P<after>\D*)$", re.DOTALL)
_HELD = 0.5  # of the launches must fall into annotations that are taken for steps
_TOUCH_S = 1e-9  # times are recorded in nanoseconds [s]


class Marks:
    """Collects marks while a file is read; times in microseconds."""

    def __init__(self):
        self._steps: list[tuple[int, str, float, float]] = []  # thread, name, start, duration
        self._families: dict[tuple[int, str, str], tuple[array, array, array]] = {}  # thread and text -> numbers, starts, durations
        self._names: set[str] = set()
        self._latest = -math.inf

    def seen(self, name: str, start: float) -> None:
        """An event of any category named as a step."""
        self._names.add(name)
        self._latest = max(self._latest, start)

    def step(self, name: str, thread: int, start: float, duration: float) -> None:
        """A mark of the profiler on the host."""
        self._steps.append((thread, clean(name), start, duration))

    def annotation(self, name: str, thread: int, start: float, duration: float) -> None:
        """An annotation of the program, which may be a step."""
        found = _NUMBERED.match(name) if len(name) <= _LONGEST else None
        if not found:
            return
        key = thread, found["before"], found["after"]
        if key not in self._families:
            if len(self._families) == _MOST_FAMILIES:
                return
            self._families[key] = array("q"), array("d"), array("d")
        for column, value in zip(self._families[key], (int(found["number"]), start, duration)):
            column.append(value)

    @property
    def last(self) -> float:
        """Start of the last of several steps over events of all categories, NaN for less than two names of steps. [us]"""
        return self._latest if len(self._names) > 1 else math.nan

    def steps(self, of: Callable[[int], bool], launched: np.ndarray, origin: float, remarks: Remarks) -> tuple[Step, ...]:
        """Steps in order of their start.

        Args:
          of: whether a thread counts.
          launched: when work was launched, from the origin. [s]
          origin: of the times that are returned. [us]
        """
        marked = sorted((_step(name, start, duration, origin) for thread, name, start, duration in self._steps if of(thread)), key=lambda step: step.start_s)
        once = [step for k, step in enumerate(marked) if not k or step.name != marked[k - 1].name or step.start_s >= marked[k - 1].end_s]
        if once:
            numbers = [int(found[1]) if (found := re.search(r"#(\d{1,18})", step.name)) else -1 for step in once]
            for step, before, number, last in zip(once[1:], once, numbers[1:], numbers):
                if 0 <= number < last:
                    remarks.add("clock running backwards: steps out of order, kept", f"{step.name} starts after {before.name}")
            return tuple(once)
        families = [_rising(text, columns, origin) for (thread, *text), columns in self._families.items() if of(thread)]
        taken = [steps for steps in families if len(launched) and (step_of(steps, launched) >= 0).mean() >= _HELD]
        if not taken:
            return ()
        best = max(taken, key=lambda steps: sum(step.end_s - step.start_s for step in steps))
        remarks.add("no step marked by the profiler; annotations with rising numbers are taken for steps", f"{best[0].name!r} to {best[-1].name!r}", len(best))
        return tuple(best)


def _step(name: str, start: float, duration: float, origin: float) -> Step:
    begin = (start - origin) * 1e-6
    return Step(name, begin, begin + duration * 1e-6)


def _rising(text: Sequence[str], columns: tuple[array, array, array], origin: float) -> list[Step]:
    """The marks of one text in order, none if there is but one, if numbers do not rise, or if one begins before the one before it ends."""
    before, after = text
    marks = sorted(zip(*columns), key=lambda mark: mark[1])
    steps = [_step(clean(f"{before}{number}{after}"), start, duration, origin) for number, start, duration in marks]
    rises = all(number > last for (number, _, _), (last, _, _) in zip(marks[1:], marks))
    apart = all(step.start_s >= last.end_s - _TOUCH_S for step, last in zip(steps[1:], steps))
    return steps if len(steps) > 1 and rises and apart else []


def step_of(steps: Sequence[Step], time: np.ndarray) -> np.ndarray:
    """Index of the step into which each time falls, -1 for none; steps in order of their start."""
    if not len(steps):
        return np.full(len(time), -1, np.int32)
    start, end = np.array([step.start_s for step in steps]), np.array([step.end_s for step in steps])
    at = np.searchsorted(start, time, side="right") - 1
    return np.where((at >= 0) & (time < end[at]), at, -1).astype(np.int32)
