"""Pieces that the blocks of several operators share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from taso.graph.errors import DimensionMismatch, GraphError, ShapeError
from taso.graph.index import Affine, Expr, Loop, Read, at
from taso.graph.operator import (
    Array,
    Attrs,
    AttrValue,
    FileNode,
    Required,
    Spelling,
    Types,
    Unmodelled,
    Unspellable,
    WriteFunction,
)  # fmt: skip
from taso.graph.types import Dim, DType, Shape, TensorType, larger, show_shape
from taso.graph.unknown import UnknownInteger


def present(types: Types, position: int, op: str) -> TensorType:
    """The type of an input that must be there, with known rank."""
    found = types[position] if position < len(types) else None
    if found is None:
        raise GraphError(f"{op} needs its input {position}")
    if found.shape is None:
        raise ShapeError(f"{op}: the rank of input {position} is unknown")
    return found


def require_rank(t: TensorType, rank: int, op: str, what: str) -> None:
    if t.rank != rank:
        raise ShapeError(f"{op}: {what} must have {rank} dimensions, but its shape is {show_shape(t.shape)}")


def require_equal(left: Dim, right: Dim, op: str, what: str) -> None:
    """Raises `DimensionMismatch` unless the two dimensions are equal for every value of their symbols."""
    if left != right:
        raise DimensionMismatch(f"{op}: {what} differ: {left} and {right}", left, right)


def require_same_dtype(types: Types, op: str) -> None:
    """Raises `ShapeError` unless all present inputs have one element type."""
    given = [(i, t.dtype) for i, t in enumerate(types) if t is not None]
    for position, dtype in given[1:]:
        if dtype is not given[0][1]:
            first = given[0][1].name
            raise ShapeError(f"{op}: input 0 is {first} and input {position} is {dtype.name}; they must agree")


def normal_axis(axis: int, rank: int, op: str) -> int:
    """`axis` counted from the front; raises `ShapeError` outside −rank … rank − 1."""
    if not -rank <= axis < rank:
        raise ShapeError(f"{op}: axis {axis} is outside a tensor of {rank} dimensions")
    return axis % rank


def normal_axes(axes: Sequence[int], rank: int, op: str) -> tuple[int, ...]:
    normal = tuple(normal_axis(a, rank, op) for a in axes)
    if len(set(normal)) != len(normal):
        raise ShapeError(f"{op}: an axis is named twice in {tuple(axes)}")
    return normal


def broadcast(shapes: Sequence[Shape], op: str) -> Shape:
    """NumPy's broadcasting; raises `DimensionMismatch` where two sizes can never meet."""
    rank = max(len(s) for s in shapes)
    result: list[Dim] = []
    for axis in range(rank):
        dim: Dim = 1
        for shape in shapes:
            position = axis - rank + len(shape)
            if position >= 0:
                dim = _broadcast_dim(dim, shape[position], op, shapes)
        result.append(dim)
    return tuple(result)


def _broadcast_dim(a: Dim, b: Dim, op: str, shapes: Sequence[Shape]) -> Dim:
    if isinstance(a, UnknownInteger):
        return a.broadcast_with(b) if isinstance(b, int) else b
    if isinstance(b, UnknownInteger):
        return b.broadcast_with(a) if isinstance(a, int) else a
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int) and isinstance(b, int):
        shown = " and ".join(show_shape(s) for s in shapes)
        raise DimensionMismatch(f"{op}: shapes {shown} do not broadcast", a, b)
    # a number above 1 met by a symbol: the symbol is that number or 1
    return a if isinstance(a, int) else b if isinstance(b, int) else larger(a, b)


def output_loops(shape: Shape) -> tuple[Loop, ...]:
    return tuple(Loop(f"i{axis}", dim) for axis, dim in enumerate(shape))


def single_axes(loops: Sequence[Loop]) -> tuple[tuple[Loop, ...], ...]:
    return tuple((loop,) for loop in loops)


def broadcast_read(position: int, t: TensorType, loops: Sequence[Loop]) -> Expr:
    """Reads an input that broadcasts to the output's loops."""
    offset = len(loops) - t.rank
    return Read(position, tuple(broadcast_index(dim, loops[offset + axis]) for axis, dim in enumerate(t.dims)))


def broadcast_index(dim: Dim, loop: Loop) -> Affine:
    """Where a broadcast read stands along an axis of size `dim`."""
    if isinstance(dim, UnknownInteger):
        return at(loop, dim.step)
    if dim == 1 and (isinstance(loop.extent, UnknownInteger) or loop.extent != 1):
        return Affine(())
    return at(loop)


def small_ints(node: FileNode, position: int) -> tuple[int, ...]:
    """A constant integer vector (or scalar) input; raises `Unmodelled` where it is not constant."""
    return int_tuple(node.needs(position))


def int_tuple(array: Array) -> tuple[int, ...]:
    return tuple(int(v) for v in np.asarray(array).reshape(-1).tolist())


def only_attributes(node: FileNode, *names: str) -> None:
    """Raises `Unmodelled` where the file has an attribute that this reading would lose."""
    extra = sorted(set(node.attrs) - set(names))
    if extra:
        raise Unmodelled(f"{node.op_type} with attribute {extra[0]}")


def one_output(node: FileNode) -> None:
    """Raises `Unmodelled` where a second output is in use."""
    if any(node.outputs[1:]):
        raise Unmodelled(f"{node.op_type} with a second output")


def same_as_first(op: str, rank: int = 0) -> Callable[[Types, Attrs], tuple[TensorType, ...]]:
    """The type rule of what keeps the type of its first input, which must have at least `rank` dimensions."""

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = present(types, 0, op)
        if x.rank < rank:
            shown = show_shape(x.shape)
            raise ShapeError(f"{op}: the input must have at least {rank} dimensions, but its shape is {shown}")
        return (x,)

    return infer


def is_given(types: Types, position: int) -> bool:
    """Whether an optional input is there."""
    return position < len(types) and types[position] is not None


def writes_changed(
    op: str, defaults: Mapping[str, AttrValue | Required], since: Mapping[str, int] | None = None
) -> WriteFunction:
    """Writes the attributes that are not at their default, and every input as it is.

    `since` gives the first opset of an attribute that the operator did not have from the start; raises `Unspellable`
    where an older one would have to say it.
    """

    def write(attrs: Attrs, types: Types, opset: int) -> Spelling:
        said = {n: v for n, v in attrs.items() if isinstance(defaults[n], Required) or v != defaults[n]}
        for name in said:
            if opset < (since or {}).get(name, 1):
                raise Unspellable(f"{op} with the attribute '{name}' cannot be written in ONNX opset {opset}")
        return Spelling(op, said, tuple(i if t is not None else None for i, t in enumerate(types)))

    return write


def element_type(value: AttrValue, op: str) -> DType | None:
    """An attribute that holds the number of an element type, None where it says nothing (0 or absent)."""
    if not value:
        return None
    if not isinstance(value, int) or value not in {d.value for d in DType}:
        raise Unmodelled(f"{op} with the element type {value!r}")
    return DType(value)
