"""Several paths, rails, proxies, packed trees, clusters and compression: numbers by hand and from papers, bounds, gradients and edges."""

import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from numpy.testing import assert_allclose

from diffperf.cost.collective import (
    cluster_time,
    cluster_traffic,
    compress_exposed,
    compressed_time,
    direct_send_time,
    multi_path_gain,
    multi_path_time,
    pack_trees,
    packed_time,
    packing_rate,
    proxy_send_time,
    rail_time,
    ring_traffic,
    routed_send_time,
)
from diffperf.io import read_topology

TOPOLOGIES = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "topologies"
quick = settings(deadline=None, max_examples=30, derandomize=True)
floats = functools.partial(st.floats, allow_subnormal=False)
split, rails, gain_of = jax.jit(multi_path_time), jax.jit(rail_time), jax.jit(multi_path_gain)
cut = jax.jit(packing_rate, static_argnums=1)
routed_send, proxy_send, exposed = jax.jit(routed_send_time), jax.jit(proxy_send_time), jax.jit(compress_exposed)


def check_gradient(function, *arguments):
    """Against finite differences, compiled once."""
    check_grads(jax.jit(function), arguments, order=1, modes=("rev",), rtol=1e-4, eps=1e-6)


LATENCY, RATE, SIZE = floats(0.0, 1e-3), floats(1e8, 1e12), floats(1.0, 1e11)

# FlexLink (arXiv:2510.15882): 8-GPU H800 node, 256 MB per rank; op, GPUs, NCCL and FlexLink in GB/s, gain, share of PCIe and of NICs in %.
FLEXLINK = [("all_reduce", 2, 139, 175, 26, 12, 9), ("all_reduce", 4, 98, 118, 20, 12, 2), ("all_reduce", 8, 107, 109, 2, 1, 1),
            ("all_gather", 2, 132, 163, 23, 14, 5), ("all_gather", 4, 49, 62, 27, 12, 10), ("all_gather", 8, 21, 26, 24, 12, 7)]  # fmt: skip
# One PCIe path and one NIC path for all six rows, fitted to the table: per step 131 and 146 us, 25.7 and 14.5 GB/s of the 55 and 50 of their datasheets.
SIDE_LATENCY, SIDE_RATE = [131e-6, 146e-6], [25.7e9, 14.5e9]


@pytest.mark.parametrize("op, gpus, nccl, flexlink, gain, pcie, nic", FLEXLINK)
def test_flexlink(op, gpus, nccl, flexlink, gain, pcie, nic):
    factor, steps = ring_traffic(op, gpus)
    size = 256e6 * (gpus if op == "all_gather" else 1)  # the table counts what a rank contributes
    moved, alone = float(factor) * size, 256e6 / (nccl * 1e9)
    latency, rate = [0.0, *SIDE_LATENCY], [moved / alone, *SIDE_RATE]  # NVLink as NCCL reaches it
    predicted = 100 * float(gain_of(moved, steps, jnp.array(latency), jnp.array(rate)))
    assert abs(predicted - gain) < 5
    shares = 100 * np.asarray(split(moved, steps, jnp.array(latency), jnp.array(rate)).shares)
    assert abs(shares[1] - pcie) < 5 and abs(shares[2] - nic) < 5
    # the published shares alone, if all paths finish together
    assert abs(100 * (1 / (1 - (pcie + nic) / 100) - 1) - gain) < 5
    assert abs(100 * (flexlink / nccl - 1) - gain) < 5


def test_multi_path_by_hand():
    time, shares = multi_path_time(900e6, 1, [0.0, 0.0], [90e9, 10e9])
    assert_allclose((time, *shares), (9e-3, 0.9, 0.1), rtol=1e-12)
    time, shares = multi_path_time(90e6, 14, [0.0, 100e-6], [90e9, 10e9])  # 14 steps of 100 us: later than 1 ms
    assert_allclose((time, *shares), (1e-3, 1.0, 0.0), rtol=1e-12)


@quick
@given(SIZE, st.integers(1, 14), st.lists(LATENCY, min_size=3, max_size=3), st.lists(RATE, min_size=3, max_size=3))
def test_no_other_shares_are_faster(nbytes, steps, latency, rate):
    time, shares = split(nbytes, steps, jnp.array(latency), jnp.array(rate))
    cost = lambda f: np.max(np.where(f > 0, steps * np.array(latency) + f * nbytes / np.array(rate), 0))
    assert_allclose(jnp.sum(shares), 1.0, rtol=1e-9)
    assert_allclose(cost(np.asarray(shares)), time, rtol=1e-6)
    for other in (*np.eye(3), np.ones(3) / 3, *np.random.default_rng(0).dirichlet(np.ones(3), 20)):
        assert cost(other) >= float(time) * (1 - 1e-6)


@quick
@given(SIZE, st.lists(LATENCY, min_size=2, max_size=2), st.lists(RATE, min_size=2, max_size=2), floats(1.0, 10.0))
def test_more_is_never_worse(nbytes, latency, rate, factor):
    time = lambda n, a, r: float(split(n, 2.0, jnp.array(a), jnp.array(r)).time)
    base = time(nbytes, latency, rate) * (1 + 1e-9)
    assert time(nbytes, [*latency, 1e-5], [*rate, 1e9]) <= base  # a path more
    assert time(nbytes, latency, [rate[0] * factor, rate[1]]) <= base
    assert time(nbytes * factor, latency, rate) * (1 + 1e-9) >= base / (1 + 1e-9)
    assert_allclose(time(nbytes * 1e3, latency, [r * 1e3 for r in rate]), time(nbytes, latency, rate), rtol=1e-12)  # bytes in another unit


def test_gradient_of_the_split_is_implicit():
    """dT/dlatency and dT/drate from the condition that shares sum to one, and by finite differences."""
    nbytes, steps, latency, rate = 1e9, 6.0, jnp.array([1e-6, 5e-6, 1.0]), jnp.array([100e9, 20e9, 50e9])
    finish = lambda n, s, a, r: multi_path_time(n, s, a, r).time
    by_bytes, by_steps, by_latency, by_rate = jax.jit(jax.grad(finish, (0, 1, 2, 3)))(nbytes, steps, latency, rate)
    shares = split(nbytes, steps, latency, rate).shares
    used = np.array([True, True, False])  # one second of latency keeps the third path out
    total = float(jnp.sum(rate[:2]))
    assert_allclose(by_latency, np.where(used, steps * rate / total, 0), rtol=1e-9)
    assert_allclose(by_rate, np.where(used, -shares * nbytes / rate / total, 0), rtol=1e-9, atol=1e-30)
    assert_allclose(by_bytes, 1 / total, rtol=1e-9)
    assert_allclose(by_steps, jnp.sum(latency[:2] * rate[:2]) / total, rtol=1e-9)
    in_logs = lambda p: jnp.log(finish(jnp.exp(p[0]), jnp.exp(p[1]), jnp.exp(p[2:5]), jnp.exp(p[5:8])))
    check_gradient(in_logs, jnp.log(jnp.array([nbytes, steps, *latency, *rate])))


gradients_of_the_split = jax.jit(jax.value_and_grad(lambda n, a, r: multi_path_time(n, 2.0, a, r).time, (0, 1, 2)))


@pytest.mark.parametrize("nbytes, latency, rate", [(0.0, [1e-6, 2e-6], [1e9, 1e9]), (1e6, [0.0, 0.0], [1e9, 1e9]), (1e6, [1e-6, 1e-6], [1e9, 0.0]),
                                                   (1e6, [1e-6, 1e-6], [0.0, 1e9]), (0.0, [0.0, 0.0], [0.0, 1e9])])  # fmt: skip
def test_multi_path_at_its_edges(nbytes, latency, rate):
    chex.assert_tree_all_finite(gradients_of_the_split(nbytes, jnp.array(latency), jnp.array(rate)))
    shares = split(nbytes, 2.0, jnp.array(latency), jnp.array(rate)).shares
    assert_allclose(jnp.sum(shares), 1.0, rtol=1e-9)
    assert np.all(np.asarray(shares)[np.array(rate) == 0] == 0)


def test_multi_path_in_float32_and_without_a_path():
    assert multi_path_time(1e6, 1.0, [0.0, 0.0], [0.0, 0.0]).time == np.inf
    with jax.enable_x64(False):
        time, shares = multi_path_time(256e6, 6.0, [0.0, 131e-6, 146e-6], [147e9, 25.7e9, 14.5e9])
    assert time.dtype == jnp.float32 and abs(float(jnp.sum(shares)) - 1) < 1e-5


def test_eager_jit_and_vmap_agree():
    sizes = jnp.array([0.0, 1e3, 1e9])
    rows = jax.vmap(lambda n: multi_path_time(n, 2.0, [0.0, 1e-4], [1e11, 2e10]).time)(sizes)
    assert_allclose(rows[1], multi_path_time(sizes[1], 2.0, [0.0, 1e-4], [1e11, 2e10]).time, rtol=1e-12)
    assert_allclose(rows, [split(n, 2.0, jnp.array([0.0, 1e-4]), jnp.array([1e11, 2e10])).time for n in sizes], rtol=1e-12)


def test_ring_traffic():
    assert_allclose(ring_traffic("all_reduce", 8), (1.75, 14))
    assert_allclose(ring_traffic("all_gather", 8), (0.875, 7))
    assert_allclose(ring_traffic("reduce_scatter", 1), (0, 0))
    with pytest.raises(ValueError, match="op is 'broadcast'"):
        ring_traffic("broadcast", 8)


# rails


def test_rails_are_cold_for_small_and_hot_for_large_messages():
    """Two rails, one of short latency, one fast; splitting costs 50 us of coordination."""
    latency, rate = jnp.array([5e-6, 20e-6]), jnp.array([10e9, 40e9])
    small, large = rails(1e3, latency, rate, 50e-6), rails(1e9, latency, rate, 50e-6)
    assert_allclose(small.shares, [1, 0]) and small.hot == 0
    assert_allclose(small.time, 5e-6 + 1e3 / 10e9, rtol=1e-12)
    assert large.hot == 1
    assert_allclose(large.time, 50e-6 + (1e9 + 5e-6 * 10e9 + 20e-6 * 40e9) / 50e9, rtol=1e-12)  # both finish at T: sum (T - a) r = S
    # the size at which the states are equal: fast rail alone 20 us + S / 40 GB/s
    size = (50e-6 + (5e-6 * 10e9 + 20e-6 * 40e9) / 50e9 - 20e-6) / (1 / 40e9 - 1 / 50e9)
    assert [float(rails(size * k, latency, rate, 50e-6).hot) for k in (0.99, 1.01)] == [0, 1]


def test_two_equal_rails_double_the_rate():
    assert_allclose(rails(1e9, jnp.array([1e-5, 1e-5]), jnp.array([1e10, 1e10])).time, 1e-5 + 0.05, rtol=1e-12)


@quick
@given(SIZE, st.lists(LATENCY, min_size=3, max_size=3), st.lists(RATE, min_size=3, max_size=3), floats(0.0, 1e-4))
def test_rails_are_never_slower_than_the_best_alone(nbytes, latency, rate, coordination):
    time, shares, hot = rails(nbytes, jnp.array(latency), jnp.array(rate), coordination)
    assert float(time) <= np.min(np.array(latency) + nbytes / np.array(rate)) * (1 + 1e-9)
    assert_allclose(jnp.sum(shares), 1.0, rtol=1e-9)
    assert float(rails(nbytes, jnp.array(latency), jnp.array(rate), coordination, 0.1).time) <= float(time) * (1 + 1e-9)  # errs low


def test_gradient_of_rails():
    in_logs = lambda p: jnp.log(rail_time(jnp.exp(p[5]), jnp.exp(p[:2]), jnp.exp(p[2:4]), jnp.exp(p[4])).time)
    for nbytes in (1e4, 1e9):
        check_gradient(in_logs, jnp.log(jnp.array([5e-6, 20e-6, 10e9, 40e9, 50e-6, nbytes])))
    chex.assert_tree_all_finite(jax.jit(jax.grad(lambda n: rail_time(n, [1e-6, 1e-6], [1e9, 1e9], 0.0, 0.1).time))(0.0))


# proxies


@quick
@given(floats(1.0, 1e9), floats(1e-13, 1e-8), floats(1e-13, 1e-8), st.integers(2, 8))
def test_routed_beats_direct_exactly_when_inter_exceeds_twice_intra(nbytes, inter, intra, proxies):
    routed, direct = float(routed_send(nbytes, inter, intra, proxies)), float(direct_send_time(nbytes, inter))
    if abs(inter / (2 * intra) - 1) > 1e-9:
        assert (routed < direct) == (inter > 2 * intra)
    assert_allclose(proxy_send(nbytes, inter, intra, proxies), min(routed, direct), rtol=1e-12)


def test_proxies_by_hand():
    # 1 MB over four NICs: 2 x 3/4 MB at 200 GB/s inside the node and 1/4 MB at 25 GB/s between nodes
    assert_allclose(routed_send_time(1e6, 1 / 25e9, 1 / 200e9, 4), 2 * 0.75e6 / 200e9 + 0.25e6 / 25e9, rtol=1e-12)
    assert_allclose(routed_send_time(1e6, 1 / 25e9, 1 / 200e9, 1), direct_send_time(1e6, 1 / 25e9), rtol=1e-12)
    check_gradient(lambda a, b, x: proxy_send_time(1e6, a * 1e-11, b * 1e-11, x, 0.1) * 1e6, 4.0, 0.5, 4.0)
    chex.assert_tree_all_finite(jax.grad(proxy_send_time, (0, 1, 2, 3))(0.0, 1e-11, 1e-11, 1.0))


# trees


def ring(n, both):
    capacity = np.zeros((n, n))
    for k in range(n):
        capacity[k, (k + 1) % n] = 1
        if both:
            capacity[(k + 1) % n, k] = 1
    return capacity


chain = lambda n: np.eye(n, k=1) + np.eye(n, k=-1)
complete = lambda n: 1 - np.eye(n)
CUBE_MESH = np.zeros((8, 8))  # DGX-1 with V100: NVLinks between each two of 8 GPUs (NVIDIA, DGX-1 architecture white paper)
for a, b, links in ((0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2), (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1),
                    (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)):  # fmt: skip
    CUBE_MESH[a, b] = CUBE_MESH[b, a] = links


@pytest.mark.parametrize("capacity, rate", [(ring(5, False), 1), (ring(5, True), 2), (complete(4), 3), (complete(7), 6), (chain(6), 1), (CUBE_MESH, 6),
                                            (np.zeros((3, 3)), 0), (np.diag([1.0, 1.0], 1), 1)])  # fmt: skip
def test_packings_of_known_graphs(capacity, rate):
    """Edmonds' theorem by hand: cutting off one device of a ring, a complete graph or a chain. Each V100 has 6 links."""
    assert_allclose(cut(capacity, 0), rate)
    trees = pack_trees(capacity, 0)
    assert_allclose(sum(tree.rate for tree in trees), rate, rtol=1e-6)


@quick
@given(st.integers(2, 6), st.integers(0, 10**6), st.integers(0, 5))
def test_trees_reach_the_rate_of_maximum_flow(n, seed, root):
    """Independently: the least maximum flow from the root to a device, by scipy."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    random = np.random.default_rng(seed)
    capacity = random.integers(0, 5, (n, n)) * (random.random((n, n)) < 0.7) * (1 - np.eye(n, dtype=int))
    root %= n
    flow = min(maximum_flow(csr_matrix(capacity.astype(np.int32)), root, v).flow_value for v in range(n) if v != root)
    assert_allclose(cut(capacity, root), flow, rtol=1e-12)
    trees = pack_trees(capacity.astype(float) * 1e9, root)
    assert_allclose(sum(tree.rate for tree in trees), flow * 1e9, rtol=1e-6)
    used = np.zeros((n, n))
    for tree in trees:
        assert tree.parents[root] == -1 and tree.rate > 0
        for v, parent in enumerate(tree.parents):
            if v != root:
                used[parent, v] += tree.rate
                path = [v]
                while path[-1] != root:
                    assert len(path) <= n  # leads to the root
                    path.append(tree.parents[path[-1]])
    assert np.all(used <= capacity * 1e9 * (1 + 1e-6) + 1)


def test_gradient_of_the_packing_rate_lies_on_the_smallest_cut():
    capacity = jnp.array(CUBE_MESH) + 0.01 * jnp.arange(64.0).reshape(8, 8) * (CUBE_MESH > 0)
    rate, gradient = jax.jit(jax.value_and_grad(packing_rate), static_argnums=1)(capacity, 0)
    assert_allclose(jnp.sum(gradient * capacity), rate, rtol=1e-12)  # 1 on the links of the cut
    assert set(np.unique(gradient)) == {0.0, 1.0}
    numeric = (cut(capacity.at[0, 1].add(1e-6), 0) - cut(capacity.at[0, 1].add(-1e-6), 0)) / 2e-6
    assert_allclose(gradient[0, 1], numeric, atol=1e-6)
    check_gradient(lambda c: packing_rate(c, 0, temperature=0.1), capacity)
    scaled = jax.jit(jax.vmap(lambda k: packing_rate(k * capacity, 0)))(jnp.array([1.0, 2.0]))
    assert_allclose(scaled, [rate, 2 * rate], rtol=1e-12)
    chex.assert_tree_all_finite(jax.grad(packing_rate)(jnp.zeros((3, 3)), 0))


def test_switches_pass_data_on():
    """Four GPUs with three links each to a switch that has no data of its own."""
    capacity = np.zeros((5, 5))
    capacity[:4, 4] = capacity[4, :4] = 3
    assert_allclose(packing_rate(capacity, 0, members=(0, 1, 2, 3)), 3)
    assert packing_rate(capacity, 0, members=(0,)) == np.inf  # nobody to send to


@pytest.mark.skipif(not TOPOLOGIES.is_dir(), reason="the shared topologies (../shared/data/topologies) are not on this machine")
@pytest.mark.parametrize("name, rate", [("oci_h100_topo.xml", 18 * 25e9), ("rccl_8p6l_2nic.xml", 6 * 46e9), ("rccl_4p2h.xml", 0.0)])
def test_rates_of_real_nodes(name, rate):
    """Every link of a GPU at once: 18 NVLinks to switches, 6 xGMI links to neighbours; two islands of four GPUs have no path between them."""
    topology = read_topology(TOPOLOGIES / name)
    _, capacity = topology.capacity()
    assert_allclose(packing_rate(capacity, 0, members=tuple(range(len(topology.gpus)))), rate, rtol=1e-12)


def test_fewer_trees():
    whole = pack_trees(CUBE_MESH * 25e9, 0)
    few = pack_trees(CUBE_MESH * 25e9, 0, max_trees=2)
    assert len(few) <= 2 and 0 < sum(tree.rate for tree in few) <= sum(tree.rate for tree in whole) * (1 + 1e-9)
    assert [tree.rate for tree in whole] == sorted((tree.rate for tree in whole), reverse=True)


def test_time_of_a_packed_broadcast():
    rate = packing_rate(CUBE_MESH * 25e9, 0)  # 150 GB/s
    assert_allclose(packed_time(15e9, rate), 0.1, rtol=1e-12)
    assert_allclose(packed_time(0.0, rate, 3, 1e-6), 3e-6, rtol=1e-12)


@pytest.mark.parametrize("arguments, words", [((np.zeros((2, 3)), 0), "should be square"), ((np.zeros((3, 3)), 3), "root is 3"),
                                              ((-complete(3), 0), "negative"), ((np.full((3, 3), np.inf), 0), "infinite"),
                                              ((complete(3), 0, 0), "max_trees is 0")])  # fmt: skip
def test_what_cannot_be_packed(arguments, words):
    with pytest.raises(ValueError, match=words):
        pack_trees(*arguments)
    with pytest.raises(ValueError, match="17 devices"):
        packing_rate(complete(17), 0)
    with pytest.raises(ValueError, match="members"):
        packing_rate(complete(3), 0, members=(0, 5))


# clusters


def test_cluster_collectives():
    assert_allclose(cluster_traffic("reduce", 1024, 4), (4 * 2 * 1024, 2))  # N log2 N size, log2 N rounds
    assert_allclose(cluster_traffic("gather", 1024, 4), (4 * 3 * 1024, 2))
    assert_allclose(cluster_traffic("reduce", 1024, 4, "rotating"), (4 * 3 * 1024, 3))
    assert_allclose(cluster_time("reduce", 1024, 4, 1e-6, 1e9), 2 * 1e-6 + 2 * 1024 / 1e9, rtol=1e-12)
    assert_allclose([cluster_time(op, 1024, 1, 1e-6, 1e9, s) for op in ("reduce", "gather") for s in ("tree", "rotating")], 0)
    assert cluster_time("reduce", 1024, 32, 1e-6, 1e9) == np.inf
    check_gradient(lambda n, b, a, r: cluster_time("gather", n * 1e3, b, a * 1e-6, r * 1e9) * 1e6, 1.0, 4.0, 1.0, 2.0)
    chex.assert_tree_all_finite(jax.grad(cluster_time, (1, 2, 3, 4))("reduce", 0.0, 1.0, 0.0, 1e9))
    with pytest.raises(ValueError, match="op is 'scan'"):
        cluster_traffic("scan", 1, 2)


# compression


def test_a_compressed_transfer():
    # 1 GB at 25 GB/s takes 40 ms; tenfold compression at 400 GB/s and back at 800: 4 + 2.5 + 1.25 ms
    assert_allclose(compressed_time(1e9, 10.0, 25e9, 400e9, 800e9), 7.75e-3, rtol=1e-12)
    assert_allclose(compressed_time(1e9, 1.0, 25e9), 40e-3, rtol=1e-12)
    chex.assert_tree_all_finite(jax.grad(compressed_time, (0, 1, 2, 3, 4))(1e9, 10.0, 25e9, 400e9, 800e9))


def test_only_exposed_transfers_are_compressed():
    start, plain, compressed = jnp.array([0.0, 1.0, 2.0, 3.0]), jnp.array([4.0, 4.0, 4.0, 4.0]), jnp.array([2.0, 2.0, 2.0, 2.0])
    end, chosen = exposed(start, plain, compressed)
    assert_allclose(end, 5.0)  # the last stage starts at 3 and takes 2
    assert chosen.tolist() == [0, 0, 1, 1]  # the second ends at 5 uncompressed: not late
    end, chosen = exposed(start, plain, plain + 1)  # compression that is slower is left alone
    assert end == 7 and chosen.tolist() == [0, 0, 0, 0]


@quick
@given(*(st.lists(floats(1e-3, 1.0), min_size=4, max_size=4) for _ in range(3)))
def test_no_choice_of_compression_ends_earlier_and_none_with_fewer(start, plain, compressed):
    end, chosen = exposed(jnp.array(start), jnp.array(plain), jnp.array(compressed))
    start, plain, compressed = map(np.array, (start, plain, compressed))
    ends = {bits: np.max(start + np.where([bits >> k & 1 for k in range(4)], compressed, plain)) for bits in range(16)}
    best = min(ends.values())
    assert_allclose(end, best, rtol=1e-9)
    assert jnp.sum(chosen) == min(bits.bit_count() for bits, value in ends.items() if value <= best * (1 + 1e-12))


def test_gradient_of_the_choice():
    start, plain, compressed = jnp.array([0.0, 1.0, 2.0]), jnp.array([4.0, 4.5, 4.2]), jnp.array([2.0, 2.5, 2.2])
    check_gradient(lambda a, b, c: compress_exposed(a, b, c).end, start, plain, compressed)
    check_gradient(lambda a, b, c: compress_exposed(a, b, c, 0.1).end, start, plain, compressed)
    assert float(compress_exposed(start, plain, compressed, 0.1).end) >= float(compress_exposed(start, plain, compressed).end)
    chex.assert_tree_all_finite(jax.grad(lambda a: compress_exposed(a, jnp.zeros(3), jnp.zeros(3), 0.1).end)(jnp.zeros(3)))
