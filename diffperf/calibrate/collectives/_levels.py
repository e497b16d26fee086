"""The levels of the hierarchy: constants of a node, of the network, of a fabric, of old libraries, of one log.

`node_design` is for one system, `network_design` for logs of many systems between nodes, `log_design` for one user's logs of one setting.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ._design import Design
from ._priors import HELD, OLD_START, prior_of
from ._settings import Setting
from ._vector import INDEX, LEAVES

NETWORK_LEAVES = ("efficiency", "ramp_ratio", "ramp_half", "ramp_power", "tree_rate", "nvls")
LOG_WIDTH = {"latency": 0.35, "ramp": 0.7, "wire": 0.15}
"""How far one log lies from another of its kind, as standard deviations of logarithms; between-log spread of 21 published logs."""
Prior = Callable[[Setting], tuple[np.ndarray, np.ndarray, np.ndarray]]


def _base(settings: Sequence[Setting], prior: Prior, graph: Sequence[bool]) -> tuple[Design, np.ndarray]:
    priors = [prior(setting) for setting in settings]
    mean, width, present = (np.array([p[k] for p in priors]) for k in range(3))
    present[np.array(graph, bool), INDEX["source.floor"]] = False
    return Design(mean, present), width


def node_design(setting: Setting, prior: Prior = prior_of, graph: bool = True) -> Design:
    """All constants of a node, for rows of one system in one log."""
    design, width = _base([setting], prior, [graph])
    for i, name in enumerate(LEAVES):
        if name.startswith("node.") and design.present[0, i] and width[0, i] > HELD:
            design.add(name, name, width[0, i], [0])
    return design


def network_design(settings: Sequence[Setting], prior: Prior = prior_of, scale: float = 1.0) -> Design:
    """Constants of the network shared by all logs, hop times by fabric, what old libraries add, and three factors per log."""
    design, width = _base(settings, prior, [True] * len(settings))
    every = range(len(settings))
    for leaf in NETWORK_LEAVES:
        name = f"network.{leaf}"
        design.add(name, name, max(width[:, INDEX[name]]), every)
    for fabric in sorted({setting.fabric for setting in settings}):
        of = [i for i in every if settings[i].fabric == fabric]
        design.add(f"fabric.{fabric}", "network.hop", width[of[0], INDEX["network.hop"]], of)
        if fabric == "efa2" and "fabric.efa" in design.names:  # generations of one technology move together
            design.add("fabric.efa", "network.hop", width[of[0], INDEX["network.hop"]], of)
    old = [i for i in every if settings[i].old]
    for leaf, (_, sd) in OLD_START.items():
        if old:
            design.add(f"old.{leaf}", f"source.{leaf}", sd, old)
    for i in every:
        for leaf, sd in LOG_WIDTH.items():
            design.add(f"log{i}.{leaf}", f"source.{leaf}", sd * scale, [i])
    return design


def log_design(settings: Sequence[Setting], graph: Sequence[bool], prior: Prior = prior_of) -> Design:
    """Logs of one system and network: its constants, then a floor and three factors for each log."""
    design, width = _base(settings, prior, graph)
    every = range(len(settings))
    for i, name in enumerate(LEAVES):
        if not name.startswith("source.") and width[:, i].max() > HELD:
            design.add(name, name, width[:, i].max(), every)
    single = len(settings) == 1
    for k in every:
        for leaf in ("floor", "latency", "ramp", "wire"):
            name = f"source.{leaf}"
            sd = width[k, INDEX[name]] if leaf == "floor" else LOG_WIDTH[leaf] * (1.0 if single else 0.5)
            design.add(f"log{k}.{leaf}", name, sd, [k])
    return design
