"""The `contrib` lowering: ONNX Runtime's fused operators, for its CUDA provider in f16 and bf16.

The cache is as in `static`, but a row's tokens lie in it from slot 0 on without padding, so rows of several tokens
go one at a time; rows of one token each go together.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar, NamedTuple

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder, nn

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import BATCH, CAPACITY, KEPT, SEQLENS_K, TOTAL_SEQUENCE_LENGTH
from qwen_onnx.graphs.attention import Attention
from qwen_onnx.graphs.contrib_ops import (
    fused_matmul,
    group_query_attention,
    quick_gelu,
    skip_simplified_layer_normalization,
)
from qwen_onnx.graphs.layers import MLP, Linear, PackedMLP, RMSNorm, as_type, named, size_of
from qwen_onnx.graphs.lowering import Lowering
from qwen_onnx.graphs.rotary import RotaryTables
from qwen_onnx.graphs.state import END, KeyValue, Precision


class ContribStep(NamedTuple):
    """What GroupQueryAttention asks beside queries and cache."""

    seqlens_k_B: ir.Value
    """int32: each row's live length less one, the new tokens counted."""
    total_sequence_length: ir.Value
    """int32 scalar, read on the host; see contrib_ops."""
    cos_PH2: ir.Value
    """[positions, H/2] in the type of the hidden states, which the operator asks for."""
    sin_PH2: ir.Value
    single: bool
    """There is one token a row."""


class FusedLinear(Linear):
    """As Linear, on [B, S, in]. The bias is a kernel of its own: Gemm would copy it first, at the same cost."""

    def forward(self, op: OpBuilder, x_BSD: ir.Value) -> ir.Value:
        """[B, S, in] -> [B, S, out]."""
        y = fused_matmul(op, x_BSD, as_type(op, self.weight, self.hidden))
        return y if self.bias is None else op.Add(y, as_type(op, self.bias, self.hidden))


class FusedRMSNorm(RMSNorm):
    """As RMSNorm, with what is added to the stream added in the same kernel."""

    def forward(self, op: OpBuilder, x: ir.Value, delta: ir.Value | None = None) -> tuple[ir.Value, ir.Value]:
        """See RMSNorm.forward."""
        if delta is None:
            return self.normed(op, x), x
        weight = as_type(op, self.weight, self.hidden)
        return skip_simplified_layer_normalization(op, x, delta, weight, epsilon=self.eps)


class ContribAttention(Attention):
    """One GroupQueryAttention node; Qwen3's norms of queries and keys before it."""

    def forward(
        self, op: OpBuilder, x_BSD: ir.Value, past: KeyValue, step: ContribStep
    ) -> tuple[ir.Value, KeyValue]:
        """See Attention.forward."""
        q, k, v = self.projected(op, x_BSD)
        if self.q_norm is not None and self.k_norm is not None and k is not None:
            q = self._normed(op, q, self.q_norm, self.heads)
            k = self._normed(op, k, self.k_norm, self.kv_heads)
        attended_BSX, present = group_query_attention(
            op, q, k, v, past, *step[:4],
            num_heads=self.heads, kv_num_heads=self.kv_heads, head_dim=self.head_dim,
        )  # fmt: skip
        return self.o_proj(op, attended_BSX), present

    def projected(self, op: OpBuilder, x_BSD: ir.Value) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        """Queries, keys and values [B, S, X] each, or all of them in the first."""
        return self.q_proj(op, x_BSD), self.k_proj(op, x_BSD), self.v_proj(op, x_BSD)

    def _normed(self, op: OpBuilder, x_BSX: ir.Value, norm: nn.Module, heads: int) -> ir.Value:
        x_BSNH, _ = norm(op, op.Reshape(x_BSX, [0, 0, heads, self.head_dim]))
        return op.Reshape(x_BSNH, [0, 0, heads * self.head_dim])


class PackedAttention(ContribAttention):
    """Reads the matrices of queries, keys and values as one."""

    def add_projections(self, config: QwenConfig, precision: Precision, linear: type[Linear]) -> None:
        """See Attention.add_projections."""
        size = self.query_size + 2 * self.key_size
        self.qkv_proj = linear(config.hidden_size, size, precision, bias=config.qkv_bias)

    def projected(self, op: OpBuilder, x_BSD: ir.Value) -> tuple[ir.Value, ir.Value | None, ir.Value | None]:
        """See ContribAttention.projected."""
        qkv_BSX = self.qkv_proj(op, x_BSD)
        if self.q_norm is None:
            return qkv_BSX, None, None
        q, k, v = op.Split(qkv_BSX, [self.query_size, self.key_size, self.key_size], axis=-1, _outputs=3)
        return q, k, v


class ContribMLP(MLP):
    """As MLP, with SiLU in one kernel."""

    def forward(self, op: OpBuilder, x_BSD: ir.Value) -> ir.Value:
        """[B, S, D] -> [B, S, D]."""
        gate_BSF, up_BSF = self.gate_and_up(op, x_BSD)
        return self.down_proj(op, op.Mul(quick_gelu(op, gate_BSF), up_BSF))

    def gate_and_up(self, op: OpBuilder, x_BSD: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Both projections, [B, S, F] each."""
        return self.gate_proj(op, x_BSD), self.up_proj(op, x_BSD)


class PackedContribMLP(PackedMLP, ContribMLP):
    """Reads the matrices of gate and up as one."""

    def gate_and_up(self, op: OpBuilder, x_BSD: ir.Value) -> tuple[ir.Value, ir.Value]:
        """See ContribMLP.gate_and_up."""
        gate_BSF, up_BSF = op.Split(self.gate_up_proj(op, x_BSD), num_outputs=2, axis=-1, _outputs=2)
        return gate_BSF, up_BSF


class ContribLowering(Lowering):
    """Its inputs beside input_ids and the cache; `packed` where the weights file has the matrices side by side."""

    name = "contrib"
    opsets = MappingProxyType({"": 24, "com.microsoft": 1})
    cache_lengths = (CAPACITY, CAPACITY)
    linear: ClassVar[type[Linear]] = FusedLinear
    norm = FusedRMSNorm

    def __init__(self, *, packed: bool) -> None:
        self.attention = PackedAttention if packed else ContribAttention
        self.mlp = PackedContribMLP if packed else ContribMLP

    def begin(
        self,
        builder: GraphBuilder,
        config: QwenConfig,
        precision: Precision,
        rotary: RotaryTables,
        ids_BS: ir.Value,
        *,
        single: bool,
    ) -> ContribStep:
        """See Lowering.begin."""
        cos_PH2, sin_PH2 = rotary(builder.op)
        builder.push_module("step")
        step = ContribStep(
            builder.input(SEQLENS_K, ir.DataType.INT32, [BATCH]),
            builder.input(TOTAL_SEQUENCE_LENGTH, ir.DataType.INT32, []),
            as_type(builder.op, cos_PH2, precision.hidden),  # of a constant: folded when a session starts
            as_type(builder.op, sin_PH2, precision.hidden),
            single,
        )
        builder.pop_module()
        return step

    def last(self, op: OpBuilder, x_BSD: ir.Value, step: ContribStep) -> ir.Value:
        """See Lowering.last; [B, S, D] -> [B, 1, D]. There is no padding, so it is the last of the S."""
        return x_BSD if step.single else op.Gather(x_BSD, [-1], axis=1)

    def last_tokens(self, op: OpBuilder, x_BSD: ir.Value, count: ir.Value, step: ContribStep) -> ir.Value:
        """See Lowering.last_tokens; [B, S, D] -> [B, count, D]."""
        op.builder.push_module("last")
        x_BXD = named(op.Slice(x_BSD, op.Neg(count), [END], [1]), BATCH, KEPT, size_of(x_BSD, 2))
        op.builder.pop_module()
        return x_BXD

    def advance(self, op: OpBuilder, step: ContribStep, moved_B1: ir.Value) -> dict[str, ir.Value]:
        """See Lowering.advance."""
        moved_B = op.Cast(op.Squeeze(moved_B1, [1]), to=ir.DataType.INT32)
        return {SEQLENS_K: op.Add(step.seqlens_k_B, moved_B)}
