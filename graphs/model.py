"""The decoder in reading order: attention, feed-forward, layer, model, head. Attributes have the checkpoint's names.

Which operators compute it is a Lowering's business: the model asks for a Linear, a norm and a cache, and wires them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import BATCH, TOKENS
from qwen_onnx.graphs.cache import KeyValue, LayerState, Precision, Step, as_type, named, size_of
from qwen_onnx.graphs.lowerings import Lowering


class RotaryTables(nn.Module):
    """cos and sin of every position, f32 in each export dtype: a rounded angle moves far keys."""

    def __init__(self, config: QwenConfig, positions: int) -> None:
        super().__init__()
        self.cos = nn.Parameter([positions, config.head_dim // 2], ir.DataType.FLOAT)
        self.sin = nn.Parameter([positions, config.head_dim // 2], ir.DataType.FLOAT)

    def forward(self, op: OpBuilder) -> tuple[ir.Value, ir.Value]:
        """The tables, f32 [P, H/2], as initializers of the graph."""
        return self.cos, self.sin


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245): N query heads share K key/value heads."""

    def __init__(self, config: QwenConfig, precision: Precision, lowering: Lowering) -> None:
        super().__init__()
        linear, norm, size = lowering.weights.linear, lowering.norm, config.hidden_size
        self.hidden, self.lowering = precision.hidden, lowering
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.query_size, self.key_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if lowering.packed_qkv:
            width = self.query_size + 2 * self.key_size
            self.qkv_proj = linear(size, width, precision, "qkv", bias=config.qkv_bias)
        else:
            self.q_proj = linear(size, self.query_size, precision, "qkv", bias=config.qkv_bias)
            self.k_proj = linear(size, self.key_size, precision, "qkv", bias=config.qkv_bias)
            self.v_proj = linear(size, self.key_size, precision, "qkv", bias=config.qkv_bias)
        self.o_proj = linear(self.query_size, size, precision, "o", bias=config.o_bias)
        self.q_norm = norm(self.head_dim, config.rms_norm_eps, precision) if config.qk_norm else None
        self.k_norm = norm(self.head_dim, config.rms_norm_eps, precision) if config.qk_norm else None

    def forward(self, op: OpBuilder, x: ir.Value, past: LayerState, step: Step) -> tuple[ir.Value, KeyValue]:
        """[..., D] and the cache -> [..., D] and the cache with the new tokens in it."""
        qkv = self.projected(op, x)
        attended, present = self.lowering.cache.attend(op, self, qkv, KeyValue(*past), step)
        return self.o_proj(op, attended), present

    def projected(self, op: OpBuilder, x: ir.Value) -> list[ir.Value]:
        """Queries, keys and values [..., heads x H]; or all side by side, where the cache takes them so."""
        if not self.lowering.packed_qkv:
            return [self.q_proj(op, x), self.k_proj(op, x), self.v_proj(op, x)]
        qkv = self.qkv_proj(op, x)
        if self.lowering.cache.takes_packed and self.q_norm is None:
            return [qkv]
        return list(op.Split(qkv, [self.query_size, self.key_size, self.key_size], axis=-1, _outputs=3))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: QwenConfig, precision: Precision, lowering: Lowering) -> None:
        super().__init__()
        linear, hidden, feed_forward = lowering.weights.linear, config.hidden_size, config.intermediate_size
        self.silu, self.packed = lowering.silu, lowering.packed_gate_up
        if self.packed:
            self.gate_up_proj = linear(hidden, 2 * feed_forward, precision, "gate_up")
        else:
            self.gate_proj = linear(hidden, feed_forward, precision, "gate_up")
            self.up_proj = linear(hidden, feed_forward, precision, "gate_up")
        self.down_proj = linear(feed_forward, hidden, precision, "down")

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """[..., D] -> [..., D]; the products of a weight format follow each other in their own order of states."""
        if self.packed:
            gate, up = op.Split(self.gate_up_proj(op, x), num_outputs=2, axis=-1, _outputs=2)
            return self.down_proj(op, op.Mul(self.silu(op, gate), up))
        x = self.gate_proj.enter(op, x)
        gate, up = self.gate_proj(op, x, inside=True), self.up_proj(op, x, inside=True)
        down = self.down_proj(op, op.Mul(self.silu(op, gate), up), inside=True)
        return self.down_proj.leave(op, down)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed stream and added back to it."""

    def __init__(self, config: QwenConfig, precision: Precision, lowering: Lowering) -> None:
        super().__init__()
        size, eps, norm = config.hidden_size, config.rms_norm_eps, lowering.norm
        self.input_layernorm = norm(size, eps, precision)
        self.self_attn = Attention(config, precision, lowering)
        self.post_attention_layernorm = norm(size, eps, precision)
        self.mlp = MLP(config, precision, lowering)

    def forward(
        self, op: OpBuilder, x: ir.Value, delta: ir.Value | None, past: LayerState, step: Step
    ) -> tuple[ir.Value, ir.Value, LayerState]:
        """The stream and what is still to be added to it -> the same of this layer, and its new cache.

        The sum is left to the next norm, which can add on the way.
        """
        normed, x = self.input_layernorm(op, x, delta)
        attended, present = self.self_attn(op, normed, past, step)
        normed, x = self.post_attention_layernorm(op, x, attended)
        return x, self.mlp(op, normed), present


class QwenModel(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: QwenConfig, precision: Precision, lowering: Lowering) -> None:
        super().__init__()
        self.embed_tokens = lowering.weights.embedding(config.vocab_size, config.hidden_size, precision)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(config, dataclasses.replace(precision, layer=i), lowering)
                for i in range(config.num_hidden_layers)
            ]
        )
        self.norm = lowering.norm(config.hidden_size, config.rms_norm_eps, precision)
        self.hidden_size, self.flat = config.hidden_size, lowering.cache.flat

    def forward(
        self, op: OpBuilder, ids_BS: ir.Value, past: Sequence[LayerState], step: Step
    ) -> tuple[ir.Value, list[LayerState]]:
        """[B, S] -> the normed states of all tokens, and the new cache."""
        x, delta = self.embed_tokens(op, ids_BS), None
        if self.flat:
            tokens = BATCH if size_of(ids_BS, 1) == 1 else TOKENS
            x = named(op.Reshape(x, [-1, self.hidden_size]), tokens, self.hidden_size)
        present = []
        for layer, of_layer in zip(self.layers, past, strict=True):
            x, delta, made = layer(op, x, delta, of_layer, step)
            present.append(made)
        normed, _ = self.norm(op, x, delta)
        return normed, present


class QwenForCausalLM(nn.Module):
    """Token ids and cache to f32 logits; the tree of attributes is the checkpoint's tree of names."""

    def __init__(self, config: QwenConfig, precision: Precision, lowering: Lowering, positions: int) -> None:
        super().__init__()
        self.config, self.precision, self.cache = config, precision, lowering.cache
        self.rotary = RotaryTables(config, positions)
        self.model = QwenModel(config, precision, lowering)
        linear = lowering.weights.linear
        self.lm_head = linear(config.hidden_size, config.vocab_size, precision, "head")
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)

    def forward(
        self,
        op: OpBuilder,
        ids_BS: ir.Value,
        past: Sequence[LayerState],
        step: Step,
        kept: ir.Value | None = None,
    ) -> tuple[ir.Value, list[LayerState]]:
        """[B, S] -> f32 logits of each row's last token [B, 1, V], and the new cache.

        With `kept`, int64 [1], the logits of so many of the last tokens, [B, kept, V]; 0 for all.
        """
        normed, present = self.model(op, ids_BS, past, step)
        # One token a row where one is enough: the head is as large as all layers together.
        if kept is None:
            logits = self.lm_head(op, self.cache.last(op, normed, step))
            if self.cache.flat:
                logits = op.Unsqueeze(logits, [1])
        else:
            logits = self.lm_head(op, self.cache.last_tokens(op, normed, kept, step))
            if self.cache.flat:
                op.builder.push_module("last")
                rows = op.Concat(op.Shape(ids_BS, start=0, end=1), [-1, self.config.vocab_size], axis=0)
                logits = op.Reshape(logits, rows)
                op.builder.pop_module()
        return as_type(op, logits, ir.DataType.FLOAT), present
