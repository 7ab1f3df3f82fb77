"""How much memory this process may still take, in a container too."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


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
