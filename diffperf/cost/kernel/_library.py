"""Kernel libraries by chip: the fitted constants that ship with the package, a user's own, and the best guess for a chip not measured.

`fitted/<family>.json` holds one entry per set (chip, library, datatype): unconstrained constants, how well its rows determine them, weights of the
correction, and the noise left. A set that was not measured starts from those like it (`_shared.py`), without correction and with a wider interval.
"""

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...hardware import generation, resolve_name
from ._constants import constrain
from ._correction import bounded, log_factor
from ._device import Device
from ._families import FAMILIES
from ._family import Family
from ._shared import Shared

FITTED_DIRECTORY = Path(__file__).with_name("fitted")


class KernelLibrary(eqx.Module):
    """One library on one chip for one datatype, as a pytree.

    Attributes:
      constants: the family's NamedTuple.
      weights: of the correction, shape (weights,); empty for none.
      noise: standard deviation of what the form leaves, in log time. [1]
      spread: standard deviation of the unconstrained constants, shape (constants,); 0 where the set was measured. [1]
      family: which kernels.
      source: what the constants rest on.
    """

    constants: Any
    weights: Float[Array, " weights"] = eqx.field(converter=si)
    noise: Float[Array, ""] = eqx.field(converter=si)
    spread: Float[Array, " constants"] = eqx.field(converter=si)
    family: Family = eqx.field(static=True)
    source: str = eqx.field(static=True)

    def time(self, shape: Any, device: Device, temperature: ArrayLike = 0.0) -> Float[Array, "..."]:
        """Time of the kernel; shape and device broadcast. [s]"""
        time = self.family.time(shape, device, self.constants, temperature)
        if self.weights.shape[0] == 0:
            return time
        return bounded(time, log_factor(self.weights, self.family.features(shape, device)), self.family.bound(shape, device, self.constants))


class Fitted:
    """The sets of one family, as in a fitted file."""

    def __init__(self, family: Family, entries: Sequence[dict[str, Any]]):
        self.family, self.entries = family, {(e["chip"], e["library"], e["datatype"]): e for e in entries}
        table = lambda name: np.array([e[name] for e in entries], float).reshape(len(entries), family.size)
        self.shared = Shared(family, list(self.entries), table("free"), table("said"), table("variance"))

    def noise(self, datatype: str) -> float:
        """What the form usually leaves, in log time. [1]"""
        of = [e["noise"] for e in self.entries.values() if e["datatype"] == datatype] or [e["noise"] for e in self.entries.values()]
        return float(np.median(of)) if of else 0.2

    def library(self, chip: str, library: str | None, datatype: str, correction: bool) -> KernelLibrary:
        """The set itself where it was measured, else what sets like it say."""
        if library is None:  # the one with most rows, on this chip or elsewhere
            here = [e for e in self.entries.values() if e["datatype"] == datatype and e["chip"] == chip]
            here = here or [e for e in self.entries.values() if e["datatype"] == datatype] or list(self.entries.values())
            library = max(here, key=lambda e: e["rows"])["library"] if here else ""
        entry = self.entries.get((chip, str(library), datatype))
        if entry is not None:
            weights = entry["weights"] if correction else []
            source, known = f"fit to {entry['rows']} measured kernels of {library} on {chip}, {datatype}", np.zeros(self.family.size)
            return KernelLibrary(_constants(self.family, entry["free"]), np.array(weights, float), entry["noise"], known, self.family, source)
        mean, spread = self.shared.prior(chip, str(library), datatype)
        weights = self._sister_weights(chip, str(library), datatype) if correction else []
        source = f"no measurement of {library or 'any library'} on {os.path.basename(chip)}, {datatype}: mean of {len(self.entries)} sets, those like it first"
        return KernelLibrary(_constants(self.family, mean), np.array(weights, float), self.noise(datatype), spread, self.family, source)

    def _sister_weights(self, chip: str, library: str, datatype: str) -> list[float]:
        """Correction of the same library on a chip of the same generation, where it chooses kernels by the same rules; none where no such chip was measured."""
        like = [e for (c, lib, d), e in self.entries.items() if (lib, d) == (library, datatype) and generation(c) == generation(chip)]
        return max(like, key=lambda e: e["rows"])["weights"] if like else []


def _constants(family: Family, free: Any) -> Any:
    return jax.tree.map(si, constrain(family.constants, family.priors, jnp.asarray(np.asarray(free, float))))


def read_fitted(path: str | os.PathLike[str]) -> dict[str, Fitted]:
    """The families of a fitted file, shipped or a user's.

    Raises:
      ValueError: for a file that is not one.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        families = document["families"]
        return {name: Fitted(FAMILIES[name], entries) for name, entries in families.items()}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}). Give a file written by `diffperf calibrate kernels --out`.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of fitted kernels ({error!r} in it). Give one written by `diffperf calibrate kernels --out`.") from None


@functools.cache
def shipped(family: str) -> Fitted:
    """The shipped sets of a family; none for a family without a fit."""
    path = FITTED_DIRECTORY / f"{family}.json"
    return read_fitted(path)[family] if path.exists() else Fitted(FAMILIES[family], [])


def load_library(family: str, chip: str, *, library: str | None = None, datatype: str = "bf16", correction: bool = True) -> KernelLibrary:
    """Constants of a kernel library on a chip.

    Args:
      family: name of the family, such as `matmul`, `attention_prefill` or `moe_ffn`.
      chip: name or alias of a system of the catalog.
      library: `trtllm`, `vllm`, `sglang`, ...; by default the one with most measurements.
      datatype: what is multiplied or moved.
      correction: whether to use the fitted network.
    Raises:
      ValueError: for a family that does not exist.
      UnknownNameError: for a chip that is not in the catalog.
    """
    if family not in FAMILIES:
        raise ValueError(f"no family of kernels {family!r}; there are {', '.join(sorted(FAMILIES))}.")
    return shipped(family).library(resolve_name(chip), library, datatype, correction)
