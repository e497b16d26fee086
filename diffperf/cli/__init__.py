"""The command line, `diffperf`. One file per group of commands; JAX is imported only when a command runs, so that `--help` is quick."""

from ._main import main as main
