"""`train_step` on blocks of rows that differ in a few numbers: what `tune` and `sweep` run on.

Which numbers differ is itself an input, as positions in the packed inputs, so that one compilation serves every search and sweep over models
with the same number of kinds of layer. Blocks of some 10,000 rows keep intermediates in cache; rows are split over all devices.
"""

import functools
import math
import time
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ._estimate import Estimate
from ._paths import Layout, layout_of, pack, path_names, unpack
from ._train import train_step

BLOCK = 16384
_WIDTH = 24  # numbers that may differ are padded to a multiple of this, so that small searches share a compilation


class BlockResult(NamedTuple):
    """Estimates of one block of rows.

    Attributes:
      estimate: leaves of shape (block,), on the device.
      data_parallel: degree in use, shape (block,). [1]
      elasticities: d ln step time / d ln number, shape (paths, block). [1]
    """

    estimate: Estimate
    data_parallel: Float[Array, " block"]
    elasticities: Float[Array, "paths block"]


class BatchStep:
    """Evaluates blocks of rows around one base configuration.

    Attributes:
      names: dotted name of each packed number.
      block: rows of one call, a multiple of the number of devices.
      compile_seconds: time spent compiling for this object; 0 when another had compiled the same. [s]
    """

    def __init__(self, model, system, plan, stack, *, width=_WIDTH, block=BLOCK, elasticity_slots=(), auto_data=False, auto_sequence=False):
        """Compiles, unless done before.

        Args:
          width: the most numbers that a row may set.
          elasticity_slots: per gradient column, positions whose common relative change it is for.
          auto_data: set `data_parallel` so that all devices of the system are used; rows where this is no whole number are infeasible.
          auto_sequence: set `sequence_parallel` exactly where `tensor_parallel > 1`.
        """
        inputs = (model, system, plan, stack)
        self.names = path_names(inputs)
        devices = jax.devices()
        self.block = -(-block // len(devices)) * len(devices)
        self._width = -(-max(width, 1) // _WIDTH) * _WIDTH
        self._base = pack(inputs)
        self._auto = np.array([auto_data, auto_sequence], self._base.dtype)
        mesh = Mesh(np.array(devices), ("rows",))
        self._rows = NamedSharding(mesh, PartitionSpec(None, "rows")) if len(devices) > 1 else None
        start = time.perf_counter()
        before = _executable.cache_info().misses
        key = (layout_of(inputs), self._width, self.block, tuple(map(tuple, elasticity_slots)), self._base.dtype.name, self._rows)
        self._call = _executable(*key)
        self.compile_seconds = time.perf_counter() - start if _executable.cache_info().misses > before else 0.0

    def __call__(self, slots: np.ndarray, values: np.ndarray) -> BlockResult:
        """Evaluates up to `block` rows; returns at once, while the device works.

        Args:
          slots: positions that the rows set, shape (numbers,), not empty.
          values: what they set them to, shape (numbers, rows).
        Returns:
          The block; rows beyond those given repeat the last one.
        """
        numbers, rows = values.shape
        padded = np.empty((self._width, self.block), self._base.dtype)
        padded[:numbers, :rows] = values
        padded[:numbers, rows:] = padded[:numbers, rows - 1 : rows]
        padded[numbers:] = padded[numbers - 1]  # the same number set again to the same value
        where = np.concatenate([slots, np.repeat(slots[-1:], self._width - numbers)]).astype(np.int32)
        if self._rows is not None:
            padded = jax.device_put(padded, self._rows)
        return self._call(self._base, where, padded, self._auto)


@functools.lru_cache(maxsize=32)
def _executable(layout: Layout, width: int, block: int, elasticity_slots: tuple[tuple[int, ...], ...], dtype: str, rows: NamedSharding | None):
    """The compiled block function for one structure and one set of shapes."""

    path_of = {slot: path for path, slots in enumerate(elasticity_slots) for slot in slots}
    num_paths = len(elasticity_slots)
    numbers = sum(math.prod(shape) for shape in layout.shapes)

    def one(packed, auto):
        def step(log_factor):
            rows = [packed[i] * jnp.exp(log_factor[path_of[i]]) if i in path_of else packed[i] for i in range(numbers)] if num_paths else packed
            model, system, plan, stack = unpack(layout, rows)
            parts = plan.tensor_parallel * plan.pipeline_parallel * plan.context_parallel
            data = jnp.where(auto[0] > 0, system.num_devices / parts, plan.data_parallel)
            sequence = jnp.where(auto[1] > 0, (plan.tensor_parallel > 1) * 1.0, plan.sequence_parallel)
            plan = eqx.tree_at(lambda p: (p.data_parallel, p.sequence_parallel), plan, (data, sequence))
            estimate = train_step(model, system, plan, stack)
            whole = (data > 0.999) & (jnp.abs(data - jnp.round(data)) < 1e-4 * jnp.maximum(data, 1.0))
            feasible = estimate.feasible & (whole | (auto[0] == 0))
            estimate = eqx.tree_at(lambda e: e.feasible, estimate, feasible)
            return jnp.log(estimate.step_time), (estimate, data)

        if not num_paths:
            _, (estimate, data) = step(None)
            return BlockResult(estimate, data, jnp.zeros(0, packed.dtype))
        (_, (estimate, data)), slope = jax.value_and_grad(step, has_aux=True)(jnp.zeros(num_paths, packed.dtype))
        return BlockResult(estimate, data, slope)

    def batch(base, slots, values, auto):
        packed = jnp.broadcast_to(base[:, None], (base.size, block)).at[slots].set(values)
        return jax.vmap(one, in_axes=(1, None), out_axes=BlockResult(0, 0, 1))(packed, auto)

    number = np.dtype(dtype)
    values = jax.ShapeDtypeStruct((width, block), number, sharding=rows)
    shapes = (jax.ShapeDtypeStruct((numbers,), number), jax.ShapeDtypeStruct((width,), np.int32), values)
    shapes += (jax.ShapeDtypeStruct((2,), number),)
    return jax.jit(batch).lower(*shapes).compile()

