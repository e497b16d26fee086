"""Work that routing gives to the busiest rank of a mixture of experts: token-expert pairs, experts with work, and rows after padding to tiles.

Balanced routing gives every expert the same number of tokens. Skewed routing draws a weight per expert from a power law of density `x^-skew`
between 1 and 0.8 tokens (between 0.01 and 2 where there are fewer pairs than experts), gives experts their share of the pairs rounded to whole
tokens, at most one of each token, spreads what rounding left over evenly over the ranks, and times the rank with most pairs. That is how
NVIDIA's aiconfigurator collector defines `power_law_1.01` and `power_law_1.2` (collector/helper.py, read in 2026). Here the experts of a rank are
`QUANTILES` equal parts of the distribution; on the busiest rank, of `u^(1/m)` instead of `u`: the largest of m draws. m depends on ranks and on
experts per rank, fitted once to a simulation of the draw (one expert per rank: close to the largest of `ranks` draws; many: close to 1).
Against that simulation the mean errors are 8% for pairs, 5% for active experts and 8% for tiles; five draws, as the collector
averages, scatter by 6% themselves.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.nn import sigmoid
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..._arrays import si
from ...smooth import ceil, safe_power

QUANTILES = 16
TILT, TILT_EXPERTS, TILT_RANKS = 0.29, 1.53, 0.23
_EDGES = np.linspace(0.0, 1.0, QUANTILES + 1)
TIED = 4.0
"""Experts that share picks made by ties alone; on a rank with fewer experts only so many of these picks are here."""
_HALF = 0.5  # shares below half a token round to none


class ExpertLoad(NamedTuple):
    """Work of one rank.

    Attributes:
      pairs: token-expert pairs, shape (...). [1]
      active: experts with at least one token, shape (...). [1]
      tokens: tokens of a part of the experts, shape (..., parts). [1]
      experts: experts in that part, shape (..., parts). [1]
      exact: 1 where every expert of a part has just `tokens`, 0 where they scatter around it, shape (..., parts). [1]
    """

    pairs: Float[Array, "..."]
    active: Float[Array, "..."]
    tokens: Float[Array, "... parts"]
    experts: Float[Array, "... parts"]
    exact: Float[Array, "... parts"]

    def tiles(self, height: Float[Array, " heights"], temperature: ArrayLike = 0.0) -> Float[Array, "... heights"]:
        """Tiles of `height` rows over all experts; where tokens scatter, the average of the ceiling: half a tile more."""
        per = self.tokens[..., None, :] / si(height)[:, None]
        some = jnp.minimum(1.0, 2 * per)
        scattered = jnp.maximum(1.0, per + 0.45 * some)
        count = self.exact[..., None, :] * jnp.maximum(ceil(per * (1 - 1e-6), temperature), 1.0) + (1 - self.exact[..., None, :]) * scattered
        return jnp.sum(self.experts[..., None, :] * count, axis=-1)


def _away(skew):
    """The exponent, moved off 1 and 2, where the formulas below turn into logarithms."""
    step = 1e-3
    near = lambda x, pole: jnp.where(jnp.abs(x - pole) < step, pole + step, x)
    return near(near(skew, 1.0), 2.0)


def _bins(edges, low, high, skew):
    """Mean weight between quantiles `edges` (last axis) of the power law from low to high."""
    a = 1 - skew
    at = low**a + (high**a - low**a) * edges
    area = at ** (1 / a + 1) * a / ((2 - skew) * (high**a - low**a))
    return jnp.diff(area, axis=-1) / jnp.diff(edges, axis=-1)


def expert_load(tokens: ArrayLike, experts: ArrayLike, top_k: ArrayLike, ranks: ArrayLike, skew: ArrayLike, tied: ArrayLike = 0.0) -> ExpertLoad:
    """Expected work of the busiest of `ranks` ranks that share `experts` experts.

    Args:
      tokens: tokens routed, over all ranks; positive. [1]
      experts: experts over all ranks; at least `ranks`. [1]
      top_k: experts per token. [1]
      ranks: expert-parallel ranks. [1]
      skew: exponent of the power law; 0 for balanced. [1]
      tied: further experts per token, always the same `TIED`, of which the busiest rank has as many as it has experts. [1]
    """
    tokens, experts, top_k, ranks, skew, tied = jnp.broadcast_arrays(*(si(x) for x in (tokens, experts, top_k, ranks, skew, tied)))
    out = lambda x: x[..., None]
    pairs, local = tokens * top_k, experts / ranks

    # balanced: one part, every expert the same; a rank is never without a pair
    even_pairs = jnp.maximum(pairs / ranks, 1.0)
    even_active = jnp.minimum(local, even_pairs)

    law = _away(jnp.where(skew > 0, skew, 1.2))
    many = sigmoid(12 * jnp.log(pairs / (1.2 * experts)))
    low = out(jnp.exp(jnp.log(0.01) * (1 - many)))
    high = out(jnp.exp(jnp.log(jnp.maximum(0.8 * tokens, 1.5)) * many + jnp.log(2.0) * (1 - many)))
    mean = _bins(jnp.array([0.0, 1.0], low.dtype), low, high, out(law))
    draws = ranks ** (1 / (1 + TILT * safe_power(jnp.log(jnp.maximum(local, 1.0)), TILT_EXPERTS) * ranks**TILT_RANKS))
    share = out(pairs / experts) / mean
    usual = share * _bins(si(_EDGES), low, high, out(law))
    tilted = jnp.concatenate([jnp.zeros_like(low), si(_EDGES[1:]) ** out(1 / draws)], axis=-1)
    hot = share * _bins(tilted, low, high, out(law))
    most = out(tokens)
    over = jnp.mean(jnp.maximum(usual - most, 0.0), axis=-1, keepdims=True)  # beyond one of each token: spread
    rounds = lambda n: sigmoid(12 * jnp.log(n / _HALF))  # 1 where a share rounds to a token or more
    kept = rounds(hot)
    left = jnp.mean(jnp.minimum(usual, most) * (1 - rounds(usual)), axis=-1, keepdims=True)
    hot = jnp.minimum(hot, most) + over
    skew_pairs = jnp.minimum(local * (jnp.mean(hot * kept, axis=-1) + left[..., 0]), jnp.minimum(pairs, local * tokens))
    skew_active = local * (jnp.mean(kept, axis=-1) + left[..., 0])

    skewed = skew > 0
    own_pairs = jnp.where(skewed, jnp.maximum(skew_pairs, 1.0), even_pairs)
    own_active = jnp.where(skewed, jnp.minimum(jnp.clip(skew_active, 1.0, local), own_pairs), even_active)
    own_tokens = jnp.where(out(skewed), jnp.concatenate([hot, jnp.ones_like(low)], axis=-1), out(even_pairs / even_active))
    skew_experts = jnp.concatenate([out(local) / QUANTILES * kept, out(local) * left], axis=-1) * out(own_active / skew_active)
    own_experts = jnp.where(out(skewed), skew_experts, jnp.concatenate([out(even_active), jnp.zeros_like(kept)], axis=-1))

    full = jnp.minimum(TIED, local)  # experts that tied scores fill
    full_tokens = tokens * tied / TIED
    also = jnp.where(tied > 0, full, 0.0)
    fresh = also * (1 - own_active / local)  # those that had no token of their own
    return ExpertLoad(
        own_pairs + full * full_tokens, own_active + fresh, jnp.concatenate([own_tokens, out(full_tokens)], axis=-1),
        jnp.concatenate([own_experts, out(also)], axis=-1), jnp.concatenate([jnp.zeros_like(own_tokens) + out(1.0 - skewed), jnp.ones_like(low)], axis=-1),
    )  # fmt: skip
