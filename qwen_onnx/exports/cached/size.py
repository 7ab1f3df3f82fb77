"""What an export of a model takes on disk and in memory, computed from the graph that it will have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.checkpoints.safetensors_file import StoredTensor
from qwen_onnx.contract import DTYPES
from qwen_onnx.exports.graph_file import parameters
from qwen_onnx.exports.layouts.known import choose_layout
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.exports.plan import ExportKind, build_planned, checkpoint_plan, graph_plans
from qwen_onnx.exports.weights import quant_of, rotary_tensors, stored_as

CONTEXT = 4096
"""Tokens in the cache that memory is told with, where the model has as many positions."""


class Size(NamedTuple):
    """In bytes; the runtime itself comes on top, some 100 MB on a CPU."""

    disk: int
    """The weights file, but for its header."""
    memory: int
    """Weights, and a cache of CONTEXT tokens."""


def export_size(config: QwenConfig, dtype: str, provider: str = "cpu") -> Size:
    """Of an export as `dtype`, as it runs on this provider: a CPU holds f16 and bf16 as f32."""
    disk = _weights(config, dtype)
    widened = provider == "cpu" and dtype in ("f16", "bf16")
    layout, _ = choose_layout("plain", None, dtype)
    kind = ExportKind("f32" if widened else dtype, layout, quant=ExportOptions(dtype=dtype).quant)
    cache = graph_plans(config, kind)[0].cache(config)
    assert cache is not None
    slots = cache.nbytes(batch_size=1, slots=min(CONTEXT, config.context_length))
    return Size(disk, (_weights(config, "f32") if widened else disk) + slots)


def model_tensors(config: QwenConfig) -> list[StoredTensor]:
    """What a checkpoint of this config holds: names and shapes, in no file."""
    graph = build_planned(checkpoint_plan(), config, 1)
    found = []
    for name, value in parameters(graph).items():
        if value.shape is not None and not name.startswith("rotary."):
            shape = tuple(value.shape.numpy())
            found.append(StoredTensor(name, Path(), "BF16", shape, 0, 2 * math.prod(shape)))
    return found


def gigabytes(size: int) -> str:
    """In three figures, as `15.2 GB`."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:.3g} {name}" if size < 1e12 else f"{size / unit:,.0f} {name}"


def _weights(config: QwenConfig, dtype: str) -> int:
    quant = ExportOptions(dtype=dtype).quant
    written = rotary_tensors(config, config.context_length)
    for tensor in model_tensors(config):
        own = None if quant is None else quant_of(tensor, quant)
        written += stored_as(tensor, DTYPES.get(dtype, "F32"), quant=own, panel_rows=None)
    return sum(tensor.nbytes for tensor in written)
