"""Exports whose graphs for CUDA serve the CPU provider: real numbers of the code that CUDA runs, capture aside."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.model.executors.fixed_shape import FixedShape
from qwen_onnx.runners.model.kv_cache import KVCache
from qwen_onnx.runners.model.runner import Runner
from qwen_onnx.runners.runtime.options import SessionOptions
from support.damage import change_manifest
from support.exports import Exported
from support.tolerances import F16, F32

OnCpu = Callable[..., Exported]

LONG = {"max_position_embeddings": 1024}
LONG_IDS = np.random.default_rng(12).integers(0, 320, (3, 600))
TOLERANCE = {"f32": F32, "f16": F16}
"""Of the type that the graph computes in: these are not the graphs that the CPU is given."""

GREEDY_ON_CPU = SessionOptions(provider="cpu", threads=1, greedy_on_device=True)


def serve_cuda_graphs_on_cpu(source: Path, target: Path) -> Path:
    """A copy of an export. f32 keeps its static-capture graphs, f16 its contrib graphs."""
    shutil.copytree(source, target)
    graphs = tuple(
        dataclasses.replace(graph, providers=("cpu", "cuda") if "cuda" in graph.providers else ())
        for graph in read_manifest(source).graphs
    )
    change_manifest(target, graphs=graphs)
    return target


@pytest.fixture(scope="session")
def on_cpu(exported: Callable[..., Exported], tmp_path_factory: pytest.TempPathFactory) -> OnCpu:
    """As `exported`, but what runs is what would run on CUDA."""
    made: dict[Path, Exported] = {}

    def make(name: str, dtype: str = "f32", **overrides: Any) -> Exported:
        source = exported(name, dtype, **overrides)
        if source.folder not in made:
            folder = tmp_path_factory.mktemp("cuda-graphs") / "export"
            serve_cuda_graphs_on_cpu(source.folder, folder)
            made[source.folder] = Exported(source.checkpoint, folder, dtype)
        return made[source.folder]

    return make


def opened(model: Exported, options: SessionOptions, **settings: Any) -> Runner:
    """A runner of which it is certain that it runs the graphs for CUDA."""
    runner = Runner(model.folder, options, **settings)
    assert isinstance(runner.executor, FixedShape)
    return runner


def addresses(cache: KVCache) -> tuple[int, ...]:
    """Of all that a captured graph would read and write: inputs, logits, every buffer of the cache."""
    step = cache.binding
    return tuple(value.data_ptr() for value in (*step.inputs.values(), step.logits, *cache.buffers))


def note_uploads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The OrtValues that are given new content from now on, in order."""
    uploaded: list[Any] = []
    real = onnxruntime.OrtValue.update_inplace

    def note(self: Any, array: np.ndarray) -> None:
        uploaded.append(self)
        real(self, array)

    monkeypatch.setattr(onnxruntime.OrtValue, "update_inplace", note)
    return uploaded


def names_of(values: list[Any], cache: KVCache) -> list[str]:
    """What the graph calls each of these inputs."""
    names = {id(value): name for name, value in cache.binding.inputs.items()}
    return [names.get(id(value), "unknown") for value in values]
