"""`qwen-onnx doctor`: complete on any machine, and believing nothing but a session that ran."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qwen_onnx.doctor import examine as doctor
from qwen_onnx.doctor.examine import Answers, Report, examine, to_json
from qwen_onnx.doctor.text import describe
from qwen_onnx.runners.runtime.nvidia.driver import Driver, Gpu
from qwen_onnx.runners.runtime.nvidia.libraries import Library
from qwen_onnx.runners.runtime.options import PROVIDERS
from qwen_onnx.runners.runtime.providers import missing_library
from support.command import child, command
from support.fake_libraries import shadow
from support.patience import PATIENCE

H200 = Gpu("NVIDIA H200", "9.0", 150 << 30)
NO_DRIVER = "libcuda.so.1: cannot open shared object file: No such file or directory (the NVIDIA driver)"
CUBLAS = Library("libcublas.so.13", "/usr/lib/libcublas.so.13", "13.10.0", None)
CUDNN = Library("libcudnn.so.9", None, None, "libcudnn.so.9: cannot open it", needed=False)
MEND = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"


@dataclasses.dataclass
class Machine:
    """Replies as the probe would on a machine that this is not."""

    faults: dict[str, str | None] = dataclasses.field(default_factory=dict)
    cuda: str = "13.0"
    driver: Driver = dataclasses.field(default_factory=lambda: Driver("580.65", "13.1", None))
    gpus: tuple[Gpu, ...] = (H200,)
    libraries: tuple[Library, ...] = (CUBLAS, CUDNN)
    onnxruntime: str | None = None
    killer: str = ""
    """A module that no process survives importing."""

    def __call__(self, subject: str, *arguments: str) -> Answers:
        if subject == "imports":
            kept = arguments[: arguments.index(self.killer)] if self.killer in arguments else arguments
            return Answers(dict.fromkeys(kept), None if kept == arguments else "died")
        if subject == "runtime":
            build = {"build": "onnxruntime-gpu", "version": "1.31.1", "cuda_version": self.cuda}
            return Answers({} if self.onnxruntime else build, self.onnxruntime)
        if subject == "libraries":
            assert arguments == (() if self.onnxruntime else (self.cuda,))
            found = [dataclasses.asdict(library) for library in self.libraries]
            return Answers({"libraries": found, "tensorrt": None}, None)
        if subject == "driver":
            gpus = [dataclasses.asdict(gpu) for gpu in self.gpus]
            return Answers({"driver": dataclasses.asdict(self.driver), "gpus": gpus}, None)
        return Answers({"fault": self.onnxruntime or self.faults.get(arguments[0])}, None)


def cuda_packages() -> list[str]:
    """What pyproject.toml's extra `cuda` brings, by name."""
    wanted = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    return [re.split("[>=]", each)[0] for each in wanted["project"]["optional-dependencies"]["cuda"]]


def lines(report: Report) -> list[str]:
    return [" ".join(line.split()) for line in describe(report).splitlines()]


def test_this_machine_is_ready_on_its_cpu() -> None:
    """The report is complete without a GPU, and a machine that has only its CPU is ready."""
    ran = command("doctor")
    assert (ran.code, ran.err) == (0, "")
    verdict = ran.out.splitlines()[-1]
    assert verdict.startswith("verdict: ready on cpu; CUDA cannot start: ")
    if (fault := missing_library("cuda")) is not None:
        assert verdict.endswith(doctor.plain(fault))
    for what in (
        "qwen-onnx",
        "Python",
        "platform",
        "onnx-ir",
        "huggingface-hub",
        "driver",
        "TensorRT",
        "GPU",
    ):
        assert what in ran.out


@pytest.mark.thorough
def test_the_json_is_the_same_report() -> None:
    """What a script reads is what people read."""
    ran = command("doctor", "--json")
    told: dict[str, Any] = json.loads(ran.out)
    text = command("doctor").out
    assert (ran.code, ran.err, told["ready"]) == (0, "", True)
    assert text.splitlines()[-1] == f"verdict: {told['verdict']}"
    assert [trial["provider"] for trial in told["trials"]] == list(PROVIDERS)
    for package in told["packages"]:
        assert f"{package['name']} {package['version']}" in text
    for library in told["libraries"]:
        assert f"  {library['name']} " in text
    report = examine(ask=Machine())
    assert json.loads(to_json(report)) == json.loads(json.dumps(dataclasses.asdict(report))) | {"ready": True}


@pytest.mark.parametrize(
    ("machine", "verdict"),
    [
        (Machine(), "ready on cuda and tensorrt (NVIDIA H200)"),
        (Machine({"tensorrt": "no libnvinfer"}, gpus=(H200, H200)), "ready on cuda (NVIDIA H200)"),
        (
            Machine({"cuda": NO_DRIVER, "tensorrt": NO_DRIVER}, gpus=()),
            "ready on cpu; CUDA cannot start: libcuda.so.1 is missing (the NVIDIA driver)",
        ),
        (
            Machine({"cuda": "CUDA failure 35: too old", "tensorrt": "no"}),
            "ready on cpu; CUDA cannot start: CUDA failure 35: too old",
        ),
        (Machine(onnxruntime="onnxruntime cannot be imported"), "not ready: onnxruntime cannot be imported"),
    ],
)
def test_the_verdict_is_that_of_the_sessions(machine: Machine, verdict: str) -> None:
    """A provider is ready where its session ran, whatever GPUs and libraries are there or missing."""
    report = examine(ask=machine)
    assert report.verdict == verdict
    assert report.ready == (not verdict.startswith("not"))
    assert describe(report).splitlines()[-1] == f"verdict: {verdict}"


def test_libraries_are_told_with_what_brings_the_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    told = lines(examine(ask=Machine()))
    assert "libcublas.so.13 13.10.0, /usr/lib/libcublas.so.13" in told
    assert "libcudnn.so.9 missing (only few operators need it): cannot open it" in told
    assert f"for a GPU, what is missing comes with: pip install {' '.join(cuda_packages())}" in told
    assert "GPU NVIDIA H200, compute capability 9.0, 150.0 GiB" in told
    assert "CUDA_VISIBLE_DEVICES=0 hides any other" in told
    assert "driver NVIDIA 580.65, for CUDA 13.1 and older" in told
    assert not [line for line in lines(examine(ask=Machine(libraries=(CUBLAS,)))) if "comes with" in line]
    (older,) = [line for line in lines(examine(ask=Machine(cuda="12.8"))) if "comes with" in line]
    assert "nvidia-cublas-cu12" in older
    assert not {*older.split()} & {*cuda_packages()}  # of CUDA 13
    without = lines(examine(ask=Machine(cuda="", libraries=())))
    assert "none: this onnxruntime is built without CUDA" in without


def test_m4_nothing_advises_our_own_name_on_an_index() -> None:
    """Nobody here owns it there: whoever does would be installed. What works is a path, or other packages by name."""
    root = Path(__file__).parents[2]
    folders = ("qwen_onnx", "runners", "graphs", "docs", "bench")
    pages = [
        path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".md")
    ]
    for path in (*pages, root / "README.md", root / "Makefile"):
        for line in path.read_text(encoding="utf-8").splitlines():
            advised = re.search(r"\b(pip|uv|pipx|uvx) [^`;]*\bqwen[-_]onnx(?![-_./\w])", line)
            assert not advised, f"{path}: {line}"


def test_a_driver_older_than_the_build_is_told() -> None:
    """The report names the CUDA version that is wanted, and what to update."""
    old = Machine(driver=Driver("550.54", "12.4", None))
    assert "too old for the CUDA 13.0 of this onnxruntime: update the NVIDIA driver" in describe(
        examine(ask=old)
    )
    assert "too old" not in describe(examine(ask=Machine()))


def test_two_onnxruntimes_are_told_with_what_mends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_distributions", lambda: ["onnxruntime-gpu 1.31.1"])
    assert MEND not in describe(examine(ask=Machine()))
    monkeypatch.setattr(
        doctor, "installed_distributions", lambda: ["onnxruntime 1.32.0", "onnxruntime-gpu 1.31.1"]
    )
    report = examine(ask=Machine())
    told = lines(report)
    assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1 overwrite each other; keep one:" in told
    assert MEND in told
    assert report.ready


def test_a_module_that_kills_its_process_is_the_only_one_blamed() -> None:
    """What is known of all the others is told."""
    report = examine(ask=Machine(killer="onnx"))
    assert [(package.name, package.fault) for package in report.packages if package.fault] == [
        ("onnx", "died")
    ]
    assert any(
        line.startswith("onnx ") and line.endswith("cannot be imported: died") for line in lines(report)
    )


def test_a_driver_that_kills_its_process_is_told() -> None:
    """The report says why there is no GPU, and the rest of it is complete."""

    def dying(subject: str, *arguments: str) -> Answers:
        return Answers({}, "died of it") if subject == "driver" else Machine()(subject, *arguments)

    report = examine(ask=dying)
    assert (report.driver, report.gpus) == (Driver(None, None, "died of it"), ())
    assert report.libraries == (CUBLAS, CUDNN)


@pytest.mark.thorough
def test_without_onnxruntime_the_report_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why onnxruntime cannot be imported, and the exit code is 1."""
    shadow(tmp_path, monkeypatch, "onnxruntime", "raise ImportError('libfoo.so is missing')")
    ran = command("doctor")
    assert (ran.code, ran.err) == (1, "")
    for what in ("Python", "numpy", "driver", "libcudart.so", "TensorRT", "does not start", "pip install"):
        assert what in ran.out
    verdict = ran.out.splitlines()[-1]
    assert verdict.startswith("verdict: not ready: onnxruntime cannot be imported (libfoo.so is missing)")
    told = command("doctor", "--json")
    assert (told.code, json.loads(told.out)["ready"]) == (1, False)


@pytest.mark.thorough
def test_without_onnx_the_providers_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that only exporting needs does not hide that models run."""
    shadow(tmp_path, monkeypatch, "onnx", "raise ImportError('protobuf is too old')")
    ran = command("doctor")
    assert ran.code == 0
    assert "cannot be imported: ImportError: protobuf is too old" in ran.out
    assert ran.out.splitlines()[-1].startswith("verdict: ready on cpu")


@pytest.mark.thorough
def test_nothing_is_sent_or_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No socket is opened, and no file is left in the user's home."""
    seen, home = tmp_path / "seen", tmp_path / "home"
    home.mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "def see(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'):\n"
        f"        open({str(seen)!r}, 'a').write(event)\n"
        "sys.addaudithook(see)\n"
    )
    for name, value in {"PYTHONPATH": tmp_path, "HOME": home, "XDG_CACHE_HOME": home}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    with child("doctor") as process:
        out, _ = process.communicate(timeout=PATIENCE)
    assert out.splitlines()[-1].startswith(b"verdict: ready on cpu")
    assert not seen.exists()
    assert not list(home.rglob("*onnxruntime*"))
    with child("doctor", program="import socket; socket.getaddrinfo('localhost', 80)") as process:
        process.communicate(timeout=PATIENCE)
    assert seen.exists()  # the hook sees, if there is anything to see
