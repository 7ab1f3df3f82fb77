"""What the tests of docs/faults.md have in common: exports followed token by token, and all of their graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
from onnx import TensorProto

from qwen_onnx import export
from qwen_onnx.contract.manifest import GraphSpec, read_manifest
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.model.runner import Runner
from support.checkpoints import RawConfig, write_checkpoint
from support.exports import IDS, ON_CPU, Exported, export_checkpoint
from support.tolerances import F32, Tolerance, assert_close


def follow(
    model: Exported, prompts: Sequence[int], steps: int, bound: Tolerance = F32, **settings: Any
) -> Runner:
    """Prefill of each of these many tokens, then `steps` single ones: after each the reference's logits."""
    runner = Runner(model.folder, ON_CPU, **settings)
    cache, end = runner.new_cache(), 0
    wanted = model.wanted(IDS[0, : sum(prompts) + steps])
    for length in [*prompts, *[1] * steps]:
        end += length
        new = IDS[:1, end - length : end]
        logits = runner.prefill(cache, new) if length > 1 else runner.decode(cache, new)
        assert_close(logits[0], wanted[end - 1], bound)
    return runner


def greedy(runner: Runner, prompts: np.ndarray, mask: np.ndarray | None, count: int) -> np.ndarray:
    """The best ids after these prompts, [B, count], each batch row by itself."""
    cache = runner.new_cache(batch_size=len(prompts))
    chosen = [runner.prefill(cache, prompts, mask).argmax(-1)]
    while len(chosen) < count:
        chosen.append(runner.decode(cache, chosen[-1][:, None]).argmax(-1))
    return np.stack(chosen, axis=1)


def graphs(folder: Path) -> Iterator[tuple[GraphSpec, onnx.ModelProto]]:
    """Every graph file of an export, its weights left where they are."""
    for spec in read_manifest(folder).graphs:
        yield spec, onnx.load(folder / spec.file, load_external_data=False)


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Of every value of the graph that says so, weights too."""
    graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The numbers that lie in the graph file itself."""
    inside = [tensor for tensor in model.graph.initializer if not tensor.external_data]
    return {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in inside
        if tensor.data_type != TensorProto.BFLOAT16
    }


def exported_as(checkpoint: Path, out: Path, **options: Any) -> Path:
    """The folder of an export with the options of the Python API."""
    return export(checkpoint, out, **options).folder


def export_tensors(folder: Path, raw: RawConfig, tensors: dict[str, np.ndarray], dtype: str) -> Exported:
    """An export of these tensors, of a checkpoint written beside it."""
    write_checkpoint(folder / "m", raw)
    safetensors.numpy.save_file(tensors, folder / "m" / "model.safetensors", {"format": "pt"})
    return export_checkpoint(folder / "m", folder / "out", dtype)


def opened(folder: Path, **options: Any) -> Chat:
    """On one thread of the CPU."""
    return Chat(Runner(folder, dataclasses.replace(ON_CPU, **options)))


def say(monkeypatch: pytest.MonkeyPatch, chat: Chat, ids: Sequence[int]) -> list[int]:
    """Have the model choose these ids, whatever it computes; returns what is left of them, as it goes on."""
    left, runner = list(ids), chat.runner

    def rigged(step: Any) -> Any:
        def run(*given: Any) -> np.ndarray:
            logits = np.zeros_like(step(*given))
            logits[0, left.pop(0)] = 10
            return logits

        return run

    monkeypatch.setattr(runner, "prefill", rigged(runner.prefill))
    monkeypatch.setattr(runner, "decode", rigged(runner.decode))
    return left
