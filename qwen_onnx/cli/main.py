"""The `qwen-onnx` command: stdout is the answer, stderr all else; a UserError is one line and exit code 1."""

from __future__ import annotations

import contextlib
import os
import sys

from qwen_onnx.cli.commands import app
from qwen_onnx.errors import UserError


def main() -> None:
    """Run the command that sys.argv names."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a terminal that cannot show a character shows `?`
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where what it says is caught
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        print(
            "error: out of memory; free some, or take a smaller model, dtype or --max-context",
            file=sys.stderr,
        )
        sys.exit(1)
    except OSError as error:
        # Of stdout: all else becomes a UserError. A reader that left, as `| head` does, needs no word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: stdout: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)


def _open_closed_streams() -> None:
    """stdout or stderr that is closed, as `>&-` does, is as good as /dev/null; and no file gets its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for good
