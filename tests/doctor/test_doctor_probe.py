"""What `qwen-onnx doctor` asks in processes of their own, and that it outlives the worst of answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from qwen_onnx.doctor import probe as doctor_probe
from qwen_onnx.doctor.examine import Answers, ask
from qwen_onnx.runners.runtime import providers
from qwen_onnx.runners.runtime.options import PROVIDERS
from support.fake_libraries import shadow
from support.patience import PATIENCE


@pytest.mark.parametrize(
    ("code", "reply"),
    [
        ("import os; os.write(1, b'CUDA is great'); os.write(2, b'or not')", Answers({"onnx": None}, None)),
        (
            "import os; os.kill(os.getpid(), 11)",
            Answers({}, "the process died of signal 11 (Segmentation fault)"),
        ),
        ("import os; os._exit(3)", Answers({}, "the process ended with exit code 3")),
        ("import time; time.sleep(3600)", Answers({}, "no answer within 1 s")),
    ],
    ids=["prints", "crashes", "leaves", "hangs"],
)
@pytest.mark.thorough
def test_a_probe_that_misbehaves(
    code: str,
    reply: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What a driver prints is no part of the report; its crash or silence is one line of it."""
    shadow(tmp_path, monkeypatch, "onnx", code)
    assert ask("imports", "onnx", seconds=1 if "sleep" in code else PATIENCE) == reply
    assert capfd.readouterr() == ("", "")


def test_a_file_in_the_working_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `onnx.py` in a model's folder is not run, and does not make a good install look broken."""
    (tmp_path / "onnx.py").write_text("raise ImportError('not this')")
    monkeypatch.chdir(tmp_path)
    assert ask("imports", "onnx") == Answers({"onnx": None}, None)


def test_the_model_of_one_node_is_what_it_is_said_to_be() -> None:
    """The bytes are a valid model of one Add."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "add", value[:1], value[1:])
    wanted = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    found = onnx.load_model_from_string(providers.ONE_NODE)
    onnx.checker.check_model(found, full_check=True)
    assert found == wanted


class FakeSession:
    """On a provider, wanted or not, with a result, right or not."""

    def __init__(self, provider: str, result: list[float]) -> None:
        self.provider, self.result = provider, result

    def get_providers(self) -> list[str]:
        return [self.provider, "CPUExecutionProvider"]

    def run(self, outputs: None, inputs: dict[str, Any]) -> list[Any]:
        assert inputs["x"].tolist() == [1.5, -2.0]
        return [SimpleNamespace(tolist=lambda: self.result)]


@pytest.mark.parametrize(
    ("missing", "provider", "result", "fault"),
    [
        (None, "CUDAExecutionProvider", [3.0, -4.0], None),
        ("no package of that name", "CUDAExecutionProvider", [3.0, -4.0], None),
        (None, "CPUExecutionProvider", [3.0, -4.0], "ONNX Runtime fell back to CPUExecutionProvider"),
        (None, "CUDAExecutionProvider", [0.0, 0.0], "it computes 1.5 + 1.5 and -2 + -2 as [0.0, 0.0]"),
        ("libcudart is missing", "CPUExecutionProvider", [3.0, -4.0], "libcudart is missing"),
    ],
)
def test_only_a_session_that_computes_has_started(
    missing: str | None,
    provider: str,
    result: list[float],
    fault: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The list of providers and the names of files decide nothing."""
    real = doctor_probe.import_onnxruntime()
    runtime = SimpleNamespace(
        SessionOptions=real.SessionOptions,
        set_default_logger_severity=lambda level: None,
        get_available_providers=lambda: list(PROVIDERS.values()),
        InferenceSession=lambda *arguments, **options: FakeSession(provider, result),
    )
    monkeypatch.setattr(providers, "import_onnxruntime", lambda: runtime)
    monkeypatch.setattr(doctor_probe, "import_onnxruntime", lambda: runtime)
    monkeypatch.setattr(doctor_probe, "missing_library", lambda name: missing)
    assert doctor_probe.start_fault("cuda") == fault


def test_of_a_cuda_error_what_cuda_says_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own source lines are left out."""
    error = (
        "/onnxruntime_src/cuda_call.cc:154 CudaCall(ERRTYPE) [with ERRTYPE = cudaError; bool THRW = true] "
        "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version ; GPU=-1 ; hostname=vm"
    )

    def fail(provider: str) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(doctor_probe, "missing_library", lambda name: None)
    monkeypatch.setattr(doctor_probe, "run_one_node", fail)
    wanted = "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version"
    assert doctor_probe.start_fault("cuda") == wanted


def test_no_process_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no Python can be started, the report says so in one line."""
    monkeypatch.setattr(sys, "executable", os.devnull)
    answers = ask("runtime")
    assert answers.values == {}
    assert "no process can be started" in (answers.ending or "")
