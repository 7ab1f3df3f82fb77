"""The `portable` cache: ai.onnx 17 primitives over tensors that grow, for TensorRT and other runtimes.

Plain shapes and few operators, each choice forced by a runtime that refuses the obvious one: no Range, no
LessOrEqual, no runtime Cos and Sin, Reshape by constants only, keys and values never repeated.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from qwen_onnx.contract import ATTENTION_MASK, BATCH, PAST, PAST_AND_NEW, POSITION_IDS, SEQUENCE
from qwen_onnx.graphs.cache import MASKED, Cache, KeyValue, as_type
from qwen_onnx.graphs.layers import RMSNorm

if TYPE_CHECKING:
    from qwen_onnx.graphs.model import Attention, QwenForCausalLM

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


@dataclasses.dataclass(frozen=True)
class PortableCache(Cache):
    """Its inputs have the names and shapes that Hugging Face's exports gave them."""

    name: str = "portable"
    slots = (PAST, PAST_AND_NEW)

    def begin(
        self, builder: GraphBuilder, model: QwenForCausalLM, ids_BS: ir.Value, *, single: bool
    ) -> PortableStep:
        """See Cache.begin."""
        op, config, sequence = builder.op, model.config, 1 if single else SEQUENCE
        cos_PE, sin_PE = model.rotary(op)
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
        is_last_BS = op.Cast(op.Equal(query_slot_BS, last_slot_B1), to=model.precision.hidden)
        step = PortableStep(
            bias_B1QT=op.Unsqueeze(op.Concat(*[bias_BST] * groups, axis=1), [1]),
            cos_B1SE=op.Unsqueeze(op.Gather(cos_PE, position_ids_BS), [1]),
            sin_B1SE=op.Unsqueeze(op.Gather(sin_PE, position_ids_BS), [1]),
            last_B1S=op.Unsqueeze(is_last_BS, [1]),
        )
        builder.pop_module()
        return step

    def attend(
        self, op: OpBuilder, attn: Attention, qkv: list[ir.Value], past: KeyValue, step: PortableStep
    ) -> tuple[ir.Value, KeyValue]:
        """See Cache.attend. Products and a softmax, all in f32 but the cache itself."""
        q_BSX, k_BSX, v_BSX = qkv
        q_BNSH = _rotated(op, attn, _heads(op, attn, q_BSX, attn.heads, attn.q_norm), step)
        k_BKSH = _rotated(op, attn, _heads(op, attn, k_BSX, attn.kv_heads, attn.k_norm), step)
        v_BKSH = _heads(op, attn, v_BSX, attn.kv_heads, None)
        key_BKTH = op.Concat(past.key_BKCH, as_type(op, k_BKSH, attn.hidden), axis=2)
        value_BKTH = op.Concat(past.value_BKCH, v_BKSH, axis=2)
        # The G query heads of a key head lie below each other: one product each, and no key is repeated.
        q_BKQH = op.Reshape(q_BNSH, [0, attn.kv_heads, -1, attn.head_dim])
        q_BKQH = op.Mul(q_BKQH, 1 / math.sqrt(attn.head_dim))
        key_BKHT = op.Transpose(as_type(op, key_BKTH, FLOAT), perm=[0, 1, 3, 2])
        weights_BKQT = op.Softmax(op.Add(op.MatMul(q_BKQH, key_BKHT), step.bias_B1QT), axis=-1)
        y_BKQH = op.MatMul(weights_BKQT, as_type(op, value_BKTH, FLOAT))
        y_BNSH = op.Reshape(y_BKQH, [0, attn.heads, -1, attn.head_dim])
        y_BSX = op.Reshape(op.Transpose(y_BNSH, perm=[0, 2, 1, 3]), [0, 0, attn.query_size])
        return as_type(op, y_BSX, attn.hidden), KeyValue(key_BKTH, value_BKTH)

    def last(self, op: OpBuilder, x_BSD: ir.Value, step: PortableStep) -> ir.Value:
        """See Cache.last; [B, S, D] -> [B, 1, D]. Exact: a product with 1 and zeros."""
        return op.MatMul(step.last_B1S, x_BSD)


def _heads(op: OpBuilder, attn: Attention, x_BSX: ir.Value, heads: int, norm: RMSNorm | None) -> ir.Value:
    """[B, S, heads x H] -> normed [B, heads, S, H]."""
    x_BSNH = op.Reshape(x_BSX, [0, 0, heads, attn.head_dim])
    if norm is not None:
        x_BSNH, _ = norm(op, x_BSNH)
    return op.Transpose(x_BSNH, perm=[0, 2, 1, 3])


def _rotated(op: OpBuilder, attn: Attention, x_BNSH: ir.Value, step: PortableStep) -> ir.Value:
    half = attn.head_dim // 2
    left, right = op.Split(as_type(op, x_BNSH, FLOAT), [half, half], axis=-1, _outputs=2)
    cos, sin = step.cos_B1SE, step.sin_B1SE
    return op.Concat(
        op.Sub(op.Mul(left, cos), op.Mul(right, sin)),
        op.Add(op.Mul(right, cos), op.Mul(left, sin)),
        axis=-1,
    )


def _counted(op: OpBuilder, x_BT: ir.Value) -> ir.Value:
    """f32 1, 2, 3, ... along each row: positions without Range, of a shape that is only known at run time."""
    ones_BT = op.Add(op.Mul(x_BT, 0.0), 1.0)
    return op.CumSum(ones_BT, 1, exclusive=0, reverse=0)
