"""How a job is split over devices: the plan, sharded work, pipeline schedules and the memory they need."""

from ._check import check_plan as check_plan
from ._memory import StageMemory as StageMemory
from ._plan import Plan as Plan
from ._plan import PlanError as PlanError
from ._plan import make_plan as make_plan
from ._plan import num_devices as num_devices
from ._plan import num_microbatches as num_microbatches
