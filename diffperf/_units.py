"""Numbers for people: three significant digits and the unit that suits the size. `17.2 ms`, `52.1 GB`, `1.98 PFLOP/s`."""

import math

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


def digits(value: float, count: int = 3) -> str:
    """`value` with `count` significant digits, never in scientific notation between 1e-4 and 1e6."""
    value = float(value)
    if not math.isfinite(value):
        return "inf" if value == math.inf else "-inf" if value == -math.inf else "n/a"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{count - 1}e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    exponent = math.floor(math.log10(abs(value)))
    rounded = round(value, count - 1 - exponent)
    decimals = max(count - 1 - math.floor(math.log10(abs(rounded))), 0)
    return f"{rounded:,.{decimals}f}"


def time_text(seconds: float) -> str:
    """A duration: `540 us`, `17.2 s`, `2.35 h`, `72.9 d`. Seconds stay seconds up to 10 minutes."""
    seconds = float(seconds)
    if seconds == 0 or not math.isfinite(seconds):
        return "0 s" if seconds == 0 else digits(seconds)
    size = abs(seconds)
    if 1.0 <= size < 600:
        return f"{digits(seconds)} s"
    for unit, name in _TIMES:
        if size >= unit * 0.9995 and (name != "d" or size >= 2 * unit):
            return f"{digits(seconds / unit)} {name}"
    return f"{digits(seconds / 1e-9)} ns"


def quantity(value: float, unit: str) -> str:
    """`value` in `unit` with a decimal prefix: `3.35 TB/s`, `989 TFLOP/s`, `6.9 MJ`. Seconds as `time_text`; a ratio, unit "1", without prefix."""
    value = float(value)
    if unit == "s":
        return time_text(value)
    if unit == "1":
        return count_text(value) if value >= 1e6 else f"{value:,.0f}" if value.is_integer() and value > 1 else digits(value)
    if unit.startswith("USD"):
        return money_text(value) + unit[3:]
    if value == 0 or not math.isfinite(value):
        return f"{digits(value)} {unit}"
    scales = _PREFIXES if abs(value) >= 1 or unit == "B" else _SMALL
    scale, prefix = next(((s, p) for s, p in scales if abs(value) >= s * 0.9995), scales[-1])
    return f"{digits(value / scale)} {prefix}{unit}"


def bytes_text(nbytes: float) -> str:
    """Bytes in units of 1000, `52.1 GB`."""
    return quantity(nbytes, "B")


def gigabytes(nbytes: float) -> str:
    """Bytes in GB whatever the size, for columns that are compared."""
    return digits(float(nbytes) / 1e9) if float(nbytes) >= 5e6 else "0"


def count_text(value: float) -> str:
    """A count with the suffix of the field: `70.6B` parameters, `15T` tokens."""
    value = float(value)
    if not math.isfinite(value) or abs(value) < 1e4:
        return digits(value)
    scale, suffix = next((s, p) for s, p in _COUNTS if abs(value) >= s * 0.9995)
    return f"{digits(value / scale)}{suffix}"


def money_text(dollars: float) -> str:
    """`$0.37`, `$12.3`, `$4.56M`."""
    dollars = float(dollars)
    if abs(dollars) < 1e6:
        return f"${digits(dollars)}"
    return f"${digits(dollars / 1e6)}M" if abs(dollars) < 1e9 else f"${digits(dollars / 1e9)}B"


def percent(share: float) -> str:
    """A fraction in percent, `41.2%`; one decimal above 1%, three digits below."""
    share = float(share)
    if not math.isfinite(share):
        return "n/a"
    return f"{100 * share:.1f}%" if abs(share) >= 0.0995 or share == 0 else f"{100 * share:.2f}%"


def energy_text(joules: float) -> str:
    """Energy in J up to 1 MJ, then in kWh, MWh, GWh as a bill would."""
    joules = float(joules)
    return quantity(joules, "J") if abs(joules) < 1e6 else quantity(joules / 3.6e6 * 1e3, "Wh")
