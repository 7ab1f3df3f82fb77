"""How much memory this process took, and what it gives back."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

_M_MMAP_THRESHOLD = -3
"""glibc's number for the size from which on a block is mapped by itself, and goes back when it is freed."""
_MAPPED_FROM = 4 << 20  # above a step's logits, which would be new pages each time


def give_back_large_blocks() -> None:
    """Have glibc return freed blocks of 4 MB and more to the system, whatever was freed before.

    Left alone, it raises that size to that of the first large block freed, up to 32 MB, and what a load freed stays:
    20 MB of int4 at the 0.5B shape. It is a setting of the whole process: the command's, not the library's.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM)


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
