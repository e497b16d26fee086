"""All-reduce kernels of inference engines: one shot (every rank reads all buffers) or two shots (reduce-scatter, all-gather), the cheaper.

    time = launch + hop (n - 1) + min(nbytes (n - 1) / one_shot, second + 2 nbytes (n - 1) / n / two_shot)

Fits vLLM, SGLang and TensorRT-LLM kernels in a CUDA graph on A100 to GB200. Constants differ more between versions of an engine than between GPUs, so
they belong to (engine, version, GPU). Leaves out the copy of eager mode (15-25%) and the fall-back to the library above the engine's limit.
"""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si
from ._saturating import least


class CustomAllReduceConstants(eqx.Module):
    """One engine's kernel on one GPU.

    Attributes:
      launch: latency without steps. [s]
      hop: latency per peer. [s]
      one_shot_bandwidth: rate of reading all peers' buffers. [B/s]
      second_shot: latency of the second shot. [s]
      two_shot_bandwidth: rate of the two-shot kernel. [B/s]
      blend: norm by which the two join where they are equal; large for a sharp choice. [1]
    """

    launch: Float[Array, ""] = eqx.field(converter=si)
    hop: Float[Array, ""] = eqx.field(converter=si)
    one_shot_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    second_shot: Float[Array, ""] = eqx.field(converter=si)
    two_shot_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    blend: Float[Array, ""] = eqx.field(converter=si, default=8.0)


def custom_all_reduce_time(constants: CustomAllReduceConstants, nbytes: Real[ArrayLike, ""], ranks: Real[ArrayLike, ""]) -> Float[Array, ""]:
    """Time of a one- or two-shot all-reduce of `nbytes` [B] on each of `ranks` inside one node; 0 for one rank. [s]"""
    size, n = jnp.maximum(si(nbytes), 1.0), jnp.maximum(si(ranks), 1.0)
    peers = jnp.where(n > 1, n - 1, 1.0)
    one = size * peers / constants.one_shot_bandwidth
    two = constants.second_shot + 2 * size * peers / (peers + 1) / constants.two_shot_bandwidth
    time = constants.launch + constants.hop * peers + least(one, two, constants.blend)
    return jnp.where(n > 1, time, 0.0)
