"""Exporting with a progress bar, and the one-screen summary of what was made."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.progress import DownloadColumn, TimeRemainingColumn

from qwen_onnx.checkpoints.hub import ModelSource
from qwen_onnx.cli.terminal.bar import progress_bar
from qwen_onnx.cli.terminal.output import tell
from qwen_onnx.exports.exporter import ExportSummary, export_model
from qwen_onnx.exports.options import ExportOptions


def export_with_progress(model: str | ModelSource, out: Path | None, options: ExportOptions) -> ExportSummary:
    """`export_model` with its progress and notes on stderr.

    Raises:
        UserError: as `export_model`.
    """
    with progress_bar("writing weights", DownloadColumn(), TimeRemainingColumn()) as show:
        summary = export_model(model, out, options, progress=lambda written, total: show(written, total, ""))
    for note in summary.notes:
        tell(f"note: {note}")
    return summary


def summary_table(summary: ExportSummary) -> list[str]:
    """Files, sizes, dtype, entries, seconds and peak memory."""
    manifest = summary.manifest
    graphs = {graph.file: graph for graph in manifest.graphs}
    lines = [
        f"{summary.folder}: {manifest.model_id} as {manifest.dtype}, {manifest.context_length} positions"
    ]
    for name, spec in manifest.files.items():
        graph = graphs.get(name)
        role = f"{graph.entry} for {' and '.join(graph.providers)}" if graph else ""
        lines.append(f"  {spec.size:>15,}  {name:<24} {role}".rstrip())
    lines.append(f"  {sum(spec.size for spec in manifest.files.values()):>15,}  bytes in all")
    memory = "" if summary.peak_memory is None else f", peak memory {summary.peak_memory / 1e6:.0f} MB"
    lines.append(
        f"made in {summary.seconds:.1f} s{memory}; try: qwen-onnx run {shlex.quote(str(summary.folder))}"
    )
    return lines
