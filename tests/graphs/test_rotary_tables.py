"""The rotary tables of a weights file: the formula, whatever the number of pieces they are made in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from qwen_onnx.checkpoints.config import QwenConfig, parse_config
from qwen_onnx.exports import weights
from qwen_onnx.exports.weights import rotary_tensors
from support.checkpoints import QWEN2, QWEN2_LINEAR, QWEN2_YARN, QWEN3_BIAS


def tables(config: QwenConfig, positions: int) -> list[np.ndarray]:
    """From the formula, one number at a time, in Python's own doubles."""
    scaling, theta, width = config.rope_scaling, config.rope_theta, config.head_dim // 2
    frequencies = [theta ** (-2 * i / config.head_dim) for i in range(width)]
    factor = 1.0
    if scaling is not None and scaling.rope_type == "linear":
        frequencies = [frequency / scaling.factor for frequency in frequencies]
    elif scaling is not None:
        factor = 0.1 * math.log(scaling.factor) + 1
        length = scaling.original_max_position_embeddings

        def pair(turns: float) -> float:
            return config.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, config.head_dim - 1)
        share = [
            min(max((i - low) / (high - low), 0), 1) if high > low else float(i > low) for i in range(width)
        ]
        frequencies = [f * (1 - s) + f / scaling.factor * s for f, s in zip(frequencies, share, strict=True)]
    angles = [[position * frequency for frequency in frequencies] for position in range(positions)]
    return [
        np.array([[factor * wave(angle) for angle in row] for row in angles], np.float32)
        for wave in (math.cos, math.sin)
    ]


def yarn(**options: Any) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    return {**QWEN3_BIAS, "rope_theta": 1e4, "rope_scaling": {**scaling, **options}}


YARN = [
    QWEN2_YARN,
    yarn(beta_fast=8, beta_slow=1, truncate=False),
    yarn(beta_fast=8, beta_slow=1),
    yarn(beta_fast=2, beta_slow=2, truncate=False),  # a ramp that is a step
    yarn(beta_fast=2, beta_slow=2),
]


@pytest.mark.parametrize("raw", [QWEN2, QWEN2_LINEAR, *YARN, QWEN3_BIAS])
def test_rotary_tables_are_the_formula(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As doubles give it at far positions too, and the same rows in pieces of any length."""
    config, positions = parse_config(raw), 2_000
    made = rotary_tensors(config, positions)
    assert [tensor.name for tensor in made] == ["rotary.cos", "rotary.sin"]
    monkeypatch.setattr(weights, "PIECE", config.head_dim // 2 * 8 * 7)  # seven rows
    pieces = [list(tensor.pieces()) for tensor in rotary_tensors(config, positions)]
    assert [len(rows) for rows in pieces] == [math.ceil(positions / 7)] * 2
    for tensor, rows, wanted in zip(made, pieces, tables(config, positions), strict=True):
        assert tensor.shape == wanted.shape
        whole = b"".join(tensor.pieces())
        assert whole == b"".join(rows)
        found = np.frombuffer(whole, np.float32).reshape(tensor.shape)
        np.testing.assert_allclose(found, wanted, rtol=2e-7, atol=1e-12)
