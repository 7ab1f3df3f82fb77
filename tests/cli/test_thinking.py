"""Models that reason before they answer, and that call functions, on the command line."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx import export, load
from qwen_onnx.cli.completion import complete
from qwen_onnx.cli.printer import Printer
from qwen_onnx.cli.terminal.output import harmless
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.output import FinishReason, Token
from qwen_onnx.runners.text.reasoning import Said
from support.chats import endless, tiny, write_chat_checkpoint
from support.command import command
from support.repl import CTRL_D, talk
from support.text_fixtures import QWEN3_LIKE

ANSWER = ("<th", "ink>", "\nTwo ", "and two.\n", "</think>", "\n\nFo", "ur.")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@functools.cache
def thinker() -> Path:
    """An export whose chat template knows reasoning and tools. To be read only."""
    folder = Path(tempfile.mkdtemp(prefix="qwen-onnx-tests-"))
    checkpoint = write_chat_checkpoint(folder / "checkpoint", template=QWEN3_LIKE)
    return export(checkpoint, folder / "export").folder


Asked = list[tuple[list[int], dict[str, Any]]]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """Has the model say these texts; the prompts and options that it gets."""

    def rig(*texts: str, reason: FinishReason = FinishReason.EOS) -> Asked:
        asked: Asked = []

        def generate(self: Chat, prompt_ids: list[int], **options: Any) -> Iterator[Token]:
            asked.append((prompt_ids, options))
            for count, text in enumerate(texts, start=1):
                yield Token(count, text, reason if count == len(texts) else None, 3, 0, 1.0, None)

        monkeypatch.setattr(Chat, "generate", generate)
        return asked

    return rig


def run(*arguments: object) -> Any:
    return command("run", thinker(), "--provider", "cpu", "-p", "2 + 2?", *arguments)


def test_only_the_answer_goes_to_stdout(says: Callable[..., Asked]) -> None:
    """Reasoning goes to stderr, or nowhere with --hide-thinking."""
    says(*ANSWER)
    assert run() == (0, "Four.\n", "Two and two.\n\n")
    assert run("--hide-thinking") == (0, "Four.\n", "")


def test_json_has_both_apart(says: Callable[..., Asked]) -> None:
    says(*ANSWER)
    found = json.loads(run("--json").out)
    assert (found["text"], found["reasoning"]) == ("Four.", "Two and two.")
    says("Four.")
    assert "reasoning" not in json.loads(run("--json").out)


def test_text_that_is_completed_is_no_chat(says: Callable[..., Asked]) -> None:
    says(*ANSWER)
    assert run("--raw").out == "".join(ANSWER) + "\n"


@pytest.mark.parametrize(
    ("flag", "end"), [("--think", ""), ("--no-think", "<think>\n\n</think>\n\n"), (None, "")]
)
def test_the_switch_reaches_the_template(says: Callable[..., Asked], flag: str | None, end: str) -> None:
    asked = says("Four.")
    run(*([flag] if flag else []))
    tokenizer = load(thinker(), provider="cpu").tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(asked[0][0], skip_special_tokens=False).endswith(f"<|im_start|>assistant\n{end}")


def test_reasoning_that_the_template_begins(
    says: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt ends with <think>: the answer has the closing tag only."""
    chat = load(thinker(), provider="cpu")
    assert chat.template is not None
    rendered = chat.template.render

    def begun(*messages: Any, **options: Any) -> str:
        return rendered(*messages, **options) + "<think>\n"

    monkeypatch.setattr(type(chat.template), "render", lambda self, *m, **o: begun(*m, **o))
    says("Two and two.\n", "</think>\n\nFour.")
    assert run() == (0, "Four.\n", "Two and two.\n\n")


def test_history_keeps_what_the_template_then_drops(says: Callable[..., Asked]) -> None:
    """No reasoning of earlier turns comes into a prompt, not even of a turn that was cut short in it."""
    asked = says(*ANSWER)
    chat = load(thinker(), provider="cpu")
    talk(chat, "2 + 2?", "Sure?", CTRL_D)
    assert chat.tokenizer is not None
    prompt = chat.tokenizer.decode(asked[1][0], skip_special_tokens=False)
    assert "<|im_start|>assistant\nFour.<|im_end|>" in prompt
    assert "Two" not in prompt
    asked = says("<think>\nTwo and", reason=FinishReason.LENGTH)
    talk(chat, "2 + 2?", "Sure?", CTRL_D)
    assert "Two" not in chat.tokenizer.decode(asked[1][0], skip_special_tokens=False)


def test_calls_of_functions_are_parsed(says: Callable[..., Asked], tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    asked = says("I look. ", CALL)
    found = json.loads(run("--json", "--tools", tools).out)
    assert found["tool_calls"] == [{"name": "weather", "arguments": {"city": "Zürich"}}]
    assert found["text"] == "I look."
    tokenizer = load(thinker(), provider="cpu").tokenizer
    assert tokenizer is not None
    assert '"name": "weather"' in tokenizer.decode(asked[0][0], skip_special_tokens=False)
    assert "tool_calls" not in json.loads(run("--json").out)


def test_results_of_functions_reach_the_template(
    says: Callable[..., Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = says(CALL)
    chat = load(thinker(), provider="cpu")
    talk(chat, "Weather?", "/tool 21 degrees", CTRL_D, tools=TOOLS)
    assert chat.tokenizer is not None
    prompt = chat.tokenizer.decode(asked[1][0], skip_special_tokens=False)
    assert prompt.index(CALL) < prompt.index("<tool_response>\n21 degrees\n</tool_response>")
    assert "(calls weather; give its result with /tool)" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--think", "--no-think"])
def test_a_template_without_the_switch_is_named(flag: str) -> None:
    error = command("run", endless(), "--provider", "cpu", "-p", "Hi", flag).error
    assert f"chat template has no switch for thinking ({flag})" in error


@pytest.mark.parametrize("prompt", [("-p", "Hi", "--raw"), ("--prompt-ids", "1,2")])
def test_options_of_the_template_are_refused_where_none_is_used(
    prompt: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    for option in (("--think",), ("--no-think",), ("--tools", path)):
        error = command("run", thinker(), "--provider", "cpu", *prompt, *option).error
        assert "belongs to the chat template" in error


def test_ids_of_numpy_are_no_chat(says: Callable[..., Asked]) -> None:
    """What is said after token ids is text, whatever tags are in it."""
    says("".join(ANSWER))
    found = complete(load(thinker(), provider="cpu"), np.array([1, 2, 3]), {"max_new_tokens": 9})  # type: ignore[arg-type]
    assert (found.text, found.reasoning) == ("".join(ANSWER), None)


def test_tools_that_no_one_reads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    ran = command("run", tiny(), "--provider", "cpu", "-p", "Hi", "--tools", path)
    assert "chat template shows no tools" in ran.error


@pytest.mark.parametrize(
    "content", ["{}", "[]", "[1]", '[{"function": {}}]', '[{"name": 5}]', "[", "\udcff", None]
)
def test_files_that_hold_no_tools(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    assert str(path) in run("--tools", path).error


class Tty:
    """Keeps what is written; says that it is a terminal."""

    encoding = "utf-8"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def write(self, text: str) -> int:
        self._log.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "color", "dimmed"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False), ({}, False, False)],
)
def test_reasoning_is_dimmed_where_that_can_be(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], color: bool, dimmed: bool
) -> None:
    log: list[str] = []
    monkeypatch.setattr("sys.stdout", Tty(log))
    monkeypatch.setattr("sys.stderr", Tty(log))
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    printer = Printer(load(thinker(), provider="cpu"), color=color)
    for said in (Said("Two"), Said(" and two."), Said("", "Four.")):
        printer.print_token(None, said)
    printer.end()
    text = "".join(log)
    assert ("\x1b[2mTwo and \x1b[0m" in text) == dimmed
    assert text.replace("\x1b[2m", "").replace("\x1b[0m", "") == "Two and two.\n\nFour.\n"


def test_an_answer_is_no_command_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters of an answer are spelled out on a terminal; line ends, tabs and joiners are not."""
    log: list[str] = []
    monkeypatch.setattr("sys.stdout", Tty(log))
    monkeypatch.setattr("sys.stderr", Tty(log))
    printer = Printer(load(thinker(), provider="cpu"))
    printer.print_token(None, Said("\x1b]0;me\x07", "a\x1b[2J\r\n\tb [bold]*c*[/bold] \x9b1m 好é\u200d"))
    printer.end()
    text = "".join(log).replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert text == "\\x1b]0;me\\x07\n\na\\x1b[2J\n\tb [bold]*c*[/bold] \\x9b1m 好é\u200d\n"
    assert harmless("plain\ntext") == "plain\ntext"


def test_a_pipe_gets_every_character(says: Callable[..., Asked]) -> None:
    says("a\x1b[2Jb\r\n")
    assert run().out == "a\x1b[2Jb\r\n\n"
