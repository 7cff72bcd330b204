"""Operators beyond TASO's: what each makes of small tensors, and how it is written in a rule.

They are written as operators of TASO's format with numbers that the format leaves free; `Statement` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from taso.rules.expression import Binary, Call, Literal, Name, Tuple, literal
from taso.rules.generator import arithmetic
from taso.rules.generator.arithmetic import PRIME, Values
from taso.rules.generator.templates import (
    AXIS,
    IMAGE,
    RANK,
    Shape,
    Template,
    as_function,
    first,
    multiplied,
    reduced,
    same,
)  # fmt: skip
from taso.rules.taso_files import READERS, Conversion, Operand, PublishedOperator, Reader, Side, take

_SUB, _DIV, _EXP, _SUM, _MEAN, _SOFTMAX, _BATCHED, _STACKED, _MERGE, _DEPTHWISE, _SWAP = range(100, 111)
_COLUMNS = {"Sub": 121, "Mul": 122, "Div": 123}


def _divide(a: Values, b: Values) -> Values:
    return np.asarray(a * arithmetic.inverse(b))


def _named(name: str) -> Reader:
    """Reads an element-wise operator of two operands of one shape."""
    return lambda c, side, op, inputs: c.elementwise(side, op, inputs, name)


def _function(name: str) -> Reader:
    def read(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        (x,) = take(op, inputs, 1)
        return c.emit(side, name, [x], {}, x.dims, x.joins)

    return read


SUB = Template("sub", 2, same, partial(reduced, np.subtract), _SUB, undone=partial(reduced, np.add))
DIV = Template("div", 2, same, partial(reduced, _divide), _DIV, undone=partial(reduced, np.multiply))
EXP = as_function("exp", _EXP)


# ── a column beside each row ─────────────────────────────────────────────────────────────────────────────────────


def _beside(a: Shape, column: Shape) -> Shape | None:
    return a if len(a) == 2 and a[1] > 1 and column == (a[0], 1) else None


def _column(
    name: str, of: Callable[[Values, Values], Values], undone: Callable[[Values, Values], Values] | None = None
) -> Template:  # fmt: skip
    """An element-wise operator of a matrix and one number for each of its rows."""
    without = None if undone is None else partial(reduced, undone)
    label = f"{name.lower()}.column"
    return Template(label, 2, _beside, partial(reduced, of), _COLUMNS[name], {RANK: 2}, undone=without)


def _read_column(name: str) -> Reader:
    def read(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        x, column = take(op, inputs, 2)
        c.equal_dtypes([x, column], given=side.is_source)
        c.equate(column.shape[0], x.shape[0], given=False)
        c.equate(column.shape[1], 1, given=False)
        return c.emit(side, name, [x, column], {}, x.dims)

    return read


SUB_COLUMN = _column("Sub", np.subtract, np.add)
MUL_COLUMN = _column("Mul", np.multiply)
DIV_COLUMN = _column("Div", _divide, np.multiply)


# ── reductions along rows ────────────────────────────────────────────────────────────────────────────────────────


def _row_shape(a: Shape) -> Shape | None:
    return (a[0], 1) if len(a) == 2 and a[1] > 1 else None


def _row_sum(a: Values) -> Values:
    return np.asarray(a.sum(2, keepdims=True))


def _row_mean(a: Values) -> Values:
    return _row_sum(a) % PRIME * pow(a.shape[2], -1, PRIME)


def _read_reduction(name: str) -> Reader:
    def read(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
        (x,) = take(op, inputs, 1)
        if name == "ReduceMean":
            c.floats.append(x.dtype)
        return c.emit(side, name, [x], {"axes": literal((1,))}, (x.shape[0], 1))

    return read


SUM = Template("sum", 1, _row_shape, partial(reduced, _row_sum), _SUM, {RANK: 2})
MEAN = Template("mean", 1, _row_shape, partial(reduced, _row_mean), _MEAN, {RANK: 2})


def _rows(a: Shape) -> Shape | None:
    return a if len(a) == 2 and a[1] > 1 else None


def _softmax(a: Values) -> Values:
    powers = arithmetic.random_function(_EXP, a)
    return powers * arithmetic.inverse(_row_sum(powers) % PRIME)


def _read_softmax(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
    (x,) = take(op, inputs, 1)
    return c.emit(side, "Softmax", [x], {"axis": literal(1)}, x.dims, (x.join(0), None))


SOFTMAX = Template("softmax", 1, _rows, partial(reduced, _softmax), _SOFTMAX, {RANK: 2})


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_batched(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
    a, b = take(op, inputs, 2)
    c.equal_dtypes([a, b], given=side.is_source)
    c.equate(a.shape[0], b.shape[0], given=False)
    c.equate(a.shape[2], b.shape[1], given=side.is_source)
    return c.emit(side, "MatMul", [a, b], {}, (a.shape[0], a.shape[1], b.shape[2]))


BATCHED = Template("matmul.batched", 2, partial(multiplied, 3), partial(first, arithmetic.matmul), _BATCHED, {RANK: 3})


def _stacked_shape(a: Shape, w: Shape) -> Shape | None:
    return (*a[:2], w[1]) if len(a) == 3 and len(w) == 2 and a[2] == w[0] else None


def _stacked(a: Values, w: Values) -> Values:
    return arithmetic.matmul(a, w[:, None])


def _read_stacked(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
    a, w = take(op, inputs, 2)
    c.equal_dtypes([a, w], given=side.is_source)
    c.equate(a.shape[2], w.shape[0], given=side.is_source)
    return c.emit(side, "MatMul", [a, w], {}, (*a.shape[:2], w.shape[1]))


STACKED = Template("matmul.stacked", 2, _stacked_shape, partial(first, _stacked), _STACKED)
"""A matrix product of each of a batch with one right operand."""


def _merged_shape(a: Shape) -> Shape | None:
    return (a[0] * a[1], a[2]) if len(a) == 3 else None


def _merged(a: Values) -> Values:
    return a.reshape(len(a), -1, a.shape[3])


def _read_merge(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
    (x,) = take(op, inputs, 1)
    sizes = c.sizes(x.shape)
    rows = Binary("*", sizes.items[0], sizes.items[1])
    dims = (x.shape[0] * x.shape[1], x.shape[2])
    return c.emit(side, "Reshape", [x], {"shape": Tuple((rows, sizes.items[2]))}, dims)


MERGE = Template("merge", 1, _merged_shape, partial(first, _merged), _MERGE)
"""A reshape that puts the rows of a batch into one matrix."""


def _swapped_shape(a: Shape) -> Shape | None:
    return (a[0], a[2], a[1]) if len(a) == 3 else None


def _swapped(a: Values) -> Values:
    return np.swapaxes(a, 2, 3)


def _read_swap(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
    (x,) = take(op, inputs, 1)
    return c.emit(side, "Transpose", [x], {"perm": literal((0, 2, 1))}, (x.shape[0], x.shape[2], x.shape[1]))


SWAP = Template("swap", 1, _swapped_shape, partial(first, _swapped), _SWAP, {RANK: 3})
"""A transpose of each matrix of a batch."""


# ── depthwise convolution ────────────────────────────────────────────────────────────────────────────────────────


def _depthwise_shape(x: Shape, w: Shape) -> Shape | None:
    return x if len(x) == 4 and x[2:] == IMAGE and w == (x[1], 1, 3, 3) else None


def _read_depthwise(c: Conversion, side: Side, op: PublishedOperator, inputs: Sequence[Operand]) -> Operand:
    x, w = take(op, inputs, 2)
    c.equal_dtypes([x, w], given=side.is_source)
    c.equate(w.shape[1], 1, given=False)
    c.equate(w.shape[0], x.shape[1], given=False)
    for axis in (2, 3):
        c.equate(w.shape[axis], 3, given=False)
    attrs = {"group": Call("dim", (Name(x.like), Literal(1))) if x.like else c.sizes(x.shape).items[1]}
    return c.emit(side, "Conv", [x, w], {**attrs, "pads": literal((1, 1, 1, 1))}, x.dims, (x.join(0), x.join(1)))


DEPTHWISE = Template("depthwise", 2, _depthwise_shape, partial(first, arithmetic.convolution), _DEPTHWISE, {RANK: 4})

_OURS: dict[int, Reader] = {
    _SUB: _named("Sub"), _DIV: _named("Div"), _EXP: _function("Exp"),
    _SUM: _read_reduction("ReduceSum"), _MEAN: _read_reduction("ReduceMean"), _SOFTMAX: _read_softmax,
    _BATCHED: _read_batched, _STACKED: _read_stacked, _MERGE: _read_merge, _DEPTHWISE: _read_depthwise,
    _SWAP: _read_swap, **{number: _read_column(name) for name, number in _COLUMNS.items()},
}  # fmt: skip


class Statement(Conversion):
    """Reads TASO's operators and these."""

    readers = {**READERS, **_OURS}
    uneven = {_STACKED: ((3, 2), 3), _MERGE: ((3,), 2)}


__all__ = [
    "AXIS", "BATCHED", "DEPTHWISE", "DIV", "DIV_COLUMN", "EXP", "MEAN", "MERGE", "MUL_COLUMN", "SOFTMAX",
    "STACKED", "SUB", "SUB_COLUMN", "SUM", "SWAP", "Statement",
]  # fmt: skip
