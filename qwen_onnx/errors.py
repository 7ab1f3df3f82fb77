"""The errors a user is meant to read, and what they call options."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

_BREAK = re.compile(r"\s*[^\S ]\s*")  # white space that is not just spaces
_LONGEST = 1500  # characters; a path may have a thousand
_NAMES: dict[str, str | None] = {}  # of options by field name, where they are given as anything but keywords


class UserError(Exception):
    """One line for the user: what was found, what was wanted, what to do. The CLI prints it and exits 1.

    Whatever a file or a library put into it, it is one line that any terminal can show.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class NonFiniteLogitsError(UserError):
    """The model computed NaN or infinity: its numbers overflowed, and no token can be chosen from them."""


class EqualLogitsError(UserError):
    """All logits of a step are equal: whatever was chosen of them would mean nothing."""


class OutOfMemoryError(UserError):
    """There is no memory for it now; nothing else is wrong with what was asked."""


class ExportInProgressError(UserError):
    """Another process is making the same export; it will be there, or can be made, when that one has ended."""


def counted(number: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """A text from anywhere as one line, of 1,500 characters at most, that is no command to a terminal."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 300]} ... {text[-200:]}"
    if text.isprintable():
        return text
    text = _BREAK.sub(" ", text)
    # Escape sequences of terminals, halves of surrogate pairs, marks that turn the direction of writing.
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text[:_LONGEST]


@contextlib.contextmanager
def naming(names: Mapping[str, str | None]) -> Iterator[None]:
    """Errors made within it, in any thread, call options so: a flag, as `--check/--no-check`; None: the keyword."""
    before = dict(_NAMES)
    _NAMES.update(names)
    try:
        yield
    finally:
        _NAMES.clear()
        _NAMES.update(before)


def option(name: str, value: object = None) -> str:
    """What the reader of an error calls an option, and how they give it a value: `check=False`, or `--no-check`."""
    called = _NAMES.get(name)
    if called is None:
        return name if value is None else f"{name}={value!r}"
    flag, _, off = called.partition("/")
    if value is None or isinstance(value, bool):
        return off if value is False and off else flag.split()[0]
    return f"{flag.split()[0]} {value}"
