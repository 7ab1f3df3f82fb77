"""The golden ids in another program that reads ONNX: what people embed an export in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_onnx.checks.golden import Finding, Greedy, compare_golden, golden_of, greedy_along
from qwen_onnx.checks.known_runtimes import MODULES
from qwen_onnx.checks.tolerances import logit_bound
from qwen_onnx.contract import ATTENTION_MASK, INPUT_IDS, LOGITS, POSITION_IDS
from qwen_onnx.contract.manifest import GraphSpec, Manifest
from qwen_onnx.errors import UserError
from qwen_onnx.exports.layouts.genai import GENAI_CONFIG
from qwen_onnx.runners.chat import Chat
from qwen_onnx.runners.runtime.session import first_line, import_onnxruntime

Inputs = dict[str, NDArray[Any]]
Step = Callable[[Inputs], dict[str, NDArray[Any]]]
"""Inputs by name to outputs by name: one run of a graph."""


def check_runtime(chat: Chat, manifest: Manifest, name: str) -> Finding:
    """Greedy ids of the portable graph in this runtime, against the golden ones.

    Raises:
        UserError: the export has no portable graph, or the runtime failed.
    """
    golden, _ = golden_of(chat, manifest)
    if golden is None:
        return Finding(True, f"{name}: no golden ids to compare with, the context is too short")
    graph = next((graph for graph in manifest.graphs if graph.lowering == "portable"), None)
    if graph is None:
        raise UserError(f"{name}: the export has no portable graph")
    module = importlib.import_module(MODULES[name])
    try:
        greedy = _open(name, chat.runner.folder, manifest, graph)
        found = greedy_along(greedy, golden)
    except UserError:
        raise
    except Exception as error:  # whatever a foreign program raises is what is to be told
        return Finding(False, f"{name}: {first_line(error)}")
    kind = {"f16": "float16"}.get(manifest.dtype, "float32")
    bound = logit_bound(kind, layers=manifest.num_hidden_layers, largest=0.0)
    version = getattr(module, "__version__", None) or module.version()
    return compare_golden(found, golden, bound, f"{name} {str(version).partition('-')[0]}")


def _open(name: str, folder: Path, manifest: Manifest, graph: GraphSpec) -> Greedy:
    path = folder / graph.file
    if name == "onnxruntime-genai":
        return _genai(folder, manifest)
    step = {"onnxruntime": _onnxruntime, "openvino": _openvino, "tract": _tract}[name](path, graph)
    return _loop(step, manifest, graph)


def _onnxruntime(path: Path, graph: GraphSpec) -> Step:
    ort = import_onnxruntime()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [spec.name for spec in graph.outputs]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def _openvino(path: Path, graph: GraphSpec) -> Step:
    openvino: Any = importlib.import_module("openvino")
    # By default it computes f32 in bf16 where the processor can.
    model = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def step(inputs: Inputs) -> dict[str, NDArray[Any]]:
        found = model(inputs, share_inputs=False)
        return {spec.name: np.array(found[spec.name]) for spec in graph.outputs}

    return step


def _tract(path: Path, graph: GraphSpec) -> Step:
    tract: Any = importlib.import_module("tract")
    model = tract.onnx().load(str(path)).into_model().into_runnable()

    def step(inputs: Inputs) -> dict[str, NDArray[Any]]:
        found = model.run([inputs[spec.name] for spec in graph.inputs])
        return {spec.name: value.to_numpy() for spec, value in zip(graph.outputs, found, strict=True)}

    return step


def _loop(step: Step, manifest: Manifest, graph: GraphSpec) -> Greedy:
    """Greedy decoding over a growing cache."""
    states = manifest.caches[graph.cache or ""].states

    def greedy(ids: list[int], count: int) -> list[int]:
        cache = {state.past: np.zeros(state.sizes(batch_size=1, slots=0), state.dtype) for state in states}
        new, held, made = ids, 0, list[int]()
        for _ in range(min(count, manifest.context_length - len(ids))):
            inputs = {
                INPUT_IDS: np.array([new], np.int64),
                ATTENTION_MASK: np.ones((1, held + len(new)), np.int64),
                POSITION_IDS: np.arange(held, held + len(new), dtype=np.int64)[None],
            }
            found = step({**inputs, **cache})
            cache = {state.past: found[state.present] for state in states}
            held += len(new)
            new = [int(found[LOGITS][0, -1].argmax())]
            made += new
        return made

    return greedy


def _genai(folder: Path, manifest: Manifest) -> Greedy:
    genai: Any = importlib.import_module("onnxruntime_genai")
    if not (folder / GENAI_CONFIG).exists():
        raise UserError(f"onnxruntime-genai: no {GENAI_CONFIG}; export with --layout onnxruntime-genai")
    model = genai.Model(str(folder))

    def greedy(ids: list[int], count: int) -> list[int]:
        params = genai.GeneratorParams(model)
        room = min(len(ids) + count, manifest.context_length)
        params.set_search_options(do_sample=False, max_length=room)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array([ids], np.int32))
        made: list[int] = []
        while len(made) < count and not generator.is_done():  # it ends at an end token; the caller goes on
            generator.generate_next_token()
            made.append(int(generator.get_next_tokens()[0]))
        return made

    return greedy
