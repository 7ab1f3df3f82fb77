"""TensorRT engines built ahead or on the way: none is used before it chose the tokens that the CPU chooses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from qwen_onnx.checks.golden import check_golden
from qwen_onnx.errors import UserError, option
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions


def build_engine(folder: Path, *, max_context: int | None, report: Callable[[str], None]) -> str:
    """Open the export on TensorRT, which builds its engine or finds it, and check it; the check's verdict.

    Args:
        max_context: tokens of the engine's cache.
        report: is told what engine it is, before the check.

    Raises:
        UserError: TensorRT does not start, or its engine gives other tokens than the CPU.
    """
    chat = Chat(Runner(folder, SessionOptions(provider="tensorrt", max_context=max_context)))
    if chat.runner.engine is not None:
        report(chat.runner.engine.describe())
    return verify_engine(chat)


def verify_engine(chat: Chat) -> str:
    """Compare greedy ids with the golden ones; what was found, in one line. The engine then counts as checked.

    Raises:
        UserError: they differ. The engine is deleted, so that no later run takes it for good.
    """
    finding, engine = check_golden(chat, chat.runner.manifest), chat.runner.engine
    if engine is not None and finding.ok:
        engine.mark(checked=True)
    elif engine is not None:
        shutil.rmtree(engine.folder, ignore_errors=True)
        raise UserError(f"TensorRT's engine was deleted: {finding.text}; use {option('provider', 'cuda')}")
    return finding.text
