"""From a model's name to a page that answers, until Ctrl-C."""

from __future__ import annotations

import math
import sys
import webbrowser
from pathlib import Path

from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.hub import as_path, resolve_model
from qwen_onnx.cli.export_cache import cache_folder, cached_export_path
from qwen_onnx.cli.open_model import export_once
from qwen_onnx.cli.web.options import WebOptions
from qwen_onnx.contract.manifest import MANIFEST_FILE
from qwen_onnx.errors import UserError
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.web.server import HOST, PageServer
from qwen_onnx.web.site import Site, refuse_size

DEFAULT_PORT = 8420
"""Always the same where it is free: a browser keeps conversations by address."""
_BYTES = {"f32": 4, "f16": 2}


def serve(model: str, options: WebOptions) -> None:
    """Serve the page; its address is the only line on stdout.

    Raises:
        UserError: anything wrong with the model, or the port is taken.
    """
    site = Site.of(portable_export(model, options))
    with _bound(site, options.port) as server:
        print(server.address, flush=True)
        print("Ctrl-C ends it; nobody else can reach it, and what you write stays here", file=sys.stderr)
        if options.open_browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended", file=sys.stderr)


def portable_export(model: str, options: WebOptions) -> Path:
    """The export itself; or a portable one of the model, made once, in the user's cache.

    Raises:
        UserError: anything wrong with the model, or options that an export has no use for.
    """
    given = as_path(model)
    if (given / MANIFEST_FILE).exists():
        for name, value in (("--revision", options.revision), ("--dtype", options.dtype)):
            if value is not None:
                raise UserError(f"{given}: an export; {name} {value} is for models that are none yet")
        return given
    source = resolve_model(model, revision=options.revision)
    dtype = options.dtype or "f32"
    path = cached_export_path(cache_folder(options.cache_dir), source, f"{dtype}-portable")
    if not (path / MANIFEST_FILE).exists():
        tensors = open_checkpoint(source.folder).tensors.values()
        refuse_size(source.model_id, _BYTES[dtype] * sum(math.prod(tensor.shape) for tensor in tensors))
        print(f"exporting {source.model_id} as portable {dtype}, once, to {path}", file=sys.stderr)
        export_once(source, path, ExportOptions(dtype=dtype, target="portable"))
    return path


def _bound(site: Site, port: int | None) -> PageServer:
    try:
        return PageServer(site, DEFAULT_PORT if port is None else port)
    except OSError as error:
        if port is not None:
            raise UserError(f"{HOST}:{port}: {error.strerror or error}; give another --port") from None
    print(
        f"note: port {DEFAULT_PORT} is taken; conversations of that address are not shown at this one",
        file=sys.stderr,
    )
    return PageServer(site, 0)
