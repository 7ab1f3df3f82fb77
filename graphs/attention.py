"""Attention with a cache: the projections most lowerings share. How heads attend is each lowering's own."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.graphs.layers import Linear, RMSNorm
from qwen_onnx.graphs.state import KeyValue, Precision, Step


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245): N query heads share K key/value heads."""

    def __init__(
        self, config: QwenConfig, precision: Precision, linear: type[Linear], norm: type[RMSNorm]
    ) -> None:
        super().__init__()
        self.hidden = precision.hidden
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.query_size, self.key_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.add_projections(config, precision, linear)
        self.o_proj = linear(self.query_size, config.hidden_size, precision, bias=config.o_bias)
        self.q_norm = norm(self.head_dim, config.rms_norm_eps, precision) if config.qk_norm else None
        self.k_norm = norm(self.head_dim, config.rms_norm_eps, precision) if config.qk_norm else None

    def add_projections(self, config: QwenConfig, precision: Precision, linear: type[Linear]) -> None:
        """Declare what makes queries, keys and values of x."""
        size, bias = config.hidden_size, config.qkv_bias
        self.q_proj = linear(size, self.query_size, precision, bias=bias)
        self.k_proj = linear(size, self.key_size, precision, bias=bias)
        self.v_proj = linear(size, self.key_size, precision, bias=bias)

    def forward(self, op: OpBuilder, x: ir.Value, past: KeyValue, step: Step) -> tuple[ir.Value, KeyValue]:
        """[..., D] and the cache -> [..., D] and the cache with the new tokens in it."""
        q, k, v = self.q_proj(op, x), self.k_proj(op, x), self.v_proj(op, x)
        attended, present = self.attend(op, q, k, v, past, step)
        return self.o_proj(op, attended), present

    def attend(
        self, op: OpBuilder, q: ir.Value, k: ir.Value, v: ir.Value, past: KeyValue, step: Step
    ) -> tuple[ir.Value, KeyValue]:
        """Projected [..., heads x H] queries, keys and values -> [..., N x H] and the new cache."""
        raise NotImplementedError
