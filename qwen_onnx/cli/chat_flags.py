"""The options of `run` that say how a chat goes: reasoning, tools, the context."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qwen_onnx.errors import UserError
from qwen_onnx.json_file import read_json_value

Think = Annotated[
    bool | None,
    typer.Option("--think/--no-think", help="Have the model reason first, or not; default the template's."),
]
ShowThinking = Annotated[
    bool, typer.Option("--show-thinking/--hide-thinking", help="Reasoning, dimmed, on stderr.")
]
Tools = Annotated[
    Path | None, typer.Option(metavar="FILE", help="JSON list of functions that the model may call.")
]
ContextFull = Annotated[
    str, typer.Option(help="In a chat: shift drops the oldest turns when the context is full, stop refuses.")
]
CacheReuse = Annotated[
    bool, typer.Option("--cache-reuse/--no-cache-reuse", help="Compute only what is new of a prompt.")
]
Color = Annotated[
    bool, typer.Option("--color/--no-color", help="On terminals; NO_COLOR switches it off too.")
]


def read_tools(path: Path | None) -> list[dict[str, Any]] | None:
    """The functions in a JSON file, as OpenAI's API describes them: a list of objects that have names.

    Raises:
        UserError: anything else.
    """
    if path is None:
        return None
    found = read_json_value(path)
    if not isinstance(found, list) or not found:
        raise UserError(f"{path}: a JSON list of functions wanted")
    for tool in found:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{path}: each function is an object with a name, found {str(tool)[:200]}")
    return found
