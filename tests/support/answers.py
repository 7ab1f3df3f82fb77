"""Chats opened on the CPU, and their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen_onnx import load
from qwen_onnx.runners.chat import Chat, Token
from support.chats import copy_export
from support.damage import forge

HI = [{"role": "user", "content": "Hi"}]
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def opened(folder: Path, **options: Any) -> Chat:
    return load(folder, provider="cpu", threads=1, **options)


def with_config(source: Path, target: Path, values: dict[str, Any]) -> Path:
    """A copy of an export whose generation_config.json says this too."""
    folder = copy_export(source, target)
    path = folder / "generation_config.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(held | values), encoding="utf-8")
    forge(folder)
    return folder


def say(chat: Chat, prompt: Any = HI, count: int | None = 12, **options: Any) -> list[Token]:
    return list(chat.generate(prompt, max_new_tokens=count, **options))


def ids(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def text(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)
