"""oneDNN's primitives as launches of a recipe (`taso.backends.recipe`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from taso.backends.onednn.memory import Memory, MemoryDesc
from taso.backends.onednn.primitives import Primitive
from taso.backends.places import CONSTANT, OPERAND, SCRATCH, Place
from taso.backends.recipe import ArrayLaunch, Call, Recipe, Supply
from taso.backends.x86.launch import CodeLaunch
from taso.graph.errors import BackendError


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


def embed(recipe: Recipe, other: Recipe, operands: Sequence[Place], results: Sequence[Place]) -> None:
    """Adds to `recipe` what another one launches, whose operands and results are these places of it."""
    scratch, constants = len(recipe.scratch), len(recipe.constants)

    def moved(place: Place) -> Place:
        if place.kind in (SCRATCH, CONSTANT):
            return replace(place, index=place.index + (scratch if place.kind == SCRATCH else constants))
        home = (operands if place.kind == OPERAND else results)[place.index]
        return replace(home, offset=home.offset + place.offset)

    recipe.scratch += other.scratch
    recipe.constants += other.constants
    for launch in other.launches:
        if isinstance(launch, PrimitiveLaunch):
            given = {number: moved(place) for number, place in launch.arguments.items()}
            recipe.launches.append(replace(launch, arguments=given))
        elif isinstance(launch, ArrayLaunch):
            read, made = (
                tuple(replace(spec, place=moved(spec.place)) for spec in specs)
                for specs in (launch.inputs, launch.outputs)
            )
            recipe.launches.append(replace(launch, inputs=read, outputs=made))
        elif isinstance(launch, CodeLaunch):
            recipe.launches.append(launch.moved(moved))
        else:
            raise BackendError(f"{launch.name} is no launch of oneDNN's")


__all__ = ["ArrayLaunch", "Call", "PrimitiveLaunch", "Recipe", "Supply", "embed"]
