"""What the closed form misses, as a smooth process over configurations: neighbours of one software stack err alike.

A sum of squared-exponential kernels on log2 distances between configurations (Rasmussen and Williams 2006, chapter 4). Each term is a few
percent; there are no trained weights, and far from all measured configurations the process returns to zero and says so in its variance.
The widths are judgement; held-out errors change by less than two tenths of a point when any of them is halved or doubled.
"""

import dataclasses

import numpy as np

from ..hardware import DATATYPES
from ._rows import Rows

EVERYWHERE = 0.05
FAMILY = 0.10
MODEL = 0.05
EXPERTS_MODEL = 0.10
FEATURE, FEATURE_RANGE = 0.03, 4.0
STACK = 0.08
STACK_WIDE, STACK_WIDE_RANGE = 0.12, 16.0
STACK_NEAR, STACK_NEAR_RANGE = 0.04, 2.25
"""Standard deviations [log] and squared length scales [log2 units] of the terms of `residual_kernel`; `FEATURE` is that of each coordinate."""

EXPERTS = 11
"""Coordinate that is log2 of the number of experts; positive for a mixture of experts, whose kernels differ more from model to model."""

OTHER_CHIP = 4.0
"""Squared distance between two kinds of accelerator."""

_LEVELS = np.array([{"fp8": 1.0, "mxfp8": 1.0, "int8": 1.0, "nvfp4": 2.0}.get(name, 0.0) for name in DATATYPES])


@dataclasses.dataclass(frozen=True)
class Points:
    """Where rows lie: what the kernels and the design need of them.

    Attributes:
      coordinates: log2 of sizes and degrees and scaled classes, shape (rows, coordinates).
      generation, accelerator, family, stack, model: labels, one per row.
      features: as in `Rows`.
    """

    coordinates: np.ndarray
    generation: tuple[str, ...]
    accelerator: tuple[str, ...]
    family: tuple[str, ...]
    stack: tuple[str, ...]
    model: tuple[str, ...]
    features: np.ndarray

    def __len__(self) -> int:
        return len(self.stack)

    def join(self, other: "Points") -> "Points":
        """These rows, then the other ones."""
        both = lambda a, b: np.concatenate([a, b]) if isinstance(a, np.ndarray) else a + b
        return Points(*(both(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(Points)))


def points(rows: Rows) -> Points:
    """The rows as points."""
    m, p, b = rows.model, rows.plan, rows.model.blocks
    log2 = lambda x: np.log2(np.maximum(np.asarray(x, float), 1e-9))
    tokens = p.micro_batch_size * m.seq_len / p.context_parallel
    micro_batches = p.global_batch_size / (p.data_parallel * p.micro_batch_size)
    devices = p.tensor_parallel * p.pipeline_parallel * p.data_parallel * p.context_parallel
    experts = np.maximum(np.max(b.num_experts * (b.count > 0), axis=-1), 1.0)
    # fmt: off
    columns = [
        log2(tokens), log2(micro_batches), log2(devices), log2(m.hidden), log2(m.seq_len), log2(np.sum(b.count, axis=-1)),
        log2(p.tensor_parallel), log2(p.pipeline_parallel), log2(p.virtual_stages), log2(p.expert_parallel), log2(p.context_parallel), log2(experts),
        2 * (p.precision @ _LEVELS), 4 * p.recompute_full, 4 * (experts > 1), 4 * (p.trainable < 0.5),
        2 * rows.features[:, :2].sum(axis=1), 2 * (p.shard_optimizer + p.shard_gradients + p.shard_parameters),
    ]
    # fmt: on
    coordinates = np.stack([np.asarray(c, float) for c in columns], axis=1)
    model = tuple(run.model_name for run in rows.runs)
    return Points(coordinates, rows.generation, rows.accelerator, rows.family, rows.stack, model, rows.features)


def same(a: tuple[str, ...], b: tuple[str, ...]) -> np.ndarray:
    """True where labels agree and are not empty, shape (len(a), len(b))."""
    codes = {label: i for i, label in enumerate(dict.fromkeys((*a, *b)))}
    x, y = np.array([codes[label] for label in a], int), np.array([codes[label] for label in b], int)
    return (x[:, None] == y[None, :]) & np.array([label != "" for label in a], bool)[:, None]


def residual_kernel(a: Points, b: Points) -> np.ndarray:
    """Prior covariance of the log error of rows `a` with that of rows `b`, shape (len(a), len(b))."""
    decay = lambda squared, width: np.exp(squared / (-2 * width))
    total = OTHER_CHIP * ~same(a.accelerator, b.accelerator)
    features = decay(total, FEATURE_RANGE)
    for x, y in zip(a.coordinates.T, b.coordinates.T, strict=True):
        squared = (x[:, None] - y[None, :]) ** 2
        total, features = total + squared, features + decay(squared, FEATURE_RANGE)
    family, stack, model = same(a.family, b.family), same(a.stack, b.stack), same(a.model, b.model)
    experts = (a.coordinates[:, EXPERTS] > 0)[:, None] & (b.coordinates[:, EXPERTS] > 0)[None, :]
    return (
        EVERYWHERE**2 + MODEL**2 * model + EXPERTS_MODEL**2 * (model & experts) + FEATURE**2 * features
        + family * FAMILY**2
        + stack * (STACK**2 + STACK_WIDE**2 * decay(total, STACK_WIDE_RANGE) + STACK_NEAR**2 * decay(total, STACK_NEAR_RANGE))
    )  # fmt: skip
