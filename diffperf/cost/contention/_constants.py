"""Constants of contention: their values, where those come from, how well they are known, and draws from that."""

from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from ..._numbers import check_whole
from ...hardware import DATATYPES, Chip


class OverlapChip(NamedTuple):
    """What contention needs of a chip; rates are what large kernels achieve, not the datasheet's.

    Attributes:
      processors: streaming multiprocessors or compute units. [1]
      flops_per_s: rate of a large matmul. [FLOP/s]
      bandwidth: of device memory, of a large streaming kernel. [B/s]
      l2: last-level cache. [B]
    """

    processors: ArrayLike
    flops_per_s: ArrayLike
    bandwidth: ArrayLike
    l2: ArrayLike


OVERLAP_CHIPS = {
    "a40": OverlapChip(84, 149.7e12 * 0.62, 696e9 * 0.85, 6e6),
    "v100": OverlapChip(80, 125e12 * 0.70, 900e9 * 0.85, 6e6),
    "a100": OverlapChip(108, 312e12 * 0.78, 2039e9 * 0.82, 40e6),
    "h100": OverlapChip(132, 989e12 * 0.70, 3350e9 * 0.83, 50e6),
}
"""Datasheet numbers times the shares that large kernels reach, as the constants below were chosen with; `overlap_chip` makes others from the catalog."""


def overlap_chip(chip: Chip, datatype: str = "bf16") -> OverlapChip:
    """A chip of the catalog: its processors and cache, and its datasheet rates times its efficiencies.

    Raises:
      ValueError: for a datatype that is not one of `diffperf.hardware.DATATYPES`.
    """
    if datatype not in DATATYPES:
        raise ValueError(f"datatype {datatype!r} is unknown; one of {', '.join(DATATYPES)}.")
    i = DATATYPES.index(datatype)
    rate, bandwidth = chip.peak_flops_per_s[i] * chip.matmul_efficiency[i], chip.memory_bandwidth * chip.memory_efficiency
    return OverlapChip(chip.num_processors, rate, bandwidth, chip.l2_capacity)


class Contention(NamedTuple):
    """How concurrent streams disturb each other. All positive, of any one shape.

    Attributes:
      processors_per_channel: processors that a channel of 512 threads takes: more than the one that its block fills, by traces of A100 (8 and 16 channels);
        `diffperf.calibrate.calibrate_overlap` gives 1.15 there and 1.23 on V100. A guess elsewhere. [1]
      evenness: of a kernel's blocks over processors, see `waves`: optimum on eleven A100 kernels. [1]
      spill: share of tile loads that reach device memory once buffers in flight fill the cache; 0.3 suits V100. Chosen so that the published
        factors of Lagom (arXiv:2602.20656) come out, like the next two. [1]
      cache_multiple: caches' worth of bytes in flight at which half of that has set in. [1]
      steepness: power with which it sets in. [1]
      overlap: power of the norm that joins arithmetic and memory time of a kernel. [1]
      oversubscription: how much a collective is slowed per share by which demand exceeds memory bandwidth: not measured. [1]
      channel_rate, sync: factors on the rate of a channel and the time per chunk. [1]
    """

    processors_per_channel: ArrayLike = 1.05
    evenness: ArrayLike = 0.35
    spill: ArrayLike = 1.1
    cache_multiple: ArrayLike = 2.3
    steepness: ArrayLike = 3.3
    overlap: ArrayLike = 3.0
    oversubscription: ArrayLike = 1.0
    channel_rate: ArrayLike = 1.0
    sync: ArrayLike = 1.0


NOMINAL_CONTENTION = Contention()
"""The values above."""

CONTENTION_SD = Contention(0.2, 0.4, 0.5, 0.5, 0.4, 0.0, 1.0, 0.3, 0.5)
"""Prior standard deviations of log constants."""

TUNING_SD = Contention(0.3, 0.0, 0.3, 0.3, 0.3, 0.0, 0.0, 0.3, 0.3)
"""Those with which robust tuning is judged: six constants, each off by 30%."""


_ABOVE_0 = ("cache_multiple", "steepness", "overlap", "channel_rate")
"""Constants that are divided by; the others may be 0, which switches off what they stand for."""


def check_contention(constants: Contention, what: str) -> None:
    """Raises ValueError, beginning with `what`, unless all constants are finite numbers in their range."""
    if not isinstance(constants, Contention):
        raise ValueError(f"{what}: {constants!r} is no Contention; take NOMINAL_CONTENTION, or draw_contention(...) for draws.")
    for name, value in constants._asdict().items():
        if np.asarray(value).dtype.kind not in "iuf":
            raise ValueError(f"{what}: {name} is {value!r}; it should be a number.")
        numbers, positive = np.asarray(value, float), name in _ABOVE_0
        good = np.isfinite(numbers) & ((numbers > 0) if positive else (numbers >= 0)) & (numbers <= 1 if name == "evenness" else True)
        if not good.all():
            accepted = "from 0 to 1" if name == "evenness" else "above 0 and finite" if positive else "at least 0 and finite"
            raise ValueError(f"{what}: {name} is {float(numbers[~good].ravel()[0]):g}; it should be {accepted}.")


def draw_contention(count: int, mean: Contention = NOMINAL_CONTENTION, sd: Contention = CONTENTION_SD, seed: int = 0) -> Contention:
    """Independent log-normal draws, each of shape (count,); a share stays at most 1.

    Args:
      count: draws, at least 1.
      mean: medians.
      sd: standard deviations of the logs, at least 0; 0 leaves a constant as it is.
      seed: of the random numbers.
    Raises:
      ValueError: for fewer than one draw, a median out of its range, or a standard deviation that is below 0 or not finite.
    """
    check_whole(count, "count", 1)
    check_whole(seed, "seed", 0)
    check_contention(mean, "medians of the draws")
    for name, width in zip(Contention._fields, sd):
        if not np.all(np.isfinite(width) & (np.asarray(width) >= 0)):
            raise ValueError(f"the standard deviation of {name} is {width}; it should be at least 0 and finite.")
    normal = np.random.default_rng(int(seed)).standard_normal((len(mean), int(count)))
    draws = Contention(*(np.asarray(value) * np.exp(width * z) for value, width, z in zip(mean, sd, normal)))
    return draws._replace(evenness=np.minimum(draws.evenness, 1.0))
