"""Schemas that would take minutes, gigabytes or the process down when they are compiled: refused before.

llguidance has limits of its own, and keeps them for what is not named here. Each number below was measured: at it,
compiling takes seconds and some hundred megabytes at worst.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal

from qwen_onnx.errors import UserError, option

LONGEST_SCHEMA = 1 << 17
"""Characters: an object of 10,000 properties. The time goes with the square of their number."""
LONGEST_REGEX = 4096
"""Characters: `(a?)` as often as that holds it. Time and memory go with the square."""
_PATTERNS = 4 * LONGEST_REGEX
"""Characters of all patterns in a schema."""
_PATTERN_KEYS = ("pattern", "whitespace_pattern", "item_separator", "key_separator")
_COMBINERS = ("$ref", "allOf", "anyOf", "oneOf")
_OF_MEMBERS = (
    "pattern", "format", "properties", "patternProperties", "additionalProperties", "propertyNames", "items",
    "prefixItems",
)  # fmt: skip
_PATTERN_PROPERTIES = 100
"""Each is compared with each other."""
_INTERSECTED = 6
"""Where several parts may speak of one text: twelve of one kind took 0.3 s, twenty minutes and gigabytes."""
_LEVELS = 10_000
"""Nesting, times the definitions it goes through: the compiler calls itself, 5 kB of stack for each."""
_MULTIPLE = 10_000
"""The states of `multipleOf`: as many as the number, with several of them their common multiple."""
_LEAST = -(10**18)
"""Ranges down to 19 digits overflow in the compiler, which then calls itself without end."""

STACK = 128 << 20
"""Bytes for the thread that compiles, of which as many are used as are needed."""


def verify_schema(schema: Mapping[str, object]) -> None:
    """Raises UserError for a schema beyond one of the bounds."""
    members = list(_members(schema, 1))
    depth = max((depth for _, _, depth in members), default=1)
    refs = {value for key, value, _ in members if key == "$ref" and isinstance(value, str)}
    _verify("levels of nesting, in all definitions", depth * (1 + len(refs)), _LEVELS)
    properties = [
        str(name)
        for key, value, _ in members
        if key == "patternProperties" and isinstance(value, Mapping)
        for name in value
    ]
    _verify("patternProperties", len(properties), _PATTERN_PROPERTIES)
    patterns = [value for key, value, _ in members if key in _PATTERN_KEYS and isinstance(value, str)]
    lengths = [len(pattern) for pattern in patterns + properties]
    _verify("characters of a pattern", max(lengths, default=0), LONGEST_REGEX)
    _verify("characters of patterns", sum(lengths), _PATTERNS)
    # Patterns that hold for one text are intersected, and the time goes with the product of their sizes.
    if any(
        isinstance(value, Mapping) and _combines(value)
        for value in [schema, *(each for _, each, _ in members)]
    ):
        formats = [value for key, value, _ in members if key == "format"]
        _verify("patterns and formats where parts are combined", len(lengths) + len(formats), _INTERSECTED)
        _verify("characters of patterns where parts are combined", sum(lengths), LONGEST_REGEX // 8)
    numbers = [(key, value) for key, value, _ in members if type(value) is int or type(value) is float]
    if any(value < _LEAST for _, value in numbers):
        raise UserError(
            f"{option('json_schema')}: numbers from {_LEAST:.0e} on are taken, and a lower one is in it"
        )
    multiples = [
        value
        for key, value in numbers
        if key == "multipleOf" and (type(value) is int or math.isfinite(value))
    ]
    _verify("states of multipleOf", _common_multiple(multiples), _MULTIPLE)


def _combines(schema: Mapping[str, object]) -> bool:
    """Whether several parts of it speak of the same value, and of its text or of its members."""
    combiners = [name for name in _COMBINERS if name in schema]
    several = schema.get("allOf")
    if len(combiners) > 1 or (isinstance(several, list) and len(several) > 1):
        return True
    return bool(combiners) and any(name in schema for name in _OF_MEMBERS)


def _verify(what: str, found: int, most: int) -> None:
    if found > most:
        raise UserError(f"{option('json_schema')}: {found:,} {what}: at most {most:,} are taken")


def _members(value: object, depth: int) -> Iterator[tuple[object, object, int]]:
    """All that lies in it, each with its key (None in a list) and how deep it lies."""
    pairs: Iterator[tuple[object, object]] = iter(())
    if isinstance(value, Mapping):
        pairs = iter(value.items())
    elif isinstance(value, list | tuple):
        pairs = ((None, item) for item in value)
    for key, item in pairs:
        yield key, item, depth
        yield from _members(item, depth + 1)


def _common_multiple(numbers: list[int | float]) -> int:
    """In units of the last decimal place that one of them has."""
    found = [Decimal(str(number)).normalize() for number in numbers]
    places = max([0, *(-int(number.as_tuple().exponent) for number in found)])
    return math.lcm(*(int(number.scaleb(places)) for number in found))
