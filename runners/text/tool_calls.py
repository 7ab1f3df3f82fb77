"""The calls of functions that a model writes into its answer, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters", "args")
"""What models call them, fine-tunes for other templates too."""
_BESIDE = frozenset(("id", "type"))
"""Of OpenAI's API, and dropped: a name that nobody needs, and the word "function"."""
_MOST_MISSING = 4
_BRACKETS = {"{": "}", "[": "]"}
_OUTSIDE = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|"', re.DOTALL)
_SPACE = re.compile(r"\s*")


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call: the function's name and its arguments."""

    name: str
    arguments: dict[str, object]


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls, in their order.

    Qwen's templates ask for `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Taken too: `parameters` or
    `args`, arguments that are JSON in a string, null or "", line ends within a string, closing brackets that are
    missing, several calls between two tags, and a whole call that no tag closes at the end. All else, as a key that
    a call does not have, stays in the text: nothing that a model said is lost.
    """
    calls: list[ToolCall] = []
    rest, begin, at = [], 0, text.find(_OPEN)
    while at >= 0:
        inner = at + len(_OPEN)
        for end, body in _bodies(text, inner):
            if found := _calls(body):
                rest.append(text[begin:at])
                calls += found
                begin = end
                break
        at = text.find(_OPEN, max(begin, inner))
    rest.append(text[begin:])
    return ("".join(rest).strip() if calls else text), calls


def _bodies(text: str, start: int) -> Iterator[tuple[int, list[object]]]:
    """What stands between tags, as JSON values, and where it ends: a tag that is within a string closes nothing."""
    values, end = _values(text, start)
    if values and text.startswith(_CLOSE, end):
        yield end + len(_CLOSE), values
    elif values and end == len(text):
        yield end, values
    close = text.find(_CLOSE, start)
    if close >= 0:
        values, end = _values(mended := _closed(text[start:close]), 0)
        if end == len(mended):
            yield close + len(_CLOSE), values


def _values(text: str, start: int) -> tuple[list[object], int]:
    """The JSON values from here on, with white space between them, and where they end."""
    values: list[object] = []
    end = _after_space(text, start)
    try:
        while text.startswith(("{", "["), end):
            value, end = _DECODER.raw_decode(text, end)
            values.append(value)
            end = _after_space(text, end)
    except (ValueError, RecursionError):
        return [], start
    return values, end


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def _closed(text: str) -> str:
    """With the last brackets that are missing, where they are few."""
    wanted = []
    for found in _OUTSIDE.finditer(text):
        if (char := found[0]) in _BRACKETS:
            wanted.append(_BRACKETS[char])
        elif char == '"' or (char in "}]" and (not wanted or wanted.pop() != char)):
            return text  # it ends within a string, or has brackets too many
    return text + "".join(reversed(wanted)) if len(wanted) <= _MOST_MISSING else text


def _calls(values: list[object]) -> list[ToolCall] | None:
    """The calls that these values are; None where one of them is none."""
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    found = [_call(value) for value in values]
    return None if None in found else [call for call in found if call is not None]


def _call(value: object) -> ToolCall | None:
    if not isinstance(value, dict) or not _says_nothing_more(value):
        return None
    if isinstance(function := value.get("function"), dict) and value.keys() - {"function"} <= _BESIDE:
        value = function  # as OpenAI's API has it
        if not _says_nothing_more(value):
            return None
    given = [name for name in _ARGUMENTS if name in value]
    name = value.get("name")
    if not isinstance(name, str) or not name or len(given) > 1 or value.keys() - {"name", *given} - _BESIDE:
        return None
    arguments = value[given[0]] if given else None
    if isinstance(arguments, str):
        arguments = decoded(arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    return ToolCall(name, arguments) if isinstance(arguments, dict) else None


def _says_nothing_more(value: dict[str, object]) -> bool:
    """What stands beside a call can be dropped."""
    return value.get("type") in (None, "function") and isinstance(value.get("id"), str | int | None)


def decoded(text: str) -> object:
    """The JSON value that a text is; the text where it is none, or would lose something."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)  # it could not be written as JSON again
    return value


# Not strict: models write line ends into strings as they are.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_twins, parse_float=_finite, parse_constant=_finite, strict=False
)
