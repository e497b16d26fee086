"""The fit on the published training runs that ship with the project."""

import datetime
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

from ..io import Run, published_runs_path, read_runs
from ._calibration import Calibration, constant_efficiency
from ._evaluate import error_summary, held_out, partition
from ._fit import Fit, fit_runs
from ._memory_fit import fit_memory
from ._posterior import Z80, build_posterior
from ._rows import Rows, prepare

DECODERS = ("dense-decoder", "moe")


def published_runs() -> tuple[Run, ...]:
    """The published runs of decoder models, in file order."""
    return tuple(run for run in read_runs(published_runs_path()) if run.family in DECODERS)


def calibrate_published(rows: Rows | None = None, *, progress: Callable[[int, float], None] | None = None) -> tuple[Calibration, Fit, Rows]:
    """Fits every constant to the published runs.

    Args:
      progress: called with the pass and the root mean square log error.
    Returns:
      The calibration, the fit behind it and the rows.
    """
    rows = rows or prepare(published_runs())
    fit = fit_runs(rows, progress=progress)
    meta = dict(
        date=datetime.date.today().isoformat(), data=f"{int((rows.weight > 0).sum())} published training runs", version=version("diffperf"), jax=version("jax")
    )
    return Calibration(build_posterior(fit, rows), fit_memory(rows), constant_efficiency(rows), meta), fit, rows


def fit_published(progress: Callable[[str, float], None] | None = None, *, seed: int = 0) -> tuple[Calibration, dict]:
    """Fit and held-out accuracy in one go, as the demo shows it.

    Args:
      progress: called with what is being done and how far along it is, in [0, 1].
      seed: of the partition into five folds.
    Returns:
      The calibration, and the accuracy: `error` and `baseline` (see `error_summary`), `coverage` of the 80% intervals, `n`, `by_kind` with
      the same for kinds of runs, and `rows` (id, source, model, stack, measured_s, predicted_s, low_s, high_s, baseline_s), held out.
    """
    tell = progress or (lambda text, share: None)
    tell("reading published runs", 0.0)
    rows = prepare(published_runs())
    tell(f"fitting {len(rows)} runs", 0.1)
    calibration, fit, _ = calibrate_published(
        rows, progress=lambda step, error: tell(f"fitting: pass {step + 1}, rms log error {error:.3f}", 0.1 + 0.015 * step)
    )
    fold = partition(rows, seed)
    prediction, baseline = held_out(rows, fold, start=fit, progress=lambda done, parts: tell(f"held-out fold {done} of {parts}", 0.35 + 0.65 * done / parts))
    return calibration, accuracy(rows, prediction.mean, prediction.sd, baseline)


def kinds_of_runs(rows: Rows) -> dict[str, np.ndarray]:
    """Masks of kinds of runs, by name; left-out rows belong to none."""
    use = rows.weight > 0
    gpu = np.array([g not in ("tpu", "trainium", "cpu") for g in rows.generation])
    experts = np.array([bool(run.experts) for run in rows.runs])
    own = lambda name: np.array([label == name for label in rows.generation])
    vtrain = np.array([stack == "megatron-deepspeed-vtrain" for stack in rows.stack])
    return {
        "all runs": use, "without vTrain": use & ~vtrain, "dense on GPU": use & gpu & ~experts, "mixture of experts on GPU": use & gpu & experts,
        "TPU": use & own("tpu"), "Trainium": use & own("trainium"),
    }  # fmt: skip


def accuracy(rows: Rows, mean: np.ndarray, sd: np.ndarray, baseline: np.ndarray) -> dict:
    """Error summaries of held-out predictions beside the baseline, in all and by kind of run."""
    inside = np.abs(mean - rows.log_time) <= Z80 * sd

    def one(mask):
        return dict(
            n=int(mask.sum()), error=error_summary(mean[mask], rows.log_time[mask]), baseline=error_summary(baseline[mask], rows.log_time[mask]),
            coverage=float(inside[mask].mean()) if mask.any() else float("nan"),
        )  # fmt: skip

    kinds = {name: one(mask) for name, mask in kinds_of_runs(rows).items() if mask.any()}
    table = [
        dict(id=run.id, source=run.source, model=run.model_name, stack=stack, family=family, measured_s=run.step_time_s, predicted_s=float(np.exp(m)),
             low_s=float(np.exp(m - Z80 * s)), high_s=float(np.exp(m + Z80 * s)), baseline_s=float(np.exp(b)), used=bool(w > 0))
        for run, stack, family, m, s, b, w in zip(rows.runs, rows.stack, rows.family, mean, sd, baseline, rows.weight, strict=True)
    ]  # fmt: skip
    return kinds["all runs"] | dict(by_kind=kinds, rows=table)
