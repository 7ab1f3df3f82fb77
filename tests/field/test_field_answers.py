"""What an answer is: not the reasoning before it, and not shortened by what the reasoning says."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx import export
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.output import FinishReason
from qwen_onnx.runners.text.reasoning import AnswerStart
from support.answers import HI, opened, text
from support.chats import write_chat_checkpoint
from support.command import command
from support.field_runs import say as rig
from support.text_fixtures import QWEN3_LIKE

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
OPENS = QWEN3_LIKE.replace(
    "assistant\\n' }}\n    {%- if enable", "assistant\\n<think>\\n' }}\n    {%- if enable"
)


@functools.cache
def thinker(*, begins: bool) -> Path:
    """An export whose template begins the reasoning, or leaves it to the model. To be read only."""
    folder = Path(tempfile.mkdtemp(prefix="qwen-onnx-tests-"))
    template = OPENS if begins else QWEN3_LIKE
    checkpoint = write_chat_checkpoint(folder / "checkpoint", template=template, max_position_embeddings=1024)
    return export(checkpoint, folder / "export").folder


def ids_of(chat: Chat, *texts: str) -> list[int]:
    """Of these texts, an end token last."""
    assert chat.tokenizer is not None
    return [*(i for each in texts for i in chat.tokenizer.encode(each)), min(chat.eos_token_ids)]


def test_k2_under_a_constraint_the_answer_is_the_answer(tmp_path: Path) -> None:
    """Where the template begins the reasoning, the prompt ends it: in `run`, batches and Python."""
    schema, lines = tmp_path / "city.json", tmp_path / "lines.jsonl"
    schema.write_text(json.dumps(CITY))
    run = ("run", thinker(begins=True), "--provider", "cpu", "--json-schema", schema)
    found = json.loads(command(*run, "-p", "Where?", "--json").out)
    assert json.loads(found["text"])["city"] in ("Paris", "Rome")
    assert "reasoning" not in found
    ran = command(*run, "-p", "Where?")
    assert (ran.code, ran.out, ran.err) == (0, found["text"] + "\n", "")
    lines.write_text('{"prompt": "Where?"}\n{"prompt": "Where?"}\n')
    results = [json.loads(line) for line in command(*run, "--batch", lines).out.splitlines()]
    assert [(each["text"], each.get("reasoning")) for each in results] == [(found["text"], None)] * 2
    chat = opened(thinker(begins=True))
    asked = [{"role": "user", "content": "Where?"}]
    assert text(list(chat.generate(asked, json_schema=CITY))) == found["text"]
    closed = chat.prompt_ids(asked, close_reasoning=True)
    assert chat.tokenizer is not None
    assert chat.tokenizer.decode(closed, skip_special_tokens=False).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert (closed.begun, chat.prompt_ids(asked).begun, chat.prompt_ids("Where?").begun) == (
        False,
        True,
        None,
    )


def test_k2_an_expression_may_say_the_tags() -> None:
    """What is held to an expression is text, whatever it is."""
    run = ("run", thinker(begins=False), "--provider", "cpu", "-p", "x", "--regex", "<think>no</think> yes")
    assert command(*run).out == "<think>no</think> yes\n"
    found = json.loads(command(*run, "--json").out)
    assert (found["text"], found.get("reasoning")) == ("<think>no</think> yes", None)


SAID = ("Question: what\n", "</think>", "\n\n7 or Question: 8")


@pytest.mark.parametrize(
    ("said", "begins", "stop", "wanted", "reason"),
    [
        (SAID, True, "Question:", "7 or ", "stop"),
        (SAID, True, "\n\n", "7 or Question: 8", "eos"),
        (SAID, True, "what", "7 or Question: 8", "eos"),
        (("<think>\n", *SAID), False, ("Question:", "<"), "7 or ", "stop"),
        (("\n<think>what </th 7", *SAID[1:]), False, "7", "", "stop"),
        (("<thin Question: 7",), False, "Question:", "<thin ", "stop"),
        (("what is <think> it",), False, "think", "what is <", "stop"),
        (("Question:",), True, "Question:", "", "eos"),
    ],
)
def test_k3_stop_strings_match_the_answer_and_not_the_reasoning(
    monkeypatch: pytest.MonkeyPatch,
    said: Sequence[str],
    begins: bool,
    stop: Any,
    wanted: str,
    reason: str,
) -> None:
    """However the text comes in tokens; the reasoning, tags and line ends around it are no answer."""
    chat = opened(thinker(begins=begins))
    whole = "".join(said)
    start = whole.find("</think>")
    before = whole[: start + 8] + "\n\n" if start >= 0 else "" if wanted else whole
    for prompt in (HI, chat.prompt_ids(HI)):
        with monkeypatch.context() as patch:
            rig(patch, chat, ids_of(chat, *said))
            tokens = list(chat.generate(prompt, stop=stop, max_new_tokens=200))
        assert (text(tokens), tokens[-1].finish_reason) == (before + wanted, reason)


def test_k3_in_text_that_is_completed_all_is_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = opened(thinker(begins=True))
    for prompt in ("Hi", [1, 2, 3]):
        rig(monkeypatch, chat, ids_of(chat, *SAID))
        tokens = list(chat.generate(prompt, stop="what"))
        assert (text(tokens), tokens[-1].finish_reason) == ("Question: ", FinishReason.STOP)


def test_k3_in_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, which this model is rigged for; rows of a batch are sequences of the same kind."""
    chat = opened(thinker(begins=True))
    rig(monkeypatch, chat, ids_of(chat, *SAID))
    tokens = [token for _, token in chat.generate_batch([HI], stop="Question:")]
    assert text(tokens) == "Question: what\n</think>\n\n7 or "


def test_k3_the_start_of_an_answer_is_found_in_any_pieces() -> None:
    """Nothing of a text is lost or doubled, and the second part is the same for every cut."""
    texts = {
        ("<think>\na\n</think>\n\nb</think>", False): "b</think>",
        ("a</think></think>", True): "</think>",
        ("a", False): "a",
        ("<think>a", False): "",
        ("<thi", False): "<thi",
        ("</think>\n", True): "",
    }
    for (whole, begun), wanted in texts.items():
        for size in (1, 2, 3, 99):
            start, parts = AnswerStart(begun=begun), []
            for cut in range(0, len(whole), size):
                parts.append(start.push(whole[cut : cut + size]))
            parts.append(start.push("", last=True))
            assert "".join(a + b for a, b in parts) == whole
            assert "".join(b for _, b in parts) == wanted
