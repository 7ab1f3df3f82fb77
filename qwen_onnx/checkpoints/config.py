"""A checkpoint's config.json, read once into frozen dataclasses under Hugging Face's field names.

What is not supported is refused here, by name, before a weight is touched: implement or refuse, never ignore.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from qwen_onnx.checkpoints.fields import Fields
from qwen_onnx.checkpoints.known_keys import CONFIG, OFF, Key, key_notes, keys, refuse_keys, refused
from qwen_onnx.checkpoints.rope import RopeScaling, read_rope, rope_notes
from qwen_onnx.errors import UserError, printable

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
BARE = {"qwen2": "Qwen2Model", "qwen3": "Qwen3Model"}
"""The decoder without a head; the embedding is its head where config.json ties the two."""
SUPPORTED = "Qwen2ForCausalLM and Qwen3ForCausalLM (dense, not quantized)"


CONFIG_KEYS: Mapping[str, Key] = {
    **CONFIG,
    **keys(
        "read",
        "model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings tie_word_embeddings "
        "attention_bias rope_theta rope_scaling rope_parameters partial_rotary_factor "
        "original_max_position_embeddings use_sliding_window sliding_window max_window_layers layer_types "
        "dual_chunk_attention_config quantization_config compression_config",
    ),
    **refused(
        "tokens that see what follows them (bidirectional attention) are not supported", "is_causal", True
    ),
    **refused(
        "bidirectional attention is not supported",
        "use_bidirectional_attention use_bidirectional bidirectional_attention bidirectional is_bidirectional",
        *OFF,
    ),
    **refused(
        "a mixture of experts is not supported", "num_experts num_local_experts moe_intermediate_size", *OFF
    ),
    **refused("a layer with a config of its own is not supported", "per_layer_config", None, {}),
    **refused("pruned heads are not supported", "pruned_heads", None, {}, []),
    **refused("encoders are not supported", "is_encoder_decoder add_cross_attention", *OFF),
    **refused("biases of the MLP are not supported", "mlp_bias", *OFF),
    **refused("only text is supported", "use_mrope vision_config audio_config text_config", *OFF, {}),
    **refused("Qwen 1's attention is not supported", "use_logn_attn use_dynamic_ntk", *OFF),
}
"""What each key of config.json means here."""


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
    plain_positions: int | None = None
    """Positions up to which dual chunk attention is plain attention; None: it is plain everywhere."""

    @property
    def context_length(self) -> int:
        """Positions the model is made for; YaRN's factor counts from the pretrained length."""
        length = self.max_position_embeddings
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "yarn":
            stretched = self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings
            length = max(length, int(stretched))
        return length if self.plain_positions is None else min(length, self.plain_positions)


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
        plain_positions=_plain_positions(raw),
    )
    if config.plain_positions and config.rope_scaling:
        raise UserError(
            "config.json: dual_chunk_attention_config and a stretched rope are not supported together"
        )
    _refuse_sliding_window(raw, layers, config.context_length)
    return config


def config_notes(raw: Mapping[str, Any]) -> Iterator[str]:
    """What of a config.json that was read is odd, or passed over; one line each."""
    named, model_type = _named_architecture(raw), str(raw.get("model_type"))
    if named not in (None, ARCHITECTURES[model_type], BARE[model_type]):
        yield printable(
            f"config.json: architecture {named} is read as {ARCHITECTURES[model_type]}, by its model_type"
        )
    if raw.get("dual_chunk_attention_config"):
        yield (
            f"config.json: dual_chunk_attention_config is plain attention up to {_plain_positions(raw)} positions: "
            "the export has no more"
        )
    yield from rope_notes(raw)
    yield from key_notes("config.json", raw, CONFIG_KEYS)


def _named_architecture(raw: Mapping[str, Any]) -> Any:
    architectures = raw.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else architectures or None


def _model_type(raw: Mapping[str, Any]) -> str:
    """By model_type, as transformers does; the architecture must not speak of another."""
    model_type, named = raw.get("model_type"), _named_architecture(raw)
    found = f"model_type {model_type!r}, architectures {raw.get('architectures')!r}"
    for known, architecture in ARCHITECTURES.items():
        # Training wrappers put their own name in front of it, as FSDP does.
        agrees = named in (None, BARE[known]) or (isinstance(named, str) and named.endswith(architecture))
        if model_type == known and agrees:
            return known
    raise UserError(f"config.json: {found} found; supported are {SUPPORTED}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    refuse_keys("config.json", raw, CONFIG_KEYS)
    if (hidden_act := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UserError(f"config.json: hidden_act {hidden_act!r} found; supported is 'silu'")


def _plain_positions(raw: Mapping[str, Any]) -> int | None:
    """How many positions dual chunk attention (arXiv:2402.17463, section 3) sees as plain attention does.

    Keys are rotated by their place in a chunk of chunk_size - local_size positions. Queries see keys of their own
    chunk and the one before at their true distance, up to chunk_size; anything farther is moved nearer. Scores are
    scaled from original_max_position_embeddings on.
    """
    key = "dual_chunk_attention_config"
    dual = raw.get(key)
    if not dual:
        return None
    if not isinstance(dual, Mapping):
        raise UserError(f"config.json: {key} wants an object or null, found {dual!r}")
    read = Fields(dual, f"config.json: {key}")
    chunk, local = read.positive_int("chunk_size", 8192), read.positive_int("local_size", 1024)
    if local >= chunk:
        raise UserError(f"config.json: {key} has local_size {local}; less than chunk_size {chunk} wanted")
    original = read.positive_int("original_max_position_embeddings", chunk)
    return min(chunk, 2 * (chunk - local), original)


def _refuse_sliding_window(raw: Mapping[str, Any], layers: int, context_length: int) -> None:
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UserError(f"config.json: layer_types wants a list of {layers} names, one a layer")
        if other := sorted({str(kind) for kind in kinds} - {"full_attention", "attention"}):
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
