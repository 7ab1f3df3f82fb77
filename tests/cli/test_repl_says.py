"""What a chat says of what it forgets, leaves out or has no use for: nothing goes without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_onnx import load
from qwen_onnx.cli.chat.commands import ALONE
from support.chats import tiny
from support.command import command
from support.repl import CTRL_D, ScriptedChat, talk, users

_FORGOTTEN = "what /read put before the next question is forgotten, too"


@pytest.mark.parametrize("said", ["/reset", "/system Be brief.", "/system", "/undo"])
def test_what_was_read_goes_with_the_conversation(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each of the commands, with a word of it; and without one where nothing was read."""
    (tmp_path / "a").write_text("a file")
    chat = ScriptedChat("a", "b", "c")
    talk(chat, "one", f"/read {tmp_path / 'a'}", said, "two", said, CTRL_D)
    assert users(chat.asked[1])[-1] == ("user", "two")
    assert capsys.readouterr().err.count(_FORGOTTEN) == 1


def test_what_was_read_is_not_of_a_conversation_that_is_loaded_or_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text("a file")
    chat, read, saved = load(tiny(), provider="cpu"), f"/read {tmp_path / 'a'}", tmp_path / "saved"
    talk(chat, "Hello!", f"/save {saved}", read, f"/save {saved}", f"/load {saved}", "/show", CTRL_D)
    err = capsys.readouterr().err
    assert err.count(f"saved {saved}: 1 turn, {chat.context_used} tokens\n") == 1
    assert err.count("tokens; not what /read put before the next question\n") == 1
    assert f"loaded {saved}: 1 turn, {chat.context_used} tokens; {_FORGOTTEN}\n" in err
    assert "a file" not in err


def test_read_stays_for_the_question_after_a_retry(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    chat = ScriptedChat("a", "b", "c")
    talk(chat, "one", f"/read {tmp_path / 'a'}", "/retry", "two", CTRL_D)
    assert [users(asked)[-1][1] for asked in chat.asked] == ["one", "one", "a file\n\ntwo"]


def test_text_after_a_command_that_takes_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"/help", "/reset", "/show", "/undo", "/retry", "/params", "/stats", "/quit"} == ALONE
    chat = ScriptedChat("a", "b")
    others = sorted(ALONE - {"/quit"})
    talk(chat, "one", *(f"{name} 3" for name in others), "/clear all", "two", CTRL_D)
    assert len(users(chat.asked[1])) == 3
    err = capsys.readouterr().err
    for name in others:
        assert f"error: {name}: takes nothing after it" in err


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (
            ("/set temperature 0", "/set do_sample true"),
            "temperature is 0: the best token is taken, whatever do_sample",
        ),
        (
            ("/set temperature 0", "/set top_p 0.5"),
            "temperature is 0: the best token is taken, whatever top_p says",
        ),
        (
            ("/set do_sample off", "/set top_k 5"),
            "do_sample is off: the best token is taken, whatever top_k says",
        ),
        (("/set temperature 0",), None),
        (("/set temperature 0.5", "/set do_sample true"), None),
    ],
)
def test_a_value_that_changes_nothing_is_named(
    lines: tuple[str, ...], note: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(load(tiny(), provider="cpu"), *lines, CTRL_D)
    err = capsys.readouterr().err
    assert (f"note: {note}" in err) if note else ("note: " not in err)


def test_an_option_of_drawing_beside_temperature_0_is_named() -> None:
    ran = command("run", tiny(), "-p", "Hi", "--provider", "cpu", "--temperature", 0, "--top-p", 0.5)
    assert ran.err == "note: temperature is 0: the best token is taken, whatever --top-p says\n"


def test_one_is_not_several(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    chat = load(tiny(), provider="cpu")
    talk(chat, f"/read {tmp_path / 'a'}", "/tokens a", "Hello!", f"/save {tmp_path / 'b'}", CTRL_D)
    err = capsys.readouterr().err
    assert f"(read {tmp_path / 'a'}: 1 character, before your next question)" in err
    assert "\n1 token\n" in err
    assert ": 1 turn, " in err
