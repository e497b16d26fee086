"""What a kernel model needs to know of a chip: four datasheet numbers for the datatype at hand."""

from typing import NamedTuple

from jax.typing import ArrayLike

from ...hardware import DATATYPES, Chip


class Device(NamedTuple):
    """A chip as one kernel sees it.

    Attributes:
      peak: dense datasheet rate P of the matrix units for the datatype that is multiplied (vector units where it has none). [FLOP/s]
      bandwidth: datasheet bandwidth W of device memory. [B/s]
      processors: streaming multiprocessors, compute units or cores S. [1]
      cache: last-level cache C. [B]
    """

    peak: ArrayLike
    bandwidth: ArrayLike
    processors: ArrayLike
    cache: ArrayLike


def device_of(chip: Chip, datatype: str) -> Device:
    """The numbers of `chip` for kernels that multiply `datatype`.

    Raises:
      ValueError: for a datatype that is not one of `DATATYPES`, or that the chip has no unit for (where the chip's numbers are concrete).
    """
    if datatype not in DATATYPES:
        raise ValueError(f"datatype {datatype!r} is unknown; one of {', '.join(DATATYPES)}.")
    peak = chip.peak_flops_per_s[DATATYPES.index(datatype)]
    try:
        absent = bool(peak == 0)
    except Exception:  # a traced number: whoever traces has checked
        absent = False
    if absent:
        has = [name for name, rate in zip(DATATYPES, chip.peak_flops_per_s) if float(rate) > 0]
        raise ValueError(f"this chip has no unit for {datatype}; it has {', '.join(has)}.")
    return Device(peak, chip.memory_bandwidth, chip.num_processors, chip.l2_capacity)
