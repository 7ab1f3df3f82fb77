"""The chat in a terminal: what it remembers, what its commands do, and that nothing but the user ends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from qwen_onnx import UserError, load
from qwen_onnx.cli.chat.commands import COMMANDS
from qwen_onnx.runners.output import FinishReason, Token
from support.chats import endless, tiny
from support.repl import CTRL_C, CTRL_D, ScriptedChat, talk, users


def test_earlier_turns_are_part_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ScriptedChat("Hello there.", "Ada.")
    assert talk(chat, "I am Ada.", "  My name?  ", CTRL_D) == 0
    first = [("user", "I am Ada.")]
    assert [users(asked) for asked in chat.asked] == [
        first,
        [*first, ("assistant", "Hello there."), ("user", "My name?")],
    ]
    out, err = capsys.readouterr()
    assert out == "Hello there.\nAda.\n", "only answers go to stdout"
    assert err.splitlines()[0] == "a/model, /help for commands"


def test_empty_lines_are_ignored() -> None:
    chat = ScriptedChat()
    assert talk(chat, "", "   ", "\t", CTRL_D) == 0
    assert chat.asked == []


def test_help_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    talk(ScriptedChat(), "/help", CTRL_D)
    err = capsys.readouterr().err
    for command in (*COMMANDS, "Ctrl-D", "Ctrl-C", "backslash"):
        assert command in err
    assert len(COMMANDS) == 15


def test_reset_forgets_all_but_the_system_message() -> None:
    chat = ScriptedChat("a", "b", "c")
    talk(chat, "one", "/reset", "two", "three", CTRL_D, system="Be brief.")
    system = ("system", "Be brief.")
    assert users(chat.asked[1]) == [system, ("user", "two")]
    assert users(chat.asked[2]) == [system, ("user", "two"), ("assistant", "b"), ("user", "three")]


def test_system_replaces_the_message_and_begins_anew() -> None:
    chat = ScriptedChat("a", "b", "c")
    talk(chat, "one", "/system  Be  kind. ", "two", "/system", "three", CTRL_D, system="Be brief.")
    assert [users(asked) for asked in chat.asked] == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be  kind."), ("user", "two")],
        [("user", "three")],
    ]


def test_stats_show_the_context_and_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    talk(ScriptedChat("a b c"), "/stats", "Hi", "/stats", CTRL_D)
    err = capsys.readouterr().err
    assert "context: 0 tokens used, 100 left" in err
    assert "context: 5 tokens used, 95 left" in err
    assert err.count("last answer") == 1
    assert "last answer: 12.3 ms to the first token, 56.8 tokens/s" in err


@pytest.mark.parametrize("command", ["/exit", "/quit", " /exit "])
def test_exit_leaves_with_0(command: str) -> None:
    assert talk(ScriptedChat(), command) == 0


def test_an_unknown_command_is_not_sent_to_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ScriptedChat("a file")
    talk(chat, "/hlep me", "/etc/passwd is what?", CTRL_D)
    assert "no command /hlep; /help lists them" in capsys.readouterr().err
    assert users(chat.asked[0]) == [("user", "/etc/passwd is what?")]


def test_ctrl_c_twice_at_the_prompt_leaves_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    """One Ctrl-C says how to leave; only a second one right after it leaves."""
    assert talk(ScriptedChat(), CTRL_C, CTRL_C) == 130
    assert "Ctrl-C again" in capsys.readouterr().err
    assert talk(ScriptedChat("a"), CTRL_C, "Hi", CTRL_C, "", CTRL_C, CTRL_D) == 0


def test_ctrl_c_in_an_answer_keeps_the_session_and_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer ends where it was stopped. The next prompt holds what the user has read of it."""

    def stop_at_two(token: Token) -> None:
        print(token.text, end="")
        if token.text == " two":
            raise KeyboardInterrupt

    chat = ScriptedChat("one two three four", "five")
    assert talk(chat, "Count.", "Go on.", CTRL_D, on_token=stop_at_two) == 0
    assert users(chat.asked[1]) == [("user", "Count."), ("assistant", "one two"), ("user", "Go on.")]
    out, err = capsys.readouterr()
    assert out == "one two\nfive\n"
    assert err.count("(interrupted)") == 1


def test_an_error_in_one_turn_keeps_the_session(capsys: pytest.CaptureFixture[str]) -> None:
    """The question that was not answered is no part of the next prompt."""
    chat = ScriptedChat("a", UserError("the prompt has 99 tokens"), "c")
    assert talk(chat, "one", "too long", "three", CTRL_D) == 0
    assert users(chat.asked[2]) == [("user", "one"), ("assistant", "a"), ("user", "three")]
    assert "error: the prompt has 99 tokens" in capsys.readouterr().err


def test_an_answer_cut_by_length_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    talk(ScriptedChat("a b c", "a"), "one", "two", CTRL_D, max_new_tokens=2)
    out, err = capsys.readouterr()
    assert out == "a b\na\n"
    assert err.count("(length)") == err.count("(") == 1


def test_each_answer_is_reported() -> None:
    reports: list[Any] = []
    talk(ScriptedChat("a b", "c"), "one", "two", CTRL_D, report=reports.append)
    assert [report.text for report in reports] == ["a b", "c"]


def test_raw_completes_text_and_remembers_nothing() -> None:
    chat = ScriptedChat("a", "b")
    talk(chat, "Once upon", "/a comment", CTRL_D, raw=True)
    assert chat.asked == ["Once upon", "/a comment"]


def test_the_bundled_model_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    talk(load(tiny()), "My name is Ada.", "What is 2 plus 2?", "What is my name?", CTRL_D)
    assert capsys.readouterr().out.splitlines()[-1] == "Your name is Ada."


def test_the_turn_after_ctrl_c_is_computed_right() -> None:
    """Its tokens are those of a new session with the same history, and most of the prompt was in the cache."""
    seen: list[Token] = []

    def stop_at_seven(token: Token) -> None:
        seen.append(token)
        if len(seen) == 7:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 12}
    chat = load(endless(), threads=1)
    talk(chat, "Count.", "Go on.", CTRL_D, on_token=stop_at_seven, **options)
    prompt = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "".join(token.text for token in seen[:7])},
        {"role": "user", "content": "Go on."},
    ]
    fresh = load(endless(), threads=1).generate(prompt, **options)
    assert [token.token_id for token in seen[7:]] == [token.token_id for token in fresh]
    assert seen[7].cached_tokens > 30


def test_top_logits_are_asked_for_in_a_chat_too() -> None:
    shown: list[Token] = []
    assert talk(load(endless(), provider="cpu"), "Hi", CTRL_D, on_token=shown.append, top_logits=3) == 0
    assert all(len(token.top_logits) == 3 for token in shown)


def test_what_was_asked_for_holds_in_a_chat_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {
        "seed": 1, "stop": ["END"], "min_new_tokens": 2, "logprobs": 1, "ignore_eos": True, "top_logits": 3,
        "max_new_tokens": 9,
    }  # fmt: skip
    found: list[Any] = []

    def note(prompt_ids: list[int], **options: Any) -> Iterator[Token]:
        found.append(options)
        yield Token(1, "a", FinishReason.EOS, 3, 0, 1.0, None, logprob=-0.5)

    monkeypatch.setattr(chat := ScriptedChat(), "generate", note)
    talk(chat, "Hi", CTRL_D, **asked)
    assert found == [asked]


def test_an_answer_interrupted_before_its_first_token_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the question nor an empty answer is part of the next prompt."""
    chat = ScriptedChat("yes", "no")
    generate = chat.generate

    def interrupted_once(*arguments: Any, **options: Any) -> Iterator[Token]:
        monkeypatch.setattr(chat, "generate", generate)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "generate", interrupted_once)
    assert talk(chat, "one", "two", CTRL_D) == 0
    assert [users(asked) for asked in chat.asked] == [[("user", "two")]]
