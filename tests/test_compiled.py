"""Compiled code is right as users compile it: the tests here switch most of XLA's optimizations off (conftest), so those that compare compiled with eager
results run once more with all of them. jax 0.10.2 and 0.11.0 failed such a comparison (jax-ml/jax#39103)."""

import os
import subprocess
import sys

AGREEMENTS = (
    "test_estimate.py::test_eager_is_jit",
    "test_kernel_matmul.py::test_jit_vmap_and_eager_agree",
    "test_kernel_attention.py::test_jit_vmap_and_eager_agree",
    "test_kernel_streaming.py::test_jit_vmap_and_eager_agree",
    "test_collective_model.py::test_units_and_transforms",
    "test_task_graph.py::test_transforms_agree",
    "test_smooth.py::test_eager_jit_and_vmap_agree",
)


def test_compiled_with_all_optimizations_is_eager():
    places = [os.path.join(os.path.dirname(__file__), name) for name in AGREEMENTS]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *places], env=environment,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
