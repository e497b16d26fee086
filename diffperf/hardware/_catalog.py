"""The catalog of systems: datasheet numbers with their source, priors for what no datasheet says, and fits that replace the priors.

`catalog/<name>.toml` holds one chip in its usual node; `catalog/_priors.toml` efficiencies and latencies, per chip generation and link
technology; `fitted/<name>.toml` what a calibration found. A user's own file may start from a catalog system by `base = "h100_sxm"` and then say only
what differs. Leaves out what a chip does not say alone: clocks under a power cap, oversubscription, and noisy neighbours.
"""

import difflib
import functools
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._files import write_atomic
from ._system import DATATYPES, Chip, Host, System, Tier

CATALOG_DIRECTORY = Path(__file__).with_name("catalog")
FITTED_DIRECTORY = Path(__file__).with_name("fitted")
TIERS = ("scale_up", "scale_out", "spine")
_CHIP = ("memory_bandwidth", "memory_capacity", "num_processors", "l2_capacity", "power", "idle_power")
_HOST = ("link_bandwidth", "memory_capacity", "memory_bandwidth", "power")
_NOT_FITTED = ("num_devices", "price_per_hour", "power_usage_effectiveness")


class UnknownNameError(ValueError):
    """No system of that name: the message lists near names and says how to add one."""


@dataclass(frozen=True)
class Provenance:
    """Where one number of a system comes from.

    Attributes:
      path: dotted path, such as `chip.matmul_efficiency.bf16`.
      value: the number in use. [unit]
      unit: SI unit; "1" for a ratio or a count.
      source: datasheet, estimate, prior or fit.
      prior: the number before any fit. [unit]
      fitted: the fitted number, or None. [unit]
      low: lower end of the fit's interval, or None. [unit]
      high: upper end of it, or None. [unit]
    """

    path: str
    value: float
    unit: str
    source: str
    prior: float
    fitted: float | None = None
    low: float | None = None
    high: float | None = None


def system_names() -> tuple[str, ...]:
    """The systems of the catalog, sorted."""
    return tuple(sorted(_files()))


def resolve_name(name: str) -> str:
    """The catalog name for any usual spelling: case, punctuation and spaces do not matter.

    Raises:
      UnknownNameError: when neither a name nor an alias matches.
    """
    if isinstance(name, str):
        key = _key(name)
        if name in _files():
            return name
        short = re.sub(r"^(?:nvidia|amdinstinct|amd|googlecloud|google|aws|intel)", "", key)
        for spelling in (key, short, re.sub(r"sxm[2345]", "sxm", short)):  # "NVIDIA H100-SXM5-80GB", "AMD Instinct MI300X"
            if spelling in _index():
                return _index()[spelling]
    raise UnknownNameError(_unknown_message(str(name)))


def load_system(
    name_or_path: str | os.PathLike[str],
    *,
    num_devices: float | None = None,
    domain: float | None = None,
    scale_out_bandwidth: float | None = None,
    fitted: bool | str | os.PathLike[str] = True,
) -> System:
    """A system of the catalog, or of the user's own TOML file, as a pytree.

    Args:
      name_or_path: a catalog name or alias, or the path of a TOML file.
      num_devices: devices in the cluster; by default what the file says, else one scale-up domain. [1]
      domain: devices of one scale-up domain, in place of the file's (a smaller slice or rack). [1]
      scale_out_bandwidth: network rate per device, one direction, in place of the file's. The spine is scaled by the same factor. [B/s]
      fitted: True replaces priors by the fit shipped for this system (for a user's `own.toml`: by `own.fitted.toml` beside it), False keeps
        datasheet and priors, a path takes the fit of that file.
    Returns:
      The system. Its tree structure is the same for every name.
    Raises:
      UnknownNameError: no such name.
      ValueError: a mistake in a file, or an override that is not a positive number.
    """
    v = {row.path: row.value for row in _rows(name_or_path, fitted)}
    if domain is not None:
        v["scale_up.domain"] = _override("domain", domain, "1")
        for tier in TIERS[1:]:
            v[f"{tier}.domain"] = max(v[f"{tier}.domain"], v["scale_up.domain"])
        if _spec(*_locate(name_or_path)).num_devices is None:
            v["num_devices"] = v["scale_up.domain"]
    if scale_out_bandwidth is not None:
        new = _override("scale_out_bandwidth", scale_out_bandwidth, "B/s")
        v["spine.bandwidth"] *= new / v["scale_out.bandwidth"]
        v["scale_out.bandwidth"] = new
    if num_devices is not None:
        v["num_devices"] = _override("num_devices", num_devices, "1")
    chip = Chip(
        peak_flops_per_s=[v[f"chip.peak_flops_per_s.{d}"] for d in DATATYPES],
        matmul_efficiency=[v[f"chip.matmul_efficiency.{d}"] for d in DATATYPES],
        **{field: v[f"chip.{field}"] for field in (*_CHIP, "attention_efficiency", "memory_efficiency")},
    )
    host = Host(**{field: v[f"host.{field}"] for field in _HOST})
    tiers = {tier: Tier(**{field: v[f"{tier}.{field}"] for field in ("bandwidth", "efficiency", "latency", "domain", "torus_axes")}) for tier in TIERS}
    return System(chip=chip, host=host, **tiers, **{field: v[field] for field in _NOT_FITTED})


def describe(name_or_path: str | os.PathLike[str], *, fitted: bool | str | os.PathLike[str] = True) -> list[Provenance]:
    """Every number of a system with its source, in the order of the leaves of `System`. Arguments as in `load_system`."""
    return list(_rows(name_or_path, fitted))


def vendor(name_or_path: str | os.PathLike[str]) -> str:
    """Who makes the chip, such as "NVIDIA"."""
    return _spec(*_locate(name_or_path)).vendor


def generation(name_or_path: str | os.PathLike[str]) -> str:
    """Chip generation, the group that shares priors: "volta", "hopper", "cdna3", "tpu", ..."""
    return _spec(*_locate(name_or_path)).generation


def write_fitted(
    name_or_path: str | os.PathLike[str],
    values: Mapping[str, Any],
    meta: Mapping[str, str | float],
    *,
    path: str | os.PathLike[str] | None = None,
) -> Path:
    """Write the fit of one system, atomically: a reader sees the old file or the new one.

    Args:
      name_or_path: a catalog name or alias, or the path of a user's TOML file.
      values: per dotted path of `describe`, a number, `(value, low, high)`, or `{"value": ..., "low": ..., "high": ...}`. [SI]
      meta: `date`, `data` and `quality` of the fit, and whatever else is worth keeping.
      path: where to write; by default where `load_system(..., fitted=True)` looks.
    Returns:
      The path written.
    Raises:
      ValueError: an unknown path, a value that is not positive and finite, an interval that does not hold it, or meta without one of its keys.
    """
    origin, target = _locate(name_or_path), Path(path) if path is not None else _fitted_path(name_or_path)
    lines = ["# Fitted by the calibration; replaces the priors of the catalog. SI units.", "[fit]"]
    lines += [f"{_quote(str(key))} = {_scalar(value)}" for key, value in meta.items()]
    lines += ["", "[values]"]
    for dotted, item in values.items():
        value, low, high = _interval(item)
        lines.append(f"{_quote(dotted)} = {{ value = {_scalar(value)}, low = {_scalar(low)}, high = {_scalar(high)} }}")
    text = "\n".join(lines) + "\n"
    _check_fitted(tomllib.loads(text), target, _spec(*origin))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, text)
    return target


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.lru_cache(maxsize=1)
def _files() -> dict[str, Path]:
    """Catalog name -> file; a file is called by its name, so this reads nothing."""
    return {path.stem: path for path in CATALOG_DIRECTORY.glob("*.toml") if not path.stem.startswith("_")}


@functools.lru_cache(maxsize=1)
def _index() -> dict[str, str]:
    """Spelling without case and punctuation -> catalog name. Reads only the head of each file, up to its first table or number."""
    index = {}
    for name, path in _files().items():
        head = tomllib.loads(re.split(r"^(?:\[|price_per_hour)", path.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[0])
        for spelling in (name, *head["aliases"]):
            index[_key(spelling)] = name
    return index


def _unknown_message(name: str) -> str:
    from rapidfuzz import fuzz, process

    near = {_index()[key]: None for key, _, _ in process.extract(_key(name), list(_index()), scorer=fuzz.WRatio, limit=24)}
    return (
        f"system is {name!r}; the catalog has no such name. Near names: {', '.join(list(near)[:4])}. `system_names()` lists all. "
        f"To add a system, write a TOML file like {CATALOG_DIRECTORY / 'h100_sxm.toml'}, or one that starts with "
        '`base = "h100_sxm"` and says only what differs, and pass its path.'
    )


def _is_path(name_or_path: str | os.PathLike[str]) -> bool:
    return not isinstance(name_or_path, str) or name_or_path.endswith(".toml")


def _locate(name_or_path: str | os.PathLike[str]) -> tuple[Path, int]:
    """The TOML file and its time of change, which together key the cache of `_spec`."""
    if _is_path(name_or_path):
        path = Path(name_or_path)
        if not path.is_file():
            raise ValueError(f"system file is {str(path)!r}; there is no such file. Pass an existing TOML file or one of `system_names()`.")
    else:
        path = _files()[resolve_name(name_or_path)]
    return path, path.stat().st_mtime_ns


def _fitted_path(name_or_path: str | os.PathLike[str]) -> Path:
    if _is_path(name_or_path):
        return Path(name_or_path).with_suffix(".fitted.toml")
    return FITTED_DIRECTORY / f"{resolve_name(name_or_path)}.toml"


@functools.lru_cache(maxsize=256)
def _merged(path: Path, changed: int) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """The content of a file laid over its base, its own content, and the name of its base."""
    from ._schema import read_toml

    own = read_toml(path)
    base = own.pop("base", None)
    if base is None:
        return own, own, None
    try:
        base = resolve_name(base)
    except UnknownNameError as error:
        raise ValueError(f"{path}: base: {error}") from None
    own.setdefault("name", path.stem)  # the file says only what differs
    below = {key: value for key, value in read_toml(_files()[base]).items() if key not in ("name", "aliases")}
    return _overlay(below, own), own, base


def _overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged; a number and its source are replaced together."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and "value" not in merged[key]
        merged[key] = _overlay(merged[key], value) if both else value
    return merged


@functools.lru_cache(maxsize=256)
def _spec(path: Path, changed: int) -> Any:
    from ._schema import check_system

    return check_system(_merged(path, changed)[0], path)


@functools.lru_cache(maxsize=1)
def _priors() -> Any:
    from ._schema import Priors, check, read_toml

    path = CATALOG_DIRECTORY / "_priors.toml"
    return check(Priors, read_toml(path), path)


@functools.lru_cache(maxsize=256)
def _unfitted(path: Path, changed: int) -> dict[str, tuple[float, str]]:
    """Dotted path -> (value, source), datasheet and priors, in the order of the leaves of `System`."""
    spec = _spec(path, changed)
    chip, priors = spec.chip, _priors().generation[spec.generation]
    rows = {}
    for datatype in DATATYPES:
        peak = getattr(chip.peak_flops_per_s, datatype)
        rows[f"chip.peak_flops_per_s.{datatype}"] = (peak.value, peak.source) if peak else (0.0, "no such unit on this chip")
    for datatype in DATATYPES:
        number = getattr(chip.matmul_efficiency, datatype) or priors.matmul_efficiency[datatype]
        rows[f"chip.matmul_efficiency.{datatype}"] = (number.value, number.source)
    for field in ("attention_efficiency", "memory_bandwidth", "memory_efficiency", *_CHIP[1:]):
        number = getattr(chip, field) or getattr(priors, field)
        rows[f"chip.{field}"] = (number.value, number.source)
    for field in _HOST:
        number = getattr(spec.host, field)
        rows[f"host.{field}"] = (number.value, number.source)
    for tier in TIERS:
        repeated = tier == "spine" and spec.spine is None
        body = spec.scale_out if repeated else getattr(spec, tier)
        remark = "; repeats scale_out" if repeated else ""
        for field in ("bandwidth", "efficiency", "latency", "domain", "torus_axes"):
            number = getattr(body, field) or getattr(_priors().technology[body.technology], field, None)
            rows[f"{tier}.{field}"] = (number.value, number.source + remark) if number else (0.0, "switched tier" + remark)
    devices = spec.num_devices
    rows["num_devices"] = (devices.value, devices.source) if devices else (spec.scale_up.domain.value, "default: one scale-up domain")
    for field in _NOT_FITTED[1:]:
        number = getattr(spec, field)
        rows[field] = (number.value, number.source)
    return rows


def _rows(name_or_path: str | os.PathLike[str], fitted: bool | str | os.PathLike[str]) -> list[Provenance]:
    """The numbers of a system, with its fit, or that of its base where its file says nothing itself, laid over them."""
    from ._schema import UNITS, read_toml

    origin = _locate(name_or_path)
    spec, (_, own, base) = _spec(*origin), _merged(*origin)
    fits: list[Path] = []
    if not isinstance(fitted, bool):
        fits = [Path(fitted)]
    elif fitted:
        fits = [FITTED_DIRECTORY / f"{base}.toml"] if base else []
        fits = [path for path in (*fits, _fitted_path(name_or_path)) if path.is_file()]
    values: dict[str, tuple[Any, str]] = {}
    for path in fits:
        fit = _check_fitted(read_toml(path), path, spec)
        source = f"fit of {fit.fit['date']}: {fit.fit['data']}"
        of_base = base is not None and path == FITTED_DIRECTORY / f"{base}.toml"
        found = {dotted: (value, source) for dotted, value in fit.values.items() if not (of_base and _says(own, dotted))}
        if spec.spine is None:
            found |= {f"spine.{key[10:]}": pair for key, pair in found.items() if key.startswith("scale_out.") and f"spine.{key[10:]}" not in found}
        values |= found
    rows = []
    for dotted, (number, source) in _unfitted(*origin).items():
        unit = next(UNITS[part] for part in reversed(dotted.split(".")) if part in UNITS)
        if dotted in values:
            fit_value, source = values[dotted]
            rows.append(Provenance(dotted, fit_value.value, unit, source, number, fit_value.value, fit_value.low, fit_value.high))
        else:
            rows.append(Provenance(dotted, number, unit, source, number))
    return rows


def _says(own: dict[str, Any], dotted: str) -> bool:
    """Does the user's own file set this number?"""
    node: Any = own
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node is not None


def _check_fitted(raw: dict[str, Any], path: Path, spec: Any) -> Any:
    from ._schema import Fitted, check

    fit = check(Fitted, raw, path)
    missing = [key for key in ("date", "data", "quality") if key not in fit.fit]
    if missing:
        raise ValueError(f"{path}: missing key fit.{missing[0]}. [fit] says when (date), on what (data) and how well (quality) it was fitted.")
    for dotted, value in fit.values.items():
        if dotted not in _fittable():
            near = difflib.get_close_matches(dotted, _fittable(), n=3) or ["chip.matmul_efficiency.bf16"]
            raise ValueError(f"{path}: unknown key values.{dotted!r}. Near paths: {', '.join(near)}; `describe(name)` lists all.")
        if not value.low <= value.value <= value.high:
            raise ValueError(f"{path}: values.{dotted!r} is {value.value:g} with low = {value.low:g}, high = {value.high:g}; it should lie between.")
    return fit


@functools.lru_cache(maxsize=1)
def _fittable() -> tuple[str, ...]:
    path = next(iter(_files().values()))
    return tuple(dotted for dotted in _unfitted(path, path.stat().st_mtime_ns) if dotted not in _NOT_FITTED)


def _interval(item: Any) -> tuple[float, float, float]:
    """(value, low, high) of the forms that `write_fitted` takes; a bare number is its own interval."""
    if isinstance(item, Mapping):
        return float(item["value"]), float(item.get("low", item["value"])), float(item.get("high", item["value"]))
    if isinstance(item, (tuple, list)):
        value, low, high = item
        return float(value), float(low), float(high)
    return float(item), float(item), float(item)


def _quote(text: str) -> str:
    """A TOML basic string; it escapes as JSON does, except that TOML also forbids a bare DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quote(value)
    return repr(int(value)) if isinstance(value, int) else repr(float(value))


def _override(name: str, value: Any, unit: str) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} is {value!r}; it should be a positive, finite number [{unit}]. Leave it out to keep the catalog's.")
    return number
