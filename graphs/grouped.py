"""The `static-grouped` lowering, one token a row on a CPU: a group of query heads shares a pass over keys and values.

Over 16,000 slots that is about three times as fast as Attention on ONNX Runtime's CPU provider, which reads keys and
values anew for each head, and which first needs the live part of the cache copied out (bench/README.md). Its fused
operators also load faster: ONNX Runtime parses a function body for each Attention, RMSNormalization and so on.
"""

from __future__ import annotations

from types import MappingProxyType

import onnx_ir as ir
from onnxscript import OpBuilder

from qwen_onnx.contract import BATCH
from qwen_onnx.graphs.contrib import FusedRMSNorm
from qwen_onnx.graphs.contrib_ops import rotary_embedding
from qwen_onnx.graphs.layers import RMSNorm, named
from qwen_onnx.graphs.state import KeyValue
from qwen_onnx.graphs.static import CaptureLowering, StaticAttention, StaticStep


class GroupedAttention(StaticAttention):
    """softmax(q k.T / sqrt(H)) v with matrix products, a key/value head at a time; S is 1, and all is f32."""

    def attend(
        self, op: OpBuilder, q_MX: ir.Value, k_MX: ir.Value, v_MX: ir.Value, past: KeyValue, step: StaticStep
    ) -> tuple[ir.Value, KeyValue]:
        """See Attention.attend. G query heads, N / K of them, belong to a key/value head."""
        heads, kv_heads, size = self.heads, self.kv_heads, self.head_dim
        q_B1X = self._turned(op, q_MX, heads, self.q_norm, step)
        k_B1X = self._turned(op, k_MX, kv_heads, self.k_norm, step)
        k_BK1H, v_BK1H = (
            named(op.Reshape(x, [-1, kv_heads, 1, size]), BATCH, kv_heads, 1, size) for x in (k_B1X, v_MX)
        )
        key_BKCH = op.TensorScatter(past.key_BKCH, k_BK1H, step.write_indices_B, axis=2)
        value_BKCH = op.TensorScatter(past.value_BKCH, v_BK1H, step.write_indices_B, axis=2)
        group = heads // kv_heads
        q_BKGH = op.Reshape(op.Mul(q_B1X, size**-0.5), [-1, kv_heads, group, size])
        q_BKGH = named(q_BKGH, BATCH, kv_heads, group, size)
        # The cache on the left: there a product streams it as it lies, on the right it would be repacked.
        scores_BKCG = op.MatMul(key_BKCH, op.Transpose(q_BKGH, perm=[0, 1, 3, 2]))
        scores_BKGC = op.Add(op.Transpose(scores_BKCG, perm=[0, 1, 3, 2]), step.mask_B1ST)
        y_BKGH = op.MatMul(op.Softmax(scores_BKGC, axis=-1), value_BKCH)
        y_MX = named(op.Reshape(y_BKGH, [-1, self.query_size]), BATCH, self.query_size)
        return y_MX, KeyValue(key_BKCH, value_BKCH)

    def _turned(
        self, op: OpBuilder, x_MX: ir.Value, heads: int, norm: RMSNorm | None, step: StaticStep
    ) -> ir.Value:
        """Normed and rotated, [B, 1, heads x H]."""
        if norm is not None:
            x_B1NH = op.Reshape(x_MX, [-1, 1, heads, self.head_dim])
            x_MX, _ = norm(op, named(x_B1NH, BATCH, 1, heads, self.head_dim))
        x_B1X = op.Reshape(x_MX, [-1, 1, heads * self.head_dim])
        x_B1X = named(x_B1X, BATCH, 1, heads * self.head_dim)
        return rotary_embedding(op, x_B1X, step.position_ids_BS, step.cos_PH2, step.sin_PH2)


class GroupedLowering(CaptureLowering):
    """As CaptureLowering, of `decode` only."""

    name = "static-grouped"
    opsets = MappingProxyType({"": 24, "com.microsoft": 1})
    norm = FusedRMSNorm
    attention = GroupedAttention
