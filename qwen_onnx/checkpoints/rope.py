"""How a config.json stretches positions: `rope_scaling`, or `rope_parameters` in its newer spelling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from qwen_onnx.checkpoints.fields import Fields
from qwen_onnx.errors import UserError

# Of a stretched context; beyond it a number is a mistake, and its tables fill disks.
_LARGEST_FACTOR = 10_000.0

# What a rope dictionary may say; anything else in it changes the model in a way nobody here computes.
_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_ROPE_COMMON_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_UNREAD = {"attn_factor": 1, "extrapolation_factor": 1, "finetuned": True}
"""What older YaRN code read and transformers passes over, and the values that say nothing."""


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


def read_rope(raw: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """The base of the rotation, and how positions are stretched, if they are.

    Args:
        raw: a whole config.json.

    Raises:
        UserError: a type or key that is not supported, or a value out of range.
    """
    key, rope = _chosen(raw)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", rope_type) != rope_type:
        raise UserError(f"config.json: {key} has type {rope['type']!r} and rope_type {rope_type!r}; keep one")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise UserError(
            f"config.json: {key} has rope_type {rope_type!r}; supported are 'default', 'linear' and 'yarn'"
        )
    if unknown := sorted(rope.keys() - _ROPE_KEYS[rope_type] - _ROPE_COMMON_KEYS - _UNREAD.keys()):
        raise UserError(f"config.json: {key} of type {rope_type!r} has {unknown}, which is not supported")
    if any(part.get("partial_rotary_factor", 1) not in (None, 1) for part in (raw, rope)):
        raise UserError("config.json: partial_rotary_factor other than 1 is not supported")
    read = Fields(rope, f"config.json: {key}")
    default_theta = Fields(raw, "config.json").positive_float("rope_theta", 10_000.0)
    theta = read.positive_float("rope_theta", default_theta)
    if rope_type == "default":
        return theta, None
    original = read.positive_int("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "yarn" and raw.get("original_max_position_embeddings") is not None:
        original = Fields(raw, "config.json").positive_int("original_max_position_embeddings")
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
        # As transformers: 0 is as good as nothing, and null does not truncate.
        beta_fast=read.positive_float("beta_fast", 32.0) if rope.get("beta_fast") != 0 else 32.0,
        beta_slow=read.positive_float("beta_slow", 1.0) if rope.get("beta_slow") != 0 else 1.0,
        truncate=read.boolean("truncate", "truncate" not in rope),
    )


def rope_notes(raw: Mapping[str, Any]) -> Iterator[str]:
    """What a config.json that was read says of positions and nobody follows."""
    if raw.get("rope_parameters") and raw.get("rope_scaling") and not _same(raw):
        yield "config.json: has rope_parameters and rope_scaling; rope_scaling is used, as transformers does"
    key, rope = _chosen(raw)
    outer, inner = raw.get("rope_theta"), rope.get("rope_theta")
    if None not in (outer, inner) and outer != inner:
        yield f"config.json: rope_theta {outer!r} is passed over: {key} has {inner!r}, which transformers takes, too"
    for name, neutral in _UNREAD.items():
        if rope.get(name, neutral) not in (None, neutral):
            yield f"config.json: {key}: {name} {rope[name]!r} is passed over, as transformers does"


def _same(raw: Mapping[str, Any]) -> bool:
    return bool(raw["rope_parameters"] == raw["rope_scaling"])


def _chosen(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Of `rope_scaling` and `rope_parameters`, the one that counts: the former where it says anything.

    Raises:
        UserError: one is no object, or both stretch positions, or the one that counts would lose the other's base.
    """
    spellings = {key: raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key) is not None}
    for key, value in spellings.items():
        if not isinstance(value, Mapping):
            raise UserError(f"config.json: {key} wants an object or null, found {value!r}")
    key = next((key for key, value in spellings.items() if value), "rope_scaling")
    other: Mapping[str, Any] = spellings.get("rope_parameters", {}) if key == "rope_scaling" else {}
    rope: Mapping[str, Any] = spellings.get(key, {})
    if other and rope != other:
        if other.get("rope_type", other.get("type", "default")) != "default":
            raise UserError("config.json: rope_parameters and rope_scaling disagree; keep one of them")
        used = rope.get("rope_theta", raw.get("rope_theta"))
        if other.get("rope_theta", used) != (10_000.0 if used is None else used):
            raise UserError(
                f"config.json: rope_parameters has rope_theta {other['rope_theta']!r}, which nobody reads beside "
                "rope_scaling; write it into rope_scaling"
            )
    return key, rope


def _factor(factor: float, key: str) -> float:
    if factor > _LARGEST_FACTOR:
        raise UserError(f"config.json: {key} has factor {factor:g}; up to {_LARGEST_FACTOR:g} is supported")
    return factor


def _attention_factor(rope: Mapping[str, Any], factor: float, read: Fields) -> float:
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
