"""From fits of the study to the numbers that ship: a value and a width of each constant, by system, generation, network, fabric and age of the library."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...hardware import generation
from ._design import CollectiveRows, Design, fit_design
from ._levels import network_design, node_design
from ._priors import prior_of, start_of
from ._settings import Setting
from ._vector import INDEX

TRANSFER = 0.05
"""Least width of a shipped constant: how far machines of one kind lie apart."""
ACROSS = 2.0
"""A generation's constants are this much wider than a system's own."""


def node_setting(system: str) -> Setting:
    """A single node of a system with a known, current library."""
    return Setting(system, 8.0, 4e11, "unknown", unknown_version=False)


def fit_node(system: str, rows: CollectiveRows, weights: np.ndarray | None = None) -> tuple[Design, np.ndarray, np.ndarray]:
    """Design, mode and posterior widths of a system's node constants; stacked by fold with `weights`."""
    design = node_design(node_setting(system), start_of)
    mode = fit_design(rows, design, weights)
    return design, mode.parameters, np.sqrt(np.diagonal(np.linalg.inv(mode.precision), axis1=-2, axis2=-1))


def node_entry(design: Design, parameters: np.ndarray, width: np.ndarray) -> dict[str, list[float]]:
    """One system in the shipped form."""
    base = {name: design.base[0, INDEX[name]] for name in design.names}
    entry = {"link": [float(np.exp(base["node.bandwidth"])), 0.0]}
    for name, value, sd in zip(design.names, parameters, width, strict=True):
        entry[name.removeprefix("node.")] = [float(np.exp(base[name] + value)), float(np.hypot(sd, TRANSFER))]
    return entry


def generation_entry(entries: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Mean of the systems of one generation, rates relative to the link, widened."""
    link = float(np.exp(np.mean([np.log(entry["link"][0]) for entry in entries])))
    out = {"link": [link, 0.0]}
    for key in set.intersection(*(set(entry) for entry in entries)) - {"link"}:
        relative = key.endswith("bandwidth") and key != "peer_bandwidth"
        logs = [np.log(entry[key][0] / (entry["link"][0] if relative else 1.0)) for entry in entries]
        sd = np.hypot(ACROSS * np.mean([entry[key][1] for entry in entries]), np.std(logs))
        out[key] = [float(np.exp(np.mean(logs)) * (link if relative else 1.0)), float(sd)]
    return dict(sorted(out.items()))


def nodes_fit(rows: Mapping[str, CollectiveRows]) -> dict[str, Any]:
    """Systems and generations of a fit."""
    systems = {name: node_entry(*fit_node(name, table)) for name, table in rows.items()}
    return with_generations(systems)


def with_generations(systems: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Adds the generations of fitted systems."""
    kinds = {name: generation(name) for name in systems}
    found = {kind: generation_entry([systems[name] for name in systems if kinds[name] == kind]) for kind in sorted(set(kinds.values()))}
    return dict(systems=systems, generations=found)


def network_entry(design: Design, parameters: np.ndarray, precision: np.ndarray, settings: Sequence[Setting]) -> dict[str, Any]:
    """Network, fabrics and old libraries in the shipped form."""
    width = np.sqrt(np.diag(np.linalg.inv(precision)))
    start = {setting.fabric: i for i, setting in enumerate(settings)}
    out: dict[str, Any] = {"network": {}, "fabrics": {}, "old": {}}
    for name, value, sd in zip(design.names, parameters, width, strict=True):
        part, leaf = name.split(".")
        if part == "network":
            row = int(np.argmax(design.present[:, INDEX[name]]))
            out["network"][leaf] = [float(np.exp(design.base[row, INDEX[name]] + value)), float(sd)]
        elif part == "fabric":
            moved = design.base[start[leaf], INDEX["network.hop"]] + design.matrix[start[leaf], INDEX["network.hop"]] @ parameters
            out["fabrics"][leaf] = [float(np.exp(moved)), float(np.hypot(sd, 2 * TRANSFER))]
        elif part == "old":
            row = next(i for i, setting in enumerate(settings) if setting.old)
            out["old"][leaf] = [float(np.exp(design.base[row, INDEX[f"source.{leaf}"]] + value)), float(sd)]
    return out


def network_fit(rows: CollectiveRows, settings: Sequence[Setting], nodes: dict[str, Any]) -> tuple[Design, dict[str, Any]]:
    """Fits the network on top of fitted nodes."""
    design = network_design(settings, lambda setting: prior_of(setting, nodes))
    mode = fit_design(rows, design)
    return design, network_entry(design, mode.parameters, mode.precision, settings)


