"""The only way to stdout and stderr: nothing that a file or a model says is a command to the terminal.

No other module prints; tests/cli/test_output.py holds that.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from qwen_onnx.cli.terminal.markdown import Emphasis
from qwen_onnx.cli.terminal.word_wrap import WordWrap
from qwen_onnx.errors import printable

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# C0, DEL and C1, but for line ends and tabs; and what turns the direction of writing over what follows.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def tell(*lines: str, end: str = "\n") -> None:
    """On stderr, whatever is no answer: each of `lines` stays one, whatever it holds."""
    print(*_fitting(lines, sys.stderr), sep="\n", end=end, file=sys.stderr, flush=True)


def show(*lines: str) -> None:
    """On stdout, text for people: each of `lines` stays one, whatever it holds."""
    print(*_fitting(lines, sys.stdout), sep="\n", flush=True)


def answer(
    text: str, *, end: str = "\n", emphasis: Emphasis | None = None, wrap: WordWrap | None = None
) -> None:
    """On stdout, what a model says, or JSON. A file or a pipe gets every character: they are its reader's."""
    text = harmless(text) if sys.stdout.isatty() else text
    text = emphasis.push(text) if emphasis else text
    print(wrap.push(text) if wrap else text, end=end, flush=True)


def pause_answer(wrap: WordWrap | None) -> None:
    """On stdout, what was held back: something else is said before the answer goes on."""
    print(wrap.rest() if wrap else "", end="", flush=True)


def end_answer(emphasis: Emphasis | None, wrap: WordWrap | None = None) -> None:
    """On stdout, the end of the line, and of all emphasis."""
    text = emphasis.end() if emphasis else ""
    print(wrap.push(text) + wrap.end() if wrap else text, flush=True)


def think(text: str, *, dim: bool = False, wrap: WordWrap | None = None) -> None:
    """On stderr, what a model says before it answers."""
    text = harmless(text)
    _think(wrap.push(text) if wrap else text, dim)


def end_thought(wrap: WordWrap | None, *, dim: bool = False, lines: int = 1) -> None:
    """On stderr, what was held back of it, and so many line ends."""
    _think(wrap.end() if wrap else "", dim)
    print(end="\n" * lines, file=sys.stderr, flush=True)


def _think(text: str, dim: bool) -> None:
    if text:
        print(f"{_DIM}{text}{_PLAIN}" if dim else text, end="", file=sys.stderr, flush=True)


def quote(text: str, *, end: str = "\n") -> None:
    """On stderr, a text of several lines that somebody wrote."""
    text = harmless(text)
    if wrap := word_wrap(of_answer=False):
        text = wrap.push(text) + wrap.end()
    print(text, end=end, file=sys.stderr, flush=True)


def harmless(text: str) -> str:
    """A text of several lines that is no command to a terminal: such characters are spelled out."""
    return text if text.isprintable() else _COMMANDS.sub(_spelled, text)


def has_colors() -> bool:
    """stderr is a terminal that shows them, and nobody asked for none (https://no-color.org)."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def word_wrap(*, of_answer: bool) -> WordWrap | None:
    """For what is streamed to stdout, or else to stderr; None where that is no terminal."""
    stream = sys.stdout if of_answer else sys.stderr
    return WordWrap(lambda: columns(stream)) if stream.isatty() else None


def columns(stream: TextIO) -> int:
    """The width of the terminal that the stream is: $COLUMNS where it is set, 80 where nobody knows."""
    given = os.environ.get("COLUMNS", "")
    try:
        found = int(given) if given.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):  # something in the stream's place
        found = 0
    return found or 80


def _fitting(lines: Iterable[str], stream: TextIO) -> Iterator[str]:
    """Each of the lines as one; on a terminal, what is longer than it goes on below, at a word or behind a comma."""
    for line in map(printable, lines):
        width = columns(stream) if stream.isatty() else len(line)
        yield line if len(line) <= width else "\n".join(wrapped(line, width))


def wrapped(line: str, width: int) -> list[str]:
    """A line in several: fields between commas stay whole where they fit, words always."""
    indent = len(line) - len(line.lstrip()) + 2
    rows = [""]
    for field in re.findall(r".+?(?:, |$)", line):
        for word in [field] if len(field.rstrip()) <= width - indent else re.findall(r"\s*\S+\s*", field):
            if len(rows[-1]) + len(word.rstrip()) > width and rows[-1].strip():
                rows.append(" " * indent)
                word = word.lstrip()
            rows[-1] += word
    return [row.rstrip() for row in rows]


def _spelled(found: re.Match[str]) -> str:
    return "" if found[0] == "\r" else found[0].encode("unicode_escape").decode()
