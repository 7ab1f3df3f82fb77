"""Weights in blocks of 4 or 8 bits: `qweight`, integers along each row, and `scales`, one for each block; where the
format has them, `zero_points`, packed as the integers are.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.contract.quant import QuantConfig
from qwen_onnx.graphs.cache import Precision, as_type
from qwen_onnx.graphs.layers import MICROSOFT, Embedding, Linear, typed_as

_SCALES = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16}


class BlocksLinear(Linear):
    """As Linear, of a weight in blocks, on [M, in]."""

    def add_weight(self, precision: Precision, part: str) -> None:
        """See Linear.add_weight."""
        self.quant = _quant(precision, part, self.in_features)
        blocks, size = self.quant.blocks(self.in_features), self.quant.block_bytes
        self.qweight = nn.Parameter([self.out_features, blocks, size], ir.DataType.UINT8)
        self.scales = nn.Parameter([self.out_features, blocks], _SCALES[self.quant.scales])
        self.zero_points = _zero_points(self.out_features, self.in_features, self.quant)

    def tie(self, embedding: Embedding) -> None:
        """Read the embedding's scales, and its bytes under a name and a shape of its own: operators differ in it."""
        assert isinstance(embedding, BlocksEmbedding)  # of the same WeightFormat
        self.scales, self.zero_points = embedding.scales, embedding.zero_points

    def product(self, op: OpBuilder, x_MD: ir.Value) -> ir.Value:
        """[M, in] -> [M, out]."""
        # Scales and bias have the activations' type; cast, they are constants that a session folds as it starts.
        scales = as_type(op, self.scales, self.hidden)
        bias = self.bias and as_type(op, self.bias, self.hidden)
        return matmul_nbits(
            op,
            x_MD,
            self.qweight,
            scales,
            self.zero_points,
            bias,
            in_features=self.in_features,
            quant=self.quant,
        )


class BlocksEmbedding(Embedding):
    """As Embedding, of a weight in blocks."""

    def add_weight(self, precision: Precision) -> None:
        """See Embedding.add_weight."""
        self.quant = _quant(precision, "head", self.size)
        blocks = self.quant.blocks(self.size)
        self.padded = blocks * self.quant.block_size
        self.qweight = nn.Parameter([self.num_embeddings, blocks * self.quant.block_bytes], ir.DataType.UINT8)
        self.scales = nn.Parameter([self.num_embeddings, blocks], _SCALES[self.quant.scales])
        self.zero_points = _zero_points(self.num_embeddings, self.size, self.quant)

    def forward(self, op: OpBuilder, ids_BS: ir.Value) -> ir.Value:
        """See Embedding.forward."""
        scales = as_type(op, self.scales, self.hidden)
        x_BSD = gather_block_quantized(
            op, self.qweight, ids_BS, scales, self.zero_points, size=self.padded, quant=self.quant
        )
        return x_BSD if self.padded == self.size else op.Slice(x_BSD, [0], [self.size], [2])


def matmul_nbits(
    op: OpBuilder,
    x_MD: ir.Value,
    qweight: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value | None,
    bias_X: ir.Value | None,
    *,
    in_features: int,
    quant: QuantConfig,
) -> ir.Value:
    """x @ weight.T + bias, [M, in] -> [M, X], over a weight in blocks.

    accuracy_level 4: activations are rounded to 8 bits, block by block, and products summed as integers.
    """
    if x_MD.shape is None or scales.shape is None:
        raise ValueError("a product of unknown shapes")
    out_features = int(scales.shape.numpy()[0])
    inputs = [x_MD, qweight, scales, zero_points, None, bias_X]
    while inputs[-1] is None:
        inputs.pop()
    return op.MatMulNBits(
        *inputs, K=in_features, N=out_features, bits=quant.bits, block_size=quant.block_size,
        accuracy_level=4, _domain=MICROSOFT, _outputs=[typed_as(x_MD, ir.Shape([*x_MD.shape[:-1], out_features]))],
    )  # fmt: skip


def gather_block_quantized(
    op: OpBuilder,
    qweight_VE: ir.Value,
    ids_BS: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value | None,
    *,
    size: int,
    quant: QuantConfig,
) -> ir.Value:
    """Rows of a table in blocks, [B, S, size]; the bytes are those that matmul_nbits reads."""
    if ids_BS.shape is None:
        raise ValueError("ids of unknown shape")
    output = ir.Value(type=scales.type, shape=ir.Shape([*ids_BS.shape, size]))
    zeros = [] if zero_points is None else [zero_points]
    return op.GatherBlockQuantized(
        qweight_VE, ids_BS, scales, *zeros, bits=quant.bits, block_size=quant.block_size, gather_axis=0,
        quantize_axis=1, _domain=MICROSOFT, _outputs=[output],
    )  # fmt: skip


def _zero_points(rows: int, columns: int, quant: QuantConfig) -> nn.Parameter | None:
    return nn.Parameter([rows, quant.zero_bytes(columns)], ir.DataType.UINT8) if quant.zero_points else None


def _quant(precision: Precision, part: str, columns: int) -> QuantConfig:
    if precision.quant is None:
        raise ValueError("blocks of a precision that is not quantized")
    return precision.quant.of(part if part == "head" else f"{precision.layer}.{part}", columns)
