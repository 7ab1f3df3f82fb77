"""Calls as models write them, and histories as clients send them."""

from __future__ import annotations

import json

import pytest

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.prompts import verified_messages
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tool_calls import ToolCall, parse_tool_calls
from support.text_fixtures import QWEN3_LIKE, QWEN25_LIKE

WRITE = ToolCall("write", {"path": "a", "lines": [1, {"x": None}]})
ARGUMENTS = '{"path": "a", "lines": [1, {"x": null}]}'


@pytest.mark.parametrize(
    "call",
    [
        f'{{"name": "write", "parameters": {ARGUMENTS}}}',
        f'{{"name": "write", "args": {ARGUMENTS}}}',
        f'{{"name": "write", "arguments": {json.dumps(ARGUMENTS)}}}',
        f'{{"id": "call_1", "type": "function", "name": "write", "arguments": {ARGUMENTS}}}',
        f'{{"type": "function", "function": {{"name": "write", "arguments": {ARGUMENTS}}}}}',
        f'{{"name": "write", "arguments": {ARGUMENTS}',
        f'\n[{{"name": "write", "arguments": {ARGUMENTS}}}]\n',
        f'[{{"name": "write", "arguments": {ARGUMENTS[:-2]}',
    ],
)
def test_k6_other_spellings_of_a_call(call: str) -> None:
    assert parse_tool_calls(f"So:\n<tool_call>{call}</tool_call>\n") == ("So:", [WRITE])


@pytest.mark.parametrize("nothing", ['""', "null", '" "', "{}", '"{}"', '"null"'])
def test_k6_arguments_that_are_nothing(nothing: str) -> None:
    call = f'<tool_call>{{"name": "now", "arguments": {nothing}}}</tool_call>'
    assert parse_tool_calls(call) == ("", [ToolCall("now", {})])


def test_k6_line_ends_and_tags_within_a_string() -> None:
    said = (
        '<tool_call>{"name": "write", "arguments": {"text": "a\n\tb</tool_call>c<tool_call>"}}</tool_call>!'
    )
    assert parse_tool_calls(said) == (
        "!",
        [ToolCall("write", {"text": "a\n\tb</tool_call>c<tool_call>"})],
    )


def test_k6_several_calls_and_one_that_nothing_closes() -> None:
    two = '<tool_call>{"name": "a"}\n{"name": "b"}</tool_call>'
    assert parse_tool_calls(f'{two} and <tool_call>\n{{"name": "c"}}\n') == (
        "and",
        [ToolCall("a", {}), ToolCall("b", {}), ToolCall("c", {})],
    )


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}',
        '{"name": "f", "arguments": {"a": 1}, "because": "I want to"}',
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": "f", "arguments": "not JSON"}',
        '{"name": "f", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}',
        '{"name": "f", "arguments": {}} or so',
        '{"name": "f"} [1]',
        '{"type": "thought", "name": "f", "arguments": {}}',
        '{"function": {"type": "I want to", "name": "f", "arguments": {}}}',
        '{"id": {"because": "I want to"}, "name": "f", "arguments": {}}',
        "[]",
        "",
        '{"name": "f", "arguments": {"a": "b',
        '{"name": "f", "arguments": {}}}}}',
        '{"name": "f", "arguments": ' + "{" * 9,
    ],
)
def test_k6_nothing_that_a_model_said_is_lost(call: str) -> None:
    """What is not wholly a call stays in the text, and calls around it are found."""
    said = f"Here: <tool_call>{call}</tool_call>"
    assert parse_tool_calls(said) == (said, [])
    whole = '<tool_call>{"name": "g"}</tool_call>'
    assert parse_tool_calls(f"{whole}{said} {whole}") == (said, [ToolCall("g", {})] * 2)


def test_k6_a_call_cut_off_is_no_call() -> None:
    """Closing brackets are only put where the model went on to the tag."""
    said = '<tool_call>{"name": "wait", "arguments": {"days": 1'
    assert parse_tool_calls(said) == (said, [])


def history(arguments: object) -> list[dict[str, object]]:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "warm"},
    ]


@pytest.mark.parametrize("template", [QWEN25_LIKE, QWEN3_LIKE])
@pytest.mark.parametrize(
    ("arguments", "same"),
    [('{"city": "Zürich"}', {"city": "Zürich"}), ("", {}), (None, {}), ("null", {}), (" ", {})],
)
def test_k7_arguments_in_a_string_are_decoded_before_rendering(
    template: str, arguments: object, same: object
) -> None:
    compiled = ChatTemplate(template)
    rendered = compiled.render(verified_messages(history(arguments)))
    assert rendered == compiled.render(verified_messages(history(same)))
    assert f'"arguments": {json.dumps(same, ensure_ascii=False)}}}' in rendered
    flat = history(arguments)
    flat[1]["tool_calls"] = [{"name": "f", "arguments": arguments}]
    assert compiled.render(flat) == rendered


def test_k7_a_string_that_is_no_object_stays_what_it_is() -> None:
    rendered = ChatTemplate(QWEN25_LIKE).render(history("so much"))
    assert '"arguments": "so much"}' in rendered


@pytest.mark.parametrize(
    "result", [{"t": 3, "é": None}, [1, "a"], 4.5, True, None, [], {}, [{"type": "text", "value": 1}]]
)
@pytest.mark.parametrize("template", [QWEN25_LIKE, QWEN3_LIKE])
def test_k7_a_tool_may_return_any_json(template: str, result: object) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": result}]
    rendered = ChatTemplate(template).render(verified_messages(messages))
    assert f"<tool_response>\n{json.dumps(result, ensure_ascii=False)}\n</tool_response>" in rendered


def test_k7_parts_of_text_of_a_tool_are_joined() -> None:
    parts = [{"type": "text", "text": "wa"}, {"type": "text", "text": "rm"}]
    assert verified_messages([{"role": "tool", "content": parts}])[0]["content"] == "warm"
    with pytest.raises(UserError, match="content"):
        verified_messages([{"role": "tool"}])
    with pytest.raises(UserError, match="content"):
        verified_messages([{"role": "user", "content": {"t": 3}}])
