"""What a catalog TOML file may say, checked by pydantic; loaded on first use only, so that `import diffperf` stays light.

Every number is `{ value = ..., source = "..." }` in SI units. Efficiencies and latencies may be left out: `_priors.toml` has them per
chip generation and link technology.
"""

import itertools
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ._system import DATATYPES

Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Generation = Literal["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "gcn", "cdna2", "cdna3", "cdna4", "tpu", "trainium", "gaudi", "cpu"]
Technology = Literal["nvlink", "pcie", "xgmi", "neuronlink", "ici", "upi", "infiniband", "ethernet", "efa", "slingshot", "dcn"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
UNITS = {
    "peak_flops_per_s": "FLOP/s", "matmul_efficiency": "1", "attention_efficiency": "1", "memory_bandwidth": "B/s", "memory_efficiency": "1",
    "memory_capacity": "B", "num_processors": "1", "l2_capacity": "B", "power": "W", "idle_power": "W", "link_bandwidth": "B/s",
    "bandwidth": "B/s", "efficiency": "1", "latency": "s", "domain": "1", "torus_axes": "1", "num_devices": "1",
    "price_per_hour": "USD/h", "power_usage_effectiveness": "1",
}  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Positive(_Strict):
    value: Annotated[Finite, Field(gt=0)]
    source: Text


class NonNegative(_Strict):
    value: Annotated[Finite, Field(ge=0)]
    source: Text


class Count(_Strict):
    value: Annotated[Finite, Field(ge=1)]
    source: Text


class Share(_Strict):
    value: Annotated[Finite, Field(gt=0, le=1)]
    source: Text


class Large(_Strict):
    """A rate or a capacity. The floor catches GB/s, TFLOP/s and GiB written where SI units are meant."""

    value: Annotated[Finite, Field(ge=1e6)]
    source: Text


class Axes(_Strict):
    value: Annotated[Finite, Field(ge=0, le=6)]
    source: Text


class Peaks(_Strict):
    """Dense peaks; a datatype left out has no unit on this chip."""

    fp32: Large
    tf32: Large | None = None
    fp16: Large | None = None
    bf16: Large | None = None
    fp8: Large | None = None
    mxfp8: Large | None = None
    nvfp4: Large | None = None
    int8: Large | None = None


class Efficiencies(_Strict):
    fp32: Share | None = None
    tf32: Share | None = None
    fp16: Share | None = None
    bf16: Share | None = None
    fp8: Share | None = None
    mxfp8: Share | None = None
    nvfp4: Share | None = None
    int8: Share | None = None


class ChipSpec(_Strict):
    peak_flops_per_s: Peaks
    matmul_efficiency: Efficiencies = Efficiencies()
    attention_efficiency: Share | None = None
    memory_bandwidth: Large
    memory_efficiency: Share | None = None
    memory_capacity: Large
    num_processors: Count
    l2_capacity: Large
    power: Positive
    idle_power: NonNegative


class HostSpec(_Strict):
    link_bandwidth: Large
    memory_capacity: Large
    memory_bandwidth: Large
    power: NonNegative


class TierSpec(_Strict):
    technology: Technology
    bandwidth: Large
    efficiency: Share | None = None
    latency: Positive | None = None
    domain: Count
    torus_axes: Axes | None = None


class SystemSpec(_Strict):
    name: Text
    aliases: list[Text] = []
    vendor: Text
    generation: Generation
    num_devices: Count | None = None
    price_per_hour: NonNegative
    power_usage_effectiveness: Count
    chip: ChipSpec
    host: HostSpec
    scale_up: TierSpec
    scale_out: TierSpec
    spine: TierSpec | None = None


class GenerationPriors(_Strict):
    matmul_efficiency: dict[str, Share]
    attention_efficiency: Share
    memory_efficiency: Share


class TechnologyPriors(_Strict):
    efficiency: Share
    latency: Positive


class Priors(_Strict):
    generation: dict[Generation, GenerationPriors]
    technology: dict[Technology, TechnologyPriors]


class FittedValue(_Strict):
    value: Annotated[Finite, Field(gt=0)]
    low: Annotated[Finite, Field(ge=0)]
    high: Annotated[Finite, Field(gt=0)]


class Fitted(_Strict):
    fit: dict[str, str | int | float | bool]
    values: dict[str, FittedValue]


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; a syntax error becomes a ValueError that names the file and the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}. Mend that line; https://toml.io shows the format.") from None


def check(model: type[_Strict], raw: dict[str, Any], path: Path) -> Any:
    """`raw` as `model`, or a ValueError with one line per mistake: file, key, value received, what is accepted."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        lines = [f"{path}: {_explain(model, item)}" for item in error.errors(include_url=False)]
        raise ValueError("\n".join(lines)) from None


def check_system(raw: dict[str, Any], path: Path) -> SystemSpec:
    """`check`, and the facts that involve two keys."""
    spec: SystemSpec = check(SystemSpec, raw, path)
    mistakes = []
    if spec.chip.peak_flops_per_s.fp16 is None and spec.chip.peak_flops_per_s.bf16 is None:
        mistakes.append("chip.peak_flops_per_s has neither fp16 nor bf16; attention is modelled on the 16-bit peak. Give at least one.")
    if spec.chip.idle_power.value > spec.chip.power.value:
        mistakes.append(f"chip.idle_power is {spec.chip.idle_power.value:g} W; it should not exceed chip.power = {spec.chip.power.value:g} W.")
    tiers = [("scale_up", spec.scale_up), ("scale_out", spec.scale_out)] + ([("spine", spec.spine)] if spec.spine else [])
    for (lower_name, lower), (name, tier) in itertools.pairwise(tiers):
        if tier.domain.value < lower.domain.value:
            mistakes.append(f"{name}.domain is {tier.domain.value:g}; it should be at least {lower_name}.domain = {lower.domain.value:g}.")
    if mistakes:
        raise ValueError("\n".join(f"{path}: {mistake}" for mistake in mistakes))
    return spec


def _explain(model: type[BaseModel], item: Any) -> str:
    """One pydantic mistake in words."""
    parts = [str(part) for part in item["loc"]]
    key, kind = ".".join(parts), item["type"]
    unit = next((UNITS[part] for part in reversed(parts) if part in UNITS), None)
    if kind == "extra_forbidden":
        return f"unknown key {key}. Accepted here: {', '.join(_keys(model, parts[:-1]))}."
    if kind == "missing":
        shape = ' It is { value = number, source = "where it is from" }' + (f" in {unit}." if unit else ".")
        return f"missing key {key}.{shape if parts[-1] in UNITS or parts[-1] in DATATYPES else ''}"
    hint = ""
    if unit not in (None, "1"):
        hint = f" The unit is {unit} (SI, so 3.35 TB/s is 3.35e12)."
    if kind == "model_type":
        hint = ' Write { value = number, source = "where it is from" }.' + hint
    return f"{key} is {item['input']!r}; {item['msg'][0].lower()}{item['msg'][1:]}.{hint}"


def _keys(model: Any, parts: list[str]) -> list[str]:
    """The keys accepted in the table at `parts`, found by walking down the field types."""
    for part in parts:
        annotation = model.model_fields[part].annotation if hasattr(model, "model_fields") and part in model.model_fields else model
        choices = [kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")]
        model = choices[0] if choices else model
    return list(model.model_fields)
