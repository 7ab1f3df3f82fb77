"""Runs `qwen-onnx`, here or in a process of its own, and holds every refusal to one form."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from qwen_onnx.cli.main import main


class Ran(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The line of a UserError; what is known of every such ending is asserted here."""
        *before, line = self.err.splitlines()
        assert line.startswith("error: "), self.err
        assert not any(other.startswith(("error:", "Traceback", " ")) for other in before), self.err
        assert (self.code, self.out) == (1, "")
        return line


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def command(*arguments: object, stdin: str | bytes = b"", terminal: bool = False) -> Ran:
    """The command, in this process: the whole of `main`, which CliRunner would pass by."""
    kind = _Terminal if terminal else io.TextIOWrapper
    # As Python opens stdin, which keeps the ends of lines as they are.
    given = kind(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), "utf-8", newline="\n")
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    argv = ["qwen-onnx", *map(str, arguments)]
    with mock.patch.multiple(sys, argv=argv, stdin=given, stdout=out, stderr=err):
        try:
            main()
            code: object = 0
        except SystemExit as leaving:
            code = leaving.code
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    assert isinstance(code, int)
    return Ran(code, *texts)


@contextlib.contextmanager
def child(*arguments: object, program: str = "", **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process of its own, its output in pipes; `program` is Python run before `main`."""
    code = f"{program}\nfrom qwen_onnx.cli.main import main\nmain()"
    environment = {**os.environ, **settings.pop("environment", {})}
    settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, **settings
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
