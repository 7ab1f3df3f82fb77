"""`qwen-onnx` as a process: signals, pipes that close, terminals that cannot show what is said."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx.cli import progress
from qwen_onnx.errors import ExportInProgressError
from qwen_onnx.exports.cached import find
from qwen_onnx.exports.options import ExportOptions
from support.chats import endless, tiny
from support.command import child, command
from support.marks import but_first
from support.patience import PATIENCE

pytestmark = pytest.mark.thorough

LONG = ("--ignore-eos", "--max-new-tokens", 100_000, "--provider", "cpu")

# Says so when three tokens are made, so that a signal can be sent in the middle of an answer.
SAY_WHEN = """
import sys
from qwen_onnx.runners.chat import Chat
generate = Chat.generate
def announcing(*args, **kwargs):
    for count, token in enumerate(generate(*args, **kwargs), start=1):
        yield token
        if count == 3:
            print("three made", file=sys.stderr, flush=True)
Chat.generate = announcing
"""


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
    return process.returncode, out.decode(), err.decode()


def test_the_installed_command_answers() -> None:
    with child("run", tiny(), "-p", "What is 3 plus 4?", "--provider", "cpu") as process:
        assert finish(process) == (0, "3 plus 4 is 7.\n", "")


@pytest.mark.thorough
def test_first_runs_at_once_share_one_export(tmp_path: Path) -> None:
    """Each of them answers."""
    cache = tmp_path / "cache"
    arguments = ("run", "tiny", "-p", "What is 3 plus 4?", "--provider", "cpu", "--cache-dir", cache)
    with child(*arguments) as first, child(*arguments) as second:
        for process in (first, second):
            code, out, err = finish(process)
            assert (code, out) == (0, "3 plus 4 is 7.\n"), err
    assert len(list(cache.iterdir())) == 1


def test_a_first_run_waits_for_the_export_that_another_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so once, looks again, and makes the export itself where the other one left none."""
    tried: list[Path] = []
    real = progress.export_with_progress

    def busy_twice(source: Any, path: Path, options: ExportOptions) -> object:
        tried.append(path)
        if len(tried) < 3:
            raise ExportInProgressError(f"{path}: another export to it is running")
        return real(source, path, options)

    monkeypatch.setattr(progress, "export_with_progress", busy_twice)
    monkeypatch.setattr(find, "_LOOK_AGAIN", 0)
    ran = command("run", "tiny", "-p", "What is 3 plus 4?", "--provider", "cpu", "--cache-dir", tmp_path)
    assert (ran.code, ran.out, len(tried)) == (0, "3 plus 4 is 7.\n", 3)
    assert ran.err.count("another process is exporting it: waiting") == 1


def test_a_piped_prompt_and_a_closed_stdin() -> None:
    arguments = ("run", tiny(), "--provider", "cpu")
    with child(*arguments, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"What is 3 plus 4?\n")
        process.stdin.close()
        process.stdin = None
        assert finish(process) == (0, "3 plus 4 is 7.\n", "")
    with child(*arguments, program="import sys; sys.stdin = None") as process:
        assert finish(process) == (1, "", "error: stdin is closed: give the prompt with -p or --prompt-ids\n")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_the_answer_and_keeps_what_there_is(as_json: bool) -> None:
    arguments = ("run", endless(), "-p", "Hi", *LONG, *(["--json"] if as_json else []))
    with child(*arguments, program=SAY_WHEN) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"three made\n"
        process.send_signal(signal.SIGINT)
        code, out, err = finish(process)
    assert (code, err) == (130, "")
    if as_json:
        found = json.loads(out)
        assert found["finish_reason"] == "interrupted"
        assert len(found["token_ids"]) >= 3
        assert found["text"]
    else:
        assert len(out) > 1
        assert out.endswith("\n")


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
def test_ctrl_c_before_the_answer_is_no_traceback() -> None:
    program = (
        "import signal, qwen_onnx.cli.run as module\n"
        "module.open_chat = lambda *arguments: signal.raise_signal(signal.SIGINT)"
    )
    with child("run", endless(), "-p", "Hi", program=program) as process:
        code, out, _ = finish(process)
    assert (code, out) == (130, "")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes close otherwise there")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_reader_that_leaves_ends_the_program_quietly(as_json: bool) -> None:
    """As `qwen-onnx run ... | head -c 1`."""
    with child(
        "run", endless(), "-p", "Hi", *(["--json", "--max-new-tokens", 3] if as_json else LONG)
    ) as process:
        assert process.stdout is not None
        if not as_json:
            assert process.stdout.read(1)
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode not in (0, None)
    assert err.decode().splitlines() in ([], ["provider: cpu"])


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_characters_that_stdout_does_not_have_are_spelled_out_and_told(encoding: str) -> None:
    """No answer is lost, a line of JSON stays one, and one line on stderr says what to do."""
    said = "é漢😀 a"
    asked = ("run", tiny(), "-p", "Hi", "--regex", said, "--provider", "cpu")
    for more in ((), ("--json",)):
        with child(*asked, *more, environment={"PYTHONIOENCODING": encoding}) as process:
            out, err = process.communicate(timeout=PATIENCE)
        text = out.decode(encoding)
        assert json.loads(text)["text"] if more else json.loads(f'"{text.strip()}"') == said
        assert (process.returncode, err.count(b"\n")) == (0, 1)
        assert b" does not have all characters: they are written as" in err
    with child(*asked[:3], "3", *asked[6:], environment={"PYTHONIOENCODING": encoding}) as process:
        assert process.communicate(timeout=PATIENCE)[1] == b""


@pytest.mark.skipif(sys.platform == "win32", reason="shells are another thing there")
@pytest.mark.parametrize("closed", but_first([">&-", "2>&-", ">&- 2>&-", "<&-"]))
def test_a_closed_stream_is_no_traceback_and_loses_no_answer_unsaid(closed: str, tmp_path: Path) -> None:
    """An answer that goes nowhere is exit code 1 and a line; no file gets the number of the closed stream."""
    lost = closed.startswith(">")
    program = f"{sys.executable} -c 'from qwen_onnx.cli.main import main; main()'"
    for arguments in (f"run {tiny()} -p Hi --max-new-tokens 2 --provider cpu", f"info {tiny()}", "--help"):
        done = subprocess.run(f"{program} {arguments} {closed}", shell=True, capture_output=True, check=False)
        assert done.returncode == lost, done.stderr
        assert b"Traceback" not in done.stderr
        assert bool(done.stdout) == (not lost)
        if closed == ">&-":
            assert done.stderr.decode() == "error: stdout: closed; the answer has nowhere to go\n"
    asked = f"export tiny {tmp_path / 'out'} --force"
    done = subprocess.run(f"{program} {asked} {closed}", shell=True, capture_output=True, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (lost, False)
    assert command("check", tmp_path / "out", "--provider", "cpu").code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full, child("info", endless(), stdout=full) as process:
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.decode().splitlines() == ["error: stdout: No space left on device"]
