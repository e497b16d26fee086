"""The tasks of one pass through a group of layers on one rank: compute, and the communication that blocks it or runs beside it.

- Tensor parallelism: the hidden part of its collectives runs beside the group's matmuls, in chunks of which one is in flight while the next
  is computed (Wang et al. 2023, ASPLOS, "Overlap Communication with Dependent Computation via Decomposition").
- Ring attention (Liu et al. 2023, arXiv:2310.01889): the next block of keys and values is sent while attention to the present one is computed.
- Routed experts: the micro-batch is cut in two, and tokens of one half are dispatched and combined while the other half is computed
  (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2).
What blocks (the exposed part of each transfer) follows the compute; the group is done when both are.
"""

from collections.abc import Callable
from typing import NamedTuple

from ._build import TaskList


class Layout(NamedTuple):
    """What a plan and a model need of a group of layers; host numbers.

    Attributes:
      tensor: whether tensor-parallel ranks exchange.
      ring: blocks of keys and values that go round; 1 for no ring.
      context: whether context-parallel ranks exchange.
      experts: whether there are routed experts.
      expert: whether they exchange tokens.
      offload: whether activations go to the host.
      recompute: whether a backward pass repeats forward work.
    """

    tensor: bool
    ring: int
    context: bool
    experts: bool
    expert: bool
    offload: bool
    recompute: bool


def add_group(tasks: TaskList, rank: int, label: str, direction: str, after: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    """Adds one group of layers of one forward or backward pass.

    Args:
      label: prefix of the tasks' names.
      direction: "forward" or "backward": kind of the compute tasks and prefix of their costs.
      after: what must be done first.
    Returns:
      Names of the tasks that end it.
    """
    gate = after

    def add(what: str, kind: str, stream: str, after, share: float = 1.0, cost: str = "") -> str:
        return tasks.add(f"{label} {what} @{rank}", kind, rank, stream, f"{direction} {cost or what}", after, share)

    beside: list[str] = []
    if layout.tensor:
        beside.append(add("tensor beside", "tensor", "tensor", gate))
    if layout.ring > 1:
        gate = _ring(add, direction, gate, layout.ring)
    elif not layout.expert:
        gate = (add("attention", direction, "compute", gate),)
    if layout.expert:
        gate = _halves(add, direction, gate, attention=layout.ring == 1)
    else:
        gate = (add("layers", direction, "compute", gate),)
        if layout.experts:
            gate = (add("experts", direction, "compute", gate),)
    for what, used in (("tensor", layout.tensor), ("context", layout.context), ("expert", layout.expert)):
        if used:
            gate = (add(what, what, what, gate),)
    if layout.context and layout.ring == 1:
        beside.append(add("context beside", "context", "context", after))
    return (*gate, *beside)


def _ring(add: Callable, direction: str, gate: tuple[str, ...], blocks: int) -> tuple[str, ...]:
    """Attention to `blocks` blocks of keys and values; block j + 1 travels while block j is used."""
    arrived = gate
    for j in range(blocks):
        here = arrived
        if j + 1 < blocks:
            arrived = (add(f"context beside {j + 1}", "context", "context", (*gate, *here), 1 / (blocks - 1), "context beside"),)
        gate = (add(f"attention {j}", direction, "compute", (*gate, *here), 1 / blocks, "attention"),)
    return gate


def _halves(add: Callable, direction: str, gate: tuple[str, ...], attention: bool) -> tuple[str, ...]:
    """Two halves of the micro-batch, each: layers before the experts, dispatch, experts, combine."""
    dispatched = []
    for half in "ab":
        start = (add(f"attention {half}", direction, "compute", gate, 0.5, "attention"),) if attention else gate
        ready = add(f"layers {half}", direction, "compute", start, 0.5, "layers")
        dispatched.append(add(f"dispatch {half}", "expert", "expert", (ready,), 0.25, "expert beside"))
    combined = []
    for half, sent in zip("ab", dispatched, strict=True):
        done = add(f"experts {half}", direction, "compute", (sent,), 0.5, "experts")
        combined.append(add(f"combine {half}", "expert", "expert", (done,), 0.25, "expert beside"))
    return tuple(combined)
