"""The lines of a `--batch` file: JSON objects, each a prompt and what is asked of its answer."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qwen_onnx.errors import UserError
from qwen_onnx.options import Given, declared, made
from qwen_onnx.runners.chat import Message
from qwen_onnx.runners.sampling.params import DRAWING
from qwen_onnx.runners.sampling.request import Request
from qwen_onnx.runners.text.prompts import verified_messages
from qwen_onnx.runners.text.tokenizer import verify_unicode

MOST_BYTES = 16 << 20
"""Of a line."""
OPTIONS = tuple(name for name, option in declared(Request).items() if option.of_lines)
_CONSTRAINTS = ("json_schema", "regex")
_KEYS = ("messages", "prompt", "id", *OPTIONS)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of the file that is not blank."""

    number: int
    """From 1, blank lines counted."""
    content: bytes
    """Without white space around it, and without a byte order mark."""
    end: int
    """Bytes of the file up to and with it."""


def read_lines(stream: BinaryIO, name: str) -> Iterator[Line]:
    """The lines of a stream, one at a time; of one longer than 16 MiB the beginning.

    Raises:
        UserError: it cannot be read.
    """
    number = end = 0
    while content := _read(stream, name):
        number, end = number + 1, end + len(content)
        more = content
        while len(more) > MOST_BYTES and not more.endswith(b"\n"):  # the rest of it is passed by
            more = _read(stream, name)
            end += len(more)
        content = content.removeprefix(codecs.BOM_UTF8) if number == 1 else content
        if content := content.strip():
            yield Line(number, content, end)


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.readline(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror or error})") from None


def parse_object(content: bytes) -> dict[str, Any]:
    """The JSON object that a line is.

    Raises:
        UserError: it is none, or its id is none.
    """
    if len(content) > MOST_BYTES:
        raise UserError(f"longer than {MOST_BYTES >> 20} MiB")
    try:
        value = json.loads(
            content.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_without_twins
        )
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise UserError("JSON nested too deeply") from None
    except ValueError as error:
        raise UserError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError('not a JSON object, as {"prompt": "Hello!"}')
    if not isinstance(given := value.get("id"), str | int | None) or isinstance(given, bool):
        raise UserError(f"id {given!r}: a string or a whole number wanted")
    return value


def parse_line(
    value: dict[str, Any], asked: Given, *, raw: bool, system: str | None
) -> tuple[str | list[Message], Given]:
    """The prompt and the options that an object of `parse_object` asks for.

    Args:
        asked: options that hold where the line says nothing, or null.
        raw: a prompt is text to go on with, not a user's message.
        system: comes before the message that a prompt is; `messages` have their own.

    Raises:
        UserError: not one of `prompt` and `messages`, a key that is not known, or a value of the wrong kind.
    """
    if unknown := [key for key in value if key not in _KEYS]:
        raise UserError(f"{unknown[0]!r} is not known; the keys are {', '.join(_KEYS)}")
    if ("prompt" in value) == ("messages" in value):
        raise UserError("one of `prompt` and `messages` wanted")
    prompt: str | list[Message]
    if "messages" in value:
        if raw:
            raise UserError("messages go through the chat template: leave out --raw")
        prompt = verified_messages(value["messages"])
    else:
        if not isinstance(text := value["prompt"], str):
            raise UserError(f"prompt {text!r}: a string wanted")
        verify_unicode("prompt", text)
        said = [{"role": "system", "content": system}] if system else []
        prompt = text if raw else [*said, {"role": "user", "content": text}]
    own = {name: value[name] for name in OPTIONS if value.get(name) is not None}
    if any(name in own for name in DRAWING):  # --greedy was for lines that say nothing
        asked = {name: value for name, value in asked.items() if name != "do_sample"}
    if any(name in own for name in _CONSTRAINTS):  # the line's is in place of the command's
        asked = {name: value for name, value in asked.items() if name not in _CONSTRAINTS}
    made(Request, own)
    return prompt, {**asked, **own}


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def verify_input(file: str) -> None:
    """Raises UserError where the file cannot be opened; a pipe, which is opened only once, is left alone."""
    with contextlib.suppress(OSError, ValueError):  # the error below is in words
        mode = Path(file).stat().st_mode
        if file != "-" and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and os.access(file, os.R_OK):
            return
    with open_input(file):
        pass


@contextlib.contextmanager
def open_input(file: str) -> Iterator[BinaryIO]:
    """The file, or stdin for `-`.

    Raises:
        UserError: it cannot be read.
    """
    if file == "-":
        if sys.stdin is None:  # closed, as `<&-` does
            raise UserError("stdin is closed: --batch - reads it")
        yield sys.stdin.buffer
        return
    try:
        stream = Path(file).open("rb")  # noqa: SIM115 - here are its errors, below it is closed
    except (OSError, ValueError) as error:  # a null byte in the name
        raise UserError(f"--batch {file}: {getattr(error, 'strerror', None) or error}") from None
    with stream:
        yield stream
