"""Which plan to run: every legal plan in one batched evaluation, then gradients on the continuous knobs; and how to run overlapped collectives."""

from ._pareto import pareto as pareto
from ._result import NoFeasiblePlan as NoFeasiblePlan
from ._result import RankedPlan as RankedPlan
from ._result import TuneResult as TuneResult
from ._search import evaluate_plans as evaluate_plans
from ._search import tune_plan as tune_plan
from ._space import PlanSpace as PlanSpace
from ._space import describe_plan as describe_plan
from ._space import enumerate_plans as enumerate_plans
from ._overlap import OVERLAP_METHODS as OVERLAP_METHODS
from ._overlap import OVERLAP_REGIONS as OVERLAP_REGIONS
from ._overlap import OverlapResult as OverlapResult
from ._overlap import OverlapSpace as OverlapSpace
from ._overlap import load_overlap_region as load_overlap_region
from ._overlap import overlap as overlap
