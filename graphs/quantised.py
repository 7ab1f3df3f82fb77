"""The lowerings over weights quantised in blocks, which the products unpack as they go.

A matrix W [out, in] is two tensors: `qweight`, its integers side by side along each row, and `scales`, an f32 for
each block of a row. A tied head and embedding are two readers of the same bytes.
"""

from __future__ import annotations

from types import MappingProxyType

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.contract import BlockPlan, Blocks
from qwen_onnx.graphs.contrib import ContribLowering
from qwen_onnx.graphs.contrib_ops import gather_block_quantized, matmul_nbits
from qwen_onnx.graphs.grouped import GroupedAttention, GroupedLowering
from qwen_onnx.graphs.layers import Embedding, Linear, PackedMLP, as_type
from qwen_onnx.graphs.state import Precision
from qwen_onnx.graphs.static import CaptureLowering, PackedStaticAttention, StaticLowering


def plan_of(precision: Precision) -> BlockPlan:
    """How matrices are quantised."""
    if precision.blocks is None:
        raise ValueError("a precision without blocks")
    return precision.blocks


class QuantisedLinear(Linear):
    """As Linear."""

    def __init__(self, in_features: int, out_features: int, precision: Precision, *, bias: bool) -> None:
        nn.Module.__init__(self)
        self.blocks, self.in_features = self.blocks_of(precision), in_features
        count = -(-in_features // self.blocks.block_size)
        size = self.blocks.block_size * self.blocks.bits // 8
        self.qweight = nn.Parameter([out_features, count, size], ir.DataType.UINT8)
        self.scales = nn.Parameter([out_features, count], ir.DataType.FLOAT)
        self.bias = nn.Parameter([out_features], precision.weights) if bias else None
        self.hidden = precision.hidden

    def blocks_of(self, precision: Precision) -> Blocks:
        """How this matrix is quantised."""
        return plan_of(precision).layers

    def forward(self, op: OpBuilder, x_MD: ir.Value) -> ir.Value:
        """[M, in] -> [M, out]."""
        # Scales and bias have the activations' type; cast, they are constants that a session folds as it starts.
        scales, bias = (
            as_type(op, self.scales, self.hidden),
            self.bias and as_type(op, self.bias, self.hidden),
        )
        return matmul_nbits(
            op, x_MD, self.qweight, scales, bias, in_features=self.in_features, blocks=self.blocks
        )


class QuantisedHead(QuantisedLinear):
    """As QuantisedLinear, in bits and blocks of its own."""

    def blocks_of(self, precision: Precision) -> Blocks:
        """See QuantisedLinear.blocks_of."""
        return plan_of(precision).head

    def tie(self, embedding: Embedding) -> None:
        """Read the embedding's scales, and its bytes under a name and a shape of its own: operators differ in it."""
        if not isinstance(embedding, QuantisedEmbedding):
            raise TypeError("a head in blocks is tied to an embedding in blocks")
        self.scales = embedding.scales


class QuantisedEmbedding(Embedding):
    """As Embedding."""

    def __init__(self, num_embeddings: int, embedding_dim: int, precision: Precision) -> None:
        nn.Module.__init__(self)
        self.blocks, self.size = plan_of(precision).head, embedding_dim
        count = -(-embedding_dim // self.blocks.block_size)
        padded = count * self.blocks.block_size
        self.padded = padded
        self.qweight = nn.Parameter([num_embeddings, padded * self.blocks.bits // 8], ir.DataType.UINT8)
        self.scales = nn.Parameter([num_embeddings, count], ir.DataType.FLOAT)
        self.hidden = precision.hidden

    def forward(self, op: OpBuilder, ids_BS: ir.Value) -> ir.Value:
        """[B, S] int64 -> [B, S, D]."""
        x_BSD = gather_block_quantized(
            op, self.qweight, ids_BS, self.scales, size=self.padded, blocks=self.blocks
        )
        x_BSD = as_type(op, x_BSD, self.hidden)
        return x_BSD if self.padded == self.size else op.Slice(x_BSD, [0], [self.size], [2])


class QuantisedMLP(PackedMLP):
    """As MLP, with gate and up of one product."""

    def forward(self, op: OpBuilder, x_MD: ir.Value) -> ir.Value:
        """[M, D] -> [M, D]."""
        gate_MF, up_MF = op.Split(self.gate_up_proj(op, x_MD), num_outputs=2, axis=-1, _outputs=2)
        return self.down_proj(op, op.Mul(op.Mul(gate_MF, op.Sigmoid(gate_MF)), up_MF))


class QuantisedLowering(StaticLowering):
    """As StaticLowering."""

    opsets = MappingProxyType({"": 24, "com.microsoft": 1})
    linear, head, embedding = QuantisedLinear, QuantisedHead, QuantisedEmbedding
    attention, mlp = PackedStaticAttention, QuantisedMLP


class QuantisedCaptureLowering(CaptureLowering):
    """As CaptureLowering."""

    opsets = MappingProxyType({"": 24, "com.microsoft": 1})
    linear, head, embedding = QuantisedLinear, QuantisedHead, QuantisedEmbedding
    attention, mlp = PackedStaticAttention, QuantisedMLP


class QuantisedGroupedAttention(PackedStaticAttention, GroupedAttention):
    """As GroupedAttention, with queries, keys and values of one product."""


class QuantisedGroupedLowering(GroupedLowering):
    """As GroupedLowering."""

    linear, head, embedding = QuantisedLinear, QuantisedHead, QuantisedEmbedding
    attention, mlp = QuantisedGroupedAttention, QuantisedMLP


class QuantisedContribLowering(ContribLowering):
    """As ContribLowering."""

    linear, head, embedding = QuantisedLinear, QuantisedHead, QuantisedEmbedding

    def __init__(self) -> None:
        super().__init__(packed=True)
