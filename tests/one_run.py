"""One run as rows of the fit, for tests."""

import jax

from diffperf.calibrate import prepare
from diffperf.io import Run

GPT = dict(model_name="mine", layers=24, hidden=2048, heads=16, vocab=50304, seq_len=2048)


def run(**cells):
    """A dense run on one node of A100, 2024, unless said otherwise."""
    base = dict(id="r", source="my cluster", year=2024, accelerator="A100-80GB-SXM", gpus_per_node=8, num_devices=8, global_batch=64, step_time_s=1.0)
    return Run(**(base | GPT | cells))


def one(**cells):
    return prepare((run(**cells),))


def plan(**cells):
    """The plan of one run, leaves as plain numbers."""
    return jax.tree.map(lambda x: x[0].item() if x.ndim == 1 else x[0], one(**cells).plan)
