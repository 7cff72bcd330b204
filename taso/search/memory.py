"""How much memory this process holds, for the bound on what a search may take."""

from __future__ import annotations

import os
import sys

from taso.backends import aside
from taso.graph.errors import SearchError

try:
    import resource
except ImportError:  # there is none on Windows
    resource = None  # type: ignore[assignment]  # told below, where somebody asks

_STATM = "/proc/self/statm"


def resident_bytes() -> int:
    """Bytes of memory that this process holds, but for what measuring keeps (`taso.backends.aside`).

    Where the system does not tell, the most that it ever held.

    Raises `SearchError` where neither is known.
    """
    try:
        with open(_STATM, "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") - aside.held()
    except (OSError, ValueError, AttributeError):
        if resource is None:
            raise SearchError(
                "search_memory_limit cannot be kept here: this system does not tell how much memory a process holds"
            ) from None
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


__all__ = ["resident_bytes"]
