"""Entry point: runs a command and turns every outcome into an exit code and, for a mistake, one line on stderr.

0: done. 2: the user's mistake, said in one line. 1: our failure; `DIFFPERF_TRACEBACK=1` shows where. 130: interrupted.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Args:
      args: words after the program's name; None for those it was started with.
    Raises:
      SystemExit: always, with the exit code.
    """
    try:
        code = _run(sys.argv[1:] if args is None else list(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _run(args: list[str]) -> int:
    import typer

    from ._app import app

    try:
        result = app(args=args, standalone_mode=False, prog_name="diffperf")
        sys.stdout.flush()
        code = result if isinstance(result, int) else 0
    except typer.Exit as stop:
        code = stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, such as `head`, has seen enough
        return 0
    except Exception as error:
        return _report(error)
    if code == 130:  # typer turns the interrupt into an exit of its own
        raise KeyboardInterrupt
    return code


def _report(error: Exception) -> int:
    if os.environ.get("DIFFPERF_TRACEBACK"):
        traceback.print_exception(error)
    said = getattr(error, "format_message", None)
    if said is not None:  # a word that the parser of options did not accept
        command = getattr(getattr(error, "ctx", None), "command_path", "diffperf")
        print(f"error: {_one_line(said())} See `{command} --help`.", file=sys.stderr)
        return 2
    if is_users(error):
        print(f"error: {_one_line(str(error))}", file=sys.stderr)
        return 2
    what = _one_line(str(error)) or "no message"
    print(f"error: failure inside diffperf, not of your input: {type(error).__name__}: {what} DIFFPERF_TRACEBACK=1 shows where.", file=sys.stderr)
    return 1


def is_users(error: BaseException) -> bool:
    """True for what the user can mend: a `ValueError` that this package raised on purpose, or a file that cannot be read or written.

    A `ValueError` of NumPy or JAX means that we called them wrongly.
    """
    if isinstance(error, OSError):
        return error.filename is not None or isinstance(error, (FileNotFoundError, IsADirectoryError))
    if not isinstance(error, (ValueError, TypeError)) or error.__traceback__ is None:
        return False
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return isinstance(error, ValueError) and Path(frame.f_code.co_filename).resolve().is_relative_to(_PACKAGE)


def _one_line(message: str) -> str:
    """The first problem, and how many more there are."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    rest = f" ({len(lines) - 1} more like this.)" if len(lines) > 1 else ""
    if len(lines) > 1 and lines[-1].startswith("... and "):
        rest = f" ({len(lines) - 2 + int(lines[-1].split()[2])} more like this.)"
    return lines[0] + ("" if lines[0].endswith((".", "!", "?", ")")) else ".") + rest
