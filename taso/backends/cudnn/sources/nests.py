"""Loops over the elements of a result, and where each operand's element lies: strides, merged loops, widths."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from taso.backends.cudnn.sources.launches import Place
from taso.backends.cudnn.sources.scalars import stored
from taso.backends.lowering import BLOCKED, Operand, axes_of
from taso.backends.places import row_major_strides, strides_of
from taso.graph.types import DType, TensorType


@dataclass(frozen=True)
class Access:
    """Elements of a buffer at offset + Σ strides · loops, in elements."""

    place: Place
    dtype: DType
    strides: tuple[int, ...]
    offset: int = 0


def lies_in_strides(operand: Operand) -> bool:
    """Whether the operand lies in a layout that strides describe."""
    return operand.layout != BLOCKED


def operand_strides(operand: Operand) -> tuple[int, ...]:
    return strides_of(operand.type.static_shape, operand.layout)


def memory_order(operand: Operand) -> list[int]:
    """The axes of a tensor, outermost in memory first."""
    return list(axes_of(operand.layout, operand.type.rank))


def broadcast_strides(operand: Operand, dims: Sequence[int]) -> tuple[int, ...] | None:
    """Strides by which an operand is read along the axes of what it broadcasts to, None where it does not."""
    own, missing = operand.type.static_shape, len(dims) - operand.type.rank
    if missing < 0 or any(n not in (1, dims[missing + a]) for a, n in enumerate(own)):
        return None
    return (0,) * missing + tuple(s if n > 1 else 0 for n, s in zip(own, operand_strides(operand), strict=True))


def channel_strides(t: TensorType, dims: Sequence[int], axis: int) -> tuple[int, ...] | None:
    """Strides of a vector with one number for each position along `axis`; of a single number all are 0."""
    if t.size == 1 and t.rank <= 1:
        return (0,) * len(dims)
    if t.static_shape != (dims[axis],):
        return None
    return tuple(int(a == axis) for a in range(len(dims)))


_NARROW = 1 << 30
"""Places below this are numbers of 32 bits, and so are those a step of the whole grid behind them."""


class Nest:
    """Loops, outermost first, with neighbours merged wherever every access runs through both without a jump.

    `pinned` are loops whose number itself is asked for: they stay alone. In text a loop's number is `l<n>`, and in a
    loop over `V` lanes, where the innermost stands for V numbers, `j<n>` of that one. Loops from number `cut` on are
    apart from those before: `outer` says how many these are once merged.
    """

    def __init__(
        self, extents: Sequence[int], accesses: Sequence[Access], pinned: Collection[int] = (), cut: int = 0
    ) -> None:
        groups: list[list[int]] = []
        for loop, extent in enumerate(extents):
            if extent == 1:
                continue
            before = groups[-1][-1] if groups else loop
            apart = before == loop or before < cut <= loop or loop in pinned or before in pinned
            if not apart and all(a.strides[before] == a.strides[loop] * extent for a in accesses):
                groups[-1].append(loop)
            else:
                groups.append([loop])
        self.outer = sum(group[-1] < cut for group in groups)
        # what has no loop that moves still has one
        still = self.outer == len(groups)
        self.extents = [math.prod(extents[x] for x in group) for group in groups] + [1] * still
        self._places = {group[-1]: n for n, group in enumerate(groups)}
        self._strides = {a: (*(a.strides[group[-1]] for group in groups), *(0,) * still) for a in accesses}
        reach = [a.offset + sum(max(s * (n - 1), 0) for s, n in zip(a.strides, extents, strict=True)) for a in accesses]
        self.wide_index = max(math.prod(extents), *reach, 0) >= _NARROW

    @property
    def inner(self) -> int:
        return len(self.extents) - 1

    @property
    def size(self) -> int:
        return math.prod(self.extents)

    @property
    def index_type(self) -> str:
        """Thirty-two bits wherever they are enough: a division by a constant is then a few instructions."""
        return "i64" if self.wide_index else "i32"

    def strides(self, access: Access) -> tuple[int, ...]:
        """Strides along the merged loops."""
        return self._strides[access]

    def loop(self, given: int) -> int | None:
        """The number of the merged loop that a pinned one is, None where it never moves."""
        return self._places.get(given)

    def at(self, given: int, lanes: bool = False) -> str:
        """The number of a pinned loop as text."""
        found = self._places.get(given)
        return "0" if found is None else self.name(found, lanes)

    def name(self, loop: int, lanes: bool = False) -> str:
        return f"{'j' if lanes and loop == self.inner else 'l'}{loop}"

    def offset(self, access: Access, lanes: bool = False) -> str:
        """Where the access stands, as text."""
        terms = [_term(self.name(n, lanes), s) for n, s in enumerate(self._strides[access]) if s]
        if access.offset or not terms:
            terms.append(str(access.offset))
        return " + ".join(terms)

    def steps_evenly(self, access: Access, width: int) -> bool:
        """Whether `width` elements along the innermost loop lie side by side, at multiples of their size."""
        *outer, inner = self._strides[access]
        return inner == 1 and all(s % width == 0 for s in (*outer, access.offset))

    def decoded(self, count: str, width: str = "1", loops: Sequence[int] | None = None) -> list[str]:
        """Text that takes a running number apart into the numbers of loops, the innermost `width` at a time."""
        order = list(range(len(self.extents))) if loops is None else list(loops)
        if not order:
            return []
        if len(order) == 1:
            return [f"const I {self.name(order[0])} = {_times(count, width)};"]
        lines = [f"I rest = {_times(count, width)};"]
        for loop in reversed(order[1:]):
            lines.append(f"const I {self.name(loop)} = rest % {self.extents[loop]}; rest /= {self.extents[loop]};")
        lines.append(f"const I {self.name(order[0])} = rest;")
        return lines


def _term(name: str, stride: int) -> str:
    return name if stride == 1 else f"{name} * {stride}"


def _times(count: str, width: str) -> str:
    return count if width == "1" else f"{count} * {width}"


class Parameters:
    """The buffers of one kernel by the names that they have in its text."""

    def __init__(self) -> None:
        self._held: dict[Place, tuple[str, DType, bool]] = {}
        self.aliased: set[Place] = set()

    def name(self, place: Place, dtype: DType, written: bool = False) -> str:
        """The pointer to a buffer's first element."""
        found = self._held.get(place)
        if found is None:
            name = f"{'r' if written else 'p'}{len(self._held)}"
            self._held[place] = (name, dtype, written)
            return name
        if found[1] is not dtype or written and not found[2]:
            raise ValueError(f"{place} is asked for as {dtype.name} and was {found[1].name}")
        return found[0]

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._held)

    @property
    def declared(self) -> str:
        parts = []
        for place, (name, dtype, written) in self._held.items():
            restrict = "" if place in self.aliased else " __restrict__"
            parts.append(f"{'' if written else 'const '}{stored(dtype)}*{restrict} {name}")
        return ", ".join(parts)

    @property
    def passed(self) -> str:
        return ", ".join(name for name, _, _ in self._held.values())


__all__ = [
    "Access", "Nest", "Parameters", "broadcast_strides", "channel_strides", "lies_in_strides", "memory_order",
    "operand_strides", "row_major_strides",
]  # fmt: skip
