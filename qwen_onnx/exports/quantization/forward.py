"""The decoder in NumPy f32, a layer at a time over all tokens: what inputs each matrix has.

Shape suffixes: S tokens, T tokens of one window, D hidden_size, N query heads, K key/value heads, H head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.exports.rotary import rotary_rows

Floats = NDArray[np.float32]
Read = Callable[[str], Iterator[Floats]]
"""A matrix of the checkpoint as f32, some rows [rows, columns] at a time; a vector as one of [1, size]."""
Seen = Callable[[str, Floats], None]
"""Told what a part of the layer (qkv, o, gate_up, down) has as input, [S, columns], each token by its weight."""

_TOKENS = 2048  # whose activations are held at a time


class Decoder:
    """A model's layers; weights are read when they are needed, and let go."""

    def __init__(self, config: QwenConfig, read: Read, window: int) -> None:
        """`window`: tokens that see each other; positions begin anew with each window."""
        self.config, self.read, self.window = config, read, window
        cos, sin = rotary_rows(config, 0, window)
        self.cos_T1H, self.sin_T1H = (np.concatenate([half, half], -1)[:, None] for half in (cos, sin))

    def layer(self, index: int, x_SD: Floats, seen: Seen = lambda part, x: None) -> Floats:
        """One layer over whole windows, [windows x T, D] -> the same."""
        size = max(1, _TOKENS // self.window) * self.window
        own = f"model.layers.{index}"
        return np.concatenate([self._layer(own, x_SD[i : i + size], seen) for i in range(0, len(x_SD), size)])

    def normed(self, x_SD: Floats) -> Floats:
        """What the head has as input."""
        return self._norm(x_SD, "model.norm.weight")

    def _layer(self, own: str, x_SD: Floats, seen: Seen) -> Floats:
        """What is told to `seen` is weighted by what an error of the product counts for.

        Keys and values count as often as they are looked at: the first token, which most heads look at, for as much
        as hundreds of others. What is added to the stream counts in units of the stream, by which the next norm
        divides: the first token's is a hundred times as large in some models.
        """
        y_SD = self._norm(x_SD, f"{own}.input_layernorm.weight")
        y_SX, looked_S1 = self._attention(f"{own}.self_attn", y_SD)
        seen("qkv", y_SD * looked_S1)
        x_SD = x_SD + self._linear(y_SX, f"{own}.self_attn.o_proj", bias=self.config.o_bias)
        seen("o", y_SX * (looked_S1 / _size(x_SD)))
        y_SD = self._norm(x_SD, f"{own}.post_attention_layernorm.weight")
        seen("gate_up", y_SD)
        gate, up = (self._linear(y_SD, f"{own}.mlp.{part}_proj") for part in ("gate", "up"))
        y_SX = _silu(gate) * up
        x_SD = x_SD + self._linear(y_SX, f"{own}.mlp.down_proj")
        seen("down", y_SX * (looked_S1 / _size(x_SD)))
        return x_SD

    def _attention(self, own: str, x_SD: Floats) -> tuple[Floats, Floats]:
        """Of each window's tokens to those before them.

        Returns:
            what comes of it, [S, N x H]; and [S, 1], the root of 1 + the attention that a token gets from all others,
            of the mean head.
        """
        config, h = self.config, self.config.head_dim
        q, k, v = (
            self._linear(x_SD, f"{own}.{part}_proj", bias=config.qkv_bias).reshape(-1, self.window, heads, h)
            for part, heads in (
                ("q", config.num_attention_heads),
                ("k", config.num_key_value_heads),
                ("v", config.num_key_value_heads),
            )
        )
        if config.qk_norm:
            q, k = self._norm(q, f"{own}.q_norm.weight"), self._norm(k, f"{own}.k_norm.weight")
        q, k = self._rotated(q), self._rotated(k)
        q *= np.float32(1 / math.sqrt(h))
        group = config.num_attention_heads // config.num_key_value_heads
        unseen_TT = np.triu(np.full((self.window, self.window), -np.inf, np.float32), 1)
        y = np.empty_like(q)
        mass_WT = np.zeros(q.shape[:2], np.float32)
        for window in range(len(q)):
            for head in range(config.num_attention_heads):
                scores_TT = q[window, :, head] @ k[window, :, head // group].T
                scores_TT += unseen_TT
                scores_TT -= scores_TT.max(-1, keepdims=True)
                np.exp(scores_TT, out=scores_TT)
                scores_TT /= scores_TT.sum(-1, keepdims=True)
                mass_WT[window] += scores_TT.sum(0)
                y[window, :, head] = scores_TT @ v[window, :, head // group]
        looked_S1 = np.sqrt(1 + mass_WT.reshape(-1, 1) / np.float32(config.num_attention_heads))
        return y.reshape(len(x_SD), -1), looked_S1

    def _rotated(self, x_WTNH: Floats) -> Floats:
        """Halves of each head turned against each other by the token's position."""
        a, b = np.split(x_WTNH, 2, -1)
        return np.asarray(x_WTNH * self.cos_T1H + np.concatenate([-b, a], -1) * self.sin_T1H, np.float32)

    def _linear(self, x_SI: Floats, own: str, *, bias: bool = False) -> Floats:
        """x W^T + b."""
        y_SO = np.concatenate([x_SI @ rows.T for rows in self.read(f"{own}.weight")], axis=1)
        if bias:
            y_SO += self._vector(f"{own}.bias")
        return y_SO

    def _norm(self, x: Floats, name: str) -> Floats:
        """x / sqrt(mean(x^2) + eps) * weight."""
        mean: Any = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(
            x / np.sqrt(mean + np.float32(self.config.rms_norm_eps)) * self._vector(name), np.float32
        )

    def _vector(self, name: str) -> Floats:
        return next(self.read(name)).reshape(-1)


def _size(x_SD: Floats) -> Floats:
    """Root mean square of each token's stream, [S, 1]."""
    return np.asarray(
        np.sqrt(np.mean(np.square(x_SD), axis=-1, keepdims=True)) + np.float32(1e-20), np.float32
    )


def _silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # e^-x of a very negative x is infinite, and x over it 0
        return np.asarray(x / (1 + np.exp(-x)), np.float32)
