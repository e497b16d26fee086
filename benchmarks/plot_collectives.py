"""Draws each collective with the shipped constants: bus bandwidth over size on one HTML page, and time over size as one small SVG each.

    python benchmarks/plot_collectives.py OUT.html [SYSTEM]       # or docs/images, for the SVGs of docs/collectives.md
"""

import sys
from pathlib import Path

import jax
import numpy as np
import plot_kernels
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diffperf.calibrate.collectives import constants_of, prior_of, setting_of
from diffperf.cost.collective import OPERATIONS, collective_time
from diffperf.hardware import load_system
from diffperf.io import bus_factor, write_atomic

SIZES = 2.0 ** np.arange(10, 34.25, 0.25)


def main() -> None:
    out, system = sys.argv[1], (sys.argv[2:] or ["h100_sxm"])[0]
    jax.config.update("jax_enable_x64", True)
    domain = float(load_system(system).scale_up.domain)
    pictures = {}
    figure = make_subplots(rows=(len(OPERATIONS) + 1) // 2, cols=2, subplot_titles=OPERATIONS)
    for k, operation in enumerate(OPERATIONS):
        for ranks, nodes in ((min(domain, 8.0), 1.0), (2 * min(domain, 8.0), 2.0), (16 * min(domain, 8.0), 16.0)):
            mean, _, present = prior_of(setting_of("", "IB", ranks, nodes, "NCCL 2.27.3", system))
            constants = constants_of(mean, present)
            times = jax.jit(jax.vmap(lambda s, o=operation, c=constants, n=ranks, p=ranks / nodes: collective_time(o, c, s, n, p)))(SIZES)
            rate = bus_factor(operation, ranks) * SIZES / np.asarray(times)
            link = float(load_system(system).scale_up.bandwidth)
            least = SIZES * bus_factor(operation, ranks) / link  # every byte of a rank over its own link, once
            label = f"{ranks:g} ranks, {nodes:g} nodes"
            pictures.setdefault(operation, []).append(plot_kernels.Curve(label, np.array([]), np.array([]), SIZES, np.asarray(times), least))
            line = go.Scatter(x=SIZES, y=rate, name=f"{ranks:g} ranks, {nodes:g} nodes", legendgroup=str(nodes), showlegend=k == 0)
            figure.add_trace(line, k // 2 + 1, k % 2 + 1)
    if Path(out).is_dir():
        for operation, curves in pictures.items():
            write_atomic(Path(out) / f"collectives_{operation}.svg", plot_kernels.draw(f"{operation} on {system}", "bytes", curves))
        return
    figure.update_xaxes(type="log", title_text="bytes")
    figure.update_yaxes(type="log", title_text="bus bandwidth, B/s")
    figure.update_layout(title=f"Collectives of {system}, expected", height=300 * ((len(OPERATIONS) + 1) // 2))
    write_atomic(out, figure.to_html(include_plotlyjs=True))


if __name__ == "__main__":
    main()
