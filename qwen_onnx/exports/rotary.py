"""Rotary position embedding: the formula of the cos and sin tables (arXiv:2104.09864)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.rope import RopeScaling


def rotary_rows(config: QwenConfig, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Rows `start` to `stop` of the cos and sin tables, each f32 [stop - start, head_dim / 2]."""
    angles = np.outer(np.arange(start, stop, dtype=np.float64), inverse_frequencies(config))
    factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    return (factor * np.cos(angles)).astype(np.float32), (factor * np.sin(angles)).astype(np.float32)


def inverse_frequencies(config: QwenConfig) -> NDArray[np.float64]:
    """Radians a position turns each pair of dimensions, f64 [head_dim / 2]."""
    plain = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    keep = 1.0 - _yarn_ramp(config, scaling)
    return plain * keep + plain / scaling.factor * (1.0 - keep)


def _yarn_ramp(config: QwenConfig, scaling: RopeScaling) -> NDArray[np.float64]:
    """How far each pair is interpolated, 0 to 1 (arXiv:2309.00071, section 3.2).

    Pairs that turn more than beta_fast times within the pretrained length are left alone, those that
    turn less than beta_slow times are stretched by the whole factor.
    """

    def pair_turning(times: float) -> float:
        turns = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return config.head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    pairs = np.arange(config.head_dim // 2, dtype=np.float64)
    return np.asarray(np.clip((pairs - low) / (high - low), 0.0, 1.0), np.float64)
