"""Qwen2 and Qwen3 written out in NumPy float64 from the papers: the definition every graph is checked against.

It shares no code with the graphs, caches nothing, and holds one tensor of the checkpoint at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.rope import RopeScaling

# Shape suffixes: S positions, D hidden_size, V vocab_size, N query heads, K key/value heads, H head_dim,
# R = H/2 rotated pairs, I and O the inputs and outputs of a linear layer.

Read = Callable[[str], NDArray[Any]]
"""Returns a checkpoint's tensor by its Hugging Face name, in any float dtype; KeyError when it is absent."""

F64 = NDArray[np.float64]

_BLOCK_ELEMENTS = 2**22
"""Most elements of a matrix that are float64 at once (32 MiB)."""


def reference_logits(
    config: QwenConfig,
    read: Read,
    token_ids: Sequence[int] | NDArray[Any],
    *,
    last: int | None = None,
    positions: Sequence[int] | NDArray[Any] | None = None,
) -> F64:
    """Return the logits of one sequence, float64 [S, vocab_size] (or [last, vocab_size]).

    Args:
        config: the model.
        read: returns a tensor by its Hugging Face name, matrices as [out, in]; it is not written to.
        token_ids: [S] whole numbers below vocab_size. Each token sees itself and all tokens before it.
        last: return the logits of the last `last` tokens only.
        positions: [S] whole numbers to rotate by; 0, 1, 2, ... when not given.
    """
    ids_S = np.asarray(token_ids)
    positions_S = np.arange(len(ids_S)) if positions is None else np.asarray(positions)
    last = len(ids_S) if last is None else last
    if ids_S.ndim != 1 or not 1 <= last <= len(ids_S) or positions_S.shape != ids_S.shape:
        raise ValueError(f"token_ids {ids_S.shape}, positions {positions_S.shape}, last {last} do not fit")
    if ids_S.min() < 0 or ids_S.max() >= config.vocab_size:
        raise ValueError(f"token_ids {ids_S.min()} to {ids_S.max()}, vocab_size {config.vocab_size}")

    cos_SR, sin_SR = rope_cos_sin(config, positions_S)
    x_SD = read("model.embed_tokens.weight")[ids_S].astype(np.float64)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        y_SD = rms_norm(x_SD, read(f"{layer}.input_layernorm.weight"), eps=config.rms_norm_eps)
        x_SD = x_SD + _attention(config, read, f"{layer}.self_attn", y_SD, cos_SR, sin_SR)
        y_SD = rms_norm(x_SD, read(f"{layer}.post_attention_layernorm.weight"), eps=config.rms_norm_eps)
        x_SD = x_SD + _mlp(read, f"{layer}.mlp", y_SD)
    x_SD = rms_norm(x_SD[-last:], read("model.norm.weight"), eps=config.rms_norm_eps)
    return linear(x_SD, read("model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"))


def _attention(config: QwenConfig, read: Read, name: str, x_SD: F64, cos_SR: F64, sin_SR: F64) -> F64:
    """Grouped-query attention (arXiv:2305.13245): each key/value head serves N/K query heads."""

    def project(part: str, x: F64, *, bias: bool) -> F64:
        return linear(x, read(f"{name}.{part}.weight"), read(f"{name}.{part}.bias") if bias else None)

    s, h = len(x_SD), config.head_dim
    q_SNH = project("q_proj", x_SD, bias=config.qkv_bias).reshape(s, config.num_attention_heads, h)
    k_SKH = project("k_proj", x_SD, bias=config.qkv_bias).reshape(s, config.num_key_value_heads, h)
    v_SKH = project("v_proj", x_SD, bias=config.qkv_bias).reshape(s, config.num_key_value_heads, h)
    if config.qk_norm:  # Qwen3: over each head's H values, and before the rotation
        q_SNH = rms_norm(q_SNH, read(f"{name}.q_norm.weight"), eps=config.rms_norm_eps)
        k_SKH = rms_norm(k_SKH, read(f"{name}.k_norm.weight"), eps=config.rms_norm_eps)
    q_SNH, k_SKH = rotate(q_SNH, cos_SR, sin_SR), rotate(k_SKH, cos_SR, sin_SR)

    group = config.num_attention_heads // config.num_key_value_heads
    sees_SS = np.tri(s, dtype=bool)  # row: the token that looks; column: the token looked at
    y_SNH = np.empty_like(q_SNH)
    for n in range(config.num_attention_heads):  # head by head: one [S, S] matrix at a time
        scores_SS = q_SNH[:, n] @ k_SKH[:, n // group].T / math.sqrt(h)
        y_SNH[:, n] = softmax(np.where(sees_SS, scores_SS, -np.inf)) @ v_SKH[:, n // group]
    return project("o_proj", y_SNH.reshape(s, -1), bias=config.o_bias)


def _mlp(read: Read, name: str, x_SD: F64) -> F64:
    """SwiGLU (arXiv:2002.05202, equation 6): (SiLU(x W) * x V) W2; the checkpoint says gate, up and down."""
    gate, up = (linear(x_SD, read(f"{name}.{part}_proj.weight")) for part in ("gate", "up"))
    return linear(silu(gate) * up, read(f"{name}.down_proj.weight"))


def rope_frequencies(config: QwenConfig) -> tuple[F64, float]:
    """Return how far each pair of dimensions turns per position, and the factor on both cos and sin.

    Returns:
        Radians per position, float64 [head_dim / 2], and the attention factor (1 unless YaRN sets it).
    """
    # RoPE, arXiv:2104.09864, section 3.2.2: theta_d = base^(-2d/H) for pair d = 0 .. H/2 - 1.
    inv_freq_R = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq_R, 1.0
    if scaling.rope_type == "linear":
        return inv_freq_R / scaling.factor, 1.0
    if scaling.rope_type != "yarn":
        raise ValueError(f"rope_type {scaling.rope_type!r}; the reference knows 'linear' and 'yarn'")
    # YaRN, arXiv:2309.00071, section 3.2: pairs that turn often keep their frequency, pairs that never
    # complete a turn in the original length are slowed by the factor, with a ramp (0 to 1) in between.
    # Section 3.4: a temperature on the attention scores, spread evenly over queries and keys.
    ramp_R = _yarn_ramp(scaling, config.rope_theta, config.head_dim)
    return inv_freq_R * (1 - ramp_R) + inv_freq_R / scaling.factor * ramp_R, scaling.attention_factor


def _yarn_ramp(scaling: RopeScaling, theta: float, head_dim: int) -> F64:
    """How much of the slow-down each pair gets, float64 [head_dim / 2].

    The paper's ramp is straight over the number of turns, that of the implementations over the pair's index;
    checkpoints and transformers mean the latter.
    """

    def pair_that_turns(times: float) -> float:
        """Solve length * theta^(-2d/H) = 2 pi times for d; in general not a whole number."""
        turns = scaling.original_max_position_embeddings / (2 * math.pi * times)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    return np.asarray(np.clip((pairs - low) / (high - low), 0.0, 1.0), np.float64)


def rope_cos_sin(config: QwenConfig, positions_S: NDArray[Any]) -> tuple[F64, F64]:
    """Return what `rotate` turns by at these positions: cos and sin, float64 [S, head_dim / 2] each."""
    inv_freq_R, attention_factor = rope_frequencies(config)
    angles_SR = np.outer(positions_S, inv_freq_R)
    return np.cos(angles_SR) * attention_factor, np.sin(angles_SR) * attention_factor


def rotate(x_SNH: F64, cos_SR: F64, sin_SR: F64) -> F64:
    """Turn each head's pairs (d, d + H/2) by its position's angles; float64 [S, heads, H].

    The paper (arXiv:2104.09864, equation 34) pairs neighbours, (2d, 2d + 1); Hugging Face checkpoints store
    the rows of q_proj and k_proj in the order that makes it halves.
    """
    a_SNR, b_SNR = np.split(x_SNH, 2, axis=-1)
    cos_S1R, sin_S1R = cos_SR[:, None], sin_SR[:, None]
    return np.concatenate([a_SNR * cos_S1R - b_SNR * sin_S1R, b_SNR * cos_S1R + a_SNR * sin_S1R], axis=-1)


def rms_norm(x: F64, weight: NDArray[Any], *, eps: float) -> F64:
    """Divide by the root mean square over the last axis (arXiv:1910.07467, equation 4), times a gain."""
    mean_square: F64 = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * weight.astype(np.float64)


def silu(x: F64) -> F64:
    """x / (1 + e^-x), elementwise; the exponent taken is never positive, so nothing overflows."""
    e = np.exp(-np.abs(x))
    return x * np.where(x < 0, e, 1.0) / (1.0 + e)


def softmax(x: F64) -> F64:
    """e^x / sum e^x over the last axis; -inf counts as nothing, one value of each row must be finite."""
    e: F64 = np.exp(x - np.max(x, axis=-1, keepdims=True))
    total: F64 = np.sum(e, axis=-1, keepdims=True)
    return e / total


def linear(x_SI: F64, weight_OI: NDArray[Any], bias_O: NDArray[Any] | None = None) -> F64:
    """x W^T + b, float64 [S, O]; the matrix becomes float64 some rows at a time, for a head is gigabytes."""
    rows = max(1, _BLOCK_ELEMENTS // weight_OI.shape[1])
    y_SO = np.empty((len(x_SI), len(weight_OI)))
    for start in range(0, len(weight_OI), rows):
        y_SO[:, start : start + rows] = x_SI @ weight_OI[start : start + rows].astype(np.float64).T
    return y_SO if bias_O is None else y_SO + bias_O.astype(np.float64)
