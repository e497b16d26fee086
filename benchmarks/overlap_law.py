"""The law of lost processors against kernels of traces: `python benchmarks/overlap_law.py [--traces FOLDER]`; `tuning.py` prints it too.

How much longer matmul and convolution kernels take beside a collective than alone, paired by position in traces of an A100 (all-reduce of 8 channels) and a
V100 (all-to-all of 2 channels). Each kernel is left out of the fit once; beside the law stand one ratio for all kernels, the share of processors
without waves, and the law with the constants of the other GPU. Without the traces the A100 kernels come from the table below, which was read from its trace.
"""

import argparse
from pathlib import Path

import numpy as np

from diffperf.calibrate import calibrate_overlap
from diffperf.calibrate._overlap import _log_ratios
from diffperf.cost.contention import taken_processors
from diffperf.cost.contention._sm_loss import left_processors
from diffperf.io.traces import Slowdown, overlap_slowdowns, read_trace

GOAL = 0.05
FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
TRACES = {"A100": "hta_a100_ddp_nccl_metadata_rank0of2.json.gz", "V100": "hta_v100_rank1of2.json.gz"}
BLOCKS = (96, 100, 100, 128, 192, 200, 208, 216, 400, 512, 512)
RATIOS = (1.01, 1.61, 1.76, 0.99, 1.00, 1.30, 1.37, 1.33, 1.32, 1.13, 1.45)
ALONE_S = tuple(1e-6 * t for t in (51.5, 43.3, 75.6, 58.3, 82.5, 84.4, 36.0, 81.4, 92.5, 76.3, 68.2))
"""Matmul and convolution kernels >= 15 us of the A100 DDP trace of HolisticTraceAnalysis, 108 processors beside 8 channels of 544 threads: blocks, time
beside an all-reduce over time alone, time alone."""


def published_rows() -> list[Slowdown]:
    """The table above as rows."""
    return [Slowdown("gemm", blocks, 128, 1.0, alone, alone * ratio, 1, 1, "all_reduce", 8, 544, "position", 0, "A100", 108)
            for blocks, ratio, alone in zip(BLOCKS, RATIOS, ALONE_S)]  # fmt: skip


def read_rows(traces) -> dict[str, list[Slowdown]]:
    """Kernels that ran both alone and beside a collective, by GPU."""
    paths = {gpu: Path(traces) / name for gpu, name in TRACES.items()}
    found = {gpu: [row for trace in read_trace(path) for row in overlap_slowdowns(trace)] for gpu, path in paths.items() if path.exists()}
    return {"A100": published_rows()} | found


def measure(rows: dict[str, list[Slowdown]]) -> dict[str, dict]:
    """By GPU: number of kernels, fitted constants, and mean absolute errors of the log ratio."""
    fits = {gpu: calibrate_overlap(of) for gpu, of in rows.items()}
    result = {}
    for gpu, fit in fits.items():
        kernels = fit.used
        log = np.log([row.time_with_s / row.time_alone_s for row in kernels])
        error = lambda predicted, log=log: float(np.mean(np.abs(predicted - log)))
        errors = {"law of waves": fit.held_out, "one ratio": fit.constant, "share of processors": _share(fit, log), "no contention": error(0.0)}
        errors |= {f"law with constants of {other}": error(np.log(theirs.ratios(kernels))) for other, theirs in fits.items() if other != gpu}
        result[gpu] = dict(kernels=fit.rows, errors=errors, all_in=fit.error, least=_least(fit, log), floor=_floor(kernels, log),
                           processors_per_channel=float(fit.constants.processors_per_channel), evenness=float(fit.constants.evenness))  # fmt: skip
    return result


def _share(fit, log) -> float:
    """Error of `processors / (processors - taken)` for all kernels alike, its constant fitted without each kernel once."""
    channels, threads = np.array([(row.channels, row.channel_threads) for row in fit.used]).T
    taken = np.asarray(taken_processors(channels, threads, np.linspace(0, 4, 81)[:, None]))
    off = np.log(fit.processors / np.asarray(left_processors(fit.processors, taken))) - log
    best = [np.argmin(np.sum(np.delete(off, i, axis=1) ** 2, axis=1)) for i in range(len(log))]
    return float(np.mean(np.abs(off[best, np.arange(len(log))])))


def _least(fit, log) -> float:
    """Error of the law with the constants that suit these kernels best: what no fit of it can undercut."""
    constants = map(np.ravel, np.meshgrid(np.linspace(0.5, 2, 151), np.linspace(0, 1, 101)))
    return float(np.mean(np.abs(_log_ratios(fit.used, fit.processors, *constants) - log), axis=1).min())


def _floor(kernels, log) -> float:
    """Error that no law of blocks and channels alone can undercut: kernels alike in both differ."""
    groups: dict[tuple[int, int], list[float]] = {}
    for row, value in zip(kernels, log):
        groups.setdefault((row.blocks, row.channels), []).append(value)
    return float(sum(np.abs(np.array(group) - np.median(group)).sum() for group in groups.values()) / len(log))


def show(law: dict[str, dict]) -> None:
    print(f"Kernels beside a collective: mean error of the ratio, each kernel left out of the fit (goal {100 * GOAL:.0f}%)")
    for gpu, of in law.items():
        errors = ", ".join(f"{name} {100 * error:.1f}%" for name, error in of["errors"].items())
        print(f"  {gpu}, {of['kernels']} kernels: {errors}")
        print(f"    all in {100 * of['all_in']:.1f}%, least for any constants {100 * of['least']:.1f}%, for any law of blocks {100 * of['floor']:.1f}%; "
              f"{of['processors_per_channel']:.2f} processors per channel, evenness {of['evenness']:.2f}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", default=FOLDER)
    show(measure(read_rows(parser.parse_args().traces)))


if __name__ == "__main__":
    main()
