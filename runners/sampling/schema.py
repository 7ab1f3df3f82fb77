"""A JSON Schema as people send it: out of its wrapper, with keywords that a draft knows, its objects closed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from qwen_onnx.errors import UserError

_ONE = ("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_SEVERAL = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
"""Keywords whose value is a schema, a list of them, or an object of them."""
_WORDS = (
    "$anchor $comment $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema $vocabulary const "
    "contentEncoding contentMediaType default dependentRequired deprecated description enum example examples "
    "exclusiveMaximum exclusiveMinimum externalDocs discriminator format id maxContains maxItems maxLength "
    "maxProperties maximum minContains minItems minLength minProperties minimum multipleOf nullable pattern readOnly "
    "required title type uniqueItems writeOnly xml"
)
"""Of drafts 4 to 2020-12, and of OpenAPI."""
_KNOWN = frozenset((*_ONE, *_SEVERAL, *_NAMED, *_WORDS.split()))
_WRAPPER = {"name", "description", "strict", "schema"}
_COMBINED = (
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "else",
    "if",
    "not",
    "oneOf",
    "then",
    "dependentSchemas",
)
"""Beside `properties`, these may speak of others: such an object is left as open as it says."""
_CLOSED_BY = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")


def unwrapped(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema inside of OpenAI's `{"type": "json_schema", "json_schema": {"name", "strict", "schema"}}`."""
    inner = value.get("json_schema")
    if value.get("type") == "json_schema" and isinstance(inner, Mapping):
        value = inner
    if isinstance(value.get("schema"), Mapping) and value.keys() <= _WRAPPER:
        return dict(value["schema"])
    return value


def verify_keywords(schema: Mapping[str, Any]) -> None:
    """Raises UserError for a keyword that no draft knows: it would be passed over, and the answer be anything."""
    for name in schema:
        if name not in _KNOWN and not name.startswith("x-"):
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = (
                f"; {near[0]!r} is meant?" if near else "; a JSON Schema wanted, as {'type': 'object', ...}"
            )
            raise UserError(f"json_schema: no draft knows the keyword {name!r}{hint}")
    for _, inner in _inner(schema):
        verify_keywords(inner)


def closed(schema: Mapping[str, Any], *, combined: bool = False) -> dict[str, Any]:
    """A copy whose objects have the properties that are named and no others, as in OpenAI's strict mode.

    Objects that say so themselves (`additionalProperties`), and parts that are combined with others, stay as they
    are: closed, they could contradict each other.

    Args:
        combined: it is a part of another object's description.
    """
    copy = dict(schema)
    combines = any(name in schema for name in _COMBINED)
    if "properties" in schema and not combined and not combines and not any(n in schema for n in _CLOSED_BY):
        copy["additionalProperties"] = False
        required = [name for name in schema.get("required", ()) if name not in schema["properties"]]
        if required:  # named there, if nothing more
            copy["properties"] = {**schema["properties"], **{name: {} for name in required}}
            schema = copy
    beside = combined or "properties" in schema
    for name, value in schema.items():
        apart = name in ("items", "prefixItems", "contains", "properties", "patternProperties",
                         "additionalProperties", "additionalItems", "$defs", "definitions")  # fmt: skip
        # One part alone, as of pydantic's references, is combined with nothing.
        alone = name == "allOf" and isinstance(value, list) and len(value) == 1
        alternative = (name in ("anyOf", "oneOf") or alone) and not beside
        inside = combined if name in ("$defs", "definitions") else not (apart or alternative)
        if name in _NAMED and isinstance(value, Mapping):
            copy[name] = {
                key: closed(each, combined=inside) if isinstance(each, Mapping) else each
                for key, each in value.items()
            }
        elif name in _SEVERAL and isinstance(value, list):
            copy[name] = [
                closed(each, combined=inside) if isinstance(each, Mapping) else each for each in value
            ]
        elif name in _ONE and isinstance(value, Mapping):
            copy[name] = closed(value, combined=inside)
    return copy


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            yield from ((name, each) for each in value.values() if isinstance(each, Mapping))
        elif name in _SEVERAL and isinstance(value, list):
            yield from ((name, each) for each in value if isinstance(each, Mapping))
        elif name in _ONE and isinstance(value, Mapping):
            yield name, value


def combined_definitions(schema: Mapping[str, Any]) -> bool:
    """Whether some part is combined with a definition: which may then be a part of another object."""
    for name, inner in _inner(schema):
        if name == "allOf" and "$ref" in inner and (len(schema["allOf"]) > 1 or "properties" in schema):
            return True
        if combined_definitions(inner):
            return True
    return "$ref" in schema and "properties" in schema
