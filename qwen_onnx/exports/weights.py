"""What an export has of a checkpoint's tensors: converted, in blocks or in panels, in pieces as they are written."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.safetensors_file import FLOAT_DTYPES, StoredTensor
from qwen_onnx.contract import QWEIGHT, SCALES, ZERO_POINTS
from qwen_onnx.contract.quant import QuantConfig, QuantPlan, part_of
from qwen_onnx.errors import UserError
from qwen_onnx.exports.quantization.blocks import quantize
from qwen_onnx.exports.rotary import rotary_rows

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
    tensor: StoredTensor, dtype: str, *, quant: QuantConfig | None, panel_rows: int | None
) -> list[OutputTensor]:
    """What an export has of a checkpoint's tensor: in blocks, a matrix in panels, or in `dtype`, as F32."""
    if quant is not None:
        return quantized(tensor, quant)
    if panel_rows is not None and len(tensor.shape) == 2:
        return [in_panels(tensor, panel_rows)]
    return [converted(tensor, dtype)]


def converted(tensor: StoredTensor, dtype: str) -> OutputTensor:
    """A checkpoint's tensor in another float type; where the types are equal, its bytes untouched."""
    if tensor.dtype == dtype:
        return OutputTensor(tensor.name, dtype, tensor.shape, lambda: tensor.chunks(PIECE))
    return OutputTensor(tensor.name, dtype, tensor.shape, lambda: _converted_pieces(tensor, dtype))


def quantized(tensor: StoredTensor, quant: QuantConfig) -> list[OutputTensor]:
    """A matrix in blocks: `qweight`, `scales` and, if it has them, `zero_points` in the place of its `weight`.

    The others are made along with the integers; where they are asked for first, all is made twice.
    """
    rows, columns = tensor.shape
    made: dict[str, list[bytes]] = {}

    def integers() -> Iterator[bytes]:
        made.update({SCALES: [], ZERO_POINTS: []})
        for values in rows_of(tensor):
            try:
                blocks = quantize(values, quant)
            except ValueError as error:
                raise UserError(f"{tensor.file}: tensor {tensor.name}: {error}") from None
            made[SCALES].append(blocks.scales.tobytes())
            if blocks.zero_points is not None:
                made[ZERO_POINTS].append(blocks.zero_points.tobytes())
            yield blocks.codes.tobytes()

    def beside(name: str) -> Iterator[bytes]:
        if name not in made:
            collections.deque(integers(), maxlen=0)
        yield from made.pop(name)

    return blocks_of(
        tensor.name, (rows, columns), quant, (integers, lambda: beside(SCALES), lambda: beside(ZERO_POINTS))
    )


def blocks_of(
    name: str, shape: tuple[int, int], quant: QuantConfig, pieces: Sequence[Pieces]
) -> list[OutputTensor]:
    """The tensors in the place of a quantized matrix [rows, columns], in the order of the file.

    Args:
        name: of the checkpoint's tensor.
        pieces: of integers, scales and zero points; the last are not asked for where the format has none.
    """
    rows, columns = shape
    stem, (integers, scales, zero_points) = name.removesuffix("weight"), pieces
    found = [
        OutputTensor(stem + QWEIGHT, "U8", (rows, quant.row_bytes(columns)), integers),
        OutputTensor(stem + SCALES, quant.scales, (rows, quant.blocks(columns)), scales),
    ]
    if quant.zero_points:
        found.append(OutputTensor(stem + ZERO_POINTS, "U8", (rows, quant.zero_bytes(columns)), zero_points))
    return found


def replaced(tensor: OutputTensor, made: StoredTensor | None) -> OutputTensor:
    """The tensor with the bytes of one that was made before, where it was."""
    if made is None:
        return tensor
    if (made.dtype, made.shape) != (tensor.dtype, tensor.shape):
        raise ValueError(
            f"{made.name}: made as {made.dtype} {made.shape}, wanted {tensor.dtype} {tensor.shape}"
        )
    return dataclasses.replace(tensor, pieces=lambda: made.chunks(PIECE))


def in_panels(tensor: StoredTensor, panel_rows: int) -> OutputTensor:
    """A matrix [out, in] as f32 [out / panel_rows, in, panel_rows], zeros in the rows that `out` lacks."""
    rows, columns = tensor.shape

    def pieces() -> Iterator[memoryview]:
        for values in rows_of(tensor, panel_rows):
            missing = -len(values) % panel_rows
            padded = np.pad(values, ((0, missing), (0, 0))) if missing else values
            panels = padded.reshape(-1, panel_rows, columns).swapaxes(1, 2)
            yield np.ascontiguousarray(panels).view(np.uint8).data

    return OutputTensor(tensor.name, "F32", (-(-rows // panel_rows), columns, panel_rows), pieces)


def quant_of(tensor: StoredTensor, plan: QuantPlan) -> QuantConfig | None:
    """How a checkpoint's tensor is quantized; None: it is not, being no matrix."""
    if len(tensor.shape) != 2:
        return None
    part = part_of(tensor.name)
    return None if part is None else plan.of(part, tensor.shape[1])


def rows_of(
    tensor: StoredTensor, together: int = 1, *, nbytes: int | None = None
) -> Iterator[NDArray[np.float32]]:
    """A matrix as f32, some multiple of `together` rows at a time, fewer at the end; a vector as one row.

    Args:
        nbytes: of the f32 numbers, at most, where a row has no more; default PIECE.
    """
    columns, source = tensor.shape[-1], FLOAT_DTYPES[tensor.dtype]
    rows = max(1, (nbytes or PIECE) // (4 * columns * together)) * together
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
