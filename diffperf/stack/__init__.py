"""Software stacks: what frameworks achieve on a chip, apart from the hardware."""

from ._catalog import FittedConstant as FittedConstant
from ._catalog import UnknownStackError as UnknownStackError
from ._catalog import describe_stack as describe_stack
from ._catalog import load_stack as load_stack
from ._catalog import resolve_stack_name as resolve_stack_name
from ._catalog import stack_names as stack_names
from ._catalog import write_stack as write_stack
from ._stack import Stack as Stack
