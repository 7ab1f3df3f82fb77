"""What an answer's text must be: JSON of a schema, or a regular expression's match."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Literal

from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.sampling.schema import closed, unwrapped, verify_keywords, with_nulls
from qwen_onnx.runners.sampling.schema_bounds import LONGEST_REGEX, LONGEST_SCHEMA, verify_schema

_LONGEST = {"json_schema": LONGEST_SCHEMA, "regex": LONGEST_REGEX}


@dataclasses.dataclass(frozen=True)
class Constraint:
    """One schema or one regular expression, in its own text; `as_constraint` makes it of what a caller has."""

    kind: Literal["json_schema", "regex"]
    text: str

    def __post_init__(self) -> None:
        longest = _LONGEST[self.kind]
        if len(self.text) > longest:
            raise UserError(
                f"{option(self.kind)} of {len(self.text):,} characters: at most {longest:,} are taken"
            )

    def describe(self) -> str:
        """Its kind and its text, shortened, in one line."""
        return f"{self.kind} {self.text if len(self.text) <= 200 else self.text[:200] + '...'!r}"


def as_constraint(
    *,
    json_schema: Mapping[str, object] | bool | str | None = None,
    regex: str | None = None,
    additional_properties: bool = False,
) -> Constraint | None:
    """The one that is asked for, or None.

    Args:
        json_schema: a JSON Schema (draft 2020-12) as Python values, or as a JSON text.
        additional_properties: objects may have properties that the schema does not name.
        regex: what the whole answer matches, in the syntax of Rust's `regex`: no look-around, no backreferences.

    Raises:
        UserError: both, or a schema or expression that is none.
    """
    if json_schema is not None and regex is not None:
        raise UserError(f"{option('json_schema')} and {option('regex')} are two constraints: give one")
    if regex is not None:
        if not isinstance(regex, str):
            raise UserError(f"{option('regex')} {regex!r}: a text wanted")
        if any("\ud800" <= char <= "\udfff" for char in regex):
            raise UserError(f"{option('regex')} holds half of a surrogate pair: no text matches it")
        return Constraint("regex", regex)
    return (
        None
        if json_schema is None
        else Constraint("json_schema", _schema_text(json_schema, additional_properties))
    )


def _schema_text(schema: object, additional_properties: bool) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if value is True:
            value = {}
        if not isinstance(value, Mapping):
            raise UserError(f"{option('json_schema')} {value!r}: an object, or true, wanted")
        value = unwrapped(value)
        verify_schema(value)
        verify_keywords(value)
        value = with_nulls(value)
        if not additional_properties:
            value = closed(value)
        return json.dumps(value, allow_nan=False)  # in the order of its properties, which answers keep
    except RecursionError:
        raise UserError(f"{option('json_schema')} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{option('json_schema')} is not JSON ({error})") from None
