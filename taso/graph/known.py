"""Values that are known before a model runs: small weights, what is computed from them, and shapes.

Shapes are known dimension by dimension: what is gathered out of the shape of N×3×224×224 is known wherever it does
not touch N, and is that symbol where it does. So is all whole-number arithmetic on them; a number of which nothing is
known gets a symbol of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from taso.graph.errors import GraphError
from taso.graph.evaluate import evaluate_node, weight_of
from taso.graph.graph import Node, Value
from taso.graph.index import evaluate
from taso.graph.operator import Array, Trait
from taso.graph.ops.movement import divide_exactly
from taso.graph.ops.reduction import reduced_axes
from taso.graph.ops.structure import CAST, SHAPE, SIZE, shape_range
from taso.graph.types import Atom, Dim, DType, FloorDiv, Larger, SymDim, TensorType, product

LIMIT = 4096
"""Elements of a value that is looked up as a whole."""
FREE = 64
"""Elements of a value of which nothing is known that get symbols of their own."""
_WHOLE = (DType.INT64, DType.INT32)


class Known:
    """Looks up known values; remembers what it finds.

    Inside, an array of objects holds whole numbers or symbolic ones.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._found: dict[Value, Array | None] = {}
        self._free: set[str] = set()
        self._sizes: set[Dim] = set()

    def __call__(self, value: Value) -> Array | None:
        """The array that `value` is in every run, or None where that is not known or has more than the limit."""
        array = self._look(value)
        if array is None or array.dtype != object or value.type.dtype is DType.STRING:
            return array
        if not all(isinstance(d, int) for d in array.reshape(-1).tolist()):
            return None
        return array.astype(value.type.dtype.numpy)

    def elements(self, value: Value) -> list[Dim] | None:
        """The elements of a whole-number value in order, integers or symbolic; None where it is no such small value."""
        array = self._look(value)
        if array is None or value.type.dtype not in _WHOLE:
            return None
        return [d if isinstance(d, SymDim) else int(d) for d in array.reshape(-1).tolist()]

    def is_size(self, number: Dim) -> bool:
        """Whether `number` is a size of a tensor, or made of such by sums and products: never negative."""
        if isinstance(number, int):
            return number >= 0
        return number in self._sizes or all(c >= 0 and all(map(self._is_natural, m)) for m, c in number.terms)

    def _is_natural(self, atom: Atom) -> bool:
        if isinstance(atom, FloorDiv):
            return self.is_size(atom.dividend)
        if isinstance(atom, Larger):
            return self.is_size(atom.left) or self.is_size(atom.right)
        return atom not in self._free

    def is_never(self, number: Dim, other: Dim) -> bool:
        """Whether the two differ for every value of the symbols."""
        difference = number - other
        if isinstance(difference, int):
            return difference != 0
        return any(self.is_size(d - 1) for d in (difference, -difference))

    def _look(self, value: Value) -> Array | None:
        if value not in self._found:
            found = self._find(value)
            self._found[value] = self._filled_up(value, found)
        return self._found[value]

    def _filled_up(self, value: Value, found: Array | None) -> Array | None:
        """What was found, with a symbol of its own for each whole number that was not."""
        t = value.type
        if t.dtype not in _WHOLE or found is not None and found.dtype != object:
            return found
        if found is None and (not t.static or t.size > FREE):
            return None
        items = [None] * t.size if found is None else found.reshape(-1).tolist()
        for position, item in enumerate(items):
            if item is None:
                # no name in a file holds a null character
                name = f"\0{value.node.guid}:{value.index}:{position}"
                self._free.add(name)
                items[position] = SymDim.named(name)
        return _objects(t.static_shape if found is None else found.shape, items)

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

    def _shape(self, node: Node) -> Array | None:
        given = node.inputs[0]
        if given is None or given.type.shape is None:
            return None
        self._sizes.update(given.type.shape)
        if node.op is SIZE:
            return _objects((), [product(given.type.shape)])
        start, stop = shape_range(given.type.rank, node.attrs)
        return _objects((max(stop - start, 0),), given.type.shape[start:stop])

    def _computed(self, node: Node, index: int) -> Array | None:
        arrays = [self._look(v) if v is not None else None for v in node.inputs]
        if not arrays or any(a is None and v is not None for a, v in zip(arrays, node.inputs, strict=True)):
            return None
        if any(_is_symbolic(a, v) for a, v in zip(arrays, node.inputs, strict=True)):
            return self._symbolic(node, [a for a in arrays if a is not None], index)
        numbers = [self(v) if v is not None else None for v in node.inputs]
        try:
            found = evaluate_node(node, numbers)[index]
        except GraphError:
            # an opaque operator that the reference does not know: its value is not known either
            return None
        # where the reference makes something else of it than inference does, it is not known which is right
        return found if found.shape == node.outputs[index].type.shape else None

    def _symbolic(self, node: Node, arrays: Sequence[Array], index: int) -> Array | None:
        """The result of `node` on whole numbers, None in it where that is not known, or None for all of it."""
        wide = [_objects(a.shape, a.reshape(-1).tolist()) for a in arrays]
        if node.op.domain:
            return None
        if node.op.has(Trait.IDENTITY):
            return wide[0]
        if node.op is CAST:
            return wide[0] if node.attrs.dtype("to") in _WHOLE else None
        if node.op.name in _RULES and not node.op.has(Trait.OPAQUE):
            return _RULES[node.op.name](self, node, wide)
        if node.op.meaning is None or not node.op.has(Trait.MOVES_DATA):
            return None
        types = [v.type if v is not None else None for v in node.inputs]
        return evaluate(node.op.meaning(types, node.attrs)[index], wide, _Objects())


def _objects(shape: tuple[int, ...], items: Sequence[object]) -> Array:
    array = np.empty(len(items), object)
    array[:] = items
    return array.reshape(shape)


def _is_symbolic(array: Array | None, value: Value | None) -> bool:
    if array is None or value is None or array.dtype != object or value.type.dtype is DType.STRING:
        return False
    return not all(isinstance(d, int) for d in array.reshape(-1).tolist())


# ── the arithmetic of shapes ─────────────────────────────────────────────────────────────────────────────────────


def _each(function: Callable[[Known, Dim, Dim], object]) -> Callable[[Known, Node, Sequence[Array]], Array | None]:
    """A rule that takes two arrays element by element, with broadcasting."""

    def rule(known: Known, node: Node, arrays: Sequence[Array]) -> Array:
        left, right = np.broadcast_arrays(*arrays)
        pairs = zip(left.reshape(-1).tolist(), right.reshape(-1).tolist(), strict=True)
        return _objects(left.shape, [function(known, a, b) for a, b in pairs])

    return rule


def _divided(known: Known, a: Dim, b: Dim) -> Dim | None:
    """a / b truncated as ONNX divides whole numbers, where that is the same formula for all values of the symbols."""
    exact = divide_exactly(a, b)
    if exact is not None:
        return exact
    if not isinstance(b, int) or b <= 0 or not known.is_size(a):
        return None
    return a // b


def _equal(known: Known, node: Node, arrays: Sequence[Array]) -> Array | None:
    left, right = np.broadcast_arrays(*arrays)
    pairs = list(zip(left.reshape(-1).tolist(), right.reshape(-1).tolist(), strict=True))
    if not all(a == b or known.is_never(a, b) for a, b in pairs):
        return None
    found: Array = np.asarray([a == b for a, b in pairs], bool).reshape(left.shape)
    return found


def _where(known: Known, node: Node, arrays: Sequence[Array]) -> Array:
    condition, left, right = np.broadcast_arrays(*arrays)
    return np.asarray(np.where(condition.astype(bool), left, right), object)


def _gather(known: Known, node: Node, arrays: Sequence[Array]) -> Array | None:
    indices = arrays[1].reshape(-1).tolist()
    size = arrays[0].shape[node.attrs.int("axis")]
    if not all(isinstance(i, int) and -size <= i < size for i in indices):
        return None
    found = np.take(arrays[0], arrays[1].astype(np.int64), axis=node.attrs.int("axis"))
    return np.asarray(found, object) if isinstance(found, np.ndarray) else _objects((), [found])


def _reduced(operation: np.ufunc) -> Callable[[Known, Node, Sequence[Array]], Array | None]:
    def rule(known: Known, node: Node, arrays: Sequence[Array]) -> Array | None:
        axes = reduced_axes(TensorType(DType.INT64, arrays[0].shape), node.attrs, node.op.name)
        kept = bool(node.attrs.int("keepdims"))
        found = operation.reduce(arrays[0], axes, keepdims=kept) if arrays[0].size else None
        return found if found is None or isinstance(found, np.ndarray) else _objects((), [found])

    return rule


_RULES: dict[str, Callable[[Known, Node, Sequence[Array]], Array | None]] = {
    "Add": _each(lambda known, a, b: a + b),
    "Sub": _each(lambda known, a, b: a - b),
    "Mul": _each(lambda known, a, b: a * b),
    "Div": _each(_divided),
    "Neg": lambda known, node, arrays: _objects(arrays[0].shape, [-d for d in arrays[0].reshape(-1).tolist()]),
    "Equal": _equal,
    "Where": _where,
    "Gather": _gather,
    "ReduceProd": _reduced(np.multiply),
    "ReduceSum": _reduced(np.add),
}


class _Objects:
    """Moves whole numbers about; computes nothing."""

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
