"""MODEL of a command, or of `load`: an export, or a model that is exported once, into the user's cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from qwen_onnx.checkpoints import BUNDLED_MODEL, DEFAULT_MODEL
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.hub import Download, ModelSource, as_path, resolve_model
from qwen_onnx.contract import DTYPES
from qwen_onnx.contract.manifest import MANIFEST_FILE, read_manifest
from qwen_onnx.errors import ExportInProgressError, UserError
from qwen_onnx.exports.cached.folder import cache_folder, cached_export_path, find_by_name
from qwen_onnx.exports.cached.options import ModelOptions
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.exports.publish.staging import recover
from qwen_onnx.runners.runtime.panels import suits_processor
from qwen_onnx.runners.runtime.providers import missing_library

# Rows of a panel where --weights-order panels was measured to be faster; of 8 rows nobody knows (bench/README.md).
_MEASURED_PANELS = 16
_LOOK_AGAIN = 0.2  # seconds

Export = Callable[[ModelSource, Path, ExportOptions], object]
"""Makes an export, as `export_model` does."""


def find_export(
    model: str,
    asked: ModelOptions,
    *,
    provider: str,
    export: Export,
    tell: Callable[[str], None] = lambda line: None,
    before_download: Callable[[Download], None] = lambda download: None,
) -> Path:
    """The folder of the export that is meant, which may have to be made first.

    In this order: the bundled model's name, a folder, the name of an export in the cache, a Hub id.

    Args:
        model: "" is the default model.
        provider: that it is to run on, or `auto`.
        tell: gets what is worth knowing, a line at a time.
        before_download: may refuse it.

    Raises:
        UserError: no such model, or it cannot be exported.
    """
    folder = exported(model, asked, tell)
    if folder is None:
        folder = _of_model(model or DEFAULT_MODEL, asked, provider, export, tell, before_download)
    if asked.dtype not in (None, held := read_manifest(folder).dtype):
        raise UserError(f"{folder}: holds {held}, --dtype {asked.dtype} asked for")
    return folder


def exported(model: str, asked: ModelOptions, tell: Callable[[str], None]) -> Path | None:
    """What is an export already: a folder, or the name of one in the cache; None where it is none.

    Raises:
        UserError: a folder with neither an export nor a checkpoint; or a revision of an export.
    """
    if model in ("", BUNDLED_MODEL):
        return None
    given = as_path(model)
    if not (given / MANIFEST_FILE).exists():
        for note in recover(given):  # a killed `export --force` may have left it displaced
            tell(f"note: {note}")
    found = given if (given / MANIFEST_FILE).exists() else None
    if found is None and given.is_dir() and not (given / "config.json").exists():
        if gguf := next(iter(sorted(given.glob("*.gguf"))), None):
            raise UserError(
                f"{gguf}: GGUF is not read; give the safetensors checkpoint that it was made from"
            )
        raise UserError(
            f"{given}: neither an export ({MANIFEST_FILE} is missing) nor a checkpoint (config.json is missing)"
        )
    if found is None and not given.exists():
        found = find_by_name(cache_folder(asked.cache_dir), model)
    if found is not None and asked.revision is not None:
        raise UserError(f"{model}: an export; --revision {asked.revision} is for models on the Hub")
    return found


def _of_model(
    model: str,
    asked: ModelOptions,
    provider: str,
    export: Export,
    tell: Callable[[str], None],
    before_download: Callable[[Download], None],
) -> Path:
    """The export made of a model, once, in the user's cache."""
    source = resolve_model(model, revision=asked.revision, before_download=before_download, tell=tell)
    provider, cache = _expected_provider(provider), cache_folder(asked.cache_dir)
    dtype = asked.dtype or _default_dtype(source, provider)
    in_panels = f"f32-panels{_MEASURED_PANELS}"
    kinds = (in_panels, dtype) if (dtype, provider) == ("f32", "cpu") else (dtype,)
    for kind in kinds:
        path = cached_export_path(cache, source, kind)
        if (path / MANIFEST_FILE).exists() and suits_processor(path, read_manifest(path)):
            return path

    config = open_checkpoint(source.folder).config  # refused before the next line imports for a second
    from qwen_onnx.exports.cached.size import (  # here: they import what makes graphs
        CONTEXT,
        export_size,
        gigabytes,
    )
    from qwen_onnx.exports.panels import possible_panels

    path, weights_order = cached_export_path(cache, source, dtype), "checkpoint"
    if in_panels in kinds and possible_panels(config) == _MEASURED_PANELS:
        found = cached_export_path(cache, source, in_panels)
        if not (found / MANIFEST_FILE).exists():  # or it is damaged: a plain one does as well
            path, weights_order = found, "panels"
    size = export_size(config, dtype, provider)
    takes = f"{gigabytes(size.disk)} on disk, {gigabytes(size.memory)} in memory"
    tokens = min(CONTEXT, config.context_length)
    tell(f"exporting {source.model_id} as {dtype}, once, to {path}: {takes} with {tokens:,} tokens")
    export_once(export, source, path, ExportOptions(dtype=dtype, weights_order=weights_order), tell)
    return path


def export_once(
    export: Export, source: ModelSource, path: Path, options: ExportOptions, tell: Callable[[str], None]
) -> None:
    """Make the export, or wait for the process that is making it.

    Raises:
        UserError: it cannot be made.
    """
    waiting = False
    while True:
        try:
            export(source, path, options)  # for its whole context: --max-context is the runner's here
            return
        except UserError as error:
            if (path / MANIFEST_FILE).exists():  # published meanwhile
                return
            if not isinstance(error, ExportInProgressError):
                raise
        if not waiting:
            tell("another process is exporting it: waiting")
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
