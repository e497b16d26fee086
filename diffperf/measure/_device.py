"""What was measured on: the device JAX computes with, its software, its cache and memory. No name of a host or user."""

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

_ACCELERATOR_CACHE = 128 * 2**20  # above the L2 of every GPU sold so far (B200: 126 MB), and above what a TPU keeps on chip
_CPU_CACHE = 64 * 2**20  # where the operating system does not tell


class Device(NamedTuple):
    """The device under measurement and its software.

    Attributes:
      gpu: name of the chip by which the catalog of hardware finds it: JAX's kind of the device, as `NVIDIA H200`; `cpu` for every CPU.
      device: the chip's own name; that of the CPU where it is one.
      device_kind, backend: as JAX says them.
      jax, jaxlib, driver: versions; the driver is empty where there is none.
      num_threads: threads the CPU backend may use; 0 on accelerators.
      cache_bytes: last-level cache, or a bound from above. [B]
      memory_bytes: memory a measurement may fill. [B]
    """

    gpu: str
    device: str
    device_kind: str
    backend: str
    jax: str
    jaxlib: str
    driver: str
    num_threads: int
    cache_bytes: float
    memory_bytes: float

    @property
    def is_cpu(self) -> bool:
        return self.backend == "cpu"

    def columns(self) -> dict[str, str | int]:
        """The columns of a table that name the device; a table holds one value of each, except for the date."""
        names = ("gpu", "device", "device_kind", "backend", "jax", "jaxlib", "driver")
        return {**{name: getattr(self, name) for name in names}, "num_threads": self.num_threads or ""}


def this_device() -> Device:
    """The first local device of JAX's default backend."""
    import jaxlib.version

    device = jax.local_devices()[0]
    cpu = device.platform == "cpu"
    kind = device.device_kind
    name = _cpu_name() if cpu else kind
    threads = len(os.sched_getaffinity(0)) if cpu and hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) if cpu else 0
    memory = _free_memory() / 4 if cpu else 0.6 * _device_memory(device)
    cache = _cpu_cache() if cpu else _ACCELERATOR_CACHE
    return Device(kind, name, kind, device.platform, jax.__version__, jaxlib.version.__version__, _driver(device), threads, cache, memory)


def today() -> str:
    """The date in UTC, `2026-01-31`."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return " ".join((match[1] if match else platform.processor() or platform.machine() or "CPU").split())


def _cpu_cache() -> float:
    """Last-level cache as the kernel tells it, which knows of virtual machines."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    found = [_CPU_CACHE] if not (files := sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))) else []
    for file in files:
        text = file.read_text(encoding="ascii").strip()
        found.append(float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text or 0))
    return max(found)


def _free_memory() -> float:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return 4e9


def _device_memory(device: Any) -> float:
    stats = device.memory_stats() or {}
    return float(stats.get("bytes_limit", 8e9)) - float(stats.get("bytes_in_use", 0.0))


def _driver(device: Any) -> str:
    """Platform version of JAX and the kernel driver of NVIDIA, in one line."""
    said = " ".join(str(getattr(device.client, "platform_version", "")).split())
    parts = [] if said == device.platform else [said]
    try:
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return "; ".join(parts + ([f"driver {match[1]}"] if match and device.platform == "gpu" else []))
