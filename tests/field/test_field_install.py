"""docs/faults.md, chapters G and H: what is installed, which provider starts; and of TensorRT what needs none."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
from packaging.requirements import Requirement

from qwen_onnx import UserError
from qwen_onnx.contract.manifest import read_manifest
from qwen_onnx.runners.runtime import providers, session
from qwen_onnx.runners.runtime.nvidia import tensorrt
from support.chats import copy_export, endless
from support.command import command
from support.exports import past_names
from support.field_runs import graphs, opened

ASK = ("-p", "Hi", "--max-new-tokens", 2)


@pytest.mark.parametrize(("capacity", "chunk"), [(1, 1), (64, 7), (4096, 512)])
def test_g1_every_dynamic_input_has_its_range(capacity: int, chunk: int) -> None:
    """No input of the real graph is left out, and past and new tokens together are the mask's length."""
    (graph,) = (g for g in read_manifest(endless("f16")).graphs if g.file == "prefill.tensorrt.onnx")
    ranges = tensorrt.profile(graph.inputs, capacity=capacity, prefill_chunk=chunk)
    options = tensorrt.profile_options(ranges)
    kinds = [options[f"trt_profile_{kind}_shapes"] for kind in ("min", "opt", "max")]
    shapes = [
        {
            name: [int(n) for n in shape.split("x")]
            for name, shape in (part.split(":") for part in kind.split(","))
        }
        for kind in kinds
    ]
    for kind in shapes:
        assert list(kind) == [value.name for value in graph.inputs]
        past = kind[past_names(1)[0]][2]
        assert kind["attention_mask"][1] == past + kind["input_ids"][1]
    for name in shapes[0]:
        assert all(
            low <= best <= high for low, best, high in zip(*(kind[name] for kind in shapes), strict=True)
        )


def test_g3_an_engine_is_of_one_graph_and_one_range(tmp_path: Path) -> None:
    """The folder of an engine is the same each time, and another for another export or capacity."""
    folders = set()
    for dtype in ("f32", "f16"):
        manifest = read_manifest(endless(dtype))
        (graph,) = (g for g in manifest.graphs if g.file == "prefill.tensorrt.onnx")
        for capacity in (64, 128):
            known = {
                "graph_sha256": manifest.files[graph.file].sha256,
                "weights_sha256": {"weights.safetensors": manifest.files["weights.safetensors"].sha256},
                "tensorrt_version": "10.13",
                "gpu": "NVIDIA H200",
                "compute_capability": "9.0",
                "onnxruntime_version": "1.31.1",
                "profile": tensorrt.profile(graph.inputs, capacity=capacity, prefill_chunk=16),
            }
            folder = tensorrt.engine_folder(tmp_path, **known)
            assert folder == tensorrt.engine_folder(tmp_path, **known)
            folders.add(folder)
    assert len(folders) == 4


@pytest.mark.parametrize("name", ["with spaces in it", "mit Ümläuten 好🔥", "a,b;c=d&e'f", "-dash"])
def test_g5_an_export_is_found_under_any_name(name: str, tmp_path: Path) -> None:
    """Weights are found beside the graph, whatever characters the path has."""
    folder = copy_export(endless(), tmp_path / name)
    ran = command("run", folder, *ASK, "--provider", "cpu")
    assert (ran.code, ran.out) == (0, command("run", endless(), *ASK, "--provider", "cpu").out)


def test_g6_the_graph_for_tensorrt_is_of_primitives() -> None:
    """It is of opset 17, without operators that TensorRT would leave to the CPU one by one."""
    for dtype in ("f32", "f16", "bf16"):
        (found,) = (
            (spec, model) for spec, model in graphs(endless(dtype)) if spec.file == "prefill.tensorrt.onnx"
        )
        spec, model = found
        assert spec.opsets == {"": 17}
        newer = {
            "RMSNormalization",
            "RotaryEmbedding",
            "Attention",
            "TensorScatter",
            "SimplifiedLayerNormalization",
        }
        assert not newer & {node.op_type for node in model.graph.node}


@pytest.mark.parametrize(
    "verb", [("run", *ASK), ("check",), ("bench", "--prompt-tokens", 2, "--new-tokens", 2)]
)
def test_h1_a_provider_asked_for_by_name_is_taken_or_is_an_error(
    verb: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a library is missing, the error names it, and nothing runs on the CPU instead."""
    fault = "libcublasLt.so.13: cannot open shared object file"
    monkeypatch.setattr(providers, "missing_library", lambda provider: fault)
    command_name, *more = verb
    ran = command(command_name, endless(), *more, "--provider", "cuda")
    assert ran.code == 1
    assert "libcublasLt.so.13" in ran.err
    assert ran.out == ""


def test_h1_auto_says_what_it_got_and_a_session_is_believed_only_by_its_own_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "provider: cpu" in command("run", endless(), *ASK, "--provider", "auto").err
    real = onnxruntime.InferenceSession.get_providers
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda own: ["Other", *real(own)])
    with pytest.raises(UserError, match="fell back to"):
        opened(endless())


def installed(name: str, extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """What a distribution needs here, and with these of its extras."""
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def test_h3_a_plain_install_has_no_torch_in_it() -> None:
    """Nor CUDA libraries: looked at is everything that is needed, and what that needs, down to the last."""
    wanted, seen = [("qwen-onnx", frozenset[str]())], set[str]()
    while wanted:
        name, extras = wanted.pop()
        for requirement in installed(name, extras):
            needed = requirement.name.lower().replace("_", "-")
            if needed not in seen:
                seen.add(needed)
                try:
                    importlib.metadata.distribution(needed)
                except importlib.metadata.PackageNotFoundError:
                    continue  # for another system
                wanted.append((needed, frozenset(requirement.extras)))
    assert {"numpy", "onnx", "tokenizers", "jinja2", "safetensors"} <= seen
    assert not seen & {"torch", "transformers", "tensorflow", "accelerate", "optimum", "datasets", "triton"}
    assert not [name for name in seen if name.startswith("nvidia-")]
    assert len(seen) < 70


@pytest.mark.thorough
def test_h4_doctor_is_complete_on_a_machine_without_a_gpu() -> None:
    """The report tells of libraries, driver and TensorRT, found or missing."""
    ran = command("doctor", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    told = ran.out.lower()
    for what in ("onnxruntime", "cuda", "driver", "libraries", "tensorrt", "python"):
        assert what in told, what
    assert "ready on cpu" in json.dumps(found)


def test_h4_cuda_libraries_of_pip_are_loaded_when_cuda_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    runtime = SimpleNamespace(
        get_available_providers=lambda: ["CUDAExecutionProvider"],
        preload_dlls=lambda: called.append("preloaded"),
        __file__=session.import_onnxruntime().__file__,
    )
    monkeypatch.setattr(providers, "import_onnxruntime", lambda: runtime)
    monkeypatch.setattr(providers, "_load_fault", lambda library: None)
    assert providers.missing_library("cuda") is None
    assert called == ["preloaded"]


@pytest.mark.parametrize(
    "listed", [["CUDAExecutionProvider"], ["CPUExecutionProvider", "CUDAExecutionProvider"]]
)
def test_h5_what_starts_is_what_a_session_says(listed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One node is run; neither the list of providers nor libraries that load decide it."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    monkeypatch.setattr(providers, "_load_fault", lambda library: None)  # every library loads
    tried = []

    def one_node(provider: str) -> list[float]:
        tried.append(provider)
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(providers, "run_one_node", one_node)
    manifest = read_manifest(endless())
    assert providers.choose_provider("auto", manifest) == "cpu"
    with pytest.raises(UserError, match="no kernel image"):
        providers.choose_provider("cuda", manifest)
    assert tried == ["cuda", "cuda"]
    monkeypatch.setattr(providers, "run_one_node", lambda provider: [3.0, -4.0])
    assert providers.choose_provider("auto", manifest) == "cuda"
