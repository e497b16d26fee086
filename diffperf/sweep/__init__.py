"""What-if grids: millions of rows of predictions over any numbers of plan, model, hardware and stack, streamed to a file."""

from ._sweep import sweep as sweep
