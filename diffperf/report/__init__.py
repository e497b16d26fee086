"""What people look at: tables for the terminal, figures, and one self-contained HTML file."""

from ._facts import What as What
from ._facts import better_by as better_by
from ._facts import memory_by_stage as memory_by_stage
from ._facts import unit_of as unit_of
from ._facts import whole_run as whole_run
from ._html import Report as Report
from ._html import html_report as html_report
from ._tables import accuracy_table as accuracy_table
from ._tables import better_table as better_table
from ._tables import breakdown_table as breakdown_table
from ._tables import elasticity_table as elasticity_table
from ._tables import headline_table as headline_table
from ._tables import memory_table as memory_table
from ._tables import plans_table as plans_table
from ._tables import provenance_table as provenance_table
