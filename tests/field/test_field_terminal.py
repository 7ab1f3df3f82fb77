"""docs/faults.md, chapter J: the command line, and what a benchmark counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from qwen_onnx import UserError
from qwen_onnx.checks import benchmark, machine
from qwen_onnx.runners import chat as chat_module
from qwen_onnx.runners import sequence as sequence_module
from qwen_onnx.runners.runtime.options import SessionOptions
from support.chats import endless
from support.command import command
from support.field_runs import opened

CPU = ("--provider", "cpu", "--max-new-tokens", 3)


@pytest.mark.parametrize("path", ["/nope", "", "x" * 300, "a\nb", "/dev/null"])
def test_j1_a_wrong_path_is_one_line(path: str) -> None:
    for verb in ("run", "info", "check", "score"):
        arguments = [
            verb,
            path or "./",
            *(["-p", "Hi"] if verb == "run" else ["-"] if verb == "score" else []),
        ]
        assert command(*arguments).error


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
def test_j1_ctrl_c_stops_the_answer_and_the_second_one_leaves(tmp_path: Path) -> None:
    """The session goes on after an answer that was stopped; twice at the prompt leaves with 130."""
    from support.terminal import ENDED, PATIENCE, READY, session

    arguments = (endless(), "--ignore-eos", "--max-new-tokens", 100_000)
    with session(*arguments, history=tmp_path / "history") as (terminal, process):
        terminal.type(b"Hi\r")
        terminal.wait_for(ENDED)
        terminal.wait_for_more()  # the answer has begun
        terminal.type(b"\x03")
        terminal.wait_for(b"(interrupted)")
        terminal.wait_for(READY)
        terminal.type(b"\x03")
        terminal.wait_for(b"Ctrl-C again")
        terminal.wait_for(READY)
        terminal.type(b"\x03")
        assert process.wait(PATIENCE) == 130


def test_j3_commands_and_the_room_that_is_left_can_be_found_out() -> None:
    """/help lists the commands, and /stats the tokens used and left."""
    lines = "/help\n/system Be brief.\nHi\n/stats\n/clear\n/reset\n/nonsense\n/exit\n"
    told = command("run", endless(), *CPU, stdin=lines, terminal=True)
    assert told.code == 0
    for said in ("/system TEXT", "/reset", "/quit", "tokens used, ", " left", "no command /nonsense; /help"):
        assert said in told.err


@pytest.mark.parametrize("prompt", ["", " ", "\n", "<|im_start|>", "<|im_end|><|endoftext|>"])
def test_j4_any_content_can_be_asked_and_no_token_is_an_error(prompt: str) -> None:
    """Qwen adds no start token: "" is no ids at all, which is an error, and under the template a message."""
    ran = command("run", endless(), "-p", prompt, "--json", "--show-prompt-ids", *CPU)
    assert ran.code == 0
    asked = json.loads(ran.out)["prompt_ids"]
    empty = json.loads(command("run", endless(), "-p", "", "--json", "--show-prompt-ids", *CPU).out)[
        "prompt_ids"
    ]
    assert len(asked) >= len(empty) > 10  # the template's own
    raw = command("run", endless(), "-p", prompt, "--raw", *CPU)
    if prompt:
        assert raw.code == 0
    else:
        assert "the prompt is empty" in raw.error


@pytest.mark.parametrize("prompt", ["", []])
def test_j4_nothing_to_start_from_is_an_error_in_python_too(prompt: Any) -> None:
    with pytest.raises(UserError, match="empty"):
        list(opened(endless()).generate(prompt))


def test_j4_a_chat_passes_over_empty_lines() -> None:
    told = command("run", endless(), *CPU, stdin="\n   \n\t\n/stats\n/exit\n", terminal=True)
    assert told.code == 0
    assert "context: 0 tokens used" in told.err
    assert told.out.strip() == ""


def test_j5_speed_counts_the_tokens_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the prompt nor the warm-up counts, by a clock that only the model moves."""
    now, runs = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(benchmark, "time", clock)
    monkeypatch.setattr(chat_module, "time", clock)
    monkeypatch.setattr(sequence_module, "time", clock)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda threads: 10.0)
    real = onnxruntime.InferenceSession.run_with_iobinding
    # Of each answer: a prompt, and 4 steps. The first answer, which warms up, takes ten times as long.
    seconds = [9.0, 0.1, 0.1, 0.1, 0.1] + 2 * [0.9, 0.01, 0.01, 0.01, 0.02]

    def timed(own: Any, binding: Any, run_options: Any = None) -> None:
        real(own, binding, run_options)
        now[0] += seconds[len(runs)]
        runs.append(own)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run_with_iobinding", timed)
    options = SessionOptions(provider="cpu", threads=1)
    found = benchmark.run_benchmark(endless(), options, prompt_tokens=9, new_tokens=5, repeats=2)
    assert len(runs) == len(seconds)
    assert (found.ttft_ms.low, found.ttft_ms.median, found.ttft_ms.high) == pytest.approx([900.0] * 3)
    assert found.tokens_per_s.median == pytest.approx(4 / 0.05)
    assert (found.step_ms.median, found.step_ms.high) == pytest.approx((10.0, 20.0))
    assert found.outside_ms == pytest.approx(0.0, abs=1e-9)
    assert found.bandwidth_share == pytest.approx(found.bytes_per_step / 0.010 / 10e9)


def test_j5_what_was_measured_is_told() -> None:
    """Lengths, threads, versions and machine are part of the result."""
    short = ("--prompt-tokens", 5, "--new-tokens", 3, "--repeats", 1, "--provider", "cpu", "--threads", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_PROBE_BYTES", 1 << 20)
        found = json.loads(command("bench", endless(), *short, "--json").out)
    assert (found["prompt_tokens"], found["new_tokens"], found["repeats"], found["threads"]) == (5, 3, 1, 1)
    assert "onnxruntime" in found["versions"]
    assert "Python" in found["versions"]
    assert found["machine"]
