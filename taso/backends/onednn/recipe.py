"""Recipes: what a kernel launches, on which buffers; and their binding to addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from taso.backends.base import Array
from taso.backends.onednn.memory import Memory, MemoryDesc
from taso.backends.onednn.places import CONSTANT, OPERAND, RESULT, SCRATCH, ArraySpec, Block, Place
from taso.backends.onednn.primitives import Primitive

Call = Callable[[], object]
"""Runs something; a true result is an error status."""


class Supply(Protocol):
    """The constant operands of one kernel."""

    def array(self, operand: int) -> Array:
        """The values of constant operand number `operand`."""
        ...

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        """What `make` makes of a constant operand, made once per operand and label."""
        ...


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


@dataclass(frozen=True)
class ArrayLaunch:
    """A function of arrays (inputs, outputs), which lie in the kernel's buffers."""

    name: str
    function: Callable[[Sequence[Array], Sequence[Array]], object]
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]

    def bind(self, address: Callable[[Place], int]) -> tuple[Call, object]:
        inputs = [spec.at(address(spec.place)) for spec in self.inputs]
        outputs = [spec.at(address(spec.place)) for spec in self.outputs]
        function = self.function

        def run() -> None:
            function(inputs, outputs)

        return run, None


Launch = PrimitiveLaunch | ArrayLaunch


@dataclass
class Recipe:
    """A kernel made ready: launches in order, bytes of each scratch buffer, constants laid out.

    `shares` are operands whose buffer may be the result's too; `sums` are operands that can be added to in place by
    designing the kernel again for that.
    """

    launches: list[Launch] = field(default_factory=list)
    scratch: list[int] = field(default_factory=list)
    constants: list[Block] = field(default_factory=list)
    shares: frozenset[int] = frozenset()
    sums: tuple[int, ...] = ()

    def bind(
        self, operands: Sequence[int], results: Sequence[int], scratch: Sequence[int]
    ) -> list[tuple[Call, object]]:
        """Calls that run the kernel once, in order, on buffers at these addresses, each with what it needs alive."""
        table = {OPERAND: operands, RESULT: results, SCRATCH: scratch}

        def address(place: Place) -> int:
            own = place.kind == CONSTANT
            return (self.constants[place.index].address if own else table[place.kind][place.index]) + place.offset

        return [launch.bind(address) for launch in self.launches]

    def embed(self, other: Recipe, operands: Sequence[Place], results: Sequence[Place]) -> None:
        """Adds what another recipe launches, whose operands and results are these places of this one."""
        scratch, constants = len(self.scratch), len(self.constants)

        def moved(place: Place) -> Place:
            if place.kind in (SCRATCH, CONSTANT):
                return replace(place, index=place.index + (scratch if place.kind == SCRATCH else constants))
            home = (operands if place.kind == OPERAND else results)[place.index]
            return replace(home, offset=home.offset + place.offset)

        self.scratch += other.scratch
        self.constants += other.constants
        for launch in other.launches:
            if isinstance(launch, PrimitiveLaunch):
                given = {number: moved(place) for number, place in launch.arguments.items()}
                self.launches.append(replace(launch, arguments=given))
            else:
                read, made = (
                    tuple(replace(spec, place=moved(spec.place)) for spec in specs)
                    for specs in (launch.inputs, launch.outputs)
                )
                self.launches.append(replace(launch, inputs=read, outputs=made))

    def add_scratch(self, size: int) -> Place:
        self.scratch.append(size)
        return Place(SCRATCH, len(self.scratch) - 1)

    def add_constant(self, block: Block) -> Place:
        self.constants.append(block)
        return Place(CONSTANT, len(self.constants) - 1)
