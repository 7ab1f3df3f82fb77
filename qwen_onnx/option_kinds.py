"""The kinds of values that options take: what is accepted, said in words, and read from what somebody typed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Number:
    """A finite number between two."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    """`low` itself is none."""
    typed: Any = float

    @property
    def wanted(self) -> str:
        """See Kind.wanted."""
        if math.isfinite(self.high):
            return f"a number from {self.low:g} to {self.high:g}"
        return f"a number above {self.low:g}" if self.above else f"a number of {self.low:g} or more"

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        return is_number(value) and self.low <= value <= self.high and not (self.above and value == self.low)

    def parse(self, text: str) -> object:
        """See Kind.parse."""
        return as_json(text)


@dataclasses.dataclass(frozen=True)
class Count:
    """A whole number between two."""

    least: int = 0
    most: int | None = None
    typed: Any = int

    @property
    def wanted(self) -> str:
        """See Kind.wanted."""
        if self.most is not None:
            return f"a whole number from {self.least} to {self.most}"
        return f"a whole number of {self.least} or more"

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        return type(value) is int and value >= self.least and (self.most is None or value <= self.most)

    def parse(self, text: str) -> object:
        """See Kind.parse."""
        return as_json(text)


@dataclasses.dataclass(frozen=True)
class Switch:
    """True or False."""

    wanted: str = "True or False"
    typed: Any = bool

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        return type(value) is bool

    def parse(self, text: str) -> object:
        """See Kind.parse."""
        return {"on": True, "off": False}.get(text, as_json(text))


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of some whole numbers."""

    values: tuple[int, ...]
    typed: Any = int

    @property
    def wanted(self) -> str:
        """See Kind.wanted."""
        return f"one of {', '.join(map(str, self.values))}"

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        return type(value) is int and value in self.values

    def parse(self, text: str) -> object:
        """See Kind.parse."""
        return as_json(text)


@dataclasses.dataclass(frozen=True)
class Text:
    """A string; of several, where they are named."""

    choices: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """Choices that are not named: older spellings."""
    typed: Any = str

    @property
    def wanted(self) -> str:
        """See Kind.wanted."""
        return f"one of {', '.join(self.choices)}" if self.choices else "a string"

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        return isinstance(value, str) and (not self.choices or value in self.choices + self.hidden)

    def parse(self, text: str) -> object:
        """See Kind.parse."""
        return text


@dataclasses.dataclass(frozen=True)
class Name(Text):
    """One of several strings, in any case; or another spelling of one."""

    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        return isinstance(value, str) and self.meant(value) in self.choices

    def meant(self, value: str) -> str:
        """The choice that this is a spelling of; the value itself where it is none."""
        name = value.strip().lower().removeprefix("torch.")
        name = self.spellings.get(name, name)
        return name if name in self.choices else value


@dataclasses.dataclass(frozen=True)
class Texts:
    """A string, or several."""

    wanted: str = "a string or a list of them, none empty,"
    typed: Any = list[str]

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        values = [value] if isinstance(value, str) else value
        return isinstance(values, list | tuple) and all(isinstance(text, str) and text for text in values)

    def parse(self, text: str) -> object:
        """See Kind.parse; one string, in quotes or as it was typed, or a JSON list."""
        found = as_json(text)
        return found if isinstance(found, list | str) else text


@dataclasses.dataclass(frozen=True)
class FilePath:
    """A file or folder."""

    wanted: str = "a path"
    typed: Any = Path

    def accepts(self, value: Any) -> bool:
        """See Kind.accepts."""
        return isinstance(value, Path)

    def parse(self, text: str) -> object:
        """See Kind.parse."""
        return Path(text)


def is_number(value: object) -> bool:
    """A finite int or float, and not a bool, which is an int to Python."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def as_json(text: str) -> object:
    """The JSON value that somebody typed; the text itself where it is none."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found
