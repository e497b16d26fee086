"""Stacks by name and by file: what ships loads, what is malformed is refused in one line."""

import dataclasses
import math
import re
import tomllib

import jax
import numpy as np
import pytest

from diffperf.estimate import train_step
from diffperf.hardware import load_system
from diffperf.parallel import make_plan
from diffperf.stack import FittedConstant, Stack, UnknownStackError, describe_stack, load_stack, resolve_stack_name, stack_names, write_stack
from diffperf.stack._catalog import ALIASES, FIELDS, FITTED_DIRECTORY
from diffperf.workload import load_model

CONSTANTS = {name: FittedConstant(name, 0.5, 0.25, 1.0, 0.75) for name in FIELDS}


@pytest.mark.parametrize("name", stack_names())
def test_shipped_stack_is_positive_and_says_how_it_was_made(name):
    stack, (meta, constants) = load_stack(name), describe_stack(name)
    for field in FIELDS:
        value = getattr(stack, field)
        assert value.shape == () and math.isfinite(value) and value > 0, field
    assert {"date", "data", "quality", "name", "family", "rows"} <= set(meta) and meta["name"] == name
    assert [c.name for c in constants] == list(FIELDS)
    for c in constants:
        assert c.low <= c.value * (1 + 1e-5) and c.value <= c.high * (1 + 1e-5), c


def test_shipped_fractions_are_fractions():
    fractions = ("vocabulary_share", "tensor_exposed", "context_exposed", "pipeline_exposed", "data_overlap", "shard_overlap")
    for name in stack_names():
        _, constants = describe_stack(name)
        assert all(0 < c.value < 1 and c.high < 1 for c in constants if c.name in fractions), name


def test_every_alias_and_spelling_resolves():
    assert {alias for alias, name in ALIASES.items() if name not in stack_names()} == set()
    for alias, name in ALIASES.items():
        assert resolve_stack_name(alias) == (alias if alias in stack_names() else name)
    assert resolve_stack_name(" Megatron_Core ") == "megatron-core"
    assert resolve_stack_name("MLPerf NVIDIA") == "mlperf-nvidia"
    assert resolve_stack_name("FSDP") == "family-fsdp"


@pytest.mark.parametrize("name, near", [("torchtitn", "torchtitan"), ("megatron core 2", "megatron-core"), ("deepspede", "deepspeed"), ("", "none")])
def test_unknown_name_lists_near_ones(name, near):
    with pytest.raises(UnknownStackError, match=re.escape(repr(name))) as caught:
        load_stack(name)
    assert near in str(caught.value).split("near names: ")[1].split(". All:")[0]
    assert "\n" not in str(caught.value)


def test_typical_stack_predicts_a_finite_step_with_finite_gradient():
    model, system = load_model("llama-3.1-8b"), load_system("h100_sxm", num_devices=64)
    plan = make_plan(global_batch_size=128, data_parallel=64)
    step = lambda stack: train_step(model, system, plan, stack).step_time
    value, gradient = jax.jit(jax.value_and_grad(step))(load_stack())
    assert 1 < value < 60
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(gradient))
    estimate = jax.jit(train_step)(model, system, plan, load_stack("typical"))
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(estimate))


def test_all_stacks_share_one_structure():
    structures = {jax.tree.structure(load_stack(name)) for name in stack_names()}
    assert structures == {jax.tree.structure(load_stack())}


def test_written_stack_reads_back(tmp_path):
    path = tmp_path / "mine.toml"
    constants = {name: FittedConstant(name, 1.5e-5 * (i + 1), 1e-6, 3.0, 0.25) for i, name in enumerate(FIELDS)}
    write_stack(path, constants, dict(name='the "new" image 🚀', family="mcore", rows=3))
    meta, back = describe_stack(path)
    assert meta == dict(name='the "new" image 🚀', family="mcore", rows=3)
    for c in back:
        np.testing.assert_allclose(dataclasses.astuple(c)[1:], dataclasses.astuple(constants[c.name])[1:], rtol=1e-5)
    for source in (path, str(path)):
        np.testing.assert_allclose(float(load_stack(source).matmul_factor), 1.5e-5, rtol=1e-5)


def test_rewritten_file_is_read_again(tmp_path):
    path = tmp_path / "mine.toml"
    write_stack(path, CONSTANTS, {})
    assert load_stack(path).matmul_factor == 0.5
    write_stack(path, CONSTANTS | {"matmul_factor": FittedConstant("matmul_factor", 0.9, 0.8, 1.0, 1.0)}, {})
    np.testing.assert_allclose(float(load_stack(path).matmul_factor), 0.9, rtol=1e-6)


def test_shipped_file_survives_a_round_trip(tmp_path):
    meta, constants = describe_stack("torchtitan")
    write_stack(tmp_path / "copy.toml", {c.name: c for c in constants}, meta)
    assert describe_stack(tmp_path / "copy.toml") == (meta, constants)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("key", ["value", "low", "high", "prior"])
def test_non_finite_constants_are_refused_and_nothing_is_written(tmp_path, key, bad):
    wrong = CONSTANTS | {"launch_time": dataclasses.replace(CONSTANTS["launch_time"], **{key: bad})}
    with pytest.raises(ValueError, match=f"launch_time has {key}"):
        write_stack(tmp_path / "mine.toml", wrong, {})
    assert list(tmp_path.iterdir()) == []


def test_missing_constant_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lack launch_time"):
        write_stack(tmp_path / "mine.toml", {k: v for k, v in CONSTANTS.items() if k != "launch_time"}, {})
    assert list(tmp_path.iterdir()) == []


def _file(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def _values(**changed):
    lines = {name: "{ value = 0.5 }" for name in FIELDS} | changed
    return "[values]\n" + "\n".join(f"{name} = {text}" for name, text in lines.items() if text is not None)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "lacks"),
        ("not toml at all", "cannot be read as a stack"),
        (b"\xff\xfe\x00", "cannot be read as a stack"),
        ("values = 3", "should be tables"),
        ("fit = 3\n" + _values(), "should be tables"),
        (_values(launch_time=None), r"lacks \['launch_time'\]"),
        (_values(speed="{ value = 1.0 }"), r"unknown \['speed'\]"),
        (_values(launch_time="0.5"), "launch_time is 0.5"),
        (_values(launch_time='{ value = "fast" }'), "positive, finite number"),
        (_values(launch_time="{ value = nan }"), "positive, finite number"),
        (_values(launch_time="{ value = -1.0 }"), "positive, finite number"),
        (_values(launch_time="{ value = true }"), "positive, finite number"),
        (_values(launch_time="{ low = 1.0 }"), "positive, finite number"),
        (_values(launch_time='{ value = 1.0, low = "?" }'), "positive, finite number"),
        (_values(launch_time="{ value = 1.0, high = inf }"), "positive, finite number"),
    ],
)
def test_malformed_file_is_refused_by_name_in_one_line(tmp_path, text, message):
    path = _file(tmp_path, text)
    for door in (load_stack, describe_stack):
        with pytest.raises(ValueError, match=message) as caught:
            door(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="none.toml: cannot be read as a stack"):
        load_stack(tmp_path / "none.toml")


def test_interval_defaults_to_the_value(tmp_path):
    _, constants = describe_stack(_file(tmp_path, _values()))
    assert {(c.value, c.low, c.high, c.prior) for c in constants} == {(0.5, 0.5, 0.5, 0.5)}


def test_every_file_in_the_folder_is_a_stack_of_its_name():
    for path in FITTED_DIRECTORY.iterdir():
        assert path.suffix == ".toml" and tomllib.loads(path.read_text(encoding="utf-8"))["fit"]["name"] == path.stem
    assert {field.name for field in dataclasses.fields(Stack)} == set(FIELDS)
