"""The constants of the step-time model, their priors, and how they vary over hardware and software.

Each constant of a row is, on a scale without bounds (log, or logit for fractions), a sum: a value shared by all, plus offsets of the
chip's generation and of the chip (hardware constants), or of the stack's family and of the stack (software constants). Offsets have
normal priors of mean 0 with the widths below; a width of 0 means no offset. Means and widths start from datasheets, from the physics named
in `source` and from the spread between known chips and stacks; `benchmarks/accuracy.py` prints what each fit made of them.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..hardware import DATATYPES, System
from ..stack import Stack


@dataclasses.dataclass(frozen=True)
class Constant:
    """One constant.

    Attributes:
      name: dotted path in `Chip`, `Tier` or `Stack`.
      mean: prior median, in natural units.
      shared: prior width of the shared value. [log or logit units]
      generation, chip: prior widths between chip generations, and between chips of one generation.
      family, stack: prior widths between families, and between stacks of one family.
      logit: True for a fraction in (0, 1).
      source: where mean and width come from.
    """

    name: str
    mean: float
    shared: float
    generation: float = 0.0
    chip: float = 0.0
    family: float = 0.0
    stack: float = 0.0
    logit: bool = False
    source: str = ""


CONSTANTS = (
    # hardware
    Constant("chip.matmul_efficiency", 0.72, 0.15, generation=0.15, chip=0.08, source="large matmuls on A100/H100 reach 0.7-0.8 of peak"),
    Constant("chip.low_precision_ratio", 1.0, 0.10, generation=0.12, source="8-bit over 16-bit share of peak; power limits keep it near or below 1"),
    Constant("chip.fp4_ratio", 0.75, 0.2, source="4-bit over 8-bit share of peak"),
    Constant("chip.attention_efficiency", 0.45, 0.2, generation=0.25, source="FlashAttention-2 forward, causal, head 128"),
    Constant("chip.memory_efficiency", 0.85, 0.05, generation=0.05, source="streaming kernels"),
    Constant("scale_up.efficiency", 0.7, 0.2, generation=0.2, source="nccl-tests bus bandwidth over link rate"),
    Constant("scale_out.efficiency", 0.75, 0.12, source="nccl-tests bus bandwidth over NIC rate"),
    # software: arithmetic
    Constant("matmul_factor", 1.0, 0.0, family=0.15, stack=0.14, source="spread of 30 stacks"),
    Constant("low_precision_factor", 1.0, 0.0, family=0.07, stack=0.08, source="spread of 30 stacks"),
    Constant("attention_factor", 1.0, 0.0, family=0.22, stack=0.25, source="FlashAttention-2 against cuDNN attention on Hopper: a factor of 2"),
    Constant("attention_backward_ratio", 2.7, 0.1, source="2.5 times the FLOP, lower rate (Dao 2023, arXiv:2307.08691)"),
    Constant("attention_head_half", 24.0, 0.5, source="half-width heads run at about 0.8 of the rate"),
    Constant("weight_traffic", 1.6, 0.5, family=0.42, stack=0.3, source="1 is compulsory; tiles read the operand again"),
    Constant("activation_traffic", 2.6, 0.5, stack=0.15, source="1 is compulsory; tiles read the operand again, casts and copies"),
    Constant("expert_factor", 0.75, 0.2, family=0.11, stack=0.15, source="grouped against dense matmul"),
    Constant("expert_low_precision_factor", 0.78, 0.2, source="quantising small expert batches"),
    Constant("elementwise_bytes", 16.0, 0.4, family=0.14, stack=0.20, source="norms, residuals: 5 to 20 passes of 2 bytes"),
    Constant("cast_bytes", 6.0, 0.6, source="one cast and one transpose pass"),
    Constant("permute_bytes", 5.0, 0.7, source="one gather and one scatter of 2 bytes"),
    Constant("score_bytes", 14.0, 0.3, stack=0.2, source="Korthikanti et al. 2022 count 5 stored bytes; each is written and read"),
    Constant("vocabulary_factor", 1.15, 0.25, family=0.2, stack=0.26, source="spread of 30 stacks"),
    Constant("vocabulary_share", 0.8, 1.0, logit=True, source="1: the last stage is the slowest; 1/p: rebalanced"),
    Constant("frozen_factor", 1.05, 0.15, stack=0.10, source="adapters add small matmuls"),
    Constant("layer_factor", 1.0, 0.0, stack=0.03, source="remainder"),
    # software: launch and communication
    Constant("launch_time", 1.3e-3, 0.5, family=0.36, stack=0.41, source="about 60 kernels at 10 us with Python dispatch, forward and backward"),
    Constant("launch_recompute", 1.33, 0.1, source="one forward of three passes"),
    Constant("launch_expert", 1.9, 0.4, source="permutation and per-expert kernels"),
    Constant("tensor_exposed", 0.25, 0.7, family=0.78, stack=0.5, logit=True, source="spread of 30 stacks"),
    Constant("collective_latency", 3.0e-5, 0.4, family=0.28, stack=0.3, source="launch and synchronisation of one NCCL call"),
    Constant("context_exposed", 0.3, 0.7, logit=True, source="mostly hidden under attention"),
    Constant("expert_exposed", 0.8, 0.4, stack=0.3, source="imbalance above, overlap below 1"),
    Constant("pipeline_exposed", 0.33, 0.7, stack=0.3, logit=True, source="overlapped send and receive in 1F1B"),
    Constant("gradient_traffic", 0.70, 0.20, family=0.14, stack=0.25, source="1: what the datatypes say; 2/3 where 4-byte gradients are reduced in 2"),
    Constant("data_overlap", 0.45, 0.5, family=0.42, stack=0.6, logit=True, source="spread of 30 stacks"),
    Constant("shard_overlap", 0.5, 0.5, stack=0.6, logit=True, source="spread of 30 stacks"),
    Constant("bubble_factor", 0.75, 0.2, family=0.22, stack=0.25, source="spread of 30 stacks"),
    Constant("optimizer_traffic", 0.8, 0.4, source="fused Adam at memory rate"),
    Constant("offload_exposed", 0.8, 0.5, stack=0.2, source="host transfers barely overlap in ZeRO-Offload"),
    Constant("step_overhead", 1.5e-2, 0.7, family=0.43, stack=0.7, source="logging, data loading, gradient norm"),
    Constant("scale_jitter", 0.010, 0.5, family=0.29, stack=0.53, source="spread of 30 stacks"),
)

FEATURE_EFFECTS = (
    # feature, constant it shifts, prior mean and width of the shift per unit of the feature
    ("release_year", "matmul_factor", 0.05, 0.05),
    ("release_year_expert", "expert_factor", 0.05, 0.10),
    ("release_year_expert", "expert_exposed", -0.10, 0.20),
    ("blackwell_expert_jump", "layer_factor", -0.20, 0.15),
    ("packed", "layer_factor", 0.0, 0.10),
    ("eager", "layer_factor", 0.14, 0.10),
)

NAMES = tuple(c.name for c in CONSTANTS)
HARDWARE = tuple(name for name in NAMES if name.split(".")[0] in ("chip", "scale_up", "scale_out"))
MEMORY_DEFAULTS = dict(
    activation_memory=1.0, selective_memory=0.65, low_precision_storage=1.0, working_layers=1.0, logit_bytes=5.5, memory_overhead=1.01,
    memory_fixed=5e8,
)  # fmt: skip
"""Memory constants of a stack, which step times say nothing about; `_memory_fit.py` fits them apart."""

_INDEX = {name: i for i, name in enumerate(NAMES)}
_LOGIT = tuple(c.logit for c in CONSTANTS)
_CLASS = {"fp32": 16, "tf32": 16, "fp16": 16, "bf16": 16, "fp8": 8, "mxfp8": 8, "int8": 8, "nvfp4": 4}


def unconstrained(name: str, value: float) -> float:
    """A natural value on the scale of the fit."""
    import math

    return math.log(value / (1 - value)) if CONSTANTS[_INDEX[name]].logit else math.log(value)


def natural(constants: Float[Array, "... constants"]) -> Float[Array, "... constants"]:
    """Values in natural units from the scale of the fit. Inverse of `unconstrained`, for all constants in the order of `NAMES`."""
    return jnp.where(jnp.array(_LOGIT), jax.nn.sigmoid(constants), jnp.exp(jnp.where(jnp.array(_LOGIT), 0.0, constants)))


def apply_to_system(system: System, constants: Float[Array, " constants"]) -> System:
    """The system with the fitted efficiencies put in; datasheet numbers stay."""
    v = natural(constants)
    high = v[_INDEX["chip.matmul_efficiency"]]
    low = high * v[_INDEX["chip.low_precision_ratio"]]
    four = low * v[_INDEX["chip.fp4_ratio"]]
    efficiency = jnp.stack([{16: high, 8: low, 4: four}[_CLASS[name]] for name in DATATYPES])
    where = lambda s: (s.chip.matmul_efficiency, s.chip.attention_efficiency, s.chip.memory_efficiency, s.scale_up.efficiency,
                       s.scale_out.efficiency, s.spine.efficiency)  # fmt: skip
    get = lambda name: v[_INDEX[name]]
    out = get("scale_out.efficiency")
    new = (efficiency, get("chip.attention_efficiency"), get("chip.memory_efficiency"), get("scale_up.efficiency"), out, out)
    return eqx.tree_at(where, system, new)


def stack_from(constants: Float[Array, " constants"], memory: dict[str, Float[Array, ""] | float] | None = None) -> Stack:
    """The stack of a row."""
    v = natural(constants)
    fields = {name: v[_INDEX[name]] for name in NAMES if name not in HARDWARE}
    return Stack(**fields, **(MEMORY_DEFAULTS if memory is None else memory))
