"""How much memory this process took."""

from __future__ import annotations

import sys


def peak_memory() -> int | None:
    """Largest resident size of this process so far, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
