"""Kernels of machine code as launches of a recipe (`taso.backends.recipe`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from taso.backends.places import Place
from taso.backends.recipe import Call
from taso.backends.x86.assembler import Isa


class Coded(Protocol):
    """What machine code is written for: a product, a transform, a depthwise convolution."""

    @property
    def isa(self) -> Isa: ...

    def bind(self, parallel: int, buffers: Sequence[int], others: Sequence[int]) -> tuple[Call, object]:
        """What runs it on buffers at these addresses, and what has to be kept for that; `others` are read by posts.

        `parallel` is the address of libgomp's GOMP_parallel.
        """
        ...


@dataclass(frozen=True)
class CodeLaunch:
    """Machine code, and which buffers it works on: its own in its order, and those that its posts read."""

    coded: Coded
    parallel: int
    buffers: tuple[Place, ...]
    others: tuple[Place, ...] = ()

    @property
    def name(self) -> str:
        return f"x86:{self.coded.isa.name}"

    def bind(self, address: Callable[[Place], int]) -> tuple[Call, object]:
        return self.coded.bind(self.parallel, [*map(address, self.buffers)], [*map(address, self.others)])

    def moved(self, to: Callable[[Place], Place]) -> CodeLaunch:
        """The same on other buffers."""
        return replace(self, buffers=tuple(map(to, self.buffers)), others=tuple(map(to, self.others)))
