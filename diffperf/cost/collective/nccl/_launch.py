"""How NCCL cuts a message: channels, threads, chunk and loops of one collective.

Reproduces the channel, thread and chunk rules of `src/enqueue.cc` and the buffer sizes of `src/include/device.h` (2.19.1) in closed form: the
loops that take one channel or half the threads away until each thread has work become a clipped quotient. Leaves out the step-wise halving of
CollNetDirect, cost-based channel sharing of grouped operations, and `NCCL_BUFFSIZE` and its kin.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from .... import smooth
from ...._arrays import si
from ._check import check_bytes, check_group
from ._model import smooth_floor
from ._tables import ALGORITHMS, COLLECTIVES, LL, LL128, NVLS, NVLS_TREE, PROTOCOLS, RING, SIMPLE, TREE, index_of
from ._topology import NcclTopology

KIB = 1024.0
STEPS = 8
BUFFER = (512 * KIB, 4800 * KIB, 4096 * KIB)  # LL: 8 lines x 512 threads x 8 steps x 16 B; LL128: 120 x 640 x 8 x 8 B; Simple [B]
DATA_SHARE = (1 / 2, 15 / 16, 1.0)  # of a buffer, the rest is flags
BYTES_PER_THREAD = (8, 8, 64)  # below which a channel or thread is given up
MAX_THREADS = (512, 640, 512)
COLLNET_BYTES_PER_THREAD, MANY_THREADS, FEW_THREADS, SLOW_RING = 512, 640, 256, 12e9
WARP = 32
LL128_GRAIN = 60.0  # 8 elements of 8 B per thread, 15/16 of them data (`calcBytePerGrain`) [B]


class NcclLaunch(NamedTuple):
    """Attributes:
    channels: used, one block of threads each. [1]
    threads: of a block, with the warps that only synchronise. [1]
    chunk_bytes: data that one primitive moves. [B]
    chunks_per_loop: chunks of one channel in a loop: ranks for rings that cut the buffer by rank, else 1. [1]
    loops: times that a channel runs its primitives. [1]
    """

    channels: Float[Array, ""]
    threads: Float[Array, ""]
    chunk_bytes: Float[Array, ""]
    chunks_per_loop: Float[Array, ""]
    loops: Float[Array, ""]


def _slots(nbytes, channels, chunk, temperature):
    return smooth_floor(nbytes / (channels * chunk), temperature)


def _chunk(collective, algorithm, protocol, nbytes, channels, ranks, nodes, temperature) -> Array:
    step = BUFFER[protocol] / STEPS * DATA_SHARE[protocol]
    if algorithm == RING and protocol == SIMPLE and collective in ("all_reduce", "all_gather", "reduce_scatter"):
        return si(4 * step)
    if algorithm != TREE or protocol == LL:
        return si(step)
    local, levels = ranks / nodes, smooth_floor(jnp.log2(nodes) + 1e-9, temperature)
    if protocol == SIMPLE:  # depth as NCCL estimates it: the chain of a node, then the levels between nodes
        depth = local - 1 + levels
        limits = ((depth * 8, 128 * KIB), (depth * 4, 64 * KIB), (depth, 32 * KIB))
    else:
        depth = 1 + levels + 0.1 * local
        limits = ((depth * 64 / local, 128 * KIB), (depth * 16 / local, 32 * KIB))
    chunk = si(step)
    for wanted, least in limits:
        for _ in range(5):  # 562.5 KiB falls below 32 KiB in five halvings
            short = (_slots(nbytes, channels, chunk, temperature) < wanted) & (chunk > least)
            chunk = jnp.where(short, chunk / 2, chunk)
    return chunk


def nccl_launch(
    topology: NcclTopology,
    collective: str,
    algorithm: str,
    protocol: str,
    nbytes: Real[ArrayLike, ""],
    ranks: Real[ArrayLike, ""],
    nodes: Real[ArrayLike, ""] = 1,
    temperature: Real[ArrayLike, ""] = 0.0,
) -> NcclLaunch:
    """Channels, threads, chunk and loops of a collective.

    Args:
      topology: its channels are the communicator's.
      collective: one of `COLLECTIVES`.
      algorithm, protocol: of `ALGORITHMS` and `PROTOCOLS`, such as those `nccl_choice` names.
      nbytes: size as nccl-tests counts it. [B]
      ranks, nodes: of the communicator. [1]
      temperature: above 0, counts are smooth; the chunk stays one of NCCL's steps. [1]
    Raises:
      ValueError: for an unknown name, fewer than two ranks, more nodes than ranks, or no bytes.
    References:
      NVIDIA NCCL v2.19.1, `src/enqueue.cc` and `src/include/device.h`.
    """
    index_of(collective, COLLECTIVES, "collective")
    a, p = index_of(algorithm, ALGORITHMS, "algorithm"), index_of(protocol, PROTOCOLS, "protocol")
    check_group(ranks, nodes)
    check_bytes(nbytes)
    nbytes, ranks, nodes = si(nbytes), jnp.maximum(si(ranks), 2.0), jnp.maximum(si(nodes), 1.0)
    available = topology.channels[a]
    slow = topology.bandwidth_intra[RING] * topology.channels[RING] <= SLOW_RING
    most = si(MAX_THREADS[p]) if a in (TREE, RING) else si(MANY_THREADS)
    if a == RING and p == SIMPLE:
        most = jnp.where(slow, FEW_THREADS, most)
    grain = BYTES_PER_THREAD[p] * (ranks if (a, p) == (RING, LL) else 1.0)
    if algorithm.startswith("CollNet"):
        grain = si(COLLNET_BYTES_PER_THREAD)
    channels, threads = available, most
    if a not in (NVLS, NVLS_TREE):
        channels = jnp.clip(smooth_floor(nbytes / (most * grain), temperature), 1.0, available)
        for _ in range(3):  # 512, 256, 128, 64, which is no multiple of 128
            fewer = (channels <= 1) & (nbytes < threads * grain) & (jnp.remainder(threads, 128) == 0)
            threads = jnp.where(fewer, threads / 2, threads)
    extra = {(RING, SIMPLE): WARP, (TREE, SIMPLE): 4 * WARP}.get((a, p), 0)
    threads = jnp.maximum(threads + extra, 3 * WARP)
    chunk = _chunk(collective, a, p, nbytes, channels, ranks, nodes, temperature)
    per_loop = ranks if a == RING and collective not in ("broadcast", "reduce") else si(1.0)
    loops = smooth.ceil(nbytes / (channels * per_loop * chunk), temperature)
    return NcclLaunch(channels, threads, chunk, per_loop, loops)


def ring_loop_bytes(
    left: Real[ArrayLike, ""],
    launch: NcclLaunch,
    protocol: str,
    element_bytes: Real[ArrayLike, ""] = 4.0,
) -> Float[Array, ""]:
    """Chunk of a ring all-reduce in the loop that finds `left` bytes to do: the whole chunk, or less in a short last loop.

    Simple: the share of a chunk, rounded up to 8 bytes for each thread that moves data. LL and LL128: rounded up to what all threads move
    at once, 8 bytes each (LL128: half of 60 bytes).

    Args:
      left: bytes of the buffer not yet done. [B]
      launch: of `nccl_launch`.
      protocol: of `PROTOCOLS`.
      element_bytes: size of one element; shares are whole elements. [B]
    Returns:
      Bytes of one chunk. [B]
    References:
      NVIDIA NCCL v2.19.1, `src/device/all_reduce.h`.
    """
    p = index_of(protocol, PROTOCOLS, "protocol")
    pieces = launch.channels * launch.chunks_per_loop
    if p == SIMPLE:
        share = element_bytes * jnp.ceil(si(left) / (element_bytes * pieces))
        grain = (launch.threads - WARP) * 8
        share = jnp.minimum(launch.chunk_bytes, share)
        return grain * jnp.ceil(share / grain)
    grain = launch.threads * (LL128_GRAIN / 2 if p == LL128 else 8)
    return jnp.minimum(launch.chunk_bytes, grain * jnp.ceil(si(left) / (pieces * grain)))
