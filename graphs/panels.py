"""Weights in panels, f32 [out / R, in, R], which ONNX Runtime's CPU provider multiplies as 1 x 1 convolutions.

Its kernels read panels from end to end, where Gemm's begin anew after every four rows (bench/README.md). The
operators are those that its own optimizer writes into graphs of convolutions. A tensor [1, C, 1, M] lies in memory
as [C / R, M, R], R channels side by side: as many as the processor's vectors hold, 8 or 16. A filter [F, C, 1, 1]
lies as [F / R, C, R].
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.graphs.cache import Precision, named, size_of
from qwen_onnx.graphs.layers import Embedding, Linear

NCHWC = "com.microsoft.nchwc"


class PanelsLinear(Linear):
    """As Linear, of a weight in panels; `product` is on channels. Rows of zeros fill a vocabulary's last panel."""

    def add_weight(self, precision: Precision, part: str) -> None:
        """See Linear.add_weight."""
        rows = _rows(precision)
        padded = -(-self.out_features // rows) * rows
        self.weight = nn.Parameter([padded, self.in_features, 1, 1], precision.weights)

    def tie(self, embedding: Embedding) -> None:
        """Read the embedding's bytes, under a name and a shape of its own."""

    def enter(self, op: OpBuilder, x_MD: ir.Value) -> ir.Value:
        """[M, in] -> [1, in, 1, M] (as above)."""
        size = self.in_features
        x_11MD = named(op.Reshape(x_MD, [1, 1, -1, size]), 1, 1, size_of(x_MD, 0), size)
        return reorder_input(op, x_11MD)

    def product(self, op: OpBuilder, x_1D1M: ir.Value) -> ir.Value:
        """[1, in, 1, M] -> [1, out, 1, M]."""
        return conv(op, x_1D1M, self.weight, self.bias)

    def leave(self, op: OpBuilder, y_1X1M: ir.Value) -> ir.Value:
        """[1, out, 1, M] -> [M, out]."""
        y_11MX = reorder_output(op, y_1X1M, channels=self.out_features)
        return named(op.Reshape(y_11MX, [-1, self.out_features]), size_of(y_1X1M, 3), self.out_features)


class PanelsEmbedding(Embedding):
    """As Embedding, of a weight in panels: a row is picked out of its panel, one number from each R."""

    def add_weight(self, precision: Precision) -> None:
        """See Embedding.add_weight."""
        self.rows = _rows(precision)
        padded = -(-self.num_embeddings // self.rows) * self.rows
        # Not of one dimension: onnx takes such tensors for shapes, and would copy all of it number by number.
        self.weight = nn.Parameter([padded * self.size, 1], precision.weights)

    def forward(self, op: OpBuilder, ids_BS: ir.Value) -> ir.Value:
        """See Embedding.forward."""
        rows = self.rows
        first_BS = op.Add(op.Mul(op.Div(ids_BS, rows), rows * self.size), op.Mod(ids_BS, rows))
        column_D = op.Range(0, rows * self.size, rows)
        x_BSD1 = op.Gather(self.weight, op.Add(op.Unsqueeze(first_BS, [2]), column_D))
        return op.Squeeze(x_BSD1, [3])


def reorder_input(op: OpBuilder, x_11MC: ir.Value) -> ir.Value:
    """Rows of channels, [1, 1, M, C] -> [1, C, 1, M] of this domain."""
    one, _, tokens, channels = _shape(x_11MC)
    return op.ReorderInput(
        x_11MC, channels_last=1, _domain=NCHWC, _outputs=[_typed([one, channels, 1, tokens])]
    )


def conv(op: OpBuilder, x_1C1M: ir.Value, filter_FC11: ir.Value, bias_F: ir.Value | None) -> ir.Value:
    """A product with a matrix: each of M pixels by itself, [1, C, 1, M] -> [1, F, 1, M]."""
    one, _, _, tokens = _shape(x_1C1M)
    inputs = [x_1C1M, filter_FC11] + ([] if bias_F is None else [bias_F])
    return op.Conv(
        *inputs, kernel_shape=[1, 1], strides=[1, 1], dilations=[1, 1], pads=[0, 0, 0, 0], group=1,
        _domain=NCHWC, _outputs=[_typed([one, _shape(filter_FC11)[0], 1, tokens])],
    )  # fmt: skip


def reorder_output(op: OpBuilder, x_1C1M: ir.Value, *, channels: int) -> ir.Value:
    """The first `channels` as rows again, [1, C, 1, M] -> [1, 1, M, channels]."""
    one, _, _, tokens = _shape(x_1C1M)
    output = _typed([one, 1, tokens, channels])
    return op.ReorderOutput(x_1C1M, channels=channels, channels_last=1, _domain=NCHWC, _outputs=[output])


def _shape(x: ir.Value) -> list[int | ir.SymbolicDim]:
    if x.shape is None or len(x.shape) != 4:
        raise ValueError(f"{x.name}: four dimensions wanted")
    return list(x.shape)


def _typed(shape: list[int | ir.SymbolicDim]) -> ir.Value:
    return ir.Value(type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def _rows(precision: Precision) -> int:
    if precision.panel_rows is None:
        raise ValueError("panels of a precision that has none")
    return precision.panel_rows
