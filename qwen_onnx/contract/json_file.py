"""JSON files, read with errors that name the file; and JSON values as dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import json
import reprlib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from qwen_onnx.errors import UserError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object stored in `path`.

    Raises UserError as `read_json_value`, and for another value than an object.
    """
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {_name_of(value)}, not an object")
    return value


def read_json_value(path: Path) -> object:
    """Return the JSON value stored in `path`.

    Raises UserError, naming the file, when it is missing, unreadable, not UTF-8, not JSON, or too deeply nested.
    """
    text = read_text(path)
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise UserError(f"{path}: JSON nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    return value


def read_text(path: Path, *, name: str | None = None) -> str:
    """Return the UTF-8 text stored in `path`, which errors call `name`.

    Raises UserError when it is missing, unreadable or not UTF-8.
    """
    name = name or str(path)
    try:
        return path.read_text(
            encoding="utf-8-sig"
        )  # files saved by Windows editors open with a byte order mark
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 (byte {error.start})") from None
    except (OSError, ValueError) as error:  # a null byte in the name
        raise UserError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _name_of(value: object) -> str:
    if isinstance(value, list):
        return "array"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "boolean" if isinstance(value, bool) else "number"


def from_json(kind: type[T], value: object) -> T:
    """A JSON value as the dataclass `kind`, every field of it checked against its annotation.

    Raises:
        TypeError: a field is missing or of another type.
    """
    built: T = _build(kind, value)
    return built


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """A manifest has a thousand small objects of few kinds."""
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    """A JSON value as the annotated type: dataclasses, tuples, dicts, optionals, unions and scalars."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{kind} wants an object, found {reprlib.repr(value)}")
        hints = _hints(typing.cast(Any, kind))
        return kind(**{name: _build(hints[name], value[name]) for name in hints if name in value})  # type: ignore[operator]
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"a list is wanted, found {reprlib.repr(value)}")
        return tuple(_build(args[0], item) for item in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"an object is wanted, found {reprlib.repr(value)}")
        return {key: _build(args[1], item) for key, item in value.items()}
    if origin is typing.Literal:
        if value not in args:
            raise TypeError(f"one of {', '.join(map(repr, args))} wanted, found {reprlib.repr(value)}")
        return value
    if origin is types.UnionType:
        if value is None and types.NoneType in args:
            return None
        kinds = [arg for arg in args if arg is not types.NoneType]
        if len(kinds) == 1:
            return _build(kinds[0], value)
        kind = tuple(kinds)
    elif kind is float:
        kind = (int, float)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{kind} wanted, found {reprlib.repr(value)}")
    return value
