"""Time budgets as people write them: `120s`, `2m`, `1.5h`."""

import math
import re

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_budget(text: str | float) -> float:
    """A duration: a number of seconds, or a number with `s`, `m` (minutes) or `h`.

    Returns:
      The duration. [s]
    Raises:
      ValueError: for another unit, no number, or a duration that is not above zero and finite.
    """
    match = re.fullmatch(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"budget is {str(text)!r}; it should be a time such as 120s, 2m or 1.5h.")
    seconds = float(match[1]) * _UNITS[match[2].lower()]
    if not 0 < seconds < math.inf:
        raise ValueError(f"budget is {str(text)!r}; it should be above zero and finite, such as 120s, 2m or 1.5h.")
    return seconds
