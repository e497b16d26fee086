"""The event view: sequences of primitives, longest paths, closed forms, and LogGOPS messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from diffperf.cost.collective import (
    EVENT_COLLECTIVES,
    PRIMITIVES,
    TABLES,
    LogGops,
    chain_time,
    chunk_sizes,
    collective_events,
    event_time,
    linear_costs,
    loggops,
    loggops_rounds,
    loggops_time,
    longest_path,
    measured_costs,
    message_time,
    primitive_times,
)
from diffperf.cost.collective._events import tree_parents

KIB, MIB = 1024, 2**20
NANO = 1e-9
times_of = jax.jit(primitive_times)
sizes_of = jax.jit(chunk_sizes, static_argnums=2)
FAR = dict(intra_latency=1e-6, inter_latency=5e-6, inter_bandwidth=12e9)


def event_time_of(graph, costs, sizes):
    return jax.jit(lambda *numbers: event_time(graph, *numbers)[0])(costs, sizes)


def by_hand(graph, costs, sizes):
    """Longest path over the graph in plain Python, task by task: the independent value."""
    table = np.asarray(times_of(costs, sizes))
    links = [0.0, float(costs.intra_latency), float(costs.inter_latency)]
    depth, width = graph.primitive.shape
    finish = [0.0] * (depth * width)
    for i in range(depth):
        for j in range(width):
            if graph.valid[i, j]:
                waits = [finish[b] + links[k] for b, k in zip(graph.before[i, j], graph.link[i, j], strict=True) if b < depth * width]
                finish[i * width + j] = max(waits, default=0.0) + table[graph.primitive[i, j], graph.chunk[i, j]]
    return max(finish)


def programme(graph, rank, channel=0):
    """Primitives of a rank, without the NIC's."""
    mask = graph.valid & (graph.rank == rank) & (graph.channel == channel)
    return [PRIMITIVES[p] for p in graph.primitive[mask] if PRIMITIVES[p] != "transfer"]


@pytest.mark.parametrize(
    "collective, expected",
    [
        ("all_reduce", ["send", "recvReduceSend", "recvReduceSend", "recvReduceCopySend", "recvCopySend", "recvCopySend", "recv"]),
        ("all_gather", ["send", "recvCopySend", "recvCopySend", "recv"]),
        ("reduce_scatter", ["send", "recvReduceSend", "recvReduceSend", "recvReduceCopy"]),
    ],
)
def test_rings_run_nccls_sequence(collective, expected):
    """2k - 1 primitives for an all-reduce of k ranks, k for the others; once per loop."""
    graph = collective_events(collective, 4, channels=2, chunks=3)
    for rank in range(4):
        assert programme(graph, rank, channel=1) == 3 * expected
    assert collective_events("all_reduce", 2).primitive.shape == (3, 2)


def test_chains_run_nccls_sequence():
    graph = collective_events("broadcast", 4, chunks=2)
    assert [programme(graph, rank) for rank in range(4)] == [["send"] * 2, ["recvCopySend"] * 2, ["recvCopySend"] * 2, ["recv"] * 2]
    graph = collective_events("reduce", 3)
    assert [programme(graph, rank) for rank in range(3)] == [["send"], ["recvReduceSend"], ["recvReduceCopy"]]


def test_trees_go_up_and_down():
    graph = collective_events("all_reduce", 8, 4, channels=2, algorithm="tree")
    names = [sorted(programme(graph, rank)) for rank in range(8)]
    assert names[0] == ["recvReduceCopySend"] and names[1] == ["recv", "send"] and names[4] == ["recvCopySend", "recvReduceSend"]
    for channel in (0, 1):
        everything = [p for rank in range(8) for p in programme(graph, rank, channel)]
        assert everything.count("recvReduceCopySend") == 1 and len(everything) == 2 * 8 - 1


@given(nodes=st.integers(2, 200))
@settings(deadline=None, max_examples=40)
def test_two_trees_share_the_work(nodes):
    """Each is one tree with at most two children per node and logarithmic depth; no node passes data on in both, but for one or two."""
    inner = []
    for mirrored in (False, True):
        parents = tree_parents(nodes, mirrored)
        assert parents.count(-1) == 1 and max(parents.count(node) for node in range(nodes)) <= 2
        for node in range(nodes):
            steps = 0
            while parents[node] >= 0:
                node, steps = parents[node], steps + 1
            assert steps <= np.ceil(np.log2(nodes)) + 1
        inner.append({parent for parent in parents if parent >= 0})
    assert len(inner[0] & inner[1]) <= 1


def test_messages_of_atlahs():
    """AI set, 1 MiB: 200 + 3700 + 41943 + 5 + 200 ns; HPC set, 64 KiB: 8000 + 3000 + 11796 + 0 + 8000 ns."""
    assert_allclose(message_time(loggops("ai"), MIB, clock=NANO), 46048 * NANO, rtol=1e-12)
    assert_allclose(message_time(loggops("hpc"), 64 * KIB, clock=NANO), 30796 * NANO, rtol=1e-12)
    assert_allclose(message_time(loggops("hpc"), 64 * KIB), (8000 + 3000 + 65535 * 0.18 + 8000) * NANO, rtol=1e-12)


@pytest.mark.parametrize("name", ["ai", "hpc"])
def test_ring_of_messages(name):
    """Ring of n ranks: n - 1 messages one after the other, twice with reductions in the first half for an all-reduce."""
    one = float(message_time(loggops(name), MIB))
    assert_allclose(loggops_time(loggops(name), loggops_rounds("all_gather", 8), MIB)[0], 7 * one, rtol=1e-12)
    assert_allclose(loggops_time(loggops(name), loggops_rounds("all_reduce", 8), MIB, reduce_time=1e-5)[0], 14 * one + 7e-5, rtol=1e-12)


def test_chain_of_messages():
    """Eager: a sender goes on while the message travels, so each further chunk costs the slower of the NIC and the CPU, not a whole message."""
    network = LogGops(1e-6, 1e-7, 0.0, 1e-9, 0.0, 1e9)
    first = float(loggops_time(network, loggops_rounds("broadcast", 4, 1), 1001.0)[0])
    assert_allclose(first, 3 * (2e-7 + 1e-6 + 1e-6), rtol=1e-12)
    two = [float(loggops_time(network, loggops_rounds("broadcast", 2, chunks), 1001.0)[0]) for chunks in (10, 11)]
    assert_allclose(two[1] - two[0], 1e-6, rtol=1e-6)  # 1000 bytes on the NIC
    rendezvous = LogGops(1e-6, 1e-7, 0.0, 1e-9, 0.0, 0.0)
    assert_allclose(loggops_time(rendezvous, loggops_rounds("broadcast", 2, 10), 1001.0)[0], 10 * (2e-7 + 2e-6), rtol=1e-12)


def test_all_to_all_of_messages_takes_a_round_for_each_peer():
    one = float(message_time(loggops("ai"), 1e5))
    assert_allclose(loggops_time(loggops("ai"), loggops_rounds("all_to_all", 5), 1e5)[0], 4 * one, rtol=1e-12)


def test_loggops_gradients():
    numbers = jnp.array([3e-6, 2e-7, 5e-9, 4e-11, 1e-12])
    rounds = loggops_rounds("all_reduce", 4)
    time = jax.jit(lambda x: loggops_time(LogGops(*(numbers * jnp.exp(x[:5])), 0.0), rounds, 1e5 * jnp.exp(x[5]), reduce_time=1e-6)[0] * 1e6)
    step = 1e-5 * jnp.eye(6)
    numeric = [(time(h) - time(-h)) / 2e-5 for h in step]
    assert_allclose(jax.grad(time)(jnp.zeros(6)), numeric, rtol=1e-6)
    assert np.all(np.array(numeric) > 0)


@pytest.mark.parametrize(
    "collective, nodes, algorithm", [("all_reduce", 2, "ring"), ("broadcast", 2, "ring"), ("all_to_all", 2, "ring"), ("all_reduce", 4, "tree")]
)
def test_longest_path_is_the_one_found_by_hand(collective, nodes, algorithm):
    graph = collective_events(collective, 8, nodes, channels=1, chunks=3, algorithm=algorithm)
    sizes = jnp.array([65536.0, 65536.0, 20000.0])
    for table in ("clariden Simple", "clariden LL"):
        costs = measured_costs(table, **FAR)
        assert_allclose(event_time_of(graph, costs, sizes), by_hand(graph, costs, sizes), rtol=1e-12)


@pytest.mark.parametrize("collective, algorithm", [*((c, "ring") for c in EVENT_COLLECTIVES), ("all_reduce", "tree")])
def test_closed_form_agrees(collective, algorithm):
    """On one node to rounding, but 2% for exchanges; with several nodes within 5%, trees 6%. Short last chunk included."""
    worst = {1: 0.0, 2: 0.0}
    costs = measured_costs("clariden Simple", **FAR)
    shapes = [(2, 1), (2, 2)] if collective == "send_recv" else [(8, 1), (8, 2), (6, 3)]
    closed = jax.jit(chain_time, static_argnums=(0, 1, 4, 5))
    for ranks, nodes in shapes:
        for chunks in (1, 4):
            graph = collective_events(collective, ranks, nodes, 1, chunks, algorithm)
            for size in (2 * KIB, 64 * KIB, MIB):
                sizes = sizes_of(size * (chunks - 0.4), size, chunks)
                error = abs(float(closed(collective, ranks, costs, sizes, nodes, algorithm)) / by_hand(graph, costs, sizes) - 1)
                worst[min(nodes, 2)] = max(worst[min(nodes, 2)], error)
    assert worst[1] < (0.02 if collective in ("all_to_all", "send_recv") else 1e-9)
    assert worst[2] < (0.06 if algorithm == "tree" else 0.05)


def test_loops_of_a_ring_do_not_overlap_but_chunks_of_a_chain_do():
    """Loop time times loops; fill and then the slowest stage per chunk."""
    costs = linear_costs(1e-6, 20e9)
    one = 1e-6 + MIB / 20e9
    ring, chain = (float(event_time_of(collective_events(c, 4, chunks=5), costs, jnp.full(5, MIB))) for c in ("all_reduce", "broadcast"))
    assert_allclose(ring, 5 * 7 * one, rtol=1e-12)
    assert_allclose(chain, (4 + 5 - 1) * one, rtol=1e-12)


def test_gradient_is_the_critical_path():
    graph = collective_events("broadcast", 5, chunks=6)
    durations = jnp.asarray(np.random.default_rng(0).uniform(1, 2, graph.primitive.shape))
    length, slope = jax.jit(jax.value_and_grad(lambda d: longest_path(graph, d, jnp.zeros(3))[0]))(durations)
    assert set(np.unique(slope)) == {0.0, 1.0} and slope.sum() == 5 + 6 - 1
    assert_allclose(jnp.sum(slope * durations), length)


def test_gradients_in_costs_and_chunk():
    """In a start and a bandwidth of each primitive, both latencies, the NIC's rate, the bytes and the chunk, by finite differences."""
    graph = collective_events("all_reduce", 4, 2, chunks=3, algorithm="tree")
    start, rate = jnp.linspace(1e-6, 2e-6, 8), jnp.linspace(20e9, 40e9, 8)

    @jax.jit
    def time(x):
        costs = linear_costs(start * jnp.exp(x[:8]), rate * jnp.exp(x[8:16]), 1e-6 * jnp.exp(x[16]), 5e-6 * jnp.exp(x[17]), 12e9 * jnp.exp(x[18]))
        sizes = chunk_sizes(1.3e6 * jnp.exp(x[19]), 5e5 * jnp.exp(x[20]), 3)
        return event_time(graph, costs, sizes)[0] * 1e6

    step = 1e-5 * jnp.eye(21)
    many = jax.jit(jax.vmap(time))
    slopes = jax.grad(time)(jnp.zeros(21))
    assert_allclose(slopes, (many(step) - many(-step)) / 2e-5, atol=1e-6)
    assert np.all(slopes[jnp.array([17, 19])] > 0) and slopes[18] < 0 and slopes[20] != 0


@given(size=st.floats(512, 1e7), factor=st.floats(1.0, 10), faster=st.floats(1.0, 10))
@settings(deadline=None, max_examples=25)
def test_monotone_in_bytes_and_bandwidth(size, factor, faster):
    time = _all_reduce_time()
    base = float(time(size, 1.0))
    assert time(size * factor, 1.0) >= base * (1 - 1e-12) and time(size, faster) <= base * (1 + 1e-12)


@functools.cache
def _all_reduce_time():
    graph = collective_events("all_reduce", 4, 2)
    return jax.jit(lambda size, speed: event_time(graph, linear_costs(1e-6, 20e9 * speed, 1e-6, 5e-6, 12e9 * speed), jnp.array([size]))[0])


def test_relaxed_path_errs_high():
    graph, costs, sizes = collective_events("broadcast", 3, chunks=2), linear_costs(1e-6, 20e9), jnp.full(2, 1e5)
    time = jax.jit(lambda temperature: event_time(graph, costs, sizes, temperature)[0])
    exact, warm, cold = (float(time(temperature)) for temperature in (0.0, 0.2, 1e-3))
    assert exact < warm < 2 * exact
    assert_allclose(cold, exact, rtol=1e-2)


def test_straight_lines_fit_the_tables_at_large_sizes():
    """32 KiB to 1 MiB of the GH200 tables with Simple: slopes of 21.5, 28.1, 45.1, 38.2 and 21.9 us per MiB."""
    sizes = 2.0 ** np.arange(15, 21)
    times = np.asarray(primitive_times(measured_costs("clariden Simple"), sizes))[:5] * 1e6
    slopes = [np.polyfit(sizes / MIB, row, 1)[0] for row in times]
    assert_allclose(slopes, [21.5, 28.1, 45.1, 38.2, 21.9], rtol=0.06)


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_read_between_and_beyond_their_knots(table):
    costs = measured_costs(table)
    knots = np.asarray(costs.sizes)
    got = np.asarray(times_of(costs, knots))
    rows = [PRIMITIVES.index(name) for name in ("send", "recvReduceSend", "recv")]
    assert_allclose(got[rows], np.asarray(costs.times)[rows], rtol=1e-12)
    middle = np.asarray(times_of(costs, (knots[1:] + knots[:-1]) / 2))
    assert_allclose(middle[rows], (got[rows, 1:] + got[rows, :-1]) / 2, rtol=1e-12)
    edges = np.asarray(times_of(costs, jnp.array([0.0, 1.0, 2 * knots[-1] - knots[-2]])))
    assert_allclose(edges[rows], np.stack([0 * got[rows, 0], got[rows, 0], 2 * got[rows, -1] - got[rows, -2]], axis=1), rtol=1e-12)


def test_chunk_sizes_share_the_buffer():
    sizes = chunk_sizes(10e6, 1e6, 3, channels=2, pieces=2)
    assert_allclose(sizes, [1e6, 1e6, 0.5e6])
    assert_allclose(chunk_sizes(10e6, 1e6, 2, channels=2, pieces=2), [1e6, 1.5e6])  # too few chunks: the last one takes the rest
    assert_allclose(chunk_sizes(0.0, 1e6, 2), [0, 0])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("gather", 4), "collective is 'gather'"),
        (("broadcast", 4, 1, 1, 1, "tree"), "algorithm is 'tree' for broadcast"),
        (("all_reduce", 1), "ranks is 1"),
        (("all_reduce", 4, 3), "divide ranks = 4"),
        (("all_reduce", 4, 1, 0), "channels is 0"),
        (("send_recv", 3), "send_recv has 2"),
    ],
)
def test_bad_expansions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        collective_events(*arguments)


def test_other_bad_names_are_refused():
    with pytest.raises(ValueError, match="clariden Simple"):
        measured_costs("clariden")
    with pytest.raises(ValueError, match="ai, hpc"):
        loggops("gpu")
    with pytest.raises(ValueError, match="all_to_all"):
        loggops_rounds("reduce", 4)
    with pytest.raises(ValueError, match="at least 2 ranks"):
        loggops_rounds("all_gather", 1)
