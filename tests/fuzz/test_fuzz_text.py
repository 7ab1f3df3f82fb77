"""As test_fuzz_properties.py, of texts: calls, tags of reasoning wherever they stand, added tokens of every flag."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_onnx.runners.text.detokenizer import StreamDetokenizer
from qwen_onnx.runners.text.prompts import PromptEncoder
from qwen_onnx.runners.text.reasoning import ReasoningSplitter, split
from qwen_onnx.runners.text.tokenizer import Tokenizer
from qwen_onnx.runners.text.tool_calls import ToolCall, parse_tool_calls
from support.text_fixtures import byte_level_tokenizer, write_folder

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PIECES = st.sampled_from(
    (
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        '"name"',
        '"arguments"',
        "\\",
        "\n",
        "null",
    )
)
TAGGED = st.lists(
    st.sampled_from(("<think>", "</think>", "<thi", "nk>", "</", "<", "\n", "\n\n", " "))
    | st.text(max_size=3),
    max_size=9,
)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TOKENS = st.lists(
    st.tuples(
        st.sampled_from(("<think>", "</think>", "<tool_call>", "<a>", "Ünd", "an", "<é>", "|x", " y ", "<|im_end|>")),
        st.fixed_dictionaries({flag: st.booleans() for flag in FLAGS}),
    ),
    min_size=1, max_size=4, unique_by=lambda token: token[0],
)  # fmt: skip
SPELLED = st.lists(
    st.sampled_from(
        ("<think>", "<a>", "Ünd", "U\u0308nd", "an", "<é>", "<e\u0301>", "|x", " y ", "<|im_end|>", "<|")
    )
    | st.text(max_size=3),
    max_size=7,
).map("".join)


def a_call_is_found(name: str, arguments: dict[str, Any], key: str, around: str) -> None:
    """Written by any JSON writer, in any text without tags."""
    for inner in (arguments, json.dumps(arguments)):
        for ascii_only in (True, False):
            call = json.dumps({"name": name, key: inner}, ensure_ascii=ascii_only)
            text = f"{around}<tool_call>\n{call}\n</tool_call>{around}"
            assert parse_tool_calls(text) == ((around * 2).strip(), [ToolCall(name, arguments)])


def a_text_with_calls(pieces: list[str]) -> None:
    """No call in it: it stays as it is. Calls: what they leave is of the text."""
    text = "".join(pieces)
    rest, calls = parse_tool_calls(text)
    assert calls or rest == text
    json.dumps([call.arguments for call in calls], allow_nan=False)
    assert len(rest) <= len(text)


def a_reasoning(pieces: list[str], begun: bool, cuts: list[int]) -> None:
    """However the text comes in pieces, and nothing but tags and line ends of it is lost."""
    text = "".join(pieces)
    whole = split(text, begun=begun)
    splitter = ReasoningSplitter(begun=begun)
    ends = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    said = [splitter.push(text[start:end]) for start, end in itertools.pairwise(ends)]
    said.append(splitter.flush())
    assert "".join(part.reasoning for part in said) == whole.reasoning
    assert "".join(part.answer for part in said) == whole.answer

    start = text if begun else text.lstrip()
    if not begun and not start.startswith("<think>"):
        assert (whole.reasoning, whole.answer) == ("", text)
        return
    before, _, after = (start if begun else start.removeprefix("<think>")).partition("</think>")
    assert (whole.reasoning, whole.answer) == (before.strip("\n"), after.lstrip("\n"))


def added_tokens(tokens: list[tuple[str, dict[str, bool]]], text: str) -> None:
    """In the order of their ids; what decodes has the tags; streams agree; escaped text forms no control token."""
    first = byte_level_tokenizer().get_vocab_size()
    decoder = {str(first + n): {"content": content, **flags} for n, (content, flags) in enumerate(tokens)}
    with tempfile.TemporaryDirectory() as folder:
        config = {"added_tokens_decoder": decoder, "chat_template": "{{ messages[0].content }}"}
        encoder = PromptEncoder(write_folder(Path(folder), {"tokenizer_config.json": config}), rows=400)
        tokenizer = Tokenizer.from_folder(Path(folder))
    ids = tokenizer.encode(text)
    stream = StreamDetokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)
    think = tokenizer.token_id("<think>")
    assert think is not None
    assert tokenizer.decode([think, *ids]).startswith("<think>")
    control = {
        token_id
        for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()
        if token.special or token.content.startswith("<")
    }
    escaped = encoder.encode([{"role": "user", "content": text}], escape_special=True)
    assert not control & {*escaped}


def added_tokens_as_transformers(tokens: list[tuple[str, dict[str, bool]]], text: str) -> None:
    from transformers import PreTrainedTokenizerFast

    first = byte_level_tokenizer().get_vocab_size()
    decoder = {str(first + n): {"content": content, **flags} for n, (content, flags) in enumerate(tokens)}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), {"tokenizer_config.json": {"added_tokens_decoder": decoder}})
        oracle, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.from_folder(Path(folder))
    assert ours.encode(text) == oracle.encode(text)


PROPERTIES: dict[str, tuple[Callable[..., None], dict[str, st.SearchStrategy[Any]]]] = {
    "call": (
        a_call_is_found,
        {
            "name": st.text(min_size=1, max_size=5),
            "arguments": st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
            "key": st.sampled_from(("arguments", "parameters", "args")),
            "around": st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=5),
        },
    ),
    "text with calls": (a_text_with_calls, {"pieces": st.lists(PIECES | st.text(max_size=3), max_size=12)}),
    "reasoning": (
        a_reasoning,
        {"pieces": TAGGED, "begun": st.booleans(), "cuts": st.lists(st.integers(0, 99), max_size=6)},
    ),
    "added tokens": (added_tokens, {"tokens": TOKENS, "text": SPELLED}),
}


def verify(check: Callable[..., None], strategies: dict[str, st.SearchStrategy[Any]], examples: int) -> None:
    lenient = settings(
        max_examples=examples, suppress_health_check=list(HealthCheck), derandomize=True, deadline=None
    )
    lenient(given(**strategies)(check))()


@pytest.mark.parametrize("name", PROPERTIES)
def test_k6_k4_k8_a_hundred_texts(name: str) -> None:
    """Nothing that a model said is lost, and text of users stays text."""
    verify(*PROPERTIES[name], 100)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", PROPERTIES)
def test_k6_k4_k8_thousands_of_texts(name: str) -> None:
    """The same, twenty times as much."""
    verify(*PROPERTIES[name], 2_000)


@pytest.mark.transformers
def test_k8_added_tokens_of_every_flag_are_those_of_transformers() -> None:
    """Ids of texts that spell them, next to each other and within words."""
    verify(added_tokens_as_transformers, PROPERTIES["added tokens"][1], 150)
