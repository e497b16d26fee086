"""Fits of one family over many chips and libraries together: what they share becomes the prior of each, and of the next chip.

A set is one library on one chip for one datatype. Its unconstrained constants are drawn around the mean of sets like it, with a spread per constant.
Expectation-maximisation: fit every set under the prior, renew means and spreads from the fits (each with its posterior variance, so a
constant that a set does not determine neither pulls the mean nor narrows the spread), repeat.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...cost.kernel._device import Device
from ...cost.kernel._family import Family
from ...cost.kernel._shared import Shared
from ._fit import KernelFit, fit_kernels


@dataclasses.dataclass(frozen=True)
class KernelSet:
    """Measured kernels of one library on one chip.

    Attributes:
      chip: catalog name of the system; library and datatype: as in `FamilyRows`.
      shape: the family's shape, every field of shape (rows,).
      device: the chip's numbers for the datatype.
      log_time: log of measured seconds, shape (rows,).
      group: what stays whole when rows are split, shape (rows,).
    """

    chip: str
    library: str
    datatype: str
    shape: Any
    device: Device
    log_time: np.ndarray
    group: np.ndarray

    def __len__(self) -> int:
        return len(self.log_time)

    @property
    def key(self) -> tuple[str, str, str]:
        """Chip, library, datatype."""
        return self.chip, self.library, self.datatype

    def take(self, which: np.ndarray) -> "KernelSet":
        """The rows of a mask or of indices."""
        shape = type(self.shape)(*(x[which] for x in self.shape))
        return dataclasses.replace(self, shape=shape, log_time=self.log_time[which], group=self.group[which])


def share(family: Family, keys: Sequence[tuple[str, str, str]], fits: Sequence[KernelFit], priors: Sequence[tuple[np.ndarray, np.ndarray]]) -> Shared:
    """What fitted sets share, each fitted under its own prior; a set that the form fits badly against the others says less."""
    variance = np.stack([np.diag(np.linalg.inv(fit.precision)) for fit in fits])
    noise = np.array([fit.noise for fit in fits])
    said = np.clip(1 - variance / np.stack([sd**2 for _, sd in priors]), 0.0, 1.0) * np.minimum(np.median(noise) / noise, 1.0)[:, None] ** 2
    return Shared(family, list(keys), np.stack([fit.free for fit in fits]), said, variance)


def fit_jointly(
    family: Family, sets: Sequence[KernelSet], *, rounds: int = 2, most: int = 768, last: int = 3072, starts: int = 3, correction: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[KernelFit], Shared]:
    """Fits every set under what all share.

    Args:
      family: which kernels.
      sets: one or more.
      rounds: expectation-maximisation rounds; the first starts each set several times, the others continue.
      most: rows per set at most in rounds before the last.
      last: the same in the last round.
      starts: random starts of each set in the first round.
      correction: fit each set's network in the last round.
      progress: called with fits done and fits in all.
    Returns:
      The fits, in the order of the sets, and what is shared.
    Raises:
      ValueError: for no sets, or a set without rows.
    """
    if not sets:
        raise ValueError(f"no measured {family.name} kernels to fit. Give at least one set.")
    keys = [s.key for s in sets]
    none = np.zeros((0, family.size))
    shared = Shared(family, [], none, none, none)
    fits: list[KernelFit] = []
    for turn in range(rounds):
        final, priors = turn == rounds - 1, [shared.prior(*s.key) for s in sets]
        fits = []
        for i, (s, (mean, sd)) in enumerate(zip(sets, priors)):
            fits.append(_fit_set(family, s, mean, sd, correction=correction and final, starts=0 if turn else starts, most=last if final else most))
            if progress:
                progress(turn * len(sets) + i + 1, rounds * len(sets))
        shared = share(family, keys, fits, priors)
    return fits, shared


def _fit_set(family: Family, s: KernelSet, mean: np.ndarray, sd: np.ndarray, **options: Any) -> KernelFit:
    return fit_kernels(family, s.shape, s.device, s.log_time, mean=mean, sd=sd, **options)


def adapt(shared: Shared, s: KernelSet, rows: np.ndarray) -> KernelFit:
    """A new chip's constants from what other chips share and a few of its own rows (none: the shared mean)."""
    mean, sd = shared.prior(*s.key)
    if len(rows) == 0:
        return KernelFit(shared.family, mean, np.zeros(0), np.diag(1 / sd**2), float("nan"), float("nan"))
    return _fit_set(shared.family, s.take(rows), mean, sd, starts=0)
