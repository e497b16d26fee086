"""Software stacks: what frameworks achieve on a chip, apart from the hardware."""

from ._stack import Stack as Stack
