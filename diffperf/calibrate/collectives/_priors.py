"""Prior of every constant of a setting: the shipped fit where the system was measured, its generation and datasheet where not."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ...hardware import generation, load_system, vendor
from ._settings import Setting
from ._vector import INDEX, LEAVES, NUM_LEAVES

FITTED = Path(__file__).with_name("fitted") / "collectives.json"
HELD = 1e-6
"""Width of a parameter that is not fitted."""

# Start values and widths (standard deviation of the logarithm) per generation, before any fit. SI units. Latency and ramp from the tables of
# aiconfigurator and from nccl-tests logs; bandwidth is 0.79 of the datasheet's link (A100 0.75-0.79, H100 0.82-0.84, Blackwell 0.77-0.80).
NODE_START: dict[str, tuple[float, float]] = {
    "reduce_rate": (1.02, 0.05), "exchange_rate": (0.87, 0.08), "launch": (6.5e-6, 0.35), "hop": (1e-6, 0.3), "second_hop": (0.15, HELD),
    "second_bytes": (16384.0, HELD), "exchange_launch": (9e-6, 0.4), "exchange_hop": (0.4e-6, 0.6), "peer_bandwidth": (6.3e9, 0.3), "peer_ceiling": (5e-6, 0.4),
    "ramp": (30e-6, 0.6), "gather_ramp": (1.0, 0.3), "scatter_ramp": (1.0, 0.3), "exchange_ramp": (0.5, 0.7), "ramp_half": (0.7, 0.5),
    "ramp_power": (0.8, HELD),
}  # fmt: skip
LINK_SHARE = {"nvlink": (0.79, 0.06), "pcie": (0.63, 0.15), "xgmi": (0.85, 0.15), "memory": (0.1, 1.0)}  # memory: the devices of one CPU
LOCAL = {"blackwell": 1.45}  # rank-local work over `bandwidth`; 2.4 before Blackwell
LOCAL_OTHER, LOCAL_WIDTH = 2.4, 0.35
# Change to the bandwidth protocol: extra time per step, bytes per rank, most steps of an early change. The bytes double with each generation.
BUMP = {"ampere": (8e-6, 0.37e6, 4.0, 0.0), "hopper": (6e-6, 0.74e6, 4.0, 0.0), "blackwell": (7.2e-6, 1.4e6, 10.0, 0.5)}
NVLS = {"hopper": (0.8, 0.08)}
GENERATION_START = {
    "blackwell": {"launch": (8e-6, 0.2), "hop": (1.3e-6, 0.15), "ramp": (8e-6, 0.6)}, "volta": {"hop": (0.55e-6, 0.3), "launch": (5e-6, 0.3)},
    "cpu": {"launch": (50e-6, 1.0), "hop": (10e-6, 1.0), "exchange_launch": (50e-6, 1.0), "exchange_hop": (10e-6, 1.0), "exchange_rate": (0.87, 0.5),
            "ramp": (30e-6, 1.0)},
}  # fmt: skip
NETWORK_START: dict[str, tuple[float, float]] = {
    "efficiency": (0.93, 0.05), "ramp_ratio": (5.5, 0.4), "ramp_half": (0.7, 0.5), "ramp_power": (0.5, 0.2), "tree_rate": (0.82, 0.15), "nvls": (0.8, 0.08),
}  # fmt: skip
HOP_START = {  # time of one level between nodes
    "ib": (6e-6, 0.3), "roce": (8e-6, 0.6), "efa": (30e-6, 0.9), "efa2": (15e-6, 0.4), "slingshot": (8e-6, 0.6), "tcpx": (8e-6, 0.9), "unknown": (6.5e-6, 0.6),
}  # fmt: skip
SOURCE_START = {"floor": (3e-6, 1.0), "latency": (1.0, 0.15), "ramp": (1.0, 0.3), "wire": (1.0, 0.06), "tree": (1.0, HELD)}
OLD_START = {"ramp": (1.4, 0.4), "tree": (1.3, 0.3)}


@lru_cache(maxsize=1)
def shipped() -> dict[str, Any]:
    """The fit that the package carries; empty where it was not made yet."""
    return json.loads(FITTED.read_text(encoding="utf-8")) if FITTED.is_file() else {}


def source_key(setting: Setting) -> str:
    """Name of a system and network, whose logs are fitted together, and under which a fit keeps what they have in common."""
    bridge = f", links of {setting.bridge:.4g} B/s" * bool(setting.bridge)
    return f"{setting.system}, {setting.fabric}, {setting.nic_bandwidth / setting.ranks_per_node:.4g} B/s per rank{bridge}"


def start_of(setting: Setting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prior before any fit: mean of the logarithm, its standard deviation, and which constants are present; shapes (leaves,)."""
    return _prior(setting, {})


def prior_of(setting: Setting, fit: dict[str, Any] | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prior from a fit (the shipped one by default): mean of the logarithm, its standard deviation, and which are present; shapes (leaves,)."""
    return _prior(setting, shipped() if fit is None else fit)


def _prior(setting: Setting, fit: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    hardware = load_system(setting.system)
    kind, fast = generation(setting.system), float(hardware.scale_up.bandwidth)
    link = setting.bridge or fast
    technology = "xgmi" if vendor(setting.system) == "AMD" and fast > 100e9 else "pcie" if link <= 64e9 and not setting.bridge else "nvlink"
    if setting.bridge and setting.bridge < 20e9:
        technology = "pcie"
    if kind == "cpu":
        technology = "memory"
    share, width = LINK_SHARE[technology]
    values: dict[str, tuple[float, float]] = {f"node.{key}": pair for key, pair in NODE_START.items()}
    rate = share * link
    values["node.bandwidth"] = (rate, width)
    local = LOCAL.get(kind, LOCAL_OTHER) * rate
    values |= {f"node.local_{op}_bandwidth": (local, LOCAL_WIDTH) for op in ("reduce", "gather", "scatter", "exchange")}
    step, size, limit, line = BUMP.get(kind, (0.0, 1e6, 4.0, 0.0)) if technology == "nvlink" and not setting.bridge else (0.0, 1e6, 4.0, 0.0)
    values |= {"node.bump_step": (step, 0.3), "node.bump_bytes": (size, 0.2), "node.bump_limit": (limit, HELD), "node.bump_line": (line, HELD)}
    switched = technology == "nvlink" and not setting.bridge
    values["node.nvls"] = NVLS.get(kind, (0.0, HELD)) if switched else (0.0, HELD)
    values |= {f"node.{key}": pair for key, pair in GENERATION_START.get(kind, {}).items()}
    values |= {f"network.{key}": pair for key, pair in NETWORK_START.items()}
    if not (switched and kind in ("hopper", "blackwell")):
        values["network.nvls"] = (0.0, HELD)
    values["network.bandwidth"] = (setting.nic_bandwidth, HELD)
    values["network.hop"] = HOP_START[setting.fabric]
    values |= {f"source.{key}": pair for key, pair in SOURCE_START.items()}
    fitted_node = fit.get("systems", {}).get(setting.system) or fit.get("generations", {}).get(kind)
    if fitted_node and not setting.bridge:
        own = setting.system in fit.get("systems", {})
        for key, (value, sd) in fitted_node.items():
            scale = rate / fitted_node["link"][0] if not own and key.endswith("bandwidth") and key != "peer_bandwidth" else 1.0
            if key != "link" and values[f"node.{key}"][1] > HELD:
                values[f"node.{key}"] = (value * scale, sd)
    values |= {f"network.{key}": tuple(pair) for key, pair in fit.get("network", {}).items() if values[f"network.{key}"][0] > 0}
    if setting.fabric in fit.get("fabrics", {}):
        values["network.hop"] = tuple(fit["fabrics"][setting.fabric])
    old = {key: tuple(pair) for key, pair in fit.get("old", OLD_START).items()}
    if setting.old:
        values |= {f"source.{key}": pair for key, pair in old.items()}
    elif setting.unknown_version:
        values["source.ramp"] = (1.0, float(np.hypot(SOURCE_START["ramp"][1], 0.5 * abs(np.log(old["ramp"][0])))))
    values |= {f"source.{key}": tuple(pair) for key, pair in fit.get("sources", {}).get(source_key(setting), {}).items()}
    mean, width_of, present = np.zeros(NUM_LEAVES), np.full(NUM_LEAVES, HELD), np.zeros(NUM_LEAVES, bool)
    for name in LEAVES:
        value, sd = values[name]
        present[INDEX[name]] = value > 0
        if value > 0:
            mean[INDEX[name]], width_of[INDEX[name]] = np.log(value), max(sd, HELD)
    return mean, width_of, present
