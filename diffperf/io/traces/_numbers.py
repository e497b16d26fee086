"""Numbers as a profiler wrote them, or a stand-in where it wrote something else."""

import math
from typing import Any


def whole(value: Any) -> int:
    """A whole number that fits into 64 bits; -1 for anything else."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -(2**63) <= number < 2**63 else -1


def amount(value: Any) -> float:
    """A positive finite number; NaN for anything else."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < 2**63 else math.nan


def sizes(value: Any) -> tuple[int, ...]:
    """The sizes of a grid or a block, each below 2**31 and at most three; () for anything else."""
    if not isinstance(value, (list, tuple)):
        return ()
    numbers = tuple(whole(item) for item in value)
    return numbers if len(numbers) <= 3 and all(0 < number < 2**31 for number in numbers) and math.prod(numbers) < 2**63 else ()


def ranks(value: Any) -> tuple[int, ...]:
    """A list of ranks; () for anything else."""
    return tuple(value) if isinstance(value, list) and all(isinstance(item, int) for item in value) else ()
