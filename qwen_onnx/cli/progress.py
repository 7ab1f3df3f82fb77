"""Exporting with a progress bar, and the one-screen summary of what was made."""

from __future__ import annotations

import contextlib
import math
import shlex
from pathlib import Path

from rich.progress import DownloadColumn, TimeRemainingColumn

from qwen_onnx.checkpoints.hub import ModelSource
from qwen_onnx.cli.terminal.bar import Show, progress_bar
from qwen_onnx.cli.terminal.output import tell
from qwen_onnx.exports.exporter import ExportSummary, export_model
from qwen_onnx.exports.options import ExportOptions
from qwen_onnx.exports.quality import in_words

_WORTH_SAYING = 5.0  # seconds


def export_with_progress(model: str | ModelSource, out: Path | None, options: ExportOptions) -> ExportSummary:
    """`export_model` with its progress and notes on stderr.

    Raises:
        UserError: as `export_model`.
    """
    with contextlib.ExitStack() as stack:
        bars = _Bars(stack)
        summary = export_model(model, out, options, progress=bars.written, calibrating=bars.calibrated)
    for note in summary.notes:
        tell(f"note: {note}")
    return summary


class _Bars:
    """A bar for each part of an export, from its first word on."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._calibration: Show | None = None
        self._weights: Show | None = None

    def calibrated(self, done: float, seconds: float) -> None:
        """Of the calibration; how long it will take is said before it starts."""
        if self._calibration is None:
            if seconds > _WORTH_SAYING:
                tell(
                    f"calibrating: about {_in_words(seconds)} on this machine; stopped, it goes on from there"
                )
            columns = (TimeRemainingColumn(),)
            self._calibration = self._stack.enter_context(progress_bar("calibrating", *columns))
        self._calibration(round(1000 * done), 1000, "")
        if done >= 1:
            self._stack.close()

    def written(self, written: int, total: int) -> None:
        """Of the weights, in bytes."""
        if self._weights is None:
            bar = progress_bar("writing weights", DownloadColumn(), TimeRemainingColumn())
            self._weights = self._stack.enter_context(bar)
        self._weights(written, total, "")


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{10 * math.ceil(seconds / 10)} seconds"
    return f"{math.ceil(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


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
    if manifest.quality is not None:
        lines.append(f"quality: {in_words(manifest.quality)}")
    memory = "" if summary.peak_memory is None else f", peak memory {summary.peak_memory / 1e6:.0f} MB"
    lines.append(
        f"made in {summary.seconds:.1f} s{memory}; try: qwen-onnx run {shlex.quote(str(summary.folder))}"
    )
    return lines
