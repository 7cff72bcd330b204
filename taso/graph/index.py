"""Index notation: what an operator *is*, as one sum over indices, and its evaluation.

A `Meaning` says for every element of an output which elements of the inputs it is made of. It is written once per
operator; evaluation in floating point and modulo a prime are derived from it here, and so is anything symbolic.
The notation follows the usual tensor index notation (output loops, reduction loops, affine accesses).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, Union

import numpy as np
from numpy.typing import NDArray

from taso.graph.errors import GraphError
from taso.graph.types import Dim

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Loop:
    """An index that runs from 0 to extent − 1."""

    name: str
    extent: Dim


@dataclass(frozen=True)
class Affine:
    """Σ coefficient · loop + constant."""

    terms: tuple[tuple[str, Dim], ...]
    constant: Dim = 0

    def __add__(self, other: Affine | Dim) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.terms, self.constant + other)
        summed = dict(self.terms)
        for name, coefficient in other.terms:
            summed[name] = summed.get(name, 0) + coefficient
        return Affine(tuple(summed.items()), self.constant + other.constant)

    def __mul__(self, factor: Dim) -> Affine:
        return Affine(tuple((n, c * factor) for n, c in self.terms), self.constant * factor)


def at(loop: Loop | str, coefficient: Dim = 1, offset: Dim = 0) -> Affine:
    """The access coefficient · loop + offset."""
    return Affine(((loop if isinstance(loop, str) else loop.name, coefficient),), offset)


ZERO = Affine(())


@dataclass(frozen=True)
class Read:
    """Element `index` of input number `input`; positions outside the tensor read as `fill`.

    `fill` is "zero", "least" (below every value) or None where no position lies outside.
    """

    input: int
    index: tuple[Affine, ...]
    fill: str | None = None


@dataclass(frozen=True)
class Flat:
    """Element number `offset` of input number `input`, counted row by row."""

    input: int
    offset: Affine


@dataclass(frozen=True)
class Inside:
    """1 where `index` lies inside input number `input`, else 0; `input` None stands for a tensor of one element."""

    input: int | None
    index: tuple[Affine, ...]


def same(*pairs: tuple[Affine, Affine]) -> Inside:
    """1 where the accesses of each pair are the same number, else 0."""
    return Inside(None, tuple(left + right * -1 for left, right in pairs))


@dataclass(frozen=True)
class Const:
    value: Fraction


@dataclass(frozen=True)
class Call:
    """A scalar function of `SCALAR_FUNCTIONS` applied element by element."""

    function: str
    args: tuple[Expr, ...]


@dataclass(frozen=True)
class Reduce:
    """Σ, max, min or Π ("sum", "max", "min", "prod") of `body` over `loops`."""

    kind: str
    loops: tuple[Loop, ...]
    body: Expr


@dataclass(frozen=True)
class Pick:
    """Pieces side by side along an output loop; within each piece the loop counts from 0 again."""

    loop: str
    pieces: tuple[tuple[Dim, Expr], ...]


Expr = Union[Read, Flat, Inside, Const, Call, Reduce, Pick]


@dataclass(frozen=True)
class Meaning:
    """An output: per axis the loops that, flattened in order, run along it, and the element's expression."""

    axes: tuple[tuple[Loop, ...], ...]
    body: Expr

    @property
    def loops(self) -> tuple[Loop, ...]:
        return tuple(loop for axis in self.axes for loop in axis)


class Numbers(Protocol):
    """A domain to evaluate in."""

    def constant(self, value: Fraction) -> Array: ...
    def least(self) -> object: ...
    def call(self, function: str, args: Sequence[Array]) -> Array: ...
    def reduce(self, kind: str, array: Array, axes: tuple[int, ...]) -> Array: ...
    def matmul(self, left: Array, right: Array) -> Array: ...


def evaluate(meaning: Meaning, inputs: Sequence[Array | None], numbers: Numbers) -> Array:
    """The output that `meaning` describes, from arrays already in the domain `numbers`.

    All extents must be integers. Raises `GraphError` where one is symbolic.
    """
    scope = {loop.name: _number(loop.extent) for loop in meaning.loops}
    array = _expression(meaning.body, scope, inputs, numbers)
    full = np.broadcast_to(array, tuple(scope.values()))
    return full.reshape([_extent(axis) for axis in meaning.axes])


def _extent(axis: tuple[Loop, ...]) -> int:
    total = 1
    for loop in axis:
        total *= _number(loop.extent)
    return total


def _number(dim: Dim) -> int:
    if not isinstance(dim, int):
        raise GraphError(f"dimension {dim} must be known in numbers to evaluate")
    return dim


Scope = Mapping[str, int]


def _expression(expr: Expr, scope: Scope, inputs: Sequence[Array | None], numbers: Numbers) -> Array:
    """An array with one axis per loop of `scope` (extent 1 where the expression does not depend on it)."""
    if isinstance(expr, Const):
        return np.asarray(numbers.constant(expr.value)).reshape((1,) * len(scope))
    if isinstance(expr, Read):
        return _read(_given(inputs, expr.input), expr.index, scope, _fill(expr.fill, numbers))
    if isinstance(expr, Inside):
        return _read(_ones(expr, inputs, numbers), expr.index, scope, 0)
    if isinstance(expr, Flat):
        flat = _given(inputs, expr.input).reshape(-1)
        return _read(flat, (expr.offset,), scope, None)
    if isinstance(expr, Call):
        return numbers.call(expr.function, [_expression(a, scope, inputs, numbers) for a in expr.args])
    if isinstance(expr, Pick):
        return _pick(expr, scope, inputs, numbers)
    return _reduce(expr, scope, inputs, numbers)


def _ones(expr: Inside, inputs: Sequence[Array | None], numbers: Numbers) -> Array:
    if expr.input is None:
        return np.asarray(numbers.constant(Fraction(1))).reshape((1,) * len(expr.index))
    return np.ones_like(_given(inputs, expr.input))


def _given(inputs: Sequence[Array | None], position: int) -> Array:
    array = inputs[position]
    if array is None:
        raise GraphError(f"input {position} is missing")
    return array


def _fill(fill: str | None, numbers: Numbers) -> object:
    return None if fill is None else numbers.least() if fill == "least" else 0


def _read(array: Array, index: tuple[Affine, ...], scope: Scope, fill: object) -> Array:
    """A strided view of `array`, padded with `fill` as far as the accesses reach out."""
    used = {name for affine in index for name, _ in affine.terms}
    if any(scope[name] == 0 for name in used):
        return np.zeros([scope[n] if n in used else 1 for n in scope], array.dtype)
    pads, starts = [], []
    for axis, affine in zip(range(array.ndim), index, strict=True):
        low, high = _range(affine, scope)
        before, after = max(0, -low), max(0, high - array.shape[axis] + 1)
        if (before or after) and fill is None and high >= low:
            raise GraphError(f"index {affine} leaves the range 0…{array.shape[axis] - 1}")
        pads.append((before, after))
        starts.append(_number(affine.constant) + before)
    if any(before or after for before, after in pads):
        array = np.pad(array, pads, constant_values=fill)  # type: ignore[call-overload]  # fill is a scalar
    return _strided(array, index, starts, scope)


def _range(affine: Affine, scope: Scope) -> tuple[int, int]:
    low = high = _number(affine.constant)
    for name, coefficient in affine.terms:
        span = _number(coefficient) * (scope[name] - 1)
        low, high = low + min(span, 0), high + max(span, 0)
    return low, high


def _strided(array: Array, index: tuple[Affine, ...], starts: list[int], scope: Scope) -> Array:
    strides = dict.fromkeys(scope, 0)
    used: set[str] = set()
    for axis, affine in enumerate(index):
        for name, coefficient in affine.terms:
            strides[name] += _number(coefficient) * array.strides[axis]
            used.add(name)
    shape = [scope[n] if n in used else 1 for n in scope]
    if 0 in shape or array.size == 0:
        return np.zeros(shape, array.dtype)
    origin = array[tuple(slice(s, None) for s in starts)]
    return np.lib.stride_tricks.as_strided(origin, shape, [strides[n] for n in scope], writeable=False)


def _pick(expr: Pick, scope: Scope, inputs: Sequence[Array | None], numbers: Numbers) -> Array:
    axis = list(scope).index(expr.loop)
    parts = []
    for extent, piece in expr.pieces:
        inner = {**scope, expr.loop: _number(extent)}
        part = _expression(piece, inner, inputs, numbers)
        shape = list(part.shape)
        shape[axis] = _number(extent)
        parts.append(np.broadcast_to(part, shape))
    common = np.broadcast_shapes(*(p.shape[:axis] + (1,) + p.shape[axis + 1 :] for p in parts))
    full = [np.broadcast_to(p, common[:axis] + (p.shape[axis],) + common[axis + 1 :]) for p in parts]
    return np.concatenate(full, axis)


def _reduce(expr: Reduce, scope: Scope, inputs: Sequence[Array | None], numbers: Numbers) -> Array:
    inner = {**scope, **{loop.name: _number(loop.extent) for loop in expr.loops}}
    if len(inner) != len(scope) + len(expr.loops):
        raise GraphError(f"a sum over {[loop.name for loop in expr.loops]} reuses the name of a loop around it")
    axes = tuple(range(len(scope), len(inner)))
    if expr.kind == "sum" and isinstance(expr.body, Call) and expr.body.function == "mul":
        left, right = (_expression(a, inner, inputs, numbers) for a in expr.body.args)
        return _contract(left, right, list(inner.values()), axes, numbers)
    body = _expression(expr.body, inner, inputs, numbers)
    shape = [inner[n] if axis in axes else body.shape[axis] for axis, n in enumerate(inner)]
    return numbers.reduce(expr.kind, np.broadcast_to(body, shape), axes)


def _contract(left: Array, right: Array, extents: list[int], summed: tuple[int, ...], numbers: Numbers) -> Array:
    """Σ over the axes `summed` of left · right, as one batched matrix product."""
    both: list[int] = []
    only_left: list[int] = []
    only_right: list[int] = []
    inner: list[int] = []
    for axis in range(left.ndim):
        a, b = left.shape[axis], right.shape[axis]
        if axis in summed:
            inner.append(axis)
        elif a == b:
            both.append(axis)
        else:
            (only_right if a == 1 else only_left).append(axis)
    extents = [
        full if axis in summed else left.shape[axis] if right.shape[axis] == 1 else right.shape[axis]
        for axis, full in enumerate(extents)
    ]
    a = _as_matrix(left, both, only_left, inner, extents)
    b = _as_matrix(right, both, only_right, inner, extents)
    result = numbers.matmul(a, np.swapaxes(b, 1, 2))
    order = both + only_left + only_right
    shaped = result.reshape([extents[axis] for axis in order])
    kept = sorted(order)
    return np.transpose(shaped, [order.index(axis) for axis in kept])


def _as_matrix(array: Array, both: list[int], own: list[int], inner: list[int], extents: list[int]) -> Array:
    order = both + own + inner
    rest = [axis for axis in range(array.ndim) if axis not in order]
    moved = np.transpose(array, rest + order).reshape([array.shape[a] for a in order])
    full = [extents[a] for a in order]
    sizes = [int(np.prod([extents[a] for a in part], dtype=np.int64)) for part in (both, own, inner)]
    return np.broadcast_to(moved, full).reshape(sizes)
