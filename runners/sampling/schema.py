"""A JSON Schema as people send it: out of its wrapper, with keywords that a draft knows, its objects closed."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen_onnx.errors import UserError, option

Schema = Mapping[str, Any]

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
_DRAFT_3 = {"divisibleBy": "multipleOf", "extends": "allOf", "disallow": "not"}
"""Its keywords that no later draft has, and what later ones have for them."""
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
_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
_CLOSED_BY = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")


def unwrapped(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema inside of what OpenAI's APIs take: a `response_format`, a `text.format`, or what these hold."""
    outer = value.get("response_format")
    if isinstance(outer, Mapping) and len(value) == 1:
        value = outer
    if value == {"type": "json_object"}:  # any
        return {"type": "object"}
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
            if name in _DRAFT_3:
                raise UserError(
                    f"{option('json_schema')}: {name!r} is a keyword of draft 3; later ones have {_DRAFT_3[name]!r}"
                )
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = (
                f"; {near[0]!r} is meant?" if near else "; a JSON Schema wanted, as {'type': 'object', ...}"
            )
            raise UserError(f"{option('json_schema')}: no draft knows the keyword {name!r}{hint}")
    if not isinstance(nullable := schema.get("nullable", False), bool):
        raise UserError(f"{option('json_schema')}: nullable {nullable!r}: true or false wanted")
    for _, inner in _inner(schema):
        verify_keywords(inner)


def with_nulls(schema: Schema) -> dict[str, Any]:
    """A copy in which `nullable`, as OpenAPI 3.0 has it, is said as JSON Schema says it."""
    copy = {name: _changed(name, value, with_nulls) for name, value in schema.items() if name != "nullable"}
    if not schema.get("nullable"):
        return copy
    kind, values = copy.get("type"), [copy["const"]] if "const" in copy else copy.get("enum")
    if any(name in copy for name in _COMBINED) or not (kind or values):
        outer = {name: copy.pop(name) for name in [*copy] if name in (*_DEFINITIONS, "$schema", "$id")}
        return {**outer, "anyOf": [copy, {"type": "null"}]} if copy else outer
    if kind:
        copy["type"] = [*dict.fromkeys([*([kind] if isinstance(kind, str) else kind), "null"])]
    if isinstance(values, list):
        copy.pop("const", None)
        copy["enum"] = values if None in values else [*values, None]
    return copy


def _changed(name: str, value: Any, change: Callable[[Schema], dict[str, Any]]) -> Any:
    """A keyword's value with all schemas in it changed."""
    if name in _NAMED and isinstance(value, Mapping):
        return {key: change(each) if isinstance(each, Mapping) else each for key, each in value.items()}
    if name in _SEVERAL and isinstance(value, list):
        return [change(each) if isinstance(each, Mapping) else each for each in value]
    return change(value) if name in _ONE and isinstance(value, Mapping) else value


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose objects have the properties that are named and no others, as in OpenAI's strict mode.

    Objects that say so themselves (`additionalProperties`), and parts that are combined with others, stay as they
    are: closed, they could contradict each other. So do all definitions, where one of them is such a part.
    """
    refs = set(_combined_refs(schema, schema, combined=False))
    if any(not ref.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS)) for ref in refs):
        return dict(schema)  # of some other place in it
    return _closed(schema, schema, combined=False, definitions=bool(refs))


def _closed(schema: Schema, root: Schema, *, combined: bool, definitions: bool) -> dict[str, Any]:
    copy = dict(schema)
    alone = not combined and not any(name in schema for name in (*_COMBINED, *_CLOSED_BY))
    if "properties" in schema and alone and isinstance(properties := schema["properties"], Mapping):
        copy["additionalProperties"] = False
        names = _required(schema)
        # What is required is named, if nothing more.
        copy["properties"] = {**properties, **{name: {} for name in names if name not in properties}}
    for name, value in copy.items():
        inside = _is_combined(schema, name, root, combined=combined) or (name in _DEFINITIONS and definitions)

        def inner(each: Schema, inside: bool = inside) -> dict[str, Any]:
            return _closed(each, root, combined=inside, definitions=definitions)

        copy[name] = _changed(name, value, inner)
    return copy


def _combined_refs(schema: Schema, root: Schema, *, combined: bool) -> Iterator[str]:
    """References to what something else is said of, too."""
    beside = any(name in schema for name in (*_COMBINED, *_OF_OBJECTS) if name != "$ref")
    if (combined or beside) and isinstance(ref := schema.get("$ref"), str):
        yield ref
    for name, inner in _inner(schema):
        yield from _combined_refs(inner, root, combined=_is_combined(schema, name, root, combined=combined))


def _is_combined(schema: Schema, name: str, root: Schema, *, combined: bool) -> bool:
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
    if name == "oneOf" and not _exclude(parts, root):
        return True
    return not single or len(combiners) > 1 or any(each in schema for each in _OF_OBJECTS)


def _exclude(parts: object, root: Schema) -> bool:
    """Whether what one of the parts takes when it is closed, no other takes as it was given: `oneOf` still holds."""
    if not isinstance(parts, list):
        return False
    found = [_resolved(part, root) for part in parts]
    return all(_never(one, other) for one, other in itertools.permutations(found, 2))


def _resolved(part: object, root: Schema) -> Schema:
    """The definition that a part refers to, where that is all it does."""
    if not isinstance(part, Mapping):
        return {}
    place, _, name = str(part.get("$ref", "")).removeprefix("#/").partition("/")
    named = root.get(place) if place in _DEFINITIONS else None
    found = named.get(name) if isinstance(named, Mapping) else None
    return found if isinstance(found, Mapping) else part


def _never(one: Schema, other: Schema) -> bool:
    """No value of `one`, closed, is one of `other`: of another type, or told apart by what is required."""
    types = {str(one.get("type")), str(other.get("type"))}
    if len(types) == 2 and types <= _TYPES and types != {"integer", "number"}:
        return True
    mine, its = one.get("properties"), other.get("properties")
    if types != {"object"} or not isinstance(mine, Mapping):
        return False
    if any(name in one for name in (*_COMBINED, *_CLOSED_BY)):  # not closed, and so anything
        return False
    needed, given = set(_required(other)), set(_required(one))
    if needed - given - mine.keys():
        return True
    if not isinstance(its, Mapping):
        return False
    shared = given & mine.keys() & its.keys()
    pairs = [(_values(mine[name]), _values(its[name])) for name in shared]
    return any(left and right and left.isdisjoint(right) for left, right in pairs)


def _values(schema: object) -> set[str]:
    """All that a `const` or an `enum` of texts lets through; nothing where that is not all."""
    if not isinstance(schema, Mapping):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return (
        set(values) if isinstance(values, list) and all(isinstance(each, str) for each in values) else set()
    )


def _required(schema: Schema) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            yield from ((name, each) for each in value.values() if isinstance(each, Mapping))
        elif name in _SEVERAL and isinstance(value, list):
            yield from ((name, each) for each in value if isinstance(each, Mapping))
        elif name in _ONE and isinstance(value, Mapping):
            yield name, value
