"""NCCL's tuning model: published vectors, versions, which pairs may be chosen, gradients, and the rules that cut a message."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose

from diffperf.cost.collective.nccl import (
    ALGORITHMS,
    PROTOCOLS,
    VERSIONS,
    NcclTopology,
    nccl_choice,
    nccl_costs,
    nccl_launch,
    nccl_times,
    nccl_topology,
    ring_loop_bytes,
)

KIB, MIB = 1024, 2**20
# two reference machines: A, one node of 8 Ampere GPUs on NVLink; B, two such nodes with Intel hosts and 100 Gbit NICs
MACHINES = {"A": (NcclTopology(12, 20e9, 20e9, 80), 8, 1), "B": (NcclTopology(8, 12e9, 12e9, 80), 16, 2)}
HOPPER = NcclTopology(16, 24e9, 20e9, 90, latency_inter=1e-6, nvls=1, collnet=1)
times_of = functools.partial(jax.jit, static_argnames=("collective", "version"))(nccl_times)
choice_of = functools.partial(jax.jit, static_argnames=("collective", "version"))(nccl_choice)
costs_of = functools.partial(jax.jit, static_argnames=("collective", "version"))(nccl_costs)
PAIRS = [(a, p) for a in ("Tree", "Ring") for p in PROTOCOLS]
place = lambda a, p: (ALGORITHMS.index(a), PROTOCOLS.index(p))

# latency [us] / algorithm bandwidth [GB/s] of an all-reduce, in the order of PAIRS: evaluated from the constants of the two versions by an independent script
COSTS = """
2.19.1 A | 15.20 / 29.053 | 31.50 / 85.867 | 392.00 / 110.400 | 15.00 / 34.286 | 40.60 / 126.171 | 56.00 / 137.143
2.19.1 B | 25.20 / 11.621 | 48.50 / 41.400 | 448.00 / 44.160 | 43.40 / 12.800 | 79.40 / 47.104 | 152.80 / 51.200
2.30.7 A | 15.20 / 29.053 | 31.50 / 85.867 | 64.40 / 110.400 | 15.00 / 50.114 | 40.60 / 126.171 | 56.00 / 137.143
2.30.7 B | 25.20 / 11.621 | 48.50 / 41.400 | 92.40 / 44.160 | 40.00 / 20.800 | 75.20 / 47.104 | 131.60 / 51.200
"""
# time [us] of an all-reduce and the choice, from the same script
TIMES = """
2.19.1 A | 1024 | 15.24 | 31.51 | 392.01 | 15.03 | 40.61 | 56.01 | Ring/LL
2.19.1 A | 65536 | 18.96 | 32.77 | 392.99 | 16.91 | 41.12 | 56.48 | Ring/LL
2.19.1 A | 1048576 | 87.38 | 51.85 | 411.00 | 45.58 | 48.91 | 63.65 | Ring/LL
2.19.1 A | 16777216 | 656.84 | 248.60 | 609.10 | 504.34 | 173.57 | 178.33 | Ring/LL128
2.19.1 A | 268435456 | 9254.83 | 3157.69 | 3093.65 | 7844.37 | 2168.15 | 2013.34 | Ring/Simple
2.19.1 A | 1073741824 | 36973.70 | 12536.26 | 10117.92 | 31332.47 | 8550.78 | 7885.37 | Ring/Simple
2.19.1 B | 1024 | 25.30 | 48.52 | 448.03 | 43.48 | 79.42 | 152.82 | Tree/LL
2.19.1 B | 65536 | 34.60 | 51.14 | 450.47 | 48.52 | 80.79 | 215.20 | Tree/LL
2.19.1 B | 1048576 | 205.66 | 90.71 | 495.49 | 125.32 | 101.66 | 234.40 | Tree/LL128
2.19.1 B | 16777216 | 1629.30 | 498.77 | 990.74 | 1354.12 | 435.57 | 541.60 | Ring/LL128
2.19.1 B | 268435456 | 23124.27 | 6532.45 | 7202.11 | 21014.92 | 5778.18 | 5456.80 | Ring/Simple
2.19.1 B | 1073741824 | 92421.46 | 25984.29 | 24762.81 | 83929.48 | 22874.53 | 21185.44 | Ring/Simple
2.30.7 A | 1024 | 15.24 | 31.51 | 64.41 | 15.02 | 40.61 | 56.01 | Ring/LL
2.30.7 A | 65536 | 18.96 | 32.77 | 65.39 | 16.31 | 41.12 | 56.48 | Ring/LL
2.30.7 A | 1048576 | 87.38 | 51.85 | 83.40 | 35.92 | 48.91 | 63.65 | Ring/LL
2.30.7 A | 16777216 | 656.84 | 248.60 | 281.50 | 349.78 | 173.57 | 178.33 | Ring/LL128
2.30.7 A | 268435456 | 9254.83 | 3157.69 | 2766.05 | 5371.47 | 2168.15 | 2013.34 | Ring/Simple
2.30.7 A | 1073741824 | 36973.70 | 12536.26 | 9790.32 | 21440.86 | 8550.78 | 7885.37 | Ring/Simple
2.30.7 B | 1024 | 25.30 | 48.52 | 92.43 | 40.05 | 75.22 | 131.62 | Tree/LL
2.30.7 B | 65536 | 34.60 | 51.14 | 94.87 | 43.15 | 76.59 | 185.52 | Tree/LL
2.30.7 B | 1048576 | 205.66 | 90.71 | 139.89 | 90.41 | 97.46 | 204.72 | Ring/LL
2.30.7 B | 16777216 | 1629.30 | 498.77 | 635.14 | 846.60 | 431.37 | 511.92 | Ring/LL128
2.30.7 B | 268435456 | 23124.27 | 6532.45 | 6846.51 | 12945.55 | 5773.98 | 5427.12 | Ring/Simple
2.30.7 B | 1073741824 | 92421.46 | 25984.29 | 24407.21 | 51662.20 | 22870.33 | 21155.76 | Ring/Simple
"""
# all-gather and reduce-scatter by rings: latency [us] / algorithm bandwidth [GB/s] / time of 16 MiB [us]
GATHERS = """
2.19.1 A | 10.80 / 91.429 / 194.30 | 27.30 / 252.343 / 93.79 | 32.20 / 274.286 / 93.37
2.19.1 B | 23.30 / 25.600 / 678.66 | 44.60 / 94.208 / 222.69 | 70.00 / 102.400 / 233.84
2.30.7 A | 10.80 / 100.229 / 178.19 | 27.30 / 252.343 / 93.79 | 32.20 / 274.286 / 93.37
2.30.7 B | 23.30 / 41.600 / 426.60 | 44.60 / 94.208 / 222.69 | 70.00 / 102.400 / 233.84
"""


def rows(text):
    """(version, machine, cells)"""
    table = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return [(*head.split(), cells) for head, *cells in table]


@pytest.mark.parametrize("version, machine, cells", rows(COSTS), ids=lambda x: x if isinstance(x, str) else "")
def test_latency_and_bandwidth_of_the_reference_machines(version, machine, cells):
    topology, ranks, nodes = MACHINES[machine]
    costs = costs_of(topology, "all_reduce", ranks, nodes, version)
    for pair, cell in zip(PAIRS, cells, strict=True):
        latency, bandwidth = map(float, cell.split("/"))
        assert_allclose(costs.latency[place(*pair)], latency * 1e-6, atol=0.005e-6)
        assert_allclose(costs.bandwidth[place(*pair)], bandwidth * 1e9, atol=0.0005e9)


@pytest.mark.parametrize("version, machine, cells", rows(TIMES), ids=lambda x: x if isinstance(x, str) else x[0])
def test_times_and_choice_of_the_reference_machines(version, machine, cells):
    topology, ranks, nodes = MACHINES[machine]
    size, *expected, choice = cells
    times = times_of(topology, "all_reduce", float(size), ranks, nodes, version)
    for pair, time in zip(PAIRS, expected, strict=True):
        assert_allclose(times[place(*pair)], float(time) * 1e-6, atol=0.01e-6)
    chosen = choice_of(topology, "all_reduce", float(size), ranks, nodes, version)
    assert "/".join(chosen.names) == choice
    assert_allclose(chosen.time, min(map(float, expected)) * 1e-6, atol=0.01e-6)
    assert chosen.weights.sum() == 1 and chosen.weights[chosen.algorithm, chosen.protocol] == 1


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("version, machine, cells", rows(GATHERS), ids=lambda x: x if isinstance(x, str) else "")
def test_gathers_of_the_reference_machines(collective, version, machine, cells):
    topology, ranks, nodes = MACHINES[machine]
    costs = costs_of(topology, collective, ranks, nodes, version)
    times = times_of(topology, collective, 16.0 * MIB, ranks, nodes, version)
    for protocol, cell in zip(PROTOCOLS, cells, strict=True):
        at = place("Ring", protocol)
        latency, bandwidth, time = map(float, cell.split("/"))
        assert_allclose(costs.latency[at], latency * 1e-6, atol=0.005e-6)
        assert_allclose(costs.bandwidth[at], bandwidth * 1e9, atol=0.0005e9)
        assert_allclose(times[at], time * 1e-6, atol=0.01e-6)


def enabled(topology, collective, ranks, nodes, version):
    bandwidth = np.asarray(costs_of(topology, collective, ranks, nodes, version).bandwidth)
    return {f"{a}/{p}" for a in ALGORITHMS for p in PROTOCOLS if bandwidth[place(a, p)] > 0}


def test_what_may_be_chosen():
    rings, trees = {f"Ring/{p}" for p in PROTOCOLS}, {f"Tree/{p}" for p in PROTOCOLS}
    with_sharp = {"CollNetDirect/Simple", "CollNetChain/Simple", "NVLS/Simple", "NVLSTree/Simple"}
    for version in ("2.19", "2.27", "2.30"):
        assert enabled(HOPPER, "all_reduce", 16, 2, version) == rings | trees | with_sharp
        assert enabled(HOPPER, "all_reduce", 8, 1, version) == rings | trees | {"NVLS/Simple"}
        assert enabled(HOPPER, "broadcast", 16, 2, version) == rings
        assert ("PAT/Simple" in enabled(HOPPER, "all_gather", 4, 4, version)) == (version in ("2.27", "2.30"))
    plain = NcclTopology(16, 24e9, 20e9, 90, nvls=1)
    assert enabled(plain, "all_reduce", 16, 2, "2.19") == rings | trees | {"NVLSTree/Simple"}
    blackwell = NcclTopology(16, 24e9, 24e9, 100)
    assert "Ring/LL128" not in enabled(blackwell, "all_reduce", 8, 1, "2.22")
    assert "Ring/LL128" in enabled(blackwell, "all_reduce", 8, 1, "2.27")
    assert not any("LL128" in pair for pair in enabled(NcclTopology(8, 12e9, 12e9, 80, ll128=0), "all_reduce", 16, 2, "2.30"))


@pytest.mark.parametrize("version, rate, hop", [("2.19", 16 * 20e9 * 5 / 6, 23e-6), ("2.22", 16 * 20e9 * 5 / 6, 25e-6)])
def test_nvls_before_its_efficiency(version, rate, hop):
    """The slower of both sides on every channel, 5/6 of it; one hop inside, and the network's 18 us and twice the NIC's latency."""
    costs = costs_of(HOPPER, "all_reduce", 16, 2, version)
    assert_allclose(costs.bandwidth[place("NVLS", "Simple")], rate)
    assert_allclose(costs.latency[place("NVLS", "Simple")], hop + 18e-6 + 2e-6)
    assert_allclose(costs.latency[place("NVLSTree", "Simple")], hop + 2 * (14e-6 + 2e-6))  # log2 of 2 nodes is 1


def test_nvls_with_its_efficiency():
    """2.30 on one node: 0.85 * 15/16 of the link, twice for an all-reduce that pipelines two operations; ratio 8/14."""
    costs = costs_of(NcclTopology(16, 20e9, 40e9, 90, nvls=1), "all_reduce", 8, 1, "2.30")
    assert_allclose(costs.bandwidth[place("NVLS", "Simple")], 16 * 20e9 * 0.85 * 15 / 16 * 2 * 8 / 14)
    gather = costs_of(NcclTopology(16, 20e9, 40e9, 90, nvls=1), "all_gather", 8, 1, "2.30")
    assert_allclose(gather.bandwidth[place("NVLS", "Simple")], 16 * 20e9 * 0.85 * 15 / 16 * 7 / 8 * 8 / 7)


def test_collnet_and_pat_by_hand():
    costs = costs_of(NcclTopology(4, 20e9, 20e9, 80, collnet=1), "all_reduce", 16, 2, "2.19")
    factor = 8 / 4 - (8 / 4 - 1) / 2  # GPUs per channel, half of the excess forgiven
    assert_allclose(costs.bandwidth[place("CollNetDirect", "Simple")], 4 * 20e9 / factor / 2)
    assert_allclose(costs.latency[place("CollNetDirect", "Simple")], (2 * (3.7 + 7 * 0.4) + 31) * 1e-6)
    assert_allclose(costs.latency[place("CollNetChain", "Simple")], (2 * 7 * 2.8 + 30) * 1e-6)
    pat = costs_of(NcclTopology(4, 20e9, 20e9, 80), "all_gather", 8, 8, "2.27")
    assert_allclose(pat.latency[place("PAT", "Simple")], (8 + 3 * 14 / 3.5 + 2.8 * 8) * 1e-6)
    assert_allclose(pat.bandwidth[place("PAT", "Simple")], 0.75 * 4 * 20e9)


def test_broadcast_by_hand():
    """Base and one hop where all channels have one ring; else a hop per rank, for Simple that of the tree."""
    topology = NcclTopology(8, 12e9, 12e9, 80)
    same = costs_of(topology, "broadcast", 16, 2, "2.19").latency
    other = costs_of(NcclTopology(8, 12e9, 12e9, 80, same_channels=0), "broadcast", 16, 2, "2.19").latency
    assert_allclose(same[place("Ring", "Simple")], (8.4 + 14) * 1e-6)
    assert_allclose(other[place("Ring", "Simple")], (8.4 + 16 * 28) * 1e-6)
    assert_allclose(other[place("Ring", "LL")], (6.6 + 16 * 2.7) * 1e-6)


def test_versions_differ_where_their_tables_do():
    """Tree with Simple pays 28 us per hop on NVLink up to 2.22 and 4 us later; between nodes 2.18 already paid 14."""
    latency = lambda version, ranks, nodes: float(costs_of(MACHINES["A"][0], "all_reduce", ranks, nodes, version).latency[place("Tree", "Simple")]) * 1e6
    assert [round(latency(v, 8, 1), 2) for v in VERSIONS] == [392, 392, 392, 392, 64.4, 64.4]
    assert [round(latency(v, 4, 4), 2) for v in VERSIONS] == [56, 112, 112, 112, 64.4, 64.4]


@pytest.mark.parametrize("version", ["2.21.5", "3.1"])
def test_unknown_version_names_the_nearest(version):
    with pytest.raises(ValueError, match=r"known for 2.18, 2.19, 2.20, 2.22, 2.27, 2.30.*nearest is") as error:
        nccl_times(HOPPER, "all_reduce", 1e6, 8, 1, version)
    assert {"2.21.5": "2.20", "3.1": "2.30"}[version] in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(version="new"), "major.minor"),
        (dict(collective="allreduce"), "Did you mean all_reduce"),
        (dict(nbytes=0), "nbytes is 0"),
        (dict(nbytes=float("nan")), "nbytes is nan"),
        (dict(ranks=1), "at least 2"),
        (dict(nodes=9), "more than ranks = 8"),
        (dict(nodes=0), "nodes is 0"),
        (dict(used_channels=0), "channels is 0"),
    ],
)
def test_bad_input_is_refused(change, message):
    given = dict(topology=HOPPER, collective="all_reduce", nbytes=1e6, ranks=8, nodes=1, version="2.30") | change
    with pytest.raises(ValueError, match=message):
        nccl_times(**given)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_edges_are_finite_under_jit(temperature):
    """No bytes; one rank; one rank per node."""
    def time(topology, at):
        return nccl_choice(topology, "all_reduce", at[0], at[1], at[2], "2.30", temperature=temperature).time

    edges = jnp.array([[0.0, 8, 1], [1e6, 1, 1], [1e6, 8, 8]])
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(time, argnums=(0, 1)), (None, 0)))(HOPPER, edges)
    assert np.all(np.isfinite(values)) and values[0] > 0 and values[1] == 0
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("collective, nbytes, ranks, nodes, version", [("all_reduce", 3e6, 32, 4, "2.30"), ("all_gather", 3e5, 16, 2, "2.27")])
def test_gradient_in_every_number_of_the_topology(collective, nbytes, ranks, nodes, version):
    """By finite differences in log parameters, summed over all enabled pairs, with a fixed number of channels."""
    leaves, tree = jax.tree.flatten(HOPPER)
    names = [field for field in HOPPER.__dataclass_fields__]
    numbers = [names.index(n) for n in ("channels", "bandwidth_intra", "bandwidth_inter", "latency_inter", "network_overhead")]

    @jax.jit
    def total(logs, log_bytes, log_used):
        filled = list(leaves)
        for at, value in zip(numbers, logs, strict=True):
            filled[at] = leaves[at] * jnp.exp(value)
        times = nccl_times(jax.tree.unflatten(tree, filled), collective, jnp.exp(log_bytes), ranks, nodes, version, used_channels=jnp.exp(log_used))
        return jnp.sum(jnp.log(jnp.where(jnp.isfinite(times), times, 1.0)))

    at = [jnp.zeros(leaves[i].shape) for i in numbers], jnp.log(nbytes), jnp.log(7.0)
    flat, back = ravel_pytree(at)
    slopes = jax.grad(lambda x: total(*back(x)))(flat)
    shifted = jax.jit(jax.vmap(lambda x: total(*back(x))))
    step = 1e-5 * jnp.eye(len(flat))
    assert_allclose(slopes, (shifted(flat + step) - shifted(flat - step)) / 2e-5, atol=1e-7)
    assert np.count_nonzero(slopes) > 7  # bandwidths, channels and NIC latency of several algorithms, host time, bytes and used channels


@given(log_bytes=st.floats(3, 32), factor=st.floats(1.01, 64), faster=st.floats(1.0, 8), version=st.sampled_from(["2.19", "2.30"]))
@settings(deadline=None, max_examples=25)
def test_more_bytes_are_not_faster_and_more_bandwidth_is_not_slower(log_bytes, factor, faster, version):
    """Rings and NVLS. The tree's correction may make a longer message faster: it is left out here."""
    rows = [a for a, name in enumerate(ALGORITHMS) if name != "Tree"]
    time = lambda size, speed: times_of(
        NcclTopology(16, 24e9 * speed, 20e9 * speed, 90, nvls=1, collnet=1), "all_reduce", 2.0**log_bytes * size, 16, 2, version
    )
    base = time(1.0, 1.0)
    assert np.all(time(factor, 1.0)[np.array(rows)] >= base[np.array(rows)])
    assert np.all(time(1.0, faster) <= base * (1 + 1e-12))


def test_one_program_serves_a_batch():
    sizes = jnp.array([1e3, 1e6, 1e9])
    ranks = jnp.array([8.0, 16.0, 64.0])
    nodes = jnp.array([1.0, 2.0, 8.0])
    batch = jax.jit(jax.vmap(lambda s, n, m: nccl_times(HOPPER, "all_reduce", s, n, m)))(sizes, ranks, nodes)
    for i in range(3):
        assert_allclose(batch[i], nccl_times(HOPPER, "all_reduce", float(sizes[i]), int(ranks[i]), int(nodes[i])), rtol=1e-12)


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1.0])
def test_relaxed_choice_bounds(temperature):
    topology, ranks, nodes = MACHINES["B"]
    times = nccl_times(topology, "all_reduce", 1e6, ranks, nodes, temperature=temperature)
    chosen = nccl_choice(topology, "all_reduce", 1e6, ranks, nodes, temperature=temperature)
    least = float(jnp.min(times))
    assert 21**-temperature * least <= chosen.time <= least * (1 + 1e-9)
    assert_allclose(chosen.weights.sum(), 1)
    assert np.all(chosen.weights[~np.isfinite(times)] < 1e-6 if temperature < 1 else True)


def test_relaxed_correction_has_a_slope_between_its_steps():
    """Between 1 and 2 MiB the factor of LL128 goes from 0.6 to 0.6 and that of LL from 0.5 to 0.6."""
    topology, ranks, nodes = MACHINES["A"]
    times = lambda size, temperature: nccl_times(topology, "all_reduce", size, ranks, nodes, temperature=temperature)
    at = place("Tree", "LL")
    assert_allclose(times(1.5 * MIB, 1e-6)[at], times(1.5 * MIB, 0.0)[at], rtol=1e-6)
    hot = float(times(1.5 * MIB, 1e3)[at])
    latency, bandwidth = (float(x[at]) for x in costs_of(topology, "all_reduce", ranks, nodes, temperature=1e3))
    assert_allclose(hot, latency + 1.5 * MIB / (bandwidth * (0.5 + (0.6 - 0.5) * np.log2(1.5))), rtol=1e-3)


# --- how a message is cut


def test_channels_and_threads_shrink_with_the_message():
    topology = NcclTopology(8, 20e9, 20e9, 80)
    launch = lambda size, protocol="Simple", algorithm="Ring": nccl_launch(topology, "all_reduce", algorithm, protocol, size, 8)
    big = launch(64 * MIB)
    assert (float(big.channels), float(big.threads)) == (8, 512 + 32)
    few = launch(3 * 512 * 64)  # three channels full of 64 bytes for each of 512 threads
    assert (float(few.channels), float(few.threads)) == (3, 512 + 32)
    small = launch(128 * 64)  # 512 threads would have 16 bytes each: halved until 128 have 64
    assert (float(small.channels), float(small.threads)) == (1, 128 + 32)
    assert float(launch(8, "LL").threads) == 96  # 64 is below three warps
    assert float(launch(8, "LL128").threads) == 320  # 640 / 2 is no multiple of 128
    assert float(launch(64 * MIB, algorithm="Tree").threads) == 512 + 4 * 32


def test_slow_ring_has_few_threads():
    assert float(nccl_launch(NcclTopology(2, 6e9, 6e9, 80), "all_reduce", "Ring", "Simple", 64 * MIB, 8).threads) == 256 + 32


@pytest.mark.parametrize(
    "collective, protocol, chunk, pieces",
    [
        ("all_reduce", "Simple", 2 * MIB, 8),
        ("all_gather", "Simple", 2 * MIB, 8),
        ("broadcast", "Simple", 512 * KIB, 1),
        ("all_reduce", "LL", 32 * KIB, 8),
        ("all_reduce", "LL128", 562.5 * KIB, 8),
    ],
)
def test_chunks_of_rings(collective, protocol, chunk, pieces):
    launch = nccl_launch(NcclTopology(8, 20e9, 20e9, 80), collective, "Ring", protocol, 512 * MIB, 8)
    assert (float(launch.chunk_bytes), float(launch.chunks_per_loop)) == (chunk, pieces)
    assert float(launch.loops) == np.ceil(512 * MIB / (8 * pieces * chunk))


@pytest.mark.parametrize(
    "protocol, nbytes, chunk",
    [
        ("Simple", 2**30, 512 * KIB),  # 256 chunks of 8 channels: 2 nodes of 8 are 8 deep, 64 would do
        ("Simple", 2**27, 256 * KIB),  # 32 are too few, 64 will do
        ("Simple", 2**20, 32 * KIB),  # 128 KiB each: 1 < 32, then 2 < 8
        ("LL128", 2**20, 562.5 * KIB / 32),  # 2.8 steps: 22.4 chunks wanted down to 128 KiB, 5.6 to 32 KiB; 36,000 B is above that, and halved
        ("LL128", 2**30, 562.5 * KIB),  # 233 chunks
    ],
)
def test_chunks_of_trees(protocol, nbytes, chunk):
    launch = nccl_launch(NcclTopology(8, 20e9, 20e9, 80), "all_reduce", "Tree", protocol, nbytes, 16, 2)
    assert float(launch.chunk_bytes) == chunk


def test_short_loops():
    """8 ranks, 8 channels, whole loops of 128 MiB; what is left is shared and rounded up to 512 threads of 8 bytes."""
    launch = nccl_launch(NcclTopology(8, 20e9, 20e9, 80), "all_reduce", "Ring", "Simple", 130 * MIB, 8)
    assert float(ring_loop_bytes(130 * MIB, launch, "Simple")) == 2 * MIB
    assert float(ring_loop_bytes(2 * MIB, launch, "Simple")) == 32 * KIB
    assert float(ring_loop_bytes(2 * MIB + 4, launch, "Simple")) == 36 * KIB
    slow = nccl_launch(NcclTopology(8, 20e9, 20e9, 80), "all_reduce", "Ring", "LL128", 130 * MIB, 8)
    assert float(ring_loop_bytes(64.0, slow, "LL128")) == 640 * 30  # a thread moves 60 bytes of data at once, half of that is the least


# --- what the search finds


def test_topology_of_known_machines():
    """DGX A100 finds 12 channels of 20 GB/s on one node and a channel for each NIC at 24 between two; HGX H100 12 of 30 on one node."""
    from diffperf.hardware import load_system

    a100, h100 = load_system("a100_sxm_80"), load_system("h100_sxm")
    one = nccl_topology(a100, 8, 1, 80)
    assert (float(one.channels[0]), float(one.bandwidth_intra[0])) == (12, 20e9)
    two = nccl_topology(a100, 16, 2, 80, host="amd")
    assert float(two.channels[0]) == 8 and float(two.bandwidth_inter[0]) <= float(a100.scale_out.bandwidth)
    assert float(two.network_overhead) == 2e-6 and float(two.nvls) == 0
    hopper = nccl_topology(h100, 8, 1, 90)
    assert (float(hopper.channels[0]), float(hopper.bandwidth_intra[0]), float(hopper.nvls)) == (12, 30e9, 1)
    with pytest.raises(ValueError, match="host is 'power'"):
        nccl_topology(a100, 8, 1, 80, host="power")
    with pytest.raises(ValueError, match="compute_capability is 8"):
        nccl_topology(a100, 8, 1, 8)


def test_float32_is_close():
    topology, ranks, nodes = MACHINES["B"]
    exact = nccl_times(topology, "all_reduce", 1e6, ranks, nodes)
    with jax.enable_x64(False):
        coarse = nccl_times(NcclTopology(8, 12e9, 12e9, 80), "all_reduce", 1e6, ranks, nodes)
        assert coarse.dtype == jnp.float32
    assert_allclose(coarse, exact, rtol=1e-5)
