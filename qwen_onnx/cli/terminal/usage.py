"""A command line that cannot be read, in one line."""

from __future__ import annotations

from typing import Any

import typer

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Of the parser; typer has its own, or click's, by its version."""


def usage_line(error: Any) -> str:
    """What is wrong, and where the right words are listed; "" where help was shown instead."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return ""
    text = " ".join(error.format_message().split())
    command = error.ctx.command_path if error.ctx else "qwen-onnx"
    return f"error: {text[:1].lower()}{text[1:].rstrip('.')}; see {command} --help"
