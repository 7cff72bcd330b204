"""Planning of intermediate memory: which tensors lie where in one arena, and when."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from taso.backends.packing import Span, packed
from taso.backends.pages import ALIGNMENT


@dataclass(eq=False)
class Region:
    """A stretch of memory that holds tensors (`members`) from step `first` to step `last` of a program.

    It may lie inside a larger one, `parent`, at `offset`; a region without a parent gets its `offset` in the arena.
    """

    size: int
    members: list[Hashable] = field(default_factory=list)
    parent: Region | None = None
    offset: int = 0
    first: int = 1 << 60
    last: int = -1

    def root(self) -> tuple[Region, int]:
        """The outermost region around this one, and where in it this one starts."""
        region, offset = self, 0
        while region.parent is not None:
            offset += region.offset
            region = region.parent
        return region, offset

    def live(self, first: int, last: int) -> None:
        """Notes that it is in use from step `first` to step `last`."""
        self.first, self.last = min(self.first, first), max(self.last, last)

    def absorb(self, other: Region, offset: int) -> None:
        """Puts another root region inside this one."""
        other.parent, other.offset = self, offset
        self.live(other.first, other.last)
        self.members.extend(other.members)
        other.members.clear()


def place_regions(regions: list[Region]) -> int:
    """Gives every root region its offset so that regions in use at once do not overlap; bytes of the whole."""
    roots = [r for r in regions if r.parent is None]
    offsets, total = packed([Span(aligned(r.size), r.first, r.last) for r in roots])
    for region, offset in zip(roots, offsets, strict=True):
        region.offset = offset
    return total


def aligned(size: int) -> int:
    """`size` rounded up to whole cache lines, at least one."""
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT
