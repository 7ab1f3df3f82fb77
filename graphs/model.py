"""The decoder: embedding, layers, norm, head."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import BATCH, TOKENS
from qwen_onnx.graphs.layers import as_type, named, size_of
from qwen_onnx.graphs.lowering import Lowering
from qwen_onnx.graphs.rotary import RotaryTables
from qwen_onnx.graphs.state import KeyValue, Precision, Step


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed stream and added back to it."""

    def __init__(self, config: QwenConfig, precision: Precision, lowering: Lowering) -> None:
        super().__init__()
        size, eps, linear, norm = config.hidden_size, config.rms_norm_eps, lowering.linear, lowering.norm
        self.input_layernorm = norm(size, eps, precision)
        self.self_attn = lowering.attention(config, precision, linear, norm)
        self.post_attention_layernorm = norm(size, eps, precision)
        self.mlp = lowering.mlp(config, precision, linear)

    def forward(
        self, op: OpBuilder, x: ir.Value, delta: ir.Value | None, past: KeyValue, step: Step
    ) -> tuple[ir.Value, ir.Value, KeyValue]:
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
        self.embed_tokens = lowering.embedding(config.vocab_size, config.hidden_size, precision)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, precision, lowering) for _ in range(config.num_hidden_layers)]
        )
        self.norm = lowering.norm(config.hidden_size, config.rms_norm_eps, precision)
        self.hidden_size = config.hidden_size
        self.lowering = lowering

    def forward(
        self, op: OpBuilder, ids_BS: ir.Value, cache: Sequence[KeyValue], step: Step
    ) -> tuple[ir.Value, list[KeyValue]]:
        """[B, S] -> the normed states of all tokens, and the new cache."""
        x, delta = self.embed_tokens(op, ids_BS), None
        if self.lowering.flat:
            tokens = BATCH if size_of(ids_BS, 1) == 1 else TOKENS
            x = named(op.Reshape(x, [-1, self.hidden_size]), tokens, self.hidden_size)
        present = []
        for layer, past in zip(self.layers, cache, strict=True):
            x, delta, key_value = layer(op, x, delta, past, step)
            present.append(key_value)
        normed, _ = self.norm(op, x, delta)
        return normed, present


class QwenForCausalLM(nn.Module):
    """Token ids and cache to f32 logits; the tree of attributes is the checkpoint's tree of names."""

    def __init__(self, config: QwenConfig, precision: Precision, lowering: Lowering, positions: int) -> None:
        super().__init__()
        self.rotary = RotaryTables(config, positions)
        self.model = QwenModel(config, precision, lowering)
        head = lowering.head or lowering.linear
        self.lm_head = head(config.hidden_size, config.vocab_size, precision, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)
        self.lowering, self.vocab_size = lowering, config.vocab_size

    def forward(
        self,
        op: OpBuilder,
        ids_BS: ir.Value,
        cache: Sequence[KeyValue],
        step: Step,
        kept: ir.Value | None = None,
    ) -> tuple[ir.Value, list[KeyValue]]:
        """[B, S] -> f32 logits of each row's last token [B, 1, V], and the new cache.

        With `kept`, int64 [1], the logits of so many of the last tokens, [B, kept, V]; 0 for all.
        """
        normed, present = self.model(op, ids_BS, cache, step)
        # One token a row where one is enough: the head is as large as all layers together.
        if kept is None:
            logits = self.lm_head(op, self.lowering.last(op, normed, step))
            if self.lowering.flat:
                logits = op.Unsqueeze(logits, [1])
        else:
            logits = self.lm_head(op, self.lowering.last_tokens(op, normed, kept, step))
            if self.lowering.flat:
                op.builder.push_module("last")
                rows = op.Concat(op.Shape(ids_BS, start=0, end=1), [-1, self.vocab_size], axis=0)
                logits = op.Reshape(logits, rows)
                op.builder.pop_module()
        return as_type(op, logits, ir.DataType.FLOAT), present
