import datetime
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from qwen_onnx.errors import UserError
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from support.text_fixtures import QWEN3_LIKE, QWEN25_LIKE, byte_level_tokenizer, write_folder

Messages = Sequence[Mapping[str, object]]

SYSTEM = {"role": "system", "content": "Be <brief> & kind."}
USER = {"role": "user", "content": "What's 2 < 3? 好 é🔥"}
EMPTY = {"role": "user", "content": ""}
ANSWER = {"role": "assistant", "content": "Yes."}
REASONED = {"role": "assistant", "content": "<think>\n2 is less\n</think>\n\nYes."}
REASONED_APART = {"role": "assistant", "content": "Yes.", "reasoning_content": "2 is less"}
ARGUMENTS = {"city": "Zürich", "days": [1, 2], "x": "<&'>"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
        {"name": "time", "arguments": {}},
    ],
}
TOOL = {"role": "tool", "content": '{"sky": "heiter & blau"}'}
WRAPPED = {"role": "user", "content": "<tool_response>\nx\n</tool_response>"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wetter für <city> & 'more'"}}]

CONVERSATIONS: dict[str, Messages] = {
    "system only": [SYSTEM],
    "user only": [USER],
    "system": [SYSTEM, USER],
    "multi-turn": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "late system": [USER, SYSTEM, USER],
    "empty content": [EMPTY],
    "empty answer": [USER, {**ANSWER, "content": ""}, EMPTY],
    "one tool answer": [USER, CALL, TOOL],
    "tool answers": [SYSTEM, USER, CALL, TOOL, TOOL, ANSWER, USER],
    "earlier reasoning": [USER, REASONED, USER],
    "reasoning apart": [USER, REASONED_APART, USER, REASONED_APART],
    "last reasoning": [USER, REASONED],
    "reasoning with tools": [USER, {**CALL, "content": REASONED["content"]}, TOOL, REASONED],
    "wrapped tool answer": [USER, REASONED, WRAPPED],
}


@pytest.mark.transformers
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("source", [QWEN25_LIKE, QWEN3_LIKE], ids=["qwen2.5", "qwen3"])
def test_prompt_is_that_of_transformers(source: str, conversation: str) -> None:
    """Character by character: it is what the model was trained with."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    messages = CONVERSATIONS[conversation]
    ours = ChatTemplate(source)
    for prompt, tools, thinking in itertools.product([True, False], [None, [], TOOLS], [None, True, False]):
        switch = {} if thinking is None else {"enable_thinking": thinking}
        expected = theirs.apply_chat_template(
            messages,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=prompt,
            tools=tools,
            **switch,
        )
        text = ours.render(messages, add_generation_prompt=prompt, tools=tools, enable_thinking=thinking)
        assert text == expected


@pytest.mark.transformers
@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% if loop.last %}\n last\n  {% endif %}\n{% endfor %}\n",
        "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ unk_token is defined }}",
        "{{ tools is defined }}{{ documents is defined }}{{ enable_thinking is defined }}{{ tools is none }}",
        "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[0] | tojson(sort_keys=true) }}",
        "{{ messages | tojson(separators=(',', ':')) }}{{ 'é' | tojson(ensure_ascii=true) }}",
        "{% for i in [1, 2, 3, 9, 4] if i != 3 %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
        "{% for i in range(9) %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{{ loop.last }}{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{{ loop.index }}{% endgeneration %}{% endfor %}",
        "{% macro f(x, y='b') %}{{ x ~ y }}{{ caller() if caller }}{% endmacro %}{% call f(1) %}c{% endcall %}",
        "{% set ns = namespace({'a': 1}, b=2) %}{% set ns.a = ns.a + 5 %}{{ ns.a }}{{ ns.b }}{{ ns.c is defined }}",
        "{{ dict(a=1) }}{{ [1, 2] + [3] }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ '%5.1f|%s' % (1.25, 'x') }}{{ 7 // 2 }}",
        "{% for k, v in messages[0].items() | sort %}{{ k }}={{ v }}{{ loop.length }}{{ loop.last }}{% endfor %}",
        "{% for x in messages | map(attribute='role') if x != 'tool' %}{{ x }}{{ loop.length }}{% endfor %}",
        "{% for c in 'abc' %}{{ c }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
        "{% for x in nothing %}{{ x }}{% else %}-{% endfor %}{% for x in messages[9:] %}{% else %}-{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% filter upper | replace('A', 'b') %}aA{% endfilter %}{% set t | trim %}  x {% endset %}[{{ t }}]",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [3, 1] | sort | join('-') }}",
        "{{ 'a\\nb' | indent(2) }}|{{ 'x' | center(5) }}|{{ '{:>4}'.format('y') }}|{{ undefined_name }}|",
        "{{ messages[0].nothing is defined }}{{ messages[0].get('nothing', 'd') }}{{ messages[-1]['role'] }}",
        "{{ strftime_now('%Y') | length }}{% if messages[0] is mapping and messages is sequence %}yes{% endif %}",
    ],
)
def test_features_behave_as_in_transformers(source: str) -> None:
    """No bound or sandbox rule of ours changes what an honest template writes."""
    transformers = pytest.importorskip("transformers")
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **special)
    messages = [SYSTEM, USER, REASONED]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(source, special_tokens=special).render(messages) == expected


def test_golden_qwen25() -> None:
    """The default system prompt is there, tool JSON has no HTML escapes, tool answers share a turn."""
    assert ChatTemplate(QWEN25_LIKE).render([USER, CALL, TOOL, TOOL], tools=TOOLS) == (
        "<|im_start|>system\nYou are a small test model.\n\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "weather", "description": "Wetter für <city> & \'more\'"}}\n'
        "</tools><|im_end|>\n"
        "<|im_start|>user\nWhat's 2 < 3? 好 é🔥<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": '
        '{"city": "Zürich", "days": [1, 2], "x": "<&\'>"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"sky": "heiter & blau"}\n</tool_response>'
        '\n<tool_response>\n{"sky": "heiter & blau"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_golden_qwen3() -> None:
    """Earlier reasoning is left out of the history; the thinking switch has its effect."""
    template = ChatTemplate(QWEN3_LIKE)
    history = (
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\n<|im_end|>\n"
    )
    messages = [EMPTY, REASONED, EMPTY]
    start = "<|im_start|>assistant\n"
    assert template.render(messages) == history + start
    assert template.render(messages, enable_thinking=True) == history + start
    no_think = history + start + "<think>\n\n</think>\n\n"
    assert template.render(messages, enable_thinking=False) == no_think
    assert template.render(messages, add_generation_prompt=False) == history
    assert template.render([EMPTY, REASONED], add_generation_prompt=False) == (
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<think>\n2 is less\n</think>\n\nYes.<|im_end|>\n"
    )


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "found"}]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": "found"}},
        {"tokenizer_config.json": {"chat_template": NAMED}},
        {"tokenizer_config.json": {"chat_template": {"tool_use": "tools", "default": "found"}}},
        {"tokenizer_config.json": {"chat_template": [{"name": "chat", "template": "found"}]}},
        {"chat_template.jinja": "found"},
        {"chat_template.jinja": "\ufefffound"},
        {"chat_template.json": {"chat_template": "found"}},
        {
            "chat_template.jinja": "found",
            "chat_template.json": {"chat_template": "second"},
            "tokenizer_config.json": {"chat_template": "third"},
        },
        {
            "chat_template.json": {"chat_template": "found"},
            "tokenizer_config.json": {"chat_template": "third"},
        },
        {"chat_template.jinja": " \n", "tokenizer_config.json": {"chat_template": "found"}},
        {"chat_template.json": {"chat_template": None}, "tokenizer_config.json": {"chat_template": "found"}},
    ],
)
def test_where_the_template_is_found(tmp_path: Path, files: Mapping[str, object]) -> None:
    """chat_template.jinja comes first: saves put it there, and leave the others outdated."""
    template = ChatTemplate.from_folder(write_folder(tmp_path, files))
    assert template is not None
    assert template.source == "found"
    assert template.render([USER]) == "found"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": {}},
        {"tokenizer_config.json": {"chat_template": None}},
        {"tokenizer_config.json": {"chat_template": ""}},
        {"tokenizer_config.json": {"chat_template": []}},
    ],
)
def test_a_model_may_have_no_template(tmp_path: Path, files: Mapping[str, object]) -> None:
    """It gets neither an empty nor an invented one."""
    assert ChatTemplate.from_folder(write_folder(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"chat_template.jinja": "{% for"}, "chat_template.jinja"),
        ({"chat_template.jinja": "{{ a | no_such_filter }}"}, "chat_template.jinja"),
        ({"chat_template.json": "["}, "chat_template.json"),
        ({"chat_template.json": {"chat_template": 5}}, "chat_template.json"),
        ({"tokenizer_config.json": {"chat_template": ["a"]}}, "tokenizer_config.json"),
        ({"tokenizer_config.json": {"chat_template": [{"template": "a"}]}}, "tokenizer_config.json"),
        ({"tokenizer_config.json": {"chat_template": {"default": 5}}}, "tokenizer_config.json"),
        ({"tokenizer_config.json": {"chat_template": {"a": "x", "b": "y"}}}, "'a', 'b'"),
        ({"tokenizer_config.json": "[]", "chat_template.jinja": "x"}, "tokenizer_config.json"),
        ({"tokenizer_config.json": {"eos_token": 5}, "chat_template.jinja": "x"}, "eos_token"),
    ],
)
def test_damaged_templates_name_their_file(tmp_path: Path, files: Mapping[str, object], named: str) -> None:
    folder = write_folder(tmp_path, files)
    with pytest.raises(UserError) as caught:
        ChatTemplate.from_folder(folder)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_utf8_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"chat_template\.jinja.*UTF-8"):
        ChatTemplate.from_folder(tmp_path)


def test_special_tokens_as_string_object_or_null(tmp_path: Path) -> None:
    """null is undefined, an object is its content."""
    config = {
        "bos_token": None,
        "eos_token": {"content": "<|im_end|>", "special": True},
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
    }
    source = "{{ bos_token }}[{{ bos_token is defined }}]{{ eos_token }}{{ pad_token }}"
    files = {"tokenizer_config.json": config, "chat_template.jinja": source}
    template = ChatTemplate.from_folder(write_folder(tmp_path, files))
    assert template is not None
    assert template.render([USER]) == "[False]<|im_end|><|endoftext|>"


def test_a_template_can_write_the_date() -> None:
    """Templates write it by strftime_now."""
    before = datetime.date.today().isoformat()
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([])
    assert text in {before, datetime.date.today().isoformat()}


def test_messages_are_not_changed_and_may_be_any_mapping() -> None:
    messages = [dict(USER)]
    source = "{% set _ = messages[0].items() %}{{ messages[0].role }}"
    assert ChatTemplate(source).render(messages) == "user"
    assert messages == [USER]
