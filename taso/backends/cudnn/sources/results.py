"""The loops over a kernel's result, and how what an anchor makes goes through the steps behind it into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from taso.backends.cudnn.sources.chains import Chain, chain
from taso.backends.cudnn.sources.fetches import Fetch, Made, lanes
from taso.backends.cudnn.sources.launches import Place, Sourced
from taso.backends.cudnn.sources.nests import Access, Nest, Parameters, memory_order, operand_strides
from taso.backends.cudnn.sources.sections import Section, launches
from taso.backends.lowering import Kernel, Operand
from taso.backends.places import OPERAND, RESULT
from taso.graph.types import DType


@dataclass(frozen=True)
class LoopOf:
    """A loop over part of an axis: the index along the axis is the sum of step · loop over its loops."""

    extent: int
    axis: int
    step: int = 1


@dataclass(frozen=True)
class Loops:
    """Loops over all elements of a tensor, outermost in memory first."""

    loops: tuple[LoopOf, ...]

    @staticmethod
    def of(operand: Operand, split: dict[int, int] | None = None) -> Loops:
        """One loop for each axis; an axis in `split` has two, the inner one of that extent."""
        dims, found = operand.type.static_shape, []
        for axis in memory_order(operand):
            inner = (split or {}).get(axis)
            if inner is None:
                found.append(LoopOf(dims[axis], axis))
            else:
                found += [LoopOf(dims[axis] // inner, axis, inner), LoopOf(inner, axis)]
        return Loops(tuple(found))

    @cached_property
    def extents(self) -> tuple[int, ...]:
        return tuple(x.extent for x in self.loops)

    def strides(self, by_axis: Sequence[int]) -> tuple[int, ...]:
        """Strides along loops from those along axes."""
        return tuple(by_axis[x.axis] * x.step for x in self.loops)

    def number(self, axis: int) -> int:
        """The loop of an axis that is not split."""
        return next(n for n, x in enumerate(self.loops) if x.axis == axis)


def operand_access(kernel: Kernel, index: int, strides: tuple[int, ...], offset: int = 0) -> Access:
    return Access(Place(OPERAND, index), kernel.operands[index].type.dtype, strides, offset)


def result_access(kernel: Kernel, loops: Loops, index: int = 0, offset: int = 0) -> Access:
    result = kernel.results[index]
    return Access(Place(RESULT, index), result.type.dtype, loops.strides(operand_strides(result)), offset)


def steps_behind(kernel: Kernel, loops: Loops, first: int = 1) -> tuple[Chain | None, list[Fetch]] | None:
    """The steps from `first` on and how their operands are read; None where they are not covered."""
    if len(kernel.steps) <= first:
        return None, []
    found = chain(kernel, first)
    reads = None if found is None else found.fetches(kernel, [x.axis for x in loops.loops])
    if reads is None:
        return None
    steps = [x.step for x in loops.loops]
    scaled: list[Fetch] = [
        type(r)(Access(r.access.place, r.dtype, tuple(s * n for s, n in zip(r.access.strides, steps, strict=True))))
        for r in reads
    ]
    return found, scaled


def made_of(name: str, kernel: Kernel, head: Fetch, loops: Loops, tables: str = "") -> Sourced | None:
    """The kernel whose anchor `head` fetches, element by element, with the steps behind it."""
    behind = steps_behind(kernel, loops)
    if behind is None:
        return None
    steps, reads = behind
    target = result_access(kernel, loops)
    section = Section(loops.extents, (head, *reads), target, steps, head=True, tables=tables)
    return Sourced(tuple(launches(name, [section])))


def one_by_one(
    dtype: DType, accesses: Sequence[Access], pinned: frozenset[int],
    text: Callable[[Nest, Parameters], tuple[list[str], str]], computed: bool = False,
) -> Made:  # fmt: skip
    """A fetch of elements that `text` makes one by one (statements, then an expression) of numbers of loops."""

    def write(nest: Nest, parameters: Parameters, width: int, array: str) -> list[str]:
        lines, value = text(nest, parameters)
        return lanes(nest, [*lines, f"{array}[k] = {value};"])

    return Made(dtype, tuple(accesses), pinned, write, computed)


__all__ = ["LoopOf", "Loops", "made_of", "one_by_one", "operand_access", "result_access", "steps_behind"]
