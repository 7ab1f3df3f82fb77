"""How matrices are quantized."""

from __future__ import annotations

import dataclasses

from qwen_onnx.errors import UserError

BITS, BLOCK_SIZES = (4, 8), (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """How a matrix is quantized: integers that share an f32 scale, block by block along a row.

    Raises:
        UserError: bits or a block size that no operator has.
    """

    bits: int
    """4 or 8 to a weight."""
    block_size: int
    """16, 32, 64 or 128 weights."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise UserError(f"weights of {self.bits} bits: only 4 and 8 are supported")
        if self.block_size not in BLOCK_SIZES:
            raise UserError(f"blocks of {self.block_size} weights: only 16, 32, 64 and 128 are supported")

    @property
    def zero_point(self) -> int:
        """The integer that stands for 0."""
        return 1 << (self.bits - 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's integers."""
        return self.block_size * self.bits // 8

    def blocks(self, columns: int) -> int:
        """Blocks, and so scales, in a row of so many weights; the last may be partly padding."""
        return -(-columns // self.block_size)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row's integers, padding included."""
        return self.blocks(columns) * self.block_bytes


@dataclasses.dataclass(frozen=True)
class QuantPlan:
    """How an export is quantized."""

    layers: QuantConfig
    head: QuantConfig
    """Of the embedding too, which many models tie to it."""
