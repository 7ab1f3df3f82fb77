"""Weight-only quantization in blocks, in the bytes that ONNX Runtime's MatMulNBits and GatherBlockQuantized read.

A block is `block_size` neighbouring weights of one row; it is stored as integer codes and one f32 scale, and a
weight is read back as `scale * (code - zero_point)`. The zero point is half the codes' range and is not stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.contract.quant import QuantConfig

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PIECE = 1 << 18  # weights quantized at a time: few enough for the cache, enough to hide the cost of a call

# Steps tried, by how far along the codes below zero the block's extreme comes. At 1 it is the lowest code, which has
# no counterpart above zero; beyond 1 it is clipped, for the good of the rest. (zero_point - 1) / zero_point is plain
# rounding by max|x|, so that no block comes out worse than that. With 4 bits these six are within 1.2 % of the least
# squared error over any step, in normal and in heavy-tailed weights; with 8 bits a longer list is not worth its time.
REACHES = {4: (1.0, 7 / 8, 0.9375, 1.06, 1.15, 1.3), 8: (1.0, 127 / 128)}


def quantize(rows: Floats, quant: QuantConfig) -> tuple[Bytes, Floats]:
    """Quantize each block with the scale of least squared error among those tried.

    Temporary memory is a few pieces, or a few rows where a row is longer than a piece. NumPy lets other threads run
    meanwhile, and rows depend on nothing but themselves: slices of them can be quantized side by side.

    Args:
        rows: f32 [n, K], the reduced dimension last. Where K is no multiple of the block, zeros are appended.

    Returns:
        codes, uint8 [n, row_bytes(K)], the first of two in the low bits; and scales, f32 [n, blocks(K)], which may
        be negative.

    Raises:
        ValueError: NaN or an infinity.
    """
    n, columns = rows.shape
    blocks, size = quant.blocks(columns), quant.block_size
    packed = np.empty((n, quant.row_bytes(columns)), np.uint8)
    scales = np.empty((n, blocks), np.float32)
    if not rows.size:
        return packed, scales
    step = min(n, max(1, PIECE // (blocks * size)))
    padded = np.zeros((step, blocks * size), np.float32)
    # Blocks side by side, [position in the block, block]: every sum over a block is then an addition of long rows.
    work = [np.empty((size, step * blocks), np.float32) for _ in range(3)]
    for start in range(0, n, step):
        count = min(step, n - start)
        padded[:count, :columns] = rows[start : start + count]
        values, scaled, codes = (array[:, : count * blocks] for array in work)
        values[:] = padded[:count].reshape(-1, size).T
        scales[start : start + count] = _fit(values, scaled, codes, quant).reshape(count, blocks)
        codes += quant.zero_point
        whole = codes.astype(np.uint8)
        if quant.bits == 4:
            whole[::2] |= whole[1::2] << np.uint8(4)
            whole = whole[::2]
        packed[start : start + count] = whole.T.reshape(count, -1)
    return packed, scales


def dequantize(packed: Bytes, scales: Floats, columns: int, quant: QuantConfig) -> Floats:
    """The weights that codes and scales stand for, f32 [n, columns], as `quantize` returns them."""
    codes = packed
    if quant.bits == 4:
        codes = np.stack([packed & 15, packed >> 4], axis=-1)
    values = codes.reshape(*scales.shape, quant.block_size).astype(np.float32)
    values -= np.float32(quant.zero_point)
    values *= scales[..., np.newaxis]
    return values.reshape(len(scales), -1)[:, :columns]


def _fit(values: Floats, scaled: Floats, codes: Floats, quant: QuantConfig) -> Floats:
    """Leave each block's codes, less the zero point, in `codes`; return the scales.

    All three arrays are [block_size, blocks]. `values` and `scaled` are overwritten.
    """
    high, low = values.max(0), values.min(0)
    extreme = np.where(-low > high, low, high)
    if not np.isfinite(extreme).all():  # NaN too: max hands it on, and no comparison with it is true
        raise ValueError("weights to be quantized hold NaN or an infinity")
    # In units of the extreme no square overflows or vanishes, and the factors tried are the same for all blocks.
    values /= np.where(extreme, extreme, np.float32(1))
    best: Floats = np.full_like(extreme, np.inf)
    factor, shrink = np.zeros_like(extreme), np.ones_like(extreme)
    for reach in REACHES[quant.bits]:
        tried = np.float32(-quant.zero_point * reach)
        error, ratio = _round(values, tried, scaled, codes, quant)
        error /= tried * tried
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(factor, tried, where=better)
        np.copyto(shrink, ratio, where=better)
    # Once more with the step just fitted: some codes move to a nearer one, and the step is fitted to those.
    factor /= shrink
    _, shrink = _round(values, factor, scaled, codes, quant)
    return np.asarray(extreme * (shrink / factor), np.float32)


def _round(
    values: Floats, factor: np.float32 | Floats, scaled: Floats, codes: Floats, quant: QuantConfig
) -> tuple[Floats, Floats]:
    """Round `values * factor` to codes, and fit the step to these: sum(x q) / sum(q q), by least squares.

    Both sums are taken of the remainder r = x - q, where nothing cancels. That keeps what is exact exact, and still
    tells errors apart with 8 bits, when they are 1e-5 of the sum of squares.

    Returns:
        squared error with the fitted step in units of the step rounded with; and the first over the second step.
    """
    np.multiply(values, factor, out=scaled)
    np.rint(scaled, out=codes)
    np.clip(codes, -quant.zero_point, quant.zero_point - 1, out=codes)
    scaled -= codes
    squares: Floats = np.maximum(
        _sums(codes, codes), np.float32(1)
    )  # of integers, so 0 in blocks of zeros only
    slope = _sums(scaled, codes)
    slope /= squares
    error = np.asarray(_sums(scaled, scaled) - slope * slope * squares, np.float32)
    slope += np.float32(1)
    return error, slope


def _sums(a: Floats, b: Floats) -> Floats:
    """Sums of products over a block."""
    result: Any = np.einsum("kb,kb->b", a, b)
    return np.asarray(result, np.float32)
