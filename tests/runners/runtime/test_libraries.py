"""What is told of CUDA, cuDNN and TensorRT: by what loads, on machines that this is not."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from qwen_onnx.runners.runtime.nvidia import libraries
from qwen_onnx.runners.runtime.nvidia.libraries import Library, cuda_libraries, tensorrt_library
from support.fake_libraries import WORDS, fills, loader


def properties(*version: int) -> Callable[..., int]:
    """A `cublasGetProperty` and its like."""
    return lambda part, pointer: fills(version[part])(pointer)


CUDA_13 = {
    "libcublasLt.so.13": SimpleNamespace(cublasLtGetProperty=properties(13, 10, 0)),
    "libcublas.so.13": SimpleNamespace(cublasGetProperty=properties(13, 10, 0)),
    "libnvrtc.so.13": SimpleNamespace(nvrtcVersion=fills(13, 5)),
    "libcurand.so.10": SimpleNamespace(curandGetProperty=properties(10, 4, 5)),
    "libcufft.so.12": SimpleNamespace(cufftGetProperty=properties(12, 5, 0)),
    "libcudart.so.13": SimpleNamespace(cudaRuntimeGetVersion=fills(13050)),
    "libcudnn.so.9": SimpleNamespace(cudnnGetProperty=properties(9, 28, 1)),
}
CUDA_12 = {
    "libcublasLt.so.12": SimpleNamespace(),
    "libcublas.so.12": SimpleNamespace(),
    "libcudart.so.12": SimpleNamespace(),
    "libcurand.so.10": CUDA_13["libcurand.so.10"],
}


def cuda(there: dict[str, Any], site: Path, version: str | None = "13.0") -> dict[str, Library]:
    found = cuda_libraries(version, load=loader(there), site_packages=site, system="linux")
    return {library.name: library for library in found}


def test_all_are_there_with_their_versions(tmp_path: Path) -> None:
    """The versions are what a bug report needs."""
    found = cuda(CUDA_13, tmp_path)
    assert [(name, library.version) for name, library in found.items()] == [
        ("libcublasLt.so.13", "13.10.0"),
        ("libcublas.so.13", "13.10.0"),
        ("libnvrtc.so.13", "13.5"),
        ("libcurand.so.10", "10.4.5"),
        ("libcufft.so.12", "12.5.0"),
        ("libcudart.so.13", "13.5"),
        ("libcudnn.so.9", "9.28.1"),
    ]
    assert not any(library.fault for library in found.values())
    optional = {name for name, library in found.items() if not library.needed}
    assert optional == {"libnvrtc.so.13", "libcufft.so.12", "libcudnn.so.9"}


def test_a_missing_one_is_told_in_the_loaders_words(tmp_path: Path) -> None:
    """The one file that is missing is named."""
    found = cuda({name: CUDA_13[name] for name in CUDA_13 if "cublasLt" not in name}, tmp_path)
    missing = Library("libcublasLt.so.13", None, None, f"libcublasLt.so.13: {WORDS}")
    assert [library for library in found.values() if library.fault] == [missing]


def test_libraries_of_cuda_12_are_no_cuda_13(tmp_path: Path) -> None:
    """The wheel wants CUDA 13, the machine has 12."""
    found = cuda(CUDA_12, tmp_path)
    assert found["libcublas.so.13"].fault == f"libcublas.so.13: {WORDS}; libcublas.so.12 is there, of CUDA 12"
    assert found["libcublas.so.13"].version is None
    assert found["libnvrtc.so.13"].fault == f"libnvrtc.so.13: {WORDS}"
    assert found["libcudnn.so.9"].fault == f"libcudnn.so.9: {WORDS}"  # the same for both
    assert found["libcurand.so.10"].fault is None


def test_a_build_for_cuda_12_wants_cuda_12(tmp_path: Path) -> None:
    found = cuda(CUDA_12, tmp_path, "12.8")
    assert {"libcublas.so.12", "libcufft.so.11", "libnvrtc.so.12", "libcudnn.so.9"} <= set(found)
    assert found["libcublas.so.12"].fault is None
    assert list(cuda(CUDA_13, tmp_path, None)) == list(CUDA_13)


@pytest.mark.parametrize(("broken", "found"), [(False, "pip"), (True, "system")])
def test_pips_library_comes_before_the_systems(broken: bool, found: str, tmp_path: Path) -> None:
    """We look at the file that ONNX Runtime loads."""
    file = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    file.parent.mkdir(parents=True)
    file.touch()
    ours = OSError("file too short") if broken else SimpleNamespace(cudaRuntimeGetVersion=fills(13010))
    library = cuda(CUDA_13 | {str(file): ours}, tmp_path)["libcudart.so.13"]
    path, version = {"pip": (str(file), "13.1"), "system": (None, "13.5")}[found]
    assert (library.path, library.version, library.fault) == (path, version, None)


def test_a_damaged_library_is_not_called_missing(tmp_path: Path) -> None:
    """What is said is of the damaged file, not of the next place, where there is none."""
    file = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\x7fELF")

    def load(name: str) -> ctypes.CDLL:
        return ctypes.CDLL(name) if Path(name).is_absolute() else loader({})(name)

    found = cuda_libraries("13.0", load=load, site_packages=tmp_path, system="linux")
    (fault,) = [library.fault for library in found if library.name == file.name]
    assert fault is not None
    assert fault.startswith(f"{file}: file too short")


@pytest.mark.parametrize("call", [fills(13000, code=35), None])
def test_a_library_that_hides_its_version_is_there_all_the_same(
    call: Callable[..., int] | None, tmp_path: Path
) -> None:
    silent = SimpleNamespace() if call is None else SimpleNamespace(cudaRuntimeGetVersion=call)
    library = cuda(CUDA_13 | {"libcudart.so.13": silent}, tmp_path)["libcudart.so.13"]
    assert (library.version, library.fault) == (None, None)


def test_the_path_is_the_file_that_was_loaded(tmp_path: Path) -> None:
    """It tells two installs apart."""
    file = np._core._multiarray_umath.__file__  # type: ignore[attr-defined]
    found = cuda_libraries("13.0", load=lambda name: ctypes.CDLL(file), site_packages=tmp_path)
    assert {library.path for library in found} == {file}


def test_no_cuda_no_libraries(tmp_path: Path) -> None:
    """Neither a CPU build nor a Mac is told to install CUDA."""
    assert cuda({}, tmp_path, "") == {}
    assert cuda_libraries("13.0", load=loader({}), system="darwin") == []
    assert tensorrt_library(load=loader({}), system="darwin") is None


@pytest.mark.parametrize("version", ["12.8", "13.0"])
@pytest.mark.parametrize("system", ["linux", "win32"])
def test_they_are_looked_for_where_onnxruntime_does(
    version: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This fails when a new ONNX Runtime looks elsewhere."""
    monkeypatch.setattr(onnxruntime, "cuda_version", version)
    theirs = {
        path for path in onnxruntime._get_nvidia_dll_paths(system == "win32") if "cudnn_" not in path[-1]
    }
    ours = {(*wanted.folder, wanted.name) for wanted in libraries._wanted(int(version[:2]), system)}
    assert len(theirs) > 4
    assert theirs <= ours


def tensorrt(there: dict[str, Any], site: Path, system: str = "linux") -> Library:
    found = tensorrt_library(load=loader(there), site_packages=site, system=system)
    assert found is not None
    return found


def test_tensorrt_is_the_one_that_onnxruntime_is_linked_with(tmp_path: Path) -> None:
    """TensorRT 11 is not called good beside a provider that loads version 10."""
    there = {
        "libnvinfer.so.10": SimpleNamespace(getInferLibVersion=lambda: 101303),
        "libnvinfer.so.11": SimpleNamespace(getInferLibVersion=lambda: 110000),
    }
    newer = {"libnvinfer.so.11": there["libnvinfer.so.11"]}
    assert tensorrt(there, tmp_path) == Library("libnvinfer.so.10", None, "10.13.3", None)
    assert tensorrt(newer, tmp_path).version == "11.0.0"  # no provider says which
    capi = tmp_path / "onnxruntime" / "capi"
    capi.mkdir(parents=True)
    (capi / "libonnxruntime_providers_tensorrt.so").write_bytes(b"\0libnvinfer.so.10\0libnvinfer.so.10\0")
    assert tensorrt(there, tmp_path).fault is None
    assert tensorrt(newer, tmp_path).fault == f"libnvinfer.so.10: {WORDS}; libnvinfer.so.11 is there instead"
    (capi / "onnxruntime_providers_tensorrt.dll").write_bytes(b"\0nvinfer_11.dll\0")
    assert tensorrt({}, tmp_path, "win32").name == "nvinfer_11.dll"


def test_tensorrt_as_pip_installs_it(tmp_path: Path) -> None:
    """It is found though it is on no system path."""
    file = tmp_path / "tensorrt_libs" / "libnvinfer.so.10"
    file.parent.mkdir()
    file.touch()
    library = SimpleNamespace(getInferLibVersion=lambda: 8601)
    assert tensorrt({str(file): library}, tmp_path) == Library(file.name, str(file), "8.6.1", None)


@pytest.mark.parametrize("installed", [True, False])
def test_libraries_are_sought_beside_onnxruntime(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was installed, as by `pip install --target`; without one, where packages go."""
    found = SimpleNamespace(origin=str(tmp_path / "onnxruntime" / "__init__.py"))
    monkeypatch.setattr(
        libraries.importlib.util,
        "find_spec",
        lambda name: found if installed and name == "onnxruntime" else None,
    )
    usual = Path(sysconfig.get_path("purelib"))
    assert libraries._site_packages() == (tmp_path if installed else usual)
