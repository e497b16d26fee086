"""Held-out accuracy of the kernel models, beside the plain roofline, with the figure each row should reach.

    python benchmarks/accuracy_kernels.py FOLDER [--only PART ...] [--every] [--json FILE] [--markdown FILE]      # PART: shapes, transfer, speed

FOLDER holds tables of measured kernels. Shapes: a quarter of the groups (whole (n, k) pairs, head shapes) held out by a hash of their names, or each
mixture-of-experts model in turn; the fit starts from the family's prior and sees the other rows of that set alone. Transfer: one GPU held out whole, predicted
from fits to the others and its datasheet, then refitted to 8, 32, 128 of its own rows, spread evenly over log time (mean of two draws). `--every`
also prints the sets that no goal names. About 15 minutes on two cores without `--every`. With `--family` or `--only`, FILE keeps what it holds of the rest.
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from accuracy_tables import percent, show
from rich.console import Console

from diffperf.calibrate._evaluate import error_summary
from diffperf.calibrate.kernels._fit import fit_kernels, predict_rows
from diffperf.calibrate.kernels._joint import adapt, fit_jointly
from diffperf.calibrate.kernels._sets import PlacedSet, place
from diffperf.calibrate.kernels._user import quarter
from diffperf.calibrate.kernels._validate import roofline
from diffperf.hardware import generation
from diffperf.io import read_kernels

PARTS = ("shapes", "transfer", "speed")
LEAST_ROWS = 100
MODELS = ("moe_ffn", "grouped_matmul")  # families whose groups are few: each is held out in turn


class Goal(NamedTuple):
    """A set, and the mean error in % it should reach."""

    family: str
    chip: str
    library: str
    datatype: str
    mean: float


GOALS = (
    Goal("matmul", "h100_sxm", "trtllm", "bf16", 3.8), Goal("matmul", "a100_sxm_80", "trtllm", "bf16", 6.2),
    Goal("matmul", "b200_sxm", "trtllm", "bf16", 6.3), Goal("matmul", "gb200_nvl72", "trtllm", "bf16", 6.2),
    Goal("matmul_quantised", "h100_sxm", "trtllm/fp8_block", "fp8", 5.5), Goal("matmul_quantised", "b200_sxm", "trtllm/fp8_block", "fp8", 4),
    Goal("matmul_quantised", "b200_sxm", "trtllm", "nvfp4", 4), Goal("matmul_quantised", "h100_sxm", "vllm", "fp8", 9),
    Goal("matmul_quantised", "b200_sxm", "vllm", "fp8", 11), Goal("matmul_quantised", "a100_sxm_80", "trtllm", "int8", 9),
    Goal("attention_prefill", "h100_sxm", "vllm/vllm_flash_attn_fa3", "bf16", 6), Goal("attention_prefill", "a100_sxm_80", "trtllm/torch_flow", "bf16", 4.5),
    Goal("attention_prefill", "b200_sxm", "trtllm/torch_flow", "bf16", 8.5), Goal("attention_decode", "h100_sxm", "vllm/vllm_flash_attn_fa3", "bf16", 6),
    Goal("attention_decode", "b200_sxm", "vllm/vllm_flashinfer", "bf16", 6), Goal("attention_decode", "b200_sxm", "trtllm/torch_flow", "bf16", 6),
    Goal("attention_decode", "a100_sxm_80", "vllm/vllm_flash_attn", "bf16", 11),
    Goal("moe_ffn", "b200_sxm", "sglang/trtllm", "bf16", 10), Goal("moe_ffn", "b200_sxm", "sglang/trtllm", "fp8", 13),
    Goal("moe_ffn", "h100_sxm", "sglang/triton", "bf16", 25),
)  # fmt: skip
"""Mean errors that the project holds itself to. `library` is the beginning of a set's library."""
TRANSFER = (
    ("matmul", ("trtllm", "vllm"), "bf16", {"h100_sxm": (8.5, 6, 5), "a100_sxm_80": (10.5, 8.5, 7.5), "b200_sxm": (12, 9, 8)}),
    ("attention_prefill", ("vllm",), "bf16", {"h100_sxm": (15, 10, None), "a100_sxm_80": (15, 10, None), "b200_sxm": (15, 10, None)}),
    ("attention_decode", ("vllm",), "bf16", {"h100_sxm": (15, 10, None), "a100_sxm_80": (15, 10, None), "b200_sxm": (15, 10, None)}),
)
"""Family, libraries, datatype, and per chip the goals from its datasheet alone and from 32 and 128 rows. Chips of the same generation are held out with it."""
COUNTS = (0, 8, 32, 128)


def held_out(one: PlacedSet, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Log times of the rows by the closed form and with correction, each from a fit that has not seen its group; NaN where no group was held out."""
    s, family = one.kernels, one.rows.family
    form, corrected = np.full((2, len(s)), np.nan)
    names = list(dict.fromkeys(s.group))
    turns = [s.group == name for name in names] if family.name in MODELS and 1 < len(names) <= 12 else [quarter(s.group)]
    for test in turns:
        if test.any() and not test.all():
            part, unseen = s.take(~test), s.take(test)
            fit = fit_kernels(family, part.shape, part.device, part.log_time, starts=3, most=most)
            form[test] = predict_rows(fit, unseen.shape, s.device)
            fit = fit_kernels(family, part.shape, part.device, part.log_time, correction=True, start=fit, most=most)
            corrected[test] = predict_rows(fit, unseen.shape, s.device)
    return form, corrected


def goal_of(one: PlacedSet) -> float | None:
    family, key = one.rows.family.name, one.kernels
    for goal in GOALS:
        if (goal.family, goal.chip, goal.datatype) == (family, key.chip, key.datatype) and key.library.split("/")[0] == goal.library.split("/")[0]:
            if key.library.startswith(goal.library):
                return goal.mean
    if family == "streaming":
        return 10 if "quantize" in key.library and key.chip in ("h100_sxm", "b200_sxm") else None
    if family in ("mla_prefill", "mla_decode", "mla_bmm", "encoder_attention"):
        return 10 if key.chip in ("h100_sxm", "b200_sxm") else None
    return 10 if key.library.split("/")[0] in ("torch", "deepbench") or (key.library, key.chip) in (("xla", "h100_sxm"), ("xla", "mi300x")) else None


def shapes(placed: list[PlacedSet], every: bool, say) -> list[dict]:
    """One row per set: errors on groups not seen."""
    out = []
    for one in placed:
        goal, s = goal_of(one), one.kernels
        if len(s) < LEAST_ROWS or (goal is None and not every):
            continue
        start, base = time.perf_counter(), roofline(one)
        form, corrected = held_out(one, 3072 if one.rows.family.name == "matmul" else 1536)
        scored = np.isfinite(form)
        if not scored.any():
            continue
        score = lambda predicted, scored=scored, measured=s.log_time: error_summary(predicted[scored], measured[scored])
        row = dict(family=one.rows.family.name, chip=s.chip, library=s.library, datatype=s.datatype, rows=len(s), n=int(scored.sum()), goal=goal)
        out.append(row | dict(form=score(form), corrected=score(corrected), roofline=score(base)))
        errors = " / ".join(percent(out[-1][name]["mean"]) for name in ("form", "corrected"))
        say(f"{row['family']} {s.chip} {s.library} {s.datatype}: {errors}, {time.perf_counter() - start:.0f} s")
    return out


def transfer(placed: list[PlacedSet], say) -> list[dict]:
    """A GPU held out whole, with all of its generation, then with only itself held out; from 0 to 128 of its rows."""
    out = []
    for family, libraries, datatype, goals in TRANSFER:
        sets = [one for one in placed if one.rows.family.name == family and one.kernels.datatype == datatype and one.kernels.library.split("/")[0] in libraries]
        sets = [one for one in sets if "/fp8" not in one.kernels.library and "/wide" not in one.kernels.library]
        thin = lambda s: s.take(np.random.default_rng(0).permutation(len(s))[:768])
        fitted = [thin(one.kernels) for one in sets]
        for chip, goal in goals.items():
            mine = [one for library in libraries for one in sets if one.kernels.chip == chip and one.kernels.library.split("/")[0] == library]
            if not mine:
                continue
            target = mine[0]
            s, test = target.kernels, quarter(target.kernels.group)
            for alone in (True, False):
                known = [k for k in fitted if (generation(k.chip) != generation(chip) if alone else k.chip != chip)]
                if not alone and len(known) == len([k for k in fitted if generation(k.chip) != generation(chip)]):
                    continue
                _, shared = fit_jointly(target.rows.family, known, rounds=2)
                pool = np.flatnonzero(~test)
                pool = pool[np.argsort(s.log_time[pool])]
                errors = {}
                for count in COUNTS:
                    scores = []
                    for seed in range(2 if count else 1):
                        offset = np.random.default_rng(seed).random(count)
                        picked = pool[((np.arange(count) + offset) * len(pool) / max(count, 1)).astype(int)]
                        predicted = predict_rows(adapt(shared, s, picked), s.shape, s.device)
                        scores.append(error_summary(predicted[test], s.log_time[test])["mean"])
                    errors[count] = float(np.mean(scores))
                others = "no chip of its generation" if alone else "its generation too"
                out.append(dict(family=family, chip=chip, library=s.library, others=others, errors=errors, goal=goal if alone else None))
                say(f"transfer {family} {chip}: {errors}")
    return out


def speed() -> dict:
    """Matmul times per second under vmap, correction on, float32."""
    from diffperf.cost.kernel import MatmulShape, device_of, load_library
    from diffperf.hardware import load_system

    library, device = load_library("matmul", "h100_sxm", library="trtllm"), device_of(load_system("h100_sxm").chip, "bf16")
    count = 1 << 19
    sizes = np.exp(np.random.default_rng(0).uniform(2, 10, (3, count))).astype(np.float32)
    run = jax.jit(jax.vmap(lambda m, n, k: library.time(MatmulShape(m, n, k), device)))
    start = time.perf_counter()
    compiled = run.lower(*sizes).compile()
    compile_s = time.perf_counter() - start
    best = min(_timed(compiled, sizes) for _ in range(5))
    plain = jax.jit(jax.vmap(lambda m, n, k: jnp.maximum(2 * m * n * k / device.peak, 2 * (m * k + k * n + m * n) / device.bandwidth))).lower(*sizes).compile()
    return dict(per_second=count / best, compile_s=compile_s, roofline_per_second=count / min(_timed(plain, sizes) for _ in range(5)))


def _timed(compiled, sizes) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*sizes))
    return time.perf_counter() - start


def tables(result: dict) -> list[tuple[str, list[str], list[list[str]]]]:
    out = []
    three = lambda e: f"{percent(e['mean'])} / {percent(e['median'])} / {percent(e['p90'])}"
    if "shapes" in result:
        head = ["kernels", "chip", "library", "datatype", "scored", "roofline", "closed form", "with correction", "bias", "goal"]
        body = [
            [r["family"], r["chip"], r["library"], r["datatype"], str(r["n"]), percent(r["roofline"]["mean"]), three(r["form"]), three(r["corrected"]),
             percent(r["corrected"]["bias"]), "-" if r["goal"] is None else f"{r['goal']:g}"]
            for r in result["shapes"]
        ]  # fmt: skip
        out.append(("Kernels of shapes not seen; mean / median / p90 of the error in %", head, body))
    if "transfer" in result:
        head = ["kernels", "GPU held out", "library", "fitted to", *(f"{c} rows" for c in COUNTS), "goal at 0 / 32 / 128"]
        body = [
            [r["family"], r["chip"], r["library"], r["others"], *(percent(r["errors"][c]) for c in COUNTS),
             "-" if r["goal"] is None else " / ".join("-" if g is None else f"{g:g}" for g in r["goal"])]
            for r in result["transfer"]
        ]  # fmt: skip
        out.append(("A GPU held out whole; mean error in % from its datasheet and so many of its own rows", head, body))
    if "speed" in result:
        s = result["speed"]
        body = [[f"{s['per_second'] / 1e6:.2f}", f"{s['roofline_per_second'] / s['per_second']:.0f}", f"{s['compile_s']:.1f}", "2"]]
        out.append(("Matmul kernels under vmap, correction on", ["million / s", "times slower than a roofline", "compile s", "goal, million / s"], body))
    return out


def merged(before: dict, part: str, families: list[str] | None, measured: list[dict]) -> list[dict]:
    """Rows measured now, and where that was for some families alone, those of an earlier run for the others, in its order."""
    if families is None:
        return measured
    earlier = before.get(part, [])
    rows = [row for row in earlier if row["family"] not in families]
    rows = [row | {"errors": {int(count): error for count, error in row["errors"].items()}} if "errors" in row else row for row in rows]
    order = list(dict.fromkeys(row["family"] for row in earlier))
    return sorted(rows + measured, key=lambda row: order.index(row["family"]) if row["family"] in order else len(order))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--family", nargs="+", help="only these families of kernels")
    parser.add_argument("--every", action="store_true", help="also sets without a goal")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    console = Console(width=200)
    say = lambda text: console.print(f"[dim]{text}[/dim]")
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    result: dict = {}
    if set(options.only) & {"shapes", "transfer"}:
        table = read_kernels(sorted(str(p) for p in options.folder.iterdir() if p.name.endswith((".csv", ".csv.gz", ".parquet"))))
        placed, skipped = place(table)
        result |= dict(n_rows=len(table), n_used=sum(len(one.kernels) for one in placed), skipped=dict(skipped.most_common()))
        placed = [one for one in placed if options.family is None or one.rows.family.name in options.family]
        if "shapes" in options.only:
            result["shapes"] = merged(before, "shapes", options.family, shapes(placed, options.every, say))
        if "transfer" in options.only:
            result["transfer"] = merged(before, "transfer", options.family, transfer(placed, say))
    if "speed" in options.only:
        result["speed"] = speed()
    result = before | result
    show(tables(result), result, options, console)


if __name__ == "__main__":
    main()
