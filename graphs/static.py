"""The `static` lowering: ai.onnx 24 only, over a cache of fixed capacity that is written in place.

Its `capture` variant is for CUDA graphs: no shape depends on how many slots of the cache are live.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar, NamedTuple

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from qwen_onnx import contract
from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import (
    ATTENTION_MASK,
    BATCH,
    CAPACITY,
    KEPT,
    KEPT_TOKENS,
    LIVE,
    POSITION_IDS,
    SEQUENCE,
    WRITE_INDICES,
)
from qwen_onnx.graphs.attention import Attention
from qwen_onnx.graphs.layers import Linear, RMSNorm, as_type, named, size_of
from qwen_onnx.graphs.lowering import Lowering
from qwen_onnx.graphs.rotary import RotaryTables
from qwen_onnx.graphs.state import END, KeyValue, Precision

# Finite, so that a row that may look at nothing (padding) averages garbage instead of dividing 0 by 0, and
# far enough from f32's end that no score added to it becomes infinite.
MASKED = -1e30


class StaticStep(NamedTuple):
    """Where the query tokens are and what they may see: made once per graph, read by every layer."""

    position_ids_BS: ir.Value
    """int64: the row of the rotary tables, counted per sequence without its padding."""
    write_indices_B: ir.Value
    """int64: the cache slot of each row's first query token."""
    query_slot_BS: ir.Value
    """int64: the cache slot of each query token."""
    live_length: ir.Value | None
    """int64 [1]: T, the slots that attention reads; None where it reads all C and T is C."""
    mask_B1ST: ir.Value
    """f32, added to the scores: 0 where a query may look, a large negative number where not."""
    query_shape: ir.Value | list[int]
    """int64 [4]: B, S, N, H."""
    key_shape: ir.Value | list[int]
    """int64 [4]: B, S, K, H."""
    states_shape: ir.Value | list[int] | None
    """int64 [3]: B, S, D; None where S is 1."""
    mask_BT: ir.Value
    """int64: 0 for padding."""
    slot_T: ir.Value
    """int64: 0, 1, 2 and so on."""
    cos_PH2: ir.Value
    """f32 [positions, H/2]."""
    sin_PH2: ir.Value


class StaticAttention(Attention):
    """Rotate, write into the cache, attend over its live part; all of it in f32 but the cache itself."""

    def attend(
        self, op: OpBuilder, q_MX: ir.Value, k_MX: ir.Value, v_MX: ir.Value, past: KeyValue, step: StaticStep
    ) -> tuple[ir.Value, KeyValue]:
        """See Attention.attend."""
        q_BNSH = self._rotated(op, self._heads(op, q_MX, self.heads, self.q_norm, step), step)
        k_BKSH = self._rotated(op, self._heads(op, k_MX, self.kv_heads, self.k_norm, step), step)
        v_BKSH = self._heads(op, v_MX, self.kv_heads, None, step)
        key_BKCH = op.TensorScatter(
            past.key_BKCH, as_type(op, k_BKSH, self.hidden), step.write_indices_B, axis=2
        )
        value_BKCH = op.TensorScatter(past.value_BKCH, v_BKSH, step.write_indices_B, axis=2)
        y_BNSH = op.Attention(
            q_BNSH,
            self._live(op, key_BKCH, step),
            self._live(op, value_BKCH, step),
            step.mask_B1ST,
            is_causal=0,
        )
        y_MX = op.Reshape(op.Transpose(y_BNSH, perm=[0, 2, 1, 3]), [-1, self.query_size])
        y_MX = named(y_MX, size_of(q_MX, 0), self.query_size)
        return as_type(op, y_MX, self.hidden), KeyValue(key_BKCH, value_BKCH)

    def _heads(
        self, op: OpBuilder, x_MX: ir.Value, heads: int, norm: RMSNorm | None, step: StaticStep
    ) -> ir.Value:
        shape = step.query_shape if heads == self.heads else step.key_shape
        batch, sequence = (size_of(step.position_ids_BS, axis) for axis in (0, 1))
        x_BSNH = named(op.Reshape(x_MX, shape), batch, sequence, heads, self.head_dim)
        if norm is not None:
            x_BSNH, _ = norm(op, x_BSNH)
        return op.Transpose(x_BSNH, perm=[0, 2, 1, 3])

    def _rotated(self, op: OpBuilder, x_BNSH: ir.Value, step: StaticStep) -> ir.Value:
        x_BNSH = as_type(op, x_BNSH, ir.DataType.FLOAT)
        return op.RotaryEmbedding(x_BNSH, step.cos_PH2, step.sin_PH2, step.position_ids_BS)

    def _live(self, op: OpBuilder, cache_BKCH: ir.Value, step: StaticStep) -> ir.Value:
        """Slots beyond the live length are never read, so they may hold anything; f32 for the scores."""
        if step.live_length is not None:
            batch, live = (size_of(step.mask_BT, axis) for axis in (0, 1))
            live_BKTH = op.Slice(cache_BKCH, [0], step.live_length, [2])
            cache_BKCH = named(live_BKTH, batch, self.kv_heads, live, self.head_dim)
        return as_type(op, cache_BKCH, ir.DataType.FLOAT)


class PackedStaticAttention(StaticAttention):
    """As StaticAttention, with queries, keys and values of one product."""

    def add_projections(self, config: QwenConfig, precision: Precision, linear: type[Linear]) -> None:
        """See Attention.add_projections."""
        size = self.query_size + 2 * self.key_size
        self.qkv_proj = linear(config.hidden_size, size, precision, bias=config.qkv_bias)

    def forward(
        self, op: OpBuilder, x_MD: ir.Value, past: KeyValue, step: StaticStep
    ) -> tuple[ir.Value, KeyValue]:
        """See Attention.forward."""
        sizes = [self.query_size, self.key_size, self.key_size]
        q_MX, k_MX, v_MX = op.Split(self.qkv_proj(op, x_MD), sizes, axis=-1, _outputs=3)
        attended_MX, present = self.attend(op, q_MX, k_MX, v_MX, past, step)
        return self.o_proj(op, attended_MX), present


def _states(op: OpBuilder, x_MD: ir.Value, step: StaticStep) -> ir.Value:
    """[M, D] -> [B, S, D]."""
    return named(op.Reshape(x_MD, step.states_shape), BATCH, SEQUENCE, size_of(x_MD, 1))


class StaticLowering(Lowering):
    """Its inputs beside input_ids and the cache, and the step that is made of them."""

    name = "static"
    opsets = MappingProxyType({"": 24})
    cache_lengths = (CAPACITY, CAPACITY)
    flat = True  # Gemm multiplies matrices, not batches of them
    attention = StaticAttention
    mask_length: ClassVar[str] = LIVE

    def begin(
        self,
        builder: GraphBuilder,
        config: QwenConfig,
        precision: Precision,
        rotary: RotaryTables,
        ids_BS: ir.Value,
        *,
        single: bool,
    ) -> StaticStep:
        """See Lowering.begin."""
        op, sequence = builder.op, 1 if single else SEQUENCE
        cos_PH2, sin_PH2 = rotary(op)
        builder.push_module("step")
        mask_BT = builder.input(ATTENTION_MASK, ir.DataType.INT64, [BATCH, self.mask_length])
        position_ids_BS = builder.input(POSITION_IDS, ir.DataType.INT64, [BATCH, sequence])
        write_indices_B = builder.input(WRITE_INDICES, ir.DataType.INT64, [BATCH])

        length = op.Shape(mask_BT, start=1, end=2)
        slot_T = named(op.Range(0, op.Squeeze(length), 1), self.mask_length)
        query_slot_BS = op.Unsqueeze(write_indices_B, [1])
        if not single:
            queries = op.Shape(ids_BS, start=1, end=2)
            query_S = named(op.Range(0, op.Squeeze(queries), 1), SEQUENCE)
            query_slot_BS = op.Add(query_slot_BS, query_S)
        not_later_BST = op.LessOrEqual(slot_T, op.Unsqueeze(query_slot_BS, [2]))
        real_B1T = op.Unsqueeze(op.Cast(mask_BT, to=ir.DataType.BOOL), [1])
        mask_BST = op.Where(op.And(not_later_BST, real_B1T), 0.0, MASKED)

        ids_shape = None if single else op.Shape(ids_BS)

        def shape(*sizes: int) -> ir.Value | list[int]:
            return [-1, 1, *sizes] if ids_shape is None else op.Concat(ids_shape, [*sizes], axis=0)

        step = StaticStep(
            position_ids_BS=position_ids_BS,
            write_indices_B=write_indices_B,
            query_slot_BS=query_slot_BS,
            live_length=length if self.mask_length == LIVE else None,
            mask_B1ST=op.Unsqueeze(mask_BST, [1]),
            query_shape=shape(config.num_attention_heads, config.head_dim),
            key_shape=shape(config.num_key_value_heads, config.head_dim),
            states_shape=None if single else shape(config.hidden_size),
            mask_BT=mask_BT,
            slot_T=slot_T,
            cos_PH2=cos_PH2,
            sin_PH2=sin_PH2,
        )
        builder.pop_module()
        return step

    def last(self, op: OpBuilder, x_MD: ir.Value, step: StaticStep) -> ir.Value:
        """See Lowering.last; [M, D] -> [B, D]. A row may be padding after its last real token."""
        if step.states_shape is None:
            return x_MD
        op.builder.push_module("last")
        last_slot_B = op.ReduceMax(op.Mul(step.mask_BT, step.slot_T), [1], keepdims=0)
        last_slot_B = op.Min(last_slot_B, op.ReduceMax(step.query_slot_BS, [1], keepdims=0))
        last_B = op.Max(op.Sub(last_slot_B, step.write_indices_B), 0)
        x_BSD = _states(op, x_MD, step)
        x_BD = op.GatherND(x_BSD, op.Unsqueeze(last_B, [1]), batch_dims=1)
        op.builder.pop_module()
        return x_BD

    def last_tokens(self, op: OpBuilder, x_MD: ir.Value, count: ir.Value, step: StaticStep) -> ir.Value:
        """See Lowering.last_tokens; [M, D] -> [B x count, D]."""
        op.builder.push_module("last")
        hidden = size_of(x_MD, 1)
        x_BXD = named(op.Slice(_states(op, x_MD, step), op.Neg(count), [END], [1]), BATCH, KEPT, hidden)
        x_XD = named(op.Flatten(x_BXD, axis=2), KEPT_TOKENS, hidden)
        op.builder.pop_module()
        return x_XD


class CaptureLowering(StaticLowering):
    """Attends over the whole cache, which must hold numbers everywhere: start from zeros.

    The mask has a column for every slot of the cache. Slots after a query are hidden by their place, so that a
    mask of ones, but for padding, serves all steps. Rows end together: padding is on the left.
    """

    name = "static-capture"
    mask_length = CAPACITY

    def last(self, op: OpBuilder, x_MD: ir.Value, step: StaticStep) -> ir.Value:
        """See Lowering.last; [M, D] -> [B, D]: the last of the S.

        To look for it would take a reduction, and on CUDA a library (cuDNN) for it.
        """
        if step.states_shape is None:
            return x_MD
        return op.Gather(_states(op, x_MD, step), -1, axis=1)

    def advance(self, op: OpBuilder, step: StaticStep, moved_B1: ir.Value) -> dict[str, ir.Value]:
        """See Lowering.advance."""
        return {
            contract.POSITION_IDS: op.Add(op.Gather(step.position_ids_BS, [-1], axis=1), moved_B1),
            contract.WRITE_INDICES: op.Add(
                op.Gather(step.query_slot_BS, -1, axis=1), op.Squeeze(moved_B1, [1])
            ),
        }
