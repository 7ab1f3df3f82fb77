"""A checkpoint's config.json, read once into frozen dataclasses under Hugging Face's field names.

What is not supported is refused here, by name, before a weight is touched: implement or refuse, never ignore.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from qwen_onnx.checkpoints.fields import Fields
from qwen_onnx.checkpoints.rope import RopeScaling, read_rope
from qwen_onnx.errors import UserError

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SUPPORTED = "Qwen2ForCausalLM and Qwen3ForCausalLM (dense, not quantized)"


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """The fields that shape the graph, under their Hugging Face names, defaults resolved."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    """q_proj, k_proj and v_proj have a bias (Qwen2 always, Qwen3 with `attention_bias`)."""
    o_bias: bool
    """o_proj has a bias (Qwen3 with `attention_bias`)."""
    qk_norm: bool
    """Queries and keys pass an RMSNorm over head_dim before the rotation (Qwen3)."""

    @property
    def context_length(self) -> int:
        """Positions the model is made for; YaRN's factor counts from the pretrained length."""
        if self.rope_scaling is None or self.rope_scaling.rope_type != "yarn":
            return self.max_position_embeddings
        stretched = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
        return max(self.max_position_embeddings, stretched)


def parse_config(raw: Mapping[str, Any]) -> QwenConfig:
    """Read a config.json already parsed to a mapping.

    Raises:
        UserError: an architecture, option or value that is not supported, or of the wrong type.
    """
    model_type = _model_type(raw)
    _refuse_unsupported(raw)
    read = Fields(raw, "config.json")
    hidden_size, heads = read.positive_int("hidden_size"), read.positive_int("num_attention_heads")
    layers = read.positive_int("num_hidden_layers")
    # transformers' defaults where the key is absent; null means "as if not grouped" to it.
    kv_heads = read.positive_int("num_key_value_heads", heads if "num_key_value_heads" in raw else 32)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    qwen3_without_head_dim = model_type == "qwen3" and "head_dim" not in raw
    if raw.get("head_dim") is None and not qwen3_without_head_dim and hidden_size % heads:
        raise UserError(f"config.json: hidden_size {hidden_size} is not a multiple of {heads} heads")
    head_dim = read.positive_int("head_dim", 128 if qwen3_without_head_dim else hidden_size // heads)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim {head_dim} is odd; the rotation pairs dimensions")
    max_position_embeddings = read.positive_int("max_position_embeddings", 32_768)
    rope_theta, rope_scaling = read_rope(raw, max_position_embeddings)
    attention_bias = read.boolean("attention_bias", False) if model_type == "qwen3" else False
    config = QwenConfig(
        architecture=ARCHITECTURES[model_type],
        vocab_size=read.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read.positive_int("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=read.positive_float("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=read.boolean("tie_word_embeddings", False),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=attention_bias,
        qk_norm=model_type == "qwen3",
    )
    _refuse_sliding_window(raw, layers, config.context_length)
    return config


def _model_type(raw: Mapping[str, Any]) -> str:
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else architectures or None
    found = f"model_type {model_type!r}, architectures {architectures!r}"
    for known, architecture in ARCHITECTURES.items():
        if model_type == known and named in (None, architecture):
            return known
    raise UserError(f"config.json: {found} found; supported are {SUPPORTED}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            method = raw[key].get("quant_method", "?") if isinstance(raw[key], Mapping) else raw[key]
            raise UserError(
                f"config.json: {key} ({method}) found; quantized weights are not supported, "
                "give the checkpoint they were made from"
            )
    if (hidden_act := raw.get("hidden_act", "silu")) != "silu":
        raise UserError(f"config.json: hidden_act {hidden_act!r} found; supported is 'silu'")
    if raw.get("dual_chunk_attention_config"):
        raise UserError("config.json: dual_chunk_attention_config found; only full attention is supported")
    for key in ("num_experts", "num_local_experts", "moe_intermediate_size"):
        if raw.get(key):
            raise UserError(
                f"config.json: {key} {raw[key]} found (a mixture of experts); supported are {SUPPORTED}"
            )


def _refuse_sliding_window(raw: Mapping[str, Any], layers: int, context_length: int) -> None:
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UserError(f"config.json: layer_types wants a list of {layers} names, one a layer")
        if other := sorted({str(kind) for kind in kinds} - {"full_attention"}):
            raise UserError(f"config.json: layer_types {other} found; supported is 'full_attention' only")
        return
    read = Fields(raw, "config.json")
    if not read.boolean("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return
    window, first = read.positive_int("sliding_window", 4096), raw.get("max_window_layers", 28)
    if not isinstance(first, int) or (first < layers and window < context_length):
        raise UserError(
            f"config.json: use_sliding_window, window {window} from layer {first} of {layers} on; "
            "sliding windows are not supported, only full attention"
        )
