"""What a kernel of ours is: source text, and how to launch it on which buffers."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from taso.backends.places import Place

OUTSIDE = Place("outside")
"""A number of 32 bits that a kernel makes 1 where an index points outside."""

_ENTRY = "ENTRY"
"""Stands for the entry's name in text that has none yet."""


@dataclass(frozen=True)
class Source:
    """CUDA C++ that NVRTC compiles by itself, without any header; `entry` is the `extern "C"` kernel in it.

    Equal text has an equal entry, so that a module is compiled once for all kernels that need it.
    """

    name: str
    code: str
    entry: str

    @staticmethod
    def named(name: str, code: str) -> Source:
        """A source whose entry, `ENTRY` in `code`, is called after `name` and the text."""
        digest = hashlib.sha256(code.encode()).hexdigest()[:16]
        entry = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") + "_" + digest
        return Source(name, re.sub(rf"\b{_ENTRY}\b", entry, code), entry)


@dataclass(frozen=True)
class SourceLaunch:
    """A launch: blocks in the grid, threads in a block, bytes of dynamic shared memory, arguments in order."""

    source: Source
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: tuple[Place | int | float, ...]


@dataclass(frozen=True)
class Sourced:
    """A kernel as launches of ours, in order; `scratch` has the bytes of each scratch buffer.

    `shares` are operands whose buffer may be the result's too: each element is read by the thread that then writes
    there, and not again.
    """

    launches: tuple[SourceLaunch, ...]
    scratch: tuple[int, ...] = ()
    shares: frozenset[int] = frozenset()


__all__ = ["OUTSIDE", "Place", "Source", "SourceLaunch", "Sourced"]
