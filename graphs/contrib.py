"""The `contrib` cache: ONNX Runtime's GroupQueryAttention, on CUDA in f16 and bf16, and for int8 and int4 everywhere.

The cache is as in `static`, but a row's tokens lie in it from slot 0 on without padding, so rows of several tokens
go one at a time; rows of one token each go together.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir
from onnxscript import GraphBuilder, OpBuilder

from qwen_onnx.contract import BATCH, CAPACITY, KEPT, SEQLENS_K, TOTAL_SEQUENCE_LENGTH
from qwen_onnx.graphs.cache import END, Cache, KeyValue, as_type, named, size_of
from qwen_onnx.graphs.layers import MICROSOFT, RMSNorm, typed_as

if TYPE_CHECKING:
    from qwen_onnx.graphs.model import Attention, QwenForCausalLM


class ContribStep(NamedTuple):
    """What GroupQueryAttention asks beside queries and cache."""

    seqlens_k_B: ir.Value
    """int32: each row's live length less one, the new tokens counted."""
    total_sequence_length: ir.Value
    """int32 scalar, read on the host; see group_query_attention."""
    cos_PH2: ir.Value
    """[positions, H/2] in the type of the hidden states, which the operator asks for."""
    sin_PH2: ir.Value
    single: bool
    """There is one token a row."""


@dataclasses.dataclass(frozen=True)
class ContribCache(Cache):
    """One GroupQueryAttention node; Qwen3's norms of queries and keys before it."""

    name: str = "contrib"
    slots = (CAPACITY, CAPACITY)
    takes_packed = True

    def begin(
        self, builder: GraphBuilder, model: QwenForCausalLM, ids_BS: ir.Value, *, single: bool
    ) -> ContribStep:
        """See Cache.begin."""
        cos_PH2, sin_PH2 = model.rotary(builder.op)
        builder.push_module("step")
        step = ContribStep(
            builder.input(SEQLENS_K, ir.DataType.INT32, [BATCH]),
            builder.input(TOTAL_SEQUENCE_LENGTH, ir.DataType.INT32, []),
            as_type(
                builder.op, cos_PH2, model.precision.hidden
            ),  # of a constant: folded when a session starts
            as_type(builder.op, sin_PH2, model.precision.hidden),
            single,
        )
        builder.pop_module()
        return step

    def attend(
        self, op: OpBuilder, attn: Attention, qkv: list[ir.Value], past: KeyValue, step: ContribStep
    ) -> tuple[ir.Value, KeyValue]:
        """See Cache.attend."""
        q, *kv = qkv
        k, v = kv or (None, None)
        if attn.q_norm is not None and attn.k_norm is not None and k is not None:
            q = _normed(op, attn, q, attn.q_norm, attn.heads)
            k = _normed(op, attn, k, attn.k_norm, attn.kv_heads)
        return group_query_attention(
            op, q, k, v, past, *step[:4],
            num_heads=attn.heads, kv_num_heads=attn.kv_heads, head_dim=attn.head_dim,
        )  # fmt: skip

    def last(self, op: OpBuilder, x_BSD: ir.Value, step: ContribStep) -> ir.Value:
        """See Cache.last; [B, S, D] -> [B, 1, D]. There is no padding, so it is the last of the S."""
        return x_BSD if step.single else op.Gather(x_BSD, [-1], axis=1)

    def last_tokens(self, op: OpBuilder, x_BSD: ir.Value, count: ir.Value, step: ContribStep) -> ir.Value:
        """See Cache.last_tokens; [B, S, D] -> [B, count, D]."""
        op.builder.push_module("last")
        x_BXD = named(op.Slice(x_BSD, op.Neg(count), [END], [1]), BATCH, KEPT, size_of(x_BSD, 2))
        op.builder.pop_module()
        return x_BXD

    def advance(self, op: OpBuilder, step: ContribStep, moved_B1: ir.Value) -> dict[str, ir.Value]:
        """See Cache.advance."""
        moved_B = op.Cast(op.Squeeze(moved_B1, [1]), to=ir.DataType.INT32)
        return {SEQLENS_K: op.Add(step.seqlens_k_B, moved_B)}


def _normed(op: OpBuilder, attn: Attention, x_BSX: ir.Value, norm: RMSNorm, heads: int) -> ir.Value:
    x_BSNH, _ = norm(op, op.Reshape(x_BSX, [0, 0, heads, attn.head_dim]))
    return op.Reshape(x_BSNH, [0, 0, heads * attn.head_dim])


def group_query_attention(
    op: OpBuilder,
    query_BSX: ir.Value,
    key_BSX: ir.Value | None,
    value_BSX: ir.Value | None,
    past: KeyValue,
    seqlens_k_B: ir.Value,
    total_sequence_length: ir.Value,
    cos_PH2: ir.Value,
    sin_PH2: ir.Value,
    *,
    num_heads: int,
    kv_num_heads: int,
    head_dim: int,
) -> tuple[ir.Value, KeyValue]:
    """Rotation, cache append and causal attention: [B, S, N x H], and the cache.

    Args:
        query_BSX: queries, or queries, keys and values side by side with no `key_BSX` and `value_BSX`.
        seqlens_k_B: int32, each row's live length less one, the new tokens counted.
        total_sequence_length: int32 scalar in host memory: S for a first prompt; after one, at least the
            longest live length and not S.
    """
    if query_BSX.shape is None:
        raise ValueError("attention of unknown shapes")
    shape = ir.Shape([*query_BSX.shape[:-1], num_heads * head_dim])
    key, value = past.key_BKCH, past.value_BKCH
    attended, present_key, present_value = op.GroupQueryAttention(
        query_BSX, key_BSX, value_BSX, key, value, seqlens_k_B, total_sequence_length, cos_PH2, sin_PH2,
        num_heads=num_heads, kv_num_heads=kv_num_heads, do_rotary=1, _domain=MICROSOFT,
        _outputs=[typed_as(query_BSX, shape), typed_as(key, key.shape), typed_as(value, value.shape)],
    )  # fmt: skip
    return attended, KeyValue(present_key, present_value)
