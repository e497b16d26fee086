"""The built-in catalog of public models, `catalog.toml`, and the spellings under which each is found."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ._build import transformer
from ._huggingface import from_huggingface
from ._transformer import Transformer

_NOT_CONFIG = ("published", "published_active", "active_without_embedding", "aliases", "source", "seq_len")
_SUFFIXES = ("hf", "instruct", "chat", "base", "it", "pt", "fp8", "bf16", "fp4", "lora", "v0.1", "v0.3")


class UnknownModelError(ValueError):
    """A name that is not in the catalog; the message lists near ones."""


@dataclass(frozen=True)
class CatalogEntry:
    """One model of the catalog.

    Attributes:
      name: its canonical name.
      config: keys for `from_huggingface`, if they name a `model_type`, else arguments of `transformer`.
      seq_len: positions of one training sequence. [1]
      source: where shape and counts come from.
      published: parameters as printed by the source, with its rounding; None where it prints none.
      published_active: parameters that one token meets, as printed; None where it prints none.
      active_without_embedding: whether that count leaves out the embedding.
      aliases: further spellings.
    """

    name: str
    config: Mapping[str, Any]
    seq_len: float
    source: str
    published: str | None
    published_active: str | None
    active_without_embedding: bool
    aliases: tuple[str, ...]


def model_names() -> tuple[str, ...]:
    """Canonical names of all models of the catalog, in its order (by family, then size)."""
    return tuple(_entries())


def catalog_entry(name: str) -> CatalogEntry:
    """What the catalog holds on a model, with its source.

    Raises:
      UnknownModelError: when no model has this name.
    """
    return _entries()[resolve_model_name(name)]


def resolve_model_name(name: str) -> str:
    """The canonical name of a model, from any usual spelling.

    Case, spaces, dashes and underscores do not matter, nor does the organisation before a slash, the word Meta, or a suffix such as
    `-hf`, `-Instruct` or `-FP8`. Separators between digits do: `opt-1.3b` is not `opt-13b`.

    Raises:
      UnknownModelError: when no model has this name.
    """
    spellings = _spellings()
    for key in _keys(name):
        if key in spellings:
            return spellings[key]
    from rapidfuzz import process

    near = [match[0] for match in process.extract(_keys(name)[0], tuple(_entries()), limit=5, score_cutoff=50)]
    hint = f"Near: {', '.join(near)}." if near else "`diffperf models` and `model_names()` list all."
    raise UnknownModelError(f"{name!r} is not a model of the catalog. {hint} Or pass the path of a Hugging Face config.json.")


def load_model(name_or_config_path: str | Path, seq_len: float | None = None) -> Transformer:
    """A model of the catalog, or one read from a Hugging Face `config.json`.

    Args:
      name_or_config_path: a name (see `resolve_model_name`), a `.json` file, or a folder that holds a `config.json`.
      seq_len: positions of one sequence; None for the training context of the catalog, or the rule of `from_huggingface`. [1]
    Raises:
      UnknownModelError: when there is neither such a file nor such a name.
    """
    path = Path(name_or_config_path)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return from_huggingface(path, seq_len)
    entry = catalog_entry(str(name_or_config_path))
    length = entry.seq_len if seq_len is None else seq_len
    if "model_type" in entry.config:
        return from_huggingface(entry.config, length)
    return transformer(**entry.config, seq_len=length)


def published_parameters(name: str) -> float | None:
    """Parameters printed by the source of a model, to compare with `num_parameters`; None where it prints none. [1]

    Raises:
      UnknownModelError: when no model has this name.
    """
    printed = catalog_entry(name).published
    return None if printed is None else float(printed)


@lru_cache(maxsize=1)
def _entries() -> Mapping[str, CatalogEntry]:
    import tomllib

    families = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
    entries = {}
    for family in families.values():
        common = {"seq_len": family.get("seq_len"), "source": family["source"], **family.get("config", {})}
        for name, own in family["models"].items():
            values = {**common, **own}
            notes = {key: values.pop(key, None) for key in _NOT_CONFIG}
            notes |= {"aliases": tuple(notes["aliases"] or ()), "active_without_embedding": bool(notes["active_without_embedding"])}
            entries[name] = CatalogEntry(name=name, config=MappingProxyType(values), **notes)
    return MappingProxyType(entries)


@lru_cache(maxsize=1)
def _spellings() -> Mapping[str, str]:
    """Plain spelling to canonical name; canonical names win over aliases."""
    spellings = {_plain(alias): entry.name for entry in _entries().values() for alias in entry.aliases}
    return MappingProxyType(spellings | {_plain(name): name for name in _entries()})


def _plain(name: str) -> str:
    """Lower-case letters and digits; between digits also a point, or a dash for any other separator (gpt2-2b is not gpt-22b)."""
    name = re.sub(r"(?<=\d)[^a-z0-9.]+(?=\d)", "-", name.lower())
    name = re.sub(r"(?<!\d)[.-]|[.-](?!\d)|[^a-z0-9.-]", "", name)
    return name.removeprefix("nvidia").removeprefix("meta")


def _keys(name: str) -> list[str]:
    """Plain spellings of `name` to try, the most faithful first: as it is, without organisation, 3_1 as 3.1, without suffixes."""
    short = name.rsplit("/", 1)[-1]
    keys = [_plain(name), _plain(short), _plain(re.sub(r"(?<=\d)_(?=\d)", ".", short))]
    for stripped in keys[1:]:
        while suffix := next((s for s in _SUFFIXES if stripped.endswith(s) and len(stripped) > len(s)), None):
            stripped = stripped.removesuffix(suffix)
            keys.append(stripped)
    return keys
