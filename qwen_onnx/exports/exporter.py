"""A checkpoint into an exported folder: verify everything, then write weights, graphs and manifest beside OUT."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.hub import ModelSource, resolve_model
from qwen_onnx.contract import EXPORT_DTYPES, QUANTISED, BlockPlan, Blocks
from qwen_onnx.errors import UserError
from qwen_onnx.exports.layouts.known import choose_layout
from qwen_onnx.exports.panels import verified_panels
from qwen_onnx.exports.plan import (
    graph_plans,
    panel_plans,
    portable_plans,
    quantised_plans,
)
from qwen_onnx.exports.publish.staging import recover, refuse_output, staged_folder
from qwen_onnx.exports.quantize import Scheme
from qwen_onnx.exports.writer import Writer
from qwen_onnx.json_file import read_json
from qwen_onnx.manifest import (
    FORMAT_VERSION,
    MIN_ONNXRUNTIME,
    Golden,
    Manifest,
    from_json,
    is_weights,
    write_manifest,
)
from qwen_onnx.memory import peak_memory
from qwen_onnx.runners.runtime.integrity import sample
from qwen_onnx.runners.text.eos_ids import stop_ids
from qwen_onnx.runners.text.template.chat_template import ChatTemplate
from qwen_onnx.runners.text.tokenizer import Tokenizer

# By measurement (bench/README.md).
DEFAULT_BLOCK_SIZES = {"int8": 128, "int4": 64}
_GOLDEN_FILE = "golden.json"
_PACKAGES = ("qwen-onnx", "numpy", "onnx", "onnx-ir", "onnxscript", "ml_dtypes")


@dataclasses.dataclass(frozen=True)
class ExportSummary:
    """What an export made, and what it took."""

    folder: Path
    manifest: Manifest
    notes: tuple[str, ...]
    seconds: float
    peak_memory: int | None
    """Largest resident size of the process, in bytes; None where the system does not say."""


def export_model(
    model: str | ModelSource,
    out: Path | None = None,
    *,
    dtype: str = "f32",
    revision: str | None = None,
    max_context: int | None = None,
    block_size: int | None = None,
    head_bits: int | None = None,
    head_block_size: int | None = None,
    target: str | None = None,
    layout: str = "plain",
    split: bool = False,
    link: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda written, total: None,
) -> ExportSummary:
    """Export a Hub id, a local checkpoint folder or `tiny` to the folder `out` (see `_default_name`).

    Args:
        model: as a user names it, or already resolved to a folder.
        max_context: rows of the rotary tables; default the model's own context length.
        block_size: weights that share a scale ; default 128 in int8, 64 in int4.
        head_bits: of the embedding and the head in int8 and int4, 4 or 8; default as the layers'.
        head_block_size: as `block_size`, of the embedding and the head; default as the layers'.
        target: `onnxruntime`, or `portable` for any runtime; default the layout's.
        layout: who finds the files where they are, one of contract.LAYOUTS.
        split: of a portable export, `prefill.onnx` and `decode.onnx` too.
        link: hard-link the checkpoint's files instead of copying them; only where no byte changes.
        force: replace an earlier export at `out`.
        progress: called with weight bytes written so far and in all.

    Raises:
        UserError: anything wrong with the model or the output; `out` is then as it was.
    """
    started = time.perf_counter()
    blocks = _block_plan(dtype, block_size, head_bits, head_block_size)
    arranged, target = choose_layout(layout, target, dtype)
    if split and target != "portable":
        raise UserError("--split is for --target portable: others have a decode graph already")
    source = resolve_model(model, revision=revision) if isinstance(model, str) else model
    out = out or Path(_default_name(source.name, dtype, target, layout))
    if arranged.is_repository:  # of several models, of which this is one
        arranged.verify_name(source.name)
        out = out / source.name
    recovered = recover(out)
    refuse_output(out, force=force, keep=source.folder)
    try:
        checkpoint = open_checkpoint(source.folder)
        positions = _positions(checkpoint.config, max_context)
        panel_rows = verified_panels(checkpoint.config) if layout == "cpu" else None
        text = _read_text_side(source.folder, checkpoint.config)
        golden = _read_golden(source.folder / _GOLDEN_FILE)
        with staged_folder(out, force=force, keep=source.folder) as staged:
            folder = staged / arranged.inside
            arranged.write_around(staged, source.name)
            if target == "portable":
                plans = portable_plans(dtype, arranged, split=split)
            elif panel_rows:
                plans = panel_plans(panel_rows)
            elif blocks:
                plans = quantised_plans(checkpoint.config, blocks)
            else:
                plans = graph_plans(checkpoint.config, dtype, packed=not link)
            writer = Writer(
                folder, checkpoint, dtype, positions, progress, arranged, plans, blocks, panel_rows
            )
            parts = writer.link_weights() if link else writer.place_weights()
            # Graphs are Python's work, weights the disk's: they go side by side.
            with concurrent.futures.ThreadPoolExecutor(1) as beside:
                graphs = beside.submit(writer.write_graphs)
                writer.write_weights(parts)
                graphs.result()
            writer.copy_side_files()
            layout_notes = writer.write_layout(text.eos_token_ids)
            checkpoint.verify_unchanged()
            # Golden ids are those of the checkpoint's weights, not of what is left of them in a few bits.
            golden = None if blocks else golden and golden.within(positions)
            manifest = _manifest(source, writer, text.eos_token_ids, golden, target)
            write_manifest(folder, manifest)
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
    notes = (*recovered, *checkpoint.notes, *text.notes, *layout_notes)
    return ExportSummary(out / arranged.inside, manifest, notes, time.perf_counter() - started, peak_memory())


class _TextSide(NamedTuple):
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]


def _default_name(model: str, dtype: str, target: str, layout: str) -> str:
    """NAME-DTYPE, and behind it what else was asked for."""
    kind = layout if layout != "plain" else "portable" if target == "portable" else ""
    return f"{model}-{dtype}" + (f"-{kind}" if kind else "")


def _block_plan(
    dtype: str, block_size: int | None, head_bits: int | None, head_block_size: int | None
) -> BlockPlan | None:
    """How matrices are quantised; None where they are not."""
    if dtype not in EXPORT_DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; choose one of {', '.join(EXPORT_DTYPES)}")
    if dtype not in QUANTISED:
        given = {"--block-size": block_size, "--head-bits": head_bits, "--head-block-size": head_block_size}
        for option, value in given.items():
            if value is not None:
                raise UserError(f"{option} is for int8 and int4, not {dtype}")
        return None
    layers = Blocks(QUANTISED[dtype], DEFAULT_BLOCK_SIZES[dtype] if block_size is None else block_size)
    head = Blocks(
        layers.bits if head_bits is None else head_bits,
        layers.block_size if head_block_size is None else head_block_size,
    )
    for blocks in (layers, head):
        Scheme(blocks.bits, blocks.block_size)  # which says what is wrong with it
    return BlockPlan(layers, head)


def _positions(config: QwenConfig, max_context: int | None) -> int:
    if max_context is None:
        return config.context_length
    if not 0 < max_context <= config.context_length:
        raise UserError(
            f"--max-context {max_context}: 1 to {config.context_length} wanted, the model's positions"
        )
    return max_context


def _read_text_side(folder: Path, config: QwenConfig) -> _TextSide:
    """The tokenizer must fit the embedding, and the ids that end an answer must be readable now, not later."""
    if not (folder / "tokenizer.json").exists():
        note = f"{folder}: no tokenizer.json; the export runs with --prompt-ids only"
        return _TextSide(tuple(sorted(stop_ids(folder, None, None))), (note,))
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.size > config.vocab_size:
        raise UserError(
            f"{folder / 'tokenizer.json'}: has ids up to {tokenizer.size - 1}, the embedding only "
            f"{config.vocab_size} rows"
        )
    template = ChatTemplate.from_folder(folder)
    notes = () if template else (f"{folder}: no chat template; use `run --raw`",)
    return _TextSide(tuple(sorted(stop_ids(folder, tokenizer, template))), notes)


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
    return Manifest(
        format_version=FORMAT_VERSION,
        model_id=source.model_id,
        revision=source.revision,
        architecture=config.architecture,
        dtype=writer.dtype,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context_length=writer.positions,
        eos_token_ids=eos_token_ids,
        min_onnxruntime=MIN_ONNXRUNTIME,
        packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        graphs=tuple(writer.graphs),
        files=dict(sorted(writer.files.items())),
        quantised=writer.quantised,
        golden=golden,
        target=target,
        layout=writer.layout.name,
        panel_rows=writer.panel_rows,
        samples={name: sample(writer.folder / name) for name in sorted(writer.files) if is_weights(name)},
    )
