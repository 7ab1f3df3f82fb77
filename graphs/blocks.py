"""Weights in blocks of 4 or 8 bits: `qweight`, integers along each row, and `scales`, an f32 for each block."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.contract.quant import QuantConfig, QuantPlan
from qwen_onnx.graphs.cache import Precision, as_type
from qwen_onnx.graphs.layers import MICROSOFT, Embedding, Linear, typed_as


class BlocksLinear(Linear):
    """As Linear, of a weight in blocks, on [M, in]."""

    def add_weight(self, precision: Precision, *, head: bool) -> None:
        """See Linear.add_weight."""
        plan = _plan(precision)
        self.quant = plan.head if head else plan.layers
        blocks, size = self.quant.blocks(self.in_features), self.quant.block_bytes
        self.qweight = nn.Parameter([self.out_features, blocks, size], ir.DataType.UINT8)
        self.scales = nn.Parameter([self.out_features, blocks], ir.DataType.FLOAT)

    def tie(self, embedding: Embedding) -> None:
        """Read the embedding's scales, and its bytes under a name and a shape of its own: operators differ in it."""
        assert isinstance(embedding, BlocksEmbedding)  # of the same WeightFormat
        self.scales = embedding.scales

    def product(self, op: OpBuilder, x_MD: ir.Value) -> ir.Value:
        """[M, in] -> [M, out]."""
        # Scales and bias have the activations' type; cast, they are constants that a session folds as it starts.
        scales = as_type(op, self.scales, self.hidden)
        bias = self.bias and as_type(op, self.bias, self.hidden)
        return matmul_nbits(
            op, x_MD, self.qweight, scales, bias, in_features=self.in_features, quant=self.quant
        )


class BlocksEmbedding(Embedding):
    """As Embedding, of a weight in blocks."""

    def add_weight(self, precision: Precision) -> None:
        """See Embedding.add_weight."""
        self.quant = _plan(precision).head
        blocks = self.quant.blocks(self.size)
        self.padded = blocks * self.quant.block_size
        self.qweight = nn.Parameter([self.num_embeddings, blocks * self.quant.block_bytes], ir.DataType.UINT8)
        self.scales = nn.Parameter([self.num_embeddings, blocks], ir.DataType.FLOAT)

    def forward(self, op: OpBuilder, ids_BS: ir.Value) -> ir.Value:
        """See Embedding.forward."""
        x_BSD = gather_block_quantized(
            op, self.qweight, ids_BS, self.scales, size=self.padded, quant=self.quant
        )
        x_BSD = as_type(op, x_BSD, self.hidden)
        return x_BSD if self.padded == self.size else op.Slice(x_BSD, [0], [self.size], [2])


def matmul_nbits(
    op: OpBuilder,
    x_MD: ir.Value,
    qweight: ir.Value,
    scales: ir.Value,
    bias_X: ir.Value | None,
    *,
    in_features: int,
    quant: QuantConfig,
) -> ir.Value:
    """x @ weight.T + bias, [M, in] -> [M, X], over a weight in blocks; its zero point is half the codes' range.

    accuracy_level 4: activations are rounded to 8 bits, block by block, and products summed as integers.
    """
    if x_MD.shape is None or scales.shape is None:
        raise ValueError("a product of unknown shapes")
    out_features = int(scales.shape.numpy()[0])
    inputs = [x_MD, qweight, scales] + ([] if bias_X is None else [None, None, bias_X])
    return op.MatMulNBits(
        *inputs, K=in_features, N=out_features, bits=quant.bits, block_size=quant.block_size,
        accuracy_level=4, _domain=MICROSOFT, _outputs=[typed_as(x_MD, ir.Shape([*x_MD.shape[:-1], out_features]))],
    )  # fmt: skip


def gather_block_quantized(
    op: OpBuilder, qweight_VE: ir.Value, ids_BS: ir.Value, scales: ir.Value, *, size: int, quant: QuantConfig
) -> ir.Value:
    """Rows of a table in blocks, [B, S, size]; the bytes are those that matmul_nbits reads."""
    if ids_BS.shape is None:
        raise ValueError("ids of unknown shape")
    output = ir.Value(type=scales.type, shape=ir.Shape([*ids_BS.shape, size]))
    return op.GatherBlockQuantized(
        qweight_VE, ids_BS, scales, bits=quant.bits, block_size=quant.block_size, gather_axis=0, quantize_axis=1,
        _domain=MICROSOFT, _outputs=[output],
    )  # fmt: skip


def _plan(precision: Precision) -> QuantPlan:
    if precision.quant is None:
        raise ValueError("blocks of a precision that is not quantized")
    return precision.quant
