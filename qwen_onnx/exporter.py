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
    build_planned,
    graph_plans,
    graph_spec,
    match_tensors,
    plain_plan,
    quantised_plans,
    verify_depth,
)
from qwen_onnx.graphs.build import StoredParameter, save_graph
from qwen_onnx.hub import ModelSource, resolve_model
from qwen_onnx.memory import peak_memory
from qwen_onnx.quantize import Scheme
from qwen_onnx.runners.chat_template import ChatTemplate
from qwen_onnx.runners.stop_ids import stop_ids
from qwen_onnx.runners.tokenizer import Tokenizer
from qwen_onnx.staging import recover, refuse_output, staged_folder
from qwen_onnx.weights import (
    OutputTensor,
    arrange,
    blocks_of,
    converted,
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
    link: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda written, total: None,
) -> ExportSummary:
    """Export a Hub id, a local checkpoint folder or `tiny` to the folder `out` (default `./NAME-DTYPE`).

    Args:
        model: as a user names it, or already resolved to a folder.
        max_context: rows of the rotary tables; default the model's own context length.
        block_size: weights that share a scale ; default 128 in int8, 64 in int4.
        head_bits: of the embedding and the head in int8 and int4, 4 or 8; default as the layers'.
        link: hard-link the checkpoint's files instead of copying them; only where no byte changes.
        force: replace an earlier export at `out`.
        progress: called with weight bytes written so far and in all.

    Raises:
        UserError: anything wrong with the model or the output; `out` is then as it was.
    """
    started = time.perf_counter()
    blocks = _block_plan(dtype, block_size, head_bits)
    source = resolve_model(model, revision=revision) if isinstance(model, str) else model
    out = out or Path(f"{source.name}-{dtype}")
    recovered = recover(out)
    refuse_output(out, force=force, keep=source.folder)
    try:
        checkpoint = open_checkpoint(source.folder)
        positions = _positions(checkpoint.config, max_context)
        text = _read_text_side(source.folder, checkpoint.config)
        golden = _read_golden(source.folder / _GOLDEN_FILE)
        with staged_folder(out, force=force, keep=source.folder) as folder:
            writer = _Writer(folder, checkpoint, dtype, positions, progress, packed=not link, blocks=blocks)
            tensors = writer.link_weights() if link else writer.place_weights()
            # Graphs are Python's work, weights the disk's: they go side by side.
            with concurrent.futures.ThreadPoolExecutor(1) as beside:
                graphs = beside.submit(writer.write_graphs)
                writer.write_weights(tensors)
                graphs.result()
            writer.copy_side_files()
            # Golden ids are those of the checkpoint's weights, not of what is left of them in a few bits.
            golden = None if blocks else golden and golden.within(positions)
            manifest = _manifest(source, writer, text.eos_token_ids, golden)
            contract.write_manifest(folder, manifest)
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}") from None
    notes = (*recovered, *checkpoint.notes, *text.notes)
    return ExportSummary(out, manifest, notes, time.perf_counter() - started, peak_memory())


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
        *,
        packed: bool,
        blocks: BlockPlan | None,
    ) -> None:
        self.folder, self.checkpoint, self.dtype, self.positions = folder, checkpoint, dtype, positions
        self.files: dict[str, FileSpec] = {}
        self.graphs: list[GraphSpec] = []
        self.places: dict[str, StoredParameter] = {}
        self._progress = progress
        verify_depth(checkpoint)
        config = checkpoint.config
        self._plans = quantised_plans(config, blocks) if blocks else graph_plans(config, dtype, packed=packed)
        self._rotary = rotary_tensors(config, positions)
        plain = build_planned(plain_plan(), config, positions)
        match_tensors(plain, checkpoint, {tensor.name for tensor in self._rotary})
        self.quantised: dict[str, Blocks] = {}
        if blocks is not None:
            found = {name: blocks_of(tensor, blocks) for name, tensor in checkpoint.tensors.items()}
            self.quantised = {name: own for name, own in found.items() if own is not None}

    def place_weights(self) -> list[OutputTensor]:
        """What the weights file will hold, and where; nothing is written yet."""
        stored = DTYPES.get(self.dtype, "F32")
        tensors: list[OutputTensor] = []
        for name, tensor in self.checkpoint.tensors.items():
            own = self.quantised.get(name)
            tensors += quantised(tensor, own) if own else [converted(tensor, stored)]
        tensors = arrange([*tensors, *self._rotary])
        self.places |= places_in(contract.WEIGHTS_FILE, tensors)
        if self.quantised and self.checkpoint.config.tie_word_embeddings:
            # Two names for the same bytes: the operators of head and embedding see them in different shapes.
            self.places["lm_head.qweight"] = self.places["model.embed_tokens.qweight"]
        return tensors

    def link_weights(self) -> list[OutputTensor]:
        """Link the checkpoint's files; what is left to be written beside them."""
        stored = DTYPES.get(self.dtype, self.dtype)
        tensors = self.checkpoint.tensors
        if other := next((tensor for tensor in tensors.values() if tensor.dtype != stored), None):
            raise UserError(
                f"--link: {other.file.name} holds {other.name} as {other.dtype.lower()}, not {self.dtype}; "
                "its bytes would change, so drop --link or choose that dtype"
            )
        for file in sorted({tensor.file for tensor in tensors.values()}):
            if file.name == contract.EXTRA_FILE:
                raise UserError(f"--link: {file} has the name of a file that an export adds; drop --link")
            try:
                # The Hub's cache is made of symlinks, and ONNX Runtime follows none out of the folder.
                os.link(file.resolve(), self.folder / file.name)
            except OSError as error:
                raise UserError(f"--link: {file}: {error.strerror or error}; drop --link to copy") from None
            self.files[file.name] = hash_file(self.folder / file.name)
        self.places |= stored_parameters(tensors)
        self.places |= places_in(contract.EXTRA_FILE, self._rotary)
        return self._rotary

    def write_weights(self, tensors: list[OutputTensor]) -> None:
        """The one file that is written, in pieces."""
        name = self.places[tensors[0].name].file
        total = sum(tensor.nbytes for tensor in tensors)
        free = shutil.disk_usage(self.folder).free
        if total > free:
            raise UserError(f"{self.folder.parent}: {free:,} bytes are free, the weights need {total:,}")
        written = 0

        def count(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            self._progress(written, total)

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
        raise UserError(f"--max-context {max_context}: the model has {config.context_length} positions")
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
    source: ModelSource, writer: _Writer, eos_token_ids: tuple[int, ...], golden: Golden | None
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
    )


def hash_file(path: Path) -> FileSpec:
    """Size and sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return FileSpec(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
