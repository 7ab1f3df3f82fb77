"""The decoder: embedding, layers, norm, head."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from qwen_onnx.config import QwenConfig
from qwen_onnx.graphs.attention import Attention
from qwen_onnx.graphs.layers import MLP, Embedding, Linear, RMSNorm, as_type
from qwen_onnx.graphs.rotary import RotaryTables
from qwen_onnx.graphs.state import KeyValue, Precision, Step


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed stream and added back to it."""

    def __init__(self, config: QwenConfig, precision: Precision, attention: type[Attention]) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.self_attn = attention(config, precision)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.mlp = MLP(config, precision)

    def forward(self, op: OpBuilder, x_MD: ir.Value, past: KeyValue, step: Step) -> tuple[ir.Value, KeyValue]:
        """[M, D] -> [M, D] and this layer's new cache."""
        attended_MD, present = self.self_attn(op, self.input_layernorm(op, x_MD), past, step)
        x_MD = op.Add(x_MD, attended_MD)
        return op.Add(x_MD, self.mlp(op, self.post_attention_layernorm(op, x_MD))), present


class QwenModel(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: QwenConfig, precision: Precision, attention: type[Attention]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, precision)
        self.layers = nn.ModuleList(
            [DecoderLayer(config, precision, attention) for _ in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.hidden_size = config.hidden_size

    def forward(
        self,
        op: OpBuilder,
        ids_BS: ir.Value,
        cache: Sequence[KeyValue],
        step: Step,
        last_B: ir.Value | None,
    ) -> tuple[ir.Value, list[KeyValue]]:
        """[B, S] -> the normed state of each row's last token [B, D], and the new cache."""
        x_BSD = self.embed_tokens(op, ids_BS)
        x_MD = op.Reshape(x_BSD, [-1, self.hidden_size])
        present = []
        for layer, past in zip(self.layers, cache, strict=True):
            x_MD, key_value = layer(op, x_MD, past, step)
            present.append(key_value)
        if last_B is not None:  # before norm and head: they are needed for one token a row only
            x_BSD = op.Reshape(x_MD, op.Shape(x_BSD))
            x_MD = op.GatherND(x_BSD, op.Unsqueeze(last_B, [1]), batch_dims=1)
        return self.norm(op, x_MD), present


class QwenForCausalLM(nn.Module):
    """Token ids and cache to f32 logits; the tree of attributes is the checkpoint's tree of names."""

    def __init__(
        self, config: QwenConfig, precision: Precision, attention: type[Attention], positions: int
    ) -> None:
        super().__init__()
        self.rotary = RotaryTables(config, positions)
        self.model = QwenModel(config, precision, attention)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, precision, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight  # one initializer, two readers

    def forward(
        self,
        op: OpBuilder,
        ids_BS: ir.Value,
        cache: Sequence[KeyValue],
        step: Step,
        last_B: ir.Value | None,
    ) -> tuple[ir.Value, list[KeyValue]]:
        """[B, S] -> f32 logits of each row's last token [B, 1, V], and the new cache."""
        x_BD, present = self.model(op, ids_BS, cache, step, last_B)
        logits_BV = as_type(op, self.lm_head(op, x_BD), ir.DataType.FLOAT)
        return op.Unsqueeze(logits_BV, [1]), present
