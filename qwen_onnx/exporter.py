"""A checkpoint into an exported folder: verify everything, then write weights, graphs and manifest beside OUT."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from qwen_onnx import contract
from qwen_onnx.checkpoint import SIDE_FILES, Checkpoint, open_checkpoint
from qwen_onnx.config import QwenConfig
from qwen_onnx.contract import (
    DTYPES,
    EXPORT_DTYPES,
    QUANTISED,
    BlockPlan,
    Blocks,
    FileSpec,
    Golden,
    GraphSpec,
    Manifest,
    read_json,
)
from qwen_onnx.errors import UserError
from qwen_onnx.graph_plan import (
    GraphPlan,
    build_planned,
    graph_plans,
    graph_spec,
    match_tensors,
    plain_plan,
    portable_plans,
    quantised_plans,
    verify_depth,
)
from qwen_onnx.graphs.build import StoredParameter, save_graph
from qwen_onnx.hub import ModelSource, resolve_model
from qwen_onnx.layouts.known import PORTABLE_DTYPES, choose_layout
from qwen_onnx.layouts.layout import Exported, Layout
from qwen_onnx.memory import peak_memory
from qwen_onnx.quantize import Scheme
from qwen_onnx.runners.chat_template import ChatTemplate
from qwen_onnx.runners.stop_ids import stop_ids
from qwen_onnx.runners.tokenizer import Tokenizer
from qwen_onnx.runners.verify import sample
from qwen_onnx.staging import recover, refuse_output, staged_folder
from qwen_onnx.weights import (
    OutputTensor,
    arrange,
    blocks_of,
    converted,
    in_files,
    places_in,
    quantised,
    rotary_tensors,
    stored_parameters,
    write_safetensors,
)

# By measurement (bench/README.md). A head of 4 bits has blocks of 32: a wrong token costs more than a wrong nuance.
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
    blocks = _block_plan(dtype, block_size, head_bits)
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
        text = _read_text_side(source.folder, checkpoint.config)
        golden = _read_golden(source.folder / _GOLDEN_FILE)
        with staged_folder(out, force=force, keep=source.folder) as staged:
            folder = staged / arranged.inside
            arranged.write_around(staged, source.name)
            if target == "portable":
                plans = portable_plans(dtype, arranged, split=split)
            elif blocks:
                plans = quantised_plans(checkpoint.config, blocks)
            else:
                plans = graph_plans(checkpoint.config, dtype, packed=not link)
            writer = _Writer(folder, checkpoint, dtype, positions, progress, arranged, plans, blocks)
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
            contract.write_manifest(folder, manifest)
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
    notes = (*recovered, *checkpoint.notes, *text.notes, *layout_notes)
    return ExportSummary(out / arranged.inside, manifest, notes, time.perf_counter() - started, peak_memory())


_Parts = dict[str, list[OutputTensor]]
"""What is written to which weights file."""


class _TextSide(NamedTuple):
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]


class _Writer:
    """One export in the making: its folder, what lies in it so far, and where each tensor went."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        dtype: str,
        positions: int,
        progress: Callable[[int, int], None],
        layout: Layout,
        plans: list[GraphPlan],
        blocks: BlockPlan | None,
    ) -> None:
        (folder / layout.graph_folder).mkdir(parents=True, exist_ok=True)
        self.layout, self._plans = layout, plans
        self.folder, self.checkpoint, self.dtype, self.positions = folder, checkpoint, dtype, positions
        self.files: dict[str, FileSpec] = {}
        self.graphs: list[GraphSpec] = []
        self.places: dict[str, StoredParameter] = {}
        self._progress = progress
        verify_depth(checkpoint)
        config = checkpoint.config
        self._rotary = rotary_tensors(config, positions)
        plain = build_planned(plain_plan(), config, positions)
        match_tensors(plain, checkpoint, {tensor.name for tensor in self._rotary})
        self.quantised: dict[str, Blocks] = {}
        if blocks is not None:
            found = {name: blocks_of(tensor, blocks) for name, tensor in checkpoint.tensors.items()}
            self.quantised = {name: own for name, own in found.items() if own is not None}

    def place_weights(self) -> _Parts:
        """What each weights file will hold, and where; nothing is written yet."""
        stored = DTYPES.get(self.dtype, "F32")
        tensors: list[OutputTensor] = []
        for name, tensor in self.checkpoint.tensors.items():
            own = self.quantised.get(name)
            tensors += quantised(tensor, own) if own else [converted(tensor, stored)]
        cut = in_files(arrange([*tensors, *self._rotary]), self.layout.largest_file)
        parts = {self.layout.weights_file(self.dtype, index): part for index, part in enumerate(cut)}
        for name, part in parts.items():
            self.places |= places_in(name, part)
        if self.quantised and self.checkpoint.config.tie_word_embeddings:
            # Two names for the same bytes: the operators of head and embedding see them in different shapes.
            self.places["lm_head.qweight"] = self.places["model.embed_tokens.qweight"]
        return parts

    def link_weights(self) -> _Parts:
        """Link the checkpoint's files; what is left to be written beside them."""
        stored = DTYPES.get(self.dtype, self.dtype)
        tensors = self.checkpoint.tensors
        if other := next((tensor for tensor in tensors.values() if tensor.dtype != stored), None):
            raise UserError(
                f"--link: {other.file.name} holds {other.name} as {other.dtype.lower()}, not {self.dtype}; "
                "its bytes would change, so drop --link or choose that dtype"
            )
        names: dict[Path, str] = {}
        for file in sorted({tensor.file for tensor in tensors.values()}):
            in_place = not self.layout.graph_folder
            name = names[file] = file.name if in_place else self.layout.weights_file(self.dtype, len(names))
            if name == contract.EXTRA_FILE:
                raise UserError(f"--link: {file} has the name of a file that an export adds; drop --link")
            try:
                # The Hub's cache is made of symlinks, and ONNX Runtime follows none out of the folder.
                os.link(file.resolve(), self.folder / name)
            except OSError as error:
                raise UserError(f"--link: {file}: {error.strerror or error}; drop --link to copy") from None
            self.files[name] = hash_file(self.folder / name)
        self.places |= stored_parameters(tensors, names)
        extra = contract.EXTRA_FILE
        if self.layout.graph_folder:
            extra = self.layout.weights_file(self.dtype, len(names))
        self.places |= places_in(extra, self._rotary)
        return {extra: self._rotary}

    def write_weights(self, parts: _Parts) -> None:
        """What is not linked, in pieces."""
        total = sum(tensor.nbytes for part in parts.values() for tensor in part)
        free = shutil.disk_usage(self.folder).free
        if total > free:
            raise UserError(f"{self.folder.parent}: {free:,} bytes are free, the weights need {total:,}")
        written = 0

        def count(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            self._progress(written, total)

        for name, tensors in parts.items():
            self.files[name] = write_safetensors(self.folder / name, tensors, progress=count)

    def write_graphs(self) -> None:
        """Needs the weights' places, not the weights."""
        for plan in self._plans:
            model = build_planned(plan, self.checkpoint.config, self.positions)
            path = self.folder / plan.file
            save_graph(model, path, self.places)
            self.files[plan.file] = hash_file(path)
            self.graphs.append(graph_spec(plan, model))

    def copy_side_files(self) -> None:
        for name in SIDE_FILES:
            if (file := self.checkpoint.folder / name).is_file():
                shutil.copyfile(file, self.folder / name)
                self.files[name] = hash_file(self.folder / name)

    def _other_counts(self) -> dict[str, int]:
        """Weights files of the same layout in each dtype that it comes in, by the name of the graph."""
        counts = {}
        for dtype in PORTABLE_DTYPES if self.layout.graph_folder else ():
            tensors = [converted(tensor, DTYPES[dtype]) for tensor in self.checkpoint.tensors.values()]
            files = in_files(arrange([*tensors, *self._rotary]), self.layout.largest_file)
            counts[self.layout.graph_file("model", dtype)] = len(files)
        return counts

    def write_layout(self, eos_token_ids: tuple[int, ...]) -> list[str]:
        """The layout's own files; notes for the user."""
        names, notes = self.layout.write(
            Exported(
                self.folder, self.checkpoint.config, self.dtype, self.positions, eos_token_ids,
                model_file=self._plans[0].file,
                weights_files=(own := [name for name in self.files if contract.is_weights(name)]),
                file_counts=self._other_counts() | {self._plans[0].file: len(own)},
            )
        )  # fmt: skip
        self.files |= {name: hash_file(self.folder / name) for name in names}
        return notes


def _default_name(model: str, dtype: str, target: str, layout: str) -> str:
    """NAME-DTYPE, and behind it what else was asked for."""
    kind = layout if layout != "plain" else "portable" if target == "portable" else ""
    return f"{model}-{dtype}" + (f"-{kind}" if kind else "")


def _block_plan(dtype: str, block_size: int | None, head_bits: int | None) -> BlockPlan | None:
    """How matrices are quantised; None where they are not."""
    if dtype not in EXPORT_DTYPES:
        raise UserError(f"dtype {dtype!r} is not known; choose one of {', '.join(EXPORT_DTYPES)}")
    if dtype not in QUANTISED:
        for option, value in (("--block-size", block_size), ("--head-bits", head_bits)):
            if value is not None:
                raise UserError(f"{option} is for int8 and int4, not {dtype}")
        return None
    layers = Blocks(QUANTISED[dtype], DEFAULT_BLOCK_SIZES[dtype] if block_size is None else block_size)
    bits = layers.bits if head_bits is None else head_bits
    head = Blocks(bits, min(32, layers.block_size) if bits == 4 else layers.block_size)
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
        return contract.from_json(Golden, read_json(path))
    except TypeError as error:
        raise UserError(f"{path}: not the golden ids of a model ({error})") from None


def _manifest(
    source: ModelSource, writer: _Writer, eos_token_ids: tuple[int, ...], golden: Golden | None, target: str
) -> Manifest:
    config = writer.checkpoint.config
    return Manifest(
        format_version=contract.FORMAT_VERSION,
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
        min_onnxruntime=contract.MIN_ONNXRUNTIME,
        packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        graphs=tuple(writer.graphs),
        files=dict(sorted(writer.files.items())),
        quantised=writer.quantised,
        golden=golden,
        target=target,
        layout=writer.layout.name,
        samples={
            name: sample(writer.folder / name) for name in sorted(writer.files) if contract.is_weights(name)
        },
    )


def hash_file(path: Path) -> FileSpec:
    """Size and sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return FileSpec(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
