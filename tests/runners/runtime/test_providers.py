"""Which provider runs, what is said of one that cannot, and what a run takes on its own where nothing is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen_onnx import UserError, load
from qwen_onnx.checkpoints.hub import DEFAULT_MODEL, ModelSource, resolve_model
from qwen_onnx.cli import open_model
from qwen_onnx.exports.cached import find
from qwen_onnx.runners.runtime import providers, session
from support.chats import copy_export, endless, endless_checkpoint
from support.checkpoints import QWEN2, write_checkpoint
from support.command import command

HI = ("-p", "Hi", "--max-new-tokens", 2, "--provider", "cpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with an NVIDIA driver: every library loads."""
    monkeypatch.setattr(providers, "_load_fault", lambda library: None)


def test_preloading_says_nothing_on_stdout(
    monkeypatch: pytest.MonkeyPatch, driver: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though ONNX Runtime prints the libraries that it misses: `--json` would begin with them."""
    runtime = SimpleNamespace(
        get_available_providers=lambda: ["CUDAExecutionProvider"],
        preload_dlls=lambda: print("Failed to load libcublasLt.so.13"),
        __file__=session.import_onnxruntime().__file__,
    )
    monkeypatch.setattr(providers, "import_onnxruntime", lambda: runtime)
    assert providers.missing_library("cuda") is None
    assert capsys.readouterr().out == ""


def test_a_provider_that_cannot_start_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(providers, "missing_library", lambda provider: f"{provider}.so: no such file")
    for name in ("cuda", "tensorrt"):
        ran = command("run", endless_checkpoint(), "-p", "Hi", "--provider", name, "--cache-dir", tmp_path)
        assert f"{name}.so" in ran.error
        assert not list(tmp_path.iterdir())


def test_two_distributions_are_named_where_they_hide_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last wheel installed wrote over the other, which may have the provider."""
    runtime = SimpleNamespace(get_available_providers=lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(providers, "import_onnxruntime", lambda: runtime)
    for found, word in (
        (["onnxruntime 1.32.0"], "is built without it"),
        (["a 1", "b 2"], "keep one: pip uninstall"),
    ):
        monkeypatch.setattr(providers, "installed_distributions", lambda found=found: found)
        assert word in (providers.missing_library("cuda") or "")


def test_of_a_cuda_error_what_cuda_says_is_kept() -> None:
    """And nothing of the source lines around it."""
    text = (
        "/onnxruntime_src/cuda_call.cc:129 std::conditional_t<> CudaCall(...) CUDA failure 35: CUDA driver version "
        "is insufficient for CUDA runtime version ; GPU=-1 ; hostname=x ; file=/src/provider.cc ; line=280"
    )
    assert session.first_line(RuntimeError(text)).startswith("CUDA failure 35: CUDA driver version is insuff")
    assert "/src" not in session.first_line(RuntimeError(text))


@pytest.mark.parametrize(("stored", "dtype"), [("F32", "f32"), ("F16", "f16"), ("BF16", "bf16")])
def test_the_dtype_is_f32_on_a_cpu_and_the_checkpoints_own_on_cuda(
    stored: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, QWEN2, dtype=stored)
    source = resolve_model(str(tmp_path))
    monkeypatch.setattr(find, "missing_library", lambda provider: "no driver")
    assert find._expected_provider("auto") == "cpu"
    assert find._expected_provider("cuda") == "cuda"
    assert find._default_dtype(source, "cpu") == "f32"
    assert find._default_dtype(source, "tensorrt") == "f32"
    assert find._default_dtype(source, "cuda") == dtype
    monkeypatch.setattr(find, "missing_library", lambda provider: None)
    assert find._expected_provider("auto") == "cuda"
    assert find._expected_provider("cpu") == "cpu"


@pytest.mark.parametrize("verb", ["export", "run"])
def test_no_model_is_the_default_model(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(model: str, **_: object) -> ModelSource:
        asked.append(model)
        return resolve_model("tiny")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(open_model, "resolve_model", resolve)
    monkeypatch.setattr(find, "resolve_model", resolve)
    more = ("--cache-dir", tmp_path / "cache", *HI) if verb == "run" else ()
    assert command(verb, *more).code == 0
    assert asked == [DEFAULT_MODEL] == ["Qwen/Qwen2.5-0.5B-Instruct"]


def test_both_onnxruntimes_are_told_of_and_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ["onnxruntime 1.32.0", "onnxruntime-gpu 1.31.1"]
    monkeypatch.setattr(open_model, "installed_distributions", lambda: both)
    ran = command("run", endless(), *HI)
    assert ran.code == 0
    assert "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu" in ran.err


@pytest.mark.parametrize("cached", [False, True])
def test_a_run_never_loads_the_exporter(cached: bool, tmp_path: Path) -> None:
    """Neither for an export, nor for a model that was exported before."""
    model = [str(endless())]
    if cached:
        model = [str(endless_checkpoint()), "--cache-dir", str(tmp_path)]
        assert command("run", *model, *HI).code == 0
    program = (
        "import json, sys\n"
        f"sys.argv = {['qwen-onnx', 'run', *model, *map(str, HI)]!r}\n"
        "from qwen_onnx.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"onnxscript", "onnx", "onnx_ir", "torch", "transformers", "huggingface_hub"}


def test_a_run_reports_to_nobody(tmp_path: Path) -> None:
    """Though ONNX Runtime's wheels would write a device id under the home folder, and send events from there."""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = f"len(list(load({str(endless())!r}).generate([1], max_new_tokens=3)))"
    program = f"from qwen_onnx import load\nprint({run})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "3\n"
    assert not [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name.lower()]


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_threads_beyond_any_machine_are_refused(threads: int) -> None:
    """They would take minutes to make, without a word."""
    with pytest.raises(UserError, match="1 to 1024"):
        load(endless(), provider="cpu", threads=threads)


def test_weights_linked_out_of_the_folder_are_told_of(tmp_path: Path) -> None:
    folder = copy_export(endless(), tmp_path / "export")
    (folder / "weights.safetensors").rename(tmp_path / "elsewhere")
    (folder / "weights.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="copy or hard-link it"):
        load(folder, provider="cpu")
