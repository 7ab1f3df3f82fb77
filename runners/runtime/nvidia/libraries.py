"""NVIDIA's software on this machine, found by loading it: what a package's name says proves nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Load = Callable[[str], ctypes.CDLL]

_CUDA_MAJORS = (13, 12)
_TENSORRT_MAJORS = (10, 11)
_RTLD_DI_LINKMAP = 2
_LONGEST_PATH = 32_768


@dataclasses.dataclass(frozen=True)
class Library:
    """A shared library that a provider loads."""

    name: str
    """The file's name, as the provider asks for it."""
    path: str | None
    version: str | None
    fault: str | None
    """Why it does not load, in the loader's own words; None when it does."""
    needed: bool = True
    """False: the provider starts without it, and refuses the few operators that use it."""


@dataclasses.dataclass(frozen=True)
class _Wanted:
    stem: str
    name: str
    version_call: str
    folder: tuple[str, ...]  # where pip's NVIDIA packages have it, under site-packages
    needed: bool


def load_library(name: str) -> ctypes.CDLL:
    """Load by name or path.

    Raises:
        OSError: it, or a library that it needs, is not there.
    """
    if sys.platform == "win32" and not Path(name).is_absolute():
        return ctypes.CDLL(name, winmode=0)  # PATH too, where CUDA's installer and ONNX Runtime look
    return ctypes.CDLL(name)


def cuda_libraries(
    cuda_version: str | None = None,
    *,
    load: Load = load_library,
    site_packages: Path | None = None,
    system: str = sys.platform,
) -> list[Library]:
    """The CUDA and cuDNN libraries of an ONNX Runtime built for this version, in the order it loads them.

    Args:
        cuda_version: as in `onnxruntime.cuda_version`; "" is a build without CUDA, None the version that
            qwen-onnx's `cuda` extra installs.
        load: gives the library of a name or path, or raises OSError.
        site_packages: where pip installed NVIDIA's packages; default beside onnxruntime.
        system: as `sys.platform`.
    """
    if cuda_version == "" or system == "darwin":
        return []
    numbers = re.match(r"\d+", cuda_version or "")
    major = int(numbers[0]) if numbers else _CUDA_MAJORS[0]
    site = site_packages or _site_packages()
    found = [(wanted.stem, _find(wanted, site, load)) for wanted in _wanted(major, system)]
    # After all of them: what is loaded from here on may bring libraries of another CUDA with it.
    return [_tell_other(library, stem, major, site, load, system) for stem, library in found]


def tensorrt_library(
    *,
    load: Load = load_library,
    site_packages: Path | None = None,
    majors: Sequence[int] = (),
    system: str = sys.platform,
) -> Library | None:
    """TensorRT's libnvinfer; None on macOS, where there is none.

    Args:
        load: gives the library of a name or path, or raises OSError.
        site_packages: where pip installed TensorRT; default beside onnxruntime.
        majors: of TensorRT; default the one that the onnxruntime there is linked with.
        system: as `sys.platform`.
    """
    if system == "darwin":
        return None
    site = site_packages or _site_packages()
    linked = tuple(majors) or _linked_tensorrt(site, system)
    first, *others = (
        _find(_Wanted("nvinfer", name, "getInferLibVersion", ("tensorrt_libs",), True), site, load)
        for major in dict.fromkeys((*linked, *_TENSORRT_MAJORS))
        for name in [f"nvinfer_{major}.dll" if system == "win32" else f"libnvinfer.so.{major}"]
    )
    for other in others:
        if first.fault and not other.fault:
            if not linked:  # nothing says which it must be
                return other
            return dataclasses.replace(first, fault=f"{first.fault}; {other.name} is there instead")
    return first


def _wanted(major: int, system: str) -> Iterator[_Wanted]:
    windows = system == "win32"
    below: tuple[str, ...] = ("bin",) if windows else ("lib",)
    if windows and major >= 13:
        arm = platform.machine().lower() in ("arm64", "aarch64")
        below = ("bin", "arm64" if arm else "x86_64")
    # From CUDA 13 on, one folder holds what the single packages had; cuDNN keeps its own.
    for stem, number, call, component, needed in (
        ("cublasLt", major, "cublasLtGetProperty", "cublas", True),  # before cublas, which needs it
        ("cublas", major, "cublasGetProperty", "cublas", True),
        ("nvrtc", major, "nvrtcVersion", "cuda_nvrtc", False),
        ("curand", 10, "curandGetProperty", "curand", True),
        ("cufft", major - 1, "cufftGetProperty", "cufft", False),
        ("cudart", major, "cudaRuntimeGetVersion", "cuda_runtime", True),
        ("cudnn", 9, "cudnnGetProperty", "cudnn", False),
    ):
        if windows and stem == "curand":
            continue  # linked into the provider there
        name = f"{stem}64_{number}.dll" if windows else f"lib{stem}.so.{number}"
        if windows and stem == "nvrtc":
            name = f"nvrtc64_{number}0_0.dll"
        if component == "cudnn":
            folder: tuple[str, ...] = ("nvidia", "cudnn", "bin" if windows else "lib")
        else:
            folder = ("nvidia", f"cu{major}" if major >= 13 else component, *below)
        yield _Wanted(stem, name, call, folder, needed)


def _find(wanted: _Wanted, site: Path, load: Load) -> Library:
    """As `onnxruntime.preload_dlls` looks for it: NVIDIA's pip packages, PyTorch on Windows, the system."""
    places = [site.joinpath(*wanted.folder, wanted.name)]
    if wanted.name.endswith(".dll"):
        places.append(site / "torch" / "lib" / wanted.name)
    faults = []
    for name in [*(str(place) for place in places if place.is_file()), wanted.name]:
        try:
            library = load(name)
        except OSError as error:
            faults.append(_first_line(error))
            continue
        path, version = _path(library, name), _version(library, wanted.version_call)
        return Library(wanted.name, path, version, None, wanted.needed)
    return Library(wanted.name, None, None, faults[0], wanted.needed)


def _tell_other(library: Library, stem: str, major: int, site: Path, load: Load, system: str) -> Library:
    """A missing library's fault, with the one of another CUDA version if that is what the machine has."""
    if library.fault is None:
        return library
    for other in (number for number in _CUDA_MAJORS if number != major):
        wanted = next(wanted for wanted in _wanted(other, system) if wanted.stem == stem)
        if _find(wanted, site, load).fault is None:
            fault = f"{library.fault}; {wanted.name} is there, of CUDA {other}"
            return dataclasses.replace(library, fault=fault)
    return library


def _version(library: ctypes.CDLL, name: str) -> str | None:
    """None when the library has no such function, or it fails."""
    numbers = [ctypes.c_int() for _ in range(3)]
    try:
        call = getattr(library, name)
        if name == "getInferLibVersion":
            return tensorrt_version(call())
        if name.endswith("GetProperty"):  # major, minor and patch are properties 0, 1 and 2
            failed = any(call(part, ctypes.byref(number)) for part, number in enumerate(numbers))
        elif name == "nvrtcVersion":
            failed = bool(call(*(ctypes.byref(number) for number in numbers[:2])))
            del numbers[2]
        else:
            failed = bool(call(ctypes.byref(numbers[0])))
            return None if failed else cuda_version_text(numbers[0].value)
    except (AttributeError, OSError):
        return None
    return None if failed else ".".join(str(number.value) for number in numbers)


def cuda_version_text(number: int) -> str:
    """13000 is 13.0, 12080 is 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def tensorrt_version(number: int) -> str:
    """101303 is 10.13.3; before TensorRT 10, 8601 is 8.6.1."""
    unit = 10_000 if number >= 100_000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def _linked_tensorrt(site: Path, system: str) -> tuple[int, ...]:
    """The version that onnxruntime's TensorRT provider names in its file; () without such a provider."""
    prefix, suffix = ("", ".dll") if system == "win32" else ("lib", ".so")
    pattern = rb"nvinfer_(\d+)\.dll" if system == "win32" else rb"libnvinfer\.so\.(\d+)"
    try:
        file = site / "onnxruntime" / "capi" / f"{prefix}onnxruntime_providers_tensorrt{suffix}"
        return tuple(int(number) for number in dict.fromkeys(re.findall(pattern, file.read_bytes())))
    except OSError:
        return ()


def _site_packages() -> Path:
    """Where `onnxruntime.preload_dlls` looks, without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is not None and spec.origin:
        return Path(spec.origin).parents[1]
    return Path(sysconfig.get_path("purelib"))


def _path(library: ctypes.CDLL, name: str) -> str | None:
    """The file that was loaded; None when the system does not say."""
    handle = getattr(library, "_handle", None)
    try:
        if handle is not None and sys.platform == "win32":
            text = ctypes.create_unicode_buffer(_LONGEST_PATH)
            ctypes.CDLL("kernel32").GetModuleFileNameW(ctypes.c_void_p(handle), text, _LONGEST_PATH)
            return text.value or None
        if handle is not None:
            link = ctypes.POINTER(_LinkMap)()
            ctypes.CDLL(None).dlinfo(ctypes.c_void_p(handle), _RTLD_DI_LINKMAP, ctypes.byref(link))
            return link.contents.name.decode(errors="replace") if link else None
    except (AttributeError, OSError):
        pass
    return name if Path(name).is_absolute() else None


class _LinkMap(ctypes.Structure):
    _fields_ = (("address", ctypes.c_size_t), ("name", ctypes.c_char_p))


def _first_line(error: OSError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
