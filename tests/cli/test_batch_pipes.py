"""`run --batch` of what can be read only once: named pipes, /dev/stdin, process substitution."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chats import endless
from support.command import child, command
from support.patience import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes and /dev/stdin")
LINES = "".join(
    json.dumps({"id": number, "prompt": "Hello!", "max_new_tokens": 1}) + "\n" for number in (1, 2)
)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe that somebody writes lines to, once."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=(LINES,), daemon=True)
    writer.start()
    yield path
    writer.join(PATIENCE)
    assert not writer.is_alive()


def ids(output: str | bytes) -> list[int]:
    return [json.loads(line)["id"] for line in output.splitlines()]


def test_a_named_pipe_is_read_once(pipe: Path, tmp_path: Path) -> None:
    """In a process of its own: one that waits for a second writer would wait for ever."""
    out = tmp_path / "out"
    with child("run", endless(), "--batch", pipe, "--out", out, "--provider", "cpu") as process:
        assert process.wait(PATIENCE) == 0
    assert ids(out.read_text()) == [1, 2]


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0", "-"])
def test_stdin_by_its_names(name: str) -> None:
    """As process substitution gives it: a pipe that has a name under /dev/fd."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        stream.write(LINES)
    with (
        os.fdopen(reading) as given,
        child("run", endless(), "--batch", name, "--provider", "cpu", stdin=given) as process,
    ):
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert ids(output) == [1, 2]


def test_a_folder_or_nothing_is_refused_still(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "none"):
        assert f"--batch {name}: " in command("run", endless(), "--batch", name).error
