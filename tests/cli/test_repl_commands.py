"""What can be done to a conversation in the terminal: undo, ask again, change a value, make room in the context."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx import UserError, load
from qwen_onnx.cli.chat.commands import parse_command
from qwen_onnx.cli.chat.conversation import Conversation, with_room
from qwen_onnx.cli.chat.settings import changed, settings
from qwen_onnx.runners.text.prompts import PromptIds
from support.chats import endless, tiny
from support.repl import CTRL_D, ScriptedChat, talk, users


def test_undo_forgets_the_last_turn_only(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ScriptedChat("a", "b", "c")
    talk(chat, "/undo", "one", "two", "/undo", "three", CTRL_D, system="Be brief.")
    assert users(chat.asked[2]) == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "a"),
        ("user", "three"),
    ]
    assert capsys.readouterr().err.count("nothing to undo") == 1


def test_retry_answers_the_same_question_anew(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer that was not wanted is no part of the prompt."""
    chat = ScriptedChat("a", "b", "c")
    talk(chat, "/retry", "one", "/retry", "two", CTRL_D)
    assert users(chat.asked[1]) == [("user", "one")]
    assert users(chat.asked[2]) == [("user", "one"), ("assistant", "b"), ("user", "two")]
    assert capsys.readouterr().err.count("nothing to answer anew") == 1


def test_a_retry_that_fails_keeps_the_old_answer() -> None:
    chat = ScriptedChat("a", UserError("no"), "c")
    talk(chat, "one", "/retry", "two", CTRL_D)
    assert users(chat.asked[2]) == [("user", "one"), ("assistant", "a"), ("user", "two")]


def test_the_result_of_a_tool_is_no_turn_of_its_own() -> None:
    chat = ScriptedChat("calls", "sunny", "b")
    talk(chat, "Weather?", "/tool 21 degrees", "/undo", "two", CTRL_D)
    assert users(chat.asked[1]) == [("user", "Weather?"), ("assistant", "calls"), ("tool", "21 degrees")]
    assert users(chat.asked[2]) == [("user", "two")]


class LongChat(ScriptedChat):
    """A token for each character of the messages; the context holds 100."""

    def prompt_ids(self, prompt: Any, **_: Any) -> PromptIds:
        super().prompt_ids(prompt)
        return PromptIds([1] * sum(len(message["content"]) for message in prompt))


def test_m10_where_no_room_is_left_the_oldest_turns_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    """The system message and the new question stay."""
    chat = LongChat(*["a" * 10] * 6)
    talk(chat, *[f"{turn}{'q' * 19}" for turn in range(4)], CTRL_D, system="s" * 5, max_new_tokens=20)
    assert [len(users(asked)) for asked in chat.asked] == [2, 4, 2, 4]
    assert [users(asked)[0][0] for asked in chat.asked] == ["system"] * 4
    assert [users(asked)[-1][1][0] for asked in chat.asked] == ["0", "1", "2", "3"]
    err = capsys.readouterr().err
    assert "(the context of 100 tokens has no room for 20 more: the 2 oldest turns were dropped)" in err


def test_a_full_context_can_refuse_instead(capsys: pytest.CaptureFixture[str]) -> None:
    chat = LongChat(*["a" * 10] * 6)
    talk(chat, *["q" * 20] * 4, "/undo", "q" * 20, CTRL_D, shift=False, max_new_tokens=20)
    assert [len(users(asked)) for asked in chat.asked] == [1, 3, 5, 5]
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert "the context of 100 tokens has no room for 20 more: /undo or /reset make room" in said


@pytest.mark.parametrize(
    ("most", "length", "answered"), [(20, 80, True), (20, 81, False), (90, 75, True), (90, 76, False)]
)
def test_a_question_that_leaves_no_room_is_refused_not_cut(
    most: int, length: int, answered: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Room is what the answer may take, at most a quarter of the context, for the first question too."""
    chat = LongChat("a")
    talk(chat, "q" * length, CTRL_D, shift=False, max_new_tokens=most)
    assert bool(chat.asked) == answered
    assert ("has no room for" in capsys.readouterr().err) != answered


def test_a_refused_question_leaves_the_conversation_and_the_file_as_they_were(tmp_path: Path) -> None:
    """/undo takes back the turn before it, and the file goes before the next question."""
    (tmp_path / "a").write_text("file")
    chat = LongChat("a", "b", "c")
    lines = ("one", "two", f"/read {tmp_path / 'a'}", "q" * 90, "three", CTRL_D)
    talk(chat, *lines, shift=False, max_new_tokens=5)
    assert users(chat.asked[2])[-1] == ("user", "file\n\nthree")
    chat = LongChat("a", "b", "c")
    talk(chat, "one", "two", "q" * 95, "/undo", "three", CTRL_D, shift=False, max_new_tokens=5)
    assert users(chat.asked[2]) == [("user", "one"), ("assistant", "a"), ("user", "three")]


@pytest.mark.parametrize("shift", [True, False])
def test_a_question_longer_than_the_context_drops_nothing(
    shift: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UserError("the prompt has 300 tokens")
    chat = LongChat("a" * 10, "a" * 10, *([error, "b"] if shift else ["b"]))
    talk(chat, "q" * 20, "q" * 20, "q" * 300, *["/undo"] * shift, "q", CTRL_D, shift=shift)
    assert "dropped" not in capsys.readouterr().err
    assert len(users(chat.asked[-1])) == 5


def test_a_question_without_an_answer_can_be_asked_again_or_forgotten() -> None:
    """/retry and /undo are about it, not about the turn before it, which keeps its answer."""
    for command, asked in (("/retry", ["one", "two", "two"]), ("/undo", ["one", "two", "three"])):
        chat = ScriptedChat("a", UserError("no"), "c")
        talk(chat, "one", "two", command, *(["three"] if command == "/undo" else []), CTRL_D)
        assert [users(messages)[-1][1] for messages in chat.asked] == asked
        assert users(chat.asked[2])[:2] == [("user", "one"), ("assistant", "a")]


def test_a_question_cancelled_while_it_is_counted_is_the_one_to_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    """/undo forgets that question; the turn before it stays."""
    chat = ScriptedChat("a", "b")
    counted = chat.prompt_ids

    def interrupted_once(prompt: Any, **_: Any) -> list[int]:
        if users(prompt)[-1][1] == "two":
            raise KeyboardInterrupt
        return counted(prompt)

    monkeypatch.setattr(chat, "prompt_ids", interrupted_once)
    talk(chat, "one", "two", "/undo", "three", CTRL_D)
    assert users(chat.asked[1]) == [("user", "one"), ("assistant", "a"), ("user", "three")]


def test_a_loaded_conversation_has_no_question_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/retry after /load answers the last question of the loaded conversation."""
    path = tmp_path / "ada"
    chat = load(tiny(), provider="cpu")
    asked: list[Any] = []
    generate = chat.generate

    def note(prompt_ids: Any, **options: Any) -> Any:
        asked.append(prompt_ids)
        return generate(prompt_ids, **options)

    monkeypatch.setattr(chat, "generate", note)
    lines = ("My name is Ada.", f"/save {path}", "/reset", "x " * 3000, f"/load {path}", "/retry", CTRL_D)
    talk(chat, *lines)
    assert asked[-1] == asked[0]


def test_what_was_forgotten_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file's token ids hold nothing of what /reset, /system or /undo took out of the conversation."""
    for command, kept in (("/reset", 0), ("/system", 0), ("/undo", 0), ("/undo", 1)):
        path = tmp_path / f"{command[1:]}{kept}"
        before = ["What is 2 plus 2?"] * kept
        talk(
            load(tiny(), provider="cpu"),
            *before,
            "My name is Ada.",
            command,
            "/stats",
            f"/save {path}",
            CTRL_D,
        )
        chat = load(tiny(), provider="cpu")
        messages = chat.load(path)
        assert len(messages) == 2 * kept
        assert chat.tokenizer is not None
        told = chat.tokenizer.decode(chat._cache.token_ids.tolist())
        assert "Ada" not in told
        assert ("2 plus 2" in told) == bool(kept)
        assert path.stat().st_mode & 0o077 == 0
        err = capsys.readouterr().err
        assert ("context: 0 tokens used" in err) == (not kept)


def test_what_looks_like_a_command_can_be_said() -> None:
    chat = ScriptedChat("a", "b", "c")
    talk(chat, "//no_think Hello!", "/* c */\nint x;", "/no_think Hi", "/usr/bin is what?", CTRL_D)
    assert [users(asked)[-1][1] for asked in chat.asked] == [
        "/no_think Hello!",
        "/* c */\nint x;",
        "/usr/bin is what?",
    ]


def test_commands_of_a_chat_are_refused_where_text_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ScriptedChat("a", "b")
    talk(chat, "  Once upon ", "/retry", "/undo", "/system x", "/tool x", "/no command", CTRL_D, raw=True)
    assert chat.asked == ["  Once upon ", "/no command"]
    assert capsys.readouterr().err.count("is for chats") == 4


def test_a_result_without_a_question_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ScriptedChat("a")
    talk(chat, "/tool 42", "one", CTRL_D, system="s")
    assert users(chat.asked[0]) == [("system", "s"), ("user", "one")]
    assert "no function was called" in capsys.readouterr().err


@pytest.mark.parametrize("count", range(1, 8))
def test_room_is_made_once_and_not_in_every_turn(count: int) -> None:
    messages = [{"role": "system", "content": "s" * 4}]
    for turn in range(count):
        messages += [{"role": "user", "content": str(turn) * 10}, {"role": "assistant", "content": "a" * 10}]
    messages.append({"role": "user", "content": "?" * 10})

    def length(held: Sequence[Any]) -> int:
        return sum(len(message["content"]) for message in held)

    kept, dropped = with_room(messages, 20, 100, length)
    if length(messages) + 20 <= 100:
        assert (kept, dropped) == (messages, 0)
    else:
        assert length(kept) <= 50
        assert kept == messages[:1] + messages[1 + 2 * dropped :]


def test_one_long_turn_is_left_for_the_runner_to_refuse() -> None:
    only = [{"role": "user", "content": "q" * 500}]
    assert with_room(only, 20, 100, lambda held: 500) == (only, 0)


def test_the_bundled_model_talks_on_when_its_context_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    chat = load(tiny(), provider="cpu", max_context=128)
    lines = ["My name is Ada.", *["What is 2 plus 2?"] * 12, "What is the capital of France?"]
    assert talk(chat, *lines, CTRL_D, max_new_tokens=64) == 0
    out, err = capsys.readouterr()
    assert "error" not in err
    assert err.count("dropped") >= 3
    assert "Paris" in out.splitlines()[-1]


def test_a_value_is_changed_and_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    chat = load(endless(), provider="cpu")
    lines = (
        "/set temperature 0.5",
        "/set stop END",
        "/set max_new_tokens 3",
        "Hi",
        "/set temperature",
        "/params",
    )
    talk(chat, *lines, CTRL_D, ignore_eos=True)
    err = capsys.readouterr().err
    told = [line for line in err.splitlines() if line.startswith(("sampling", "greedy"))]
    assert ["temperature 0.5" in line for line in told] == [True, True, True, False, False]
    assert err.count("max_new_tokens 3, min_new_tokens 0, stop 'END'") == 3
    assert err.count("(length)") == 1


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("temperature", "0.5", "temperature", 0.5),
        ("temperature", "default", "temperature", None),
        ("do_sample", "off", "do_sample", False),
        ("logit_bias", "5=-1,7=2.5", "logit_bias", {5: -1.0, 7: 2.5}),
        ("seed", "7", "seed", 7),
        ("stop", "END", "stop", "END"),
        ("stop", "7", "stop", "7"),
        ("stop", '["a", "b"]', "stop", ["a", "b"]),
        ("stop", '" you"', "stop", " you"),
        ("stop", "", "stop", None),
        ("think", "off", "enable_thinking", False),
        ("think", "", "enable_thinking", None),
        ("ignore_eos", "on", "ignore_eos", True),
        ("ignore_eos", "", "ignore_eos", None),
        ("max_new_tokens", "12", "max_new_tokens", 12),
        ("max_new_tokens", "null", "max_new_tokens", None),
        ("top_logits", "", "top_logits", None),
    ],
)
def test_values_that_are_typed(name: str, text: str, field: str, value: object) -> None:
    """None stands for a value that is not asked for any more."""
    asked = {
        "ignore_eos": True,
        "top_logits": 3,
        "max_new_tokens": 9,
        "seed": 1,
        "stop": "x",
        "temperature": 2.0,
    }
    others = {other: held for other, held in asked.items() if other != field}
    assert changed(asked, name, text) == (others if value is None else {**others, field: value})


VALID = {("stop", "x"), ("presence_penalty", "-1"), ("frequency_penalty", "-1")}


@pytest.mark.parametrize("name", [*settings(), "nonsense", "sampling", "tools"])
@pytest.mark.parametrize("text", ["-1", "1e999", "NaN", "x", "{}", "[", "0=", '[""]', "[" * 100_000])
def test_values_that_are_none_are_refused_in_one_line(name: str, text: str) -> None:
    if (name, text) in VALID or (name == "stop" and text != '[""]'):
        changed({}, name, text)
    else:
        with pytest.raises(UserError, match=name.replace("_", "[-_]")):
            changed({}, name, text)


def test_all_that_is_set_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ("/set ignore_eos on", "/set logprobs 2", "/set top_logits 1")
    talk(load(tiny(), provider="cpu"), *lines, CTRL_D)
    assert "stop none, ignore_eos on, top_logits 1, logprobs 2\n" in capsys.readouterr().err


def test_a_refused_value_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    talk(
        load(tiny(), provider="cpu"),
        "/set temperature 0.5",
        "/set top_p 7",
        "/set logit_bias 999999=1",
        "/params",
        CTRL_D,
    )
    err = capsys.readouterr().err
    assert err.count("error: ") == 2
    assert err.count("temperature 0.5, top_k 0, top_p 1,") == 2


def test_a_conversation_is_not_changed_by_what_is_read_of_it() -> None:
    conversation = Conversation("s")
    conversation.messages += [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert conversation.question() == conversation.messages[:-1]
    assert len(conversation.messages) == 3
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "s"}]


def test_a_saved_conversation_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ada.qwen"
    talk(load(tiny(), provider="cpu"), "My name is Ada.", "What is 2 plus 2?", f"/save {path}", CTRL_D)
    talk(load(tiny(), provider="cpu"), f"/load {path}", "What is my name?", CTRL_D)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "Your name is Ada."
    assert f"loaded {path}: 2 turns, " in err
    talk(load(tiny(), provider="cpu"), "/save", "/load", "/load /nope", "/save /nope/here", CTRL_D)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4
    assert json.dumps(errors).count("/nope") == 2


def test_a_command_is_one_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    chat = ScriptedChat("a", "b")
    assert talk(chat, "one", "/UNDO", "/Nonsense", "//Two", "/Params", "/QUIT") == 0
    assert [users(asked) for asked in chat.asked] == [[("user", "one")], [("user", "/Two")]]
    said = capsys.readouterr().err
    assert "(forgot 'one' and its answer" in said
    assert "no command /nonsense" in said
    assert "greedy, repetition_penalty" in said
    assert parse_command("/Exit") == parse_command("/bye") == ("/quit", "")
