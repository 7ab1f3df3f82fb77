"""The `static` caches: of fixed capacity, written in place, by ai.onnx 24.

`static` attends over the live slots. `static-capture`, for CUDA graphs, attends over all of them, so that no shape
depends on how many are live: the mask has a column for every slot, slots after a query are hidden by their place, and
a mask of ones, but for padding, serves all steps. Every slot must hold a number (start from zeros), and rows end
together: padding is on the left. `static-grouped` is that for one token a row on a CPU: the query heads of a group
share a pass over keys and values. Over 16,000 slots it is about three times as fast as Attention on ONNX Runtime's
CPU provider, which reads keys and values anew for each head, after a copy of the live slots (bench/README.md).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

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
)  # fmt: skip
from qwen_onnx.graphs.cache import END, MASKED, Cache, KeyValue, as_type, named, size_of
from qwen_onnx.graphs.layers import RMSNorm, rotary_embedding

if TYPE_CHECKING:
    from qwen_onnx.graphs.model import Attention, QwenForCausalLM


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


@dataclasses.dataclass(frozen=True)
class StaticCache(Cache):
    """See the module."""

    name: str = "static"
    reads_all: bool = False
    """Attends over all slots, live or not."""
    grouped: bool = False
    """Heads attend by group; with `reads_all`, in graphs of one token a row."""
    slots = (CAPACITY, CAPACITY)
    flat = True  # Gemm multiplies matrices, not batches of them

    def begin(
        self, builder: GraphBuilder, model: QwenForCausalLM, ids_BS: ir.Value, *, single: bool
    ) -> StaticStep:
        """See Cache.begin."""
        op, config, sequence = builder.op, model.config, 1 if single else SEQUENCE
        cos_PH2, sin_PH2 = model.rotary(op)
        builder.push_module("step")
        mask_length = CAPACITY if self.reads_all else LIVE
        mask_BT = builder.input(ATTENTION_MASK, ir.DataType.INT64, [BATCH, mask_length])
        position_ids_BS = builder.input(POSITION_IDS, ir.DataType.INT64, [BATCH, sequence])
        write_indices_B = builder.input(WRITE_INDICES, ir.DataType.INT64, [BATCH])

        length = op.Shape(mask_BT, start=1, end=2)
        slot_T = named(op.Range(0, op.Squeeze(length), 1), mask_length)
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
            live_length=None if self.reads_all else length,
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

    def attend(
        self, op: OpBuilder, attn: Attention, qkv: list[ir.Value], past: KeyValue, step: StaticStep
    ) -> tuple[ir.Value, KeyValue]:
        """See Cache.attend. All in f32 but the cache itself."""
        if self.grouped:
            return _attend_by_group(op, attn, qkv, past, step)
        q_MX, k_MX, v_MX = qkv
        q_BNSH = _rotated(op, _heads(op, attn, q_MX, attn.heads, attn.q_norm, step), step)
        k_BKSH = _rotated(op, _heads(op, attn, k_MX, attn.kv_heads, attn.k_norm, step), step)
        v_BKSH = _heads(op, attn, v_MX, attn.kv_heads, None, step)
        present = _written(op, past, as_type(op, k_BKSH, attn.hidden), v_BKSH, step)
        key, value = (_live(op, attn, cache_BKCH, step) for cache_BKCH in present)
        y_BNSH = op.Attention(q_BNSH, key, value, step.mask_B1ST, is_causal=0)
        y_MX = op.Reshape(op.Transpose(y_BNSH, perm=[0, 2, 1, 3]), [-1, attn.query_size])
        y_MX = named(y_MX, size_of(q_MX, 0), attn.query_size)
        return as_type(op, y_MX, attn.hidden), present

    def last(self, op: OpBuilder, x_MD: ir.Value, step: StaticStep) -> ir.Value:
        """See Cache.last; [M, D] -> [B, D]."""
        if step.states_shape is None:
            return x_MD
        if (
            self.reads_all
        ):  # rows end together: to look for it takes a reduction, and on CUDA a library (cuDNN) for it
            return op.Gather(_states(op, x_MD, step), -1, axis=1)
        op.builder.push_module("last")  # a row may be padding after its last real token
        last_slot_B = op.ReduceMax(op.Mul(step.mask_BT, step.slot_T), [1], keepdims=0)
        last_slot_B = op.Min(last_slot_B, op.ReduceMax(step.query_slot_BS, [1], keepdims=0))
        last_B = op.Max(op.Sub(last_slot_B, step.write_indices_B), 0)
        x_BSD = _states(op, x_MD, step)
        x_BD = op.GatherND(x_BSD, op.Unsqueeze(last_B, [1]), batch_dims=1)
        op.builder.pop_module()
        return x_BD

    def last_tokens(self, op: OpBuilder, x_MD: ir.Value, count: ir.Value, step: StaticStep) -> ir.Value:
        """See Cache.last_tokens; [M, D] -> [B x count, D]."""
        op.builder.push_module("last")
        hidden = size_of(x_MD, 1)
        x_BXD = named(op.Slice(_states(op, x_MD, step), op.Neg(count), [END], [1]), BATCH, KEPT, hidden)
        x_XD = named(op.Flatten(x_BXD, axis=2), KEPT_TOKENS, hidden)
        op.builder.pop_module()
        return x_XD

    def advance(self, op: OpBuilder, step: StaticStep, moved_B1: ir.Value) -> dict[str, ir.Value]:
        """See Cache.advance; with `reads_all` only, whose mask stays as it is."""
        if not self.reads_all:
            return super().advance(op, step, moved_B1)
        position_ids_B1 = op.Add(op.Gather(step.position_ids_BS, [-1], axis=1), moved_B1)
        last_slot_B = op.Gather(step.query_slot_BS, -1, axis=1)
        return {
            POSITION_IDS: position_ids_B1,
            WRITE_INDICES: op.Add(last_slot_B, op.Squeeze(moved_B1, [1])),
        }


def _heads(
    op: OpBuilder, attn: Attention, x_MX: ir.Value, heads: int, norm: RMSNorm | None, step: StaticStep
) -> ir.Value:
    """[M, heads x H] -> normed [B, heads, S, H]."""
    shape = step.query_shape if heads == attn.heads else step.key_shape
    batch, sequence = (size_of(step.position_ids_BS, axis) for axis in (0, 1))
    x_BSNH = named(op.Reshape(x_MX, shape), batch, sequence, heads, attn.head_dim)
    if norm is not None:
        x_BSNH, _ = norm(op, x_BSNH)
    return op.Transpose(x_BSNH, perm=[0, 2, 1, 3])


def _rotated(op: OpBuilder, x_BNSH: ir.Value, step: StaticStep) -> ir.Value:
    x_BNSH = as_type(op, x_BNSH, ir.DataType.FLOAT)
    return op.RotaryEmbedding(x_BNSH, step.cos_PH2, step.sin_PH2, step.position_ids_BS)


def _written(op: OpBuilder, past: KeyValue, k_BKSH: ir.Value, v_BKSH: ir.Value, step: StaticStep) -> KeyValue:
    """The cache with the new tokens in it."""
    new = zip(past, (k_BKSH, v_BKSH), strict=True)
    return KeyValue(*(op.TensorScatter(cache, x, step.write_indices_B, axis=2) for cache, x in new))


def _live(op: OpBuilder, attn: Attention, cache_BKCH: ir.Value, step: StaticStep) -> ir.Value:
    """Slots beyond the live length are never read, so they may hold anything; f32 for the scores."""
    if step.live_length is not None:
        batch, live = (size_of(step.mask_BT, axis) for axis in (0, 1))
        live_BKTH = op.Slice(cache_BKCH, [0], step.live_length, [2])
        cache_BKCH = named(live_BKTH, batch, attn.kv_heads, live, attn.head_dim)
    return as_type(op, cache_BKCH, ir.DataType.FLOAT)


def _attend_by_group(
    op: OpBuilder, attn: Attention, qkv: list[ir.Value], past: KeyValue, step: StaticStep
) -> tuple[ir.Value, KeyValue]:
    """softmax(q k.T / sqrt(H)) v with matrix products, a key/value head at a time; S is 1, and all is f32."""
    q_MX, k_MX, v_MX = qkv
    kv_heads, size, group = attn.kv_heads, attn.head_dim, attn.heads // attn.kv_heads
    q_B1X = _turned(op, attn, q_MX, attn.heads, attn.q_norm, step)
    k_B1X = _turned(op, attn, k_MX, kv_heads, attn.k_norm, step)
    k_BK1H, v_BK1H = (
        named(op.Reshape(x, [-1, kv_heads, 1, size]), BATCH, kv_heads, 1, size) for x in (k_B1X, v_MX)
    )
    present = _written(op, past, k_BK1H, v_BK1H, step)
    q_BKGH = op.Reshape(op.Mul(q_B1X, size**-0.5), [-1, kv_heads, group, size])
    q_BKGH = named(q_BKGH, BATCH, kv_heads, group, size)
    # The cache on the left: there a product streams it as it lies, on the right it would be repacked.
    scores_BKCG = op.MatMul(present.key_BKCH, op.Transpose(q_BKGH, perm=[0, 1, 3, 2]))
    scores_BKGC = op.Add(op.Transpose(scores_BKCG, perm=[0, 1, 3, 2]), step.mask_B1ST)
    y_BKGH = op.MatMul(op.Softmax(scores_BKGC, axis=-1), present.value_BKCH)
    y_MX = named(op.Reshape(y_BKGH, [-1, attn.query_size]), BATCH, attn.query_size)
    return y_MX, present


def _turned(
    op: OpBuilder, attn: Attention, x_MX: ir.Value, heads: int, norm: RMSNorm | None, step: StaticStep
) -> ir.Value:
    """Normed and rotated, [B, 1, heads x H]."""
    if norm is not None:
        x_B1NH = op.Reshape(x_MX, [-1, 1, heads, attn.head_dim])
        x_MX, _ = norm(op, named(x_B1NH, BATCH, 1, heads, attn.head_dim))
    x_B1X = op.Reshape(x_MX, [-1, 1, heads * attn.head_dim])
    x_B1X = named(x_B1X, BATCH, 1, heads * attn.head_dim)
    return rotary_embedding(op, x_B1X, step.position_ids_BS, step.cos_PH2, step.sin_PH2)


def _states(op: OpBuilder, x_MD: ir.Value, step: StaticStep) -> ir.Value:
    """[M, D] -> [B, S, D]."""
    return named(op.Reshape(x_MD, step.states_shape), BATCH, SEQUENCE, size_of(x_MD, 1))
