"""Chips, network tiers, hosts, systems, and the catalog of datasheets."""

from ._system import BYTES_PER_ELEMENT as BYTES_PER_ELEMENT
from ._system import DATATYPES as DATATYPES
from ._system import Chip as Chip
from ._system import Host as Host
from ._system import System as System
from ._system import Tier as Tier
