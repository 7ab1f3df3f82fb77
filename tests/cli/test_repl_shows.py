"""What a chat shows: the conversation, files, tokens, blocks of lines; and how lines fit a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qwen_onnx import load
from qwen_onnx.cli.chat.commands import COMMANDS, block, is_open_block, parse_command
from qwen_onnx.cli.terminal.markdown import Emphasis
from qwen_onnx.cli.terminal.output import wrapped
from support.chats import tiny
from support.patience import PATIENCE
from support.repl import CTRL_D, ScriptedChat, talk, users
from support.terminal import ENDED, session


def test_m9_commands_say_what_they_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chat = ScriptedChat("a", "b", "c", "d")
    talk(chat, "one", "two", "/undo", "/reset", "/system Be brief.", "/system", CTRL_D)
    said = capsys.readouterr().err
    for line in (
        "(forgot 'two' and its answer; turns left: 1)",
        "(forgot 1 turn)",
        "(the conversation begins anew, under this system message)",
        "(the conversation begins anew, with no system message but the chat template's, if it has one)",
    ):
        assert line in said


def test_show_is_the_conversation_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    talk(ScriptedChat("an answer"), "/show", "one", "/show", CTRL_D, system="Be brief.")
    out, said = capsys.readouterr()
    assert out == "an answer\n"
    assert "[system]\nBe brief.\n[user]\none\n[assistant]\nan answer\n" in said.replace("  ", "")


def test_read_goes_before_the_next_question(tmp_path: Path) -> None:
    """Once, and the question that follows is one message with it."""
    (tmp_path / "a.txt").write_text("\ufeffa tide\ntable\n", encoding="utf-8")
    chat = ScriptedChat("a", "b")
    talk(chat, f"/read {tmp_path / 'a.txt'}", "When is it high?", "And low?", CTRL_D)
    assert users(chat.asked[0]) == [("user", "a tide\ntable\n\nWhen is it high?")]
    assert users(chat.asked[1])[-1] == ("user", "And low?")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_what_cannot_be_read_is_one_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "a").write_bytes(content)
    chat = ScriptedChat("a")
    talk(chat, f"/read {tmp_path / 'a'}", "one", CTRL_D)
    assert f"/read {tmp_path / 'a'}: " in capsys.readouterr().err
    assert users(chat.asked[0]) == [("user", "one")]


def test_tokens_are_those_of_the_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    chat = load(tiny(), provider="cpu", threads=1)
    assert chat.tokenizer is not None
    ids = chat.tokenizer.encode("Hello there")
    talk(chat, "/tokens Hello there", "/tokens", CTRL_D)
    said = capsys.readouterr().err
    assert f"{len(ids)} tokens\n" in said
    assert all(re.search(rf"\b{token_id} '", said) for token_id in ids)
    assert "the conversation: 0 tokens" in said


def test_tokens_says_why_stats_has_another_number(capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt of the next answer has more than the cache: the end of this one, and the opening of that."""
    chat = load(tiny(), provider="cpu", threads=1)
    talk(chat, "Hello!", "/tokens", "/stats", CTRL_D)
    said = capsys.readouterr().err
    held = int(re.findall(r"context: (\d+) tokens used", said)[0])
    counted = re.findall(
        r"the conversation: (\d+) tokens of the context's \d+, as a prompt .*; (\d+) are in the cache", said
    )
    assert [int(number) for number in counted[0]] == [len(chat._cache.token_ids) + 5, held]


def test_lines_between_three_quotes_are_one_message(tmp_path: Path) -> None:
    """With what looks like a command in them; a block without an end goes on."""
    assert is_open_block('"""a')
    assert not is_open_block('"""a"""')
    assert is_open_block('"""')
    assert block('"""\n/help\nme\n"""') == "/help\nme"
    assert block("a") is None
    chat = ScriptedChat("a")
    talk(chat, '"""\n/help\nme\n"""', CTRL_D)
    assert users(chat.asked[0]) == [("user", "/help\nme")]
    with session(tiny(), history=tmp_path / "history") as (terminal, process):
        terminal.type(b'"""What is\r3 plus 4?"""\r')
        terminal.wait_for(b"3 plus 4 is 7.\r\n")
        terminal.type(b"/bye\r")
        assert process.wait(PATIENCE) == 0


def test_m9_bye_and_the_other_ways_to_leave() -> None:
    assert {parse_command(line)[0] for line in ("/bye", "/exit", "/quit")} == {"/quit"}
    assert talk(ScriptedChat(), "/bye") == 0
    assert "/quit" in COMMANDS


def test_m9_tab_completes_names_after_set_and_files(tmp_path: Path) -> None:
    (tmp_path / "saved.session").touch()
    # Wide, so that no name is cut at the edge, however long the folder's is.
    with session(tiny(), history=tmp_path / "history", columns=200) as (terminal, process):
        terminal.type(b"/set temper\t")
        terminal.wait_for(b"ature")
        terminal.type(b"\x15/lo\t")  # Ctrl-U: the line is gone
        terminal.wait_for(b"ad")
        terminal.type(f" {tmp_path}/sav\t".encode())
        terminal.wait_for(b"ed.session")
        terminal.type(b"\x15/bye\r")
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("width", [20, 40, 80])
def test_m9_words_are_never_cut_in_the_middle(width: int) -> None:
    line = "sampling, temperature 0.7, top_k 20, repetition_penalty 1.05, " + "presence_penalty 0, " * 4
    rows = wrapped(line, width)
    assert max(map(len, rows)) <= max(width, len("repetition_penalty 1.05,") + 2)
    assert " ".join(" ".join(rows).split()) == line.strip()
    words = set(line.split())
    assert all(word in words for row in rows for word in row.split())


@pytest.mark.parametrize("pieces", [1, 2, 3, 1000])
def test_emphasis_changes_no_character(pieces: int) -> None:
    """However the text comes in; styles end where the marks do."""
    text = "# Title\nsome **bold** text, `a * b`, ** not** closed\n```py\nx = '**'\n```\n## End `x"
    emphasis, shown = Emphasis(), ""
    for start in range(0, len(text), pieces):
        shown += emphasis.push(text[start : start + pieces])
    shown += emphasis.end()
    assert re.sub(r"\x1b\[\d*m", "", shown) == text
    assert "\x1b[1m**bold**\x1b[0m" in shown
    assert "\x1b[36m`a * b`\x1b[0m" in shown
    assert "x = '**'" in shown
    assert shown.endswith("\x1b[0m")


@pytest.mark.parametrize(("environment", "colored"), [({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)])
def test_m9_the_prompt_has_a_color_where_there_may_be_one(
    environment: dict[str, str], colored: bool, tmp_path: Path
) -> None:
    with session(tiny(), history=tmp_path / "history", **environment) as (terminal, process):
        terminal.type(b"/bye\r")
        terminal.wait_for(ENDED)
        assert process.wait(PATIENCE) == 0
    assert (b"\x1b[0;32;1m" in terminal.seen) is colored
