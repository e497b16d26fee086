"""Checks at the Python door. A traced value passes: the formulas stay finite on it, see `nccl_times`."""

import numpy as np
from jax.core import Tracer


def _known(x) -> np.ndarray | None:
    return None if isinstance(x, Tracer) else np.asarray(x, float)


def check_group(ranks, nodes) -> None:
    """Raises a ValueError for a group that cannot be."""
    n, m = _known(ranks), _known(nodes)
    if n is not None and not np.all(n >= 2):
        raise ValueError(f"ranks is {ranks}; a collective needs at least 2 (NCCL enqueues nothing for one rank).")
    if m is not None and not np.all(m >= 1):
        raise ValueError(f"nodes is {nodes}; it should be at least 1.")
    if n is not None and m is not None and not np.all(m <= n):
        raise ValueError(f"nodes is {nodes}, more than ranks = {ranks}; each node has at least one rank.")


def check_bytes(nbytes) -> None:
    """Raises a ValueError for a message that is not one."""
    size = _known(nbytes)
    if size is not None and not np.all(size > 0):
        raise ValueError(f"nbytes is {nbytes}; it should be positive (NCCL enqueues nothing for 0 bytes).")


def check_channels(channels) -> None:
    """Raises a ValueError for fewer than one channel."""
    count = _known(channels)
    if count is not None and not np.all(count >= 1):
        raise ValueError(f"channels is {channels}; it should be at least 1.")
