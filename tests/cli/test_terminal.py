"""The real command on a pseudo-terminal: answers stream, Ctrl-C stops one of them, Ctrl-D leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.chats import endless, tiny
from support.command import child
from support.terminal import CONTROLLING, ENDED, PATIENCE, READY, Terminal, session

if sys.platform == "win32":
    pytest.skip("no pseudo-terminals there", allow_module_level=True)


def test_a_session_on_a_terminal() -> None:
    """Ctrl-C ends the answer, and the prompt takes the next line; Ctrl-D leaves with 0."""
    ours, theirs = os.openpty()
    arguments = ("run", endless(), "--provider", "cpu", "--ignore-eos", "--max-new-tokens", 100_000)
    settings = {
        "stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True,
        # Without colours and cursor movements, whatever terminal the tests run in.
        "environment": {"TERM": "dumb", "INPUTRC": os.devnull},
    }  # fmt: skip
    try:
        with child(*arguments, program=CONTROLLING, **settings) as process:
            os.close(theirs)
            terminal = Terminal(ours)
            terminal.wait_for(b"/help for commands")
            terminal.wait_for(b"> ")
            for question in (b"one", b"two"):
                terminal.type(question + b"\n")
                terminal.wait_for(question + b"\r\n")
                terminal.wait_for_more()  # the answer has begun, and has no end
                assert process.poll() is None
                terminal.type(b"\x03")
                terminal.wait_for(b"(interrupted)")
                terminal.wait_for(b"> ")
            terminal.type(b"/stats\n")
            terminal.wait_for(b"tokens used")
            terminal.wait_for(b"> ")
            terminal.type(b"\x04")
            assert process.wait(PATIENCE) == 0
    finally:
        os.close(ours)


def test_ctrl_c_twice_at_the_prompt() -> None:
    ours, theirs = os.openpty()
    settings = {
        "stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True,
        "environment": {"TERM": "dumb", "INPUTRC": os.devnull},
    }  # fmt: skip
    try:
        with child("run", endless(), "--provider", "cpu", program=CONTROLLING, **settings) as process:
            os.close(theirs)
            terminal = Terminal(ours)
            terminal.wait_for(b"> ")
            terminal.press_ctrl_c_until(lambda: terminal.has_come(b"Ctrl-C again"))
            terminal.wait_for(b"> ")
            terminal.press_ctrl_c_until(lambda: process.poll() is not None)
            assert process.returncode == 130
    finally:
        os.close(ours)


def test_a_new_users_session(tmp_path: Path) -> None:
    """To start, ask, interrupt, ask again, undo, change a parameter, save, quit, load and go on all works."""
    history, saved = tmp_path / "state" / "history", tmp_path / "ada.qwen"

    with session(tiny(), history=history) as (terminal, process):

        def say(line: str, *wanted: str) -> None:
            terminal.type(line.encode() + b"\r")
            for text in wanted:
                terminal.wait_for(text.encode())
            terminal.wait_for(READY)

        say("My name is Ada.", "Nice to meet you, Ada!\r\n")
        say("/set ignore_eos on", "max_new_tokens 1024")
        terminal.type(b"What is 2 plus 2?\r")
        terminal.wait_for(b"2 plus 2 is 4.")  # and what comes after it has no end
        terminal.type(b"\x03")
        terminal.wait_for(b"(interrupted)")
        terminal.wait_for(READY)
        say("/set ignore_eos off", "max_new_tokens 1024")
        say("/undo")
        say("What is \\\r3 plus 4?", "3 plus 4 is 7.\r\n")
        terminal.type(b"half a line\x03")  # cleared, and not sent
        say("What is the capital of France?", "Paris")
        say("/undo")
        say("/set temperature 0.01", "sampling, temperature 0.01, ")
        say(f"/save {saved}", "saved")
        say("/stats", "tokens used")
        terminal.type(b"/quit\r")
        assert process.wait(PATIENCE) == 0

    asked = [line[1:] for line in history.read_text(encoding="utf-8").splitlines() if line.startswith("+")]
    assert asked[0] == "My name is Ada."
    assert asked[-1] == "/quit"
    assert "half a line" not in asked
    assert history.stat().st_mode & 0o077 == 0, "others can read it"

    with session(tiny(), history=history) as (terminal, process):
        terminal.type(f"/load {saved}\r".encode())
        terminal.wait_for(b"[assistant]")  # of the last exchange
        terminal.wait_for(READY)
        terminal.type(b"What is my name?\r")
        terminal.wait_for(b"Your name is Ada.\r\n")
        terminal.wait_for(READY)
        terminal.type(b"\x1b[A")  # the last question, once more
        terminal.wait_for(b"What is my name?")
        terminal.type(b"\r")
        terminal.wait_for(b"Your name is Ada.\r\n")
        terminal.wait_for(READY)
        terminal.type(b"\x04")
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("history", ["file/history", "/dev/full", "~nobody/history"])
@pytest.mark.thorough
def test_a_history_that_cannot_be_kept_is_no_reason_to_end(history: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = Path(history) if history.startswith("~") else tmp_path / history
    with session(tiny(), history=path) as (terminal, process):
        terminal.type(b"What is 3 plus 4?\r")
        terminal.wait_for(b"3 plus 4 is 7.")
        terminal.wait_for(READY)
        terminal.type(b"\x03")
        terminal.wait_for(b"Ctrl-C again")
        terminal.wait_for(READY)
        terminal.type(b"\x03")
        assert process.wait(PATIENCE) == 130


def test_a_line_of_the_history_is_found_again(tmp_path: Path) -> None:
    """Enter takes the line that Ctrl-R found, and sends it."""
    with session(tiny(), history=tmp_path / "history") as (terminal, process):
        for question in (b"What is 3 plus 4?", b"My name is Ada."):
            terminal.type(question + b"\r")
            terminal.wait_for(ENDED)
            terminal.wait_for(READY)
        terminal.type(b"\x12plus")  # Ctrl-R
        terminal.wait_for(b"I-search backward")
        terminal.wait_for(b"plus")
        terminal.type(b"\r\r")
        terminal.wait_for(b"3 plus 4 is 7.")
        terminal.wait_for(READY)
        terminal.type(b"\x04")
        assert process.wait(PATIENCE) == 0


def test_a_session_that_is_ended_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """SIGTERM too gives the terminal its echo and line mode back."""
    import termios

    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    environment = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "QWEN_ONNX_HISTORY": ""}
    with child(
        "run", tiny(), "--provider", "cpu", program=CONTROLLING, stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, environment=environment,
    ) as process:  # fmt: skip
        terminal = Terminal(ours)
        terminal.wait_for(READY)
        terminal.wait_for(b"\x1b[?25h")  # the line is drawn, and its cursor shown
        assert termios.tcgetattr(theirs) != before
        process.terminate()
        terminal.wait_for(ENDED)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
        assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.thorough
def test_a_terminal_of_few_characters(tmp_path: Path, encoding: str) -> None:
    """A character that it does not know ends neither the answer nor the session."""
    arguments = (endless(), "--max-new-tokens", 60, "--ignore-eos")
    with session(*arguments, history=tmp_path / "history", PYTHONIOENCODING=encoding) as (terminal, process):
        terminal.type("好 é🔥\r".encode())
        terminal.wait_for(b"(length)")
        terminal.wait_for(READY)
        terminal.type(b"\x04")
        assert process.wait(PATIENCE) == 0


def test_lines_that_are_pasted_are_one_question(tmp_path: Path) -> None:
    with session(tiny(), history=tmp_path / "history") as (terminal, process):
        terminal.type(b"\x1b[200~What is\n3 plus 4?\x1b[201~")
        terminal.wait_for(b"... 3 plus 4?")
        terminal.type(b"\r")
        terminal.wait_for(b"3 plus 4 is 7.")
        terminal.wait_for(READY)
        terminal.type(b"\x04")
        assert process.wait(PATIENCE) == 0


def test_an_export_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", "from qwen_onnx.cli.main import main; main()", "export", "tiny", tmp_path / "out"],
        stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    Terminal(ours).wait_for(b"writing weights")
    out, _ = done.communicate(timeout=PATIENCE)
    assert done.returncode == 0
    assert b"writing weights" not in out
    os.close(ours)


def test_a_batch_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    """The bar is on stderr, and only results are on stdout."""
    (tmp_path / "in").write_text('{"prompt": "x"}\nbad\n' * 20)
    ours, theirs = os.openpty()
    arguments = ["run", endless(), "--batch", tmp_path / "in", "--max-new-tokens", "8", "--provider", "cpu"]
    done = subprocess.Popen(
        [sys.executable, "-c", "from qwen_onnx.cli.main import main; main()", *map(str, arguments)],
        stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    terminal = Terminal(ours)
    terminal.wait_for(b"answering")
    terminal.wait_for(b"line 2: not valid JSON")
    terminal.wait_for(b"error: 20 of 40 lines")
    out, _ = done.communicate(timeout=PATIENCE)
    assert done.returncode == 1
    assert b"answering" not in out
    assert [line[:9] for line in out.splitlines()][:2] == [b'{"line": ', b'{"line": ']
    assert len(out.splitlines()) == 40
    os.close(ours)
