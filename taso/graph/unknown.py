"""Numbers that are not known: what the definitions of operators meet when someone reasons about all values at once.

Type rules and meanings are written for integers and floats. Whoever reasons about every size hands them objects of
these classes, whose arithmetic and comparisons are the reasoner's; the definitions need not know.
"""

from __future__ import annotations

from fractions import Fraction

# what an unknown is worth to code that evades its arithmetic (range(), a tuple's length, …): such code fails, and a
# result that it leaves behind is told from a number by its size
IMPOSSIBLE = 1 << 400


class UnknownInteger(int):
    """An integer of which only some facts are known. As a plain `int` it is worth nothing (`IMPOSSIBLE`)."""

    def broadcast_with(self, other: int) -> int:
        """What broadcasting this size and another one gives; raises `GraphError` where they cannot meet."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """How far a broadcast read moves along an axis of this size: 0 where it is 1, else 1."""
        raise NotImplementedError


class UnknownFraction(Fraction):
    """The exact value of an unknown real; of its own it only has a name."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, name: str) -> UnknownFraction:
        self = super().__new__(cls, IMPOSSIBLE)
        self.name = name
        return self


class UnknownReal(float):
    """A float attribute of which nothing is known but its name, and some numbers that it is not."""

    def __new__(cls, name: str, other_than: tuple[float, ...] = ()) -> UnknownReal:
        self = super().__new__(cls, "nan")
        self.name = name
        self.other_than = other_than
        return self

    name: str
    other_than: tuple[float, ...]

    @property
    def exact(self) -> UnknownFraction:
        return UnknownFraction(self.name)


def is_number(value: int) -> bool:
    """Whether an integer is one that a definition computed, and no remains of an unknown."""
    return abs(value) < IMPOSSIBLE >> 200
