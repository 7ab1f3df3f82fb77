"""From a model's name to a page that answers, until Ctrl-C."""

from __future__ import annotations

import math
import webbrowser
from pathlib import Path

from qwen_onnx.checkpoints import DEFAULT_MODEL
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.hub import resolve_model
from qwen_onnx.cli.open_model import DownloadQuestion, export_source
from qwen_onnx.cli.terminal.output import show, tell
from qwen_onnx.cli.web.options import WebOptions
from qwen_onnx.contract.manifest import MANIFEST_FILE
from qwen_onnx.errors import UserError
from qwen_onnx.exports.cached.find import export_once, exported
from qwen_onnx.exports.cached.folder import cache_folder, cached_export_path
from qwen_onnx.exports.cached.options import ModelOptions
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.web.server import HOST, PageServer
from qwen_onnx.web.site import Site, refuse_size

DEFAULT_PORT = 8420
"""Always the same where it is free: a browser keeps conversations by address."""
_BYTES = {"f32": 4, "f16": 2}


def serve(model: str, options: WebOptions, of_model: ModelOptions) -> None:
    """Serve the page; its address is the only line on stdout.

    Raises:
        UserError: anything wrong with the model, or the port is taken.
    """
    site = Site.of(portable_export(model, of_model))
    with _bound(site, options.port) as server:
        show(server.address)
        tell("Ctrl-C ends it; only this machine can reach it, and what you write stays here")
        if options.open_browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            tell("", "ended")


def portable_export(model: str, asked: ModelOptions) -> Path:
    """The export itself; or a portable one of the model, made once, in the user's cache.

    Raises:
        UserError: anything wrong with the model, or options that an export has no use for.
    """
    if asked.dtype not in (None, *_BYTES):
        raise UserError(f"--dtype {asked.dtype}: a page computes in f32 or f16")
    if (found := exported(model, asked, tell)) is not None:
        if asked.dtype is not None:
            raise UserError(f"{found}: an export; --dtype {asked.dtype} is for models that are none yet")
        return found
    dtype = asked.dtype or "f32"
    question = DownloadQuestion(dtypes=(dtype,), yes=asked.yes)
    source = resolve_model(
        model or DEFAULT_MODEL, revision=asked.revision, before_download=question, tell=tell
    )
    path = cached_export_path(cache_folder(asked.cache_dir), source, f"{dtype}-portable")
    if not (path / MANIFEST_FILE).exists():
        tensors = open_checkpoint(source.folder).tensors.values()
        refuse_size(source.model_id, _BYTES[dtype] * sum(math.prod(tensor.shape) for tensor in tensors))
        tell(f"exporting {source.model_id} as portable {dtype}, once, to {path}")
        export_once(export_source, source, path, ExportOptions(dtype=dtype, target="portable"), tell)
    return path


def _bound(site: Site, port: int | None) -> PageServer:
    try:
        return PageServer(site, DEFAULT_PORT if port is None else port)
    except OSError as error:
        if port is not None:
            raise UserError(f"{HOST}:{port}: {error.strerror or error}; give another --port") from None
    tell(f"note: port {DEFAULT_PORT} is taken; conversations of that address are not shown at this one")
    return PageServer(site, 0)
