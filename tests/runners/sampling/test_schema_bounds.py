"""The bounds of schemas: what is just within each is taken, and one more of it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qwen_onnx import UserError
from qwen_onnx.runners.sampling.constraint import Constraint
from qwen_onnx.runners.sampling.schema_bounds import verify_schema

Schema = dict[str, Any]


def nested(depth: int) -> Schema:
    """Keys in keys, so deep."""
    return {"items": nested(depth - 1)} if depth > 1 else {"type": "null"}


def referring(count: int) -> Schema:
    """Ten levels deep, with so many definitions that it refers to."""
    refs = [{"$ref": f"#/$defs/{number}"} for number in range(count)]
    return {"prefixItems": refs, "$defs": {"0": nested(8)}}


def patterns(*lengths: int) -> Schema:
    """Strings of patterns so long, which speak of different texts."""
    return {"prefixItems": [{"pattern": "a" * length} for length in lengths]}


def combined(*lengths: int) -> Schema:
    """Patterns that speak of one text."""
    return {"allOf": [{"pattern": "a" * length} for length in lengths]}


@pytest.mark.parametrize(
    ("make", "most", "mentions"),
    [
        (referring, 999, "10,010 levels of nesting"),
        (patterns, 4096, "4,097 characters of a pattern"),
        (lambda length: patterns(1, length, 2), 4096, "4,097 characters of a pattern"),
        (lambda length: {"patternProperties": {"b" * length: {}, "c": {}}}, 4096, "4,097 characters of a pattern"),
        (lambda length: patterns(4096, 4096, 4096, 4095, length), 1, "16,385 characters of patterns"),
        (lambda count: {"patternProperties": {str(i): {} for i in range(count)}}, 100, "101 patternProperties"),
        (lambda count: combined(*[1] * count), 6, "7 patterns and formats where parts are combined"),
        (lambda length: combined(length, 12), 500, "513 characters of patterns where parts are combined"),
        (lambda most: {"minimum": 9 - 10**18 - most, "maximum": 5}, 9, "numbers from -1e.18 on"),
        (lambda number: {"multipleOf": number}, 10_000, "10,001 states of multipleOf"),
        (lambda number: {"allOf": [{"multipleOf": 11}, {"multipleOf": number}]}, 909, "10,010 states"),
        (lambda number: {"allOf": [{"multipleOf": 0.5}, {"multipleOf": number}]}, 1000, "10,010 states"),
    ],
)  # fmt: skip
def test_the_most_is_taken_and_one_more_is_not(
    make: Callable[[int], Schema], most: int, mentions: str
) -> None:
    verify_schema(make(most))
    with pytest.raises(UserError, match=mentions):
        verify_schema(make(most + 1))


def test_bounds_are_of_what_they_name() -> None:
    """Many properties are no patterns, patterns of several texts are not combined, values are no keywords."""
    verify_schema({"properties": {str(number): {} for number in range(1000)}})
    verify_schema(patterns(*[100] * 20))
    verify_schema({"prefixItems": [{"multipleOf": 10_000}], "maximum": 10**30})
    verify_schema({"enum": ["a" * 5000]})
    verify_schema({})


@pytest.mark.parametrize(("kind", "most"), [("regex", 4096), ("json_schema", 131_072)])
def test_a_constraint_is_as_long_as_is_taken(kind: Any, most: int) -> None:
    assert len(Constraint(kind, "a" * most).text) == most
    with pytest.raises(UserError, match=f"{kind} of {most + 1:,} characters: at most {most:,} are taken"):
        Constraint(kind, "a" * (most + 1))
