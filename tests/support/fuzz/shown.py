"""What others wrote, on its way to a terminal: names of files, models and functions, keys, answers."""

from __future__ import annotations

import functools
import io
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast
from unittest import mock

from qwen_onnx.cli.printer import Printer
from qwen_onnx.cli.terminal import output
from qwen_onnx.cli.terminal.json_line import as_json_line
from qwen_onnx.contract.manifest import MANIFEST_FILE
from qwen_onnx.errors import UserError, printable
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.text.reasoning import Said
from support.chats import copy_export
from support.command import command
from support.repl import CTRL_D, ScriptedChat, talk

RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What no terminal may get: controls but for line ends and tabs; what turns the direction of writing."""
OWN = re.compile("\x1b\\[(?:0|1|2|36)m")
_COMMANDS = (
    "\x1b]0;owned\x07", "\x1b[2J", "\x1b[31m", "\x1b[0m", "\x1b]8;;http://x\x1b\\", "\x1bP1$r0m\x1b\\", "\x1b",
    "\x1bc", "\x9b2J", "\x9d0;x\x9c", "\x07", "\x08", "\r", "\x00", "\x7f", "\x0e", "\x0f", "\x85", "\x0b", "\x0c",
    "\u202e", "\u2066", "\u2069", "\u200f", "\u2028", "\u2029", "\ufeff", "\ud800", "\udc9b", "\U000e0001",
    "\u200b", "\u0301" * 40, "[bold]", "[/]", "[link=x]", "{0}", "%s", "**", "```", "`", "# ", "漢", "🔥", "é", "\n",
    "\r\n", "\t", " ", "error: ", "a" * 200,
)  # fmt: skip


class Base(Protocol):
    """An export and a folder to write in."""

    export: Path
    scratch: Path


class _Chat(ScriptedChat):
    processor = SimpleNamespace(
        folder=Path("x"),
        prompts=SimpleNamespace(template_of=lambda asked: SimpleNamespace(source="tools enable_thinking")),
    )

    def load(self, path: Path) -> None:
        raise UserError(f"{path}: cannot be read")


class _Stream(io.TextIOWrapper):
    """As the command sets up its own: what cannot be encoded is a `?`."""

    def __init__(self, terminal: bool) -> None:
        super().__init__(io.BytesIO(), "utf-8", errors="replace", newline="")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        self.flush()
        return cast(io.BytesIO, self.buffer).getvalue().decode()


def hostile(rng: random.Random, most: int = 6) -> str:
    """A text that would command a terminal, were it printed as it is."""
    parts = []
    for _ in range(rng.randrange(1, most)):
        kind = rng.random()
        if kind < 0.7:
            parts.append(rng.choice(_COMMANDS))
        elif kind < 0.85:
            parts.append(
                chr(
                    rng.choice((rng.randrange(0x100), rng.randrange(0x2000, 0x2100), rng.randrange(0x110000)))
                )
            )
        else:
            parts.append(rng.choice(("name", "model.safetensors", "eos_token_id", " words of an answer ")))
    return "".join(parts)


def shown(function: Callable[[], object], *, terminal: bool = True) -> tuple[str, str]:
    """What a function prints on stdout and stderr."""
    out, err = _Stream(terminal), _Stream(terminal)
    with mock.patch.multiple(sys, stdout=out, stderr=err):
        function()
    return out.text, err.text


def verify(text: str, *, colors: bool = False) -> None:
    """Nothing raw is in what a terminal got."""
    text = OWN.sub("", text) if colors else text
    if found := RAW.search(text):
        raise AssertionError(f"{found[0]!r} in {text[max(0, found.start() - 200) : found.end() + 50]!r}")


def terminal_text(rng: random.Random, base: Base) -> None:
    """Through each way to a terminal."""
    with mock.patch.dict("os.environ", {"NO_COLOR": "1", "COLUMNS": str(rng.choice((1, 20, 80)))}):
        rng.choice([*(_lines,) * 4, *(_answer,) * 6, *(_json,) * 3, *(_chat,) * 6, _names])(rng, base)


def _lines(rng: random.Random, base: Base) -> None:
    """Lines stay lines."""
    text = hostile(rng, 12)
    for way in (output.tell, output.show):
        joined = "".join(shown(functools.partial(way, text), terminal=False))
        assert joined.endswith("\n")
        assert joined[:-1].isprintable()
    for way in (output.tell, output.show, output.quote, output.think):
        verify("".join(shown(functools.partial(way, text))))
    for line in (printable(text), str(UserError(text))):
        assert line.isprintable()
        assert len(line) <= 1500
    assert RAW.search(output.harmless(text)) is None


def _answer(rng: random.Random, base: Base) -> None:
    """Streamed in any pieces: harmless on a terminal, with styles of ours alone; as it is in a pipe."""
    text, reasoning = hostile(rng, 20), hostile(rng, 9)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(9)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    styled = rng.random() < 0.5

    def say() -> None:
        printer = Printer(cast(Chat, SimpleNamespace(tokenizer=True)), color=styled, markdown=True)
        printer.print_token(None, Said(reasoning=reasoning))
        for piece in pieces:
            printer.print_token(None, Said(answer=piece))
        printer.end()

    with mock.patch.dict("os.environ", {"NO_COLOR": "" if styled else "1", "TERM": "xterm"}):
        out, err = shown(say)
    # What is styled is in order: with ours taken out, no other is left.
    verify(out, colors=styled)
    verify(err, colors=styled)
    plain = OWN.sub("", out).replace("\n", "")
    wanted = output.harmless(text).replace("\n", "").encode("utf-8", "replace").decode()
    assert plain == wanted
    out, _ = shown(say, terminal=False)
    assert out == f"{text}\n".encode("utf-8", "replace").decode()


def _json(rng: random.Random, base: Base) -> None:
    """What `--json` and results of batches print reads back as it was."""
    # To JSON, two halves of a pair that stand together are the character.
    texts = (
        hostile(rng).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") for _ in range(4)
    )
    value = {next(texts): [next(texts), {next(texts): None}], "id": next(texts)}
    line = as_json_line(value)
    assert json.loads(line) == value
    assert "\n" not in line
    verify(line)
    verify("".join(shown(lambda: output.answer(line))))


def _chat(rng: random.Random, base: Base) -> None:
    """Every part of a chat is hostile: the model, what it says and calls, what is typed, the files that are named."""
    call = json.dumps({"name": hostile(rng), "arguments": {hostile(rng): 1}})
    chat = _Chat(f"{hostile(rng)}<tool_call>{call}</tool_call>", UserError(hostile(rng)), hostile(rng))
    chat.runner.manifest.model_id = hostile(rng)
    lines = [
        "Hi", "So?", f"/read {hostile(rng)}", f"/load {hostile(rng)}", f"/set {hostile(rng)} {hostile(rng)}",
        f"/set stop {hostile(rng)}", "/show", "/undo", f"/system {hostile(rng)}", "/show", "/params",
        f"/{hostile(rng)}" if rng.random() < 0.5 else "/reset", "/stats", CTRL_D,
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    def say() -> None:
        printer = Printer(cast(Chat, chat), color=False)
        talk(
            chat, *lines, tools=tools, break_off=printer.break_off,
            on_token=lambda token: printer.print_token(None, Said(answer=token.text)),
        )  # fmt: skip

    with mock.patch("qwen_onnx.cli.chat.repl.verify_request"):  # there is no runner
        out, err = shown(say)
    verify(out)
    verify(err)


def _names(rng: random.Random, base: Base) -> None:
    """Names of folders, of files of a manifest, and what is typed at a shell."""
    name = re.sub("[/\0]", "", hostile(rng))[:60].encode("utf-8", "replace").decode()[:50] or "x"
    home = base.scratch / "names"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    folder = copy_export(base.export, home / f"e{name}")
    manifest: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_text())
    key = rng.choice(("model_id", "dtype", "packages", "files", "architecture", hostile(rng)))
    manifest[key] = rng.choice((hostile(rng), {hostile(rng): hostile(rng)}, {hostile(rng): 1}))
    if rng.random() < 0.8:
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    shell = hostile(rng).replace("\0", "")
    for words in (
        ("info", folder, "--graphs"), ("run", folder, "--prompt-ids", "1,2", "--max-new-tokens", "2", "--stats"),
        ("info", home / shell), (shell, folder), ("run", folder, f"--{shell}", shell),
    ):  # fmt: skip
        ran = command(*words)
        verify(ran.err)
        verify(ran.out)
        assert "Traceback" not in ran.err
