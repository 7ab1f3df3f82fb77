"""Weight-only quantization in blocks, in the bytes that ONNX Runtime's MatMulNBits and GatherBlockQuantized read.

A block is `block_size` neighbouring weights of one row; it is stored as integer codes, one scale and, if the
format has them, one zero point. A weight is read back as `scale * (code - zero_point)`; a zero point that is not
stored is half the codes' range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.contract.quant import QuantConfig

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Scales = NDArray[np.float32 | np.float16]
Bounds = tuple[np.float32 | Floats, np.float32 | Floats]

_STORED = {"F32": np.float32, "F16": np.float16}
PIECE = 1 << 18  # weights quantized at a time: few enough for the cache, enough to hide the cost of a call

# Steps tried, by how far along the codes below zero the block's extreme comes. At 1 it is the lowest code, which has
# no counterpart above zero; beyond 1 it is clipped, for the good of the rest. (zero_point - 1) / zero_point is plain
# rounding by max|x|, so that no block comes out worse than that. With 4 bits these six are within 1.2 % of the least
# squared error over any step, in normal and in heavy-tailed weights; with 8 bits a longer list is not worth its time.
REACHES = {4: (1.0, 7 / 8, 0.9375, 1.06, 1.15, 1.3), 8: (1.0, 127 / 128)}
# With zero points, by how far along all codes the block's span comes.
SPANS = {4: (1.0, 0.95, 1.05, 1.12, 1.2, 1.3), 8: (1.0, 1.004)}


class Blocks(NamedTuple):
    """A matrix [n, K] in blocks."""

    codes: Bytes
    """[n, row_bytes(K)], of 4 bits the first of two in the low ones."""
    scales: Scales
    """f32 or f16 [n, blocks(K)]; without zero points they may be negative."""
    zero_points: Bytes | None
    """[n, zero_bytes(K)], packed as the codes are."""


def quantize(rows: Floats, quant: QuantConfig) -> Blocks:
    """Quantize each block with the scale of least squared error among those tried.

    Temporary memory is a few pieces, or a few rows where a row is longer than a piece. NumPy lets other threads run
    meanwhile, and rows depend on nothing but themselves: slices of them can be quantized side by side.

    Args:
        rows: f32 [n, K], the reduced dimension last. Where K is no multiple of the block, zeros are appended.

    Raises:
        ValueError: NaN or an infinity.
    """
    n, columns = rows.shape
    blocks, size = quant.blocks(columns), quant.block_size
    packed = np.empty((n, quant.row_bytes(columns)), np.uint8)
    scales = np.empty((n, blocks), _STORED[quant.scales])
    zero_points = np.empty((n, quant.zero_bytes(columns)), np.uint8) if quant.zero_points else None
    step = max(1, min(n, PIECE // max(1, blocks * size)))
    padded = np.zeros((step, blocks * size), np.float32)
    # Blocks side by side, [position in the block, block]: every sum over a block is then an addition of long rows.
    work = [np.empty((size, step * blocks), np.float32) for _ in range(3)]
    for start in range(0, n if columns else 0, step):
        count = min(step, n - start)
        padded[:count, :columns] = rows[start : start + count]
        values, scaled, codes = (array[:, : count * blocks] for array in work)
        values[:] = padded[:count].reshape(-1, size).T
        fitted, zero = fit(values, scaled, codes, quant)
        scales[start : start + count] = fitted.reshape(count, blocks)
        if zero_points is not None:
            zero_points[start : start + count] = pack(zero.astype(np.uint8).reshape(count, blocks), quant)
        codes += zero
        packed[start : start + count] = pack(codes.astype(np.uint8).T.reshape(count, -1), quant)
    return Blocks(packed, scales, zero_points)


def pack(codes: Bytes, quant: QuantConfig) -> Bytes:
    """Codes [n, count], a byte each, as they are stored, [n, count * bits / 8]; a last odd one has a byte."""
    if quant.bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return np.asarray(codes[:, ::2] | codes[:, 1::2] << np.uint8(4), np.uint8)


def unpack(packed: Bytes, count: int, quant: QuantConfig) -> Bytes:
    """What `pack` was given, [n, count]."""
    if quant.bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)[:, :count]


def dequantize(blocks: Blocks, columns: int, quant: QuantConfig) -> Floats:
    """The weights that blocks stand for, f32 [n, columns]."""
    n, count = blocks.scales.shape
    values = unpack(blocks.codes, count * quant.block_size, quant).reshape(n, count, -1).astype(np.float32)
    if blocks.zero_points is None:
        values -= np.float32(quant.zero_point)
    else:
        values -= unpack(blocks.zero_points, count, quant)[..., np.newaxis]
    values *= blocks.scales[..., np.newaxis]
    return values.reshape(n, -1)[:, :columns]


def fit(values: Floats, scaled: Floats, codes: Floats, quant: QuantConfig) -> tuple[Floats, Floats]:
    """Leave each block's codes, less the zero point, in `codes`; return scales and zero points, f32 [blocks] each.

    Scales are numbers of the type that they are stored in. All three arrays are f32 [block_size, blocks]; the first
    two are overwritten.

    Raises:
        ValueError: NaN or an infinity, or more than a scale can hold.
    """
    high, low = values.max(0), values.min(0)
    if not np.isfinite(high).all() or not np.isfinite(low).all():  # NaN too: max hands it on
        raise ValueError("weights to be quantized hold NaN or an infinity")
    # In units of the extreme no square overflows or vanishes, and the factors tried are the same for all blocks.
    extreme = np.where(-low > high, low, high)
    zero = np.full_like(extreme, quant.zero_point)
    unit, factors = extreme, [-quant.zero_point * reach for reach in REACHES[quant.bits]]
    bounds: Bounds = np.float32(-quant.zero_point), np.float32(quant.zero_point - 1)
    if quant.zero_points:
        # Half of each: the span of f32's largest numbers is none.
        half = np.maximum(high, 0) / 2 - np.minimum(low, 0) / 2
        np.divide(-np.minimum(low, 0) / 2, half, out=zero, where=half > 0)
        zero = np.rint(zero.clip(0, 1) * np.float32(quant.levels))
        zero[half == 0] = 0
        unit, factors = half, [quant.levels * reach / 2 for reach in SPANS[quant.bits]]
        bounds = -zero, np.float32(quant.levels) - zero
    values /= np.where(unit, unit, np.float32(1))
    best: Floats = np.full_like(unit, np.inf)
    factor, shrink = np.zeros_like(unit), np.ones_like(unit)
    for tried in map(np.float32, factors):
        error, ratio = _round(values, tried, scaled, codes, bounds)
        error /= tried * tried
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(factor, tried, where=better)
        np.copyto(shrink, ratio, where=better)
    # Once more with the step just fitted: some codes move to a nearer one, and the step is fitted to those.
    factor /= shrink
    _, shrink = _round(values, factor, scaled, codes, bounds)
    scale = np.asarray(unit * (shrink / factor), np.float32)
    if quant.scales == "F16":
        with np.errstate(over="ignore"):
            scale = scale.astype(np.float16).astype(np.float32)
        if not np.isfinite(scale).all():
            raise ValueError(f"weights of {np.abs(extreme).max():.3g} have no scale in f16")
        # With the scale as it is stored; blocks of numbers that vanish in it are zeros.
        factor = np.divide(unit, scale, out=np.zeros_like(scale), where=scale != 0)
        _round(values, factor, scaled, codes, bounds)
    return scale, zero


def _round(
    values: Floats, factor: np.float32 | Floats, scaled: Floats, codes: Floats, bounds: Bounds
) -> tuple[Floats, Floats]:
    """Round `values * factor` to codes, and fit the step to these: sum(x q) / sum(q q), by least squares.

    Both sums are taken of the remainder r = x - q, where nothing cancels. That keeps what is exact exact, and still
    tells errors apart with 8 bits, when they are 1e-5 of the sum of squares.

    Returns:
        squared error with the fitted step in units of the step rounded with; and the first over the second step.
    """
    np.multiply(values, factor, out=scaled)
    np.rint(scaled, out=codes)
    np.clip(codes, *bounds, out=codes)
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
