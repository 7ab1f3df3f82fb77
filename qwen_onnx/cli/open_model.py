"""MODEL of `qwen-onnx run`: an export, or a model that is exported once, into the user's cache."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.hub import DEFAULT_MODEL, ModelSource, as_path, resolve_model
from qwen_onnx.cli.export_cache import cache_folder, cached_export_path
from qwen_onnx.cli.run_options import RunOptions
from qwen_onnx.contract import DTYPES
from qwen_onnx.contract.manifest import MANIFEST_FILE, read_manifest
from qwen_onnx.errors import ExportInProgressError, UserError
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.exports.publish.staging import recover
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.panels import suits_processor
from qwen_onnx.runners.runtime.providers import missing_library
from qwen_onnx.runners.runtime.session import ONE_DISTRIBUTION, installed_distributions

# Rows of a panel where --weights-order panels was measured to be faster; of 8 rows nobody knows (bench/README.md).
_MEASURED_PANELS = 16
_LOOK_AGAIN = 0.2  # seconds


def open_chat(model: str, options: RunOptions, session: SessionOptions) -> Chat:
    """The model, ready to answer; what is worth saying of it is said on stderr.

    Raises:
        UserError: anything wrong with the model or the options.
    """
    folder = _export_folder(model, options, session)
    held = read_manifest(folder).dtype
    if options.dtype not in (None, held):
        raise UserError(f"{folder}: holds {held}, --dtype {options.dtype} asked for")
    chat = Chat(Runner(folder, session))
    if session.provider == "auto":
        print(f"provider: {chat.runner.provider}", file=sys.stderr)
    if ignored := chat.generation_config.ignored:
        print(f"note: not supported, of generation_config.json: {', '.join(ignored)}", file=sys.stderr)
    verify_engine_of(chat)
    if len(both := installed_distributions()) > 1:
        print(f"warning: {' and '.join(both)} overwrite each other; {ONE_DISTRIBUTION}", file=sys.stderr)
    return chat


def verify_engine_of(chat: Chat) -> None:
    """A TensorRT engine is compared with the CPU before it is used.

    Raises:
        UserError: it gives other tokens.
    """
    if chat.runner.engine is None:
        return
    print(chat.runner.engine.describe(), file=sys.stderr)
    if not chat.runner.engine.checked:
        from qwen_onnx.checks.engines import verify_engine  # here, because it imports what makes exports

        print(verify_engine(chat), file=sys.stderr)


def _export_folder(model: str, options: RunOptions, session: SessionOptions) -> Path:
    """The export itself, or the one made of a model, once, in the user's cache."""
    given = as_path(model)
    if model and not (given / MANIFEST_FILE).exists():
        for note in recover(given):  # a killed `export --force` may have left it displaced
            print(f"note: {note}", file=sys.stderr)
    if model and (given / MANIFEST_FILE).exists():
        if options.revision is not None:
            raise UserError(f"{given}: an export; --revision {options.revision} is for models on the Hub")
        return given

    source = resolve_model(model or DEFAULT_MODEL, revision=options.revision)
    provider, cache = _expected_provider(session.provider), cache_folder(options.cache_dir)
    dtype = options.dtype or _default_dtype(source, provider)
    in_panels = f"f32-panels{_MEASURED_PANELS}"
    kinds = (in_panels, dtype) if (dtype, provider) == ("f32", "cpu") else (dtype,)
    for kind in kinds:
        path = cached_export_path(cache, source, kind)
        if (path / MANIFEST_FILE).exists() and suits_processor(path, read_manifest(path)):
            return path

    from qwen_onnx.exports.panels import possible_panels  # here, because it imports what makes graphs

    path, weights_order = cached_export_path(cache, source, dtype), "checkpoint"
    if in_panels in kinds and possible_panels(open_checkpoint(source.folder).config) == _MEASURED_PANELS:
        found = cached_export_path(cache, source, in_panels)
        if not (found / MANIFEST_FILE).exists():  # or it is damaged: a plain one does as well
            path, weights_order = found, "panels"
    print(f"exporting {source.model_id} as {dtype}, once, to {path}", file=sys.stderr)
    # For its whole context: --max-context is the runner's here.
    export_once(source, path, ExportOptions(dtype=dtype, weights_order=weights_order))
    return path


def export_once(source: ModelSource, path: Path, options: ExportOptions) -> None:
    """Make the export, or wait for the process that is making it.

    Raises:
        UserError: it cannot be made.
    """
    from qwen_onnx.cli.progress import export_with_progress

    waiting = False
    while True:
        try:
            export_with_progress(source, path, options)
            return
        except UserError as error:
            if (path / MANIFEST_FILE).exists():  # published meanwhile
                return
            if not isinstance(error, ExportInProgressError):
                raise
        if not waiting:
            print("another process is exporting it: waiting", file=sys.stderr)
        waiting = True
        time.sleep(_LOOK_AGAIN)


def _expected_provider(asked: str) -> str:
    """What `auto` will come to."""
    if asked != "auto":
        return asked
    return "cpu" if missing_library("cuda") else "cuda"


def _default_dtype(source: ModelSource, provider: str) -> str:
    if provider != "cuda":
        return "f32"
    embedding = open_checkpoint(source.folder).tensors.get("model.embed_tokens.weight")
    return next((dtype for dtype, held in DTYPES.items() if embedding and embedding.dtype == held), "f32")
