"""What a job will take: one training step."""

from ._estimate import Breakdown as Breakdown
from ._estimate import Estimate as Estimate
from ._estimate import Memory as Memory
from ._train import step_lower_bound as step_lower_bound
from ._train import train_step as train_step
