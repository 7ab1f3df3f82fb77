"""Layers with plain weights, as a Qwen in PyTorch has them, and the fused operators that compute them.

A weight is `weight` [out, in] as in the checkpoint; blocks.py and panels.py have the other weight formats.
Operators of the com.microsoft domain are typed by hand, since no inference knows them. What they compute:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.graphs.cache import Precision, as_type

MICROSOFT = "com.microsoft"
Product = Callable[[OpBuilder, ir.Value, ir.Value, ir.Value | None], ir.Value]
"""x @ weight.T + bias, over a weight [out, in] as the checkpoint has it."""


def gemm(op: OpBuilder, x_MD: ir.Value, weight_XD: ir.Value, bias_X: ir.Value | None) -> ir.Value:
    """[M, D] -> [M, X], without a transposed copy of the weight."""
    bias = [] if bias_X is None else [bias_X]
    return op.Gemm(x_MD, weight_XD, *bias, transB=1)


def fused_matmul_add(
    op: OpBuilder, x_BSD: ir.Value, weight_XD: ir.Value, bias_X: ir.Value | None
) -> ir.Value:
    """[B, S, D] -> [B, S, X]. The bias is a kernel of its own: on CUDA Gemm would copy it first, at the same cost."""
    y_BSX = fused_matmul(op, x_BSD, weight_XD)
    return y_BSX if bias_X is None else op.Add(y_BSX, bias_X)


def matmul_add(op: OpBuilder, x_BSD: ir.Value, weight_XD: ir.Value, bias_X: ir.Value | None) -> ir.Value:
    """[B, S, D] -> [B, S, X], of plain operators: some runtimes refuse Gemm in f16."""
    y_BSX = op.MatMul(x_BSD, op.Transpose(weight_XD, perm=[1, 0]))
    return y_BSX if bias_X is None else op.Add(y_BSX, bias_X)


class Linear(nn.Module):
    """x @ weight.T + bias, of a plain weight."""

    def __init__(
        self, in_features: int, out_features: int, precision: Precision, part: str, *, bias: bool = False,
        product: Product = gemm,
    ) -> None:  # fmt: skip
        """`part`: qkv, o, gate_up, down or head, what is quantized alike."""
        super().__init__()
        self.in_features, self.out_features, self.hidden = in_features, out_features, precision.hidden
        self.bias = nn.Parameter([out_features], precision.weights) if bias else None
        self.multiply = product
        self.add_weight(precision, part)

    def add_weight(self, precision: Precision, part: str) -> None:
        """Declare what holds the matrix."""
        self.weight = nn.Parameter([self.out_features, self.in_features], precision.weights)

    def tie(self, embedding: Embedding) -> None:
        """Read the embedding's weight: one initializer, two readers."""
        self.weight = embedding.weight

    def forward(self, op: OpBuilder, x: ir.Value, *, inside: bool = False) -> ir.Value:
        """[..., in] -> [..., out]; `inside`: both in the order that `product` reads and writes."""
        return self.product(op, x) if inside else self.leave(op, self.product(op, self.enter(op, x)))

    def enter(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """Hidden states in the order that `product` reads."""
        return x

    def leave(self, op: OpBuilder, y: ir.Value) -> ir.Value:
        """Back from it."""
        return y

    def product(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """[..., in] -> [..., out]."""
        weight = as_type(op, self.weight, self.hidden)
        return self.multiply(op, x, weight, self.bias and as_type(op, self.bias, self.hidden))


class Embedding(nn.Module):
    """Rows of a plain weight by token id."""

    def __init__(self, num_embeddings: int, embedding_dim: int, precision: Precision) -> None:
        super().__init__()
        self.num_embeddings, self.size, self.hidden = num_embeddings, embedding_dim, precision.hidden
        self.add_weight(precision)

    def add_weight(self, precision: Precision) -> None:
        """Declare what holds the matrix."""
        self.weight = nn.Parameter([self.num_embeddings, self.size], precision.weights)

    def forward(self, op: OpBuilder, ids_BS: ir.Value) -> ir.Value:
        """[B, S] int64 -> [B, S, D]. Only the rows are cast, never the table."""
        return as_type(op, op.Gather(self.weight, ids_BS), self.hidden)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467); the statistics are f32 whatever x is."""

    def __init__(self, size: int, eps: float, precision: Precision) -> None:
        super().__init__()
        self.weight = nn.Parameter([size], precision.weights)
        self.eps, self.hidden = eps, precision.hidden

    def forward(self, op: OpBuilder, x: ir.Value, delta: ir.Value | None = None) -> tuple[ir.Value, ir.Value]:
        """norm(x + delta) and x + delta, each [..., size]; what is to be added to x comes here to be fused."""
        total = x if delta is None else op.Add(x, delta)
        return self.normed(op, total), total

    def normed(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """The norm itself, [..., size] -> [..., size]."""
        weight = as_type(op, self.weight, self.hidden)
        return op.RMSNormalization(x, weight, axis=-1, epsilon=self.eps, stash_type=ir.DataType.FLOAT)


class FusedRMSNorm(RMSNorm):
    """As RMSNorm, with what is added to the stream added in the same kernel."""

    def forward(self, op: OpBuilder, x: ir.Value, delta: ir.Value | None = None) -> tuple[ir.Value, ir.Value]:
        """See RMSNorm.forward."""
        if delta is None:
            return self.normed(op, x), x
        weight = as_type(op, self.weight, self.hidden)
        return skip_simplified_layer_normalization(op, x, delta, weight, epsilon=self.eps)


class PortableRMSNorm(RMSNorm):
    """As RMSNorm, spelled out; the squares are f32, or they overflow in f16."""

    def normed(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """See RMSNorm.normed."""
        x_f32 = as_type(op, x, ir.DataType.FLOAT)
        mean_square = op.ReduceMean(op.Mul(x_f32, x_f32), axes=[-1], keepdims=1)
        normed = op.Div(x_f32, op.Sqrt(op.Add(mean_square, self.eps)))
        return op.Mul(as_type(op, normed, self.hidden), as_type(op, self.weight, self.hidden))


def fused_matmul(op: OpBuilder, x: ir.Value, weight_XD: ir.Value) -> ir.Value:
    """x @ weight.T, [B, S, D] -> [B, S, X]; the weight is read as it lies, [out, in]."""
    if x.shape is None or weight_XD.shape is None:
        raise ValueError("a product of unknown shapes")
    shape = ir.Shape([*x.shape[:-1], weight_XD.shape[0]])
    return op.FusedMatMul(x, weight_XD, transB=1, _domain=MICROSOFT, _outputs=[typed_as(x, shape)])


def silu(op: OpBuilder, x: ir.Value) -> ir.Value:
    """x * sigmoid(x)."""
    return op.Mul(x, op.Sigmoid(x))


def quick_gelu(op: OpBuilder, x: ir.Value) -> ir.Value:
    """x * sigmoid(x), which is SiLU: QuickGelu with alpha 1."""
    return op.QuickGelu(x, alpha=1.0, _domain=MICROSOFT, _outputs=[typed_as(x, x.shape)])


def skip_simplified_layer_normalization(
    op: OpBuilder, x: ir.Value, delta: ir.Value, weight: ir.Value, *, epsilon: float
) -> tuple[ir.Value, ir.Value]:
    """RMS norm of x + delta, and x + delta; statistics in f32 on CUDA whatever the type."""
    outputs = [typed_as(x, x.shape), ir.Value(name=""), ir.Value(name=""), typed_as(x, x.shape)]
    normed, _, _, total = op.SkipSimplifiedLayerNormalization(
        x, delta, weight, epsilon=epsilon, _domain=MICROSOFT, _outputs=outputs
    )
    return normed, total


def rotary_embedding(
    op: OpBuilder, x_BSX: ir.Value, position_ids_BS: ir.Value, cos_PH2: ir.Value, sin_PH2: ir.Value
) -> ir.Value:
    """Each head of [B, S, heads x H] rotated by its token's position, its halves against each other."""
    return op.RotaryEmbedding(
        x_BSX, position_ids_BS, cos_PH2, sin_PH2, _domain=MICROSOFT, _outputs=[typed_as(x_BSX, x_BSX.shape)]
    )


def typed_as(like: ir.Value, shape: ir.Shape | None) -> ir.Value:
    """An output of the type of another value."""
    return ir.Value(type=like.type, shape=shape)
