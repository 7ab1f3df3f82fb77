"""Writes the weights of an export: one safetensors file, tensor by tensor, converted in pieces.

Memory stays at a few pieces whatever the model's size, and the sha256 is taken from the bytes as they pass.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, StoredTensor
from qwen_onnx.contract import QWEIGHT, SCALES, BlockPlan, Blocks
from qwen_onnx.errors import UserError
from qwen_onnx.exports.quantize import Scheme, quantise
from qwen_onnx.graphs.build import StoredParameter
from qwen_onnx.graphs.packed import PACKED
from qwen_onnx.graphs.rotary import rotary_rows
from qwen_onnx.manifest import FileSpec

PAGE = 4096
_HEADER = 1 << 20  # bytes left for a header where files have a limit; those of published models take a tenth
PIECE = 8 << 20  # bytes read, converted and written at a time

Pieces = Callable[[], Iterator[bytes | memoryview]]


@dataclasses.dataclass(frozen=True)
class OutputTensor:
    """A tensor of the file to be written, and where its bytes come from."""

    name: str
    dtype: str
    """F32, F16, BF16 or U8."""
    shape: tuple[int, ...]
    pieces: Pieces

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * (1 if self.dtype == "U8" else FLOAT_DTYPES[self.dtype].itemsize)


def stored_as(
    tensor: StoredTensor, dtype: str, *, blocks: Blocks | None, panel_rows: int | None
) -> list[OutputTensor]:
    """What an export has of a checkpoint's tensor: in blocks, a matrix in panels, or in `dtype`, as F32."""
    if blocks is not None:
        return quantised(tensor, blocks)
    if panel_rows is not None and len(tensor.shape) == 2:
        return [in_panels(tensor, panel_rows)]
    return [converted(tensor, dtype)]


def converted(tensor: StoredTensor, dtype: str) -> OutputTensor:
    """A checkpoint's tensor in another float type; where the types are equal, its bytes untouched."""
    if tensor.dtype == dtype:
        return OutputTensor(tensor.name, dtype, tensor.shape, lambda: tensor.chunks(PIECE))
    return OutputTensor(tensor.name, dtype, tensor.shape, lambda: _converted_pieces(tensor, dtype))


def quantised(tensor: StoredTensor, blocks: Blocks) -> list[OutputTensor]:
    """A matrix in blocks: `qweight` and `scales` in the place of its `weight`.

    The scales are made along with the integers; where they are asked for first, all is made twice.
    """
    scheme = Scheme(blocks.bits, blocks.block_size)
    rows, columns = tensor.shape
    made: list[bytes] = []

    def integers() -> Iterator[bytes]:
        made.clear()
        for values in _rows(tensor):
            try:
                packed, scales = quantise(values, scheme)
            except ValueError as error:
                raise UserError(f"{tensor.file}: tensor {tensor.name}: {error}") from None
            made.append(scales.tobytes())
            yield packed.tobytes()

    def scales() -> Iterator[bytes]:
        if not made:
            collections.deque(integers(), maxlen=0)
        yield from made
        made.clear()

    stem = tensor.name.removesuffix("weight")
    return [
        OutputTensor(stem + QWEIGHT, "U8", (rows, scheme.row_bytes(columns)), integers),
        OutputTensor(stem + SCALES, "F32", (rows, scheme.blocks(columns)), scales),
    ]


def in_panels(tensor: StoredTensor, panel_rows: int) -> OutputTensor:
    """A matrix [out, in] as f32 [out / panel_rows, in, panel_rows], zeros in the rows that `out` lacks."""
    rows, columns = tensor.shape

    def pieces() -> Iterator[memoryview]:
        for values in _rows(tensor, panel_rows):
            missing = -len(values) % panel_rows
            padded = np.pad(values, ((0, missing), (0, 0))) if missing else values
            panels = padded.reshape(-1, panel_rows, columns).swapaxes(1, 2)
            yield np.ascontiguousarray(panels).view(np.uint8).data

    return OutputTensor(tensor.name, "F32", (-(-rows // panel_rows), columns, panel_rows), pieces)


def blocks_of(tensor: StoredTensor, plan: BlockPlan) -> Blocks | None:
    """How a checkpoint's tensor is quantised; None: it is not, being no matrix."""
    if len(tensor.shape) != 2:
        return None
    of_head = tensor.name in ("model.embed_tokens.weight", "lm_head.weight")
    return plan.head if of_head else plan.layers


def _rows(tensor: StoredTensor, together: int = 1) -> Iterator[NDArray[np.float32]]:
    """The matrix as f32, some multiple of `together` rows at a time; fewer at the end."""
    columns, source = tensor.shape[1], FLOAT_DTYPES[tensor.dtype]
    rows = max(1, PIECE // (4 * columns * together)) * together
    for piece in tensor.chunks(rows * columns * source.itemsize):
        values = np.frombuffer(piece, source)
        wide = _bf16_to_f32(values) if source == ml_dtypes.bfloat16 else values.astype(np.float32)
        yield wide.reshape(-1, columns)


def rotary_tensors(config: QwenConfig, positions: int) -> list[OutputTensor]:
    """The cos and sin tables, f32 [positions, head_dim / 2] each, made a few rows at a time."""
    width = config.head_dim // 2
    rows = max(1, PIECE // (width * 8))

    def pieces(which: int) -> Iterator[bytes]:
        for start in range(0, positions, rows):
            yield rotary_rows(config, start, min(start + rows, positions))[which].tobytes()

    return [
        OutputTensor(f"rotary.{name}", "F32", (positions, width), lambda which=which: pieces(which))  # type: ignore[misc]
        for which, name in enumerate(("cos", "sin"))
    ]


def arrange(tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Order of the file: what is packed together stays together, and all that can begin on a page does.

    Groups made of whole pages come first; since the data section begins on a page, each of them does.
    """
    groups: dict[str, list[OutputTensor]] = {}
    for tensor in tensors:
        groups.setdefault(_place(tensor.name)[0], []).append(tensor)
    for group in groups.values():
        group.sort(key=lambda tensor: _place(tensor.name))
    whole = [group for group in groups.values() if all(tensor.nbytes % PAGE == 0 for tensor in group)]
    rest = [group for group in groups.values() if any(tensor.nbytes % PAGE for tensor in group)]
    return list(itertools.chain(*whole, *rest))


def places_in(file: str, tensors: Sequence[OutputTensor]) -> dict[str, StoredParameter]:
    """Where each tensor will lie in a file of this name, once `write_safetensors` has written it."""
    places, offset = {}, len(_header(tensors))
    for tensor in tensors:
        places[tensor.name] = StoredParameter(file, offset, tensor.nbytes)
        offset += tensor.nbytes
    return places


def write_safetensors(
    path: Path, tensors: Sequence[OutputTensor], *, progress: Callable[[int], None] = lambda _: None
) -> FileSpec:
    """Write the file in the given order; its header is padded so that the data begins on a page.

    Args:
        progress: called with the number of bytes just written.

    Returns:
        size and hash.

    Raises:
        UserError: a value that the new type cannot hold, or a source that changed meanwhile.
        OSError: from the file system.
    """
    header = _header(tensors)
    sha256 = hashlib.sha256(header)
    # "x": where a checkpoint's file is linked under that name, opening it would empty the checkpoint.
    pieces = itertools.chain.from_iterable(tensor.pieces() for tensor in tensors)
    with path.open("xb") as file, concurrent.futures.ThreadPoolExecutor(2) as beside:
        file.write(header)
        # While a piece is written, it is hashed and the next one is converted.
        hashed, converted_next = beside.submit(sha256.update, b""), beside.submit(next, pieces, None)
        while (piece := converted_next.result()) is not None:
            converted_next = beside.submit(next, pieces, None)
            hashed.result()
            hashed = beside.submit(sha256.update, piece)
            file.write(piece)
            progress(len(piece))
        hashed.result()
        size = file.tell()
    return FileSpec(size, sha256.hexdigest())


def in_files(tensors: Sequence[OutputTensor], largest: int | None) -> list[list[OutputTensor]]:
    """Cut into files of at most `largest` bytes each, as far as one tensor and the header allow it."""
    files: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if largest is not None and files[-1] and size + tensor.nbytes > largest - _HEADER:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def stored_parameters(
    tensors: Mapping[str, StoredTensor], names: Mapping[Path, str]
) -> dict[str, StoredParameter]:
    """Where linked tensors lie: in the checkpoint's own files, which the export has under these names."""
    return {
        name: StoredParameter(names[tensor.file], tensor.offset, tensor.nbytes)
        for name, tensor in tensors.items()
    }


def _header(tensors: Sequence[OutputTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // PAGE) * PAGE
    return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)


def _place(name: str) -> tuple[str, int]:
    """The group that a tensor belongs to, and where it stands in it."""
    parts = name.split(".")
    for packed, modules in PACKED.items():
        for rank, module in enumerate(modules):
            if module in parts:
                return ".".join(packed if part == module else part for part in parts), rank
    return name, 0


def _may_be_infinite(values: NDArray[Any]) -> bool:
    """Whether f16 values hold an infinity; True of bf16. By bits, in a fraction of the time of isinf."""
    if values.dtype != np.float16:
        return values.dtype.itemsize == 2
    return bool((values.view(np.uint16) & 0x7FFF).max(initial=0) >= 0x7C00)


def _converted_pieces(tensor: StoredTensor, dtype: str) -> Iterator[memoryview]:
    source, target = FLOAT_DTYPES[tensor.dtype], FLOAT_DTYPES[dtype]
    for piece in tensor.chunks(PIECE // 4 * source.itemsize):
        values = np.frombuffer(piece, source)
        # Overflow is found below, with the tensor's name; NaN stays NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            result: NDArray[Any]
            if source == ml_dtypes.bfloat16 and target == np.float16:
                result = _bf16_to_f16(values)
            elif source == ml_dtypes.bfloat16:
                result = _bf16_to_f32(values)
            else:
                result = values.astype(target, copy=False)
            lost = _may_be_infinite(result) and np.isinf(result) & np.isfinite(values)
        if np.any(lost):
            worst = np.abs(values[lost].astype(np.float64)).max()
            raise UserError(
                f"{tensor.file}: tensor {tensor.name} holds {worst:.3g}, more than {dtype.lower()} can; "
                "use f32, or bf16 if it fits"
            )
        yield result.view(np.uint8).data


# By bits: exact, and four times as fast as astype. bf16 is the upper half of f32.


def _bf16_to_f32(values: NDArray[Any]) -> NDArray[np.float32]:
    wide = values.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _bf16_to_f16(values: NDArray[Any]) -> NDArray[np.float16]:
    """Exact from 2**-14 up to f16's end, as f16 has more bits behind the point; the rest is left to astype."""
    bits = values.view(np.uint16)
    size = bits & 0x7FFF
    size -= (127 - 15) << 7  # from the one exponent's zero to the other's
    result = size << 3 | bits & 0x8000
    size -= 1 << 7  # too small ones have wrapped around by now
    rest = np.flatnonzero(size >= 30 << 7)
    result[rest] = _bf16_to_f32(values[rest]).astype(np.float16).view(np.uint16)
    return result.view(np.float16)
