"""Exports with options as keywords, and with the progress that the command line has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen_onnx.exports import exporter
from qwen_onnx.exports.exporter import ExportSummary, Progress
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.options import made


def export_model(
    model: str, out: Path | None = None, *, progress: Progress = lambda written, total: None, **options: Any
) -> ExportSummary:
    """See qwen_onnx.exports.exporter.export_model; no token is run at its end, unless that is asked for."""
    options = {"check": False, **options}
    return exporter.export_model(model, out, made(ExportOptions, options), progress=progress)
