"""Whether matrices can lie in the panels that ONNX Runtime's convolutions read on this processor."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

import onnx_ir as ir

from qwen_onnx.checkpoints.config import QwenConfig
from qwen_onnx.errors import UserError, option
from qwen_onnx.graphs.build import build_probe
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.panels import panel_rows
from qwen_onnx.runners.runtime.session import open_session

_X86 = ("x86_64", "amd64")


def verified_panels(config: QwenConfig) -> int:
    """Rows of a panel on this processor, 8 or 16.

    Raises:
        UserError: it has no such kernels, as far as this was tried, or a matrix is not of whole panels.
    """
    rows = _processor_panels()
    if rows is None:
        raise UserError(
            f"{option('weights_order', 'panels')} is for x86-64 with AVX, this is {platform.machine()}; export "
            "without it"
        )
    if fault := misfit(config, rows):
        panels = option("weights_order", "panels")
        raise UserError(f"{panels}: {fault}, a multiple of {rows} wanted; export without it")
    return rows


def possible_panels(config: QwenConfig) -> int | None:
    """As verified_panels; None for an error."""
    rows = _processor_panels()
    return None if rows is None or misfit(config, rows) else rows


def _processor_panels() -> int | None:
    if platform.machine().lower() not in _X86:  # on others these kernels were never run
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.onnx"
        ir.save(build_probe(), path)
        return panel_rows(open_session(path, "cpu", SessionOptions(provider="cpu", threads=1)))


def misfit(config: QwenConfig, rows: int) -> str | None:
    """A size that is not of whole panels; that of a vocabulary may be."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads x head_dim": config.num_attention_heads * config.head_dim,
        "num_key_value_heads x head_dim": config.num_key_value_heads * config.head_dim,
    }
    return next((f"{name} is {size}" for name, size in sizes.items() if size % rows), None)
