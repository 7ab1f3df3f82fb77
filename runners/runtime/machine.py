"""What this process may take of the machine, in a container too: cores and memory."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

import psutil

SYSTEM_CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")


def physical_cores() -> int:
    """Physical cores in this process's affinity mask, and no more than its container's share of time.

    Products keep a core's arithmetic busy: a second thread on it only waits. And threads beyond a container's quota
    are stopped while others spin for them.
    """
    allowed = allowed_cpus()
    if sys.platform == "linux":
        cores = len({_siblings(cpu) for cpu in allowed})
    else:
        cores = min(psutil.cpu_count(logical=False) or len(allowed), len(allowed))
    quota = _quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def allowed_cpus() -> set[int]:
    """Logical CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """Names the core that a logical CPU is on."""
    try:
        return (SYSTEM_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:  # not told: each its own
        return str(cpu)


def _quota() -> float | None:
    """CPUs' worth of time that a container grants (`docker run --cpus`); None where it does not say."""
    try:  # cgroup 2
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:  # cgroup 1
        quota = (CGROUP / "cpu" / "cpu.cfs_quota_us").read_text()
        period = (CGROUP / "cpu" / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def free_memory() -> int:
    """Bytes that could be taken without swapping, or being killed for a container's limit (cgroup 2)."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        # Pages of files, the mapped weights among them, count as used and are given up when asked for.
        of_files = re.findall(
            r"^(?:in)?active_file (\d+)$", (CGROUP / "memory.stat").read_text(), re.MULTILINE
        )
    except (OSError, ValueError):  # no container, no limit ("max"), or an older kernel
        return free
    return min(free, max(0, limit - used + sum(map(int, of_files))))
