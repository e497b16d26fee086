"""The words of a job, shared by `predict`, `explain`, `tune` and `sweep`: declared once, handed to a command as one `Job`."""

import functools
import inspect
import shlex
import types
from collections.abc import Callable
from typing import Annotated, Any

import typer

_PLAN, _SOFTWARE, _CLUSTER = "Parallel layout", "Arithmetic and software", "Cluster"


def _option(flag: str, text: str, panel: str, *more: str, **settings: Any) -> Any:
    return typer.Option(flag, *more, help=text, rich_help_panel=panel, show_default=settings.pop("show_default", False), **settings)


OPTIONS: dict[str, tuple[Any, Any]] = {
    # name of a field of Job -> (annotation, default)
    "model": (Annotated[str, typer.Argument(metavar="MODEL", help="A model of the catalog, or a Hugging Face config.json.", show_default=False)], ...),
    "system": (Annotated[str, typer.Argument(metavar="SYSTEM", help="A system of the catalog, or a TOML file.", show_default=False)], ...),
    "devices": (Annotated[int, _option("--devices", "Devices in the job.", _CLUSTER, "-n", min=1)], ...),
    "gbs": (Annotated[int, _option("--gbs", "Global batch: sequences per optimizer step.", _PLAN, "--global-batch", min=1)], ...),
    "mbs": (Annotated[float | None, _option("--mbs", "Sequences per micro-batch. Default 1.", _PLAN, "--micro-batch")], None),
    "seq": (Annotated[int | None, _option("--seq", "Positions per sequence. Default: the model's training context.", _PLAN, min=1)], None),
    "tp": (Annotated[int | None, _option("--tp", "Tensor-parallel degree. Default 1.", _PLAN)], None),
    "pp": (Annotated[int | None, _option("--pp", "Pipeline stages. Default 1.", _PLAN)], None),
    "dp": (Annotated[int | None, _option("--dp", "Data-parallel degree. Default: what the devices leave.", _PLAN)], None),
    "cp": (Annotated[int | None, _option("--cp", "Context-parallel degree. Default 1.", _PLAN)], None),
    "ep": (Annotated[int | None, _option("--ep", "Expert-parallel degree. Default 1.", _PLAN)], None),
    "vpp": (Annotated[int | None, _option("--vpp", "Model chunks per pipeline stage (interleaving). Default 1.", _PLAN)], None),
    "sp": (Annotated[bool | None, _option("--sp/--no-sp", "Sequence parallelism. Default: on with tensor parallelism.", _PLAN)], None),
    "cp_mode": (Annotated[str | None, _option("--cp-mode", "ring or all-to-all. Default ring.", _PLAN)], None),
    "schedule": (Annotated[str | None, _option("--schedule", "1f1b, zero-bubble or dualpipe. Default 1f1b.", _PLAN)], None),
    "zero": (Annotated[int | None, _option("--zero", "ZeRO stage 0-3; 3 is FSDP full shard. Default 1.", _PLAN)], None),
    "shard_group": (Annotated[int | None, _option("--shard-group", "Ranks that share one copy (hybrid sharding). Default: all.", _PLAN)], None),
    "recompute": (Annotated[str | None, _option("--recompute", "none, selective, full, or the part of the layers, as 0.5. Default none.", _PLAN)], None),
    "precision": (Annotated[str | None, _option("--precision", "Matmul operands: bf16, fp8, mxfp8, nvfp4, fp16, ... Default bf16.", _SOFTWARE)], None),
    "optimizer": (Annotated[str | None, _option("--optimizer", "adam, adam-8bit, adam-bf16, sgd-momentum, adafactor. Default adam.", _SOFTWARE)], None),
    "trainable": (Annotated[float | None, _option("--trainable", "Part of the weights trained; below 1 for adapters.", _SOFTWARE)], None),
    "flash": (Annotated[bool | None, _option("--flash/--no-flash", "Fused attention. Default on.", _SOFTWARE)], None),
    "overlap": (Annotated[bool | None, _option("--overlap/--no-overlap", "Let communication hide under compute. Default on.", _SOFTWARE)], None),
    "offload_optimizer": (Annotated[float | None, _option("--offload-optimizer", "Part of the optimizer states kept on the host.", _SOFTWARE)], None),
    "offload_activations": (Annotated[float | None, _option("--offload-activations", "Part of the activations kept on the host.", _SOFTWARE)], None),
    "stack": (Annotated[str, _option("--stack", "Software stack (see `diffperf show list`), or a TOML file.", _SOFTWARE, show_default=True)], "typical"),
    "nic_gbps": (Annotated[float | None, _option("--nic-gbps", "Network rate per device, Gbit/s in one direction.", _CLUSTER)], None),
    "domain": (Annotated[int | None, _option("--domain", "Devices of one scale-up domain (NVLink, ICI slice).", _CLUSTER)], None),
}


_OF_PLAN = {"tensor_parallel": "tp", "pipeline_parallel": "pp", "context_parallel": "cp", "expert_parallel": "ep", "virtual_stages": "vpp",
            "micro_batch_size": "mbs", "recompute": "recompute", "zero_stage": "zero", "sequence_parallel": "sp", "optimizer_offload": "offload_optimizer",
            "activation_offload": "offload_activations"}  # fmt: skip


class Job(types.SimpleNamespace):
    """What the user asked for; one attribute per key of `OPTIONS`, None where nothing was said."""

    def plan_words(self) -> dict[str, Any]:
        """Arguments of `make_plan` that the user gave, without the batch, and without degrees left to be derived."""
        words = {
            "micro_batch_size": self.mbs, "tensor_parallel": self.tp, "pipeline_parallel": self.pp, "data_parallel": self.dp,
            "context_parallel": self.cp, "expert_parallel": self.ep, "virtual_stages": self.vpp, "sequence_parallel": self.sp,
            "context_mode": self.cp_mode, "schedule": self.schedule, "zero_stage": self.zero, "shard_group": self.shard_group,
            "recompute": _share_or_word(self.recompute), "precision": self.precision, "optimizer": self.optimizer, "trainable": self.trainable,
            "fused_attention": self.flash, "optimizer_offload": self.offload_optimizer, "activation_offload": self.offload_activations,
            **dict.fromkeys(("overlap_gradient", "overlap_parameter", "overlap_tensor", "overlap_pipeline"), self.overlap),
        }  # fmt: skip
        return {name: value for name, value in words.items() if value is not None}

    def line(self, command: str, plan: dict[str, Any]) -> str:
        """What to type for `command` on this job with the layout `plan`, as `describe_plan` gives it; the data-parallel degree is what the devices leave."""
        values = vars(self) | {field: plan[name] for name, field in _OF_PLAN.items() if name in plan}
        usual = {"sp": values["tp"] > 1, "recompute": "none", "zero": 1, "stack": "typical"} | dict.fromkeys(("mbs", "tp", "pp", "cp", "ep", "vpp"), 1)
        words = ["diffperf", command, values.pop("model"), values.pop("system")]
        for name, value in values.items():
            if value is None or name in usual and value == usual[name]:
                continue
            option = OPTIONS[name][0].__metadata__[0]
            flags = next(text for text in (option.default, *option.param_decls) if str(text).startswith("--")).split("/")  # typer takes the first for a default
            words += [flags[not value]] if isinstance(value, bool) else [flags[0], str(value)]
        return shlex.join(words)


def with_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives `command(job, ...)` the options of a job in front of its own."""
    kind = inspect.Parameter.KEYWORD_ONLY
    own = list(inspect.signature(command).parameters.values())[1:]
    shared = [inspect.Parameter(name, kind, annotation=annotation, default=inspect.Parameter.empty if default is ... else default)
              for name, (annotation, default) in OPTIONS.items()]  # fmt: skip

    @functools.wraps(command)
    def run(**words: Any) -> Any:
        job = Job(**{name: words.pop(name) for name in OPTIONS})
        return command(job, **words)

    del run.__wrapped__  # typer would follow it to the signature of `command`
    setattr(run, "__signature__", inspect.Signature([*shared, *(parameter.replace(kind=kind) for parameter in own)]))  # noqa: B010, typer reads it
    run.__annotations__ = {}
    return run


def _share_or_word(text: str | None) -> str | float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
