"""The default exports, which are for ONNX Runtime: they load where `info` says that they run, and nowhere else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from environments import RUNTIMES, prepare

from qwen_onnx import export
from qwen_onnx.checks.known_runtimes import runs_in

NAMES = {"onnxruntime": "ONNX Runtime in Python", "onnxruntime-node": "in Node", "openvino": "OpenVINO"}


@pytest.mark.runtimes
@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_graphs_load_where_info_says(name: str, dtype: str, tmp_path: Path) -> None:
    """And nowhere else: every runtime that takes a graph is listed."""
    summary = export("tiny", tmp_path / "export", dtype=dtype)
    prepared = prepare(next(runtime for runtime in RUNTIMES if runtime.name == name))
    wanted, found = {}, {}
    for graph in summary.manifest.graphs:
        if graph.entry not in ("prefill", "decode"):
            continue
        cases, result = tmp_path / f"{graph.file}.json", tmp_path / f"{graph.file}.result"
        content = {"folder": str(summary.folder), "model": graph.file, "only_load": True}
        cases.write_text(json.dumps(content), encoding="utf-8")
        subprocess.run(
            [*prepared.command, str(cases), str(result)], cwd=prepared.folder, env=prepared.variables,
            capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        wanted[graph.file] = NAMES[name] in runs_in(summary.manifest, graph)
        found[graph.file] = result.exists()
    assert found == wanted
    assert any(wanted.values()) is ((name, dtype) != ("openvino", "int8"))
