"""Each configuration in each lowering and dtype, by the runner, against the float64 reference.

So that a new architecture, whose small configuration is put into CONFIGS, meets all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_onnx import UserError
from qwen_onnx.checkpoints.checkpoint import open_checkpoint
from qwen_onnx.checkpoints.config import parse_config
from qwen_onnx.checks.logits import exported_weights
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.exports.panels import possible_panels
from qwen_onnx.reference import reference_logits
from qwen_onnx.runners.model.runner import Runner
from support.checkpoints import CONFIGS, write_checkpoint
from support.cuda.graphs_on_cpu import serve_cuda_graphs_on_cpu
from support.exporting import export_model
from support.exports import IDS, ON_CPU, decode_all
from support.int8_products import assert_as_a_kernel, reference_in_int8
from support.tolerances import F16, F32, assert_close

KINDS: dict[str, dict[str, Any]] = {
    "f32": {},
    "panels": {"weights_order": "panels"},
    "portable": {"target": "portable"},
    "bf16": {"dtype": "bf16"},
    "f16 of CUDA": {"dtype": "f16"},
    "int8": {"dtype": "int8", "block_size": 32},
    "int4": {"dtype": "int4", "block_size": 32},
}
LENGTH = 16


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_are_the_references(name: str, kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", CONFIGS[name])
    checkpoint, options = open_checkpoint(tmp_path / "checkpoint"), KINDS[kind]
    config = checkpoint.config
    if kind == "panels" and possible_panels(config) is None:
        with pytest.raises(UserError, match="panel"):
            export_model(str(tmp_path / "checkpoint"), tmp_path / "export", **options)
        return
    folder = export_model(str(tmp_path / "checkpoint"), tmp_path / "export", **options).folder
    if kind == "f16 of CUDA":
        folder = serve_cuda_graphs_on_cpu(folder, tmp_path / "cuda")
    runner = Runner(folder, ON_CPU)
    cache = runner.new_cache()
    rows = [runner.prefill(cache, IDS[:1, :9]), *decode_all(runner, cache, IDS[:1, 9:LENGTH])]
    found = np.concatenate(rows)
    read = exported_weights(folder, read_manifest(folder), checkpoint)
    wanted = reference_logits(parse_config(CONFIGS[name]), read, IDS[0, :LENGTH], last=len(found))
    if "int" not in kind:
        assert_close(found, wanted, F16 if "f16" in kind else F32)
        return
    with reference_in_int8(32):
        in_int8 = reference_logits(config, read, IDS[0, :LENGTH], last=len(found))
    assert_as_a_kernel(found, in_int8, wanted)
