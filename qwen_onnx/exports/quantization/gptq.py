"""Rounds a matrix so that its products change least: GPTQ (arXiv:2210.17323), block by block.

The error that counts is ||(W - Q) X||^2 over inputs X that the matrix really has, and not ||W - Q||^2: what one
column loses by rounding, later columns make up for. With H = X X^T = R R^T, R upper triangular, the columns of a
block that are left to be rounded are best set to

    W_b + E_a R_ab R_bb^-1

where E_a = W_a - Q_a is the error of the columns before it; inside the block the same holds column by column, with
U = R_bb^-1 in the place of R^-1. The block's scale is fitted to what is to be rounded, once that is known.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.contract.quant import QuantConfig
from qwen_onnx.exports.quantization.blocks import Blocks, fit, pack

# Shape suffixes: I inputs (columns of the matrix), O outputs (its rows), G a block's columns.

Floats = NDArray[np.float32]

MOST_COLUMNS = 8192
"""Inputs whose products are taken together; more go in slices, each by itself, as I x I numbers are in memory."""
DAMPING = 0.01
"""Of the mean of H's diagonal, added to it: inputs that were seldom seen are not trusted."""
_ROWS = 1024  # rounded at a time: few enough for the cache
_STEP = 32  # columns after which those left in a block are brought up to date together


class Hessian:
    """X X^T of inputs seen so far, in slices of MOST_COLUMNS of them."""

    def __init__(self, columns: int) -> None:
        edges = [*range(0, columns, MOST_COLUMNS), columns]
        self.slices = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
        self.sums = [np.zeros((part.stop - part.start,) * 2, np.float32) for part in self.slices]

    def add(self, x_SI: Floats) -> None:
        """Inputs of some tokens, f32 [tokens, I]."""
        for part, total in zip(self.slices, self.sums, strict=True):
            x = x_SI[:, part]
            total += x.T @ x


class Factor(NamedTuple):
    """R of a slice of columns, and the inverses of its blocks on the diagonal."""

    columns: slice
    upper_II: Floats
    inverses: list[Floats]


def factors(hessian: Hessian, block_size: int, *, identity: float = 0.0) -> list[Factor]:
    """H as R R^T, slice by slice; the sums in `hessian` are overwritten.

    Args:
        identity: added to H, in units of the mean of its diagonal: the share of ||W - Q||^2 in what is least.
    """
    found = []
    for part, total in zip(hessian.slices, hessian.sums, strict=True):
        diagonal = np.einsum("ii->i", total)
        mean = float(diagonal.mean())
        total /= np.float32(mean or 1)
        damping = DAMPING + identity
        while True:
            diagonal += np.float32(damping)
            try:
                # The factor of the matrix turned about, turned back: upper triangular.
                upper: Floats = np.linalg.cholesky(total[::-1, ::-1])[::-1, ::-1].astype(np.float32)
                break
            except np.linalg.LinAlgError:  # f32 rounds; ten times as much is enough
                damping *= 10
        upper = np.ascontiguousarray(upper)
        starts = range(0, len(upper), block_size)
        inverses = [
            np.linalg.inv(upper[i : i + block_size, i : i + block_size].astype(np.float64)).astype(np.float32)
            for i in starts
        ]
        found.append(Factor(part, upper, inverses))
    return found


def round_matrix(weight_OI: Floats, own: list[Factor], quant: QuantConfig) -> Blocks:
    """The matrix in blocks, its products over the inputs of `own` changed least.

    Args:
        weight_OI: f32 [O, I]; where I is no multiple of the block, zeros are appended.
        own: of the matrix's inputs, by `factors` with the same block size.

    Raises:
        ValueError: NaN or an infinity.
    """
    starts = range(0, len(weight_OI), _ROWS)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        parts = list(
            threads.map(lambda start: _round_rows(weight_OI[start : start + _ROWS], own, quant), starts)
        )
    codes, scales, zeros = (np.concatenate(each) for each in zip(*parts, strict=True))
    stored = scales.astype(np.float16) if quant.scales == "F16" else scales
    return Blocks(pack(codes, quant), stored, pack(zeros, quant) if quant.zero_points else None)


def _round_rows(
    weight_OI: Floats, own: list[Factor], quant: QuantConfig
) -> tuple[NDArray[np.uint8], Floats, NDArray[np.uint8]]:
    """Codes [O, padded I], scales and zero points [O, blocks] of some rows."""
    rows, columns = weight_OI.shape
    size, blocks = quant.block_size, quant.blocks(columns)
    codes = np.zeros((blocks * size, rows), np.uint8)
    scales, zeros = np.empty((blocks, rows), np.float32), np.empty((blocks, rows), np.uint8)
    for factor in own:
        weight_IO = np.ascontiguousarray(weight_OI[:, factor.columns].T)
        errors_IO = np.zeros_like(weight_IO)
        for number, inverse_GG in enumerate(factor.inverses):
            start = number * size
            stop = min(start + size, len(weight_IO))
            moved_GO = weight_IO[start:stop].copy()
            if start:
                lost_GO = factor.upper_II[:start, start:stop].T @ errors_IO[:start]
                moved_GO += inverse_GG.T @ lost_GO
            block = factor.columns.start // size + number
            scale_O, zero_O = _fitted(moved_GO, quant)
            scales[block], zeros[block] = scale_O, zero_O
            found_GO = _round_block(moved_GO, inverse_GG, scale_O, zero_O, quant)
            at = block * size
            codes[at : at + size] = zero_O  # of padding: what is worth 0
            codes[at : at + len(found_GO)] = found_GO + zero_O
            errors_IO[start:stop] = weight_IO[start:stop] - found_GO * scale_O
    return np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T)


def _fitted(moved_GO: Floats, quant: QuantConfig) -> tuple[Floats, Floats]:
    """Scale and zero point of each row's block, [O] each."""
    missing = quant.block_size - len(moved_GO)
    values = np.pad(moved_GO, ((0, missing), (0, 0))) if missing else moved_GO.copy()
    return fit(values, np.empty_like(values), np.empty_like(values), quant)


def _round_block(
    moved_GO: Floats, inverse_GG: Floats, scale_O: Floats, zero_O: Floats, quant: QuantConfig
) -> Floats:
    """Codes of a block's columns less the zero point, f32 [G, O]; `moved_GO` is overwritten."""
    found_GO = np.empty_like(moved_GO)
    per_step_O = np.divide(1, scale_O, out=np.zeros_like(scale_O), where=scale_O != 0)
    low_O, high_O = -zero_O, np.float32(quant.levels) - zero_O
    size = len(moved_GO)
    for first in range(0, size, _STEP):
        last = min(first + _STEP, size)
        lost = np.empty((last - first, moved_GO.shape[1]), np.float32)
        for column in range(first, last):
            code_O = np.rint(moved_GO[column] * per_step_O)
            np.clip(code_O, low_O, high_O, out=code_O)
            found_GO[column] = code_O
            error_O = (moved_GO[column] - code_O * scale_O) / inverse_GG[column, column]
            lost[column - first] = error_O
            moved_GO[column + 1 : last] -= inverse_GG[column, column + 1 : last, None] * error_O
        moved_GO[last:] -= inverse_GG[first:last, last:].T @ lost
    return found_GO
