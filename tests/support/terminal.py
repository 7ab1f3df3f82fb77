"""A pseudo-terminal with the chat in it."""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.command import child
from support.patience import PATIENCE

# The child makes the terminal its own, so that Ctrl-C typed there is a signal to it.
CONTROLLING = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"


class Terminal:
    """Our end of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._unread = descriptor, b""
        self.seen = b""
        """All that has come."""

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def wait_for(self, text: bytes) -> None:
        """Read up to and with `text`; what comes after it is left for the next call."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._unread:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come; {self._unread[-2000:]!r} did"
            self._unread += self._read(left)
        self._unread = self._unread.split(text, 1)[1]

    def wait_for_more(self) -> None:
        """Anything at all, beyond what was waited for already."""
        while not self._unread:
            self._unread += self._read(PATIENCE)
        self._unread = b""

    def read_rest(self) -> None:
        """All that comes until the program has left, and nobody else has its end."""
        with contextlib.suppress(OSError):  # Linux's word for that
            while data := os.read(self.descriptor, 4096):
                self.seen += data

    def has_come(self, text: bytes) -> bool:
        return text in self._unread

    def press_ctrl_c_until(self, ready: Callable[[], bool]) -> None:
        """Once is not enough: `input` misses a signal that comes after its prompt and before it listens."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            assert time.monotonic() < deadline, f"Ctrl-C did nothing; {self._unread[-2000:]!r} came"
            with contextlib.suppress(OSError):  # it has left meanwhile
                self.type(b"\x03")
                while not ready() and select.select([self.descriptor], [], [], 5)[0]:
                    self._unread += os.read(self.descriptor, 4096)

    def _read(self, seconds: float) -> bytes:
        ready, _, _ = select.select([self.descriptor], [], [], seconds)
        assert ready, f"nothing came for {seconds:.0f} s; {self._unread[-1500:]!r}"
        try:
            data = os.read(self.descriptor, 4096)
        except OSError:  # Linux's word for the other end closing
            data = b""
        self.seen += data
        assert data, f"the program left; it had said {self._unread[-2000:]!r}"
        return data


READY = b"\x1b[?2004h"  # what a prompt begins with: pasted lines are asked to come marked as such
ENDED = b"\x1b[?2004l"


def open_terminal(columns: int = 0, rows: int = 24) -> tuple[int, int]:
    """Our end and theirs; 0 columns: it does not say how many it has."""
    ours, theirs = os.openpty()
    resize(ours, columns, rows)
    return ours, theirs


def resize(descriptor: int, columns: int, rows: int = 24) -> None:
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.contextmanager
def session(
    *arguments: object, history: Path, columns: int = 0, **environment: str
) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """`run` on a terminal that can move its cursor, at its first prompt."""
    ours, theirs = open_terminal(columns)
    settings = {
        "stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True,
        # This terminal does not say where its cursor is.
        "environment": {
            "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "QWEN_ONNX_HISTORY": str(history), "NO_COLOR": "1",
            **environment,
        },
    }  # fmt: skip
    try:
        with child("run", *arguments, "--provider", "cpu", program=CONTROLLING, **settings) as process:
            os.close(theirs)
            terminal = Terminal(ours)
            terminal.wait_for(b"/help for commands")
            terminal.wait_for(READY)
            yield terminal, process
    finally:
        os.close(ours)
