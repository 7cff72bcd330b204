"""How the elements that a thread works on come into its registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from taso.backends.cudnn.sources.launches import OUTSIDE
from taso.backends.cudnn.sources.nests import Access, Nest, Parameters
from taso.backends.cudnn.sources.scalars import stored
from taso.graph.types import DType


class Fetch(Protocol):
    """Something that fills an array of V elements, those along the innermost loop from where the loops stand."""

    @property
    def dtype(self) -> DType: ...
    @property
    def computed(self) -> bool:
        """Whether it gives numbers as they are computed, not elements as they are stored."""
        ...

    @property
    def accesses(self) -> tuple[Access, ...]: ...
    @property
    def pinned(self) -> frozenset[int]:
        """The loops whose numbers it asks for."""
        ...

    @property
    def together(self) -> bool:
        """Whether all lanes are made at once, so that none of the pinned loops may be the innermost one."""
        ...

    def fill(self, nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        """Text that fills `array`, which is declared; `width` is how many lanes there are where there are several."""
        ...


def filled(nest: Nest, access: Access, pointer: str, width: int, array: str, more: str = "") -> str:
    """Text that reads along the innermost loop: one wide load where elements lie side by side, or one element.

    `more` is added to the place: V elements from there must not lie otherwise than the access says.
    """
    inner = nest.strides(access)[-1]
    place = f"{pointer} + {nest.offset(access)}{more}"
    if inner == 0:
        return f"repeated<V>(*({place}), {array});"
    if nest.steps_evenly(access, width):
        return f"load<V>({place}, {array});"
    return f"strided<V>({place}, {inner}, {array});"


def lanes(nest: Nest, lines: Sequence[str]) -> list[str]:
    """Text that runs once for each lane k."""
    inner = nest.inner
    body = [f"const I {nest.name(inner, lanes=True)} = {nest.name(inner)} + k;", *lines]
    return ["UNROLL for (int k = 0; k < V; ++k) {", *("    " + line for line in body), "}"]


@dataclass(frozen=True)
class Straight:
    """Elements at an affine place."""

    access: Access
    computed: bool = False
    together: bool = False
    pinned: frozenset[int] = frozenset()

    @property
    def dtype(self) -> DType:
        return self.access.dtype

    @property
    def accesses(self) -> tuple[Access, ...]:
        return (self.access,)

    def fill(self, nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        return [filled(nest, self.access, parameters.name(self.access.place, self.dtype), width, array)]


@dataclass(frozen=True)
class Lookup:
    """One number among the indices, and what it moves in the data: `size` is that of the axis it counts along."""

    indices: Access
    size: int
    stride: int


def looked_up(
    nest: Nest, parameters: Parameters, lookups: Sequence[Lookup], lane: bool
) -> tuple[list[str], str, str]:  # fmt: skip
    """Text that reads indices and reports one that points outside; whether all are inside; what they add to a place."""
    lines, inside, moved = [], [], ""
    for n, lookup in enumerate(lookups):
        pointer = parameters.name(lookup.indices.place, lookup.indices.dtype)
        read = f"widen({pointer}[{nest.offset(lookup.indices, lanes=lane)}])"
        lines.append(f"const i64 at{n} = place_of({read}, {lookup.size});")
        inside.append(f"at{n} >= 0")
        moved += f" + at{n} * {lookup.stride}"
    whole = " && ".join(inside)
    # in the memory of the host, where nobody writes as long as all is well
    lines.append(f"if (!({whole})) *{parameters.name(OUTSIDE, DType.UINT32, written=True)} = 1;")
    return lines, whole, moved


@dataclass(frozen=True)
class Looked:
    """Elements at an affine place moved by indices that are read; those that point outside read as 0, and are reported.

    A GPU cannot raise, and must not read what is not there.
    """

    access: Access
    lookups: tuple[Lookup, ...]
    computed: bool = False
    together: bool = False
    pinned: frozenset[int] = frozenset()

    @property
    def dtype(self) -> DType:
        return self.access.dtype

    @property
    def accesses(self) -> tuple[Access, ...]:
        return (self.access, *(x.indices for x in self.lookups))

    def fill(self, nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        pointer = parameters.name(self.access.place, self.dtype)
        together = all(nest.strides(x.indices)[-1] == 0 for x in self.lookups)
        lines, inside, moved = looked_up(nest, parameters, self.lookups, not together)
        if not together:
            read = f"{pointer}[{nest.offset(self.access, lanes=True)}{moved}]"
            return lanes(nest, [*lines, f"{array}[k] = {inside} ? {read} : {stored(self.dtype)}();"])
        wide = width if all(x.stride % width == 0 for x in self.lookups) else 1 << 30
        return [
            "{", *lines, f"if ({inside}) {filled(nest, self.access, pointer, wide, array, moved)}",
            f"else repeated<V>({stored(self.dtype)}(), {array});", "}",
        ]  # fmt: skip


@dataclass(frozen=True)
class Guarded:
    """Elements at an affine place where loops stand inside bounds (loop, first, end), and `otherwise` elsewhere."""

    access: Access
    bounds: tuple[tuple[int, int, int], ...]
    otherwise: str
    computed: bool = False
    together: bool = False

    @property
    def dtype(self) -> DType:
        return self.access.dtype

    @property
    def accesses(self) -> tuple[Access, ...]:
        return (self.access,)

    @property
    def pinned(self) -> frozenset[int]:
        return frozenset(loop for loop, _, _ in self.bounds)

    def fill(self, nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        pointer = parameters.name(self.access.place, self.dtype)
        along = any(nest.loop(loop) == nest.inner for loop, _, _ in self.bounds)
        tests = [f"{nest.at(x, along)} >= {low} && {nest.at(x, along)} < {end}" for x, low, end in self.bounds]
        inside = " && ".join(tests)
        if along:
            read = f"{pointer}[{nest.offset(self.access, lanes=True)}]"
            return lanes(nest, [f"{array}[k] = {inside} ? {read} : {self.otherwise};"])
        return [
            f"if ({inside}) {filled(nest, self.access, pointer, width, array)}",
            f"else repeated<V>({self.otherwise}, {array});",
        ]


@dataclass(frozen=True)
class Mapped:
    """Elements at an affine place moved by functions of loops: (loop, text of {0}, stride) for each."""

    access: Access
    maps: tuple[tuple[int, str, int], ...]
    computed: bool = False
    together: bool = False

    @property
    def dtype(self) -> DType:
        return self.access.dtype

    @property
    def accesses(self) -> tuple[Access, ...]:
        return (self.access,)

    @property
    def pinned(self) -> frozenset[int]:
        return frozenset(loop for loop, _, _ in self.maps)

    def fill(self, nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        pointer = parameters.name(self.access.place, self.dtype)
        along = any(nest.loop(loop) == nest.inner for loop, _, _ in self.maps)
        moved = "".join(f" + ({text.format(nest.at(x, along))}) * {stride}" for x, text, stride in self.maps)
        if along:
            return lanes(nest, [f"{array}[k] = {pointer}[{nest.offset(self.access, lanes=True)}{moved}];"])
        wide = width if all(stride % width == 0 for _, _, stride in self.maps) else 1 << 30
        return [filled(nest, self.access, pointer, wide, array, moved)]


@dataclass(frozen=True)
class Made:
    """Elements that text makes: `write` gives the lines, of a nest and of names of buffers, that fill an array.

    With `together` the text is for all lanes at once: none of the loops that it asks for may be the innermost one.
    """

    dtype: DType
    accesses: tuple[Access, ...]
    pinned: frozenset[int]
    write: Callable[[Nest, Parameters, int, str], list[str]]
    computed: bool = False
    together: bool = False

    def fill(self, nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        return self.write(nest, parameters, width, array)


__all__ = ["Fetch", "Guarded", "Looked", "Lookup", "Made", "Mapped", "Straight", "filled", "lanes", "looked_up"]
