"""The `static-grouped` lowering, one token a row on a CPU: a group of query heads shares a pass over keys and values.

Over 16,000 slots that is about three times as fast as Attention on ONNX Runtime's CPU provider, which reads keys and
values anew for each head, and which first needs the live part of the cache copied out (bench/README.md).
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder

from qwen_onnx.graphs.static import CaptureLowering, StaticAttention, StaticStep


class GroupedAttention(StaticAttention):
    """softmax(q k.T / sqrt(H)) v with matrix products, a key/value head at a time; S is 1."""

    def read(
        self, op: OpBuilder, q_BNSH: ir.Value, key_BKCH: ir.Value, value_BKCH: ir.Value, step: StaticStep
    ) -> ir.Value:
        """See StaticAttention.read. G query heads, N / K of them, belong to a key/value head."""
        group = self.heads // self.kv_heads
        q_BKGH = op.Reshape(op.Mul(q_BNSH, self.head_dim**-0.5), [-1, self.kv_heads, group, self.head_dim])
        # The cache on the left: there a product streams it as it lies, on the right it would be repacked.
        scores_BKCG = op.MatMul(key_BKCH, op.Transpose(q_BKGH, perm=[0, 1, 3, 2]))
        scores_BKGC = op.Add(op.Transpose(scores_BKCG, perm=[0, 1, 3, 2]), step.mask_B1ST)
        y_BKGH = op.MatMul(op.Softmax(scores_BKGC, axis=-1), value_BKCH)
        return op.Reshape(y_BKGH, [-1, self.query_size])


class GroupedLowering(CaptureLowering):
    """As CaptureLowering, of `decode` only."""

    name = "static-grouped"
    attention = GroupedAttention
