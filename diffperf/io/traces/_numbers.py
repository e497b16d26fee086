"""Numbers and names as a profiler wrote them, or a stand-in where it wrote something else."""

import math
import re
from typing import Any

import numpy as np

DAY_S = 86_400.0  # no kernel lasts longer, and no trace holds kernels further apart [s]
FAR_OFF = "an event of more than a day, or more than a day away from the others"
LATEST_US = 2**63 / 1000  # times in whole nanoseconds fit into 64 bits [us]
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def whole(value: Any) -> int:
    """A whole number that fits into 64 bits; -1 for anything else."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    if isinstance(value, bool) or (isinstance(value, float) and value != number):
        return -1
    return number if -(2**63) <= number < 2**63 else -1


def last_number(value: Any) -> int:
    """A whole number, or the one at the end of a text ("stream 7"); -1 for anything else."""
    found = re.search(r"(?:^|[\s#:_]|stream)(\d{1,18})\s*$", value, re.IGNORECASE) if isinstance(value, str) else None
    return int(found[1]) if found else whole(value)


def rank_in_name(file: str) -> int:
    """The rank in the name of a file, -1 for none: the last number behind `rank`, else behind `worker`, else behind `trace`; dates are longer."""
    name = file.rsplit("/", 1)[-1]
    for word, digits in (("rank", 9), ("worker", 5), ("trace", 5)):
        found = re.findall(rf"{word}[-_=]?(\d{{1,{digits}}})(?!\d)", name, re.IGNORECASE)
        if found:
            return int(found[-1])
    return -1


def real(value: Any) -> float:
    """A finite number, or a text of one; NaN for anything else."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def amount(value: Any) -> float:
    """A positive number below 2**63; NaN for anything else."""
    number = real(value)
    return number if 0 < number < 2**63 else math.nan


def sizes(value: Any) -> tuple[int, ...]:
    """The sizes of a grid or a block, each below 2**31 and at most three; () for anything else."""
    if not isinstance(value, (list, tuple)):
        return ()
    numbers = tuple(whole(item) for item in value)
    return numbers if len(numbers) <= 3 and all(0 < number < 2**31 for number in numbers) and math.prod(numbers) < 2**63 else ()


def ranks(value: Any) -> tuple[int, ...]:
    """A list of ranks; () for anything else."""
    return tuple(value) if isinstance(value, list) and all(isinstance(item, int) for item in value) else ()


def clean(name: Any) -> str:
    """A name that can be printed and written: what controls a terminal, breaks a line or is no character becomes a blank or a question mark."""
    return _UNPRINTABLE.sub(lambda found: "?" if "\ud800" <= found[0] <= "\udfff" else " ", name) if isinstance(name, str) else ""


def far_off(start_s: np.ndarray) -> np.ndarray:
    """Mask of the times more than a day from the middle one: a clock that jumped."""
    return np.abs(start_s - np.median(start_s)) > DAY_S if len(start_s) else np.zeros(0, bool)
