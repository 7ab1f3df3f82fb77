"""Text as it comes in: byte order marks, ends of lines, bytes that are no text, and what errors call its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen_onnx import load
from support.chats import tiny
from support.command import command
from support.refusals import refused
from support.repl import CTRL_D, ScriptedChat, talk

ASKED = ("run", tiny(), "--provider", "cpu", "--json", "--show-prompt-ids", "--max-new-tokens", 1)
QUESTION = "What is 3 plus 4?"


@pytest.mark.parametrize("around", ["{}", "{}\n", "{}\r\n", "\ufeff{}", "\ufeff{}\r\n"])
def test_a_mark_and_the_last_line_break_are_no_part_of_a_piped_question(around: str) -> None:
    ran = command(*ASKED, stdin=around.format(QUESTION))
    wanted = load(tiny(), provider="cpu").prompt_ids([{"role": "user", "content": QUESTION}])
    assert json.loads(ran.out)["prompt_ids"] == wanted


def test_one_line_break_goes_and_no_more() -> None:
    ran = command(*ASKED, stdin=f"{QUESTION}\r\n\r\n")
    wanted = load(tiny(), provider="cpu").prompt_ids([{"role": "user", "content": f"{QUESTION}\r\n"}])
    assert json.loads(ran.out)["prompt_ids"] == wanted


def test_a_score_leaves_out_the_last_line_break_and_says_so() -> None:
    scored = [
        command("score", tiny(), "-", "--provider", "cpu", stdin=f"{QUESTION}{end}") for end in ("", "\r\n")
    ]
    assert scored[0] == scored[1]
    assert "last line break" in " ".join(command("score", "--help").out.replace("│", " ").split())


def test_half_of_a_pair_is_named_by_its_message() -> None:
    chat = load(tiny(), provider="cpu", threads=1)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b\ud800"}]
    refused(
        chat.prompt_ids, messages, mentions=["message 2: content is not valid Unicode: lone surrogate U+D800"]
    )
    messages[1]["content"] = [{"type": "text", "text": "\ud800"}]  # type: ignore[assignment]
    refused(chat.prompt_ids, messages, mentions=["message 2: content is not valid Unicode"])


def test_lines_of_a_batch_name_what_is_wrong_with_them(tmp_path: Path) -> None:
    """Not a place among prompts that nobody numbered, nor in a text that nobody wrote."""
    lines = {
        b'{"prompt": "\xff"}': "not UTF-8 (byte 12)",
        b'{"prompt": "\\udcff"}': "prompt is not valid Unicode: lone surrogate U+DCFF at character 0",
        b'{"prompt": "a", "regex": "(("}': "regex cannot be used: unclosed group",
        b'{"prompt": "a", "json_schema": {"not": {}}}': 'json_schema cannot be used: Unimplemented keys: ["not"]',
    }
    (tmp_path / "lines").write_bytes(b"\n".join(lines))
    ran = command("run", tiny(), "--provider", "cpu", "--batch", tmp_path / "lines")
    assert [json.loads(line)["error"] for line in ran.out.splitlines()] == [*lines.values()]
    assert ran.err.splitlines()[:-1] == [
        f"line {at}: {said}" for at, said in enumerate(lines.values(), start=1)
    ]


def test_a_second_run_names_the_lines_that_failed_before(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"prompt": "a"}\n\n{"prompt": 1}\n{"prompt": "b"}\n{}\n')
    asked = ("run", tiny(), "--provider", "cpu", "--batch", tmp_path / "lines", "--out", tmp_path / "out")
    first, second = command(*asked, "--max-new-tokens", 1), command(*asked, "--max-new-tokens", 1)
    assert "earlier run" not in first.err
    *_, failed, there, error = second.err.splitlines()
    assert failed == f"{tmp_path / 'out'}: failed in an earlier run, and not tried again: lines 3, 5"
    assert there == f"{tmp_path / 'out'}: 4 lines, 2 of them failed; 4 were there already"
    assert error == "error: 2 of 4 lines could not be answered; the others are done"


def test_bytes_that_are_typed_in_a_chat_and_are_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    from qwen_onnx.cli.chat.line_reader import as_typed

    with pytest.raises(UnicodeDecodeError) as found:
        as_typed("a\udcff")
    chat = ScriptedChat("a")
    assert talk(chat, found.value, "one", CTRL_D) == 0
    assert "error: what was typed is no text" in capsys.readouterr().err
    assert len(chat.asked) == 1
