"""`from qwen_onnx import export, load`: what the package does, as functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

from qwen_onnx.checkpoints import BUNDLED_MODEL
from qwen_onnx.contract.manifest import MANIFEST_FILE
from qwen_onnx.errors import EqualLogitsError, NonFiniteLogitsError, UserError
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.options import Given, function_options, made, taking
from qwen_onnx.runners.output import FinishReason, Token
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.sampling.params import SamplingParams
from qwen_onnx.runners.sampling.request import Request

if TYPE_CHECKING:
    from qwen_onnx.checkpoints.hub import ModelSource
    from qwen_onnx.exports.exporter import ExportSummary
    from qwen_onnx.runners.chat import Chat

__all__ = [
    "EqualLogitsError", "ExportOptions", "FinishReason", "NonFiniteLogitsError", "Request", "SamplingParams",
    "SessionOptions", "Token", "UserError", "export", "load",
]  # fmt: skip

P = ParamSpec("P")


class _Export(Protocol[P]):
    def __call__(
        self, model: str | Path, out: str | Path | None = None, *args: P.args, **options: P.kwargs
    ) -> ExportSummary: ...


def _exporting(kind: Callable[P, ExportOptions]) -> Callable[[Callable[..., Any]], _Export[P]]:
    return lambda function: taking(function, kind)


@_exporting(ExportOptions)
def export(model: str | Path, out: str | Path | None = None, *, options: Given) -> ExportSummary:
    """Export a checkpoint to an ONNX folder; the options are those of `qwen-onnx export`.

    Args:
        model: a Hub id, a checkpoint folder, or `tiny`.
        out: the folder to make; default `./NAME-DTYPE`.

    Raises:
        UserError: anything wrong with the model, the output or an option, in one line; `out` is then as it was.
    """
    from qwen_onnx.exports.exporter import export_model  # here, because it imports onnxscript

    return export_model(str(model), None if out is None else Path(out), made(ExportOptions, options))


@function_options(SessionOptions)
def load(path: str | Path, options: Given) -> Chat:
    """Open a model; the options are those of `qwen-onnx run`.

    Args:
        path: a folder made by `export`; or what `run` takes: the name of an export in the cache, a Hub id, a
            checkpoint folder or `tiny`, which are exported once, into the cache.

    Raises:
        UserError: no such model, a damaged export, a wrong option, or the provider does not start; in one line.
    """
    from qwen_onnx.runners.chat import Chat  # here, because it imports onnxruntime
    from qwen_onnx.runners.model.runner import Runner

    session = made(SessionOptions, options)
    chat = Chat(Runner(_export_folder(path, session), session))
    if chat.runner.engine is not None and not chat.runner.engine.checked:
        from qwen_onnx.checks.engines import verify_engine  # here, because it imports what makes exports

        verify_engine(chat)
    return chat


def _export_folder(path: str | Path, session: SessionOptions) -> Path:
    """The export itself, or the one made of a model."""
    if (Path(path) / MANIFEST_FILE).exists() and str(path) != BUNDLED_MODEL:
        return Path(path)
    from qwen_onnx.exports.cached.find import find_export  # here, because few need it
    from qwen_onnx.exports.cached.options import ModelOptions

    def make(source: ModelSource, out: Path, options: ExportOptions) -> None:
        from qwen_onnx.exports.exporter import export_model  # here, because it imports onnxscript

        export_model(source, out, options)

    return find_export(str(path), ModelOptions(), provider=session.provider, export=make)
