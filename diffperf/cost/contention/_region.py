"""An overlap region: kernels of one compute stream, and collectives of one or several streams that run beside them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..._arrays import si
from ..._numbers import check_amount, plain_number
from ._collectives import ALGORITHMS, OPERATIONS, PROTOCOLS, Collective, CollectiveRows, Fabric, Settings, collective_rows
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
      ValueError: for a region without kernels or without collectives, for work that is negative or not a finite number, blocks or ranks below 1, unknown
        operations, algorithms or protocols, and a name given twice; the message names the operator.
    """
    if not kernels or not collectives:
        missing = " and ".join(what for what, given in (("kernels", kernels), ("collectives", collectives)) if not given)
        raise ValueError(f"the overlap region has no {missing}. Give at least one kernel and one collective that run at the same time.")
    _check_chip(chip)
    for i, kernel in enumerate(kernels):
        if not isinstance(kernel, Kernel):
            raise ValueError(f"kernel {i} is {kernel!r}; give a list of Kernel, as ffn_kernels makes one.")
        _check_kernel(kernel, f"kernel {i} ({kernel.name})")
    for i, collective in enumerate(collectives):
        if not isinstance(collective, Collective):
            raise ValueError(f"collective {i} is {collective!r}; give a list of Collective.")
    names = tuple(c.name or f"{c.op} {i}" for i, c in enumerate(collectives))
    for i, (name, collective) in enumerate(zip(names, collectives)):
        _check_collective(collective, f"collective {i} ({name})")
        if name in names[:i]:
            raise ValueError(f"collectives {names.index(name)} and {i} are both named {name!r}; a name should be unique, as settings are given by it.")
    streams = list(dict.fromkeys(c.stream for c in collectives))
    queues = [[i for i, c in enumerate(collectives) if c.stream == stream] for stream in streams]
    slots = max(map(len, queues))
    order = np.array([queue + [len(collectives)] * (slots - len(queue)) for queue in queues])
    columns = KernelRows(*(si(np.array([k[i] for k in kernels], float)) for i in range(1, len(Kernel._fields))))
    rows = collective_rows(tuple(collectives), max(len(c.choices) for c in collectives))
    return OverlapRegion(
        OverlapChip(*map(si, chip)), columns, CollectiveRows(*map(si, rows)), jnp.asarray(order), tuple(k.name for k in kernels), names,
        tuple(tuple(map(tuple, c.choices)) for c in collectives),
    )  # fmt: skip


def _check_chip(chip: OverlapChip) -> None:
    if not isinstance(chip, OverlapChip):
        raise ValueError(f"chip is a {type(chip).__name__}; give an OverlapChip, as OVERLAP_CHIPS['h100'] or overlap_chip(load_system('h100').chip).")
    for name, value in chip._asdict().items():
        least = 1 if name == "processors" else 0
        if not np.all(np.isfinite(value)) or not np.all(np.asarray(value) > 0) or not np.all(np.asarray(value) >= least):
            raise ValueError(f"{name} of the chip is {value}; it should be {'at least 1' if least else 'above 0'} and finite.")


def _check_kernel(kernel: Kernel, label: str) -> None:
    for name in ("flops", "nbytes", "tile_bytes", "launch"):
        check_amount(getattr(kernel, name), f"{name} of {label}")
    blocks = plain_number(kernel.blocks, f"blocks of {label}")
    if not blocks >= 1 or math.isinf(blocks):
        raise ValueError(f"blocks of {label} is {blocks:g}; a kernel has at least 1 block of threads.")
    if kernel.tile_bytes < kernel.nbytes:
        raise ValueError(f"tile_bytes of {label} is {kernel.tile_bytes:g}, below its nbytes {kernel.nbytes:g}; without a cache no less is moved.")


def _check_collective(collective: Collective, label: str) -> None:
    if collective.op not in OPERATIONS:
        raise ValueError(f"{label} has operation {collective.op!r}; one of {', '.join(OPERATIONS)}.")
    check_amount(collective.nbytes, f"nbytes of {label}")
    ranks = plain_number(collective.ranks, f"ranks of {label}")
    if not ranks >= 1 or math.isinf(ranks):
        raise ValueError(f"ranks of {label} is {ranks:g}; it should be at least 1.")
    fabric = collective.fabric
    if not isinstance(fabric, Fabric):
        raise ValueError(f"fabric of {label} is {fabric!r}; give a Fabric, as FABRICS['a40_ib'].")
    rates = [plain_number(getattr(fabric, name), f"{name} of {label}") for name in ("bandwidth", "channel_rate")]
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"bandwidth and channel_rate of {label} are {rates[0]:g} and {rates[1]:g} B/s; they should be above 0 and finite.")
    for name in ("sync", "base", "hop"):
        check_amount(getattr(fabric, name), f"{name} of {label}")
    if not collective.choices:
        raise ValueError(f"{label} has no choices; give pairs of algorithm and protocol, such as (('ring', 'simple'),).")
    for choice in collective.choices:
        if not isinstance(choice, tuple) or len(choice) != 2:
            raise ValueError(f"{label} has the choice {choice!r}; give pairs of algorithm and protocol, such as (('ring', 'simple'),).")
        algorithm, protocol = choice
        if algorithm not in ALGORITHMS or protocol not in PROTOCOLS:
            raise ValueError(f"{label} has the choice {(algorithm, protocol)}; algorithms: {', '.join(ALGORITHMS)}, protocols: {', '.join(PROTOCOLS)}.")
        if algorithm == "tree" and collective.op != "all_reduce":
            raise ValueError(f"{label} has the choice 'tree', which only all_reduce has (NCCL, tree algorithm). Leave 'ring'.")
    if len(set(collective.choices)) < len(collective.choices):
        raise ValueError(f"{label} has a choice twice: {', '.join('/'.join(c) for c in collective.choices)}. Give each once.")


def make_settings(region: OverlapRegion, settings: Setting | Sequence[Setting] = DEFAULT_SETTING) -> Settings:
    """Checks settings, one for all collectives or one for each.

    Raises:
      ValueError: for a wrong number of settings, more channels than NCCL or the chip has room for, threads that do not fill warps, a chunk of 0 bytes, or an
        algorithm and protocol that the collective may not choose; the message names the collective.
    """
    if not isinstance(settings, Setting) and not (isinstance(settings, Sequence) and all(isinstance(one, Setting) for one in settings)):
        raise ValueError(f"settings are {settings!r}; give one Setting for all collectives, or a list with one for each.")
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
    for what in ("channels", "chunk_bytes", "threads"):
        plain_number(getattr(setting, what), f"{what} of {name}")
    if not 1 <= setting.channels <= most:
        raise ValueError(f"{name} has {setting.channels:g} channels; it should have 1 to {most}: NCCL has at most {MAX_CHANNELS}, "
                         f"and the chip {float(jnp.min(region.chip.processors)):g} processors, each of which holds one channel.")  # fmt: skip
    if not 32 <= setting.threads <= MAX_THREADS or setting.threads % 32:
        raise ValueError(f"{name} has {setting.threads:g} threads per channel; it should be a multiple of 32 from 32 to {MAX_THREADS}.")
    if not (setting.chunk_bytes > 0 and math.isfinite(setting.chunk_bytes)):
        raise ValueError(f"{name} has chunks of {setting.chunk_bytes:g} B; they should be larger than 0 and finite.")
