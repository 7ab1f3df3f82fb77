"""Qwen checkpoints to ONNX graphs, and a runner for them on ONNX Runtime.

    from qwen_onnx import export, load

    export("Qwen/Qwen2.5-0.5B-Instruct", "qwen-f32")
    chat = load("qwen-f32")
    for token in chat.generate([{"role": "user", "content": "Hello!"}], max_new_tokens=100, temperature=0.7):
        print(token.text, end="", flush=True)

In one line: `load("qwen-f32")("Hello!")` is the answer's text.

api.py has what is exported here; errors, memory, options and option_kinds are for all parts; reference is the oracle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_onnx.errors import EqualLogitsError, NonFiniteLogitsError, UserError

if TYPE_CHECKING:
    from qwen_onnx.api import ExportOptions, Request, SamplingParams, SessionOptions, export, load
    from qwen_onnx.runners.chat import Chat
    from qwen_onnx.runners.output import FinishReason, Token

    __version__: str

__all__ = [
    "Chat", "EqualLogitsError", "ExportOptions", "FinishReason", "NonFiniteLogitsError", "Request", "SamplingParams",
    "SessionOptions", "Token", "UserError", "__version__", "export", "load",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """The rest of the package comes when somebody asks for it: to import it takes time."""
    if name == "__version__":
        import importlib.metadata

        return importlib.metadata.version("qwen-onnx")
    if name == "Chat":  # which imports onnxruntime
        from qwen_onnx.runners.chat import Chat

        return Chat
    if name in __all__:
        from qwen_onnx import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """With the names that come when somebody asks for them."""
    return sorted({*globals(), *__all__})
