"""A small decoder-only transformer in plain JAX: its forward pass and one training step, to hold predictions of whole programs against.

Pre-norm blocks with learned positions, GELU with a hidden width of four times the model's, causal attention by `jax.nn.dot_product_attention`,
an output projection of its own, and Adam in float32. Leaves out dropout and biases. The gain of each norm is learned.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._inputs import uniform


class SmallTransformer(NamedTuple):
    """Sizes of the model and of its batch."""

    layers: int
    hidden_size: int
    num_heads: int
    seq_len: int
    batch_size: int
    vocab: int

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply every token: 12 h^2 per block (4 of attention, 8 of the MLP) and the output projection."""
        return 12 * self.layers * self.hidden_size**2 + self.hidden_size * self.vocab

    @property
    def num_parameters(self) -> int:
        """All weights: those of the matmuls, the embedding, the positions and the norms."""
        return self.matmul_parameters + self.hidden_size * (self.vocab + self.seq_len + 2 * self.layers + 1)

    @property
    def forward_flops(self) -> float:
        """2 FLOP per matmul weight and token, and causal attention at half of 4 b s^2 h per layer."""
        tokens = self.batch_size * self.seq_len
        return 2.0 * self.matmul_parameters * tokens + 2.0 * self.layers * tokens * self.seq_len * self.hidden_size


SIZES = (
    SmallTransformer(4, 256, 4, 128, 4, 4096),
    SmallTransformer(4, 384, 6, 192, 4, 8192),
    SmallTransformer(4, 512, 8, 256, 8, 8192),
)


def initial_parameters(sizes: SmallTransformer, seed: Any) -> dict[str, Any]:
    """Float32 weights with standard deviation 0.02; the blocks are stacked along the first axis. `seed` is a uint32."""
    h, n, salts = sizes.hidden_size, sizes.layers, itertools.count()
    weights = lambda *shape: 0.02 * 3**0.5 * uniform(seed, next(salts), shape, jnp.float32)
    blocks = {"qkv": weights(n, h, 3 * h), "out": weights(n, h, h), "up": weights(n, h, 4 * h), "down": weights(n, 4 * h, h)}
    gains = {"norm1": jnp.ones((n, h), jnp.float32), "norm2": jnp.ones((n, h), jnp.float32)}
    return {
        "embedding": weights(sizes.vocab, h), "position": weights(sizes.seq_len, h), "blocks": blocks | gains,
        "norm": jnp.ones(h, jnp.float32), "head": weights(h, sizes.vocab),
    }  # fmt: skip


def logits(parameters: dict[str, Any], tokens: Int[Array, "b s"], num_heads: int, dtype: Any = jnp.float32) -> Float[Array, "b s vocab"]:
    """Forward pass, computed in `dtype`."""
    parameters = jax.tree.map(lambda x: x.astype(dtype), parameters)
    b, s = tokens.shape
    x = parameters["embedding"][tokens] + parameters["position"][:s]
    for layer in range(parameters["blocks"]["qkv"].shape[0]):
        w = jax.tree.map(lambda stacked: stacked[layer], parameters["blocks"])  # noqa: B023, used within the turn
        qkv = (_norm(x, w["norm1"]) @ w["qkv"]).reshape(b, s, 3, num_heads, -1)
        heads = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + heads.reshape(b, s, -1) @ w["out"]
        x = x + jax.nn.gelu(_norm(x, w["norm2"]) @ w["up"]) @ w["down"]
    return _norm(x, parameters["norm"]) @ parameters["head"]


def loss(parameters: dict[str, Any], tokens: Int[Array, "b s"], num_heads: int, dtype: Any = jnp.float32) -> Float[Array, ""]:
    """Mean cross-entropy of the next token; the last position predicts the first token, so that all positions count."""
    scores = jax.nn.log_softmax(logits(parameters, tokens, num_heads, dtype).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, jnp.roll(tokens, -1, axis=1)[..., None], axis=-1))


def initial_state(sizes: SmallTransformer, seed: Any) -> tuple[Any, Any, Any, Array]:
    """Parameters, both moments of Adam, and the step count."""
    parameters = initial_parameters(sizes, seed)
    zeros = lambda: jax.tree.map(jnp.zeros_like, parameters)
    return parameters, zeros(), zeros(), jnp.zeros((), jnp.float32)


def adam_update(parameters: Any, first: Any, second: Any, count: Array, gradient: Any, rate: float = 1e-3) -> tuple[Any, Any, Any, Array]:
    """One step of Adam with bias correction (Kingma and Ba 2015, algorithm 1; beta 0.9 and 0.999, epsilon 1e-8)."""
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)
    step = lambda p, m, v: p - rate * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8)
    return jax.tree.map(step, parameters, first, second), first, second, count


def train_step(state: tuple[Any, Any, Any, Array], tokens: Int[Array, "b s"], num_heads: int, dtype: Any = jnp.float32) -> tuple[Any, Float[Array, ""]]:
    """Forward, backward and update; returns the new state and the loss."""
    parameters, first, second, count = state
    value, gradient = jax.value_and_grad(loss)(parameters, tokens, num_heads, dtype)
    return adam_update(parameters, first, second, count, gradient), value


def _norm(x: Array, gain: Array) -> Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return gain * centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
