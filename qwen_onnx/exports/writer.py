"""One export as it is written: weights, graphs and side files into its folder, and the account of them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from qwen_onnx import contract
from qwen_onnx.checkpoints.checkpoint import Checkpoint, side_files
from qwen_onnx.checkpoints.safetensors_file import StoredTensor
from qwen_onnx.contract import DTYPES
from qwen_onnx.contract.cache_spec import CacheSpec
from qwen_onnx.contract.manifest import FileSpec, GraphSpec, is_weights
from qwen_onnx.contract.quant import QuantConfig, QuantPlan
from qwen_onnx.errors import UserError, option
from qwen_onnx.exports.graph_file import StoredParameter, save_graph
from qwen_onnx.exports.layouts.known import PORTABLE_DTYPES
from qwen_onnx.exports.layouts.layout import Exported
from qwen_onnx.exports.plan import (
    ExportKind,
    build_planned,
    checkpoint_plan,
    graph_plans,
    graph_spec,
)  # fmt: skip
from qwen_onnx.exports.tensor_match import match_tensors, verify_depth
from qwen_onnx.exports.weights import OutputTensor, converted, quant_of, replaced, rotary_tensors, stored_as
from qwen_onnx.exports.weights_file import arrange, in_files, places_in, stored_parameters, write_safetensors
from qwen_onnx.runners.text.tokenizer import TOKENIZER_FILE, Tokenizer, has_tokenizer

Parts = dict[str, list[OutputTensor]]
"""What is written to which weights file."""


class Writer:
    """One export as it is written: its folder, what lies in it so far, and where each tensor went."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        kind: ExportKind,
        positions: int,
        progress: Callable[[int, int], None],
    ) -> None:
        (folder / kind.layout.graph_folder).mkdir(parents=True, exist_ok=True)
        self.folder, self.checkpoint, self.kind, self.positions = folder, checkpoint, kind, positions
        self.layout, self.dtype = kind.layout, kind.dtype
        self.files: dict[str, FileSpec] = {}
        self.graphs: list[GraphSpec] = []
        self.caches: dict[str, CacheSpec] = {}
        self.places: dict[str, StoredParameter] = {}
        self._progress = progress
        verify_depth(checkpoint)
        config = checkpoint.config
        self._plans, self._rotary = graph_plans(config, kind), rotary_tensors(config, positions)
        own = build_planned(checkpoint_plan(), config, positions)
        match_tensors(own, checkpoint, {tensor.name for tensor in self._rotary})
        self.quantized: dict[str, QuantConfig] = {}
        if kind.quant is not None:
            self.quantize_as(kind.quant)

    def quantize_as(self, quant: QuantPlan) -> None:
        """Which matrices are quantized, and how; before weights are placed and graphs written."""
        self.kind = dataclasses.replace(self.kind, quant=quant)
        self._plans = graph_plans(self.checkpoint.config, self.kind)
        found = {name: quant_of(tensor, quant) for name, tensor in self.checkpoint.tensors.items()}
        self.quantized = {name: own for name, own in found.items() if own is not None}

    def place_weights(self, calibrated: Mapping[str, StoredTensor]) -> Parts:
        """What each weights file will hold, and where; nothing is written yet.

        Args:
            calibrated: tensors of matrices that are quantized already, by the names that they get here.
        """
        stored = DTYPES.get(self.dtype, "F32")
        tensors: list[OutputTensor] = []
        for name, tensor in self.checkpoint.tensors.items():
            quant = self.quantized.get(name)
            own = stored_as(tensor, stored, quant=quant, panel_rows=self.kind.panel_rows)
            tensors += [replaced(each, calibrated.get(each.name)) for each in own]
        cut = in_files(arrange([*tensors, *self._rotary]), self.layout.largest_file)
        parts = {self.layout.weights_file(self.dtype, index): part for index, part in enumerate(cut)}
        for name, part in parts.items():
            self.places |= places_in(name, part)
        if (self.quantized or self.kind.panel_rows) and self.checkpoint.config.tie_word_embeddings:
            # Two names for the same bytes: the operators of head and embedding see them in different shapes.
            kind = contract.QWEIGHT if self.quantized else "weight"
            self.places[f"lm_head.{kind}"] = self.places[f"model.embed_tokens.{kind}"]
        return parts

    def link_weights(self) -> Parts:
        """Link the checkpoint's files; what is left to be written beside them."""
        stored = DTYPES.get(self.dtype, self.dtype)
        tensors = self.checkpoint.tensors
        if other := next((tensor for tensor in tensors.values() if tensor.dtype != stored), None):
            raise UserError(
                f"{option('link')}: {other.file.name} holds {other.name} as {other.dtype.lower()}, not {self.dtype}; "
                f"its bytes would change, so drop {option('link')} or choose that dtype"
            )
        names: dict[Path, str] = {}
        for file in sorted({tensor.file for tensor in tensors.values()}):
            in_place = not self.layout.graph_folder
            name = names[file] = file.name if in_place else self.layout.weights_file(self.dtype, len(names))
            if name == contract.EXTRA_FILE:
                link = option("link")
                raise UserError(f"{link}: {file} has the name of a file that an export adds; drop {link}")
            try:
                # The Hub's cache is made of symlinks, and ONNX Runtime follows none out of the folder.
                os.link(file.resolve(), self.folder / name)
            except OSError as error:
                link = option("link")
                raise UserError(f"{link}: {file}: {error.strerror or error}; drop {link} to copy") from None
            self.files[name] = hash_file(self.folder / name)
        self.places |= stored_parameters(tensors, names)
        extra = contract.EXTRA_FILE
        if self.layout.graph_folder:
            extra = self.layout.weights_file(self.dtype, len(names))
        self.places |= places_in(extra, self._rotary)
        return {extra: self._rotary}

    def write_weights(self, parts: Parts) -> None:
        """What is not linked, in pieces."""
        total = sum(tensor.nbytes for part in parts.values() for tensor in part)
        free = shutil.disk_usage(self.folder).free
        if total > free:
            raise UserError(f"{free:,} bytes are free where the export goes, its weights need {total:,}")
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
            cache = plan.cache(self.checkpoint.config)
            self.graphs.append(graph_spec(plan, model, None if cache is None else self._name_of(cache)))

    def _name_of(self, cache: CacheSpec) -> str:
        """What the manifest calls it, and all that are equal; numbered where another has its name."""
        names = itertools.chain([cache.name], (f"{cache.name}, {number}" for number in itertools.count(2)))
        return next(name for name in names if self.caches.setdefault(name, cache) == cache)

    def copy_side_files(self) -> None:
        """As they are; tokenizer.json is made where there are only the files that it is made of."""
        for name in side_files(self.checkpoint.folder):
            (self.folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.checkpoint.folder / name, self.folder / name)
            self.files[name] = hash_file(self.folder / name)
        if TOKENIZER_FILE not in self.files and has_tokenizer(self.folder):
            text = Tokenizer.from_folder(self.folder).backend.to_str()
            (self.folder / TOKENIZER_FILE).write_text(text, encoding="utf-8", newline="")
            self.files[TOKENIZER_FILE] = hash_file(self.folder / TOKENIZER_FILE)

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
        model_file = self._plans[0].file
        weights_files = [name for name in self.files if is_weights(name)]
        exported = Exported(
            self.folder, self.checkpoint.config, self.dtype, self.positions, eos_token_ids,
            cache=next(iter(self.caches.values())), model_file=model_file, weights_files=weights_files,
            file_counts=self._other_counts() | {model_file: len(weights_files)},
        )  # fmt: skip
        names, notes = self.layout.write(exported)
        self.files |= {name: hash_file(self.folder / name) for name in names}
        return notes


def hash_file(path: Path) -> FileSpec:
    """Size and sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return FileSpec(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
