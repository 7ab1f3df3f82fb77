"""Text that is piped in beside a question: read where there is some, and never waited for without end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen_onnx.cli.run import _prompt
from qwen_onnx.cli.run_options import RunOptions
from qwen_onnx.cli.terminal import piped
from support.chats import tiny
from support.command import child
from support.patience import PATIENCE


@contextlib.contextmanager
def stdin_of(*descriptors: int) -> Iterator[None]:
    """The first is stdin; all are closed afterwards."""
    before = sys.stdin
    try:
        with os.fdopen(os.dup(descriptors[0])) as sys.stdin:
            yield
    finally:
        sys.stdin = before
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def pipe(said: bytes, *, ends: bool) -> tuple[int, ...]:
    """Into which this was written."""
    ours, theirs = os.pipe()
    os.write(theirs, said)
    if ends:
        os.close(theirs)
        return (ours,)
    return ours, theirs


def file_of(said: bytes) -> tuple[int, ...]:
    """An open file that holds this."""
    descriptor, name = tempfile.mkstemp()
    Path(name).unlink()
    os.write(descriptor, said)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return (descriptor,)


def sockets(said: bytes, *, ends: bool) -> tuple[int, ...]:
    """As some programs have them in place of pipes."""
    ours, theirs = socket.socketpair()
    theirs.sendall(said)
    if ends:
        theirs.close()
        return (ours.detach(),)
    return ours.detach(), theirs.detach()


@pytest.mark.parametrize(
    ("opened", "wanted"),
    [
        (lambda: pipe(b"x", ends=True), True),
        (lambda: pipe(b"x", ends=False), True),
        (lambda: pipe(b"", ends=True), True),
        (lambda: pipe(b"", ends=False), False),
        (lambda: sockets(b"x", ends=True), True),
        (lambda: sockets(b"", ends=False), False),
        (lambda: file_of(b"x"), True),
        (lambda: (os.open(os.devnull, os.O_RDONLY),), False),
        (os.openpty, False),
    ],
)
def test_k12_what_is_on_stdin_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    opened: Callable[[], tuple[int, ...]],
    wanted: bool,
) -> None:
    """A pipe or a socket that nobody writes to is given up, and said; a terminal and /dev/null are none."""
    monkeypatch.setattr(piped, "QUIET_S", 0.01)
    monkeypatch.setattr(piped, "MOST_S", 0.02)
    descriptors = opened()
    waits = not wanted and stat.S_ISFIFO(mode := os.fstat(descriptors[0]).st_mode) | stat.S_ISSOCK(mode)
    with stdin_of(*descriptors):
        assert piped.is_piped() is wanted
    assert ("nothing came on stdin" in capsys.readouterr().err) == waits


def test_k12_no_stdin_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert not piped.is_piped()


def test_k12_a_pipe_that_a_script_passes_on_does_not_hang() -> None:
    """The question is answered, with a line on stderr."""
    ours, theirs = os.pipe()
    program = "from qwen_onnx.cli.terminal import piped\npiped.QUIET_S, piped.MOST_S = 0.01, 0.02"
    asked = ("run", tiny(), "--provider", "cpu", "-p", "What is 3 plus 4?")
    try:
        with child(*asked, program=program, stdin=ours) as process:
            out, err = process.communicate(timeout=PATIENCE)
    finally:
        os.close(ours)
        os.close(theirs)
    assert (process.returncode, out) == (0, b"3 plus 4 is 7.\n")
    assert b"nothing came on stdin" in err


@pytest.mark.parametrize(
    ("opened", "noted"),
    [
        (lambda: pipe(b"text", ends=True), True),
        (lambda: pipe(b"text", ends=False), True),
        (lambda: file_of(b"text"), True),
        (lambda: pipe(b"", ends=True), False),
        (lambda: pipe(b"", ends=False), False),
        (lambda: file_of(b""), False),
        (lambda: (os.open(os.devnull, os.O_RDONLY),), False),
    ],
)
def test_k12_text_beside_ids_is_not_dropped_without_a_word(
    opened: Callable[[], tuple[int, ...]], noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is neither read, so that a loop of the shell over its lines goes on, nor waited for."""
    descriptors = opened()
    with stdin_of(*descriptors):
        assert piped.is_waiting() == noted
        assert _prompt(RunOptions(prompt_ids="5,6")) == [5, 6]
        if noted:
            assert os.read(descriptors[0], 4) == b"text"
    assert ("--prompt-ids are the whole prompt" in capsys.readouterr().err) == noted
