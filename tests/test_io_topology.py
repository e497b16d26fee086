"""Topologies: every shared file loads with the numbers its machine has; broken files say where."""

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from diffperf.io import TopologyError, read_topology

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "topologies"
shared = pytest.mark.skipif(not DATA.is_dir(), reason="the shared topologies (../shared/data/topologies) are not on this machine")

XML = """\
<system version="1">
  <cpu numaid="0" arch="x86_64">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:0a:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0">
          <nvlink target="0000:0b:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:0b:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1">
          <nvlink target="0000:0a:00.0" count="4" tclass="0x030200"/>
        </gpu>
      </pci>
      <pci busid="0000:0c:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" speed="200000" port="1"/>
        </nic>
      </pci>
    </pci>
  </cpu>
  <cpu numaid="1" arch="x86_64">
    <pci busid="0000:0d:00.0" class="0x030200" link_speed="8 GT/s" link_width="8"/>
  </cpu>
</system>
"""
MATRIX = """\
	GPU0	GPU1	GPU2	mlx5_0	CPU Affinity	NUMA Affinity
GPU0	 X 	NV2	PXB	PIX	0-15	0
GPU1	NV2	 X 	SYS	NODE	0-15	0
GPU2	PXB	SYS	 X 	PHB	16-31	1
mlx5_0	PIX	NODE	PHB	 X

Legend:
  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text, **options):
        (tmp_path / "t").write_text(text, encoding="utf-8")
        return read_topology(tmp_path / "t", **options)

    return read_text


def test_xml(read):
    topology = read(XML)
    assert [gpu.name for gpu in topology.gpus] == ["0000:0a:00.0", "0000:0b:00.0", "0000:0d:00.0"] and [gpu.rank for gpu in topology.gpus] == [0, 1, -1]
    assert_allclose(topology.nic_rates, [25e9])  # 200 Gbit/s
    assert topology.links_per_pair().tolist() == [[0, 4, 0], [4, 0, 0], [0, 0, 0]]
    names, capacity = topology.capacity()
    assert_allclose(capacity[0, 1], 4 * 25e9) and names == tuple(gpu.name for gpu in topology.gpus)
    pcie = {link.ends[1]: link.bandwidth for link in topology.links if link.kind == "pcie"}
    assert_allclose(pcie["0000:0a:00.0"], 16e9 * 16 / 8 * 128 / 130)  # PCIe 4 x16: 31.5 GB/s
    assert_allclose(pcie["0000:0d:00.0"], 8e9 * 8 / 8 * 128 / 130)
    a, b, c = (gpu.name for gpu in topology.gpus)
    assert [topology.relations[pair] for pair in ((a, b), (b, a), (a, c), (a, "mlx5_0"))] == ["NV4", "NV4", "SYS", "PIX"]
    assert topology.problems == ()


def test_matrix(read):
    topology = read(MATRIX, link_bandwidth=25e9)
    assert len(topology.gpus) == 3 and [nic.name for nic in topology.nics] == ["mlx5_0"] and topology.problems == ()
    assert topology.links_per_pair().tolist() == [[0, 2, 0], [2, 0, 0], [0, 0, 0]]
    assert topology.capacity()[1][0, 1] == 50e9
    assert topology.relations["GPU0", "mlx5_0"] == "PIX" and topology.relations["GPU2", "GPU1"] == "SYS"
    with pytest.raises(TopologyError, match="t:2: the nvlink link between GPU0 and GPU1 has no stated bandwidth"):
        read(MATRIX).capacity()


def test_a_matrix_with_more_links_than_a_gpu_has_goes_through_a_switch(read):
    names = [f"GPU{k}" for k in range(8)]
    rows = [" ".join([a, *("X" if a == b else "NV12" for b in names)]) for a in names]
    topology = read("\x1b[4m" + " ".join(names) + "\x1b[0m\n" + "\n".join(rows), link_bandwidth=25e9)
    assert np.all(topology.links_per_pair() == 12 * (1 - np.eye(8)))
    devices, capacity = topology.capacity()
    assert devices[-1] == "nvswitch" and capacity.sum(axis=1)[:8].tolist() == [300e9] * 8  # not 7 x 300 GB/s


@pytest.mark.parametrize("cut", range(150, len(XML) - 60, 40))
def test_truncated_xml_is_read_as_far_as_it_goes(read, cut):
    text = XML[:cut]
    try:
        topology = read(text)
    except TopologyError as error:
        assert "t:" in str(error) and text.count("<gpu") == 0  # nothing to read yet
        return
    assert "the file ends early, inside <" in topology.problems[0] or "the file ends early" in " ".join(topology.problems)
    assert len(topology.gpus) >= text.count("<gpu")


@pytest.mark.parametrize("change, words", [
    (("<system", "<sistem"), "t:1: the outermost element is <sistem>"),
    (("</gpu>", "</gpo>"), "t:7: the XML is broken: mismatched tag"),
    (("0000:0b:00.0\" class", "0000:01:00.0\" class"), "t:9: 0000:01:00.0 lies inside itself: a cycle"),
    (('speed="200000"', 'speed="fast"'), "t:16: speed is 'fast'; it should be a number"),
    (('sm="80"', 'sm="x"'), "t:5: sm is 'x'"),
    (('busid="0000:0c:00.0" ', ""), "t:14: a <pci> element has no busid"),
    (("<system", '<!DOCTYPE s [<!ENTITY a "b">]>\n<system'), "declares an XML entity"),
])  # fmt: skip
def test_broken_xml_says_where(read, change, words):
    with pytest.raises(TopologyError, match=words):
        read(XML.replace(*change))


@pytest.mark.parametrize("change, words, links", [
    (('target="0000:0b:00.0"', 'target="0000:ff:00.0"'), "t:6: 0000:0a:00.0 has 4 links to 0000:ff:00.0, which is not in the file", 4),
    (('target="0000:0b:00.0" count="4"', 'target="0000:0b:00.0" count="3"'), "has 3 links to 0000:0b:00.0, which has 4 back", 3),
    (('          <nvlink target="0000:0b:00.0" count="4" tclass="0x030200"/>\n', ""), "has 4 links to 0000:0a:00.0, which has 0 back", 4),
    (('target="0000:0b:00.0" count="4"', 'target="" count="4"'), "target ''", 4),
    (('sm="80" rank="0"', 'sm="12" rank="0"'), "the generation of 0000:0a:00.0 is not known", 4),
    (('busid="0000:0d:00.0"', 'busid="0000:0b:00.0"'), "0000:0b:00.0 stands a second time (first in line 9)", 4),
    (('link_speed="8 GT/s" link_width="8"', 'link_speed="" link_width="0"'), "its PCIe bandwidth is not known", 4),
])  # fmt: skip
def test_what_is_missing_is_reported(read, change, words, links):
    topology = read(XML.replace(*change))
    assert words in " ".join(topology.problems)
    assert topology.links_per_pair()[0, 1] == links


@pytest.mark.parametrize("text, words", [
    ("", "is empty"), ("hello\n", "t:1: neither topology XML nor"), ("<system version='1'></system>", "no GPU"), ("<system>", "no GPU"),
    (MATRIX.replace("NV2", "NVX"), "t:2: the relation of GPU0 to GPU1 is 'NVX'"), (MATRIX.replace(" X ", "PIX", 1), "t:2: GPU0 to GPU0 is 'PIX'"),
])  # fmt: skip
def test_what_is_no_topology(read, text, words):
    with pytest.raises(TopologyError, match=words):
        read(text)


def test_a_matrix_with_gaps(read):
    lines = MATRIX.splitlines()
    topology = read("\n".join(lines[:2] + lines[3:]))  # without GPU1's row
    assert topology.relations["GPU1", "GPU2"] == "SYS" and "the row of GPU1 is missing" in topology.problems[0]
    topology = read("\n".join(lines[:2]))
    assert topology.relations["GPU0", "GPU1"] == "NV2" and "how GPU1 reaches GPU2 is missing" in " ".join(topology.problems)
    assert "GPU0 to GPU1 is NV2 and back NV4" in " ".join(read(MATRIX.replace("GPU1\tNV2", "GPU1\tNV4")).problems)


EXPECTED = {  # GPUs, NICs, links between the first two GPUs
    "aws_g5_a10g_topo.xml": (0, 0, None), "aws_p4d_a100_topo.xml": (8, 4, 0), "azure_ncv4_a100pcie_topo.xml": (4, 1, 0),
    "azure_ndv4_a100_topo.xml": (8, 8, 0), "azure_ndv5_h100_topo.xml": (8, 8, 0), "oci_h100_topo.xml": (8, 16, 18), "rccl_3p_pcie.xml": (3, 1, 0),
    "rccl_4p2h.xml": (8, 1, 1), "rccl_8p1h.xml": (8, 4, 4), "rccl_8p6l_2nic.xml": (8, 2, 1), "nvidia_smi_topo_dgx_a100.txt": (8, 0, 12),
    "nvidia_smi_topo_4xv100_nv2.txt": (4, 1, 2),
}  # fmt: skip


@shared
def test_all_shared_topologies_load():
    with open(DATA / "INDEX.csv", encoding="utf-8") as file:
        names = [row["file"] for row in csv.DictReader(file)]
    assert set(names) == set(EXPECTED)
    for name in names:
        topology = read_topology(DATA / name)
        gpus, nics, links = EXPECTED[name]
        assert (len(topology.gpus), len(topology.nics)) == (gpus, nics), name
        assert links is None or topology.links_per_pair()[0, 1] == links, name


@shared
def test_bandwidths_of_shared_topologies():
    topology = read_topology(DATA / "oci_h100_topo.xml")
    assert_allclose(topology.nic_rates, 22.5e9)  # 180 Gbit/s each
    names, capacity = topology.capacity()
    assert len(names) == 8 + 4  # GPUs and the switches, which have no entry of their own
    assert_allclose(capacity.sum(axis=1)[:8], 18 * 25e9)  # 450 GB/s in one direction, the datasheet's 900 in both
    topology = read_topology(DATA / "rccl_8p6l_2nic.xml")
    assert np.all(topology.links_per_pair().sum(axis=1) == 6)
