"""The catalog: every file loads and is sensible, every usual spelling is known, mistakes are named, fits replace priors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffperf import hardware
from diffperf.hardware import _catalog

NAMES = hardware.system_names()
D = hardware.DATATYPES

# Spelling in published tables and in other tools -> catalog name.
SPELLINGS = {
    "A100-40GB-SXM": "a100_sxm_40", "A100-80GB-PCIe": "a100_pcie_80", "A100-80GB-SXM": "a100_sxm_80", "A100-PCIe": "a100_pcie_80",
    "A100-SXM": "a100_sxm_80", "A30-24GB-PCIe": "a30", "A40-48GB-PCIe": "a40", "B200-SXM": "b200_sxm", "B300-SXM": "b300_sxm",
    "GB200-NVL72": "gb200_nvl72", "GB300-NVL72": "gb300_nvl72", "Gaudi2": "gaudi2", "H100-80GB-PCIe": "h100_pcie", "H100-80GB-SXM": "h100_sxm",
    "H100-96GB-HBM2e-500W": "h100_sxm_96", "H100-NVL": "h100_nvl", "H200-141GB-SXM": "h200_sxm", "H200-NVL": "h200_nvl", "L4-24GB-PCIe": "l4",
    "L40-48GB-PCIe": "l40", "L40S-48GB": "l40s", "MI300X": "mi300x", "MI325X": "mi325x", "MI350X": "mi350x", "MI355X": "mi355x",
    "NVIDIA A10G": "a10g", "RTX-A5000": "rtx_a5000", "RTX-Pro-6000-96GB-PCIe": "rtx_pro_6000", "TPU-v4": "tpu_v4", "TPU-v5e": "tpu_v5e",
    "TPU-v5p": "tpu_v5p", "TPU-v6e": "tpu_v6e", "TPU-v7x(Ironwood)": "tpu_v7x", "Trainium1 (NeuronCore)": "trainium1_core",
    "V100-16GB-SXM2": "v100_sxm2_16", "V100-16GB-SXM2 (p3.16xlarge)": "v100_p3_16xlarge", "V100-32GB-SXM2": "v100_sxm2_32",
    "V100-32GB-SXM3 (DGX-2)": "v100_sxm3_dgx2", "V100-32GB-SXM3 (DGX-2H)": "v100_sxm3_dgx2h",
    "a100_pcie": "a100_pcie_80", "a100_sxm": "a100_sxm_80", "a30": "a30", "b200_sxm": "b200_sxm", "b300_sxm": "b300_sxm", "gb200": "gb200_nvl72",
    "gb300": "gb300_nvl72", "h100_pcie": "h100_pcie", "h100_sxm": "h100_sxm", "h200_sxm": "h200_sxm", "l4": "l4", "l40s": "l40s",
    "MI300X (gfx942)": "mi300x", "H100 (sm_90)": "h100_sxm", "H100 SXM (sm_90)": "h100_sxm", "NVIDIA A100-PCIE-40GB": "a100_pcie_40",
    "A100 PCIe 80GB": "a100_pcie_80", "A100 SXM 40GB": "a100_sxm_40", "A100 SXM (DGX A100)": "a100_sxm_80", "AMD Instinct MI210": "mi210", "MI25": "mi25",
    "Google TPU v6e (Trillium)": "tpu_v6e", "V100 (DGX-1)": "v100_sxm2_16", "V100 SXM2 16GB": "v100_sxm2_16", "Tesla V100-PCIE-32GB": "v100_pcie_32",
    "Tesla T4": "t4", "P100": "p100_sxm2", "GH200": "gh200", "Intel Gaudi 2": "gaudi2", "MI250X (8 GCD per node)": "mi250x_gcd",
    # `device_kind` of JAX
    "NVIDIA H200": "h200_sxm", "NVIDIA H100 80GB HBM3": "h100_sxm", "NVIDIA H100 PCIe": "h100_pcie", "NVIDIA A100-SXM4-80GB": "a100_sxm_80",
    "NVIDIA A100-SXM4-40GB": "a100_sxm_40", "NVIDIA A100 80GB PCIe": "a100_pcie_80", "Tesla V100-SXM2-16GB": "v100_sxm2_16", "NVIDIA B200": "b200_sxm",
    "NVIDIA GB200": "gb200_nvl72", "NVIDIA L40S": "l40s", "NVIDIA GH200 480GB": "gh200", "AMD Instinct MI300X": "mi300x", "TPU v4": "tpu_v4",
    "TPU v5 lite": "tpu_v5e", "TPU v5": "tpu_v5p", "TPU v5p": "tpu_v5p", "TPU v6 lite": "tpu_v6e", "TPU7x": "tpu_v7x", "cpu": "cpu",
    "rtx_pro_6000_server": "rtx_pro_6000", "  h100 ": "h100_sxm", "Tpu V5P": "tpu_v5p", "CPU": "cpu", "H800": "h800_sxm", "A800": "a800_sxm",
}  # fmt: skip

OWN = """
base = "h100_sxm"
name = "own"
[scale_out]
bandwidth = { value = 25e9, source = "our NICs, 200 Gbit/s" }
"""


@pytest.fixture
def own_fits(tmp_path, monkeypatch):
    """An empty folder of fits, so that a test sees no fit shipped and writes none."""
    monkeypatch.setattr(_catalog, "FITTED_DIRECTORY", tmp_path / "fitted")
    return tmp_path / "fitted"


def peaks(system):
    return {name: float(peak) for name, peak in zip(D, system.chip.peak_flops_per_s) if peak > 0}


@pytest.mark.parametrize("name", NAMES)
def test_every_system_loads_and_its_peaks_are_ordered(name):
    system = hardware.load_system(name, fitted=False)
    peak = peaks(system)
    sixteen = max(peak.get("bf16", 0), peak.get("fp16", 0))
    assert sixteen > 0 and peak["fp32"] <= sixteen
    assert peak["fp32"] <= peak.get("tf32", sixteen) <= sixteen * 1.0001
    assert all(peak[d] >= sixteen * 0.9999 for d in ("fp8", "mxfp8") if d in peak)
    assert peak.get("nvfp4", np.inf) >= peak.get("fp8", 0)
    assert "mxfp8" not in peak or peak["mxfp8"] == peak["fp8"]
    if {"bf16", "fp16"} <= set(peak):
        assert peak["bf16"] == peak["fp16"]
    chip = system.chip
    assert 25 < sixteen / chip.memory_bandwidth < 700 or name == "cpu"  # FLOP per byte at the ridge; least without matrix units (pascal)
    assert chip.idle_power < chip.power and chip.l2_capacity < chip.memory_capacity
    assert np.all((np.asarray(chip.matmul_efficiency) > 0) & (np.asarray(chip.matmul_efficiency) <= 1))
    for tier in (system.scale_up, system.scale_out, system.spine):
        assert 0 < tier.efficiency <= 1 and 1e-7 < tier.latency < 1e-3
    assert system.scale_up.bandwidth >= system.scale_out.bandwidth >= system.spine.bandwidth
    assert 1 <= system.scale_up.domain <= system.scale_out.domain <= system.spine.domain
    assert system.num_devices == system.scale_up.domain
    assert 0 < system.price_per_hour < 50 and 1 <= system.power_usage_effectiveness < 2


def test_all_systems_share_one_tree_structure_and_one_compilation():
    systems = [hardware.load_system(name) for name in NAMES]
    assert len({jax.tree.structure(system) for system in systems}) == 1
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *systems)
    traces = []
    ridge = jax.vmap(lambda s: (traces.append(0), s.chip.peak_flops_per_s[D.index("bf16")] / s.chip.memory_bandwidth)[1])(stacked)
    assert ridge.shape == (len(NAMES),) and len(traces) == 1
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(stacked))


@pytest.mark.parametrize("spelling, name", SPELLINGS.items())
def test_usual_spellings_resolve(spelling, name):
    assert hardware.resolve_name(spelling) == name


def test_every_spelling_belongs_to_one_system_and_files_are_called_by_their_name():
    owner = {}
    for name, path in _catalog._files().items():
        spec = _catalog._spec(path, path.stat().st_mtime_ns)
        assert spec.name == name
        for key in {_catalog._key(spelling) for spelling in (name, *spec.aliases)}:
            assert owner.setdefault(key, name) == name, f"{key} names both {owner[key]} and {name}"
            assert hardware.resolve_name(key) == name
    assert hardware.generation("H100") == "hopper" and hardware.vendor("mi300x") == "AMD"


def test_datasheet_numbers():
    h100 = hardware.load_system("h100", fitted=False)
    # NVIDIA H100 datasheet: bf16 1979 TFLOP/s with sparsity, so half without; 3.35 TB/s; NVLink 900 GB/s both directions; 8 x 400 Gbit/s NICs.
    np.testing.assert_allclose(h100.chip.peak_flops_per_s[D.index("bf16")], 1979e12 / 2, rtol=1e-3)
    np.testing.assert_allclose(h100.chip.memory_bandwidth, 3.35e12, rtol=1e-6)
    np.testing.assert_allclose([h100.scale_up.bandwidth, h100.scale_out.bandwidth], [900e9 / 2, 400e9 / 8], rtol=1e-6)
    assert h100.scale_up.domain == 8 and h100.chip.num_processors == 132
    # Cloud TPU documentation, v5p: 459 TFLOP/s, 2765 GB/s, ICI 1200 GB/s both directions in a 3D torus of 8960 chips, 50 Gbit/s to the data centre.
    v5p = hardware.load_system("tpu_v5p", fitted=False)
    np.testing.assert_allclose(v5p.chip.peak_flops_per_s[D.index("bf16")], 459e12, rtol=1e-6)
    np.testing.assert_allclose([v5p.scale_up.bandwidth, v5p.scale_out.bandwidth], [1200e9 / 2, 50e9 / 8], rtol=1e-6)
    assert v5p.scale_up.torus_axes == 3 and v5p.scale_up.domain == 8960
    # NVIDIA A100 datasheet against V100: 312 and 125 TFLOP/s dense, and bf16 only on the former.
    assert peaks(hardware.load_system("V100"))["fp16"] == pytest.approx(125e12) and "bf16" not in peaks(hardware.load_system("V100"))


def test_overrides_change_what_they_name_only():
    base, big = hardware.load_system("h100"), hardware.load_system("h100", num_devices=512, scale_out_bandwidth=25e9)
    assert big.num_devices == 512
    np.testing.assert_allclose([big.scale_out.bandwidth, big.spine.bandwidth], 25e9)
    np.testing.assert_allclose(jax.tree.leaves(big.chip)[0], jax.tree.leaves(base.chip)[0])
    slice_ = hardware.load_system("tpu_v5p", domain=64)
    assert slice_.scale_up.domain == 64 and slice_.num_devices == 64


@pytest.mark.parametrize("override", ["num_devices", "domain", "scale_out_bandwidth"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_bad_override_is_refused(override, value):
    with pytest.raises(ValueError, match=f"{override} is .*positive, finite"):
        hardware.load_system("h100", **{override: value})


def test_an_unknown_name_suggests_near_ones():
    with pytest.raises(hardware.UnknownNameError, match="'h1000'.*h100_sxm.*TOML"):
        hardware.load_system("h1000")
    with pytest.raises(hardware.UnknownNameError, match="mi300x"):
        hardware.resolve_name("mi-300")
    with pytest.raises(ValueError, match="no such file"):
        hardware.load_system("nowhere.toml")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("value = 3.35e12", "value = -3.35e12", r"chip.memory_bandwidth.value is -3350000000000.0; .*greater than"),
        ("value = 3.35e12", "value = nan", r"chip.memory_bandwidth.value is nan; .*finite"),
        ("value = 3.35e12", "value = 3350", r"chip.memory_bandwidth.value is 3350; .*B/s \(SI"),
        ("value = 3.35e12", 'value = "3.35 TB/s"', r"chip.memory_bandwidth.value is '3.35 TB/s'; .*number"),
        ("value = 3.35e12", "value = true", r"chip.memory_bandwidth.value is True; .*number"),
        ("value = 3.35e12, ", "", r"missing key chip.memory_bandwidth.value"),
        ('{ value = 3.35e12, source = "NVIDIA H100 datasheet" }', "3.35e12", r"chip.memory_bandwidth is 3350000000000.0; .*source ="),
        ('{ value = 3.35e12, source = "NVIDIA H100 datasheet" }', '{ value = 3.35e12, source = "" }', r"chip.memory_bandwidth.source is ''"),
        ("memory_bandwidth =", "memory_bandwith =", r"unknown key chip.memory_bandwith. Accepted here: .*memory_bandwidth"),
        ('bandwidth = { value = 4.5e11, source = "NVIDIA H100 datasheet: 900 GB/s both directions" }', "", r"missing key scale_up.bandwidth.* in B/s"),
        ('generation = "hopper"', 'generation = "rubin"', r"generation is 'rubin'; .*'volta'"),
        ('technology = "nvlink"', 'technology = "string"', r"scale_up.technology is 'string'; .*'nvlink'"),
        ('name = "h100_sxm"\n', "", r"missing key name"),
        ("[scale_out]", "[scale_out", r"not a TOML file.*line"),
        ("domain = { value = 8,", "domain = { value = 99999,", r"scale_out.domain is 16384; .*at least scale_up.domain = 99999"),
        ("idle_power = { value = 75,", "idle_power = { value = 750,", r"chip.idle_power is 750 W; .*chip.power"),
    ],
)
def test_each_mistake_in_a_file_is_named(tmp_path, old, new, message):
    text = (_catalog.CATALOG_DIRECTORY / "h100_sxm.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        hardware.load_system(path)
    assert "mine.toml" in str(caught.value)


def test_a_datatype_left_out_is_a_unit_that_the_chip_lacks_but_one_of_16_bit_must_be_there(tmp_path):
    lines = (_catalog.CATALOG_DIRECTORY / "h100_sxm.toml").read_text().splitlines()
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith("bf16")))
    assert hardware.load_system(path).chip.peak_flops_per_s[D.index("bf16")] == 0
    path = tmp_path / "other.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith(("fp16", "bf16"))))
    with pytest.raises(ValueError, match="neither fp16 nor bf16"):
        hardware.load_system(path)


def test_a_file_may_start_from_a_catalog_system(tmp_path, own_fits):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    own, base = hardware.load_system(str(path)), hardware.load_system("h100_sxm")
    np.testing.assert_allclose([own.scale_out.bandwidth, own.spine.bandwidth], 25e9)
    np.testing.assert_allclose(own.chip.peak_flops_per_s, base.chip.peak_flops_per_s)
    assert hardware.generation(path) == "hopper"
    # The base's fit holds for what the file leaves open; what the file says, and its own fit, come first.
    meta = {"date": "2025-01-01", "data": "base runs", "quality": "good"}
    hardware.write_fitted("h100_sxm", {"chip.matmul_efficiency.bf16": 0.61, "scale_out.bandwidth": 40e9, "scale_up.efficiency": 0.5}, meta)
    hardware.write_fitted(path, {"scale_up.efficiency": 0.9}, meta)
    own = hardware.load_system(path)
    found = [own.chip.matmul_efficiency[D.index("bf16")], own.scale_out.bandwidth, own.scale_up.efficiency]
    np.testing.assert_allclose(found, [0.61, 25e9, 0.9])
    path.write_text(OWN.replace("h100_sxm", "h1oo"))
    with pytest.raises(ValueError, match="own.toml: base: .*'h1oo'"):
        hardware.load_system(path)


def test_a_fit_survives_the_round_trip_and_replaces_priors(own_fits):
    before = hardware.load_system("A100")
    values = {
        "chip.matmul_efficiency.bf16": {"value": 0.1 + 0.2, "low": 0.25, "high": 0.35},
        "chip.attention_efficiency": (0.41, 0.4, 0.43),
        "scale_up.efficiency": 0.8,
        "scale_out.latency": (1.23456789012345e-06, 1e-06, 2e-06),
    }
    meta = {"date": "2025-06-30", "data": 'training "runs" \\ with\nüñí\x7f', "quality": "median error 5 %", "rows": 12}
    path = hardware.write_fitted("A100", values, meta)
    assert path == own_fits / "a100_sxm_80.toml" and [file.name for file in own_fits.iterdir()] == [path.name]
    after = hardware.load_system("A100")
    assert after.chip.matmul_efficiency[D.index("bf16")] == jnp.asarray(0.1 + 0.2, float)
    assert after.chip.matmul_efficiency[D.index("fp16")] == before.chip.matmul_efficiency[D.index("fp16")]
    np.testing.assert_allclose(after.spine.latency, 1.23456789012345e-06, rtol=1e-6)  # the spine repeats scale_out, fit included
    rows = {row.path: row for row in hardware.describe("A100")}
    row = rows["chip.matmul_efficiency.bf16"]
    assert (row.value, row.fitted, row.low, row.high, row.prior) == (0.1 + 0.2, 0.1 + 0.2, 0.25, 0.35, 0.75)
    assert row.source == f"fit of 2025-06-30: {meta['data']}" and rows["scale_out.latency"].value == 1.23456789012345e-06
    assert rows["chip.memory_bandwidth"].fitted is None
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(hardware.load_system("A100", fitted=False))):
        np.testing.assert_array_equal(left, right)
    elsewhere = hardware.write_fitted("A100", {"chip.memory_efficiency": 0.5}, meta, path=own_fits / "other.toml")
    np.testing.assert_allclose(hardware.load_system("A100", fitted=elsewhere).chip.memory_efficiency, 0.5)


@pytest.mark.parametrize(
    "values, meta, message",
    [
        ({"chip.matmul_eficiency.bf16": 0.5}, {}, "unknown key values.*chip.matmul_efficiency.bf16"),
        ({"num_devices": 8}, {}, "unknown key"),
        ({"scale_up.efficiency": float("nan")}, {}, "scale_up.efficiency.value is nan; .*finite"),
        ({"scale_up.efficiency": -0.5}, {}, "greater than 0"),
        ({"scale_up.efficiency": (0.9, 0.1, 0.5)}, {}, "should lie between"),
        ({"scale_up.efficiency": 0.5}, {"date": None}, "missing key fit.date"),
    ],
)
def test_a_bad_fit_is_refused_and_leaves_the_old_file(own_fits, values, meta, message):
    good = {"date": "2025-06-30", "data": "runs", "quality": "fair"}
    path = hardware.write_fitted("A100", {"scale_up.efficiency": 0.8}, good)
    content = path.read_text()
    with pytest.raises(ValueError, match=message):
        hardware.write_fitted("A100", values, {key: value for key, value in (good | meta).items() if value is not None})
    assert path.read_text() == content and len(list(own_fits.iterdir())) == 1


@pytest.mark.parametrize("name", NAMES)
def test_describe_has_one_sourced_row_per_number_of_the_system_in_order(name):
    system, rows = hardware.load_system(name), hardware.describe(name)
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(system)])
    np.testing.assert_allclose([row.value for row in rows], flat, rtol=1e-6)
    paths = []
    for keys, leaf in jax.tree.leaves_with_path(system):
        path = ".".join(key.name for key in keys)
        paths += [f"{path}.{d}" for d in D] if leaf.ndim else [path]
    assert [row.path for row in rows] == paths
    for row in rows:
        assert row.source.strip() and row.unit
        if "efficiency" in row.path and row.fitted is None:
            assert "prior: " in row.source


def test_what_the_package_import_costs():
    """Neither pydantic nor rapidfuzz nor a TOML file is touched by the import (a fresh process shows it)."""
    import subprocess
    import sys

    code = (
        "import sys, diffperf.hardware as h; from diffperf.hardware import _catalog as c;"
        "print(len({'pydantic', 'rapidfuzz', 'diffperf.hardware._schema'} & set(sys.modules)), c._files.cache_info().currsize, c._priors.cache_info().currsize)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["0", "0", "0"]


def test_loading_by_name_reads_one_system_file_only():
    _catalog._spec.cache_clear()
    _catalog._merged.cache_clear()
    hardware.load_system("tpu_v4")
    hardware.load_system("TPU v4")
    assert _catalog._spec.cache_info().currsize == 1


def test_an_own_file_without_a_name_is_called_after_its_file(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "h100_sxm"\n[chip]\nmemory_bandwidth = { value = 4e12, source = "me" }\n', encoding="utf-8")
    assert float(hardware.load_system(tmp_path / "mine.toml").chip.memory_bandwidth) == pytest.approx(4e12)
