"""How much memory this process took."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def peak_memory() -> int | None:
    """Largest resident size of this process so far, in bytes; None where the system does not say."""
    try:
        # Not ru_maxrss: on Linux that begins with the size of whichever process started this one.
        if peak := re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(peak[1]) * 1024
    except OSError:  # no Linux
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def anonymous_memory() -> int | None:
    """Private memory of this process that no file backs, in bytes; None where the system does not say."""
    try:
        found = re.search(r"^RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:  # no Linux
        return None
    return int(found[1]) * 1024 if found else None
