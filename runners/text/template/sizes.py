"""How large the values of a chat template are, written out, and how much work a render has done with them.

Lists may share parts: 40 tuples, each holding the one before twice, are a terabyte when they are printed, hashed or
compared, in C code that nothing interrupts. So no value that is larger than a text may be gets to exist.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context

# A render finds its meter among its variables, under a name with a space: a template can neither read nor set it.
METER = "work meter"

LARGEST_TEXT = 16 * 2**20
MOST_WORK = 300_000
MOST_BITS = 4096
# An element of a container counts as so many characters: to compare or to print one takes that long.
ELEMENT = 32
MOST_ELEMENTS = LARGEST_TEXT // ELEMENT

_DEEPEST = 200
# So many bytes made or characters gone over count as one loop round, and so many elements of a new container.
_BYTES_A_ROUND = 1024
_ELEMENTS_A_ROUND = 16
# Numbers of more bits may be many with the same hash: so few that a dict of them takes no time may come together.
_HASHED_APART = 64
_NUMBER = 16
# Keys that are tuples may be chosen to have the same hash, too.
_MOST_TUPLES = 64
_COMPARISONS_A_ROUND = 256
_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))


class Meter:
    """Counts the work of one render in loop rounds, `spent`, and knows the sizes of the containers it has met.

    Nothing in a template changes a container, and a namespace is written as its name only: a size stays right, and
    no container holds itself.
    """

    def __init__(self) -> None:
        self.spent = 0
        # By id, so each container is kept: its id is not given to another.
        self._known: dict[int, tuple[tuple[int, int], object]] = {}

    def spend(self, work: int) -> None:
        """Count work. Raises SecurityError when a render has done too much."""
        self.spent += work
        # No work is negative, unless a template has found out how to name the filters that come here.
        if self.spent > MOST_WORK or work < 0:
            raise SecurityError(f"more work than {MOST_WORK} loop rounds and calls")

    def extent(self, value: object, level: int = 0) -> tuple[int, int]:
        """Return a value's size written out, in characters, and its depth in containers.

        Raises SecurityError when it is too large, too deep or a number that is too long.
        """
        if isinstance(value, str):
            return len(value), 0
        if isinstance(value, int):
            bits = value.bit_length()
            if bits > MOST_BITS:
                raise SecurityError(f"a number of more than {MOST_BITS} bits")
            return (_NUMBER if bits <= _HASHED_APART else MOST_BITS), 0
        if isinstance(value, range):
            return len(value) * (ELEMENT + max(self.size(value.start), self.size(value.stop))), 1
        items: Iterable[object]
        if isinstance(value, dict):
            if len(value) > _MOST_TUPLES and any(isinstance(key, tuple) for key in value):
                raise SecurityError(f"more than {_MOST_TUPLES} keys, of which one is a tuple")
            items, count = chain.from_iterable(value.items()), 2 * len(value)
        elif isinstance(value, list | tuple | set | frozenset):
            items, count = value, len(value)
        elif isinstance(value, _VIEWS):
            mapping: Mapping[object, object] = getattr(value, "mapping")  # noqa: B009 - of a view
            items, count = chain.from_iterable(mapping.items()), 2 * len(mapping)
        else:
            return _NUMBER, 0
        known = self._known.get(id(value))
        if known is not None:
            return known[0]
        if level >= _DEEPEST:
            raise SecurityError(f"more than {_DEEPEST} containers in each other")
        self.spend(1 + count // _ELEMENTS_A_ROUND)
        size, deepest = ELEMENT + count * ELEMENT, 0
        for item in items:
            part, depth = (len(item), 0) if type(item) is str else self.extent(item, level + 1)
            size += part
            if depth > deepest:
                deepest = depth
            if size > LARGEST_TEXT:
                break
        if deepest >= _DEEPEST:
            raise SecurityError(f"more than {_DEEPEST} containers in each other")
        check_size(size)
        self._known[id(value)] = (size, deepest + 1), value
        return size, deepest + 1

    def size(self, value: object) -> int:
        """Return a value's size written out, in characters. Raises SecurityError as `extent` does."""
        return self.extent(value)[0]

    def use(self, value: object, times: int = 1) -> None:
        """Count that a value is gone over. Raises SecurityError as `extent` does."""
        size = len(value) if type(value) is str else self.extent(value)[0]
        self.spend(size * times // _BYTES_A_ROUND)

    def hashed(self, count: int) -> None:
        """Count that a dict or set is made of so many: at worst, each is compared with each."""
        self.spend(count * count // _COMPARISONS_A_ROUND)

    def made(self, value: Any) -> Any:
        """Return a value that was computed, counted. Raises SecurityError as `extent` does."""
        if isinstance(value, str):
            check_size(len(value))
            self.spend(sys.getsizeof(value) // _BYTES_A_ROUND)
        elif not isinstance(value, bool):
            self.extent(value)
        return value

    def listed(self, items: Iterator[Any]) -> list[Any]:
        """Return what an iterator yields. Raises SecurityError when that is too much."""
        found = list(islice(items, MOST_WORK + 1))
        self.spend(len(found) // _ELEMENTS_A_ROUND)
        check_count(len(found))
        return found


def meter_of(context: Context) -> Meter:
    """Return the meter of the render that is going on."""
    meter: Meter = context[METER]
    return meter


def check_size(characters: int) -> None:
    """Raise SecurityError for the size of a text, or of a container written out, that is too large."""
    if characters > LARGEST_TEXT:
        raise SecurityError(f"more than {LARGEST_TEXT >> 20} MiB of text")


def check_count(value: object) -> None:
    """Raise SecurityError for a number that no width, indent or count needs."""
    if isinstance(value, int) and value > MOST_WORK:
        raise SecurityError(f"a width or count above {MOST_WORK}")


def bounded_join(pieces: Iterable[str]) -> str:
    """Join pieces of text. Raises SecurityError, before it is joined, when the text is too long."""
    kept: list[str] = []
    length = 0
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        check_size(length)
    return "".join(kept)
