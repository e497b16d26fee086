"""Is the time column in the unit that its name says? A whole file in milliseconds called `time_us` would beat every datasheet a thousandfold.

Compares the measured times with the plain roofline of the chip (or, where the chip is not in the catalog, of the fastest and of a slow one). Only
errors by a factor of a hundred and more are found; a single odd row is left to whoever compares predictions with measurements.
"""

import functools

import numpy as np

_FASTEST = 2e16, 2e13  # FLOP/s, B/s: no chip of the catalog comes near both
_SLOW = 2e11, 5e9  # FLOP/s, B/s: a few CPU cores; a hundredth of it is below any useful kernel
_LARGE = 1e-5  # s; above it neither launch nor caches decide the time
_SHORTEST = 2e-7  # s; no device starts a kernel faster, so a typical time below it is in another unit
_PEAK_OF = {"fp8_block": "fp8", "int8_weight_only": "fp16", "int4_weight_only": "fp16"}


def work(sizes: dict[str, np.ndarray], op: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rough FLOP and least bytes of each row, NaN where not known: from the file's own columns, else from the sizes of a matmul or a stream."""
    count = len(op)
    flops, nbytes = (sizes[name].copy() if name in sizes else np.full(count, np.nan) for name in ("flops", "bytes_min"))
    ones = np.ones(count)
    m, n, k, batch = (sizes.get(name, ones) for name in ("m", "n", "k", "batch"))
    batch = np.where(np.isnan(batch), 1.0, batch)
    product = (op == "matmul") | (op == "batched_matmul") | (op == "grouped_matmul")
    flops = np.where(np.isnan(flops) & product, 2 * batch * m * n * k, flops)
    stream = (op == "elementwise") | (op == "softmax") | (op == "layernorm") | (op == "rmsnorm")
    return flops, np.where(np.isnan(nbytes) & stream, 2 * m * np.where(np.isnan(n), 1.0, n), nbytes)


@functools.lru_cache(maxsize=256)
def _rates(gpu: str, datatype: str) -> tuple[float, float, float, float, str]:
    """FLOP/s and B/s not to be exceeded, those a large kernel comes near, and what they are called."""
    from ..hardware import describe, generation, resolve_name

    try:
        name = resolve_name(gpu)
    except ValueError:
        return *_FASTEST, *_SLOW, "any chip"
    values = {row.path: row.value for row in describe(name, fitted=False)}
    peaks = {path.rsplit(".", 1)[1]: value for path, value in values.items() if path.startswith("chip.peak_flops_per_s.")}
    highest = max(peaks.values())
    peak, bandwidth = peaks.get(_PEAK_OF.get(datatype, datatype), 0.0) or highest, values["chip.memory_bandwidth"]
    slow = _SLOW if generation(name) == "cpu" else (peak, bandwidth)  # a machine's own CPU may be far smaller than the catalog's
    return highest, bandwidth, *slow, f"the datasheet of {name}"


def unit_problem(time_s: np.ndarray, flops: np.ndarray, nbytes: np.ndarray, gpu: np.ndarray, datatype: np.ndarray) -> str | None:
    """Why the times cannot be in their unit, or None. All arrays have shape (rows,); times in s, FLOP and bytes may be NaN."""
    if not len(time_s):
        return None
    middle = float(np.median(time_s))
    if middle < _SHORTEST:
        return f"half of the times are below {middle * 1e6:.3g} us, shorter than any device takes to start a kernel; the values look like a larger unit"
    lower, upper = np.zeros(len(time_s)), np.zeros(len(time_s))  # roofline times of the fastest and of the slowest chip that it may be
    who = "any chip"
    for g, d in dict.fromkeys(zip(gpu.tolist(), datatype.tolist())):
        at = (gpu == g) & (datatype == d)
        peak, bandwidth, low_peak, low_bandwidth, who = _rates(g, d)
        f, b = np.nan_to_num(flops[at]), np.nan_to_num(nbytes[at])
        lower[at], upper[at] = np.maximum(f / peak, b / bandwidth), np.maximum(f / low_peak, b / low_bandwidth)
    large = lower > _LARGE
    if large.any() and (ratio := float(np.median(lower[large] / time_s[large]))) > 10:
        return f"half of the {int(large.sum())} large kernels beat {who} by {ratio:.3g} times or more; the values look like a larger unit"
    large = upper > _LARGE
    if large.any() and (best := float(np.quantile(upper[large] / time_s[large], 0.99))) < 0.01:
        return f"the best large kernels reach {best:.2g} of {who}, less than a CPU would; the values look like a smaller unit"
    return None
