"""The NVIDIA driver and its GPUs, asked through the driver's own libraries. No CUDA context is made."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import sys
from pathlib import Path

from qwen_onnx.runners.runtime.nvidia.libraries import Load, cuda_version_text, load_library

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_TEXT_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Driver:
    """The NVIDIA driver."""

    version: str | None
    """As nvidia-smi shows it."""
    cuda_version: str | None
    """The highest that it supports."""
    fault: str | None
    """Why it cannot be used: the loader's words, or what cuInit answers; None when it can."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU that CUDA may use."""

    name: str
    compute_capability: str
    memory: int
    """Bytes."""


def driver(
    *, load: Load = load_library, kernel_module: Path = _KERNEL_MODULE, system: str = sys.platform
) -> Driver:
    """The driver, or why there is none.

    Args:
        load: gives the library of a name or path, or raises OSError.
        kernel_module: where Linux tells the version of the part in the kernel.
        system: as `sys.platform`.
    """
    version = _nvml_version(load, system) or _kernel_module_version(kernel_module)
    number = ctypes.c_int()
    try:
        cuda = load(_driver_library(system))
        failed = cuda.cuDriverGetVersion(ctypes.byref(number))
        supported = None if failed or not number.value else cuda_version_text(number.value)
        code = cuda.cuInit(0)
        return Driver(version, supported, _error_text(cuda, code) if code else None)
    except (AttributeError, OSError) as error:
        return Driver(version, None, (str(error).strip().splitlines() or [type(error).__name__])[0])


def gpus(*, load: Load = load_library, system: str = sys.platform) -> list[Gpu]:
    """The GPUs that CUDA may use, in its order; none when the driver is missing or broken.

    Args:
        load: gives the library of a name or path, or raises OSError.
        system: as `sys.platform`.
    """
    count = ctypes.c_int()
    try:
        cuda = load(_driver_library(system))
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return []
        found = (_gpu(cuda, ordinal) for ordinal in range(count.value))
        return [gpu for gpu in found if gpu is not None]
    except (AttributeError, OSError):
        return []


def _driver_library(system: str) -> str:
    return "nvcuda.dll" if system == "win32" else "libcuda.so.1"


def _gpu(cuda: ctypes.CDLL, ordinal: int) -> Gpu | None:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_TEXT_BYTES)
    capability = [ctypes.c_int() for _ in _COMPUTE_CAPABILITY]
    if (
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        or cuda.cuDeviceGetName(name, _TEXT_BYTES, device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    ):
        return None
    for number, attribute in zip(capability, _COMPUTE_CAPABILITY, strict=True):
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
    text = ".".join(str(number.value) for number in capability)
    return Gpu(name.value.decode(errors="replace"), text, memory.value)


def _error_text(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(code, ctypes.byref(text))
    return f"cuInit answers {code}: {(text.value or b'unknown').decode(errors='replace')}"


def _nvml_version(load: Load, system: str) -> str | None:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    try:
        nvml = load("nvml.dll" if system == "win32" else "libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return None
        failed = nvml.nvmlSystemGetDriverVersion(text, _TEXT_BYTES)
        nvml.nvmlShutdown()
    except (AttributeError, OSError):
        return None
    return None if failed else text.value.decode(errors="replace")


def _kernel_module_version(file: Path) -> str | None:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[0] if found else None
