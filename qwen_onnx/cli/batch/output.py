"""The results of a `--batch` run: a JSON line each, in order, to stdout or to a file that is gone on with."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from qwen_onnx.cli.batch.input import Line
from qwen_onnx.cli.terminal.json_line import as_json_line
from qwen_onnx.cli.terminal.output import answer
from qwen_onnx.errors import UserError, counted
from qwen_onnx.exports.publish.output_folder import disk_errors_in_words

KeyedLine = tuple[Line, str]
"""A line, and a digest of it and of all else that its answer hangs on."""

_NAMED = 20
"""Most lines that are named at once."""


class Results:
    """Where results go; counts them."""

    def __init__(self, out: Path | None) -> None:
        """None is stdout. A file is made where there is none.

        Raises:
            UserError: it cannot be written.
        """
        self.done = self.failed = 0
        """Results there are, and those of them that are errors; of an earlier run too."""
        self.failed_before: list[int] = []
        """Numbers of the lines whose result an earlier run left is an error."""
        self._out, self._file, self._end = out, None if out is None else _opened(out), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def remaining(self, lines: Iterable[KeyedLine]) -> Iterator[KeyedLine]:
        """The lines whose results are not there yet; a last result that was cut off is dropped.

        Raises:
            UserError: the file holds anything but results of the first lines, which is left as it is.
        """
        lines = iter(lines)
        if self._out is not None and self._file is not None and self._out.is_file():
            with disk_errors_in_words(self._out), self._out.open("rb") as held:
                first = next((line for line in lines if not self._holds(held, *line)), None)
                if first is None and held.read(1):
                    raise self._foreign(f"it goes on after the {counted(self.done, 'line')} of the input")
                self._file.seek(self._end)
                self._file.truncate()
            if first is not None:
                yield first
        yield from lines

    def write(self, line: Line, key: str, result: dict[str, object]) -> None:
        """The result of the next line, at once.

        Raises:
            UserError: the file cannot be written; what was written of the line is taken back.
        """
        text = as_json_line({"line": line.number, "key": key, **result})
        if self._file is None or self._out is None:
            answer(text)
        else:
            content = text.encode() + b"\n"
            with disk_errors_in_words(self._out):
                try:
                    written = self._file.write(content)
                    while written < len(content):  # a disk that is full says so at the second try
                        written += self._file.write(content[written:])
                except OSError:
                    with contextlib.suppress(OSError):
                        self._file.truncate(self._end)
                    raise
            self._end += len(content)
        self._count(result)

    def summary(self, answered: int) -> list[str]:
        """What is in the file, of which this run answered so many lines."""
        lines = []
        if numbers := self.failed_before:
            named = ", ".join(map(str, numbers[:_NAMED])) + (" ..." if len(numbers) > _NAMED else "")
            which = f"line{'' if len(numbers) == 1 else 's'} {named}"
            lines.append(f"{self._out}: failed in an earlier run, and not tried again: {which}")
        earlier = self.done - answered
        there = f"; {earlier} {'was' if earlier == 1 else 'were'} there already" if earlier else ""
        return [*lines, f"{self._out}: {counted(self.done, 'line')}, {self.failed} of them failed{there}"]

    def _holds(self, held: BinaryIO, line: Line, key: str) -> bool:
        """Whether the next result in the file is this line's; False where none is, or one that was cut off."""
        # Every result of this line begins with these bytes.
        head = json.dumps({"line": line.number, "key": key})[:-1].encode()
        text = held.readline()
        if not text.endswith(b"\n"):
            if text[: len(head)] != head[: len(text)]:
                raise self._foreign("what is in it is no result")
            return False
        result = None
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads(text)
        if not text.startswith(head) or not isinstance(result, dict):
            raise self._foreign(f"its line {self.done + 1} is not the result of line {line.number} there")
        self._end += len(text)
        self._count(result)
        if "error" in result:
            self.failed_before.append(line.number)
        return True

    def _foreign(self, found: str) -> UserError:
        return UserError(
            f"{self._out}: not of this input, model and options, or of another version ({found}); "
            "name another file, or remove it"
        )

    def _count(self, result: dict[str, object]) -> None:
        self.done += 1
        self.failed += "error" in result


def _opened(out: Path) -> FileIO:
    with disk_errors_in_words(out):
        if out.exists() and not out.is_file():  # a pipe or a device, which holds nothing
            return FileIO(out, "wb")
        file = FileIO(os.open(out, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b")
    if not _locked(file):
        raise UserError(f"{out}: another run is writing it; wait for its end, or name another file")
    return file


def _locked(file: FileIO) -> bool:
    """Until the file is closed, no other process has it; True where the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without
        return True
    return True
