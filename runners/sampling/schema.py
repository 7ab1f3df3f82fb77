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
_WRAPPER = {"type", "name", "description", "strict", "schema"}
_DEFINITIONS = ("$defs", "definitions")
_COMBINED = (
    "$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "dependentSchemas", "else", "if", "not", "oneOf",
    "then",
)  # fmt: skip
"""What else is said of the same value: there, an object and all in it is left as open as it says."""
_ALTERNATIVES = ("anyOf", "oneOf")
_OF_OBJECTS = (
    "additionalProperties", "dependentRequired", "dependencies", "minProperties", "patternProperties", "properties",
    "propertyNames", "required", "unevaluatedProperties",
)  # fmt: skip
_CLOSED_BY = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")


def unwrapped(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema inside of what OpenAI's APIs take: a `response_format`, a `text.format`, or what these hold."""
    outer = value.get("response_format")
    if isinstance(outer, Mapping) and len(value) == 1:
        value = outer
    inner = value.get("json_schema")
    if value.get("type") == "json_schema" and isinstance(inner, Mapping):
        value = inner
    wraps = value.get("type", "json_schema") in ("json_schema", "json_object")
    if wraps and isinstance(value.get("schema"), Mapping) and value.keys() <= _WRAPPER:
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


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose objects have the properties that are named and no others, as in OpenAI's strict mode.

    Objects that say so themselves (`additionalProperties`), and parts that are combined with others, stay as they
    are: closed, they could contradict each other. So do all definitions, where one of them is such a part.
    """
    refs = set(_combined_refs(schema, combined=False))
    if any(not ref.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)) for ref in refs):
        return dict(schema)  # of some other place in it
    return _closed(schema, combined=False, definitions=bool(refs))


def _closed(schema: Mapping[str, Any], *, combined: bool, definitions: bool) -> dict[str, Any]:
    copy = dict(schema)
    alone = not combined and not any(name in schema for name in (*_COMBINED, *_CLOSED_BY))
    if "properties" in schema and alone and isinstance(properties := schema["properties"], Mapping):
        copy["additionalProperties"] = False
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        # What is required is named, if nothing more.
        copy["properties"] = {**properties, **{name: {} for name in names if name not in properties}}
    for name, value in copy.items():
        inside = _is_combined(schema, name, combined=combined) or (name in _DEFINITIONS and definitions)

        def inner(each: Any, inside: bool = inside) -> Any:
            return (
                _closed(each, combined=inside, definitions=definitions) if isinstance(each, Mapping) else each
            )

        if name in _NAMED and isinstance(value, Mapping):
            copy[name] = {key: inner(each) for key, each in value.items()}
        elif name in _SEVERAL and isinstance(value, list):
            copy[name] = [*map(inner, value)]
        elif name in _ONE:
            copy[name] = inner(value)
    return copy


def _combined_refs(schema: Mapping[str, Any], *, combined: bool) -> Iterator[str]:
    """References to what something else is said of, too."""
    beside = any(name in schema for name in (*_COMBINED, *_OF_OBJECTS) if name != "$ref")
    if (combined or beside) and isinstance(ref := schema.get("$ref"), str):
        yield ref
    for name, inner in _inner(schema):
        yield from _combined_refs(inner, combined=_is_combined(schema, name, combined=combined))


def _is_combined(schema: Mapping[str, Any], name: str, *, combined: bool) -> bool:
    """Whether the schemas under this keyword are parts of an object that others describe, too."""
    if name in _DEFINITIONS:
        return False
    if combined:
        return True
    combiners = [each for each in _COMBINED if each in schema]
    if name not in _COMBINED:  # members, of which the other parts may speak
        return bool(combiners)
    # Alternatives, or one part alone, as of pydantic's references, are combined with nothing.
    parts = schema[name]
    single = name in _ALTERNATIVES or (name == "allOf" and isinstance(parts, list) and len(parts) == 1)
    return not single or len(combiners) > 1 or any(each in schema for each in _OF_OBJECTS)


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            yield from ((name, each) for each in value.values() if isinstance(each, Mapping))
        elif name in _SEVERAL and isinstance(value, list):
            yield from ((name, each) for each in value if isinstance(each, Mapping))
        elif name in _ONE and isinstance(value, Mapping):
            yield name, value
