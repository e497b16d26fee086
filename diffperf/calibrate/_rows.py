"""Measured runs as batched pytrees: model, system and plan of every row, with documented defaults where a row is silent.

Defaults (each is what the sources that do print the value mostly use):
- sequence parallelism: on with tensor parallelism from 2023, off before; ZeRO stage: 1 from 2023, 0 before and for adapters, 3 over all
  chips for MaxText on TPU; fused attention: on from 2023, off before; recompute: none, but full for NeMo AutoModel's adapters on more
  than one device, and half a forward pass for MaxText's named policies.
- micro-batch: from batch and data-parallel size on TPU, one per pipeline stage in torchtitan, 1 in MLPerf and elsewhere from 2023; before,
  4 below 9e9 parameters, 2 below 50e9, 1 above; 8 for Alpa.
- gradients: 4 bytes; 2 with fp16, whose stacks reduce them as they are, and in 8-bit MLPerf runs, which also keep weights in 1.
- batch: from tokens per second and step time.
- precision: bf16; fp8 in MLPerf, whose silent logs run as fast as those that print it.
- parallel degrees: those of a row with the same model, accelerator, device count and batch in the same table, if there is one; else
  tensor parallelism is the smallest power of two that holds model states in 60% of memory within a node, and the rest is data parallel.
- sequence length: 4096 with MaxText, else 2048.
- architecture: that of the catalog's model of this name; else the row's own columns; else, from the parameter count alone, a GPT with
  `hidden = 128 layers`.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import equinox as eqx
import jax
import numpy as np

from ..hardware import DATATYPES, System, generation, load_system, resolve_name
from ..io import Run
from ..io._kernel_names import canonical_datatype
from ..parallel import Plan
from ..parallel._plan import OPTIMIZER_BYTES, plan_numbers
from ..workload import Transformer, load_model, num_parameters, pad_kinds, resolve_model_name, transformer, with_seq_len
from ._frameworks import features, identify, is_adapter

ADAPTER_SHARE = 0.002  # trainable part of the weights with low-rank adapters on all projections at rank 16, 70B
NOT_DECODERS = ("cnn", "dlrm", "rnn", "diffusion", "gnn", "encoder", "hybrid")


class SkipRun(ValueError):
    """A row that cannot be modelled; the text is the reason, short enough to count. `reasons` counts them when no row could be."""

    reasons: Counter = Counter()


@dataclass(frozen=True)
class Rows:
    """Runs ready to be predicted. Leaves of the pytrees have a leading axis of rows.

    Attributes:
      runs: the runs, in order.
      model, system, plan: batched inputs of `train_step`; the system has datasheet numbers and prior efficiencies.
      log_time: measured step time, nan where not measured, shape (rows,). [log s]
      weight: fit weight from the row's notes, shape (rows,). [1]
      stack, family, generation, accelerator: labels, one per row.
      features: values of `FEATURES`, shape (rows, features). [1]
      groups: (source repository, model name), one per row.
      skipped: reason -> count of runs that could not be modelled.
    """

    runs: tuple[Run, ...]
    model: Transformer
    system: System
    plan: Plan
    log_time: np.ndarray
    weight: np.ndarray
    stack: tuple[str, ...]
    family: tuple[str, ...]
    generation: tuple[str, ...]
    accelerator: tuple[str, ...]
    features: np.ndarray
    groups: tuple[tuple[str, str], ...]
    skipped: Counter

    def __len__(self) -> int:
        return len(self.runs)

    def take(self, index) -> "Rows":
        """The rows at `index` (integers or a mask), in that order."""
        index = np.arange(len(self))[index]
        pick = lambda tree: jax.tree.map(lambda x: x[index], tree)
        names = lambda labels: tuple(labels[i] for i in index)
        return Rows(
            names(self.runs), pick(self.model), pick(self.system), pick(self.plan), self.log_time[index], self.weight[index], names(self.stack),
            names(self.family), names(self.generation), names(self.accelerator), self.features[index], names(self.groups), Counter(),
        )  # fmt: skip


_num_parameters = jax.jit(num_parameters)  # thousands of rows: operation by operation these two take seconds
_pad_kinds = jax.jit(pad_kinds, static_argnums=1)


@lru_cache(maxsize=4096)
def _model(name: str, layers, hidden, heads, kv_heads, ffn, vocab, gated, experts, topk, params_b, seq_len) -> Transformer:
    """The network of a row; `seq_len` is the row's."""
    base = re.sub(r"\s*\(.*\)|[-_ ]proxy.*|[-_ ]\d+layers?$", "", name).strip()
    known = None
    try:
        known = load_model(resolve_model_name(base)) if base else None
    except ValueError:
        known = None
    if known is not None and (hidden is None or float(known.hidden) == hidden):
        return with_seq_len(_cut(known, layers, vocab, kv_heads), seq_len)
    if layers and hidden:
        heads = heads or max(1.0, round(hidden / 128))
        kv = kv_heads if kv_heads and heads % kv_heads == 0 else heads
        gated = bool(gated) if gated is not None else bool(experts)
        width = ffn or (4 * hidden if not gated else round(8 * hidden / 3 / 128) * 128)
        common = dict(
            hidden=hidden, layers=layers, num_heads=heads, num_kv_heads=kv, head_dim=hidden / heads, vocab=vocab or 51200, gated=gated, seq_len=seq_len
        )  # fmt: skip
        if experts and experts > 1:
            return transformer(**common, ffn_hidden=0, num_experts=experts, experts_per_token=topk or 2, expert_hidden=width)
        return transformer(**common, ffn_hidden=width)
    if params_b:
        if experts and experts > 1:
            raise SkipRun("mixture of experts without an architecture")
        hidden = max(1.0, round((params_b * 1e9 * 128 / 12) ** (1 / 3) / 128)) * 128
        layers = max(1.0, round(params_b * 1e9 / (12 * hidden**2)))
        return transformer(hidden=hidden, layers=layers, num_heads=hidden / 128, ffn_hidden=4 * hidden, vocab=vocab or 51200, gated=False, seq_len=seq_len)
    raise SkipRun("no architecture: name not in the catalog, no layers and hidden, no parameter count")


def _cut(model: Transformer, layers: float | None, vocab: float | None, kv_heads: float | None) -> Transformer:
    """A catalog model with the row's layer count (kinds keep their proportion, at least one layer each), vocabulary and key/value heads."""
    count = np.asarray(model.blocks.count, float)
    if layers and layers != count.sum():
        scaled = np.where(count > 0, np.maximum(np.round(count * layers / count.sum()), 1.0), 0.0)
        scaled[np.argmax(count)] += layers - scaled.sum()
        if (scaled < 0).any():
            scaled = count * layers / count.sum()
        model = eqx.tree_at(lambda m: m.blocks.count, model, scaled)
    latent = bool(np.any(np.asarray(model.blocks.kv_rank) > 0))
    if kv_heads and not latent and np.all(np.asarray(model.blocks.num_heads) % kv_heads == 0):
        model = eqx.tree_at(lambda m: m.blocks.num_kv_heads, model, np.full(count.shape, float(kv_heads)))
    if vocab and float(model.vocab) > 0:
        model = eqx.tree_at(lambda m: m.vocab, model, np.asarray(vocab, float))
    return model


def link_rate(text: str, devices_per_node: float) -> float | None:
    """NIC rate per device in one direction from a row's free text, None when it says nothing usable. [B/s]

    Understands `8x HDR InfiniBand 200 Gb/s`, `4x100Gb RoCE per node`, `InfiniBand, about 800 Gbit/s per node`, `400 Gb/s per GPU`,
    `25 Gb/s Ethernet` and the compute part of `Storage: ..., Compute: 8x ConnectX-7 NDR 400Gb/s, ...`.
    """
    parts = [(part, re.search(r"(\d+(?:\.\d+)?)(?:/[\d.]+)? ?G(?:bps|bit|bE|b)\b", part)) for part in re.split(r"[,;+](?![^()]*\))", text)]
    rates = [(part, float(found[1]) / 8 * 1e9) for part, found in parts if found and float(found[1])]
    if not rates:
        return None
    part, rate = next((pair for pair in rates if "compute" in pair[0].lower()), rates[0])
    if re.search(r"per (?:gpu|device|accelerator)", part, re.IGNORECASE):
        return rate
    count = re.search(r"(?<![\w-])(\d+) ?x(?=[ \d])", part)
    if count:
        return rate * float(count[1]) / devices_per_node
    if re.search(r"per node|ethernet|EFA", part, re.IGNORECASE):
        return rate / devices_per_node
    return None


@lru_cache(maxsize=1024)
def _system(name: str, domain: float | None, nic: float | None) -> System:
    system = load_system(name, domain=domain, scale_out_bandwidth=nic, fitted=False)
    return jax.tree.map(np.asarray, system)


def system_of(run: Run) -> tuple[System, str]:
    """System of a run and its catalog name; the row's node size, NIC and slice size replace the catalog's.

    Raises:
      SkipRun: for an accelerator not in the catalog.
    """
    try:
        name = resolve_name(run.accelerator)
    except ValueError as error:
        raise SkipRun(f"accelerator {run.accelerator!r} not in the catalog") from error
    kind = generation(name)
    domain = None
    if kind == "tpu":
        found = re.search(r"size (\d+) per slice", run.zero_stage_or_fsdp)
        domain = float(found[1]) if found else run.num_devices
        domain = max(domain or 1.0, 1.0)
    elif run.gpus_per_node and "nvl72" not in name and not re.search(r"NVL72", run.intra_node_net):
        domain = float(run.gpus_per_node)
    nic = link_rate(run.inter_node_net, run.gpus_per_node or 8.0) if kind != "tpu" else None
    return _system(name, domain, nic), name


_PRECISIONS = {
    "fp8-cs": "fp8", "fp8-ds": "fp8", "fp8-sc": "fp8", "fp8-hybrid": "fp8", "fp8-mx": "mxfp8", "fp4": "nvfp4", "mxfp4": "nvfp4", "amp": "fp16",
    "mixed": "fp16", "16-mixed": "fp16", "": "bf16",
}  # fmt: skip


def precision_of(run: Run) -> str:
    """Datatype of the layers' matmul operands; the row's `TREAT AS` marker wins over the printed value.

    Raises:
      SkipRun: for words that name no datatype.
    """
    text = run.treat_as.get("precision", run.precision).strip().lower()
    if not text and run.source.startswith("mlcommons"):
        text = "fp8"  # submissions whose log is silent run as fast as those that print FP8
    if "float8 rowwise" in run.notes and (run.tp or 1) > 1:
        text = "bf16"  # torchtitan's rowwise scaling gains nothing over bf16 with tensor parallelism
    text = canonical_datatype(_PRECISIONS.get(text, text))[0]
    if text in DATATYPES:
        return text
    named = next((name for name in ("mxfp8", "nvfp4", "fp8", "bf16", "fp16", "int8", "tf32", "fp32") if name in text), None)
    if named is None:
        raise SkipRun(f"precision {text!r} is not known; it should be one of {', '.join(DATATYPES)}, or empty")
    return named


def _shard(run: Run, adapter: bool, tpu: bool) -> tuple[int, float, bool]:
    """(ZeRO stage, ranks of a shard group, offloaded) from the free text of `zero_stage_or_fsdp`."""
    text, year = run.zero_stage_or_fsdp.lower(), run.year or 2025
    group = re.search(r"(?:size|group) (\d+)", text)
    ranks = float(group[1]) * (run.cp or 1.0) if group else math.inf  # the printed size counts data-parallel ranks
    offload = "offload" in text
    if "shard-grad-op" in text or "zero2" in text:
        return 2, ranks, offload
    if "hsdp" in text:
        return 3, ranks if group else float(run.gpus_per_node or 8), offload
    if "fsdp" in text or "zero3" in text:
        return 3, ranks, offload
    if "zero0" in text or "none" in text:
        return 0, ranks, offload
    if text:
        return 1, ranks, offload
    if tpu or "maxtext" in run.framework.lower():
        return 3, math.inf, False
    return (0 if adapter or year < 2023 else 1), math.inf, False


def _split(run: Run, params: float, capacity: float, tpu: bool, adapter: bool) -> dict[str, float]:
    """Parallel degrees, with defaults for what is missing and data parallelism for the rest."""
    n = run.num_devices or 1.0
    if tpu and run.tp is None and run.pp is None:
        return dict(tp=1.0, pp=1.0, cp=1.0, dp=n)
    tp, pp, cp = run.tp, run.pp, run.cp or 1.0
    if tp is None and "alpa" in run.framework.lower():
        tp = 1.0 if run.experts else min(n, 8.0)
    if tp is None:
        per_parameter = 2.2 if adapter else 16.0 if "fsdp" not in run.zero_stage_or_fsdp else 2.0
        need = params * per_parameter / (0.6 * capacity)
        node = min(run.gpus_per_node or 8.0, n)
        tp = 2.0 ** min(max(math.ceil(math.log2(max(need, 1.0))), 0), math.floor(math.log2(node)))
        if not adapter and pp is None and need > tp:
            pp = 2.0 ** min(math.ceil(math.log2(need / tp)), math.floor(math.log2(max(n / tp, 1.0))))
    pp = pp or 1.0
    if run.dp and run.tp and (not run.pp or tp * pp * cp * run.dp != n):
        fits = n / (tp * cp * run.dp)
        if run.pp is None and fits >= 1 and fits == int(fits):
            pp = fits
    dp = max(n / (tp * pp * cp), 1.0)
    return dict(tp=tp, pp=pp, cp=cp, dp=dp)


def plan_of(run: Run, model: Transformer, system: System, tpu: bool) -> dict:
    """Leaves of the plan of a run as plain numbers."""
    adapter, year = is_adapter(run), run.year or 2025
    params = float(_num_parameters(model))
    degrees = _split(run, params, float(system.chip.memory_capacity), tpu, adapter)
    batch = run.global_batch
    if not batch and run.tokens_per_s_per_device and run.step_time_s and run.num_devices:
        batch = run.tokens_per_s_per_device * run.num_devices * run.step_time_s / float(model.seq_len)
    if not batch:
        raise SkipRun("no global batch")
    if run.micro_batch:
        micro = run.micro_batch
    elif tpu:
        micro = batch / degrees["dp"]
    elif "torchtitan" in run.framework.lower() and degrees["pp"] > 1:
        micro = batch / degrees["dp"] / degrees["pp"]
    elif "alpa" in run.framework.lower():
        micro = 8.0
    elif year >= 2023:
        micro = 1.0
    else:
        micro = 4.0 if params < 9e9 else 2.0 if params < 50e9 else 1.0
    micro = min(micro, max(batch / degrees["dp"], 1e-6))
    stage, ranks, offload = _shard(run, adapter, tpu)
    text = run.recompute.lower()
    recompute: str | float = {"full": "full", "selective": "selective"}.get(text, "none")
    if not text and adapter and "automodel" in run.framework.lower() and (run.num_devices or 1) > 1:
        recompute = "full"
    if tpu and text == "selective":
        recompute = 0.5  # a named policy of MaxText saves some projections and repeats the rest: about half a forward pass
    experts = run.experts or 0
    spread = "alpa" in run.framework.lower()
    expert_parallel = run.ep or (math.gcd(int(experts), int(degrees["dp"])) if experts > 1 and spread else 1)
    fused = run.flash_attention if run.flash_attention is not None else year >= 2023
    known_off = run.framework.lower().startswith("megatron-deepspeed") and not run.flash_attention and "flashattention" not in run.framework.lower()
    narrow = run.source.startswith("mlcommons") and precision_of(run) in ("fp8", "mxfp8", "nvfp4")  # 8-bit weights, 16-bit gradients there
    serial = "communication overlap disabled" in run.notes
    return plan_numbers(
        global_batch_size=float(batch),
        micro_batch_size=float(micro),
        tensor_parallel=degrees["tp"],
        pipeline_parallel=degrees["pp"],
        data_parallel=1.0,
        context_parallel=degrees["cp"],
        virtual_stages=float(run.vpp or 1.0) if degrees["pp"] > 1 else 1.0,
        expert_parallel=float(expert_parallel),
        sequence_parallel=bool(run.sp) if run.sp is not None else year >= 2023 and degrees["tp"] > 1,
        context_mode="all-to-all" if "all-to-all" in run.notes else "ring",
        zero_stage=stage,
        shard_group=ranks,
        recompute=recompute,
        precision=precision_of(run),
        fused_attention=bool(fused) and not known_off,
        trainable=ADAPTER_SHARE if adapter else 1.0,
        weight_bytes=1.0 if narrow else 2.0,
        gradient_bytes=2.0 if narrow or (precision_of(run) == "fp16" and year < 2025) else 4.0,
        optimizer_bytes=OPTIMIZER_BYTES["adam"],
        optimizer_offload=float(offload),
        overlap_tensor=not serial,
        overlap_pipeline=not serial,
        overlap_gradient=not serial,
    ) | dict(data_parallel=degrees["dp"])  # fractional when printed degrees do not multiply to the device count


def _borrow(runs: Sequence[Run]) -> list[Run]:
    """Fills missing parallel degrees from rows of the same model, accelerator, device count and batch."""
    known: dict[tuple, Run] = {}
    key = lambda r: (r.model_name, r.accelerator, r.num_devices, r.global_batch)
    for run in runs:
        if run.tp and run.pp:
            known.setdefault(key(run), run)
    filled = []
    for run in runs:
        like = known.get(key(run)) if run.tp is None and run.pp is None else None
        if like:
            run = dataclasses.replace(run, tp=like.tp, pp=like.pp, cp=like.cp, dp=like.dp, vpp=like.vpp, micro_batch=run.micro_batch or like.micro_batch)
        filled.append(run)
    return filled


def prepare(runs: Sequence[Run], *, need_time: bool = True, like: Sequence[Run] = (), kinds: int = 3) -> Rows:
    """Models every run that can be modelled and counts the others by reason.

    Args:
      runs: measured runs, or wished ones.
      need_time: skip rows without a step time.
      like: further rows to borrow parallel degrees from.
      kinds: kinds of layer to pad models to.
    Returns:
      The rows.
    Raises:
      SkipRun: when no run can be modelled.
    """
    with jax.enable_x64(True):
        return _prepare(runs, need_time, like, kinds)


def _prepare(runs: Sequence[Run], need_time: bool, like: Sequence[Run], kinds: int) -> Rows:
    skipped: Counter = Counter()
    kept, models, systems, plans, labels = [], [], [], [], []
    filled = _borrow([*runs, *like])[: len(runs)]
    for run in filled:
        try:
            if run.family.lower().startswith(NOT_DECODERS):
                raise SkipRun(f"family {run.family.lower()} is not modelled")
            if need_time and not run.step_time_s:
                raise SkipRun("no step time")
            if "STEP TIME NOT SEPARABLE" in run.notes:
                raise SkipRun("step time not separable from other work")
            if not run.num_devices:
                raise SkipRun("no device count")
            seq_len = float(run.seq_len or (4096.0 if "maxtext" in run.framework.lower() else 2048.0))
            # fmt: off
            model = _model(run.model_name, run.layers, run.hidden, run.heads, run.kv_heads, run.ffn_hidden, run.vocab, run.gated_mlp,
                           run.experts, run.topk, run.params_b, seq_len)
            # fmt: on
            if model.blocks.count.shape[-1] > kinds:
                raise SkipRun(f"more than {kinds} kinds of layer")
            system, name = system_of(run)
            kind = generation(name)
            plans.append(plan_of(run, model, system, kind == "tpu"))
        except SkipRun as reason:
            skipped[str(reason)] += 1
            continue
        except ValueError as error:  # cells that are fine one by one and make no network or plan together, as 4096 channels in 33 heads
            skipped[f"no model or plan fits the row: {error}"] += 1
            continue
        kept.append(run)
        models.append(model)
        systems.append(system)
        labels.append((*identify(run), kind, name, features(run, kind)))
    if not kept:
        error = SkipRun(f"none of {len(runs)} rows can be modelled: " + "; ".join(f"{k} ({n})" for k, n in skipped.most_common(5)))
        error.reasons = skipped
        raise error
    unique = {id(m): m for m in models}
    padded = {key: jax.tree.map(np.asarray, _pad_kinds(m, kinds)) for key, m in unique.items()}
    stack_trees = lambda trees: jax.tree.map(lambda *leaves: np.stack(leaves).astype(float), *trees)
    stack, family, kind, name, shifts = zip(*labels)
    plan = Plan(**{key: np.stack([np.asarray(p[key], float) for p in plans]) for key in plans[0]})
    model, system = stack_trees([padded[id(m)] for m in models]), stack_trees(systems)
    return Rows(
        runs=tuple(kept),
        model=model,
        system=system,
        plan=jax.tree.map(np.asarray, plan),
        log_time=np.log(np.array([run.step_time_s or np.nan for run in kept])),
        weight=np.array([run.weight for run in kept]),
        stack=stack,
        family=family,
        generation=kind,
        accelerator=name,
        features=np.array(shifts),
        groups=tuple(run.group for run in kept),
        skipped=skipped,
    )
