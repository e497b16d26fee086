"""Collectives among the thread blocks of one cluster on a GPU, through distributed shared memory.

Source: ClusterFusion (arXiv:2508.18850): a tree of log2 N rounds with traffic `N log2 N size` for a reduction and `N (N - 1) size` for a gather of N
blocks; its released kernels exchange in N - 1 rotations instead. Leaves out registers and occupancy: whether a fused kernel as a whole wins is the
caller's comparison, and it may lose.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from ..._arrays import si

MOST_BLOCKS = 16.0  # of one cluster, NVIDIA Hopper with the non-portable size (CUDA C++ programming guide, "Thread block clusters")


def cluster_traffic(op: str, nbytes: Real[ArrayLike, ""], blocks: Real[ArrayLike, ""], schedule: str = "tree") -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Bytes that all blocks of a cluster send, and rounds in turn.

    Args:
      op: "reduce" (every block ends with the sum) or "gather" (with all parts).
      nbytes: of one block. [B]
      blocks: N, at least 1. [1]
      schedule: "tree" (log2 N rounds) or "rotating" (N - 1 rounds, in each of which every block sends its part to another).
    Raises:
      ValueError: another `op` or `schedule`.
    """
    if op not in ("reduce", "gather") or schedule not in ("tree", "rotating"):
        raise ValueError(f"op is {op!r} and schedule {schedule!r}; they should be reduce or gather, and tree or rotating.")
    n, nbytes = jnp.maximum(si(blocks), 1.0), si(nbytes)
    rounds = jnp.log2(n) if schedule == "tree" else n - 1
    return n * (rounds if op == "reduce" else n - 1) * nbytes, rounds


def cluster_time(
    op: str,
    nbytes: Real[ArrayLike, ""],
    blocks: Real[ArrayLike, ""],
    round_latency: Real[ArrayLike, ""],
    block_rate: Real[ArrayLike, ""],
    schedule: str = "tree",
) -> Float[Array, ""]:
    """Time of a collective among the blocks of a cluster, `rounds latency + traffic / (N rate)`; arguments as of `cluster_traffic`. [s]

    Args:
      round_latency: of one exchange with its barrier. [s]
      block_rate: of one block to another's shared memory. [B/s]
    Returns:
      Time; 0 for one block, infinite for more than 16, which no cluster has. [s]
    """
    traffic, rounds = cluster_traffic(op, nbytes, blocks, schedule)
    n = jnp.maximum(si(blocks), 1.0)
    return jnp.where(n <= MOST_BLOCKS, rounds * si(round_latency) + traffic / n / si(block_rate), jnp.inf)
