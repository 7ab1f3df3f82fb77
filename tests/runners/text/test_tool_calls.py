"""Calls of functions are parsed into JSON, and nothing that is none of them is lost."""

from __future__ import annotations

import pytest

from qwen_onnx.runners.text.tool_calls import ToolCall, parse_tool_calls

WEATHER = ToolCall("weather", {"city": "Zürich", "days": 2})


def test_calls_are_taken_out_in_their_order() -> None:
    text = (
        'I will look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    assert parse_tool_calls(text) == ("I will look.", [WEATHER, ToolCall("now", {})])


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}',
        '{"arguments": {"days": 2, "city": "Z\\u00fcrich"}, "name": "weather"}',
        '{"name": "weather", "arguments": "{\\"city\\": \\"Zürich\\", \\"days\\": 2}"}',
    ],
)
def test_spellings_of_one_call(call: str) -> None:
    assert parse_tool_calls(f"<tool_call>{call}</tool_call>") == ("", [WEATHER])


def test_no_arguments_are_none() -> None:
    assert parse_tool_calls('<tool_call>{"name": "now"}</tool_call>') == ("", [ToolCall("now", {})])


@pytest.mark.parametrize(
    "text",
    [
        " No call at all.\n",
        "<tool_call>{'name': 'weather'}</tool_call>",
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "today"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "weather"',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    """No damaged call is lost, whatever the model said."""
    assert parse_tool_calls(text) == (text, [])
    both = text + '<tool_call>{"name": "now"}</tool_call>'
    if text.endswith("</tool_call>"):
        assert parse_tool_calls(both) == (text, [ToolCall("now", {})])


NESTED = '{"name": "f", "arguments": {"a": {"b": [{"c": [1'
"""Six brackets are open."""


@pytest.mark.parametrize("missing", range(8))
def test_a_few_brackets_may_be_missing(missing: int) -> None:
    """Of more, too much of the call is missing to call anything by it."""
    text = f"<tool_call>{NESTED}{']}]}}}'[: 6 - missing] if missing <= 6 else '[' + ']}]}}}'}</tool_call>"
    wanted = [ToolCall("f", {"a": {"b": [{"c": [1]}]}})]
    assert parse_tool_calls(text) == (("", wanted) if missing <= 4 else (text, []))
