"""Draws measured kernels, their prediction and the roofline: one small SVG per family for `docs/kernels.md`.

    python benchmarks/plot_kernels.py FOLDER [--out docs/images] [--only NAME ...]       # FOLDER holds tables of measured kernels

Each picture shows slices in which one size moves. Points are a few dozen published timings (sources in `CITATION`), which were among those fitted; lines are
the shipped library with its correction (solid) and the roofline (dashed). Convolution and gathering kernels have no points: no public table was at hand.
"""

import argparse
import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffperf.calibrate.kernels._sets import place
from diffperf.cost.kernel import (
    CONVOLUTION_PRIORS,
    FAMILIES,
    SPARSE_PRIORS,
    ConvolutionConstants,
    ConvolutionShape,
    EmbeddingBagShape,
    SparseConstants,
    convolution_kernel_time,
    device_of,
    embedding_bag_kernel_time,
    load_library,
)  # fmt: skip
from diffperf.cost.kernel._constants import constrain
from diffperf.cost.kernel._convolution import convolution_roofline
from diffperf.cost.kernel._sparse import sparse_roofline
from diffperf.hardware import load_system
from diffperf.io import read_kernels, write_atomic

CITATION = "aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0); vidur (Microsoft, MIT)"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 380, 62, 34, 46


class Slice(NamedTuple):
    """Rows of one set in which `moves` changes and the other fields of the shape are as in `fixed`; `label` names it, `factor` turns x into what is drawn."""

    family: str
    file: str
    library: str
    datatype: str
    moves: tuple[str, ...]
    fixed: Mapping[str, float]
    label: str
    factor: float = 1.0


def gemm(file: str, library: str, datatype: str, n: int, k: int, label: str) -> Slice:
    """Rows over m."""
    family = "matmul" if datatype == "bf16" else "matmul_quantised"
    return Slice(family, f"aic_gemm_{file}.csv.gz", library, datatype, ("m",), {"n": n, "k": k, "batch": 1}, label)


PICTURES: dict[str, tuple[str, tuple[Slice, ...]]] = {
    "matmul": ("rows m", (
        gemm("h100_sxm", "trtllm", "bf16", 4096, 4096, "H100 bf16, n = k = 4096"), gemm("b200_sxm", "trtllm", "bf16", 4096, 4096, "B200 bf16, n = k = 4096"),
        gemm("h100_sxm", "trtllm", "bf16", 65536, 7168, "H100 bf16, n = 65536, k = 7168"),
    )),
    "matmul_quantised": ("rows m", (
        gemm("h100_sxm", "trtllm/fp8_block", "fp8", 4096, 4096, "H100 block fp8, n = k = 4096"),
        gemm("b200_sxm", "trtllm", "nvfp4", 4096, 4096, "B200 nvfp4, n = k = 4096"),
    )),
    "attention_prefill": ("tokens of one sequence", tuple(
        Slice("attention_prefill", "aic_attention_prefill_h100_sxm.csv.gz", "vllm/vllm_flash_attn_fa3", "bf16", ("queries", "keys"),
              {"heads": heads, "kv_heads": kv_heads, "head_dim": 64, "window": window, "batch": 1}, label)
        for heads, kv_heads, window, label in (
            (16, 1, np.inf, "H100 bf16, 16 heads on 1"), (32, 8, np.inf, "32 heads on 8"), (40, 1, 128, "40 heads on 1, window of 128"),
        )
    )),
    "encoder_attention": ("tokens of one sequence", tuple(
        Slice("encoder_attention", "aic_encoder_attention_h100_sxm.csv.gz", "sglang/flash_attention_v3", "bf16", ("queries", "keys"),
              {"heads": heads, "head_dim": width, "batch": batch}, f"H100 bf16, {heads} heads of {width}, batch {batch}")
        for heads, width, batch in ((32, 80, 4), (5, 64, 2))
    )),
    "attention_decode": ("tokens in the cache", tuple(
        Slice("attention_decode", "aic_attention_decode_h100_sxm.csv.gz", "vllm/vllm_flash_attn_fa3", "bf16", ("keys",),
              {"heads": heads, "kv_heads": kv_heads, "head_dim": 64, "window": window, "batch": batch}, label)
        for heads, kv_heads, window, batch, label in (
            (12, 1, np.inf, 4, "H100 bf16, 12 heads on 1, batch 4"), (4, 4, np.inf, 64, "4 heads on 4, batch 64"),
            (40, 2, 128, 8, "40 heads on 2, batch 8, window of 128"),
        )
    )),
    "mla": ("tokens in the cache", tuple(
        Slice("mla_decode", "aic_mla_decode_h100_sxm.csv.gz", "sglang/flash_attention", "bf16", ("keys",), {"heads": heads, "batch": batch},
              f"H100 bf16, {heads} heads, batch {batch}") for heads, batch in ((128, 128), (16, 1))
    )),
    "moe": ("tokens", tuple(
        Slice("moe_ffn", "aic_moe_b200_sxm.csv.gz", "sglang/trtllm", "bf16", ("tokens",),
              {"hidden": 4096, "tensor_parallel": tensor, "expert_parallel": expert, "skew": skew}, label)
        for tensor, expert, skew, label in (
            (1, 1, 1.01, "B200 bf16, 128 experts of 1536, power law 1.01"), (4, 8, 0, "split 4 x 8 ways, balanced"),
        )
    )),
    "streaming": ("elements", (
        Slice("streaming", "vidur_mlp_h100.csv.gz", "vidur/layernorm", "fp16", ("rows",), {"columns": 8192}, "H100 layer norm over 8192", 8192),
        Slice("streaming", "aic_quantize_scale_matrix_h100_sxm.csv.gz", "trtllm/quantize_scale_matrix", "fp8", ("rows",), {"columns": 4096},
              "H100 bf16 to fp8, rows of 4096", 4096),
    )),
}  # fmt: skip


class Curve(NamedTuple):
    """One colour of a picture: measured points, prediction and roofline; times in seconds."""

    label: str
    x: np.ndarray
    measured: np.ndarray
    grid: np.ndarray
    predicted: np.ndarray
    roofline: np.ndarray


def curve(folder: Path, one: Slice, most: int = 36) -> Curve:
    """The rows of a slice and the lines through them."""
    placed, _ = place(read_kernels(str(folder / one.file)))
    s = max((p.kernels for p in placed if (p.rows.family.name, p.kernels.library, p.kernels.datatype) == (one.family, one.library, one.datatype)), key=len)
    at = np.all([np.isclose(getattr(s.shape, name), value) | (getattr(s.shape, name) == value) for name, value in one.fixed.items()], axis=0)
    at = np.flatnonzero(at & np.all([getattr(s.shape, name) == getattr(s.shape, one.moves[0]) for name in one.moves], axis=0))
    if len(at) == 0:
        raise SystemExit(f"{one.file}: no rows of {one.library} with {dict(one.fixed)}.")
    at = at[np.argsort(getattr(s.shape, one.moves[0])[at])]
    at = at[np.unique(np.linspace(0, len(at) - 1, most).round().astype(int))]
    x = getattr(s.shape, one.moves[0])[at]
    grid = np.unique(np.geomspace(x[0], x[-1], 160).round())
    shape = type(s.shape)(*(np.full(len(grid), field[at[0]]) for field in s.shape))._replace(**dict.fromkeys(one.moves, grid))
    device = device_of(load_system(s.chip).chip, one.datatype)
    library = load_library(one.family, s.chip, library=one.library, datatype=one.datatype)
    roofline = FAMILIES[one.family].roofline(shape, device)
    return Curve(one.label, x * one.factor, np.exp(s.log_time[at]), grid * one.factor, np.asarray(library.time(shape, device)), np.asarray(roofline))


def start(kind: Any, priors: Any) -> Any:
    """Constants at the start of their priors."""
    return constrain(kind, priors, jnp.zeros(len(priors)))


def convolution() -> tuple[str, list[Curve]]:
    """A 3 x 3 convolution of a residual network over its channels, and a depthwise one."""
    device = device_of(load_system("h100_sxm").chip, "fp16")
    matmul, own = load_library("matmul", "h100_sxm", library="trtllm").constants, start(ConvolutionConstants, CONVOLUTION_PRIORS)
    grid, curves = np.unique(np.geomspace(16, 2048, 100).round()), []
    for label, groups in (("H100 fp16, 3 x 3 over 28 x 28, batch 32", 1.0), ("the same, depthwise", grid)):
        shape = ConvolutionShape(32.0, grid, grid, 1.0, 28.0, 28.0, 1.0, 3.0, 3.0, padding=1.0, groups=groups)
        time = convolution_kernel_time(shape, device, own, matmul)
        curves.append(Curve(label, grid[:0], grid[:0], grid, np.asarray(time), np.asarray(convolution_roofline(shape, device))))
    return "channels", curves


def sparse() -> tuple[str, list[Curve]]:
    """An embedding bag over the size of its table, indices drawn evenly or by a power law."""
    device, own = device_of(load_system("h100_sxm").chip, "fp32"), start(SparseConstants, SPARSE_PRIORS)
    grid, curves = np.geomspace(1e3, 1e8, 100).round(), []
    for skew in (0.0, 0.8):
        shape = EmbeddingBagShape(16384.0, 32.0, grid, 64.0, skew=skew)
        time, roofline = (np.broadcast_to(t, grid.shape) for t in (embedding_bag_kernel_time(shape, device, own), sparse_roofline(shape, device)))
        curves.append(Curve(f"H100, 16384 bags of 32 rows of 256 B, skew {skew:g}", grid[:0], grid[:0], grid, time, roofline))
    return "rows of the table", curves


def draw(title: str, x_title: str, curves: list[Curve]) -> str:
    """An SVG with logarithmic axes: size against microseconds."""
    xs, times = np.concatenate([c.grid for c in curves]), np.concatenate([t for c in curves for t in (c.measured, c.predicted, c.roofline)]) * 1e6
    low, high = np.log10([xs.min(), max(times.min(), times.max() / 1e7)]), np.log10([xs.max(), times.max()])
    low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
    px = lambda x: LEFT + (np.log10(x) - low[0]) / (high[0] - low[0]) * (WIDTH - LEFT - 14)
    py = lambda t: HEIGHT - BOTTOM - (np.log10(np.maximum(t * 1e6, 1e-9)) - low[1]) / (high[1] - low[1]) * (HEIGHT - TOP - BOTTOM)
    path = lambda x, t: "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in zip(px(x), py(t)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#808080">',
        f"<title>{html.escape(title)}</title>",
        f'<clipPath id="p"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - 14}" height="{HEIGHT - TOP - BOTTOM}"/></clipPath>',
    ]
    for e in range(int(np.ceil(low[0])), int(np.floor(high[0])) + 1):
        parts.append(f'<path d="M{px(10.0**e):.1f},{TOP}V{HEIGHT - BOTTOM}" stroke="#80808040"/>')
        parts.append(f'<text x="{px(10.0**e):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10**e:,}</text>')
    steps = (1, 2, 5) if high[1] - low[1] < 1.5 else (1,)
    for tick in (step * 10.0**e for e in range(int(np.floor(low[1])), int(np.ceil(high[1])) + 1) for step in steps):
        if low[1] <= np.log10(tick) <= high[1]:
            y = py(tick * 1e-6)
            parts.append(f'<path d="M{LEFT},{y:.1f}H{WIDTH - 14}" stroke="#80808040"/><text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{html.escape(x_title)}</text><text x="{LEFT}" y="{TOP - 8}">us</text>')
    parts.append('<g clip-path="url(#p)">')
    for colour, c in zip(COLOURS, curves):
        parts.append(f'<path d="{path(c.grid, c.roofline)}" fill="none" stroke="{colour}" stroke-dasharray="5 4" opacity=".6"/>')
        parts.append(f'<path d="{path(c.grid, c.predicted)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.2" fill="{colour}"/>' for a, b in zip(px(c.x), py(c.measured))]
    parts.append("</g>")
    legend = [(colour, c.label) for colour, c in zip(COLOURS, curves)]
    parts += [f'<text x="{LEFT + 12}" y="{TOP + 18 + 17 * i}" fill="{colour}">{html.escape(label)}</text>' for i, (colour, label) in enumerate(legend)]
    return "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "images")
    parser.add_argument("--only", nargs="+", choices=(*PICTURES, "convolution", "sparse"))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    options.out.mkdir(exist_ok=True)
    for name in options.only or (*PICTURES, "convolution", "sparse"):
        if name in PICTURES:
            x_title, slices = PICTURES[name]
            curves = [curve(options.folder, one) for one in slices]
            source = f"dots: measured, {CITATION}; solid: predicted; dashed: roofline"
        else:
            x_title, curves = convolution() if name == "convolution" else sparse()
            source = "solid: predicted; dashed: roofline"
        write_atomic(options.out / f"kernels_{name}.svg", draw(f"{name}: {source}", x_title, curves))
        errors = [np.abs(np.interp(np.log(c.x), np.log(c.grid), np.log(c.predicted)) - np.log(c.measured)).mean() for c in curves if len(c.x)]
        print(name, [f"{len(c.x)} points" for c in curves], [f"{100 * e:.1f}%" for e in errors])


if __name__ == "__main__":
    main()
