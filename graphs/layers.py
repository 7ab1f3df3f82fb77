"""The layers that lowerings start from. Attribute names are the checkpoint's, so no name map exists."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.graphs.state import Precision


def as_type(op: OpBuilder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Cast where the type differs; no node where it does not."""
    return value if value.dtype == dtype else op.Cast(value, to=dtype)


def named(value: ir.Value, *sizes: int | ir.SymbolicDim | str) -> ir.Value:
    """The value, its sizes named where inference has lost them.

    ONNX Runtime plans memory by names: without, it reuses less, and takes three times as long to load.
    """
    value.shape = ir.Shape(sizes)
    return value


def size_of(value: ir.Value, axis: int) -> int | ir.SymbolicDim:
    """A dimension, by number or name."""
    if value.shape is None:
        raise ValueError(f"{value.name}: a value of unknown shape")
    return value.shape[axis]


class Linear(nn.Module):
    """x @ weight.T + bias. Gemm reads the checkpoint's [out, in] layout without a transposed copy."""

    def __init__(self, in_features: int, out_features: int, precision: Precision, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter([out_features, in_features], precision.weights)
        self.bias = nn.Parameter([out_features], precision.weights) if bias else None
        self.hidden = precision.hidden

    def tie(self, embedding: Embedding) -> None:
        """Read the embedding's weight: one initializer, two readers."""
        self.weight = embedding.weight

    def forward(self, op: OpBuilder, x_MD: ir.Value) -> ir.Value:
        """[M, in] -> [M, out]."""
        weight_FD = as_type(op, self.weight, self.hidden)
        if self.bias is None:
            return op.Gemm(x_MD, weight_FD, transB=1)
        return op.Gemm(x_MD, weight_FD, as_type(op, self.bias, self.hidden), transB=1)


class Embedding(nn.Module):
    """Rows of the weight by token id."""

    def __init__(self, num_embeddings: int, embedding_dim: int, precision: Precision) -> None:
        super().__init__()
        self.weight = nn.Parameter([num_embeddings, embedding_dim], precision.weights)
        self.hidden = precision.hidden

    def forward(self, op: OpBuilder, ids_BS: ir.Value) -> ir.Value:
        """[B, S] int64 -> [B, S, D]. Only the rows are cast, never the table."""
        return as_type(op, op.Gather(self.weight, ids_BS), self.hidden)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467); the statistics are f32 whatever x is."""

    def __init__(self, size: int, eps: float, precision: Precision) -> None:
        super().__init__()
        self.weight = nn.Parameter([size], precision.weights)
        self.eps = eps
        self.hidden = precision.hidden

    def forward(self, op: OpBuilder, x: ir.Value, delta: ir.Value | None = None) -> tuple[ir.Value, ir.Value]:
        """norm(x + delta) and x + delta, each [..., size]; what is to be added to x comes here to be fused."""
        total = x if delta is None else op.Add(x, delta)
        return self.normed(op, total), total

    def normed(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """The norm itself, [..., size] -> [..., size]."""
        weight = as_type(op, self.weight, self.hidden)
        return op.RMSNormalization(x, weight, axis=-1, epsilon=self.eps, stash_type=ir.DataType.FLOAT)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: QwenConfig, precision: Precision, linear: type[Linear]) -> None:
        super().__init__()
        hidden, feed_forward = config.hidden_size, config.intermediate_size
        self.gate_proj = linear(hidden, feed_forward, precision, bias=False)
        self.up_proj = linear(hidden, feed_forward, precision, bias=False)
        self.down_proj = linear(feed_forward, hidden, precision, bias=False)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """[..., D] -> [..., D]."""
        gate = self.gate_proj(op, x)
        silu = op.Mul(gate, op.Sigmoid(gate))
        return self.down_proj(op, op.Mul(silu, self.up_proj(op, x)))


class PackedMLP(MLP):
    """As MLP, with gate and up of one product."""

    def __init__(self, config: QwenConfig, precision: Precision, linear: type[Linear]) -> None:
        nn.Module.__init__(self)
        hidden, feed_forward = config.hidden_size, config.intermediate_size
        self.gate_up_proj = linear(hidden, 2 * feed_forward, precision, bias=False)
        self.down_proj = linear(feed_forward, hidden, precision, bias=False)
