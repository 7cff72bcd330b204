"""Kernels that only move elements, as pairs of arrays of one shape over the buffers: written once for all arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from taso.backends.lowering import Kernel, Operand, Step
from taso.backends.places import RESULT, ArraySpec, Place, logical_spec
from taso.graph.operator import Trait
from taso.graph.ops.movement import permutation, slice_ranges

Move = tuple[ArraySpec, ArraySpec]
"""Where elements are, and where they go."""


def moves(kernel: Kernel, place: Callable[[int], Place]) -> list[Move] | None:
    """The moves that make up a kernel, None where it is more than that; `place` says where an operand is."""
    if not kernel.steps:
        return [(_lies(place(0), kernel.operands[0]), _result(kernel, 0))]
    step = kernel.steps[0]
    make = _MOVES.get(step.op.name) if len(kernel.steps) == 1 and not step.op.domain else None
    if step.op.has(Trait.IDENTITY) and len(kernel.steps) == 1:
        make = _identity
    sources = [_lies(place(i), kernel.operands[i]) for i in step.inputs if i is not None]
    return None if make is None else make(kernel, step, sources)


def _lies(place: Place, operand: Operand) -> ArraySpec:
    return logical_spec(place, operand.type, operand.layout, 1)


def _result(kernel: Kernel, number: int) -> ArraySpec:
    return _lies(Place(RESULT, number), kernel.results[number])


def _identity(kernel: Kernel, step: Step, sources: Sequence[ArraySpec]) -> list[Move] | None:
    return [(sources[0], _result(kernel, 0))]


def _transpose(kernel: Kernel, step: Step, sources: Sequence[ArraySpec]) -> list[Move] | None:
    source = sources[0]
    order = permutation(len(source.shape), step.attrs)
    turned = replace(
        source, shape=tuple(source.shape[a] for a in order), strides=tuple(source.strides[a] for a in order)
    )
    return [(turned, _result(kernel, 0))]


def _slice(kernel: Kernel, step: Step, sources: Sequence[ArraySpec]) -> list[Move] | None:
    source = sources[0]
    for axis, (start, count, pace) in slice_ranges(kernel.operands[0].type, step.attrs).items():
        if pace < 0:
            return None
        source = _part(source, axis, start, count, pace)
    return [(source, _result(kernel, 0))]


def _split(kernel: Kernel, step: Step, sources: Sequence[ArraySpec]) -> list[Move] | None:
    axis, start, found = step.attrs.int("axis") % len(sources[0].shape), 0, list[Move]()
    for number in range(len(kernel.results)):
        target = _result(kernel, number)
        found.append((_part(sources[0], axis, start, target.shape[axis]), target))
        start += target.shape[axis]
    return found


def _concat(kernel: Kernel, step: Step, sources: Sequence[ArraySpec]) -> list[Move] | None:
    whole = _result(kernel, 0)
    axis, start, found = step.attrs.int("axis") % len(whole.shape), 0, list[Move]()
    for source in sources:
        found.append((source, _part(whole, axis, start, source.shape[axis])))
        start += source.shape[axis]
    return found


def _expand(kernel: Kernel, step: Step, sources: Sequence[ArraySpec]) -> list[Move] | None:
    source, target = sources[0], _result(kernel, 0)
    missing = len(target.shape) - len(source.shape)
    pairs = zip(source.shape, source.strides, target.shape[missing:], strict=True)
    strides = (0,) * missing + tuple(s if have == n else 0 for have, s, n in pairs)
    return [(replace(source, shape=target.shape, strides=strides), target)]


def _part(spec: ArraySpec, axis: int, start: int, count: int, pace: int = 1) -> ArraySpec:
    """Elements `start`, `start` + `pace`, … of an axis."""
    at = replace(spec.place, offset=spec.place.offset + start * spec.strides[axis])
    shape, strides = list(spec.shape), list(spec.strides)
    shape[axis], strides[axis] = count, strides[axis] * pace
    return replace(spec, place=at, shape=tuple(shape), strides=tuple(strides))


_MOVES: dict[str, Callable[[Kernel, Step, Sequence[ArraySpec]], list[Move] | None]] = {
    "Transpose": _transpose,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Expand": _expand,
}
