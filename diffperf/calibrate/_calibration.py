"""The shipped calibration: posterior over step times, memory constants, and the baseline to compare with; saved as one file."""

import dataclasses
import json
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np

from .._files import write_atomic
from ..estimate import step_lower_bound
from ._constants import FEATURE_EFFECTS, NAMES
from ._design import Design
from ._fit import Fit
from ._memory_fit import default_memory
from ._posterior import Posterior
from ._residual import Points
from ._rows import Rows

PUBLISHED = Path(__file__).with_name("fitted") / "published.npz"
_LABELS = ("generation", "accelerator", "family", "stack", "model")
_ARRAYS = {
    "names", "keys", "mean", "width", "parameters", "coordinates", "features", "gradient", "residual", "row_noise", "row_weight", "about",
    *(f"label_{name}" for name in _LABELS),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was learned from measured runs.

    Attributes:
      posterior: predicts step times.
      memory: memory constants of each known stack.
      efficiency: constant share of datasheet peak of the baseline, the median over the fitted runs. [1]
      meta: date, data, versions, quality.
    """

    posterior: Posterior
    memory: dict[str, dict[str, float]]
    efficiency: float
    meta: dict[str, str | float]

    def memory_of(self, stack: str, family: str) -> dict[str, float]:
        """Memory constants of a stack; for an unknown one the shared values, with the storage of 8-bit operands its family is known for."""
        storage = {"low_precision_storage": default_memory(family, stack)["low_precision_storage"]}
        return self.memory.get(stack) or self.memory.get("", default_memory(family, stack)) | storage

    def save(self, path: str | Path) -> None:
        """Writes everything to one `.npz` file, atomically."""
        import io

        p = self.posterior.settled()
        known = {f"label_{name}": np.array(getattr(p.rows, name)) for name in _LABELS}
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer, names=np.array(NAMES), keys=np.array(["\t".join(key) for key in p.design.keys]), mean=p.design.mean, width=p.design.width,
            parameters=p.parameters, coordinates=p.rows.coordinates.astype(np.float32), features=p.rows.features.astype(np.float32),
            gradient=p.gradient.astype(np.float32), residual=p.residual.astype(np.float32), row_noise=p.row_noise.astype(np.float32),
            row_weight=np.asarray(p.row_weight, np.float32),
            about=np.array(json.dumps(dict(memory=self.memory, efficiency=self.efficiency, meta=self.meta))), **known,
        )  # fmt: skip
        write_atomic(path, buffer.getvalue())
        load_calibration.cache_clear()


@lru_cache(maxsize=4)
def load_calibration(path: str | Path = PUBLISHED) -> Calibration:
    """The shipped calibration, or one saved by `Calibration.save`.

    Raises:
      ValueError: for a file that is missing, is not a calibration, or belongs to another version of the model.
    """
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            z = {name: file[name] for name in file.files}
        if not _ARRAYS <= set(z):
            raise KeyError(f"lacks {', '.join(sorted(_ARRAYS - set(z)))}")
        about = json.loads(str(z["about"]))
        memory, efficiency, meta = (about[name] for name in ("memory", "efficiency", "meta"))
    except (OSError, EOFError, KeyError, ValueError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read as a calibration ({error}). Make it with `python calibration/fit_published.py`.") from error
    design = Design(tuple(tuple(key.split("\t")) for key in z["keys"]), z["mean"], z["width"])
    effects = {(name, "feature", feature) for feature, name, _, _ in FEATURE_EFFECTS}
    if tuple(z["names"]) != NAMES or not effects <= set(design.keys):
        raise ValueError(f"{path}: was fitted for other constants than this version's. Fit again with `python calibration/fit_published.py`.")
    labels = {name: tuple(str(x) for x in z[f"label_{name}"]) for name in _LABELS}
    rows = Points(coordinates=z["coordinates"].astype(float), features=z["features"].astype(float), **labels)
    posterior = Posterior(design, z["parameters"], rows, *(z[n].astype(float) for n in ("gradient", "residual", "row_noise", "row_weight")))
    return Calibration(posterior, memory, efficiency, meta)


@lru_cache(maxsize=1)
def _bound():
    return jax.jit(jax.vmap(step_lower_bound))


def lower_bounds(rows: Rows) -> np.ndarray:
    """Time of each row's FLOP at datasheet peak, shape (rows,). [s]"""
    with jax.enable_x64(True):
        pick = lambda tree: jax.tree.map(lambda x: np.asarray(x, float), tree)
        return np.asarray(_bound()(pick(rows.model), pick(rows.system), pick(rows.plan)))


def constant_efficiency(rows: Rows) -> float:
    """Median share of the datasheet peak that measured rows of positive weight reach: the constant of the roofline baseline. [1]"""
    use = (rows.weight > 0) & np.isfinite(rows.log_time)
    return float(np.median(lower_bounds(rows.take(use)) / np.exp(rows.log_time[use])))


def constants_with_interval(fit: Fit, labels: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Mode and Laplace standard deviation of all constants on the scale of the fit, for one chip or stack, shape (constants,) each.

    Args:
      labels: any of generation, chip, family and stack; a level left out contributes its prior spread to the deviation.
    """
    from ._constants import CONSTANTS

    index, covariance = fit.design.index, fit.covariance()
    mode, sd = np.zeros(len(CONSTANTS)), np.zeros(len(CONSTANTS))
    for c, constant in enumerate(CONSTANTS):
        at = [index[(constant.name, "shared", "")]]
        spread = 0.0
        for level in ("generation", "chip", "family", "stack"):
            key = (constant.name, level, labels.get(level, ""))
            if key in index:
                at.append(index[key])
            else:
                spread += getattr(constant, level) ** 2
        mode[c] = fit.parameters[at].sum()
        sd[c] = np.sqrt(covariance[np.ix_(at, at)].sum() + spread)
    return mode, sd
