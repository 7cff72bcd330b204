"""oneDNN's primitives as launches of a recipe (`taso.backends.recipe`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from taso.backends.onednn.memory import Memory, MemoryDesc
from taso.backends.onednn.primitives import Primitive
from taso.backends.places import Place
from taso.backends.recipe import ArrayLaunch, Call, Recipe, Supply


@dataclass(frozen=True)
class PrimitiveLaunch:
    """A oneDNN primitive and which buffer each of its arguments is.

    `extra` has the descriptors of scales and zero points, of which a primitive says nothing.
    """

    primitive: Primitive
    arguments: dict[int, Place]
    extra: Mapping[int, MemoryDesc] = field(default_factory=dict)

    def bind(self, address: Callable[[Place], int]) -> tuple[Call, object]:
        found = {**self.primitive.arguments, **self.extra}
        memories = {number: Memory(found[number], address(place)) for number, place in self.arguments.items()}
        call = self.primitive.bind(memories)
        return call.run, call

    @property
    def name(self) -> str:
        return self.primitive.implementation


__all__ = ["ArrayLaunch", "Call", "PrimitiveLaunch", "Recipe", "Supply"]
