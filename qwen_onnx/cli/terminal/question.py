"""A question to somebody at a terminal."""

from __future__ import annotations

import sys

from qwen_onnx.cli.terminal.output import tell


def confirmed(question: str) -> bool:
    """Whether the answer is yes; Enter is yes, and so is nobody there to ask."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    tell(question, end="")
    try:
        return input().strip().lower() in ("", "y", "yes")
    except EOFError:
        tell("")
        return False
