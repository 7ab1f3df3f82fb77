"""The lowerings over f32 matrices in panels, which ONNX Runtime's CPU provider multiplies as 1 x 1 convolutions.

A matrix [out, in] lies in the weights file as [out / P, in, P], P rows to a panel. The kernels of com.microsoft.nchwc
read panels from end to end, as they lie; Gemm's begin anew after every four rows of an [out, in] matrix, and wait for
memory each time (bench/README.md). P is the processor's: 8 or 16.
"""

from __future__ import annotations

from types import MappingProxyType

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.graphs import nchwc_ops
from qwen_onnx.graphs.contrib import FusedRMSNorm
from qwen_onnx.graphs.grouped import GroupedAttention, GroupedLowering
from qwen_onnx.graphs.layers import MLP, Embedding, Linear, named, size_of
from qwen_onnx.graphs.state import Precision
from qwen_onnx.graphs.static import CaptureLowering, PackedStaticAttention, StaticLowering

_OPSETS = MappingProxyType({"": 24, "com.microsoft": 1, nchwc_ops.DOMAIN: 1})


class PanelProduct(Linear):
    """As Linear, on channels (see nchwc_ops). Rows of zeros fill the last panel of a vocabulary."""

    def __init__(self, in_features: int, out_features: int, precision: Precision, *, bias: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        padded = _padded(out_features, precision)
        self.weight = nn.Parameter([padded, in_features, 1, 1], precision.weights)
        self.bias = nn.Parameter([out_features], precision.weights) if bias else None

    def tie(self, embedding: Embedding) -> None:
        """Read the embedding's bytes, under a name and a shape of its own."""
        if not isinstance(embedding, PanelEmbedding):
            raise TypeError("a head in panels is tied to an embedding in panels")

    def forward(self, op: OpBuilder, x_1D1M: ir.Value) -> ir.Value:
        """[1, in, 1, M] -> [1, out, 1, M]."""
        return nchwc_ops.conv(op, x_1D1M, self.weight, self.bias)


class PanelLinear(PanelProduct):
    """As Linear."""

    def forward(self, op: OpBuilder, x_MD: ir.Value) -> ir.Value:
        """[M, in] -> [M, out]."""
        y_1X1M = super().forward(op, _channels(op, x_MD, self.in_features))
        return _rows(op, y_1X1M, self.out_features)


class PanelEmbedding(Embedding):
    """As Embedding; a row is picked out of its panel, one number from each P."""

    def __init__(self, num_embeddings: int, embedding_dim: int, precision: Precision) -> None:
        nn.Module.__init__(self)
        self.panel_rows, self.size = panel_rows_of(precision), embedding_dim
        # Not of one dimension: onnx takes such tensors for shapes, and would copy all of it number by number.
        self.weight = nn.Parameter([_padded(num_embeddings, precision) * embedding_dim, 1], precision.weights)

    def forward(self, op: OpBuilder, ids_BS: ir.Value) -> ir.Value:
        """[B, S] int64 -> [B, S, D]."""
        rows = self.panel_rows
        first_BS = op.Add(op.Mul(op.Div(ids_BS, rows), rows * self.size), op.Mod(ids_BS, rows))
        column_D = op.Range(0, rows * self.size, rows)
        x_BSD1 = op.Gather(self.weight, op.Add(op.Unsqueeze(first_BS, [2]), column_D))
        return op.Squeeze(x_BSD1, [3])


class PanelMLP(MLP):
    """As MLP, on channels all through. Gate and up are two products: to split one takes longer."""

    def __init__(self, config: QwenConfig, precision: Precision, linear: type[Linear]) -> None:
        super().__init__(config, precision, PanelProduct)
        self.hidden_size = config.hidden_size

    def forward(self, op: OpBuilder, x_MD: ir.Value) -> ir.Value:
        """[M, D] -> [M, D]."""
        y_1D1M = super().forward(op, _channels(op, x_MD, self.hidden_size))
        return _rows(op, y_1D1M, self.hidden_size)


class PanelLowering(StaticLowering):
    """As StaticLowering."""

    opsets = _OPSETS
    linear, embedding, norm = PanelLinear, PanelEmbedding, FusedRMSNorm
    attention, mlp = PackedStaticAttention, PanelMLP


class PanelCaptureLowering(CaptureLowering):
    """As CaptureLowering."""

    opsets = _OPSETS
    linear, embedding, norm = PanelLinear, PanelEmbedding, FusedRMSNorm
    attention, mlp = PackedStaticAttention, PanelMLP


class PanelGroupedAttention(PackedStaticAttention, GroupedAttention):
    """As GroupedAttention, with queries, keys and values of one product."""


class PanelGroupedLowering(GroupedLowering):
    """As GroupedLowering."""

    opsets = _OPSETS
    linear, embedding = PanelLinear, PanelEmbedding
    attention, mlp = PanelGroupedAttention, PanelMLP


def panel_rows_of(precision: Precision) -> int:
    """P."""
    if precision.panel_rows is None:
        raise ValueError("a precision without panels")
    return precision.panel_rows


def _padded(out_features: int, precision: Precision) -> int:
    rows = panel_rows_of(precision)
    return -(-out_features // rows) * rows


def _channels(op: OpBuilder, x_MD: ir.Value, size: int) -> ir.Value:
    x_11MD = named(op.Reshape(x_MD, [1, 1, -1, size]), 1, 1, size_of(x_MD, 0), size)
    return nchwc_ops.reorder_input(op, x_11MD)


def _rows(op: OpBuilder, y_1X1M: ir.Value, size: int) -> ir.Value:
    y_11MX = nchwc_ops.reorder_output(op, y_1X1M, channels=size)
    return named(op.Reshape(y_11MX, [-1, size]), size_of(y_1X1M, 3), size)
