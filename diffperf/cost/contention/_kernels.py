"""Compute kernels as contention sees them: arithmetic, compulsory and tiled memory traffic, thread blocks; and those of transformer blocks.

Matmuls have tiles of 128 x 128, attention is causal and fused. Launch times and the rate of attention are judgements, not fits. Leaves out split-K, keys and
values shared by query heads (attention reads as many of them as queries), the gate's traffic in the backward pass, experts of unequal load and kernels fused
across operators.
"""

import math
from typing import NamedTuple

TILE = 128
_MATMUL_LAUNCH, _ATTENTION_LAUNCH, _STREAMING_LAUNCH = 3e-6, 5e-6, 2e-6
_ATTENTION_RATE = 0.7  # of a large matmul's rate, on causal FLOP
_BACKWARD_FLOPS = 2.5  # five matmuls instead of two
_BYTES_PER_BLOCK = 32768


class Kernel(NamedTuple):
    """One compute kernel.

    Attributes:
      name: for messages.
      flops: arithmetic, at the rate of a large matmul. [FLOP]
      nbytes: compulsory traffic with device memory: every operand once. [B]
      tile_bytes: traffic if no tile found its operands in the cache, at least `nbytes`. [B]
      blocks: thread blocks, at least 1. [1]
      launch: fixed time. [s]
    """

    name: str
    flops: float
    nbytes: float
    tile_bytes: float
    blocks: float
    launch: float = 0.0


def matmul_kernel(m: float, n: float, k: float, *, element_bytes: float = 2.0, name: str = "") -> Kernel:
    """`C[m, n] = A[m, k] B[k, n]` in tiles of 128 x 128, each of which loads `128 k` elements of A and of B."""
    blocks = math.ceil(m / TILE) * math.ceil(n / TILE)
    compulsory, tiled = m * k + k * n + m * n, blocks * k * 2 * TILE + m * n
    nbytes, tile_bytes = element_bytes * compulsory, element_bytes * max(tiled, compulsory)
    return Kernel(name or f"matmul {m:g}x{n:g}x{k:g}", 2.0 * m * n * k, nbytes, tile_bytes, blocks, _MATMUL_LAUNCH)


def attention_kernel(sequences: float, heads: float, sequence_length: float, head_dim: float, *, backward: bool = False, name: str = "") -> Kernel:
    """Causal fused attention in 16 bits, one block per head and 128 queries; key and value tiles are read twice if the cache holds none."""
    rows = sequences * heads * sequence_length
    flops = 2 * rows * sequence_length * head_dim / _ATTENTION_RATE * (_BACKWARD_FLOPS if backward else 1.0)
    nbytes = 8 * rows * head_dim * (2 if backward else 1)
    blocks = sequences * heads * math.ceil(sequence_length / TILE)
    return Kernel(name or f"attention{' backward' * backward} {sequence_length:g}", flops, nbytes, 2 * nbytes, blocks, _ATTENTION_LAUNCH)


def streaming_kernel(nbytes: float, *, name: str = "") -> Kernel:
    """An elementwise kernel, a norm or a copy that reads and writes `nbytes` in all."""
    return Kernel(name or f"streaming {nbytes:g} B", 0.0, nbytes, nbytes, max(nbytes / _BYTES_PER_BLOCK, 1.0), _STREAMING_LAUNCH)


def ffn_kernels(
    tokens: float, hidden: float, ffn_hidden: float, *, gated: bool = False, tensor_parallel: float = 1.0, backward: bool = False
) -> tuple[Kernel, ...]:
    """Feed-forward block of one device: two matmuls, the activation, and the residual with its norm; backward, each matmul becomes two."""
    t, h, f, into = tokens, hidden, ffn_hidden / tensor_parallel, (2 if gated else 1) * ffn_hidden / tensor_parallel
    if not backward:
        return (matmul_kernel(t, into, h, name="ffn up"), streaming_kernel((6 if gated else 4) * t * f, name="activation"),
                matmul_kernel(t, h, f, name="ffn down"), streaming_kernel(6 * t * h, name="residual and norm"))  # fmt: skip
    return (matmul_kernel(t, f, h, name="ffn down, gradient of input"), matmul_kernel(f, h, t, name="ffn down, gradient of weight"),
            streaming_kernel(8 * t * f, name="activation backward"), matmul_kernel(t, h, into, name="ffn up, gradient of input"),
            matmul_kernel(h, into, t, name="ffn up, gradient of weight"), streaming_kernel(8 * t * h, name="norm backward"))  # fmt: skip


def attention_block_kernels(
    sequences: float, sequence_length: float, hidden: float, heads: float, head_dim: float, *, kv_heads: float | None = None,
    tensor_parallel: float = 1.0, backward: bool = False,
) -> tuple[Kernel, ...]:  # fmt: skip
    """Attention block of one device: norm, projections, attention, output projection; backward, each matmul becomes two."""
    t, h, own = sequences * sequence_length, hidden, heads / tensor_parallel
    out = own * head_dim
    into = (heads + 2 * (heads if kv_heads is None else kv_heads)) / tensor_parallel * head_dim
    attention = attention_kernel(sequences, own, sequence_length, head_dim, backward=backward)
    if not backward:
        return (streaming_kernel(4 * t * h, name="norm"), matmul_kernel(t, into, h, name="attention in"), attention,
                matmul_kernel(t, h, out, name="attention out"))  # fmt: skip
    return (matmul_kernel(t, out, h, name="attention out, gradient of input"), matmul_kernel(h, out, t, name="attention out, gradient of weight"), attention,
            matmul_kernel(t, h, into, name="attention in, gradient of input"), matmul_kernel(h, into, t, name="attention in, gradient of weight"),
            streaming_kernel(8 * t * h, name="norm backward"))  # fmt: skip
