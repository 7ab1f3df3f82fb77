"""Schemas, expressions and prompts that would take minutes or gigabytes: refused at once, and Ctrl-C at any point."""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx import UserError, load
from qwen_onnx.runners.sampling.constraint import as_constraint
from qwen_onnx.runners.sampling.grammar import Grammars, _on_deep_stack
from qwen_onnx.runners.text.vocabulary import Vocabulary
from support.chats import tiny
from support.patience import PATIENCE
from support.refusals import refused
from support.repl import CTRL_D, talk


def test_o1_patterns_that_explode_together_are_refused_before_they_are_compiled() -> None:
    patterns = [{"type": "string", "pattern": f"(.*a.{{{i}}}b.*)"} for i in range(39)]
    refused(as_constraint, json_schema={"allOf": patterns}, mentions=("patterns and formats where",))
    assert as_constraint(json_schema={"allOf": patterns[:2]}) is not None
    chain: dict[str, Any] = {"$ref": "#/$defs/d0", "$defs": {}}
    nested: dict[str, Any] = {"type": "string"}
    for i, each in enumerate(patterns[:20]):
        chain["$defs"][f"d{i}"] = {**each, "$ref": f"#/$defs/d{i + 1}"}
        nested = {**each, "anyOf": [nested]}
    chain["$defs"]["d20"] = {"type": "string"}
    for schema in (chain, nested):
        refused(
            as_constraint, json_schema=schema, mentions=("patterns and formats where parts are combined",)
        )
    apart = {"type": "object", "properties": {f"p{i}": each for i, each in enumerate(patterns[:20])}}
    assert as_constraint(json_schema=apart) is not None


def test_o1_ctrl_c_does_not_wait_for_the_compiler() -> None:
    """It is in a thread of its own, which ends by itself."""
    ended, waited = threading.Event(), []

    def compile() -> None:
        _thread.interrupt_main()
        waited.append(not ended.wait(PATIENCE))

    with pytest.raises(KeyboardInterrupt):
        _on_deep_stack(compile)
    ended.set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    assert waited == [False], "the wait ended first"


def test_o1_what_is_taken_compiles_at_once() -> None:
    """The largest of each kind that the bounds let through: under 2 s of CPU, and most under 0.3."""
    chat = load(tiny(), provider="cpu", threads=1)
    assert chat.tokenizer is not None
    vocabulary = Vocabulary.of(chat.runner.manifest.vocab_size, chat.eos_token_ids, chat.tokenizer)
    grammars = Grammars(chat.tokenizer, vocabulary)
    names = {f"p{i}": {} for i in range(200)}
    wide = {f"q{i}": {"type": "object", "properties": names} for i in range(45)}
    most: list[dict[str, Any]] = [
        {"json_schema": {"type": "object", "properties": wide, "required": [*wide]}},
        {"json_schema": {"allOf": [{"type": "string", "pattern": f"(.*a.{{{i}}}b.*)"} for i in range(6)]}},
        {"json_schema": {"enum": [{"a": i} for i in range(9_000)]}},
        {"json_schema": {"type": "array", "items": {"type": "integer", "multipleOf": 9_973}}},
        {
            "json_schema": {
                "type": "object",
                "patternProperties": {f"(.*a.{{{i}}}b.*)": {} for i in range(99)},
            }
        },
        {"regex": ".?" * 2_000},
        {"regex": "|".join(f".*a.{{{i}}}b.*" for i in range(200))},
        {"regex": "((ab|cd|ef){0,40}){0,40}x"},
    ]
    for asked in most:
        began = time.process_time()
        constraint = as_constraint(**asked)
        assert constraint is not None
        with contextlib.suppress(UserError):  # which llguidance refuses by limits of its own
            grammars.compile(constraint)
        assert time.process_time() - began < 2, asked.keys()


def test_o6_a_prompt_of_megabytes_is_refused_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it comes; one that fits is not."""
    chat = load(tiny(), provider="cpu", threads=1)
    assert chat.tokenizer is not None
    longest, real = [], type(chat.tokenizer).encode

    def encode(self: Any, text: str, **options: bool) -> list[int]:
        longest.append(len(text))
        return real(self, text, **options)

    monkeypatch.setattr(type(chat.tokenizer), "encode", encode)
    for prompt in ("x y " * 2_000_000, [{"role": "user", "content": "x y " * 200_000}]):
        with pytest.raises(UserError, match="the context holds 2,048 with the answer"):
            next(chat.generate(prompt))
    assert max(longest) <= 8 * 2048
    words = "the the " * 4_000  # as long, and within as many tokens
    assert len(chat.prompt_ids(words, most=16_000)) <= 16_000


def test_o6_in_a_chat_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is typed and what is read; the chat goes on."""
    chat = load(tiny(), provider="cpu", threads=1)
    assert chat.tokenizer is not None
    longest, real = [], type(chat.tokenizer).encode

    def encode(self: Any, text: str, **options: bool) -> list[int]:
        longest.append(len(text))
        return real(self, text, **options)

    monkeypatch.setattr(type(chat.tokenizer), "encode", encode)
    (tmp_path / "big").write_text("x y " * 200_000)
    long = "x y " * 200_000
    commands = (
        f"/tokens {long}",
        f"/tool {long}",
        f"/system {long}",
        f"/read {tmp_path / 'big'}",
        "/read /dev/zero",
    )
    lines = ("What is 3 plus 4?", *commands, long, "/undo", "What is 3 plus 4?", CTRL_D)
    assert talk(chat, *lines) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["3 plus 4 is 7."] * 2
    assert err.count("the context holds 2,048 with the answer") == 5
    assert "error: /read /dev/zero: larger than 16 MiB" in err
    assert max(longest) <= 8 * 2048
