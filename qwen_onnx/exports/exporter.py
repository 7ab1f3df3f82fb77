"""A checkpoint into an exported folder: verify everything, then write weights, graphs and manifest beside OUT."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from qwen_onnx.checkpoints.checkpoint import Checkpoint, open_checkpoint
from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.constant_tensors import constant_tensors, some
from qwen_onnx.checkpoints.hub import ModelSource, resolve_model
from qwen_onnx.checkpoints.safetensors_file import StoredTensor
from qwen_onnx.contract.json_file import from_json, read_json
from qwen_onnx.contract.manifest import (
    FORMAT_VERSION,
    MIN_ONNXRUNTIME,
    Golden,
    Manifest,
    is_weights,
    write_manifest,
)  # fmt: skip
from qwen_onnx.errors import UserError, counted, option
from qwen_onnx.exports.calibrated import Calibrating, TextSide, calibrated
from qwen_onnx.exports.layouts.known import chosen_layout, output_folder
from qwen_onnx.exports.layouts.layout import Layout
from qwen_onnx.exports.options import ExportOptions, export_positions
from qwen_onnx.exports.panels import verified_panels
from qwen_onnx.exports.plan import ExportKind
from qwen_onnx.exports.publish.output_folder import calibration_folder
from qwen_onnx.exports.publish.staging import recover, refuse_output, staged_folder
from qwen_onnx.exports.publish.trial import try_export
from qwen_onnx.exports.quality import beyond, measure_quality
from qwen_onnx.exports.quantization.text import held_out_ids
from qwen_onnx.exports.writer import Writer
from qwen_onnx.memory import peak_memory
from qwen_onnx.runners.runtime.integrity import sample
from qwen_onnx.runners.runtime.machine import free_memory
from qwen_onnx.runners.sampling.generation_config import generation_notes
from qwen_onnx.runners.text.eos_ids import eos_ids
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer, has_tokenizer

Progress = Callable[[int, int], None]
"""Told weight bytes written so far and in all."""

_GOLDEN_FILE = "golden.json"
_COPIES = 3  # of the weights, in memory: a session repacks them
_PACKAGES = ("qwen-onnx", "numpy", "onnx", "onnx-ir", "onnxscript", "ml_dtypes")


@dataclasses.dataclass(frozen=True)
class ExportSummary:
    """What an export made, and what it took."""

    folder: Path
    manifest: Manifest
    notes: tuple[str, ...]
    seconds: float
    peak_memory: int | None
    """Largest resident size of the process before the export was tried, in bytes; None where it is not known."""


def export_model(
    model: str | ModelSource,
    out: Path | None,
    options: ExportOptions,
    *,
    progress: Progress = lambda written, total: None,
    calibrating: Calibrating = lambda done, seconds: None,
) -> ExportSummary:
    """Export a model to the folder `out`; None is `output_folder`'s.

    Args:
        model: a Hub id, a local checkpoint folder or `tiny`; or one that is resolved to a folder already.

    Raises:
        UserError: anything wrong with the model or the output; `out` is then as it was.
    """
    started = time.perf_counter()
    layout, target = chosen_layout(options)
    source = resolve_model(model, revision=options.revision) if isinstance(model, str) else model
    out = output_folder(out, source.name, options)
    recovered = recover(out)
    refuse_output(out, force=options.force, keep=source.folder)
    try:
        checkpoint = open_checkpoint(source.folder)
        kind = _kind(checkpoint.config, options, layout, target)
        positions = export_positions(checkpoint.config, options.max_context)
        text = _read_text_side(source.folder, checkpoint.config)
        said = generation_notes(source.folder)
        golden = _read_golden(source.folder / _GOLDEN_FILE)
        with staged_folder(out, force=options.force, keep=source.folder) as staged:
            layout.write_around(staged, source.name)
            writer = Writer(staged / layout.inside, checkpoint, kind, positions, progress)
            constant_notes = _verify_told_apart(checkpoint) if options.check else []
            with calibrated(
                checkpoint, options, text, folder=calibration_folder(out), progress=calibrating
            ) as ready:
                if ready.plan is not None:
                    writer.quantize_as(ready.plan)
                _write_files(writer, link=options.link, calibrated=ready.tensors)
            layout_notes = writer.write_layout(text.eos_token_ids)
            checkpoint.verify_unchanged()
            # Golden ids are those of the checkpoint's weights, not of what is left of them in a few bits.
            golden = None if kind.quant else golden and golden.within(positions)
            manifest = _manifest(source, writer, text.eos_token_ids, golden, target)
            manifest = dataclasses.replace(manifest, calibration=ready.calibration)
            write_manifest(writer.folder, manifest)
            # Taken before: pages of weights that are mapped to be tried would count, and are free to go.
            peak = peak_memory()
            tried = try_export(writer.folder, manifest, out=out / layout.inside) if options.check else []
            if options.check and kind.quant and text.tokenizer and not tried:
                manifest, lost = _with_quality(writer.folder, manifest, checkpoint, text)
                tried = [*tried, *lost]
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
    notes = (
        *recovered, *checkpoint.notes, *constant_notes, *text.notes, *said, *ready.notes, *layout_notes, *tried,
    )  # fmt: skip
    return ExportSummary(out / layout.inside, manifest, notes, time.perf_counter() - started, peak)


def _verify_told_apart(checkpoint: Checkpoint) -> list[str]:
    """Notes on tensors of one number.

    Raises:
        UserError: one of them is such that no answer could mean anything.
    """
    constants = constant_tensors(checkpoint.tensors.values())
    if essential := [each for each in constants if each.is_essential]:
        raise UserError(
            f"{essential[0].tensor.file}: {some(essential)}: no answer of this model could mean anything; save or "
            f"download it again, or {option('check', False)} to export it all the same"
        )
    if not constants:
        return []
    return [f"{checkpoint.folder}: {counted(len(constants), 'tensor')} of one number: {some(constants)}"]


def _with_quality(
    folder: Path, manifest: Manifest, checkpoint: Checkpoint, text: TextSide
) -> tuple[Manifest, list[str]]:
    """The manifest with what quantizing cost, and what is to be said of it."""
    assert text.tokenizer is not None
    windows = held_out_ids(text.tokenizer, text.template, context_length=manifest.context_length)
    if not len(windows):
        return manifest, []
    needed = _COPIES * sum(spec.size for name, spec in manifest.files.items() if is_weights(name))
    if (free := free_memory()) < needed:
        return manifest, [
            f"quality: not measured: about {needed:,} bytes of memory are wanted, {free:,} are free"
        ]
    quality = measure_quality(folder, checkpoint, windows)
    manifest = dataclasses.replace(manifest, quality=quality)
    write_manifest(folder, manifest)
    lost = beyond(manifest.dtype, quality)
    return manifest, [] if lost is None else [lost]


def _write_files(writer: Writer, *, link: bool, calibrated: Mapping[str, StoredTensor]) -> None:
    parts = writer.link_weights() if link else writer.place_weights(calibrated)
    # Graphs are Python's work, weights the disk's: they go side by side.
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        graphs = beside.submit(writer.write_graphs)
        writer.write_weights(parts)
        graphs.result()
    writer.copy_side_files()


def _kind(config: QwenConfig, options: ExportOptions, layout: Layout, target: str) -> ExportKind:
    """What decides the graphs."""
    return ExportKind(
        options.dtype,
        layout,
        portable=target == "portable",
        split=options.split,
        quant=options.quant,
        panel_rows=verified_panels(config) if options.in_panels else None,
        packed=not options.link,
    )


def _read_text_side(folder: Path, config: QwenConfig) -> TextSide:
    """The tokenizer must fit the embedding, and the ids that end an answer must be readable now, not later."""
    if not has_tokenizer(folder):
        note = f"{folder}: no tokenizer.json; the export runs with --prompt-ids only"
        return TextSide(None, None, tuple(sorted(eos_ids(folder, None, None))), (note,))
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.size > config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer (tokenizer.json, added tokens) has ids up to {tokenizer.size - 1}, the "
            f"embedding only {config.vocab_size} rows"
        )
    template = ChatTemplate.from_folder(folder)
    notes = () if template else (f"{folder}: no chat template; use `run --raw`",)
    return TextSide(tokenizer, template, tuple(sorted(eos_ids(folder, tokenizer, template))), notes)


def _read_golden(path: Path) -> Golden | None:
    if not path.exists():
        return None
    try:
        return from_json(Golden, read_json(path))
    except TypeError as error:
        raise UserError(f"{path}: not the golden ids of a model ({error})") from None


def _manifest(
    source: ModelSource, writer: Writer, eos_token_ids: tuple[int, ...], golden: Golden | None, target: str
) -> Manifest:
    config = writer.checkpoint.config
    weights = sorted(name for name in writer.files if is_weights(name))
    return Manifest(
        format_version=FORMAT_VERSION,
        model_id=source.model_id,
        revision=source.revision,
        architecture=config.architecture,
        dtype=writer.kind.dtype,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context_length=writer.positions,
        eos_token_ids=eos_token_ids,
        min_onnxruntime=MIN_ONNXRUNTIME,
        packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        graphs=tuple(writer.graphs),
        caches=writer.caches,
        files=dict(sorted(writer.files.items())),
        quantized=writer.quantized,
        golden=golden,
        target=target,
        layout=writer.kind.layout.name,
        panel_rows=writer.kind.panel_rows,
        samples={name: sample(writer.folder / name) for name in weights},
    )
