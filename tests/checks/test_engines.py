"""TensorRT end to end, but for TensorRT: its session is the CPU provider's, its engine file made by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from qwen_onnx import UserError, load
from qwen_onnx.runners.model import open_graph
from qwen_onnx.runners.runtime import providers
from qwen_onnx.runners.runtime.nvidia import engine_cache as engine
from qwen_onnx.runners.runtime.nvidia.driver import Gpu
from qwen_onnx.runners.runtime.nvidia.libraries import Library
from qwen_onnx.runners.runtime.options import SessionOptions
from qwen_onnx.runners.runtime.session import open_session
from support.chats import copy_export, endless, tiny
from support.command import command

Sessions = list[dict[str, str]]


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sessions:
    """A TensorRT that computes what the CPU does; the provider options of each session that was opened on it."""
    opened: Sessions = []

    def open_on_cpu(path: Path, provider: str, options: SessionOptions, *, more: dict[str, str]) -> Any:
        assert provider == "tensorrt"
        opened.append(dict(more))
        built = Path(more["trt_engine_cache_path"]) / "qwen_graph.engine"
        if not built.exists():
            built.write_bytes(b"engine")
        settings = onnxruntime.SessionOptions()
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])

    monkeypatch.setenv("QWEN_ONNX_ENGINES", str(tmp_path / "engines"))
    monkeypatch.setattr(providers, "missing_library", lambda provider: None)
    monkeypatch.setattr(engine, "gpus", lambda: [Gpu("NVIDIA Toaster", "9.0", 1 << 37)])
    monkeypatch.setattr(
        engine, "tensorrt_library", lambda: Library("libnvinfer.so.10", "/x", "10.13.2", None)
    )
    monkeypatch.setattr(engine, "open_session", open_on_cpu)
    monkeypatch.setitem(open_graph._DEVICES, "tensorrt", "cpu")
    return opened


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """An export that may be written to: golden ids are recorded on the way."""
    return copy_export(endless(), tmp_path / "own")


def engines(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "engines").glob("*/*/*.engine"))


def test_build_builds_once_and_checks_the_golden_ids(tensorrt: Sessions, tmp_path: Path) -> None:
    """The next start takes its files; none is used before it chose the golden ids (G3, G4 in docs/faults.md)."""
    first = command("build", tiny())
    assert first.code == 0, first.err
    assert "engine: built in " in first.err
    assert "golden ids: 32 of 32 equal on tensorrt" in first.out
    assert "CPUExecutionProvider " in first.err  # which took how many nodes: G6 in docs/faults.md
    assert len(engines(tmp_path)) == 1
    second = command("build", tiny())
    assert "engine: cached in " in second.err
    assert [options["trt_engine_cache_path"] for options in tensorrt] == [
        str(engines(tmp_path)[0].parent)
    ] * 2


def test_run_answers_from_an_engine_and_checks_one_that_it_built(tensorrt: Sessions, tmp_path: Path) -> None:
    ask = ("-p", "What is 3 plus 4?", "--provider", "tensorrt")
    first, second = command("run", tiny(), *ask), command("run", tiny(), *ask)
    assert first.out == second.out == command("run", tiny(), *ask[:2], "--provider", "cpu").out
    assert "engine: built" in first.err
    assert "golden ids: 32 of 32" in first.err
    assert "engine: cached" in second.err
    assert "golden" not in second.err


def test_an_engine_with_other_tokens_is_deleted(tensorrt: Sessions, tmp_path: Path) -> None:
    """An engine may be built without an error and still compute nonsense (G4 in docs/faults.md).

    Here the recorded ids are changed instead.
    """
    folder = copy_export(tiny(), tmp_path / "export")
    manifest = json.loads((folder / "export.json").read_text())
    manifest["golden"]["token_ids"][5] += 1
    manifest["golden"]["margins"][5] = 9.0
    (folder / "export.json").write_text(json.dumps(manifest))
    for verb in (["build", folder], ["run", folder, "-p", "Hi", "--provider", "tensorrt"]):
        ran = command(*verb)
        assert "TensorRT's engine was deleted" in ran.error
        assert "use --provider cuda" in ran.error
        assert engines(tmp_path) == []


@pytest.mark.parametrize(("asked", "capacity"), [(None, 4096), (64, 64)])
def test_one_number_sets_the_profile_and_the_context(
    asked: int | None, capacity: int, tensorrt: Sessions, own: Path
) -> None:
    """No step has a shape outside the engine's range (G1 in docs/faults.md)."""
    chat = load(own, provider="tensorrt", max_context=asked)
    assert chat.runner.context_length == capacity
    (options,) = tensorrt
    longest = options["trt_profile_max_shapes"]
    assert f"past_key_values.0.key:1x2x{capacity}x16" in longest
    assert f"input_ids:1x{min(512, capacity)}" in longest
    assert not [option for option in options if "fp16" in option or "bf16" in option]


def test_a_batch_or_a_greedy_graph_is_refused(tensorrt: Sessions, own: Path) -> None:
    chat = load(own, provider="tensorrt")
    with pytest.raises(UserError, match="batch of 2: engines of TensorRT are built for 1"):
        chat.runner.new_cache(batch_size=2)
    ran = command("run", own, "-p", "Hi", "--provider", "tensorrt", "--greedy-on-device")
    assert "no greedy graph for tensorrt" in ran.error


def test_a_session_without_an_engine_is_no_success(
    tensorrt: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT may be listed and take no node of the graph (G8 in docs/faults.md): that is refused."""
    monkeypatch.setattr(
        engine, "open_session", lambda path, provider, options, **_: open_session(path, "cpu", options)
    )
    assert "TensorRT took no part of the graph" in command("build", endless()).error


def test_a_cache_that_cannot_be_made_is_one_line(tensorrt: Sessions, tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("a file where a folder is wanted")
    assert "engines" in command("build", endless()).error


def test_an_engine_counts_as_checked_only_when_the_check_came_to_its_end(
    tensorrt: Sessions, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a Ctrl-C in the check the next start checks again, from Python too."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qwen_onnx.checks.engines.check_golden", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(own, provider="tensorrt")
    assert len(engines(tmp_path)) == 1
    checked = engines(tmp_path)[0].with_name("checked")
    assert not checked.exists()
    load(own, provider="tensorrt")
    assert checked.exists()
    engines(tmp_path)[0].unlink()  # built anew, it is another
    with monkeypatch.context() as patch:
        patch.setattr("qwen_onnx.checks.engines.check_golden", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(own, provider="tensorrt")
    assert not checked.exists()


@pytest.mark.parametrize("context", [1, 2, 20, 62])
def test_a_context_too_short_for_the_golden_ids_is_checked_by_others(
    context: int, tensorrt: Sessions, tmp_path: Path
) -> None:
    ran = command("build", tiny(), "--max-context", context)
    assert ran.code == 0, ran.err
    assert "golden ids: " in ran.out


def test_rounded_products_have_engines_of_their_own(
    tensorrt: Sessions, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT rounds f32 factors unless the environment forbids it: with and without are two engines."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "unset")
    load(own, provider="tensorrt", tf32=True)
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "unset"
    load(own, provider="tensorrt")
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    assert len({options["trt_engine_cache_path"] for options in tensorrt}) == 2
