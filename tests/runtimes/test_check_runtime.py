"""`check --runtime` with runtimes that this environment does not have: each one's own is put beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import RUNTIMES, prepare

from qwen_onnx import export


@pytest.mark.runtimes
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("name", ["openvino", "onnxruntime-genai"])
def test_golden_ids_are_chosen_elsewhere_too(name: str, dtype: str, tmp_path: Path) -> None:
    """And all of them are compared, past an end token too."""
    folder = export("tiny", tmp_path / "out", dtype=dtype, layout="onnxruntime-genai").folder
    python = Path(prepare(next(runtime for runtime in RUNTIMES if runtime.name == name)).command[0])
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    command = [sys.executable, "-c", "from qwen_onnx.cli.main import main; main()", "check", str(folder)]
    done = subprocess.run(
        [*command, "--runtime", name, "--provider", "cpu"],
        env=os.environ | {"PYTHONPATH": str(packages)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"32 of 32 equal on {name} " in done.stderr
