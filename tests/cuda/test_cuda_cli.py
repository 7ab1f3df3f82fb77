"""`qwen-onnx run` where CUDA starts, and where one of its libraries is missing."""

# ruff: noqa: F811 - a test's parameter has the name of the fixture that is imported

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from support.chats import copy_export, tiny
from support.cuda import stand_ins as cuda_stand_ins
from support.cuda.fixtures import stand_ins  # noqa: F401
from support.cuda.runs import ENVIRONMENT
from support.marks import but_first

PROGRAM = "from qwen_onnx.cli.main import main\nmain()"
ANSWER = ("-p", "Hi", "--max-new-tokens", 3, "--ignore-eos")


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return cuda_stand_ins.run(folder, PROGRAM, "run", *arguments, env=ENVIRONMENT)


@pytest.mark.parametrize("dtype", but_first(["f16", "f32", "bf16"]))
def test_auto_is_cuda_where_it_starts_and_says_so(dtype: str, stand_ins: Path) -> None:
    done = run(stand_ins, tiny(dtype), *ANSWER, "--provider", "auto")
    assert (done.returncode, done.stderr) == (0, "provider: cuda\n")
    assert done.stdout.endswith("\n")


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_cuda_asked_for_by_name(dtype: str, stand_ins: Path) -> None:
    done = run(stand_ins, tiny(dtype), *ANSWER, "--provider", "cuda")
    assert (done.returncode, done.stderr) == (0, "")


def without(stand_ins: Path, folder: Path, library: str) -> Path:
    """A copy of the stand-ins that lacks a library."""
    shutil.copytree(stand_ins, folder, symlinks=True)
    gone = [path for path in folder.iterdir() if path.name.startswith(f"{library}.so")]
    for path in gone:
        path.unlink()
    assert gone
    return folder


@pytest.mark.thorough
def test_without_cudnn_all_but_the_argmax_runs(stand_ins: Path, tmp_path: Path) -> None:
    """cuDNN is needed for the argmax of --greedy-on-device only, which names it before anything is computed."""
    folder = without(stand_ins, tmp_path / "some", "libcudnn")
    for dtype in ("f32", "f16"):
        assert run(folder, tiny(dtype), *ANSWER, "--provider", "cuda").returncode == 0
    done = run(folder, tiny(), *ANSWER, "--provider", "cuda", "--greedy-on-device")
    assert (done.returncode, done.stdout) == (1, "")
    assert "--greedy-on-device needs cuDNN for its argmax: libcudnn" in done.stderr


@pytest.mark.parametrize("library", ["libcublas", "libcublasLt"])
@pytest.mark.thorough
def test_a_missing_library_is_named_in_one_line(library: str, stand_ins: Path, tmp_path: Path) -> None:
    """With `auto` the CPU answers, and stderr says so."""
    folder = without(stand_ins, tmp_path / "some", library)
    done = run(folder, tiny(), *ANSWER, "--provider", "cuda")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: provider cuda cannot start: ")
    assert library in line

    done = run(folder, tiny(), *ANSWER, "--provider", "auto")
    assert done.returncode == 0
    assert done.stderr == "provider: cpu\n"


@pytest.mark.thorough
def test_a_device_that_computes_nothing_fails_the_check(stand_ins: Path) -> None:
    """`check` compares ids that the device computed, not files alone (A4 in docs/faults.md)."""
    done = cuda_stand_ins.run(stand_ins, PROGRAM, "check", tiny("f16"), "--provider", "cuda", env=ENVIRONMENT)
    assert done.returncode == 1
    assert done.stdout.startswith("MISMATCH: golden ids:")
    assert "equal on cuda" in done.stdout
    assert "runs: prefill.onnx on cuda, float16, TF32 off, CUDA graph" in done.stderr


@pytest.mark.thorough
def test_a_limit_of_memory_is_kept_and_named(stand_ins: Path) -> None:
    """--gpu-mem-limit too small is refused in a line that names memory (C8 in docs/faults.md)."""
    assert run(stand_ins, tiny(), *ANSWER, "--provider", "cuda", "--gpu-mem-limit", 500).returncode == 0
    done = run(stand_ins, tiny(), *ANSWER, "--provider", "cuda", "--gpu-mem-limit", 1)
    assert (done.returncode, done.stdout) == (1, "")
    assert "emory" in done.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_a_device_for_which_there_are_no_kernels_is_not_taken(stand_ins: Path) -> None:
    """A GPU older or newer than the wheel: libraries load, a session opens, and the first kernel fails."""
    env = {**ENVIRONMENT, "QWEN_STAND_IN_FAIL_LAUNCHES": "1"}

    def run_on(provider: str) -> subprocess.CompletedProcess[str]:
        return cuda_stand_ins.run(stand_ins, PROGRAM, "run", tiny(), *ANSWER, "--provider", provider, env=env)

    done = run_on("auto")
    assert (done.returncode, done.stderr) == (0, "provider: cpu\n")
    done = run_on("cuda")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: provider cuda cannot start: ")


def test_a_damaged_export_is_not_taken_for_a_missing_device(stand_ins: Path, tmp_path: Path) -> None:
    folder = copy_export(tiny("f16"), tmp_path / "damaged")
    (folder / "grow.onnx").write_bytes(b"")
    for provider in ("auto", "cuda"):
        done = run(stand_ins, folder, *ANSWER, "--provider", provider)
        assert done.returncode == 1
        assert "grow.onnx: 0 bytes found" in done.stderr
