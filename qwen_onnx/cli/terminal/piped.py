"""Text that is piped in beside a question, which may be none."""

from __future__ import annotations

import os
import select
import stat
import sys

from qwen_onnx.cli.terminal.output import tell

QUIET_S, MOST_S = 1.0, 10.0
"""Seconds without a first byte: until a line says what is waited for, and until nothing more is."""


def is_piped() -> bool:
    """There may be text on stdin: a file, or a pipe or socket that something is written to, or was closed.

    No terminal, no device as /dev/null, no stdin that is closed. A pipe that a script passes on, and nobody writes to
    or closes, is given up after a while, with a line that says so.
    """
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):  # no file of the system's, but something in its place
        return not sys.stdin.isatty()
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        return _begins(descriptor)
    return stat.S_ISREG(mode)


def is_waiting() -> bool:
    """Text is on stdin already, in a file or a pipe; none of it is read."""
    try:
        descriptor = sys.stdin.fileno()
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            return found.st_size > os.lseek(descriptor, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(found.st_mode):
            return False
        import fcntl
        import termios

        return any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    except (AttributeError, ImportError, OSError, ValueError):  # closed, no file of the system's, or Windows
        return False


def _begins(descriptor: int) -> bool:
    """Wait for the first byte, or for the end."""
    try:
        if select.select([descriptor], [], [], QUIET_S)[0]:
            return True
        tell("(waiting for text on stdin; with </dev/null there is none)")
        if select.select([descriptor], [], [], MOST_S - QUIET_S)[0]:
            return True
    except (OSError, ValueError):  # Windows selects sockets only
        return True
    tell(f"(nothing came on stdin in {MOST_S:.0f} s: the question is answered without it)")
    return False
