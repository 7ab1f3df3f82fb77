"""The `portable` lowering: ai.onnx 17 primitives over a growing cache, for TensorRT and other runtimes.

Plain shapes and few operators, each choice forced by a runtime that refuses the obvious one: no Range, no
LessOrEqual, no runtime Cos and Sin, Reshape by constants only, keys and values never repeated.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import NamedTuple

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import ATTENTION_MASK, BATCH, PAST, PAST_AND_NEW, POSITION_IDS, SEQUENCE
from qwen_onnx.graphs.attention import Attention
from qwen_onnx.graphs.layers import Linear, RMSNorm, as_type
from qwen_onnx.graphs.lowering import Lowering
from qwen_onnx.graphs.rotary import RotaryTables
from qwen_onnx.graphs.state import KeyValue, Precision
from qwen_onnx.graphs.static import MASKED

FLOAT = ir.DataType.FLOAT


class PortableStep(NamedTuple):
    """Made once per graph, read by every layer."""

    bias_B1QT: ir.Value
    """f32, Q = G x S: added to the scores, 0 where a query may look, a large negative number where not."""
    cos_B1SE: ir.Value
    """f32, E = H/2: the tables' rows of the query tokens."""
    sin_B1SE: ir.Value
    last_B1S: ir.Value
    """1 at each row's last real token, 0 elsewhere."""


class PortableLinear(Linear):
    """As Linear, of MatMul: some runtimes refuse Gemm in f16."""

    def forward(self, op: OpBuilder, x_BSD: ir.Value) -> ir.Value:
        """[B, S, in] -> [B, S, out]."""
        y = op.MatMul(x_BSD, op.Transpose(as_type(op, self.weight, self.hidden), perm=[1, 0]))
        return y if self.bias is None else op.Add(y, as_type(op, self.bias, self.hidden))


class PortableRMSNorm(RMSNorm):
    """As RMSNorm, spelled out; the squares are f32, or they overflow in f16."""

    def normed(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """See RMSNorm.normed."""
        x_f32 = as_type(op, x, FLOAT)
        mean_square = op.ReduceMean(op.Mul(x_f32, x_f32), axes=[-1], keepdims=1)
        normed = op.Div(x_f32, op.Sqrt(op.Add(mean_square, self.eps)))
        return op.Mul(as_type(op, normed, self.hidden), as_type(op, self.weight, self.hidden))


class PortableAttention(Attention):
    """Products and a softmax, all in f32 but the cache itself."""

    def attend(
        self,
        op: OpBuilder,
        q_BSX: ir.Value,
        k_BSX: ir.Value,
        v_BSX: ir.Value,
        past: KeyValue,
        step: PortableStep,
    ) -> tuple[ir.Value, KeyValue]:
        """See Attention.attend."""
        q_BNSH = self._rotated(op, self._heads(op, q_BSX, self.heads, self.q_norm), step)
        k_BKSH = self._rotated(op, self._heads(op, k_BSX, self.kv_heads, self.k_norm), step)
        v_BKSH = self._heads(op, v_BSX, self.kv_heads, None)
        key_BKTH = op.Concat(past.key_BKCH, as_type(op, k_BKSH, self.hidden), axis=2)
        value_BKTH = op.Concat(past.value_BKCH, v_BKSH, axis=2)
        # The G query heads of a key head lie below each other: one product each, and no key is repeated.
        q_BKQH = op.Mul(
            op.Reshape(q_BNSH, [0, self.kv_heads, -1, self.head_dim]), 1 / math.sqrt(self.head_dim)
        )
        key_BKHT = op.Transpose(as_type(op, key_BKTH, FLOAT), perm=[0, 1, 3, 2])
        weights_BKQT = op.Softmax(op.Add(op.MatMul(q_BKQH, key_BKHT), step.bias_B1QT), axis=-1)
        y_BKQH = op.MatMul(weights_BKQT, as_type(op, value_BKTH, FLOAT))
        y_BNSH = op.Reshape(y_BKQH, [0, self.heads, -1, self.head_dim])
        y_BSX = op.Reshape(op.Transpose(y_BNSH, perm=[0, 2, 1, 3]), [0, 0, self.query_size])
        return as_type(op, y_BSX, self.hidden), KeyValue(key_BKTH, value_BKTH)

    def _heads(self, op: OpBuilder, x_BSX: ir.Value, heads: int, norm: RMSNorm | None) -> ir.Value:
        x_BSNH = op.Reshape(x_BSX, [0, 0, heads, self.head_dim])
        if norm is not None:
            x_BSNH, _ = norm(op, x_BSNH)
        return op.Transpose(x_BSNH, perm=[0, 2, 1, 3])

    def _rotated(self, op: OpBuilder, x_BNSH: ir.Value, step: PortableStep) -> ir.Value:
        half = self.head_dim // 2
        left, right = op.Split(as_type(op, x_BNSH, FLOAT), [half, half], axis=-1, _outputs=2)
        cos, sin = step.cos_B1SE, step.sin_B1SE
        return op.Concat(
            op.Sub(op.Mul(left, cos), op.Mul(right, sin)),
            op.Add(op.Mul(right, cos), op.Mul(left, sin)),
            axis=-1,
        )


class PortableLowering(Lowering):
    """Its inputs beside input_ids and the cache have the names and shapes that Hugging Face's exports gave them."""

    name = "portable"
    opsets = MappingProxyType({"": 17})
    cache_lengths = (PAST, PAST_AND_NEW)
    linear = PortableLinear
    norm = PortableRMSNorm
    attention = PortableAttention

    def begin(
        self,
        builder: GraphBuilder,
        config: QwenConfig,
        precision: Precision,
        rotary: RotaryTables,
        ids_BS: ir.Value,
        *,
        single: bool,
    ) -> PortableStep:
        """See Lowering.begin."""
        op, sequence = builder.op, 1 if single else SEQUENCE
        cos_PE, sin_PE = rotary(op)
        builder.push_module("step")
        mask_BT = builder.input(ATTENTION_MASK, ir.DataType.INT64, [BATCH, PAST_AND_NEW])
        position_ids_BS = builder.input(POSITION_IDS, ir.DataType.INT64, [BATCH, sequence])

        real_BT = op.Cast(mask_BT, to=FLOAT)
        slot_BT = _counted(op, real_BT)
        query_BS = _counted(op, op.Cast(ids_BS, to=FLOAT))
        past_B1 = op.Sub(op.ReduceMax(slot_BT, axes=[1]), op.ReduceMax(query_BS, axes=[1]))
        query_slot_BS = op.Add(query_BS, past_B1)
        not_later_BST = op.Less(op.Unsqueeze(slot_BT, [1]), op.Unsqueeze(op.Add(query_slot_BS, 1.0), [2]))
        real_B1T = op.Unsqueeze(op.Cast(mask_BT, to=ir.DataType.BOOL), [1])
        bias_BST = op.Where(op.And(not_later_BST, real_B1T), 0.0, MASKED)
        groups = config.num_attention_heads // config.num_key_value_heads
        last_slot_B1 = op.ReduceMax(op.Mul(real_BT, slot_BT), axes=[1])
        step = PortableStep(
            bias_B1QT=op.Unsqueeze(op.Concat(*[bias_BST] * groups, axis=1), [1]),
            cos_B1SE=op.Unsqueeze(op.Gather(cos_PE, position_ids_BS), [1]),
            sin_B1SE=op.Unsqueeze(op.Gather(sin_PE, position_ids_BS), [1]),
            last_B1S=op.Unsqueeze(op.Cast(op.Equal(query_slot_BS, last_slot_B1), to=precision.hidden), [1]),
        )
        builder.pop_module()
        return step

    def last(self, op: OpBuilder, x_BSD: ir.Value, step: PortableStep) -> ir.Value:
        """See Lowering.last; [B, S, D] -> [B, 1, D]. Exact: a product with 1 and zeros."""
        return op.MatMul(step.last_B1S, x_BSD)


def _counted(op: OpBuilder, x_BT: ir.Value) -> ir.Value:
    """f32 1, 2, 3, ... along each row: positions without Range, of a shape that is only known at run time."""
    ones_BT = op.Add(op.Mul(x_BT, 0.0), 1.0)
    return op.CumSum(ones_BT, 1, exclusive=0, reverse=0)
