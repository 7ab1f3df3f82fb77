"""Cache specs by hand, for caches of no export."""

from __future__ import annotations

from qwen_onnx.contract import BATCH, CAPACITY
from qwen_onnx.contract.cache_spec import CacheSpec, StateSpec


def attention_spec(layers: int, *, dtype: str = "float32", heads: int = 2, size: int = 4) -> CacheSpec:
    """Keys and values [batch, heads, slots, size] of so many layers."""
    shape = (BATCH, heads, CAPACITY, size)
    names = [(layer, name) for layer in range(layers) for name in ("key", "value")]
    return CacheSpec(tuple(StateSpec(layer, name, "full_attention", dtype, shape) for layer, name in names))
