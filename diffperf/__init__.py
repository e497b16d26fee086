"""diffperf: differentiable, calibrated performance models of machine-learning work on clusters.

The public names, loaded when first used, so that `import diffperf` stays quick.
"""

import importlib

_PUBLIC = {
    "calibrate": ("calibrate_runs", "load_calibration", "predict_step", "validate_runs"),
    "estimate": ("Estimate", "bottleneck", "elasticities", "train_step"),
    "hardware": ("Chip", "Host", "System", "Tier", "load_system", "system_names"),
    "io": ("read_runs",),
    "parallel": ("Plan", "PlanError", "check_plan", "make_plan"),
    "stack": ("Stack", "load_stack", "stack_names"),
    "tune": ("tune_plan",),
    "workload": ("Transformer", "from_huggingface", "load_model", "model_names", "transformer", "with_seq_len"),
}
_ROOM = {name: room for room, names in _PUBLIC.items() for name in names}
_ROOMS = ("calibrate", "cost", "estimate", "hardware", "io", "measure", "parallel", "report", "smooth", "stack", "sweep", "tune", "workload")

__all__ = sorted(_ROOM)


def __getattr__(name: str):
    if name in _ROOM:
        return getattr(importlib.import_module(f".{_ROOM[name]}", __name__), name)
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'diffperf' has no attribute {name!r}. Public names: {', '.join(__all__)}.")


def __dir__():
    return sorted({*__all__, *_ROOMS, *globals()})
