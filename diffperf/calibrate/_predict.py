"""One wished configuration: the estimate with fitted constants, the calibrated time with its interval, and how close a measured run is."""

import dataclasses
import os
from collections import Counter
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np

from ..estimate import Estimate, train_step
from ..hardware import System, generation, load_system, resolve_name
from ..io import Run
from ..parallel import Plan
from ..stack import Stack, describe_stack, load_stack, resolve_stack_name
from ..workload import Transformer, pad_kinds
from ._calibration import Calibration, load_calibration
from ._constants import HARDWARE, NAMES, apply_to_system
from ._frameworks import FAMILIES, FEATURES
from ._posterior import ROW_NOISE, Z80
from ._rows import Rows

KINDS = 3


@lru_cache(maxsize=1)
def _compiled_step():
    return jax.jit(train_step)


@dataclasses.dataclass(frozen=True)
class StepPrediction:
    """Prediction for one configuration.

    Attributes:
      estimate: with the fitted constants of chip and stack.
      step_time_s: calibrated: the estimate, moved by what measured neighbours showed. [s]
      low_s, high_s: 80% interval of one measured run. [s]
      measured_like: True when measured runs near this one narrow the interval to about run-to-run noise.
      notes: lines worth reading.
    """

    estimate: Estimate
    step_time_s: float
    low_s: float
    high_s: float
    measured_like: bool
    notes: list[str]


def _identity(stack_name: str | os.PathLike) -> tuple[str, str, Stack, Calibration | None]:
    """(stack label, family, stack, calibration that came with a user's own stack)."""
    if isinstance(stack_name, os.PathLike) or str(stack_name).endswith(".toml"):
        meta, _ = describe_stack(stack_name)
        beside = Path(stack_name).with_suffix(".npz")
        own = load_calibration(beside) if beside.exists() else None
        family = str(meta.get("family", ""))
        return str(meta.get("name", Path(stack_name).stem)), family if family in FAMILIES else "", load_stack(stack_name), own
    name = resolve_stack_name(stack_name)
    meta, _ = describe_stack(name)
    family = str(meta.get("family", ""))
    label = "" if name == "typical" or name.startswith("family-") else name
    return label or f"unmeasured {name}", family if family in FAMILIES else "", load_stack(name), None


def single_row(model: Transformer, system: System, chip: str, plan: Plan, stack: str, family: str, *, model_name: str = "") -> Rows:
    """One configuration as `Rows`, for the posterior."""
    batch = lambda tree: jax.tree.map(lambda x: np.asarray(x, float)[None], tree)
    kinds = max(KINDS, model.blocks.count.shape[-1])
    return Rows(
        runs=(Run(id="plan", model_name=model_name),), model=batch(pad_kinds(model, kinds)), system=batch(system), plan=batch(plan),
        log_time=np.array([np.nan]), weight=np.array([1.0]), stack=(stack,), family=(family,), generation=(generation(chip),),
        accelerator=(resolve_name(chip),), features=np.zeros((1, len(FEATURES))), groups=(("", model_name),), skipped=Counter(),
    )  # fmt: skip


def fitted_system(system: System, calibration: Calibration, chip: str) -> System:
    """The system with the fitted efficiencies of its chip, or of its generation where the chip was never measured."""
    constants = calibration.posterior.chip_constants(generation(chip), resolve_name(chip))
    full = np.zeros(len(NAMES))
    full[: len(HARDWARE)] = constants[: len(HARDWARE)]
    return apply_to_system(system, full)


def predict_step(
    model: Transformer,
    system_name: str,
    plan: Plan,
    stack_name: str | os.PathLike = "typical",
    *,
    system: System | None = None,
    calibration: Calibration | None = None,
    num_devices: float | None = None,
    model_name: str = "",
) -> StepPrediction:
    """Predicts one training step with an interval.

    Args:
      system_name: a catalog name, for the chip's fitted constants.
      stack_name: a shipped stack, a family's mean (`family-mcore`), `typical`, or a TOML file that `calibrate runs` wrote.
      system: the system, if it differs from the catalog's (node size, NIC); its efficiencies are replaced by the fitted ones.
      num_devices: devices of the system, when `system` is not given.
      model_name: name of the model in the measured runs, so that runs of the same model count.
    """
    label, family, stack, own = _identity(stack_name)
    calibration = calibration or own or load_calibration()
    plain = system if system is not None else load_system(system_name, num_devices=num_devices, fitted=False)
    estimate = _compiled_step()(model, fitted_system(plain, calibration, system_name), plan, stack)
    rows = single_row(model, plain, system_name, plan, label, family, model_name=model_name)
    prediction = calibration.posterior.predict(rows)
    mean, sd = float(prediction.mean[0]), float(prediction.sd[0])
    notes = []
    moved = np.exp(mean) / float(estimate.step_time) - 1
    if abs(moved) > 0.02:
        notes.append(f"measured neighbours of this configuration move the estimate by {100 * moved:+.1f}%")
    if label.startswith("unmeasured"):
        notes.append("no measured stack was named: the interval includes the spread between software stacks; calibrate with your own runs to narrow it")
    if resolve_name(system_name) not in {key[2] for key in calibration.posterior.design.keys if key[1] == "chip"}:
        notes.append(f"no measured run on {resolve_name(system_name)}: its constants are those of its generation")
    return StepPrediction(estimate, float(np.exp(mean)), float(np.exp(mean - Z80 * sd)), float(np.exp(mean + Z80 * sd)), sd < 1.5 * ROW_NOISE, notes)

