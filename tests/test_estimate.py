"""A training step: the parts add up, every number has a true gradient, transforms agree, and more resources never hurt."""

import pytest
from numpy.testing import assert_allclose

from diffperf.estimate import train_step
from diffperf.hardware import load_system
from diffperf.parallel import make_plan
from diffperf.workload import transformer

LLAMA_8B = dict(hidden=4096, layers=32, num_heads=32, num_kv_heads=8, ffn_hidden=14336, vocab=128256, seq_len=8192)


@pytest.mark.parametrize("c", [2, 4])
def test_context_parallel_all_to_all_sends_what_ulysses_sends(stack, c):
    """Jacobs et al. 2023 (arXiv:2309.14509, section 3.2): all-to-alls of q, k, v and output, 4 N h / P elements per rank, forward; a rank
    keeps 1 / P of what it sends. The backward pass sends as much again."""
    model = transformer(**{**LLAMA_8B, "num_kv_heads": 32})
    system = load_system("h100_sxm", fitted=False)
    plan = make_plan(global_batch_size=1, context_parallel=c, context_mode="all-to-all")
    nbytes = 2 * 2 * (4 * 8192 / c * 4096) * (1 - 1 / c)  # passes, bytes per element, elements, part that leaves
    seconds = 32 * nbytes / (system.scale_up.bandwidth * system.scale_up.efficiency)
    assert_allclose(train_step(model, system, plan, stack).breakdown.context, stack.context_exposed * seconds, rtol=1e-12)


@pytest.mark.parametrize("c", [2, 4])
def test_context_parallel_ring_sends_keys_and_values_and_their_gradients(stack, c):
    """Liu et al. 2023 (arXiv:2310.01889): in c - 1 steps each rank passes on the keys and values of s / c positions; the backward pass does so
    again, with their gradients beside."""
    model = transformer(**LLAMA_8B)
    system = load_system("h100_sxm", fitted=False)
    nbytes = 3 * (c - 1) * 2 * (8192 / c) * 2 * 8 * 128  # passes, steps, bytes per element, positions, keys and values of 8 heads of 128
    seconds = 32 * nbytes / (system.scale_up.bandwidth * system.scale_up.efficiency)
    plan = make_plan(global_batch_size=1, context_parallel=c)
    assert_allclose(train_step(model, system, plan, stack).breakdown.context, stack.context_exposed * seconds, rtol=1e-12)
