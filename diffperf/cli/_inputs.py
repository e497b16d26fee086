"""From the words of a job to model, system, plan and stack, checked; and to a prediction with its interval."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..estimate import Estimate
from ..hardware import System, generation, load_system, resolve_name, system_names
from ..parallel import Plan, PlanError, check_plan, make_plan
from ..stack import Stack, load_stack
from ..workload import Transformer, load_model, resolve_model_name
from ._options import Job


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A checked job.

    Attributes:
      job: its words.
      model, system, plan, stack: inputs of `train_step`.
      model_name, system_name: canonical, or the path given.
      words: arguments of `make_plan`, with derived degrees.
    """

    job: Job
    model: Transformer
    system: System
    plan: Plan
    stack: Stack
    model_name: str
    system_name: str
    words: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A prediction, its 80% interval, and remarks on it.

    Attributes:
      estimate: consistent with the step time shown.
      low_s, high_s: interval of the step time. [s]
      measured_like: True when runs like this one were measured.
      notes: remarks.
    """

    estimate: Estimate
    low_s: float
    high_s: float
    measured_like: bool
    notes: tuple[str, ...]


def read_model(name: str, seq_len: float | None) -> tuple[Transformer, str, bool]:
    """A model, its canonical name or path, and whether it is from a file.

    Raises:
      ValueError: for an unknown name, or a file that is missing or no `config.json`.
    """
    path = Path(name)
    if path.suffix == ".json" and not path.is_file():
        raise ValueError(f"{name}: no such file. Give a Hugging Face config.json, or a name from `diffperf models`.")
    in_file = path.suffix == ".json" or (path / "config.json").is_file()
    try:
        model = load_model(name, seq_len)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: not JSON: {error}. Give the config.json of a Hugging Face checkpoint.") from None
    return model, name if in_file else resolve_model_name(name), in_file


def load_network(job: Job) -> tuple[Transformer, str]:
    """The model of a job and its name."""
    return read_model(job.model, job.seq)[:2]


def load_cluster(job: Job) -> tuple[System, str]:
    """The system of a job with its overrides, and its name."""
    bandwidth = None if job.nic_gbps is None else job.nic_gbps / 8 * 1e9
    if job.nic_gbps is not None and not 0 < job.nic_gbps < float("inf"):
        raise ValueError(f"--nic-gbps is {job.nic_gbps}; it should be positive and finite, such as 400.")
    if job.domain is not None and job.domain < 1:
        raise ValueError(f"--domain is {job.domain}; it should be at least 1.")
    system = load_system(job.system, num_devices=job.devices, domain=job.domain, scale_out_bandwidth=bandwidth)
    return system, job.system if job.system.endswith(".toml") else resolve_name(job.system)


def derive_data_parallel(words: dict[str, Any], devices: int) -> dict[str, Any]:
    """`words` with `data_parallel` set to what the devices leave.

    Raises:
      PlanError: when that is no whole number.
    """
    if "data_parallel" in words:
        return words
    degrees = [words.get(name, 1) for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")]
    for name, value in zip(("tensor_parallel", "pipeline_parallel", "context_parallel"), degrees):
        if value < 1:
            raise PlanError(f"{name} is {value}; it should be a whole number of at least 1.")
    product = degrees[0] * degrees[1] * degrees[2]
    if devices % product:
        raise PlanError(
            f"tensor_parallel * pipeline_parallel * context_parallel is {' * '.join(map(str, degrees))} = {product}; it should divide "
            f"devices = {devices}. Use {max(devices // product, 1) * product} devices, or change one of them."
        )
    return words | {"data_parallel": devices // product}


def prepare(job: Job) -> Inputs:
    """Everything that `train_step` needs.

    Raises:
      ValueError: for whatever the user got wrong, saying what and how to mend it.
    """
    model, model_name = load_network(job)
    system, system_name = load_cluster(job)
    stack = load_stack(job.stack)
    words = derive_data_parallel(job.plan_words(), job.devices)
    plan = make_plan(global_batch_size=job.gbs, **words)
    check_plan(model, system, plan)
    used = words.get("data_parallel", 1)
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        used *= words.get(name, 1)
    if used != job.devices:
        raise PlanError(f"the plan uses {used} of {job.devices} devices. Leave out --dp to use all, or say --devices {used}.")
    return Inputs(job, model, system, plan, stack, model_name, system_name, words)


def predict(inputs: Inputs) -> Prediction:
    """The calibrated prediction of a job. A chip from the user's own file keeps its efficiencies and borrows the interval of its base, or of
    a chip of its generation."""
    from ..calibrate import load_calibration, predict_step
    from ..estimate import bind_step

    job = inputs.job
    own = job.system.endswith(".toml")
    chip = relative_of(job.system) if own else inputs.system_name
    measured = published_name(inputs.model_name, load_calibration().posterior.rows.model)
    step = predict_step(inputs.model, chip, inputs.plan, job.stack, system=inputs.system, model_name=measured)
    notes = list(step.notes)
    time, low, high = step.step_time_s, step.low_s, step.high_s
    estimate = step.estimate
    if own:
        estimate = bind_step(inputs.model, inputs.system, inputs.stack)(inputs.plan)
        moved = float(estimate.step_time) / float(step.estimate.step_time)
        time, low, high = (x * moved for x in (time, low, high))
        notes.append(f"{job.system} keeps its own numbers; the interval is that of {chip}")
    return Prediction(at_step_time(estimate, time), low, high, step.measured_like, tuple(notes))


def relative_of(path: str) -> str:
    """The catalog system that a user's file starts from, else one of its chip's generation."""
    import tomllib

    base = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("base")
    if base is not None:
        return resolve_name(base)
    kind = generation(path)
    return next((name for name in system_names() if generation(name) == kind), "h100_sxm")


def published_name(model_name: str, measured: tuple[str, ...]) -> str:
    """What measured runs call this model, "" when none is of it."""
    for name in dict.fromkeys(measured):
        try:
            if resolve_model_name(name) == model_name:
                return name
        except ValueError:
            continue
    return ""


def at_step_time(estimate: Estimate, step_time: float) -> Estimate:
    """The estimate with its time scaled to a calibrated one: rates, shares, energy, cost and every part of the breakdown follow."""
    import jax

    factor = step_time / float(estimate.step_time)
    scaled: dict[str, Any] = {name: getattr(estimate, name) * factor for name in ("step_time", "energy", "cost")}
    scaled |= {name: getattr(estimate, name) / factor for name in ("tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu")}
    return dataclasses.replace(estimate, breakdown=jax.tree.map(lambda part: part * factor, estimate.breakdown), **scaled)
