"""The calls of functions that a model writes into its answer, as JSON."""

from __future__ import annotations

import dataclasses
import json
import re

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call: the function's name and its arguments."""

    name: str
    arguments: dict[str, object]


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls, in their order.

    Qwen's templates ask for `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What is between such tags and
    is no call stays in the text: nothing that a model said is lost.
    """
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        call = _parsed(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    rest = _CALL.sub(taken, text)
    return (rest.strip() if calls else text), calls


def _parsed(text: str) -> ToolCall | None:
    try:
        value = _loaded(text)
        if isinstance(value, dict) and isinstance(arguments := value.get("arguments", {}), str):
            value = {**value, "arguments": _loaded(arguments)}  # JSON in a string, as OpenAI's API has it
    except (ValueError, RecursionError):
        return None
    match value:
        case {"name": str(name), "arguments": dict(arguments)} if name:
            return ToolCall(name, arguments)
        case {"name": str(name), **rest} if name and "arguments" not in rest:
            return ToolCall(name, {})
    return None


def _loaded(text: str) -> object:
    def refused(constant: str) -> object:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refused)  # NaN and Infinity are no JSON
