"""What is told of the NVIDIA driver and its GPUs, on machines that this is not."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_onnx.runners.runtime.nvidia.driver import Driver, Gpu, driver, gpus
from support.fake_libraries import WORDS, fills, loader


class FakeDriver(SimpleNamespace):
    """Two GPUs, through those functions of the driver that make no context; any other is not there."""

    def __init__(self, *, init: int = 0) -> None:
        super().__init__(
            cuInit=lambda flags: init,
            cuDriverGetVersion=fills(13010),
            cuDeviceGetCount=fills(2),
            cuDeviceGet=lambda device, ordinal: fills(ordinal)(device),
            cuDeviceTotalMem_v2=lambda memory, device: fills((80, 16)[device.value] << 30)(memory),
        )

    def cuDeviceGetName(self, text: Any, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        text.value = (b"NVIDIA H200", b"NVIDIA \xb5")[device.value][:size]
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
        return fills({75: (9, 7), 76: (0, 5)}[attribute][device.value])(number)

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = f"error {code}".encode()
        return 0


def nvml(version: bytes, *, init: int = 0) -> SimpleNamespace:
    def write(text: Any, size: int) -> int:
        text.value = version[:size]
        return 0

    return SimpleNamespace(nvmlInit_v2=lambda: init, nvmlSystemGetDriverVersion=write, nvmlShutdown=lambda: 0)


def test_a_driver_and_its_gpus(tmp_path: Path) -> None:
    """Each GPU with its own compute capability and memory."""
    load = loader({"libcuda.so.1": FakeDriver(), "libnvidia-ml.so.1": nvml(b"580.65.06")})
    assert driver(load=load, kernel_module=tmp_path, system="linux") == Driver("580.65.06", "13.1", None)
    assert gpus(load=load, system="linux") == [
        Gpu("NVIDIA H200", "9.0", 80 << 30),
        Gpu("NVIDIA \N{REPLACEMENT CHARACTER}", "7.5", 16 << 30),
    ]
    windows = loader({"nvcuda.dll": FakeDriver(), "nvml.dll": nvml(b"580.88")})
    assert driver(load=windows, kernel_module=tmp_path, system="win32").version == "580.88"
    assert len(gpus(load=windows, system="win32")) == 2


@pytest.mark.parametrize(
    ("library", "fault"),
    [
        (OSError(f"libcuda.so.1: {WORDS}\nmore"), f"libcuda.so.1: {WORDS}"),
        (FakeDriver(init=803), "cuInit answers 803: error 803"),
        (SimpleNamespace(), "has no attribute 'cuDriverGetVersion'"),
    ],
    ids=["missing", "at odds with the kernel", "a stub"],
)
def test_a_driver_that_does_not_work(
    library: Any, fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """None is counted on, and nothing is printed."""
    module = tmp_path / "version"
    module.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.2.0\n"
    )
    load = loader({"libcuda.so.1": library, "libnvidia-ml.so.1": nvml(b"", init=18)})
    found = driver(load=load, kernel_module=module, system="linux")
    assert found.fault is not None
    assert fault in found.fault
    assert "\n" not in found.fault
    assert found.version == "570.86.15"
    assert gpus(load=load, system="linux") == []
    assert capfd.readouterr() == ("", "")
