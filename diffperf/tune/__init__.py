"""Which plan to run: every legal plan in one batched evaluation, then gradients on the continuous knobs."""

from ._pareto import pareto as pareto
from ._result import NoFeasiblePlan as NoFeasiblePlan
from ._result import RankedPlan as RankedPlan
from ._result import TuneResult as TuneResult
from ._search import evaluate_plans as evaluate_plans
from ._search import tune_plan as tune_plan
from ._space import PlanSpace as PlanSpace
from ._space import describe_plan as describe_plan
from ._space import enumerate_plans as enumerate_plans
