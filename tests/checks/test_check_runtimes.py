"""`qwen-onnx check --runtime`: what is found without any other runtime."""

from __future__ import annotations

import dataclasses

import pytest

from qwen_onnx import UserError, load
from qwen_onnx.checks import runtimes
from qwen_onnx.checks.known_runtimes import runs_in
from qwen_onnx.checks.runtimes import check_runtime
from qwen_onnx.contract.manifest import read_manifest
from support.chats import tiny


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "tract"])
def test_a_context_too_short_for_golden_ids_is_no_fault(name: str) -> None:
    chat = load(tiny(), provider="cpu", threads=1, max_context=1)
    manifest = dataclasses.replace(chat.runner.manifest, golden=None)
    found = check_runtime(chat, manifest, name)
    assert found.ok
    assert found.text == f"{name}: no golden ids to compare with, the context is too short"


def test_an_export_without_a_portable_graph_is_said_so() -> None:
    chat = load(tiny(), provider="cpu", threads=1)
    manifest = chat.runner.manifest
    without = tuple(graph for graph in manifest.graphs if graph.lowering != "portable")
    with pytest.raises(UserError, match="onnxruntime: the export has no portable graph"):
        check_runtime(chat, dataclasses.replace(manifest, graphs=without), "onnxruntime")
    assert set(runtimes.MODULES) >= {"onnxruntime"}


def test_openvino_takes_quantized_graphs_whose_scales_are_initializers() -> None:
    """Exports of earlier versions have them in f32; f16 goes through a cast, which it refuses."""
    manifest = read_manifest(tiny("int8"))
    decode = next(graph for graph in manifest.graphs if graph.file == "decode.onnx")
    assert "OpenVINO" not in runs_in(manifest, decode)
    in_f32 = {name: dataclasses.replace(config, scales="F32") for name, config in manifest.quantized.items()}
    assert "OpenVINO" in runs_in(dataclasses.replace(manifest, quantized=in_f32), decode)
