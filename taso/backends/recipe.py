"""Recipes: what a kernel launches, on which buffers; and their binding to addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from taso.backends.base import Array
from taso.backends.places import CONSTANT, OPERAND, RESULT, SCRATCH, ArraySpec, Block, Place
from taso.graph.errors import BackendError

Call = Callable[[], object]
"""Runs something; a true result is an error status."""

BY_DEFINITION = "evaluated:"
"""How the names of launches begin that evaluate operators by their definitions."""


class NotInPlace(BackendError):
    """The kernel cannot add to an operand in place as it was asked to."""


class Supply(Protocol):
    """The constant operands of one kernel."""

    def array(self, operand: int) -> Array:
        """The values of constant operand number `operand`."""
        ...

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        """What `make` makes of a constant operand, made once per operand and label."""
        ...


class Launch(Protocol):
    """Something that a kernel runs on its buffers."""

    @property
    def name(self) -> str: ...

    def bind(self, address: Callable[[Place], int]) -> tuple[Call, object]:
        """What runs it on buffers at these addresses, and what has to be kept alive for that."""
        ...


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

    def add_scratch(self, size: int) -> Place:
        self.scratch.append(size)
        return Place(SCRATCH, len(self.scratch) - 1)

    def add_constant(self, block: Block) -> Place:
        self.constants.append(block)
        return Place(CONSTANT, len(self.constants) - 1)
