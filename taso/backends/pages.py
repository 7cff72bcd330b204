"""Zeroed memory on large pages, where the system has them.

Weights are read once per inference, from end to end. On pages of 4 KiB every such page costs a look-up that misses, and
the processor stops fetching ahead at its end; on pages of 2 MiB neither matters. Linux gives such pages to whoever asks
(`madvise(2)`, `MADV_HUGEPAGE`) for memory that lies together, so blocks are cut from larger reservations.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_LARGE_PAGE = 2 << 20
_RESERVED = 64 << 20
"""Bytes of address space of a reservation; memory is taken only where something is written."""
_LEAST = 4096
"""Smaller blocks come from NumPy."""


class _Reservation:
    """Address space that blocks are cut from, one behind the other."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size + _LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.used = -self.address % _LARGE_PAGE
        self.end = self.used + size

    def cut(self, size: int) -> _Stretch | None:
        """So many bytes, or None where no more are left."""
        start = self.used
        if start + size > self.end:
            return None
        self.used = start + -(-size // ALIGNMENT) * ALIGNMENT
        return _Stretch(self, start, size)


class _Stretch:
    """Bytes of a reservation, which go back to the system when no array refers to them any more."""

    def __init__(self, reservation: _Reservation, start: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (reservation.address + start, False),
        }  # fmt: skip
        # arrays hold this, and this the memory
        self._memory = reservation.memory
        weakref.finalize(self, _give_back, reservation.memory, start, start + size).atexit = False


def _give_back(memory: mmap.mmap, start: int, stop: int) -> None:
    first, last = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
    if last > first:
        # locked memory stays where it is, as long as the reservation does
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_DONTNEED, first, last - first)


_current: _Reservation | None = None
_lock = threading.Lock()


def zeroed(size: int) -> NDArray[np.uint8]:
    """`size` bytes, all 0, the first at a multiple of 64; on large pages where there are such."""
    stretch = _stretch(size) if size >= _LEAST and _HAS_LARGE_PAGES else None
    if stretch is None:
        whole = np.zeros(size + ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        return whole[start : start + size]
    return np.asarray(stretch)


def _stretch(size: int) -> _Stretch | None:
    global _current
    try:
        if size > _RESERVED // 2:
            return _Reservation(-(-size // _PAGE) * _PAGE).cut(size)
        with _lock:
            found = _current.cut(size) if _current is not None else None
            if found is None:
                _current = _Reservation(_RESERVED)
                found = _current.cut(size)
            return found
    except OSError:
        # no address space is left, or the system has no large pages: ordinary memory will do
        return None


_HAS_LARGE_PAGES = sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap.mmap, "madvise")

__all__ = ["ALIGNMENT", "zeroed"]
