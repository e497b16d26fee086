"""A small transformer under `jax.jit` on a CPU, predicted from its parts: the calibrated kernels of the same machine, summed over operators, beside what
the whole program took.

    python benchmarks/cpu_transformer.py [TABLE] [--json FILE]      # TABLE: as `diffperf measure kernels` writes it; about a minute on two cores

The fit never sees the rows of whole programs. `diffperf/measure/_transformer.py` defines the program. Operators follow one another; each takes the time of
its kernel without a dispatch, which the program pays once. Products of the backward pass contract over an axis that is not the last, and cost a transposed
copy of their operands. Gradients of the stacked blocks are padded to the stack and added up layer by layer, as JAX differentiates indexing. Sums that XLA fuses
(a residual into the norm after it) are counted as kernels of their own.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from diffperf._files import write_atomic
from diffperf.calibrate.kernels._cpu_chip import chip_of
from diffperf.calibrate.kernels._fit import KernelFit, fit_kernels
from diffperf.calibrate.kernels._sets import place
from diffperf.cost.kernel import AttentionShape, Device, MatmulShape, StreamingShape, device_of
from diffperf.cost.kernel._streaming import adam_shape, cast_shape, cross_entropy_shape, elementwise_shape, normalisation_shape
from diffperf.io import KernelTable, read_kernels
from diffperf.measure._transformer import SmallTransformer

TABLE = Path(__file__).parents[1] / "calibration/measured/cpu_kernels.csv"
BYTES = {"fp32": 4.0, "bf16": 2.0}
GOAL = 20.0  # mean error in % of a training step


class Part(NamedTuple):
    """One operator of the program, and how often it runs."""

    name: str
    family: str
    library: str
    shape: Any
    times: float = 1.0
    datatype: str = ""


def forward(s: SmallTransformer, datatype: str) -> list[Part]:
    """Operators of a forward pass."""
    b, layers, h, tokens = BYTES[datatype], s.layers, float(s.hidden_size), float(s.batch_size * s.seq_len)
    matmul = lambda name, n, k, times: Part(name, "matmul_cpu", "jax", MatmulShape(tokens, n, k, 1.0, b, b, b), times)
    width = h / s.num_heads
    attention = AttentionShape(
        float(s.batch_size), float(s.seq_len), float(s.seq_len), float(s.num_heads), float(s.num_heads), width, width, q_bytes=b, kv_bytes=b
    )  # fmt: skip
    parts = [
        Part("norm", "streaming_cpu", "jax/layernorm", normalisation_shape(tokens, h, b), 2 * layers + 1),
        matmul("qkv", 3 * h, h, layers),
        Part("attention", "attention_prefill_cpu", "jax/xla", attention, layers),
        matmul("out", h, h, layers),
        matmul("up", 4 * h, h, layers),
        Part("gelu", "streaming_cpu", "jax/gelu", elementwise_shape(4 * h * tokens, 1.0, 1.0, b), layers),
        matmul("down", h, 4 * h, layers),
        Part("residual", "streaming_cpu", "jax/add", elementwise_shape(tokens * h, 2.0, 1.0, b), 2 * layers + 1),
        matmul("head", float(s.vocab), h, 1),
    ]
    if datatype != "fp32":
        parts.append(Part("cast", "streaming_cpu", "jax/copy", cast_shape(float(s.num_parameters), 4.0, b), datatype="fp32"))
    return parts


def train_step(s: SmallTransformer, datatype: str) -> list[Part]:
    """Operators of a training step: forward, loss, backward, update."""
    b, layers, h, tokens, vocab = BYTES[datatype], s.layers, float(s.hidden_size), float(s.batch_size * s.seq_len), float(s.vocab)
    parts = forward(s, datatype)
    stream = lambda name, kind, shape, times=1.0, datatype="fp32": Part(name, "streaming_cpu", f"jax/{kind}", shape, times, datatype)
    back = []
    for part in parts:
        if part.family == "matmul_cpu":
            m, n, k = part.shape[:3]
            back.append(part._replace(name="input gradient", shape=part.shape._replace(n=k, k=n)))
            back.append(part._replace(name="weight gradient", shape=part.shape._replace(m=k, n=n, k=m)))
            back.append(stream("transpose", "copy", elementwise_shape(m * k + n * k, 1.0, 1.0, b), part.times, datatype))
        elif part.family == "attention_prefill_cpu":
            back.append(part._replace(name="attention gradient", family="attention_backward_cpu"))
        elif part.name in ("norm", "gelu"):
            back.append(part._replace(name=f"{part.name} gradient", shape=part.shape._replace(read_bytes=2 * part.shape.read_bytes)))
        elif part.name in ("residual", "cast"):
            back.append(part)
    blocks = layers * 12 * h * h
    return [
        *parts,
        *back,
        stream("loss", "cross_entropy", cross_entropy_shape(tokens, vocab, 4.0)),
        stream("loss gradient", "softmax", StreamingShape(tokens, vocab, 4.0, 4.0)),
        stream("gradients of the stack", "add", elementwise_shape(blocks, 2.0, 1.0, 4.0), layers - 1),
        stream("embedding gradient", "copy", elementwise_shape(vocab * h + tokens * h, 1.0, 1.0, 4.0)),
        stream("adam", "adam", adam_shape(float(s.num_parameters), weight_bytes=0.0)),
    ]


class Machine:
    """The fitted kernels of a table by family, library and datatype, and its chip."""

    def __init__(self, table: KernelTable):
        self.fits: dict[tuple[str, str, str], KernelFit] = {}
        (gpu,) = set(table.gpu)
        self.chip = chip_of(gpu, table)
        wanted = {(p.family, p.library, p.datatype or d) for d in BYTES for p in train_step(SmallTransformer(1, 8, 1, 8, 1, 8), d)}
        for one in place(table)[0]:
            s, family = one.kernels, one.rows.family
            if (family.name, s.library, s.datatype) in wanted:
                self.fits[family.name, s.library, s.datatype] = fit_kernels(family, s.shape, s.device, s.log_time, starts=2 if len(s) >= 64 else 0)

    def time(self, part: Part, datatype: str) -> float:
        """Time of one call of an operator without its dispatch. [s]"""
        datatype = part.datatype or datatype
        fit = self.fits[part.family, part.library, datatype]
        with jax.enable_x64(True):
            device = Device(*(float(x) for x in device_of(self.chip, datatype)))
            return float(fit.family.time(part.shape, device, fit.constants()._replace(launch=0.0)))

    def dispatch(self) -> float:
        """Time of an empty call. [s]"""
        return float(self.fits["streaming_cpu", "jax/add", "fp32"].constants().launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = read_kernels(options.table)
    machine = Machine(table.take(np.array(["transformer" not in op for op in table.op])))
    shown = Table(title="Whole programs on the CPU, predicted from their operators")
    for name in ("program", "datatype", "hidden", "tokens", "measured ms", "predicted ms", "error %", "flag", "largest parts"):
        shown.add_column(name, justify="left" if name in ("program", "largest parts") else "right")
    found = []
    for i in np.flatnonzero(np.isin(table.op, ("transformer_forward", "transformer_train_step"))):
        sizes = SmallTransformer(*(int(table[name][i]) for name in ("layers", "hidden_size", "num_heads", "q_len", "batch_size", "vocab")))
        datatype, op = str(table.datatype[i]), str(table.op[i])
        parts = (forward if op == "transformer_forward" else train_step)(sizes, datatype)
        spent: dict[str, float] = {}
        for part in parts:
            spent[part.name] = spent.get(part.name, 0.0) + part.times * machine.time(part, datatype)
        predicted, measured = machine.dispatch() + sum(spent.values()), float(table.time_s[i])
        error = 100 * (predicted / measured - 1)
        most = ", ".join(f"{name} {1e3 * t:.3g}" for name, t in sorted(spent.items(), key=lambda item: -item[1])[:4])
        tokens = sizes.batch_size * sizes.seq_len
        numbers = (f"{1e3 * measured:.4g}", f"{1e3 * predicted:.4g}", f"{error:+.1f}")
        shown.add_row(op, datatype, str(sizes.hidden_size), str(tokens), *numbers, table.flag[i], most)
        found.append(dict(op=op, datatype=datatype, **sizes._asdict(), measured_s=measured, predicted_s=predicted, parts_s=spent))
    console = Console(width=180)
    console.print(shown)
    for op in ("transformer_forward", "transformer_train_step"):
        errors = [abs(100 * (row["predicted_s"] / row["measured_s"] - 1)) for row in found if row["op"] == op]
        if errors:
            goal = f" (goal {GOAL:.0f})" if op == "transformer_train_step" else ""
            console.print(f"{op}: mean error {np.mean(errors):.1f}%{goal}, worst {max(errors):.1f}%, {len(errors)} programs")
    if options.json:
        write_atomic(options.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
