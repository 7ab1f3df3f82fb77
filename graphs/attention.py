"""Attention with a cache: the projections all lowerings share. How heads attend is each lowering's own."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.config import QwenConfig
from qwen_onnx.graphs.layers import Linear, RMSNorm
from qwen_onnx.graphs.state import KeyValue, Precision, Step


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245): N query heads share K key/value heads."""

    def __init__(self, config: QwenConfig, precision: Precision) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        query, key = config.num_attention_heads * head, config.num_key_value_heads * head
        self.q_proj = Linear(hidden, query, precision, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, key, precision, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, key, precision, bias=config.qkv_bias)
        self.o_proj = Linear(query, hidden, precision, bias=config.o_bias)
        self.q_norm = RMSNorm(head, config.rms_norm_eps, precision) if config.qk_norm else None
        self.k_norm = RMSNorm(head, config.rms_norm_eps, precision) if config.qk_norm else None
        self.hidden = precision.hidden
        self.query_size = query

    def forward(self, op: OpBuilder, x_MD: ir.Value, past: KeyValue, step: Step) -> tuple[ir.Value, KeyValue]:
        """[M, D] and the cache -> [M, D] and the cache with the new tokens in it."""
        q_MX, k_MX, v_MX = self.q_proj(op, x_MD), self.k_proj(op, x_MD), self.v_proj(op, x_MD)
        attended_MX, present = self.attend(op, q_MX, k_MX, v_MX, past, step)
        return self.o_proj(op, attended_MX), present

    def attend(
        self, op: OpBuilder, q_MX: ir.Value, k_MX: ir.Value, v_MX: ir.Value, past: KeyValue, step: Step
    ) -> tuple[ir.Value, KeyValue]:
        """Projected [M, heads x H] queries, keys and values -> [M, N x H] and the new cache."""
        raise NotImplementedError
