"""A checkpoint's config.json, read once into frozen dataclasses under Hugging Face's field names.

What is not supported is refused here, by name, before a weight is touched: implement or refuse, never ignore.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

from qwen_onnx.errors import UserError

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SUPPORTED = "Qwen2ForCausalLM and Qwen3ForCausalLM (dense, not quantised)"

_LARGEST_FACTOR = (
    10_000.0  # of a stretched context; beyond it a number is a mistake, and its tables fill disks
)

# What a rope dictionary may say; anything else in it changes the model in a way nobody here computes.
_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_ROPE_COMMON_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How positions are stretched beyond the pretrained length (`rope_scaling` / `rope_parameters`)."""

    rope_type: str
    """`linear` or `yarn`."""
    factor: float
    original_max_position_embeddings: int
    attention_factor: float = 1.0
    """Both cos and sin are multiplied by it (YaRN: 0.1 ln(factor) + 1)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the ends of YaRN's ramp to whole dimensions."""


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
    read = _Reader(raw, "config.json")
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
    rope_theta, rope_scaling = _rope(raw, max_position_embeddings)
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
                f"config.json: {key} ({method}) found; quantised weights are not supported, "
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
    read = _Reader(raw, "config.json")
    if not read.boolean("use_sliding_window", False) or raw.get("sliding_window", 4096) is None:
        return
    window, first = read.positive_int("sliding_window", 4096), raw.get("max_window_layers", 28)
    if not isinstance(first, int) or (first < layers and window < context_length):
        raise UserError(
            f"config.json: use_sliding_window, window {window} from layer {first} of {layers} on; "
            "sliding windows are not supported, only full attention"
        )


def _rope(raw: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    spellings = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None}
    for key, value in spellings.items():
        if not isinstance(value, Mapping):
            raise UserError(f"config.json: {key} wants an object or null, found {value!r}")
    if len(spellings) == 2 and spellings["rope_parameters"] != spellings["rope_scaling"]:
        raise UserError("config.json: rope_parameters and rope_scaling disagree; keep one of them")
    key = next(iter(spellings), "rope_scaling")
    rope: Mapping[str, Any] = spellings.get(key, {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", rope_type) != rope_type:
        raise UserError(f"config.json: {key} has type {rope['type']!r} and rope_type {rope_type!r}; keep one")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise UserError(
            f"config.json: {key} has rope_type {rope_type!r}; supported are 'default', 'linear' and 'yarn'"
        )
    if unknown := sorted(rope.keys() - _ROPE_KEYS[rope_type] - _ROPE_COMMON_KEYS):
        raise UserError(f"config.json: {key} of type {rope_type!r} has {unknown}, which is not supported")
    if any(part.get("partial_rotary_factor", 1) not in (None, 1) for part in (raw, rope)):
        raise UserError("config.json: partial_rotary_factor other than 1 is not supported")
    read = _Reader(rope, f"config.json: {key}")
    default_theta = _Reader(raw, "config.json").positive_float("rope_theta", 10_000.0)
    theta = read.positive_float("rope_theta", default_theta)
    if rope_type == "default":
        return theta, None
    original = read.positive_int("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "yarn" and raw.get("original_max_position_embeddings") is not None:
        original = _Reader(raw, "config.json").positive_int("original_max_position_embeddings")
    if rope_type == "linear":
        return theta, RopeScaling("linear", _factor(read.positive_float("factor"), key), original)
    factor = _factor(read.positive_float("factor", max_position_embeddings / original), key)
    if theta <= 1:
        raise UserError(f"config.json: rope_theta {theta} found; YaRN wants more than 1")
    return theta, RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(rope, factor, read),
        beta_fast=read.positive_float("beta_fast", 32.0),
        beta_slow=read.positive_float("beta_slow", 1.0),
        truncate=read.boolean("truncate", True),
    )


def _factor(factor: float, key: str) -> float:
    if factor > _LARGEST_FACTOR:
        raise UserError(f"config.json: {key} has factor {factor:g}; up to {_LARGEST_FACTOR:g} is supported")
    return factor


def _attention_factor(rope: Mapping[str, Any], factor: float, read: _Reader) -> float:
    """Section 3.4 of the YaRN paper (arXiv:2309.00071); mscale and mscale_all_dim as DeepSeek added them."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = temperature(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        whole = temperature(read.positive_float("mscale_all_dim"))
        default = temperature(read.positive_float("mscale")) / whole
    attention_factor = read.positive_float("attention_factor", default)
    if not 0.01 <= attention_factor <= 100:
        raise UserError(
            f"config.json: YaRN's attention factor is {attention_factor:g}; 0.01 to 100 is supported"
        )
    return attention_factor


class _Reader:
    """Typed access to a JSON object; an error names the file, the key and what was found."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise UserError(f"{self._where}: {key} wants a positive whole number, found {value!r}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            raise UserError(f"{self._where}: {key} wants a positive number, found {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self._where}: {key} wants true or false, found {value!r}")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"{self._where}: {key} is missing")
        return value
