"""Steps and pipelines of collectives in a training step: numbers by hand, edges, and what a step owes to the latency of its network."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.cost.collective import exchange_latency, fill_time, ring_latency, tree_latency
from diffperf.estimate._train import gradient_reduce_time, parameter_gather_time
from diffperf.hardware import load_system
from diffperf.parallel import make_plan
from diffperf.stack import load_stack
from diffperf.workload import transformer

US = 1e-6
H100 = eqx.tree_at(
    lambda s: (s.scale_up.latency, s.scale_out.latency), load_system("h100_sxm", fitted=False, num_devices=4096), (jnp.asarray(1 * US), jnp.asarray(6 * US))
)
SMALL = transformer(hidden=4096, layers=32, num_heads=32, vocab=32000, seq_len=2048)
STACK = load_stack("megatron-core")


JITTED = {fn: jax.jit(fn) for fn in (ring_latency, tree_latency, exchange_latency)}


@pytest.mark.parametrize(
    "latency, ranks, stride, microseconds",
    [
        (ring_latency, 8, 1, 7 * 1),  # one node: a step per peer
        (ring_latency, 32, 1, 28 * 1 + 3 * 6),  # 4 nodes: 31 steps, 3 of which cross nodes
        (ring_latency, 4, 8, 3 * 6),  # one rank per node: each step crosses
        (tree_latency, 32, 1, 2 * (7 * 1 + 2 * 6)),  # a chain in each node, a tree of 2 levels above, up and down
        (tree_latency, 16, 8, 2 * 4 * 6),
        (exchange_latency, 32, 1, 0.4 * 28 * 1 + 2 * 6),
        (ring_latency, 1, 1, 0),
        (tree_latency, 1, 8, 0),
        (exchange_latency, 1, 4, 0),
    ],
)
def test_steps_by_hand(latency, ranks, stride, microseconds):
    assert_allclose(JITTED[latency](H100, ranks, stride), microseconds * US, rtol=1e-6, atol=1e-13)


def test_torus_sends_both_ways_along_each_axis():
    """64 of 4096 chips of a TPU v4 pod span 1.5 axes of 16: half of a ring's extent each."""
    system = eqx.tree_at(lambda s: s.scale_up.latency, load_system("tpu_v4", fitted=False), jnp.asarray(1 * US))
    assert_allclose(ring_latency(system, 4096), 3 * 8 * US, rtol=1e-5)
    assert_allclose(ring_latency(system, 64), 1.5 * 8 * US, rtol=1e-5)


def test_filling_a_pipeline_saturates():
    """Free for no bytes and for no latency; grows with the message; never more than six latencies, and near that for large ones."""
    wire = jnp.geomspace(1e-7, 10.0, 30)
    fill = jax.vmap(lambda w: fill_time(w, 20 * US))(wire)
    assert fill_time(0.0, 20 * US) == 0 and fill_time(1.0, 0.0) == 0
    assert np.all(np.diff(fill) > 0) and np.all(fill < 6 * 20 * US)
    assert_allclose(fill[-1], 5.9 * 20 * US, rtol=1e-3)
    slope = jax.jit(jax.grad(lambda x: fill_time(x[0], x[1])))
    assert all(np.isfinite(slope(jnp.array(x))).all() for x in ([0.0, 1e-5], [1e-3, 0.0], [0.0, 0.0]))


def _slope(cost):
    return jax.jit(jax.grad(lambda t, plan: cost(SMALL, eqx.tree_at(lambda s: s.scale_out.latency, H100, t), plan, STACK)))


SLOPE = {cost: _slope(cost) for cost in (gradient_reduce_time, parameter_gather_time)}


def crossing(cost, plan):
    """Times that the latency between nodes is paid in a cost."""
    return SLOPE[cost](jnp.asarray(6 * US), plan)


def test_gradients_go_in_buckets():
    """6.7e9 parameters over 16 ranks of one node each: buckets of 40e6, an all-reduce up and down 4 levels, or 15 ring steps scattered and gathered."""
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 4 * 4096) + 2 * 32000 * 4096
    whole = make_plan(global_batch_size=16, tensor_parallel=8, data_parallel=16, zero_stage=0)
    split = make_plan(global_batch_size=16, tensor_parallel=8, data_parallel=16, zero_stage=1)
    buckets = parameters / 8 / 40e6
    assert_allclose(crossing(gradient_reduce_time, whole), buckets * 2 * 4, rtol=0.3)  # the width of the feed-forward part is a default
    assert_allclose(crossing(gradient_reduce_time, split) / crossing(gradient_reduce_time, whole), 2 * 15 / 8, rtol=1e-5)


def test_sharded_parameters_are_gathered_layer_by_layer():
    """Each of 32 layers is gathered twice and scattered once, over 15 steps between nodes; large messages also fill the pipeline, at most six times."""
    plan = make_plan(global_batch_size=16, tensor_parallel=8, data_parallel=16, zero_stage=3)
    steps = 32 * 3 * 15
    assert steps < crossing(parameter_gather_time, plan) < 7 * steps
    alone = make_plan(global_batch_size=1, tensor_parallel=8, zero_stage=3)
    assert crossing(parameter_gather_time, alone) == 0
