"""Fits diffperf to the published training runs and writes what ships with the package: the calibration, the fitted chips and stacks.

    python calibration/fit_published.py            # about a minute on two cores

Reads `calibration/published/training_runs.csv`. Writes `diffperf/calibrate/fitted/published.npz`, `diffperf/hardware/fitted/*.toml` and
`diffperf/stack/fitted/*.toml`, each with date, data and fit quality.
"""

from pathlib import Path

import numpy as np

from diffperf.calibrate._calibration import PUBLISHED, constants_with_interval
from diffperf.calibrate._constants import CONSTANTS, HARDWARE, NAMES, natural, unconstrained
from diffperf.calibrate._fit import log_time_and_gradient
from diffperf.calibrate._memory_fit import default_memory
from diffperf.calibrate._posterior import Z80
from diffperf.calibrate._published import calibrate_published
from diffperf.hardware import DATATYPES, write_fitted
from diffperf.hardware._catalog import FITTED_DIRECTORY as CHIPS
from diffperf.stack import FittedConstant, write_stack
from diffperf.stack._catalog import FITTED_DIRECTORY as STACKS

BITS = {"fp32": 16, "tf32": 16, "fp16": 16, "bf16": 16, "fp8": 8, "mxfp8": 8, "int8": 8, "nvfp4": 4}


def interval(mode, sd):
    """(value, low, high) in natural units of every constant."""
    return [np.asarray(natural(x)) for x in (mode, mode - Z80 * sd, mode + Z80 * sd)]


def write_chips(fit, rows, meta):
    for chip in sorted(set(rows.accelerator)):
        at = rows.accelerator.index(chip)
        used = [w > 0 and name == chip for name, w in zip(rows.accelerator, rows.weight, strict=True)]
        labels = dict(generation=rows.generation[at], chip=chip)
        mode, sd = constants_with_interval(fit, labels)
        value, low, high = interval(mode, sd)
        get = lambda name, a=value, b=low, c=high: tuple(float(x[NAMES.index(name)]) for x in (a, b, c))
        high_bits, low_bits, four_bits = (get(f"chip.{n}") for n in ("matmul_efficiency", "low_precision_ratio", "fp4_ratio"))
        eight = tuple(a * b for a, b in zip(high_bits, low_bits, strict=True))
        four = tuple(a * b for a, b in zip(eight, four_bits, strict=True))
        values = {f"chip.matmul_efficiency.{name}": {16: high_bits, 8: eight, 4: four}[BITS[name]] for name in DATATYPES}
        values |= {name: get(name) for name in ("chip.attention_efficiency", "chip.memory_efficiency", "scale_up.efficiency", "scale_out.efficiency")}
        write_fitted(chip, values, meta | dict(rows=sum(used)))


def write_stacks(fit, rows, calibration, meta, errors):
    families = dict(zip(rows.stack, rows.family, strict=True))
    wanted = {stack: dict(stack=stack, family=family) for stack, family in families.items() if stack}
    wanted |= {f"family-{family}": dict(family=family) for family in sorted(set(families.values()) - {""})}
    wanted["typical"] = {}
    priors = np.asarray(natural(np.array([unconstrained(c.name, c.mean) for c in CONSTANTS])))
    for name, labels in wanted.items():
        family = labels.get("family", "")
        value, low, high = interval(*constants_with_interval(fit, labels))
        constants = {n: FittedConstant(n, float(value[c]), float(low[c]), float(high[c]), float(priors[c])) for c, n in enumerate(NAMES) if n not in HARDWARE}
        start = default_memory(family, name)
        memory = calibration.memory_of(name, family)
        constants |= {n: FittedConstant(n, v, v, v, start[n]) for n, v in memory.items()}
        mask = np.array([s == name for s in rows.stack]) & (rows.weight > 0)
        about = meta | dict(name=name, family=family, rows=int(mask.sum()))
        if mask.any():
            about["quality"] = f"median error {100 * np.median(errors[mask]):.1f}% on its own runs, seen by the fit"
        write_stack(STACKS / f"{name}.toml", constants, about)


def main():
    calibration, fit, rows = calibrate_published(progress=lambda step, error: print(f"pass {step + 1}: rms log error {error:.4f}", flush=True))
    predicted, _ = log_time_and_gradient(rows, fit.constants(rows))
    errors = np.abs(np.exp(predicted - rows.log_time) - 1)
    use = rows.weight > 0
    quality = f"median error {100 * np.median(errors[use]):.1f}% on the runs it has seen; held-out errors are in docs/accuracy.md"
    meta = dict(date=calibration.meta["date"], data=calibration.meta["data"], quality=quality)
    for folder in (PUBLISHED.parent, CHIPS, STACKS):
        Path(folder).mkdir(exist_ok=True)
    calibration.save(PUBLISHED)
    write_chips(fit, rows, meta)
    write_stacks(fit, rows, calibration, meta, errors)
    print(quality, f"; {PUBLISHED.stat().st_size / 1e3:.0f} kB", sep="")


if __name__ == "__main__":
    main()
