"""What the closed form misses, as a smooth process over configurations: neighbours of one software stack err alike.

A sum of squared-exponential kernels on log2 distances between configurations. It is bounded to a few percent per term, has no trained
weights, and says nothing about a configuration far from all measured ones.
"""

import numpy as np

from ..hardware import DATATYPES
from ._rows import Rows

ALL, STACK, MODEL = 0.05, 0.08, 0.05
FEATURE, FEATURE_RANGE = 0.03, 4.0
WIDE, WIDE_RANGE = 0.12, 16.0
NEAR, NEAR_RANGE = 0.04, 2.25
"""Standard deviations [log], and squared length scales in log2 units, of the terms of `residual_kernel`."""


def configuration(rows: Rows) -> np.ndarray:
    """Coordinates of each row: log2 of sizes and degrees, and scaled classes, shape (rows, coordinates)."""
    m, p, b = rows.model, rows.plan, rows.model.blocks
    log2 = lambda x: np.log2(np.maximum(np.asarray(x, float), 1e-9))
    tokens = p.micro_batch_size * m.seq_len / p.context_parallel
    micro_batches = p.global_batch_size / (p.data_parallel * p.micro_batch_size)
    devices = p.tensor_parallel * p.pipeline_parallel * p.data_parallel * p.context_parallel
    experts = np.maximum(np.max(b.num_experts * (b.count > 0), axis=-1), 1.0)
    bits = np.array([{"fp8": 1.0, "mxfp8": 1.0, "int8": 1.0, "nvfp4": 2.0}.get(name, 0.0) for name in DATATYPES])
    # fmt: off
    columns = [
        log2(tokens), log2(micro_batches), log2(devices), log2(m.hidden), log2(m.seq_len), log2(np.sum(b.count, axis=-1)),
        log2(p.tensor_parallel), log2(p.pipeline_parallel), log2(p.virtual_stages), log2(p.expert_parallel), log2(p.context_parallel), log2(experts),
        2 * (p.precision @ bits), 4 * p.recompute_full, 4 * (experts > 1), 4 * (p.trainable < 0.5),
        2 * rows.features[:, :2].sum(axis=1), 2 * (p.shard_optimizer + p.shard_gradients + p.shard_parameters),
    ]
    # fmt: on
    kinds = sorted(set(rows.accelerator))
    return np.stack([np.asarray(c, float) for c in columns], axis=1), kinds


def _coordinates(rows: Rows) -> np.ndarray:
    return configuration(rows)[0]


def _same(a, b) -> np.ndarray:
    codes = {label: i for i, label in enumerate(sorted({*a, *b}, key=str))}
    return np.array([codes[x] for x in a])[:, None] == np.array([codes[x] for x in b])[None, :]


def residual_kernel(a: Rows, b: Rows) -> np.ndarray:
    """Prior covariance of the log error of rows `a` with that of rows `b`, shape (len(a), len(b))."""
    x, y = _coordinates(a), _coordinates(b)
    squared = [(x[:, i, None] - y[None, :, i]) ** 2 for i in range(x.shape[1])]
    squared.append(4.0 * ~_same(a.accelerator, b.accelerator))
    stack = _same(a.stack, b.stack) & (np.array(a.stack) != "")[:, None]
    model = _same([r.model_name for r in a.runs], [r.model_name for r in b.runs])
    total = sum(squared)
    features = sum(np.exp(-s / (2 * FEATURE_RANGE)) for s in squared)
    return (
        ALL**2 + STACK**2 * stack + MODEL**2 * model + FEATURE**2 * features
        + stack * (WIDE**2 * np.exp(-total / (2 * WIDE_RANGE)) + NEAR**2 * np.exp(-total / (2 * NEAR_RANGE)))
    )  # fmt: skip
