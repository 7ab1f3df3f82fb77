"""No word of a streamed answer is cut by the terminal's edge, and a pipe gets what the model said."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wcwidth import wcswidth

from qwen_onnx import UserError
from qwen_onnx.cli.printer import Printer
from qwen_onnx.cli.terminal.markdown import Emphasis
from qwen_onnx.cli.terminal.output import columns
from qwen_onnx.cli.terminal.word_wrap import WordWrap
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.output import Token
from qwen_onnx.runners.text.reasoning import Said
from support.chats import endless, tiny
from support.command import child
from support.patience import PATIENCE
from support.repl import CTRL_D, ScriptedChat, talk
from support.terminal import CONTROLLING, READY, Terminal, open_terminal, resize, session

on_a_terminal = pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
STYLE = re.compile("\x1b\\[[0-9;]*m")
PROSE = (
    "The **quick brown fox** jumps over the lazy dog, while internationalization waits.\n\n"
    "1. A first point that is longer than a narrow terminal\n   - an `indented` one with words enough to go on\n\n"
    "```python\nprint('a line of code that is longer than twenty columns, and much longer than eighty of them')\n"
    "```\n春眠不覚暁、処処聞啼鳥。夜来風雨声、花落知多少。 한국어 문장은 띄어쓰기로 나뉩니다 🔥🔥 done."
)


def wrapped(pieces: Sequence[str], width: int) -> str:
    wrap = WordWrap(lambda: width)
    return "".join(map(wrap.push, pieces)) + wrap.end()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("aaa bbb ccc", "aaa bbb \nccc"),
        ("aaa bbbb\nccc ddd eee", "aaa bbbb\nccc ddd \neee"),
        ("aaaa bbb ccc", "aaaa \nbbb ccc"),  # the space after it has no room
        ("aaa bbbbbbbb c", "aaa \nbbbbbbbb\n c"),
        ("aaa bbbbbbbbbbbb c", "aaa \nbbbbbbbbbbbb c"),  # the terminal cuts what is longer than it
        ("  aaa bbb", "  aaa \nbbb"),
        ("a\tbbbb", "a\t\nbbbb"),
        ("好好好好。", "好好好\n好。"),
        ("「好好好」好好", "「好好\n好」好好"),
        ("한국 한국어", "한국 \n한국어"),
        ("e\u0301e\u0301e\u0301 a\u0301bcdefg", "e\u0301e\u0301e\u0301 \na\u0301bcdefg"),
        ("🔥🔥 ❤\ufe0f❤\ufe0f a", "🔥🔥 \n❤\ufe0f❤\ufe0f a"),
        ("```\naaa bbb ccc ddd\n```\naaa bbb ccc", "```\naaa bbb ccc ddd\n```\naaa bbb \nccc"),
        ("  ~~~~\naaa bbb ccc\n~~~\naaa bbb ccc\n~~~~", "  ~~~~\naaa bbb ccc\n~~~\naaa bbb ccc\n~~~~"),
        ("```aaa``` bbb\nccc ddd eee", "```aaa``` bbb\nccc ddd \neee"),
        ("aaa \x1b[1mbbb\x1b[0m \x1b[1mccc\x1b[0m", "aaa \x1b[1mbbb\x1b[0m \x1b[1m\nccc\x1b[0m"),
    ],
)
def test_a_word_that_does_not_fit_begins_a_new_line(text: str, shown: str) -> None:
    assert wrapped([text], 8) == wrapped([*re.findall(r"\x1b\[\d*m|.", text, re.DOTALL)], 8) == shown


def cells(line: str, width: int | None) -> int:
    """Where a line ends in a terminal, whose tabs stop at its edge."""
    column = 0
    for part in re.split("(\t)", line):
        if part == "\t":
            column += 8 - column % 8
            column = column if width is None else min(column, width - 1)
        else:
            column += wcswidth(part)
    return column


TEXTS = st.lists(
    st.sampled_from(
        (" ", "  ", "\n", "\t", "a", "word", "longer", "x" * 25, "```", "```\n", "~~~\n", "好", "。", "한국어", "🔥",
         "é", "e\u0301", "👩\u200d💻", "❤\ufe0f", "**", "`", "\x1b[1m", "\x1b[0m")
    )
    | st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=3),
    max_size=30,
)  # fmt: skip


def any_text_in_any_pieces(pieces: list[str], width: int) -> None:
    """Line ends are all that is added, only where a line may end; a line is too wide only where a word is."""
    text = "".join(pieces)
    shown = wrapped(pieces, width)
    assert wrapped([text], width) == shown
    added, lines, at = set(), [""], 0
    for char in shown:
        if char == "\n" and text[at : at + 1] != "\n":
            added.add(at)
            lines.append("")
            continue
        assert char == text[at]
        at += 1
        lines = [*lines, ""] if char == "\n" else [*lines[:-1], lines[-1] + char]
    assert at == len(text)
    if "```" in text or "~~~" in text:
        return
    for line in lines:
        words = re.findall(r"[^ \t]+[ \t]*|[ \t]+", STYLE.sub("", line))
        assert cells("".join(words), width) <= width or any(cells(word, None) > width for word in words), (
            lines
        )
    for at in added:
        before, after = STYLE.sub("", text[:at])[-1], STYLE.sub("", text[at:])[0]
        assert {before, after} & {" ", "\t"} or wcswidth(before) == 2 or wcswidth(after) == 2, (
            "a word was cut"
        )


@pytest.mark.parametrize("examples", [200, pytest.param(4_000, marks=pytest.mark.fuzz)])
def test_any_text_in_any_pieces(examples: int) -> None:
    lenient = settings(max_examples=examples, derandomize=True, deadline=None)
    lenient(given(pieces=TEXTS, width=st.integers(1, 40))(any_text_in_any_pieces))()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(pieces=TEXTS)
def test_no_more_than_a_word_is_held_back(pieces: list[str]) -> None:
    """And nothing of what is longer than a line, or stands in a code block."""
    wrap, seen, said = WordWrap(lambda: 10), "", ""
    for piece in pieces:
        said += piece
        seen += wrap.push(piece)
        held = STYLE.sub("", said)[len(STYLE.sub("", seen).replace("\n", "")) + said.count("\n") :]
        assert not re.search(r"[ \t][^ \t]", held), "more than a word"
        assert wcswidth(held.expandtabs(8)) <= 10 or any(not char.isprintable() for char in held)


def test_the_width_is_asked_again() -> None:
    sizes = iter((20, 20, 8, 8, 20))
    wrap = WordWrap(lambda: next(sizes))
    assert wrap.push("aaa bbb ccc ddd\n") + wrap.push("aaa bbb ") == "aaa bbb ccc ddd\naaa "
    assert wrap.push("ccc ") + wrap.push("ddd ") + wrap.end() == "bbb \nccc ddd "


def test_a_terminal_says_how_wide_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as no_terminal:
        monkeypatch.setenv("COLUMNS", "33")
        assert columns(no_terminal) == 33
        for odd in ("0", "x", "-3", ""):
            monkeypatch.setenv("COLUMNS", odd)
            assert columns(no_terminal) == 80


PROGRAM = """
import sys, time
from types import SimpleNamespace
from qwen_onnx.cli.printer import Printer
from qwen_onnx.runners.text.reasoning import Said
printer = Printer(SimpleNamespace(tokenizer=True), markdown=True)
text = {text!r}
for start in range(0, len(text), 3):
    printer.print_token(None, Said({part}=text[start : start + 3]))
printer.end()
raise SystemExit
"""


@on_a_terminal
@pytest.mark.parametrize("part", ["answer", "reasoning"])
@pytest.mark.parametrize("width", [80, 20])
def test_an_answer_on_a_terminal(width: int, part: str) -> None:
    ours, theirs = open_terminal(width)
    environment = {"TERM": "xterm", "PYTHONUTF8": "1", "NO_COLOR": "", "COLUMNS": ""}
    program = PROGRAM.format(text=PROSE, part=part)
    with child(program=program, stdout=theirs, stderr=theirs, environment=environment) as process:
        os.close(theirs)
        terminal = Terminal(ours)
        terminal.read_rest()
        assert process.wait(PATIENCE) == 0
    os.close(ours)
    plain = STYLE.sub("", terminal.seen.decode().replace("\r\n", "\n"))
    rows = plain.split("\n")
    code = next(row for row in rows if row.startswith("print("))
    assert code in PROSE
    assert all(wcswidth(row) <= width for row in rows if row != code)
    assert {*re.findall(r"\w+", plain)} >= {*re.findall("[A-Za-z]+|[가-힣]+", PROSE)}
    if part == "answer":
        emphasis = Emphasis()
        styled = emphasis.push(PROSE) + emphasis.end()
        assert terminal.seen.decode().replace("\r\n", "").startswith(styled.replace("\n", ""))


@on_a_terminal
def test_a_chat_in_a_narrow_terminal(tmp_path: Path) -> None:
    """The answer is in lines of whole words, and in the wider terminal of the next question it is one."""
    with session(tiny(), history=tmp_path / "history", columns=20, COLUMNS="") as (terminal, process):
        terminal.type(b"What is the capital of France?\r")
        terminal.wait_for(b"The capital of \r\nFrance is Paris.\r\n")
        terminal.wait_for(READY)
        resize(terminal.descriptor, 80)
        terminal.type(b"What is the capital of France?\r")
        terminal.wait_for(b"The capital of France is Paris.\r\n")
        terminal.wait_for(READY)
        terminal.type(b"\x04")
        assert process.wait(PATIENCE) == 0


@on_a_terminal
def test_one_answer_in_a_narrow_terminal() -> None:
    """`-p` is as a chat; `--no-wrap` leaves the line to the terminal."""
    arguments = ("run", tiny(), "--provider", "cpu", "-p", "What is the capital of France?")
    for more, said in (
        ((), b"The capital of \r\nFrance is Paris.\r\n"),
        (("--no-wrap",), b"capital of France is"),
    ):
        ours, theirs = open_terminal(20)
        environment = {"TERM": "xterm", "COLUMNS": ""}
        with child(*arguments, *more, stdout=theirs, stderr=theirs, environment=environment) as process:
            os.close(theirs)
            terminal = Terminal(ours)
            terminal.read_rest()
            assert process.wait(PATIENCE) == 0
        os.close(ours)
        assert said in terminal.seen


@on_a_terminal
def test_ctrl_c_in_an_answer_leaves_the_cursor_on_a_new_line() -> None:
    """The word that was held back is shown, too."""
    ours, theirs = open_terminal(20)
    settings = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    environment = {"TERM": "xterm", "COLUMNS": ""}
    arguments = (
        "run",
        endless(),
        "--provider",
        "cpu",
        "--ignore-eos",
        "--max-new-tokens",
        100_000,
        "-p",
        "Hi",
    )
    with child(*arguments, program=CONTROLLING, environment=environment, **settings) as process:
        os.close(theirs)
        terminal = Terminal(ours)
        terminal.wait_for_more()
        terminal.type(b"\x03")
        assert process.wait(PATIENCE) == 130
        terminal.read_rest()
    os.close(ours)
    assert terminal.seen.endswith(b"\r\n")


def test_an_error_within_an_answer_begins_a_new_line(capsys: pytest.CaptureFixture[str]) -> None:
    """In a chat and of `-p`; where nothing was said yet, there is no empty line."""

    class Failing(ScriptedChat):
        def generate(self, prompt_ids: list[int], **asked: Any) -> Iterator[Token]:
            yield from itertools.islice(super().generate(prompt_ids, **asked), 2)
            raise UserError("no memory")

    printer = Printer(cast(Chat, Failing()))
    talk(
        Failing("one two three"), "Hi", CTRL_D, break_off=printer.break_off,
        on_token=lambda token: printer.print_token(token, Said(answer=token.text)),
    )  # fmt: skip
    assert capsys.readouterr().out == "1 2 \n"
    printer.break_off()
    assert capsys.readouterr().out == ""


def test_what_is_said_between_tokens_stands_on_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word that is held back comes before `--logprobs`, and the rest of the answer after it."""
    log = io.StringIO()
    monkeypatch.setattr(log, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", log)
    monkeypatch.setattr("sys.stderr", log)
    monkeypatch.setenv("COLUMNS", "20")
    chat = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: "x"))
    printer = Printer(cast(Chat, chat), color=False)
    for said in (Said("Some though"), Said("ts of"), Said("", "An ans"), Said("", "wer. ")):
        printer.print_token(Token(1, "", None, 1, 0, 1.0, None, logprob=-0.5), said)
    printer.end()
    detail = "logprob 1 'x' -0.500"
    lines = (detail, "Some though", detail, "ts of", detail, "", "", "An ans", detail, "wer. ", "")
    assert log.getvalue() == "\n".join(lines)


def test_a_pipe_gets_what_the_model_said() -> None:
    program = PROGRAM.format(text=PROSE, part="answer")
    with child(program=program, environment={"PYTHONUTF8": "1", "COLUMNS": "20"}) as process:
        out, _ = process.communicate(timeout=PATIENCE)
    assert out.decode() == f"{PROSE}\n"


@pytest.mark.parametrize("width", range(2, 30))
def test_any_split_is_the_same(width: int) -> None:
    for size in (1, 2, 3, 7, 50):
        pieces = (
            ["".join(part) for part in itertools.batched(PROSE, size)]
            if sys.version_info >= (3, 12)
            else [PROSE]
        )
        assert wrapped(pieces, width) == wrapped([PROSE], width)
