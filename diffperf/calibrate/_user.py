"""A user's own cluster: adapt the shipped calibration to a few measured runs, say what changed and how sure it is, and what to run next.

The update is the posterior of `_posterior.py` with the user's rows added under a stack of their own: every constant is free, and the family
gives the start (findings of leave-one-source-out studies: a single factor or a few knobs stay at 9% where this reaches 5 to 6).
"""

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..io import Run, RunTable
from ..stack import FittedConstant, Stack, write_stack
from ..stack._catalog import FIELDS
from ._calibration import Calibration, load_calibration
from ._choice import choose
from ._constants import CONSTANTS, HARDWARE, NAMES, natural
from ._frameworks import FAMILIES
from ._posterior import ROW_NOISE, Z80, Posterior
from ._residual import Points, points
from ._rows import Rows, prepare

OTHER = "other"
"""Family of software that shares no code base with a known one."""
MEDIAN_PER_SD = 0.6
"""Median absolute error over predicted standard deviation, as seen over held-out sources."""
ODD, LEARNED = 0.5, 0.9


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """What a user's runs changed.

    Attributes:
      rows: per run: id, measured_s, before_s with its interval, after_s with its interval, standardised_residual, weight, note.
      constants: per constant of the stack: name, prior, value, low, high, learned.
      unidentified: constants whose width the runs did not narrow.
      proposals: configurations to measure next: id, reason, expected_error_now, expected_error_after.
      summary: lines to print.
      stack: the adapted stack.
      meta: how it was made.
      calibration: the updated calibration; predicts with the runs included.
    """

    rows: list[dict]
    constants: list[dict]
    unidentified: list[str]
    proposals: list[dict]
    summary: list[str]
    stack: Stack
    meta: dict
    calibration: Calibration

    def write(self, path: str | Path) -> None:
        """Writes the stack to a `.toml` file and the updated calibration beside it (`.npz`).

        Raises:
          ValueError: for another ending; nothing is written then.
        """
        path = Path(path)
        if path.suffix != ".toml":
            raise ValueError(f"{path}: the name of a stack's file should end in .toml.")
        self.calibration.save(path.with_suffix(".npz"))
        values = {c["name"]: FittedConstant(c["name"], c["value"], c["low"], c["high"], c["prior"]) for c in self.constants}
        write_stack(path, values, self.meta)


def relabel(rows: Rows, stack: str, family: str) -> Rows:
    """The rows as runs of one stack of one family."""
    return dataclasses.replace(rows, stack=(stack,) * len(rows), family=("" if family == OTHER else family,) * len(rows))


def check_family(family: str) -> str:
    """The family, if known; "" is `OTHER`.

    Raises:
      ValueError: naming those that are.
    """
    family = family or OTHER
    if family not in (*FAMILIES, OTHER):
        raise ValueError(f"family is {family!r}; it should be one of {', '.join(FAMILIES)}, or '{OTHER}' for software that shares no code with them.")
    return family


def stack_constants(posterior: Posterior, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Constants of the stack and chip of the first row: posterior mean and deviation, scale of the fit, shape (constants,)."""
    at = points(rows.take(np.array([0])))
    plain = dataclasses.replace(at, features=np.zeros_like(at.features))  # constants of the stack today, without shifts of single runs
    repeat = lambda value: np.repeat(value, len(NAMES), 0) if isinstance(value, np.ndarray) else value * len(NAMES)
    each = Points(**{f.name: repeat(getattr(plain, f.name)) for f in dataclasses.fields(Points)})
    unit = np.eye(len(NAMES))
    matrix = posterior.design.jacobian(each, unit)  # constants as linear functions of the parameters
    spread = matrix * posterior.design.width**2
    cross = spread @ posterior.jacobian(posterior.rows, posterior.gradient).T + posterior.fresh(each, unit, posterior.rows, posterior.gradient)
    prior_mean, prior_covariance = matrix @ posterior.design.mean, spread @ matrix.T + posterior.fresh(each, unit, each, unit)
    mean, covariance = posterior.condition(cross, prior_mean, prior_covariance)
    return mean, np.sqrt(np.maximum(np.diag(covariance), 1e-12))


def _reason(rows: Rows, i: int) -> str:
    p, m = rows.plan, rows.model
    take = lambda x: float(np.asarray(x)[i])
    parts = [f"{take(p.tensor_parallel * p.pipeline_parallel * p.data_parallel * p.context_parallel):g} devices"]
    parts += [
        f"{word} {take(x):g}"
        for word, x in (("tp", p.tensor_parallel), ("pp", p.pipeline_parallel), ("cp", p.context_parallel), ("ep", p.expert_parallel))
        if take(x) > 1
    ]
    if np.asarray(m.blocks.num_experts)[i].max() > 0:
        parts.append("mixture of experts")
    return f"{rows.runs[i].model_name or 'model'} on " + ", ".join(parts)


def calibrate_runs(
    runs: RunTable | Sequence[Run],
    *,
    family: str,
    stack: str,
    calibration: Calibration | None = None,
    candidates: Sequence[Run] = (),
    propose: int = 3,
) -> CalibrationReport:
    """Adapts the shipped calibration to the runs of one software stack on one cluster, from one row upwards.

    Args:
      runs: measured runs, all of one software image.
      family: code base, one of `FAMILIES`, or "other".
      stack: a name of your own.
      candidates: configurations you would like predicted; the proposals are chosen among them, else among the runs themselves.
      propose: how many to propose.
    Returns:
      The report.
    Raises:
      ValueError: for an unknown family, a stack without a name or with that of a shipped one, or rows none of which can be modelled.
    """
    if not stack.strip():
        raise ValueError(f"stack is {stack!r}; it should be a name of your own, for example 'my-cluster'.")
    family, calibration = check_family(family), calibration or load_calibration()
    all_rows = relabel(prepare(tuple(run for run in runs if run.left_out is None)), stack, family)
    known = {key[2] for key in calibration.posterior.design.keys if key[1] == "stack"}
    if stack in known:
        raise ValueError(f"stack is {stack!r}, the name of a shipped stack. Choose a name of your own, for example 'my-{stack}'.")
    before = calibration.posterior.predict(all_rows)
    updated = calibration.posterior.observe(all_rows)
    n = len(all_rows)
    prior_covariance = calibration.posterior.joint(all_rows)[1] + ROW_NOISE**2 * np.eye(n)
    surprise = all_rows.log_time - before.mean
    chi_square = float(surprise @ np.linalg.solve(prior_covariance, surprise))
    scale = float(np.sqrt((4 + chi_square) / (4 + n)))  # an odd cluster widens its own intervals
    after = updated.predict(all_rows)
    weight, standardised = updated.weights[-n:], updated.standardised[-n:]
    (mean, sd), (prior_mean, prior_sd) = stack_constants(updated, all_rows), stack_constants(calibration.posterior, all_rows)

    rows = []
    for i, run in enumerate(all_rows.runs):
        span = lambda p, k, j=i: [float(np.exp(p.mean[j] + s * Z80 * k * p.sd[j])) for s in (-1, 1)]
        low, high = span(before, 1.0)
        after_low, after_high = span(after, scale)
        odd = weight[i] < ODD
        rows.append(
            dict(
                id=run.id, measured_s=run.step_time_s, before_s=float(np.exp(before.mean[i])), before_low_s=low, before_high_s=high,
                after_s=float(np.exp(after.mean[i])), after_low_s=after_low, after_high_s=after_high,
                standardised_residual=float(standardised[i]), weight=float(weight[i]),
                note="odd: repeat or check precision, software image, warm-up" if odd else "",
            )
        )  # fmt: skip
    values, lows, highs, priors = (np.asarray(natural(x)) for x in (mean, mean - Z80 * sd, mean + Z80 * sd, prior_mean))
    memory = calibration.memory_of(stack, family)
    constants = []
    for c, constant in enumerate(CONSTANTS):
        if constant.name not in HARDWARE:
            learned = bool(sd[c] < LEARNED * prior_sd[c])
            constants.append(
                dict(name=constant.name, prior=float(priors[c]), value=float(values[c]), low=float(lows[c]), high=float(highs[c]), learned=learned)
            )
    constants += [dict(name=k, prior=v, value=v, low=v, high=v, learned=False) for k, v in memory.items()]
    new = dataclasses.replace(calibration, posterior=updated, memory=calibration.memory | {stack: memory})
    targets = relabel(prepare(tuple(candidates), need_time=False), stack, family) if candidates else all_rows
    proposals = [
        dict(id=targets.runs[i].id, reason=_reason(targets, i), expected_error_now=MEDIAN_PER_SD * a, expected_error_after=MEDIAN_PER_SD * b)
        for i, a, b in choose(updated.joint(targets)[1], propose)
    ]
    error = lambda p: float(np.median(np.abs(np.exp(p.mean - all_rows.log_time) - 1)))
    summary = [
        f"{n} runs used, effective weight {min(weight.sum() / 1.25, n):.1f} of {n}" + (f"; skipped: {dict(all_rows.skipped)}" if all_rows.skipped else ""),
        f"median error {100 * error(before):.1f}% before, {100 * error(after):.1f}% after (on the runs it has seen)",
        f"chi-square per run {chi_square / n:.2f}" + (": this stack does not look like its family; intervals widened" if chi_square / n > 2.5 else ""),
    ]
    members = sum(1 for f in set(zip(calibration.posterior.rows.family, calibration.posterior.rows.stack, strict=True)) if f[0] == family)
    if members < 2:
        summary.append(f"weak prior: {members} known stacks of family {family!r}; expect to need more runs")
    meta = dict(name=stack, family=family, date=_today(), data=f"{n} runs", quality=summary[1], start=str(calibration.meta.get("data", "")))
    fields = {c["name"]: c["value"] for c in constants}
    report_stack = Stack(**{name: fields[name] for name in FIELDS})
    return CalibrationReport(rows, constants, [c["name"] for c in constants if not c["learned"]], proposals, summary, report_stack, meta, new)


def _today() -> str:
    return datetime.date.today().isoformat()
