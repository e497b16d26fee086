"""Chips, network tiers, hosts, systems, and the catalog of datasheets."""

from ._catalog import Provenance as Provenance
from ._catalog import UnknownNameError as UnknownNameError
from ._catalog import describe as describe
from ._catalog import generation as generation
from ._catalog import load_system as load_system
from ._catalog import resolve_name as resolve_name
from ._catalog import system_names as system_names
from ._catalog import vendor as vendor
from ._catalog import write_fitted as write_fitted
from ._system import BYTES_PER_ELEMENT as BYTES_PER_ELEMENT
from ._system import DATATYPES as DATATYPES
from ._system import LOW_PRECISION as LOW_PRECISION
from ._system import Chip as Chip
from ._system import Host as Host
from ._system import System as System
from ._system import Tier as Tier
