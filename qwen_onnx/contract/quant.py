"""How matrices are quantized, and what it cost."""

from __future__ import annotations

import dataclasses
import re
from types import MappingProxyType

from qwen_onnx.errors import UserError

BITS, BLOCK_SIZES = (4, 8), (16, 32, 64, 128)
HEAD = ("model.embed_tokens.weight", "lm_head.weight")
PARTS = MappingProxyType({
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o", "gate_proj": "gate_up", "up_proj": "gate_up",
    "down_proj": "down",
})  # fmt: skip
"""Matrices of a layer that have the same inputs: some graphs read them as one, so that they are quantized alike."""


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """How a matrix is quantized: integers that share a scale, block by block along a row.

    Raises:
        UserError: bits or a block size that no operator has.
    """

    bits: int
    """4 or 8 to a weight."""
    block_size: int
    """16, 32, 64 or 128 weights."""
    zero_points: bool = False
    """Each block has the integer that stands for 0 as well; else it is half the codes' range in all."""
    scales: str = "F32"
    """F32 or F16: how they are stored."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise UserError(f"weights of {self.bits} bits: only 4 and 8 are supported")
        if self.block_size not in BLOCK_SIZES:
            raise UserError(f"blocks of {self.block_size} weights: only 16, 32, 64 and 128 are supported")
        if self.scales not in ("F32", "F16"):
            raise UserError(f"scales as {self.scales}: only F32 and F16 are supported")

    @property
    def zero_point(self) -> int:
        """The integer that stands for 0 where blocks have none of their own."""
        return 1 << (self.bits - 1)

    @property
    def levels(self) -> int:
        """The largest integer."""
        return (1 << self.bits) - 1

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's integers."""
        return self.block_size * self.bits // 8

    def fitting(self, columns: int) -> QuantConfig:
        """With the largest blocks up to these that fill a row of so many weights; as it is where none do."""
        sizes = (size for size in reversed(BLOCK_SIZES) if size <= self.block_size and columns % size == 0)
        return dataclasses.replace(self, block_size=next(sizes, self.block_size))

    def blocks(self, columns: int) -> int:
        """Blocks, and so scales, in a row of so many weights; the last may be partly padding."""
        return -(-columns // self.block_size)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row's integers, padding included."""
        return self.blocks(columns) * self.block_bytes

    def zero_bytes(self, columns: int) -> int:
        """Bytes of a row's zero points, the last one padded to a byte; 0 where it has none."""
        return -(-self.blocks(columns) * self.bits // 8) if self.zero_points else 0

    def bits_a_weight(self, columns: int) -> float:
        """In the file, scales and padding included."""
        scale = 4 if self.scales == "F32" else 2
        nbytes = self.row_bytes(columns) + self.zero_bytes(columns) + scale * self.blocks(columns)
        return 8 * nbytes / columns


@dataclasses.dataclass(frozen=True)
class QuantPlan:
    """How an export is quantized."""

    layers: QuantConfig
    head: QuantConfig
    """Of the embedding too, which many models tie to it."""
    parts: tuple[tuple[str, QuantConfig], ...] = ()
    """Of layers that are quantized otherwise, by the name that `part_of` gives: `3.down`."""

    def of(self, part: str, columns: int) -> QuantConfig:
        """Of a part as `part_of` names it, whose matrices have so many columns."""
        found = self.head if part == "head" else dict(self.parts).get(part, self.layers)
        return found.fitting(columns)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a model read while its matrices were quantized; without one they were rounded one by one."""

    text: str
    """`auto` for the package's own, else the name of a file."""
    sha256: str
    """Of the token ids."""
    tokens: int


@dataclasses.dataclass(frozen=True)
class Quality:
    """What quantizing cost, over a text that no calibration has seen; where it was measured."""

    positions: int
    kl: float
    """Mean KL divergence from the checkpoint in f32, in nats."""
    top1: float
    """Share of positions at which both have the same likeliest token."""
    perplexity: float
    checkpoint_perplexity: float


def part_of(name: str) -> str | None:
    """`3.down` for a checkpoint's tensor, `head` for embedding and head; None of what is no matrix of them."""
    if name in HEAD:
        return "head"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.weight", name)
    return f"{found[1]}.{PARTS[found[2]]}" if found and found[2] in PARTS else None
