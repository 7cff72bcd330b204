"""Machine code in memory that may be run, and whether this process may and this processor can."""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
import sys
from collections.abc import Callable
from functools import lru_cache

from taso.graph.errors import BackendError

log = logging.getLogger(__name__)

_SYSTEMS = ("linux",)
"""Systems whose calling convention the code follows (System V AMD64 ABI)."""


class Code:
    """Machine code at an address of its own, which nobody writes to any more."""

    def __init__(self, code: bytes) -> None:
        """Raises `BackendError` where the system lets no process make code at run time, or has no memory for it."""
        try:
            self._memory = mmap.mmap(-1, max(len(code), 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BackendError(f"the system has no memory for machine code: {error}") from error
        self._memory.write(code)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if _protect()(self.address, len(self._memory), mmap.PROT_READ | mmap.PROT_EXEC):
            raise BackendError("the system does not let this process run code that it makes at run time")


@lru_cache(maxsize=1)
def _protect() -> Callable[[int, int, int], int]:
    """mprotect(2)."""
    found: Callable[[int, int, int], int] = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    )(("mprotect", ctypes.CDLL(None)))
    return found


@lru_cache(maxsize=1)
def runs_here() -> bool:
    """Whether code for x86-64 can be made and run in this process; which instructions there are is another matter."""
    if sys.platform not in _SYSTEMS or platform.machine() not in ("x86_64", "AMD64") or sys.maxsize < 2**32:
        return False
    try:
        # returns its argument: mov rax, rdi; ret
        code = Code(b"\x48\x89\xf8\xc3")
    except BackendError as reason:
        log.info("no machine code: %s", reason)
        return False
    return bool(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address)(7) == 7)
