"""What a job will take, one training step, and why."""

from ._batch import BatchStep as BatchStep
from ._bound import bind_step as bind_step
from ._estimate import Breakdown as Breakdown
from ._estimate import Estimate as Estimate
from ._explain import Elasticity as Elasticity
from ._explain import bottleneck as bottleneck
from ._explain import elasticities as elasticities
from ._train import step_lower_bound as step_lower_bound
from ._train import train_step as train_step
