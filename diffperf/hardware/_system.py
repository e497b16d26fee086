"""Chips, network tiers, hosts and systems as pytrees of numbers. Names, sources and fits live beside them (`_catalog.py`), not inside:
two systems have the same tree structure, so one compiled function serves all of them."""

import equinox as eqx
from jaxtyping import Array, Float

from .._arrays import si

DATATYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "int8")
"""Order of the datatype axis of `Chip.peak_flops_per_s` and of `Plan.precision`."""

LOW_PRECISION = tuple(float(name in ("fp8", "mxfp8", "nvfp4", "int8")) for name in DATATYPES)
"""1 at the 8- and 4-bit datatypes, in the order of `DATATYPES`."""

BYTES_PER_ELEMENT = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5, "int8": 1.0}


class Chip(eqx.Module):
    """One accelerator.

    Attributes:
      peak_flops_per_s: dense datasheet peak per datatype, shape (datatypes,); 0 where the chip has no such unit. [FLOP/s]
      matmul_efficiency: share of that peak that a large matmul reaches, shape (datatypes,). [1]
      attention_efficiency: share of the 16-bit peak that fused attention reaches on its causal FLOP. [1]
      memory_bandwidth: datasheet bandwidth of device memory. [B/s]
      memory_efficiency: share of it that a large streaming kernel reaches. [1]
      memory_capacity: device memory. [B]
      num_processors: streaming multiprocessors, compute units or cores. [1]
      l2_capacity: last-level cache. [B]
      power: board power at full load. [W]
      idle_power: board power when idle. [W]
    """

    peak_flops_per_s: Float[Array, " datatypes"] = eqx.field(converter=si)
    matmul_efficiency: Float[Array, " datatypes"] = eqx.field(converter=si)
    attention_efficiency: Float[Array, ""] = eqx.field(converter=si)
    memory_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    memory_efficiency: Float[Array, ""] = eqx.field(converter=si)
    memory_capacity: Float[Array, ""] = eqx.field(converter=si)
    num_processors: Float[Array, ""] = eqx.field(converter=si)
    l2_capacity: Float[Array, ""] = eqx.field(converter=si)
    power: Float[Array, ""] = eqx.field(converter=si)
    idle_power: Float[Array, ""] = eqx.field(converter=si)


class Tier(eqx.Module):
    """One level of the network. A group of ranks that fits into `domain` devices uses this tier alone.

    Attributes:
      bandwidth: datasheet rate of one device, in one direction. [B/s]
      efficiency: share of it that large collectives reach. [1]
      latency: time per message. [s]
      domain: devices that reach each other over this tier. [1]
      torus_axes: axes of a torus whose links share `bandwidth` evenly; 0 for a switched tier. [1]
    """

    bandwidth: Float[Array, ""] = eqx.field(converter=si)
    efficiency: Float[Array, ""] = eqx.field(converter=si)
    latency: Float[Array, ""] = eqx.field(converter=si)
    domain: Float[Array, ""] = eqx.field(converter=si)
    torus_axes: Float[Array, ""] = eqx.field(converter=si)


class Host(eqx.Module):
    """The CPU side, per device.

    Attributes:
      link_bandwidth: between host and device memory, one direction. [B/s]
      memory_capacity: host memory per device. [B]
      memory_bandwidth: host memory bandwidth per device. [B/s]
      power: host, network and fan power per device. [W]
    """

    link_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    memory_capacity: Float[Array, ""] = eqx.field(converter=si)
    memory_bandwidth: Float[Array, ""] = eqx.field(converter=si)
    power: Float[Array, ""] = eqx.field(converter=si)


class System(eqx.Module):
    """A cluster: equal chips on three network tiers (repeat the last tier where there are only two).

    Attributes:
      chip: the accelerator.
      host: its host.
      scale_up: NVLink, xGMI, NeuronLink, ICI: devices of one node, rack or slice.
      scale_out: NICs between scale-up domains of one rail or leaf group.
      spine: beyond `scale_out.domain` devices.
      num_devices: devices in the cluster. [1]
      price_per_hour: price of one device for one hour. [USD/h]
      power_usage_effectiveness: facility power over IT power. [1]
    """

    chip: Chip
    host: Host
    scale_up: Tier
    scale_out: Tier
    spine: Tier
    num_devices: Float[Array, ""] = eqx.field(converter=si)
    price_per_hour: Float[Array, ""] = eqx.field(converter=si)
    power_usage_effectiveness: Float[Array, ""] = eqx.field(converter=si)
