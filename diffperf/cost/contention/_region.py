"""An overlap region: kernels of one compute stream, and collectives of one or several streams that run beside them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..._arrays import si
from ._collectives import ALGORITHMS, OPERATIONS, PROTOCOLS, Collective, CollectiveRows, Settings, collective_rows
from ._constants import OverlapChip
from ._kernels import Kernel

MAX_CHANNELS = 64
"""Of NCCL since 2.20 (`MAXCHANNELS`, NCCL `src/include/device.h`)."""

MAX_THREADS = 640
"""Threads of one channel (`NCCL_MAX_NTHREADS`, NCCL `src/include/device.h`)."""


class KernelRows(NamedTuple):
    """Numbers of the kernels in order, shape (kernels,): see `Kernel`."""

    flops: Float[Array, "*n"]
    nbytes: Float[Array, "*n"]
    tile_bytes: Float[Array, "*n"]
    blocks: Float[Array, "*n"]
    launch: Float[Array, "*n"]


class OverlapRegion(eqx.Module):
    """Made by `overlap_region`.

    Attributes:
      chip: the accelerator.
      kernels: on the compute stream, in order.
      collectives: in the order in which they were given.
      order: collectives of each communication stream in order, shape (streams, slots); the number of collectives where a stream has no more.
      kernel_names, collective_names: for messages.
      choices: pairs (algorithm, protocol) of each collective.
    """

    chip: OverlapChip
    kernels: KernelRows
    collectives: CollectiveRows
    order: Int[Array, "streams slots"]
    kernel_names: tuple[str, ...] = eqx.field(static=True)
    collective_names: tuple[str, ...] = eqx.field(static=True)
    choices: tuple[tuple[tuple[str, str], ...], ...] = eqx.field(static=True)


class Setting(NamedTuple):
    """How one collective runs; the default is what NCCL runs large collectives with in the published studies.

    Attributes:
      channels: channels, one block of threads each. [1]
      chunk_bytes: [B]
      threads: per channel. [1]
      algorithm, protocol: one of the collective's choices.
    """

    channels: float = 8
    chunk_bytes: float = 2 * 2**20
    threads: float = 512
    algorithm: str = "ring"
    protocol: str = "simple"


DEFAULT_SETTING = Setting()
"""8 channels, chunks of 2 MiB, 512 threads, ring, Simple."""


def overlap_region(kernels: Sequence[Kernel], collectives: Sequence[Collective], chip: OverlapChip) -> OverlapRegion:
    """Checks and gathers an overlap region.

    Args:
      kernels: in the order in which they run.
      collectives: in the order in which they run on their streams; all are ready from the start.
      chip: the accelerator.
    Raises:
      ValueError: for a region without kernels or without collectives, and for work that is negative or not a number, blocks or ranks below 1, and unknown
        operations, algorithms or protocols; the message names the operator.
    """
    if not kernels or not collectives:
        missing = " and ".join(what for what, given in (("kernels", kernels), ("collectives", collectives)) if not given)
        raise ValueError(f"the overlap region has no {missing}. Give at least one kernel and one collective that run at the same time.")
    for name, value in chip._asdict().items():
        if not np.all(np.isfinite(value)) or not np.all(np.asarray(value) > 0):
            raise ValueError(f"{name} of the chip is {value}; it should be above 0.")
    for i, kernel in enumerate(kernels):
        _check_kernel(kernel, f"kernel {i} ({kernel.name})")
    names = tuple(c.name or f"{c.op} {i}" for i, c in enumerate(collectives))
    for i, (name, collective) in enumerate(zip(names, collectives)):
        _check_collective(collective, f"collective {i} ({name})")
    streams = list(dict.fromkeys(c.stream for c in collectives))
    queues = [[i for i, c in enumerate(collectives) if c.stream == stream] for stream in streams]
    slots = max(map(len, queues))
    order = np.array([queue + [len(collectives)] * (slots - len(queue)) for queue in queues])
    columns = KernelRows(*(si(np.array([k[i] for k in kernels], float)) for i in range(1, len(Kernel._fields))))
    rows = collective_rows(tuple(collectives), max(len(c.choices) for c in collectives))
    return OverlapRegion(
        OverlapChip(*map(si, chip)), columns, CollectiveRows(*map(si, rows)), jnp.asarray(order), tuple(k.name for k in kernels), names,
        tuple(c.choices for c in collectives),
    )  # fmt: skip


def _check_kernel(kernel: Kernel, label: str) -> None:
    for name in ("flops", "nbytes", "tile_bytes", "launch"):
        _check_amount(getattr(kernel, name), f"{name} of {label}")
    if not kernel.blocks >= 1 or math.isinf(kernel.blocks):
        raise ValueError(f"blocks of {label} is {kernel.blocks:g}; a kernel has at least 1 block of threads.")
    if kernel.tile_bytes < kernel.nbytes:
        raise ValueError(f"tile_bytes of {label} is {kernel.tile_bytes:g}, below its nbytes {kernel.nbytes:g}; without a cache no less is moved.")


def _check_collective(collective: Collective, label: str) -> None:
    if collective.op not in OPERATIONS:
        raise ValueError(f"{label} has operation {collective.op!r}; one of {', '.join(OPERATIONS)}.")
    _check_amount(collective.nbytes, f"nbytes of {label}")
    if not collective.ranks >= 1 or math.isinf(collective.ranks):
        raise ValueError(f"ranks of {label} is {collective.ranks:g}; it should be at least 1.")
    fabric = collective.fabric
    if not (fabric.bandwidth > 0 and fabric.channel_rate > 0):
        raise ValueError(f"bandwidth and channel_rate of {label} are {fabric.bandwidth:g} and {fabric.channel_rate:g} B/s; they should be above 0.")
    for name in ("sync", "base", "hop"):
        _check_amount(getattr(fabric, name), f"{name} of {label}")
    if not collective.choices:
        raise ValueError(f"{label} has no choices; give pairs of algorithm and protocol, such as (('ring', 'simple'),).")
    for algorithm, protocol in collective.choices:
        if algorithm not in ALGORITHMS or protocol not in PROTOCOLS:
            raise ValueError(f"{label} has the choice {(algorithm, protocol)}; algorithms: {', '.join(ALGORITHMS)}, protocols: {', '.join(PROTOCOLS)}.")
        if algorithm == "tree" and collective.op != "all_reduce":
            raise ValueError(f"{label} has the choice 'tree', which only all_reduce has (NCCL, tree algorithm). Leave 'ring'.")


def _check_amount(value: float, label: str) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{label} is {value:g}; it should be a number, at least 0.")


def make_settings(region: OverlapRegion, settings: Setting | Sequence[Setting] = DEFAULT_SETTING) -> Settings:
    """Checks settings, one for all collectives or one for each.

    Raises:
      ValueError: for a wrong number of settings, more channels than NCCL or the chip has room for, threads that do not fill warps, a chunk of 0 bytes, or an
        algorithm and protocol that the collective may not choose; the message names the collective.
    """
    each = [settings] * len(region.collective_names) if isinstance(settings, Setting) else list(settings)
    if len(each) != len(region.collective_names):
        raise ValueError(f"{len(each)} settings for {len(region.collective_names)} collectives ({', '.join(region.collective_names)}); give one for each.")
    for name, setting, choices in zip(region.collective_names, each, region.choices):
        check_setting(region, name, setting)
        if (setting.algorithm, setting.protocol) not in choices:
            raise ValueError(f"{name} may not run {setting.algorithm} with {setting.protocol}; its choices are {', '.join('/'.join(c) for c in choices)}.")
    width = region.collectives.wire.shape[-1]
    weights = [np.eye(width)[choices.index((s.algorithm, s.protocol))] for s, choices in zip(each, region.choices)]
    column = lambda i: si(np.array([float(s[i]) for s in each]))
    return Settings(column(0), column(1), column(2), si(np.array(weights)))


def max_channels(region: OverlapRegion) -> int:
    """Most channels that a collective can have: those of NCCL, and one for each processor that compute does not need."""
    return int(min(MAX_CHANNELS, float(jnp.min(region.chip.processors)) - 1))


def check_setting(region: OverlapRegion, name: str, setting: Setting) -> None:
    """Raises ValueError unless the hardware can run `setting`; the message names the collective."""
    most = max(max_channels(region), 1)
    if not 1 <= setting.channels <= most:
        raise ValueError(f"{name} has {setting.channels:g} channels; it should have 1 to {most}: NCCL has at most {MAX_CHANNELS}, "
                         f"and the chip {float(jnp.min(region.chip.processors)):g} processors, each of which holds one channel.")  # fmt: skip
    if not 32 <= setting.threads <= MAX_THREADS or setting.threads % 32:
        raise ValueError(f"{name} has {setting.threads:g} threads per channel; it should be a multiple of 32 from 32 to {MAX_THREADS}.")
    if not (setting.chunk_bytes > 0 and math.isfinite(setting.chunk_bytes)):
        raise ValueError(f"{name} has chunks of {setting.chunk_bytes:g} B; they should be larger than 0.")
