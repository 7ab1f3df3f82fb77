"""What an export of a model takes on disk and in memory, computed from its config."""

from __future__ import annotations

from typing import NamedTuple

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.contract import QUANTIZED
from qwen_onnx.contract.quant import QuantConfig
from qwen_onnx.exports.options import ExportOptions

CONTEXT = 4096
"""Tokens in the cache that memory is told with."""


class Size(NamedTuple):
    """In bytes; the runtime itself comes on top, some 100 MB on a CPU."""

    disk: int
    memory: int
    """Weights, and a cache of CONTEXT tokens."""


def export_size(config: QwenConfig, dtype: str, provider: str = "cpu") -> Size:
    """Of an export as `dtype`, as it runs on this provider: a CPU holds f16 and bf16 as f32."""
    disk = _weights(config, dtype)
    widened = provider == "cpu" and dtype in ("f16", "bf16")
    width = 2 if dtype == "f16" and provider != "cpu" else 4
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    tokens = min(CONTEXT, config.context_length)
    return Size(disk, (_weights(config, "f32") if widened else disk) + tokens * slot)


def gigabytes(size: int) -> str:
    """In three figures, as `15.2 GB`."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:.3g} {name}" if size < 1e12 else f"{size / unit:,.0f} {name}"


def _weights(config: QwenConfig, dtype: str) -> int:
    """Bytes of the weights file, but for its header."""
    plan = ExportOptions(dtype=dtype).quant if dtype in QUANTIZED else None
    width = 2 if dtype in ("f16", "bf16") else 4
    hidden, middle = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim

    def matrix(rows: int, columns: int, quant: QuantConfig | None) -> int:
        if quant is None:
            return rows * columns * width
        return rows * (quant.row_bytes(columns) + 4 * quant.blocks(columns))

    of_layers, of_head = (plan.layers, plan.head) if plan else (None, None)
    layer = sum(
        matrix(rows, columns, of_layers)
        for rows, columns in (
            *((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)),
            *((middle, hidden), (middle, hidden), (hidden, middle)),
        )
    )
    vectors = 2 * hidden + (queries + 2 * keys) * config.qkv_bias + hidden * config.o_bias
    vectors += 2 * config.head_dim * config.qk_norm
    embeddings = matrix(config.vocab_size, hidden, of_head) * (1 if config.tie_word_embeddings else 2)
    rotary = config.context_length * config.head_dim * 4
    return config.num_hidden_layers * (layer + vectors * width) + hidden * width + embeddings + rotary
