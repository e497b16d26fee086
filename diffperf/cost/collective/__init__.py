"""Collective communication. One model today, alpha-beta over tiers; others take the same arguments and stand beside it."""

from ._alpha_beta import all_gather_time as all_gather_time
from ._alpha_beta import all_reduce_time as all_reduce_time
from ._alpha_beta import expert_exchange_time_per_byte as expert_exchange_time_per_byte
from ._alpha_beta import group_latency as group_latency
from ._alpha_beta import group_rate as group_rate
from ._alpha_beta import members_inside as members_inside
from ._alpha_beta import point_to_point_time as point_to_point_time
from ._alpha_beta import reduce_scatter_time as reduce_scatter_time
