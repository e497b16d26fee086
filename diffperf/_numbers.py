"""Checks of plain numbers, with messages that say which one is wrong."""

import math
from typing import Any

import numpy as np


def plain_number(value: Any, label: str) -> float:
    """`value` as a float.

    Raises:
      ValueError: for what is no single number, such as a text or an array.
    """
    try:
        if isinstance(value, str | bytes) or np.ndim(value) != 0:
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{label} is {value!r}; it should be a number.") from None


def check_amount(value: Any, label: str) -> None:
    """Raises ValueError unless `value` is a finite number, at least 0."""
    number = plain_number(value, label)
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{label} is {number:g}; it should be a finite number, at least 0.")


def check_whole(value: Any, label: str, least: int) -> None:
    """Raises ValueError unless `value` is a whole number, at least `least`."""
    number = plain_number(value, label)
    if not (math.isfinite(number) and number == int(number) and number >= least):
        raise ValueError(f"{label} is {value!r}; it should be a whole number, at least {least}.")
