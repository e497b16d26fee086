"""Settings of collectives that run beside compute."""

from ._door import OVERLAP_METHODS as OVERLAP_METHODS
from ._door import OverlapResult as OverlapResult
from ._door import overlap as overlap
from ._regions import OVERLAP_REGIONS as OVERLAP_REGIONS
from ._regions import load_overlap_region as load_overlap_region
from ._space import OverlapSpace as OverlapSpace
