"""The tasks of one pipeline rank over a step: its passes in order, and data-parallel traffic beside them.

- Sharded parameters (FSDP, Zhao et al. 2023, arXiv:2304.11277): the next group of layers is gathered while the present one is computed, and
  its gradients are reduce-scattered under the next; both share one data-parallel stream. In a pipeline parameters stay gathered, so a step
  gathers once for the first forward, once for the first backward pass of each chunk, and scatters after the last.
- Gradient buckets (DDP, ZeRO 1): one per group of layers, reduced from when its last gradient is ready, beside the backward pass that goes on.
- Gradients that are reduced after every micro-batch (ZeRO 2): one part of it blocks after the pass, the other runs beside; but for the last time.
"""

from collections import Counter
from typing import NamedTuple

from ...parallel._order import Pass
from ._build import TaskList
from ._layers import add_group
from ._shape import StepShape


class RankTasks(NamedTuple):
    """Attributes:
    done: the task that ends the rank's step.
    holds: for every micro-batch and chunk the tasks between which its activations are held.
    """

    done: str
    holds: list[tuple[str, str]]


def add_rank(tasks: TaskList, shape: StepShape, rank: int, groups: int) -> RankTasks:
    """Adds the tasks of one pipeline rank, with the layers of a chunk in `groups` parts."""
    return _Rank(tasks, shape, rank, groups).add()


class _Slot(NamedTuple):
    """One group of layers of one pass."""

    at: int  # of the pass in the rank's order
    one: Pass
    group: int
    first: bool  # of its pass
    last: bool


class _Rank:
    """`gate` is what the next compute task of the rank must wait for, besides its own stream."""

    def __init__(self, tasks: TaskList, shape: StepShape, rank: int, groups: int):
        self.tasks, self.shape, self.rank, self.groups = tasks, shape, rank, groups
        self.passes = shape.order[rank]
        self.gate: tuple = ()
        self.needs: dict[_Slot, list[str]] = {}  # gathers that a slot waits for
        self.put_off: list[str] = []  # buckets that wait for the end of the backward pass
        self.unsent: list[Pass] = []
        self.first_task: dict[tuple[int, int], str] = {}
        self.last_task: dict[tuple[int, int], str] = {}

    def add(self) -> RankTasks:
        slots = self._slots()
        uses = Counter((one.kind, one.chunk) for one in self.passes)
        seen: Counter = Counter()
        self._updates(slots)
        self._gather(slots[0], seen)
        for i, slot in enumerate(slots):
            one = slot.one
            if slot.last:
                seen[one.kind, one.chunk] += 1
            after = slots[i + 1] if i + 1 < len(slots) else None
            waits = (*self.gate, *self._inputs(slot), *self.needs.pop(slot, ()))
            if after is not None:
                self._gather(after, seen, waits)
            self._compute(slot, waits)
            done = self.gate
            final = seen[one.kind, one.chunk] == uses[one.kind, one.chunk] - (0 if slot.last else 1)
            makes = self.shape.trained and one.kind == self.shape.gradient_pass
            scatters = makes and self.shape.shard_parameters and (self.shape.stages == 1 or final)
            if scatters:
                self.gate = (self._add(slot, "scatter", "data", "data", "scatter", done),)
            if self.shape.shard_parameters and after in self.needs:
                self._gather_exposed(after)
            if scatters:  # what may wait comes after what the next compute waits for
                self._add(slot, "scatter beside", "data", "data", "scatter beside", self.gate)
            if slot.last:
                self._send(slot.at)
            if makes and self.shape.reduce and (final or self.shape.reduce_every):
                self._reduce(slot, done, final)
        return RankTasks(self._end(), [(self.first_task[key], self.last_task[key]) for key in self.first_task])

    def _slots(self) -> list[_Slot]:
        g = self.groups
        order = lambda kind: range(g) if kind == "F" else range(g - 1, -1, -1)
        return [_Slot(at, one, j, n == 0, n == g - 1) for at, one in enumerate(self.passes) for n, j in enumerate(order(one.kind))]

    def _label(self, slot: _Slot) -> str:
        """`F12`, with the chunk and the group of layers where there are several: `F12.1 part 3`."""
        one = slot.one
        return f"{one.kind}{one.batch}" + f".{one.chunk}" * (self.shape.chunks > 1) + f" part {slot.group}" * (self.groups > 1)

    def _add(self, slot: _Slot, what: str, kind: str, stream: str, cost: str, after) -> str:
        return self.tasks.add(f"{self._label(slot)} {what} @{self.rank}", kind, self.rank, stream, cost, after)

    def _inputs(self, slot: _Slot) -> tuple:
        """Events: the pass before it in the model is done and its output has arrived; for a pair, of both."""
        if not slot.first:
            return ()
        some = [slot.one, self.passes[slot.at + 1]] if slot.one.paired else [slot.one]
        first, last = 0, self.shape.last_position
        return tuple(("arrived", one.kind, one.batch, one.position) for one in some
                     if (one.kind == "F" and one.position > first) or (one.kind == "B" and one.position < last))  # fmt: skip

    def _compute(self, slot: _Slot, waits: tuple) -> None:
        one, layout = slot.one, self.shape.layout
        key, begin = (one.batch, one.chunk), len(self.tasks)
        if one.kind == "W":
            self.gate = (self._add(slot, "weight gradient", "weight", "compute", "weight", waits),)
            self.last_task[key] = self.gate[0]
            return
        direction = "forward" if one.kind == "F" else "backward"
        if one.kind == "B" and slot.first:
            if layout.offload:
                waits = (self._add(slot, "fetch", "offload", "host", "backward offload", waits),)
            waits = (self._add(slot, "vocabulary", "vocabulary", "compute", "backward vocabulary", waits),)
        if one.kind == "B" and layout.recompute:
            waits = (self._add(slot, "recompute", "recompute", "compute", "recompute", waits),)
        self.gate = add_group(self.tasks, self.rank, self._label(slot), direction, waits, layout)
        if one.kind == "F" and slot.last:
            self.gate = (self._add(slot, "vocabulary", "vocabulary", "compute", "forward vocabulary", self.gate),)
            if layout.offload:
                self.gate = (self._add(slot, "store", "offload", "host", "forward offload", self.gate),)
        if one.kind == "F" and slot.first:
            self.first_task[key] = self.tasks.name(begin)
        if one.kind == "B":
            self.last_task[key] = self.gate[0]

    def _send(self, at: int) -> None:
        """Sends what a pass made to the next one; of a pair when both are done. What blocks is on the sender."""
        one = self.passes[at]
        if one.kind != "W":
            self.unsent.append(one)
        paired = any(p.paired for p in self.passes[max(at - 1, 0) : at + 1]) and one.kind != "W"
        if paired:
            return
        for sent in self.unsent:
            target = sent.position + (1 if sent.kind == "F" else -1)
            if not 0 <= target <= self.shape.last_position:
                continue
            to = self.shape.rank_of(target, sent.chunk)
            if to == self.rank:
                self.tasks.event(("arrived", sent.kind, sent.batch, target), self.gate)
                continue
            direction = "forward" if sent.kind == "F" else "backward"
            name = f"{sent.kind}{sent.batch}" + f".{sent.chunk}" * (self.shape.chunks > 1)
            stream = f"send to {to}"
            self.gate = (self.tasks.add(f"{name} send @{self.rank}", "pipeline", self.rank, stream, f"{direction} pipeline", self.gate),)
            beside = self.tasks.add(f"{name} send beside @{self.rank}", "pipeline", self.rank, stream, f"{direction} pipeline beside", self.gate)
            self.tasks.event(("arrived", sent.kind, sent.batch, target), (beside,))
        self.unsent = []

    def _gather(self, slot: _Slot, seen: Counter, waits: tuple = ()) -> None:
        """Gathers the parameters of a group that comes next, the part that runs beside the present one."""
        one = slot.one
        again = self.shape.stages == 1 or not seen[one.kind, one.chunk]
        if self.shape.shard_parameters and one.kind != "W" and again:
            self.needs.setdefault(slot, []).append(self._add(slot, "gather beside", "data", "data", "gather beside", waits))
            if not waits and slot.at == 0 and slot.first:
                self._gather_exposed(slot)

    def _gather_exposed(self, slot: _Slot) -> None:
        """The part of a gather that starts when the compute before it is done."""
        self.needs[slot].append(self._add(slot, "gather", "data", "data", "gather", self.gate))

    def _reduce(self, slot: _Slot, done: tuple, final: bool) -> None:
        """Reduces the gradients of a group over the replicas, beside what follows or at the end."""
        if not self.shape.overlap_gradient:
            self.put_off.append(f"{self._label(slot)} reduce @{self.rank}")
        elif final:
            self._add(slot, "reduce", "data", "data", "reduce", done)
        else:
            if slot.last:
                self.gate = (*self.gate, self._add(slot, "reduce", "data", "data", "reduce exposed", done))
            self._add(slot, "reduce beside", "data", "data", "reduce beside", done)

    def _updates(self, slots: list[_Slot]) -> None:
        """Gathers the parameters that the step before updated, in the order in which forward passes need them."""
        if not self.shape.update:
            return
        started: set[tuple[int, int]] = set()
        for slot in slots:
            place = (slot.one.chunk, slot.group)
            if slot.one.kind == "F" and place not in started:
                started.add(place)
                name = self._add(slot, "update", "data", "data", "update", ())
                if self.shape.overlap_gradient:
                    self.needs.setdefault(slot, []).append(name)
                else:
                    self.gate = (name,)

    def _end(self) -> str:
        for name in self.put_off:
            self.gate = (self.tasks.add(name, "data", self.rank, "data", "reduce", self.gate),)
        last = self.tasks.add(f"wait for data @{self.rank}", "data", self.rank, "data", "nothing", self.gate)
        done = self.tasks.add(f"optimizer @{self.rank}", "optimizer", self.rank, "compute", "optimizer", (last,))
        return self.tasks.add(f"optimizer transfer @{self.rank}", "offload", self.rank, "host", "host", (done,)) if self.shape.host else done
