"""Held-out accuracy of the calibrated collectives, beside plain alpha-beta, with the figure each row should reach.

    python benchmarks/accuracy_collectives.py DATA [--only PART ...] [--json FILE]      # PART: node, systems, network, kernels, health, speed

DATA holds `collectives/` and `nccl_tests_logs/`. Bands by bytes: S up to 256 KiB, M up to 16 MiB, L above; errors are |predicted / measured - 1| in per cent.
Single node: five systems, every third size held out in turn, and whole rank counts (4, 8). Systems: all rows of a system predicted from the others and its
datasheet. Network: 21 published logs, each predicted from the other 20 and from GPU, NVLink, NICs, network and library alone; then after two or half of its
own sizes. Nothing is tuned on a row that it is scored on; the form of the curve was chosen with these data in view, as cross-validation within them.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from diffperf._files import write_atomic
from diffperf.calibrate.collectives import _study as study
from diffperf.calibrate.collectives._design import Design, fit_design, predict_design
from diffperf.calibrate.collectives._engines import engine_rows
from diffperf.calibrate.collectives._kernels import EXPERT_LOG_TIME, custom_log_time, custom_prior, expert_prior, fit_kernel
from diffperf.calibrate.collectives._levels import network_design
from diffperf.calibrate.collectives._priors import prior_of
from diffperf.calibrate.collectives._ship import fit_node, generation_entry, network_entry, node_entry, node_setting, with_generations
from diffperf.cost.collective import collective_time
from diffperf.hardware import generation, load_system
from diffperf.io import bus_factor, read_collectives

BANDS = (("S", 0, 256 * 1024), ("M", 256 * 1024, 16 * 2**20), ("L", 16 * 2**20, np.inf))
FEW_WIDTH = {"latency": 0.8, "ramp": 0.8, "wire": 0.3}  # wider than between logs: a NIC may be missing, a network may be of a new kind
PARTS = ("node", "systems", "network", "kernels", "health", "speed")


def errors(predicted, measured):
    """Relative errors in per cent, from logarithms."""
    return 100 * np.abs(np.expm1(np.asarray(predicted) - np.asarray(measured)))


def by_band(error, nbytes):
    """Mean error in each band; None for an empty one."""
    inside = [(nbytes > low) & (nbytes <= high) for _, low, high in BANDS]
    return [float(np.nanmean(error[at])) if at.any() else None for at in inside]


def mean_bands(rows):
    return [float(np.mean([row[k] for row in rows if row[k] is not None])) for k in range(3)]


def alpha_beta(rows, train):
    """Log times of `alpha + steps hop + wire bytes / rate`, three numbers per operation, fitted to the rows in `train`."""
    out = np.zeros(len(rows))
    for kind in set(rows.kind):
        at = rows.kind == kind
        factor = np.array([bus_factor(kind.split("|")[0], n) for n in rows.ranks[at]])
        steps = (2 if "all_reduce" in kind else 1) * (rows.ranks[at] - 1)
        use, t = train[at], rows.log_time[at]
        predict = lambda p, steps=steps, wire=factor * rows.nbytes[at]: np.log(np.exp(p[0]) + np.exp(p[1]) * steps + wire / np.exp(p[2]))
        fit = least_squares(lambda p: (predict(p) - t)[use], [np.log(1e-5), np.log(1e-6), np.log(3e11)], loss="soft_l1", f_scale=0.05)  # noqa: B023
        out[at] = predict(fit.x)
    return out


def node_part(folder, out):
    tables = {system: study.node_rows(folder, system) for system in study.NODE_TABLES}
    entries, sizes, ranks, plain_sizes, plain_ranks = {}, [], [], [], []
    for system, rows in tables.items():
        order = {size: k for k, size in enumerate(sorted(set(rows.nbytes)))}
        third = np.array([order[size] % 3 for size in rows.nbytes])
        counts = [n for n in (4.0, 8.0) if n in rows.ranks]
        held = [third == k for k in range(3)] + [rows.ranks == n for n in counts]
        design, parameters, width = fit_node(system, rows, np.array([np.ones(len(rows)), *(1.0 - h for h in held)]))
        entries[system] = node_entry(design, parameters[0], width[0])
        error, plain = np.zeros(len(rows)), np.zeros(len(rows))
        for k, h in enumerate(held):
            e = errors(predict_design(rows, design, parameters[k + 1])[0], rows.log_time)
            b = errors(alpha_beta(rows, ~h), rows.log_time)
            if k < 3:
                error[h], plain[h] = e[h], b[h]
            else:
                ranks.append(by_band(e[h], rows.nbytes[h]))
                plain_ranks.append(by_band(b[h], rows.nbytes[h]))
                out["node"][f"{system}, {counts[k - 3]:g} ranks unseen"] = ranks[-1]
        sizes.append(by_band(error, rows.nbytes))
        plain_sizes.append(by_band(plain, rows.nbytes))
        out["node"][f"{system}, sizes"] = sizes[-1]
    table_row(out, "single node, unseen sizes, S / M / L", mean_bands(sizes), (4.5, 7, 3), mean_bands(plain_sizes))
    table_row(out, "single node, unseen rank counts", mean_bands(ranks), (6, 7.5, 4), mean_bands(plain_ranks))
    return tables, entries


def systems_part(tables, entries, out):
    kinds = {system: generation(system) for system in entries}
    same, across = [], []
    for system, rows in tables.items():
        for within in (True, False):
            others = [entries[s] for s in entries if s != system and (kinds[s] == kinds[system]) == within]
            if not others:
                continue
            entry = generation_entry(others)
            if not within:  # the protocol change and the switch belong to the generation, known from its start values
                entry = {key: value for key, value in entry.items() if not key.startswith(("bump", "nvls"))}
            fit = dict(systems={}, generations={kinds[system]: entry})
            mean, _, present = prior_of(node_setting(system), fit)
            present = present[None].copy()
            present[0, -5] = False  # timed in CUDA graphs: no floor
            design = Design(mean[None], present)
            design.add("source.wire", "source.wire", 1.0, [0])
            error = by_band(errors(predict_design(rows, design, np.zeros(1))[0], rows.log_time), rows.nbytes)
            (same if within else across).append(error)
            out["systems"][f"{system} from {'its generation' if within else 'other generations'}"] = error
    table_row(out, "unseen system, same generation", mean_bands(same), (6, 7, 4))
    table_row(out, "unseen system, other generation", mean_bands(across), (None, 15, 10))


def few_design(mean, present):
    """Five numbers of one log: latency, ramp and wire factors, and the shape of the ramp."""
    design = Design(mean[None], present[None])
    for leaf, width in FEW_WIDTH.items():
        design.add(leaf, f"source.{leaf}", width, [0])
    design.add("ramp_power", "network.ramp_power", 0.2, [0])
    design.add("ramp_half", "network.ramp_half", 0.5, [0])
    return design


def network_part(folder, entries, out):
    nodes = with_generations(dict(entries))
    logs = study.network_logs(study.published_logs(folder))
    rows, settings = study.log_rows(logs), [log.setting for log in logs]
    design = network_design(settings, lambda setting: prior_of(setting, nodes))
    weights = np.array([rows.weight * (rows.log != k) for k in range(len(logs))])
    modes = fit_design(rows, design, weights)
    zero, two, half, bands = [], [], [], []
    for k, log in enumerate(logs):
        at = np.flatnonzero(rows.log == k)
        own = rows.take(at)
        error = errors(predict_design(rows, design, modes.parameters[k])[0], rows.log_time)[at]
        zero.append(error.mean())
        bands.append(by_band(error, own.nbytes))
        out["network"][log.name] = dict(bands=bands[-1], mean=float(error.mean()))
        fit = nodes | network_entry(design, modes.parameters[k], modes.precision[k], settings)
        mean, _, present = prior_of(log.setting, fit)
        present = present.copy()
        present[-5] = False
        one = few_design(mean, present)
        alone = own.take(np.arange(len(own)))
        alone.log[:] = 0
        order = np.argsort(alone.nbytes)
        folds = []
        if len(own) >= 3:
            ends = np.isin(np.arange(len(own)), order[[0, -1]])
            folds.append(("ends", ends, ~ends))
        if len(own) >= 4:
            odd = np.isin(np.arange(len(own)), order[::2])
            folds += [("half", odd, ~odd), ("half", ~odd, odd)]
        halves = []
        for name, use, score in folds:
            mode = fit_design(alone, one, use.astype(float))
            mean_error = errors(predict_design(alone, one, mode.parameters)[0], alone.log_time)[score].mean()
            (two if name == "ends" else halves).append(mean_error)
        if halves:
            half.append(np.mean(halves))
            out["network"][log.name]["half"] = float(half[-1])
    over = int(np.sum(np.array(zero) > 20))
    table_row(out, "multi-node, leave one log out: median over logs", [np.median(zero)], (9,))
    table_row(out, "... mean over logs; logs above 20", [np.mean(zero), over], (None, 1))
    table_row(out, "... S / M / L", mean_bands(bands), (None, 20, None))
    table_row(out, "... after its smallest and largest size, median", [np.median(two)], (3.5,))
    table_row(out, "... after half of its sizes, mean over logs", [np.mean(half)], (4,))


def kernels_part(folder, out):
    """Each kernel of an engine, every third size (of all-reduce, up to where the engine hands over to the library) or token count held out in turn."""
    custom, expert = [], []
    for file in sorted((folder / "collectives").glob("aic_*.csv.gz")):
        rows = engine_rows(read_collectives(file))
        for k, kernel in enumerate(rows.kernels):
            at = np.flatnonzero(rows.kernel == k)
            if kernel.form == "custom":
                at = at[rows.inputs[at, 0] <= (4 if kernel.system.startswith("a100") else 8) * 2**20]
            if len(at) < 20 or kernel.system == "l40s" or "eager" in kernel.name:  # a sick host; timed with the launch
                continue
            at = at[np.linspace(0, len(at) - 1, min(len(at), 512)).round().astype(int)]
            inputs, log_time = rows.inputs[at], rows.log_time[at]
            own = (custom_log_time, custom_prior(float(load_system(kernel.system).scale_up.bandwidth)), 128)
            log_times, prior, block = own if kernel.form == "custom" else (EXPERT_LOG_TIME[kernel.form], expert_prior(), 512)
            columns = tuple(inputs.T[: 2 if kernel.form == "custom" else 6])
            order = {s: i for i, s in enumerate(sorted(set(inputs[:, 0])))}
            error = np.zeros(len(at))
            for fold in range(3):
                held = np.array([order[s] % 3 == fold for s in inputs[:, 0]])
                theta = fit_kernel(log_times, columns, np.exp(log_time), ~held, prior, block)
                error[held] = errors(log_times(theta, columns), log_time)[held]
            (custom if kernel.form == "custom" else expert).append(error.mean())
            out["custom" if kernel.form == "custom" else "expert"][f"{kernel.name}, {kernel.version} on {kernel.system}"] = float(error.mean())
    table_row(out, f"custom all-reduce, unseen sizes, median of {len(custom)} sets", [np.median(custom)], (5,))
    over = int(np.sum(np.array(expert) > 10))
    table_row(out, f"expert dispatch and combine, unseen token counts: median of {len(expert)} sets; sets above 10", [np.median(expert), over], (10, None))


def speed_part(out):
    from diffperf.calibrate.collectives._vector import constants_of

    mean, _, present = prior_of(node_setting("h100_sxm"))
    n = 1_000_000
    rng = np.random.default_rng(0)
    nbytes = jnp.asarray(2.0 ** rng.uniform(10, 33, n), jnp.float32)
    ranks = jnp.asarray(8.0 * 2.0 ** rng.integers(0, 8, n), jnp.float32)
    constants = constants_of(jnp.asarray(mean, jnp.float32), jnp.asarray(present))
    run = jax.jit(jax.vmap(lambda b, r: collective_time("all_reduce", constants, b, r, 8.0)))
    run(nbytes, ranks).block_until_ready()
    best = np.inf
    for _ in range(7):
        start = time.perf_counter()
        run(nbytes, ranks).block_until_ready()
        best = min(best, time.perf_counter() - start)
    start = time.process_time()
    run(nbytes, ranks).block_until_ready()
    spent = time.process_time() - start
    table_row(out, "all_reduce with choice under vmap, million per second", [n / best / 1e6], (5,), at_least=True)
    table_row(out, "... and per second of two idle cores, from processor time", [2 * n / spent / 1e6], (5,), at_least=True)


def health_part(folder, out):
    from collectives_health import study_health

    for label, value, reach in study_health(folder, out.setdefault("health", {})):
        table_row(out, label, value, reach)


def table_row(out, label, got, reach, baseline=None, at_least=False):
    out["table"].append(dict(what=label, got=[float(x) for x in got], reach=list(reach), alpha_beta=baseline, at_least=at_least))
    print(label, [round(float(x), 2) for x in got], reach, baseline and [round(x, 1) for x in baseline], flush=True)


def show(out):
    table = Table(title="Collectives, held out: mean error in per cent")
    for name in ("what", "diffperf", "reach", "alpha-beta"):
        table.add_column(name, justify="left" if name == "what" else "right")
    text = lambda values: " / ".join("-" if v is None else f"{v:.3g}" for v in values) if values else "-"
    for row in out["table"]:
        table.add_row(row["what"], text(row["got"]), text(row["reach"]), text(row["alpha_beta"]))
    Console(width=150).print(table)


def main(arguments=None):
    """Runs the parts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    out: dict = dict(table=[], node={}, systems={}, network={}, custom={}, expert={})
    entries, tables = None, None
    if {"node", "systems", "network"} & set(options.only):
        tables, entries = node_part(options.data, out)
    if "systems" in options.only:
        systems_part(tables, entries, out)
    if "network" in options.only:
        network_part(options.data, entries, out)
    if "kernels" in options.only:
        kernels_part(options.data, out)
    if "health" in options.only:
        health_part(options.data, out)
    if "speed" in options.only:
        speed_part(out)
    show(out)
    if options.json:
        write_atomic(str(options.json), json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
