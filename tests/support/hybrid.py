"""A decoder whose layers carry different states: what no Qwen that is exported has, and what a CacheSpec can say.

Its layers, of a configuration with three: attention over keys and values; two states of one size whatever was said;
and a state with its slots in another dimension, beside the last tokens' values. None of them is a known model's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnxscript import OpBuilder

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import BATCH, CAPACITY, LIVE
from qwen_onnx.contract.cache_spec import CacheSpec, StateSpec
from qwen_onnx.graphs.cache import END, KeyValue, Precision, named, size_of
from qwen_onnx.graphs.lowerings import Lowering
from qwen_onnx.graphs.static import StaticCache, StaticStep

if TYPE_CHECKING:
    from qwen_onnx.graphs.model import Attention

WINDOW = 4
"""Tokens that the sliding window holds."""


def hybrid_spec(config: QwenConfig, dtype: str = "float32") -> CacheSpec:
    """The states of a configuration of three layers."""
    heads, size = config.num_key_value_heads, config.head_dim
    width = heads * size
    return CacheSpec(
        (
            StateSpec(0, "key", "full_attention", dtype, (BATCH, heads, CAPACITY, size)),
            StateSpec(0, "value", "full_attention", dtype, (BATCH, heads, CAPACITY, size)),
            StateSpec(1, "total", "recurrent", "float32", (BATCH, width)),
            StateSpec(1, "count", "recurrent", "float32", (BATCH, 1)),
            StateSpec(2, "values", "full_attention", dtype, (BATCH, CAPACITY, width)),
            StateSpec(2, "window", "sliding_window", dtype, (BATCH, WINDOW, width)),
        )
    )


@dataclasses.dataclass(frozen=True)
class HybridCache(StaticCache):
    """The inputs of `static`, of prefill graphs; all in f32, and padding is not left out."""

    def spec(self, config: QwenConfig, precision: Precision) -> CacheSpec:
        """See Cache.spec."""
        return hybrid_spec(config, precision.hidden.numpy().name)

    def attend(
        self, op: OpBuilder, attn: Attention, qkv: list[ir.Value], past: KeyValue, step: StaticStep
    ) -> tuple[ir.Value, Any]:
        """See Cache.attend."""
        first, second = past
        if len(first.shape or ()) == 4:
            return super().attend(op, attn, qkv, past, step)
        q_MX, _, v_MX = qkv
        batch, sequence = (size_of(step.position_ids_BS, axis) for axis in (0, 1))
        shape = op.Concat(op.Shape(step.position_ids_BS), [attn.key_size], axis=0)
        v_BSX = named(op.Reshape(v_MX, shape), batch, sequence, attn.key_size)
        if len(first.shape or ()) == 2:
            seen_BSX, present = self._summed(op, v_BSX, first, second, step)
        else:
            seen_BSX, present = self._listed(op, v_BSX, first, second, step)
        # What a token sees is of it and those before it, so that chunks of a prompt give what the whole gives.
        seen_MX = op.Reshape(op.Mul(seen_BSX, 0.2), [-1, attn.key_size])
        groups = attn.heads // attn.kv_heads
        y_MX = op.Add(q_MX, op.Concat(*[seen_MX] * groups, axis=1))
        return named(y_MX, size_of(q_MX, 0), attn.query_size), present

    def _summed(
        self, op: OpBuilder, v_BSX: ir.Value, total_BX: ir.Value, count_B1: ir.Value, step: StaticStep
    ) -> tuple[ir.Value, tuple[ir.Value, ir.Value]]:
        """The mean of all values so far."""
        sums_BSX = op.Add(op.CumSum(v_BSX, 1), op.Unsqueeze(total_BX, [1]))
        ones_BS = op.Cast(op.GreaterOrEqual(step.position_ids_BS, 0), to=ir.DataType.FLOAT)
        counts_BS = op.Add(op.CumSum(ones_BS, 1), count_B1)
        present = op.Gather(sums_BSX, -1, axis=1), op.Gather(counts_BS, [-1], axis=1)
        return op.Div(sums_BSX, op.Unsqueeze(counts_BS, [2])), present

    def _listed(
        self, op: OpBuilder, v_BSX: ir.Value, values_BCX: ir.Value, window_BWX: ir.Value, step: StaticStep
    ) -> tuple[ir.Value, tuple[ir.Value, ir.Value]]:
        """The sum of the first token's value, which all may look at, and of the last WINDOW ones."""
        batch, width = size_of(v_BSX, 0), size_of(v_BSX, 2)
        written_BCX = op.TensorScatter(values_BCX, v_BSX, step.write_indices_B, axis=1)
        live_BTX = named(op.Slice(written_BCX, [0], step.live_length, [1]), batch, LIVE, width)
        first_B1X = op.Gather(live_BTX, [0], axis=1)
        both_BUX = named(op.Concat(window_BWX, v_BSX, axis=1), batch, "window and new", width)
        sums_BUX = op.CumSum(both_BUX, 1)
        sequence = size_of(v_BSX, 1)
        ends_BSX = named(op.Slice(sums_BUX, [WINDOW], [END], [1]), batch, sequence, width)
        begins_BSX = named(op.Slice(sums_BUX, [0], [-WINDOW], [1]), batch, sequence, width)
        present_window = named(op.Slice(both_BUX, [-WINDOW], [END], [1]), batch, WINDOW, width)
        return op.Add(op.Sub(ends_BSX, begins_BSX), first_B1X), (written_BCX, present_window)


HYBRID = Lowering(HybridCache())
