"""Overlap regions of published set-ups: transformer layers of Phi-2, Llama-3 8B, MPT 7B, OLMoE and DeepSeek-MoE under FSDP, tensor and expert parallelism.

Set-ups after Lagom (arXiv:2602.20656) and the same models on H100. Names say model, parallelism, pass and machine.
"""

from collections.abc import Callable

from ...cost.contention import (
    FABRICS,
    OVERLAP_CHIPS,
    Collective,
    Kernel,
    OverlapRegion,
    attention_block_kernels,
    ffn_kernels,
    matmul_kernel,
    overlap_region,
    streaming_kernel,
)

PHI_LAYER, LLAMA_LAYER, MPT_LAYER = 157.3e6, 436.2e6, 402.7e6  # weights of a layer in 16 bits [B]
_RING = tuple(("ring", p) for p in ("simple", "ll128", "ll"))
_ANY = _RING + tuple(("tree", p) for p in ("simple", "ll128", "ll"))


def _phi(sequences: int, *, backward: bool = False, tensor: int = 1) -> tuple[Kernel, ...]:
    ffn = ffn_kernels(sequences * 2048, 2560, 10240, tensor_parallel=tensor, backward=backward)
    attention = attention_block_kernels(sequences, 2048, 2560, 32, 80, tensor_parallel=tensor, backward=backward)
    return ffn + attention if backward else attention + ffn


def _llama(sequences: int, length: int, *, backward: bool = False, tensor: int = 1) -> tuple[Kernel, ...]:
    ffn = ffn_kernels(sequences * length, 4096, 14336, gated=True, tensor_parallel=tensor, backward=backward)
    attention = attention_block_kernels(sequences, length, 4096, 32, 128, kv_heads=8, tensor_parallel=tensor, backward=backward)
    return ffn + attention if backward else attention + ffn


def _mpt(sequences: int) -> tuple[Kernel, ...]:
    return ffn_kernels(sequences * 2048, 4096, 16384, backward=True) + attention_block_kernels(sequences, 2048, 4096, 32, 128, backward=True)


def _experts(hidden: int, expert_hidden: int, top: int, tokens: int) -> tuple[Kernel, ...]:
    rows = top * tokens
    return (matmul_kernel(rows, 2 * expert_hidden, hidden, name="experts up"), streaming_kernel(6 * rows * expert_hidden, name="activation"),
            matmul_kernel(rows, hidden, expert_hidden, name="experts down"))  # fmt: skip


def _olmoe() -> tuple[Kernel, ...]:
    return attention_block_kernels(2, 4096, 2048, 16, 128) + _experts(2048, 1024, 8, 8192)


def _deepseek() -> tuple[Kernel, ...]:
    return attention_block_kernels(2, 4096, 2048, 16, 128) + _experts(2048, 1408, 6, 8192) + ffn_kernels(8192, 2048, 2816, gated=True)


def _gather_scatter(nbytes: float, ranks: int, fabric: str, times: int = 1, **more) -> tuple[Collective, ...]:
    f = FABRICS[fabric]
    return (Collective("all_gather", nbytes, ranks, f, **more), Collective("reduce_scatter", nbytes, ranks, f, **more)) * times


def _same(op: str, nbytes: float, fabric: str, times: int, **more) -> tuple[Collective, ...]:
    return (Collective(op, nbytes, 8, FABRICS[fabric], **more),) * times


def _region(kernels: tuple[Kernel, ...], collectives: tuple[Collective, ...], chip: str) -> OverlapRegion:
    named = tuple(c._replace(name=f"{c.op} {i}") for i, c in enumerate(collectives))
    return overlap_region(kernels, named, OVERLAP_CHIPS[chip])


_BUILDERS: dict[str, Callable[[], OverlapRegion]] = {
    "phi2_fsdp_ffn": lambda: _region(_phi(2)[4:], _gather_scatter(PHI_LAYER, 16, "a40_ib")[:1], "a40"),
    "phi2_fsdp_backward": lambda: _region(_phi(2, backward=True), _gather_scatter(PHI_LAYER, 16, "a40_ib"), "a40"),
    "phi2_fsdp_forward_100g": lambda: _region(_phi(2), _gather_scatter(PHI_LAYER, 16, "a40_ib_100g")[:1], "a40"),
    "llama3_fsdp_backward": lambda: _region(_llama(1, 8192, backward=True), _gather_scatter(LLAMA_LAYER, 16, "a40_ib"), "a40"),
    "llama3_fsdp_backward_h100": lambda: _region(_llama(1, 8192, backward=True), _gather_scatter(LLAMA_LAYER, 16, "h100_ib"), "h100"),
    "llama3_tensor_forward": lambda: _region(_llama(4, 2048, tensor=8), _gather_scatter(67.1e6, 8, "a40_nvlink", 2), "a40"),
    "phi2_tensor_forward_pcie": lambda: _region(
        _phi(8, tensor=8)[4:] * 2 + _phi(8, tensor=8)[:4], _same("all_reduce", 83.9e6, "a40_pcie", 3), "a40"
    ),
    "olmoe_expert_forward": lambda: _region(_olmoe(), _same("all_to_all", 268.4e6, "a40_nvlink", 4), "a40"),
    "deepseek_expert_forward_h100": lambda: _region(_deepseek(), _same("all_to_all", 201.3e6, "h100_nvlink", 4), "h100"),
    "phi2_fsdp_backward_6_layers": lambda: _region(_phi(2, backward=True) * 6, _gather_scatter(PHI_LAYER, 16, "a40_ib", 6), "a40"),
    "mpt_fsdp_backward": lambda: _region(_mpt(1), _gather_scatter(MPT_LAYER, 16, "a40_ib"), "a40"),
    "llama3_tensor_and_fsdp": lambda: _region(
        _llama(4, 2048, tensor=8) * 2,
        _gather_scatter(67.1e6, 8, "a40_nvlink", 2) + _gather_scatter(LLAMA_LAYER / 8, 2, "a40_ib", stream=1)[:1], "a40"
    ),
    "llama3_fsdp_backward_3_layers": lambda: _region(_llama(1, 8192, backward=True) * 3, _gather_scatter(LLAMA_LAYER, 16, "a40_ib", 3), "a40"),
    "llama3_tensor_forward_2_layers": lambda: _region(_llama(4, 2048, tensor=8) * 2, _gather_scatter(67.1e6, 8, "a40_nvlink", 4), "a40"),
    "olmoe_expert_forward_2_layers": lambda: _region(_olmoe() * 2, _same("all_to_all", 268.4e6, "a40_nvlink", 8), "a40"),
    "phi2_fsdp_backward_100g_5_layers": lambda: _region(_phi(2, backward=True) * 5, _gather_scatter(PHI_LAYER, 16, "a40_ib_100g", 5), "a40"),
    "llama3_tensor_forward_protocols": lambda: _region(_llama(4, 2048, tensor=8), _gather_scatter(67.1e6, 8, "a40_nvlink", 2, choices=_RING), "a40"),
    "phi2_tensor_forward_algorithms": lambda: _region(
        (_phi(8, tensor=8)[4:] * 2 + _phi(8, tensor=8)[:4]) * 2, _same("all_reduce", 83.9e6, "a40_pcie", 6, choices=_ANY), "a40"
    ),
}  # fmt: skip

OVERLAP_REGIONS = tuple(_BUILDERS)
"""Names of the regions, from 1 to 12 collectives."""


def load_overlap_region(name: str) -> OverlapRegion:
    """A region by name.

    Raises:
      ValueError: for a name that is not in `OVERLAP_REGIONS`.
    """
    if not isinstance(name, str) or name not in _BUILDERS:
        raise ValueError(f"there is no overlap region {name!r}; one of {', '.join(OVERLAP_REGIONS)}.")
    return _BUILDERS[name]()
