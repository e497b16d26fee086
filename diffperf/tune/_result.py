"""What a search returns, and the error when nothing fits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..estimate import Estimate
from ..parallel import Plan


class NoFeasiblePlan(ValueError):
    """Legal plans exist, but none fits into memory. The message says by how much, where, and what would fit.

    Attributes:
      shortfall: memory that the leanest plan lacks on its fullest stage. [B]
      changes: changes that were evaluated and fit, the smallest first.
    """

    def __init__(self, message: str, shortfall: float, changes: tuple[str, ...]):
        super().__init__(message)
        self.shortfall = shortfall
        self.changes = changes


@dataclasses.dataclass(frozen=True)
class RankedPlan:
    """One plan with its estimate.

    Attributes:
      plan: numbers of shape ().
      estimate: its prediction, numbers of shape ().
      objective: what was minimised.
      words: the plan in the words of `make_plan`.
    """

    plan: Plan
    estimate: Estimate
    objective: float
    words: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """Outcome of `tune_plan`.

    Attributes:
      ranked: the best plans of the exhaustive search, best first.
      refined: the plan that gradients found beyond them, if it is better; else None.
      gain: relative decrease of the objective by it; 0 when gradients found nothing better. [1]
      objective: its name.
      num_tried: combinations that use all devices.
      num_legal: those that can be laid out, all of which were evaluated.
      num_feasible: those that fit into memory.
      compile_seconds: spent compiling; 0 when an earlier search compiled the same. [s]
      run_seconds: all the rest. [s]
    """

    ranked: tuple[RankedPlan, ...]
    refined: RankedPlan | None
    gain: float
    objective: str
    num_tried: int
    num_legal: int
    num_feasible: int
    compile_seconds: float
    run_seconds: float

    @property
    def best(self) -> RankedPlan:
        """The best plan found, refined or not."""
        return self.refined or self.ranked[0]
