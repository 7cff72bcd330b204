"""Values that are known before a model runs: small weights, what is computed from them, and shapes.

Shapes are known dimension by dimension: what is gathered out of the shape of N×3×224×224 is known wherever it does
not touch N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from taso.graph.errors import GraphError
from taso.graph.evaluate import evaluate_node, weight_of
from taso.graph.graph import Node, Value
from taso.graph.index import evaluate
from taso.graph.operator import Array, Trait
from taso.graph.ops.elementwise import ADD, MUL, SUB
from taso.graph.ops.movement import GATHER
from taso.graph.ops.structure import CAST, SHAPE, SIZE, shape_range
from taso.graph.types import DType, product

LIMIT = 4096
_WHOLE = (DType.INT64, DType.INT32)


class Known:
    """Looks up known values; remembers what it finds.

    Inside, an array of objects holds dimensions, integers or symbolic; outside only whole arrays of numbers are given.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._found: dict[Value, Array | None] = {}

    def __call__(self, value: Value) -> Array | None:
        """The array that `value` is in every run, or None where that is not known or has more than the limit."""
        array = self._look(value)
        if array is None or array.dtype != object or value.type.dtype is DType.STRING:
            return array
        if not all(isinstance(d, int) for d in array.reshape(-1).tolist()):
            return None
        return array.astype(value.type.dtype.numpy)

    def _look(self, value: Value) -> Array | None:
        if value not in self._found:
            self._found[value] = self._find(value)
        return self._found[value]

    def _find(self, value: Value) -> Array | None:
        node = value.node
        if node.op in (SHAPE, SIZE):
            return self._shape(node)
        if not value.type.static or value.type.size > self._limit:
            return None
        if node.op.has(Trait.SOURCE):
            return weight_of(value).array() if node.constant else None
        if node.op.has(Trait.RANDOM):
            return None
        return self._computed(node, value.index)

    @staticmethod
    def _shape(node: Node) -> Array | None:
        given = node.inputs[0]
        if given is None or given.type.shape is None:
            return None
        if node.op is SIZE:
            return _objects((), [product(given.type.shape)])
        start, stop = shape_range(given.type.rank, node.attrs)
        return _objects((max(stop - start, 0),), given.type.shape[start:stop])

    def _computed(self, node: Node, index: int) -> Array | None:
        arrays = [self._look(v) if v is not None else None for v in node.inputs]
        if not arrays or any(a is None and v is not None for a, v in zip(arrays, node.inputs, strict=True)):
            return None
        if not any(_is_symbolic(a, v) for a, v in zip(arrays, node.inputs, strict=True)):
            numbers = [self(v) if v is not None else None for v in node.inputs]
            try:
                return evaluate_node(node, numbers)[index]
            except GraphError:
                # an opaque operator that the reference does not know: its value is not known either
                return None
        return _of_dimensions(node, [a for a in arrays if a is not None], index)


def _objects(shape: tuple[int, ...], items: Sequence[object]) -> Array:
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


def _is_symbolic(array: Array | None, value: Value | None) -> bool:
    if array is None or value is None or array.dtype != object or value.type.dtype is DType.STRING:
        return False
    return not all(isinstance(d, int) for d in array.reshape(-1).tolist())


_ARITHMETIC: dict[object, Callable[[Array, Array], Array]] = {ADD: np.add, SUB: np.subtract, MUL: np.multiply}


class _Objects:
    """Moves dimensions about; computes nothing."""

    def constant(self, value: object) -> Array:
        raise GraphError("no constants among dimensions")

    def least(self) -> object:
        raise GraphError("no least dimension")

    def call(self, function: str, args: Sequence[Array]) -> Array:
        raise GraphError("no functions of dimensions")

    def reduce(self, kind: str, array: Array, axes: tuple[int, ...]) -> Array:
        raise GraphError("no reductions of dimensions")

    def matmul(self, left: Array, right: Array) -> Array:
        raise GraphError("no products of dimensions")


def _of_dimensions(node: Node, arrays: Sequence[Array], index: int) -> Array | None:
    """The result of `node` on arrays of dimensions, for the operators that occur in the arithmetic of shapes."""
    wide = [_objects(a.shape, a.reshape(-1).tolist()) for a in arrays]
    if node.op is CAST:
        return wide[0] if node.attrs.dtype("to") in _WHOLE else None
    if node.op is GATHER:
        axis = node.attrs.int("axis")
        return np.asarray(np.take(wide[0], arrays[1].astype(np.int64), axis=axis), object)
    if node.op in _ARITHMETIC:
        return np.asarray(_ARITHMETIC[node.op](*wide), object)
    if node.op.meaning is None or not node.op.has(Trait.MOVES_DATA):
        return None
    types = [v.type if v is not None else None for v in node.inputs]
    return evaluate(node.op.meaning(types, node.attrs)[index], wide, _Objects())
