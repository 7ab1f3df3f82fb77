"""What a benchmark says of the machine: what it is, and how fast its memory is read."""

from __future__ import annotations

import concurrent.futures
import platform
import time
from pathlib import Path

import numpy as np
import psutil

from qwen_onnx.runners.runtime.machine import physical_cores

_PROBE_BYTES = 256 << 20
_PROBES = 7


def read_bandwidth(threads: int) -> float:
    """Bytes read from memory a second by so many threads, the best of a few tries, in 10^9."""
    parts = np.array_split(np.ones(_PROBE_BYTES // 4, np.float32), 4 * threads)
    best = 0.0
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(_PROBES):
            begun = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, _PROBE_BYTES / (time.perf_counter() - begun))
    return best / 1e9


def describe_machine() -> str:
    """Processor, cores, memory and system."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    except OSError:  # no Linux
        pass
    memory = psutil.virtual_memory().total / 1e9
    clock = psutil.cpu_freq()
    cpu += f" at {clock.current:,.0f} MHz" if clock else ""
    return f"{cpu}, {physical_cores()} cores, {memory:.0f} GB, {platform.system()} {platform.release()}"
