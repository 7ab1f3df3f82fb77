"""The device, asked through the CUDA runtime that this process has loaded: memory in use, and speed of copying."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from types import TracebackType

from qwen_onnx.errors import UserError
from qwen_onnx.runners.runtime.providers import missing_library
from qwen_onnx.runners.runtime.session import import_onnxruntime

_DEVICE_TO_DEVICE = 3
_COPIES = 20
_TIMES = 5
_SAMPLED_EVERY_S = 0.002


class Cuda:
    """A context on the first device. What it takes is in `used`, so take that once before anything else."""

    def __init__(self) -> None:
        if fault := missing_library("cuda"):  # it loads what pip installed on the way
            raise UserError(f"no CUDA: {fault}")
        version = getattr(import_onnxruntime(), "cuda_version", "") or "13"
        self._runtime = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}")
        self._call("cudaFree", None)  # makes the context

    def used(self) -> int:
        """Bytes in use on the whole device, by whatever process."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    def copy_bandwidth(self, nbytes: int) -> float:
        """Bytes read and written per second by copies on the device; the median of several series."""
        source, target = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(source), ctypes.c_size_t(nbytes))
        try:
            self._call("cudaMalloc", ctypes.byref(target), ctypes.c_size_t(nbytes))
            seconds = [self._copy(source, target, nbytes) for _ in range(1 + _TIMES)][1:]
        finally:
            self._call("cudaFree", source)
            self._call("cudaFree", target)
        return 2 * nbytes * _COPIES / statistics.median(seconds)

    def _copy(self, source: ctypes.c_void_p, target: ctypes.c_void_p, nbytes: int) -> float:
        begun = time.perf_counter()
        for _ in range(_COPIES):
            size, kind = ctypes.c_size_t(nbytes), ctypes.c_int(_DEVICE_TO_DEVICE)
            self._call("cudaMemcpyAsync", target, source, size, kind, None)
        self._call("cudaDeviceSynchronize")
        return time.perf_counter() - begun

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._runtime, name)(*arguments):
            raise RuntimeError(f"{name} answers {code}")


def device(provider: str) -> Cuda | None:
    """With a context; None on the CPU."""
    return None if provider == "cpu" else Cuda()


class PeakMemory:
    """`peak`: the most bytes in use while this context was open, looked at every 2 ms and at both ends."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self._over = cuda, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak = 0

    def __enter__(self) -> PeakMemory:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLED_EVERY_S):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, self._cuda.used())
