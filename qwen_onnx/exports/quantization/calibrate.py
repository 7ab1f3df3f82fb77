"""Quantizes a checkpoint's matrices a layer at a time, each for the inputs that the layers before it really give it.

What is done lies in a folder, a file for each layer: an export that is killed goes on after the last of them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors.numpy

from qwen_onnx.checkpoints.checkpoint import Checkpoint
from qwen_onnx.checkpoints.safetensors_file import StoredTensor, read_header
from qwen_onnx.contract import QWEIGHT, SCALES, ZERO_POINTS
from qwen_onnx.contract.quant import HEAD, QuantPlan, part_of
from qwen_onnx.errors import UserError
from qwen_onnx.exports.quantization.blocks import Blocks, dequantize, quantize
from qwen_onnx.exports.quantization.forward import Decoder, Floats
from qwen_onnx.exports.quantization.gptq import Hessian, factors, round_matrix
from qwen_onnx.exports.quantization.text import CalibrationText
from qwen_onnx.exports.weights import rows_of

Progress = Callable[[float, str], None]
"""Told which share is done, 0 to 1, and what is being done."""

_ALGORITHM = 1  # of what the files of finished layers were made by
_PIECE = 64 << 20  # bytes of a matrix that are f32 at a time
_EMBEDDING = 0.3  # what is tied to the head is read row by row too, not only multiplied


def calibrate(
    checkpoint: Checkpoint, plan: QuantPlan, text: CalibrationText, folder: Path, progress: Progress
) -> dict[str, StoredTensor]:
    """The matrices in blocks, by the names that an export gives their tensors.

    Args:
        folder: of finished layers. What it has of other weights, text or plan is removed.

    Raises:
        UserError: a matrix or what it is multiplied with is NaN or infinite.
    """
    _begin(folder, checkpoint, plan, text)
    work = _Calibration(checkpoint, plan, text, folder)
    found: dict[str, StoredTensor] = {}
    done, total = 0.0, sum(work.costs.values())
    for step in work.costs:
        progress(done / total, step)
        found |= work.run(step)
        done += work.costs[step]
    progress(1.0, "")
    return found


def estimated_seconds(checkpoint: Checkpoint, plan: QuantPlan, text: CalibrationText) -> float:
    """What `calibrate` will about take on this machine, by the rate of a product measured now."""
    size = 1024
    x = np.ones((size, size), np.float32)
    started = time.perf_counter()
    for _ in range(4):
        x @ x
    rate = 4 * 2 * size**3 / (time.perf_counter() - started)
    return 1.3 * sum(_Calibration(checkpoint, plan, text, Path()).costs.values()) / rate


class _Calibration:
    """The stream of hidden states through the layers that are rounded so far."""

    def __init__(self, checkpoint: Checkpoint, plan: QuantPlan, text: CalibrationText, folder: Path) -> None:
        self.checkpoint, self.plan, self.folder, self.windows = checkpoint, plan, folder, text.windows
        self.rounded: dict[str, StoredTensor] = {}
        self.decoder = Decoder(checkpoint.config, self.read, text.windows.shape[1])
        self.stream: Floats | None = None
        self.matrices: dict[str, list[str]] = {}
        for name, tensor in checkpoint.tensors.items():
            if len(tensor.shape) == 2 and (part := part_of(name)):
                self.matrices.setdefault(part, []).append(name)
        self.costs = self._costs()

    def _costs(self) -> dict[str, float]:
        """Operations of each step, about: two passes over all tokens, the sums, and the rounding itself."""
        tokens, costs = self.windows.size, dict[str, float]()
        for index in range(self.checkpoint.config.num_hidden_layers):
            costs[f"layer {index}"] = 0.0
        costs["head"] = 0.0
        for part, names in self.matrices.items():
            step = "head" if part == "head" else f"layer {part.partition('.')[0]}"
            columns = self.checkpoint.tensors[names[0]].shape[1]
            weights = sum(self.checkpoint.tensors[name].shape[0] for name in names) * columns
            costs[step] += 2.0 * tokens * columns**2 + 3.0 * weights * columns + 200.0 * weights
            if part != "head":
                costs[step] += 4.0 * tokens * weights
        return costs

    def run(self, step: str) -> dict[str, StoredTensor]:
        """Round what the step has, or read what an earlier run made of it; move the stream on."""
        file = self.folder / f"{step.replace(' ', '.')}.safetensors"
        if self.stream is None:
            self.stream = np.concatenate(list(self._embedded()))
        index = int(step.split()[1]) if step != "head" else None
        if not file.exists():
            made = self._round_head() if index is None else self._round_layer(index)
            unfinished = file.with_suffix(".unfinished")
            safetensors.numpy.save_file(made, unfinished)
            unfinished.replace(file)
        stored = read_header(file)
        self.rounded |= stored
        if index is not None:
            self.stream = self.decoder.layer(index, self.stream)
            if not np.isfinite(self.stream).all():
                raise UserError(
                    f"{self.checkpoint.folder}: layer {index} gives NaN or an infinity when it is computed in f32"
                )
        return stored

    def read(self, name: str) -> Iterator[Floats]:
        """See forward.Read: what is rounded already, as it was rounded."""
        stem = name.removesuffix("weight")
        part, tensor = part_of(name), self.checkpoint.tensors[name]
        if part is None or stem + QWEIGHT not in self.rounded:
            yield from _f32(tensor)
            return
        (rows, columns), quant = tensor.shape, self.plan.of(part, tensor.shape[1])
        codes, scales = self.rounded[stem + QWEIGHT].numpy(), self.rounded[stem + SCALES].numpy()
        zeros = self.rounded[stem + ZERO_POINTS].numpy() if quant.zero_points else None
        step = max(1, _PIECE // (4 * columns))
        for start in range(0, rows, step):
            own = slice(start, start + step)
            yield dequantize(
                Blocks(codes[own], scales[own], None if zeros is None else zeros[own]), columns, quant
            )

    def _embedded(self) -> Iterator[Floats]:
        """Rows of the embedding, as the checkpoint has them: it is rounded last."""
        table = self.checkpoint.tensors["model.embed_tokens.weight"].numpy()
        for ids in self.windows:
            yield table[ids].astype(np.float32)

    def _round_layer(self, index: int) -> dict[str, np.ndarray]:
        """All of a layer's matrices, for the inputs that its own unrounded ones make of the stream."""
        assert self.stream is not None
        seen: dict[str, Hessian] = {}

        def add(part: str, x_SI: Floats) -> None:
            if part not in seen:
                seen[part] = Hessian(x_SI.shape[1])
            seen[part].add(x_SI)

        self.decoder.layer(index, self.stream, add)
        made: dict[str, np.ndarray] = {}
        for part in list(seen):
            own = f"{index}.{part}"
            made |= self._round(self.matrices[own], own, seen.pop(part), identity=0.0)
        return made

    def _round_head(self) -> dict[str, np.ndarray]:
        """The head for what it is multiplied with; an embedding of its own is only read."""
        assert self.stream is not None
        x = self.decoder.normed(self.stream)
        seen = Hessian(x.shape[1])
        seen.add(x)
        *embedding, head = sorted(self.matrices["head"], key=HEAD.index)
        made: dict[str, np.ndarray] = {}
        for name in embedding:
            quant = self.plan.of("head", self.checkpoint.tensors[name].shape[1])
            blocks = [quantize(rows, quant) for rows in _f32(self.checkpoint.tensors[name])]
            made |= _named(name, blocks)
        return made | self._round([head], "head", seen, identity=0.0 if embedding else _EMBEDDING)

    def _round(self, names: list[str], part: str, seen: Hessian, *, identity: float) -> dict[str, np.ndarray]:
        quant = self.plan.of(part, self.checkpoint.tensors[names[0]].shape[1])
        own = factors(seen, quant.block_size, identity=identity)
        made: dict[str, np.ndarray] = {}
        for name in names:
            tensor = self.checkpoint.tensors[name]
            try:
                made |= _named(name, [round_matrix(rows, own, quant) for rows in _f32(tensor)])
            except ValueError as error:
                raise UserError(f"{tensor.file}: tensor {name}: {error}") from None
        return made


def _f32(tensor: StoredTensor) -> Iterator[Floats]:
    return rows_of(tensor, nbytes=_PIECE)


def _named(name: str, pieces: list[Blocks]) -> dict[str, np.ndarray]:
    """The tensors in the place of a matrix, of its rows piece by piece."""
    stem = name.removesuffix("weight")
    made = {
        stem + QWEIGHT: np.concatenate([piece.codes for piece in pieces]),
        stem + SCALES: np.concatenate([piece.scales for piece in pieces]),
    }
    zeros = [piece.zero_points for piece in pieces if piece.zero_points is not None]
    return made | ({stem + ZERO_POINTS: np.concatenate(zeros)} if zeros else {})


def _begin(folder: Path, checkpoint: Checkpoint, plan: QuantPlan, text: CalibrationText) -> None:
    """Keep what an earlier run made of the same, and nothing else."""
    key = json.dumps({
        "algorithm": _ALGORITHM, "plan": repr(plan), "text": text.sha256,
        "checkpoint": sorted((path.name, *stamp) for path, stamp in checkpoint.stamps.items()),
    })  # fmt: skip
    said = folder / "of.json"
    if not (said.exists() and said.read_text() == key):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        said.write_text(key)
