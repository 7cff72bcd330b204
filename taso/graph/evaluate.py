"""Evaluation of nodes and graphs with NumPy, from the operators' definitions: slow, right, and the oracle of tests."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from taso.graph import onnx_reference
from taso.graph.errors import GraphError, InputError
from taso.graph.graph import Graph, Node, Value
from taso.graph.index import Meaning, evaluate
from taso.graph.numbers import Float64
from taso.graph.operator import Array, Attrs, AttrValue, Operator, Trait, Types, Weight
from taso.graph.types import DType, SymDim, TensorType, show_shape, substitute

_LARGE = 1 << 24
"""Bytes from which on a tensor of floats is not widened as a whole."""

# ── one operator ─────────────────────────────────────────────────────────────────────────────────────────────────


def evaluate_node(node: Node, arrays: Sequence[Array | None], *, wide: bool = False) -> tuple[Array, ...]:
    """Outputs of `node` on `arrays`, one per input (None where an optional one is left out).

    Floating point is computed in float64 and rounded to the declared type, or, with `wide`, left in float64.
    Raises `GraphError` where nothing says what the operator means, or it means nothing for these arrays.
    """
    types = [v.type if v is not None else None for v in node.inputs]
    return evaluate_operator(node.op, node.attrs, types, [v.type for v in node.outputs], arrays, wide=wide)


def evaluate_operator(
    op: Operator, attrs: Attrs, types: Types, outputs: Sequence[TensorType], arrays: Sequence[Array | None], *,
    wide: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """As `evaluate_node`, for an operator whose inputs and outputs have the declared types `types` and `outputs`.

    Symbolic dimensions take the sizes that the arrays have.
    """
    actual = [_actual(t, a) for t, a in zip(types, arrays, strict=True)]
    if op.has(Trait.OPAQUE):
        return _by_reference(op, attrs, actual, outputs, arrays, wide)
    if op.has(Trait.IDENTITY) and arrays[0] is not None:
        return (arrays[0],)
    results = op.types_of(actual, attrs)
    if op.compute is not None:
        given = [a if a is None or not t or not t.dtype.is_float else a.astype(np.float64, copy=False)
                 for a, t in zip(arrays, actual, strict=True)]  # fmt: skip
        try:
            return _in_types(op.compute(given, attrs), results, wide)
        except (IndexError, ValueError, ZeroDivisionError) as error:
            # an index among the inputs that points outside, for one: no type tells it
            raise GraphError(f"{op.name} cannot be computed of these inputs: {error}") from error
    meanings = _meanings(op, attrs, actual)
    if meanings is not None and op.has(Trait.MOVES_DATA):
        return _moved(meanings, arrays)
    if meanings is not None and all(t.dtype.is_float for t in results):
        return _in_floats(meanings, results, arrays, wide)
    return _by_reference(op, attrs, actual, results, arrays, wide)


def defined(node: Node) -> bool:
    """Whether the values of `node` come of its meaning, which has one for all inputs of its types."""
    if node.op.has(Trait.OPAQUE) or node.op.compute is not None:
        return False
    if node.op.has(Trait.IDENTITY):
        return True
    types = [v.type if v is not None else None for v in node.inputs]
    floats = all(v.type.dtype.is_float for v in node.outputs)
    return (floats or node.op.has(Trait.MOVES_DATA)) and _meanings(node.op, node.attrs, types) is not None


def _meanings(op: Operator, attrs: Attrs, types: Types) -> tuple[Meaning, ...] | None:
    """What the operator is in index notation; None where it, or these attributes of it, have no such meaning."""
    if op.meaning is None:
        return None
    try:
        return op.meaning(types, attrs)
    except GraphError:
        return None


def _actual(declared: TensorType | None, array: Array | None) -> TensorType | None:
    if declared is None or array is None or not isinstance(array, np.ndarray):
        return declared
    return TensorType(declared.dtype, array.shape, declared.other)


class _AsStored:
    """Numbers of any dtype, for operators that move them and compute nothing."""

    def __init__(self, dtype: np.dtype[np.generic]) -> None:
        self._dtype = dtype

    def constant(self, value: Fraction) -> Array:
        return np.asarray(float(value)).astype(self._dtype)

    def least(self) -> object:
        raise GraphError("an operator that moves data reads no least value")

    def call(self, function: str, args: Sequence[Array]) -> Array:
        raise GraphError(f"an operator that moves data calls no {function}")

    def reduce(self, kind: str, array: Array, axes: tuple[int, ...]) -> Array:
        raise GraphError("an operator that moves data reduces nothing")

    def matmul(self, left: Array, right: Array) -> Array:
        raise GraphError("an operator that moves data multiplies nothing")


class _AsBits(_AsStored):
    """The same, for elements of one byte that are given as bytes."""

    def constant(self, value: Fraction) -> Array:
        return super().constant(value).view(np.uint8)


def _moved(meanings: Sequence[Meaning], arrays: Sequence[Array | None]) -> tuple[Array, ...]:
    given = next(a for a in arrays if a is not None)
    if given.dtype.kind == "O":
        return tuple(onnx_reference.texts(evaluate(m, arrays, _AsStored(given.dtype))) for m in meanings)
    if given.dtype.kind != "f" or given.dtype.itemsize > 1:
        return tuple(evaluate(m, arrays, _AsStored(given.dtype)) for m in meanings)
    # NumPy does not know its own name for FLOAT8E5M2 again, and makes no strided views of it: its bits are moved
    bits = [a.view(np.uint8) if a is not None and a.dtype == given.dtype else a for a in arrays]
    return tuple(evaluate(m, bits, _AsBits(given.dtype)).view(given.dtype) for m in meanings)


def _in_floats(
    meanings: Sequence[Meaning], results: Sequence[TensorType], arrays: Sequence[Array | None], wide: bool
) -> tuple[Array, ...]:
    given = [a if a is None or _is_large_float(a) else a.astype(np.float64, copy=False) for a in arrays]
    found = [np.asarray(evaluate(m, given, Float64()), np.float64) for m in meanings]
    return _in_types(found, results, wide)


def _is_large_float(array: Array) -> bool:
    # `Float64` widens it where it computes, part by part where it can
    return array.nbytes > _LARGE and DType.from_numpy(array.dtype).is_float


def _in_types(found: Sequence[Array], results: Sequence[TensorType], wide: bool) -> tuple[Array, ...]:
    return tuple(f if wide else _rounded(f, t.dtype) for f, t in zip(found, results, strict=True))


def _rounded(array: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return array.astype(dtype.numpy, copy=False)


def _by_reference(
    op: Operator, attrs: Attrs, types: Types, results: Sequence[TensorType], arrays: Sequence[Array | None], wide: bool
) -> tuple[Array, ...]:
    if not wide:
        return onnx_reference.run(op, attrs, types, results, arrays)
    floats = {a.dtype for a in arrays if isinstance(a, np.ndarray) and DType.from_numpy(a.dtype).is_float}
    if op.has(Trait.MOVES_DATA) and len(floats) == 1 and not op.has(Trait.OPAQUE):
        held = [t if a is None or t is None else _held(t, a) for t, a in zip(types, arrays, strict=True)]
        return onnx_reference.run(op, attrs, held, op.types_of(held, attrs), arrays)
    if op.has(Trait.OPAQUE) or op.has(Trait.TYPED):
        # bodies, attributes or the operator itself speak of the declared types
        rounded = [a if a is None or t is None else _declared(a, t) for a, t in zip(arrays, types, strict=True)]
        return tuple(map(_widened, onnx_reference.run(op, attrs, types, results, rounded)))
    doubled = [t if t is None or not t.dtype.is_float else TensorType(DType.DOUBLE, t.shape) for t in types]
    widened = [a if a is None else _widened(a) for a in arrays]
    return tuple(map(_widened, onnx_reference.run(op, _double_attrs(attrs), doubled, results, widened)))


def _held(type: TensorType, array: Array) -> TensorType:
    """The type of what is moved as it is, widened or not."""
    return TensorType(DType.from_numpy(array.dtype), array.shape) if type.dtype.is_float else type


def _declared(array: Array, type: TensorType) -> Array:
    return _rounded(array, type.dtype) if type.dtype.is_float else array


def _widened(array: Array) -> Array:
    if not isinstance(array, np.ndarray) or array.dtype.kind in "USO":
        return array
    return array.astype(np.float64, copy=False) if DType.from_numpy(array.dtype).is_float else array


def _double_attrs(attrs: Attrs) -> Attrs:
    def double(value: AttrValue) -> AttrValue:
        # what is rounded to eight bits or fewer is quantised, and means to be
        return DType.DOUBLE if isinstance(value, DType) and value.is_float and value.itemsize > 1 else value

    return Attrs({name: double(value) for name, value in attrs.items()})


# ── whole graphs ─────────────────────────────────────────────────────────────────────────────────────────────────


def evaluate_graph(graph: Graph, feeds: Mapping[str, Array], *, wide: bool = False) -> dict[str, Array]:
    """Outputs of `graph` by name. Intermediate values are freed after their last use; weights are not kept.

    With `wide`, what is declared as a narrower float stays float64 between nodes and at the outputs.
    Raises `InputError` where `feeds` do not fit the inputs, `GraphError` where a node has no meaning.
    """
    given = check_feeds(graph, feeds)
    outputs = graph.outputs
    nodes = graph.nodes
    left = Counter(v for node in nodes for v in node.inputs if v is not None)
    left.update(v for _, v in outputs)
    values = {value: given[name] for value, name in zip(graph.inputs, graph.input_names, strict=True)}
    for node in nodes:
        if not node.op.has(Trait.SOURCE):
            arrays = [_take(v, values, left) for v in node.inputs]
            for value, array in zip(node.outputs, evaluate_node(node, arrays, wide=wide), strict=True):
                if left[value]:
                    values[value] = array
            del arrays
    found = {name: _take(value, values, left) for name, value in outputs}
    return {name: _finished(a, wide) for name, a in found.items() if a is not None}


def _take(value: Value | None, values: dict[Value, Array], left: Counter[Value]) -> Array | None:
    if value is None:
        return None
    left[value] -= 1
    if value.node.op.has(Trait.SOURCE) and value not in values:
        return weight_of(value).array()
    return values[value] if left[value] else values.pop(value)


def _finished(array: Array, wide: bool) -> Array:
    if not isinstance(array, np.ndarray):
        return array
    return np.ascontiguousarray(_widened(array) if wide else array).reshape(array.shape)


def weight_of(value: Value) -> Weight:
    """The constant tensor that `value` is; raises `GraphError` where it is none."""
    data = value.node.attrs.get("data")
    if isinstance(data, Weight):
        return data
    raise GraphError(f"{value!r} is no weight")


# ── what may be fed ──────────────────────────────────────────────────────────────────────────────────────────────


def check_feeds(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """`feeds` as arrays, defaults filled in; raises `InputError` for what does not fit the graph's inputs."""
    if not isinstance(feeds, Mapping):
        raise InputError(f"inputs are given as a dictionary of arrays by name, not as {type(feeds).__name__}")
    unknown = sorted(set(feeds) - set(graph.input_names))
    if unknown:
        raise InputError(f"the model has no input '{unknown[0]}'; its inputs are {graph.input_names}")
    bound: dict[str, tuple[int, str]] = {}
    given: dict[str, Array] = {}
    for name, value in zip(graph.input_names, graph.inputs, strict=True):
        if name in feeds:
            given[name] = _checked(name, value.type, feeds[name], bound)
        elif name in graph.info.input_defaults:
            given[name] = graph.info.input_defaults[name].array()
        else:
            raise InputError(f"input '{name}' of type {value.type} is missing")
    return given


def _checked(name: str, type: TensorType, fed: Array, bound: dict[str, tuple[int, str]]) -> Array:
    if type.other is not None or type.dtype is DType.UNDEFINED:
        return fed
    array = np.asarray(fed)
    dtype = type.dtype.numpy
    if array.dtype != dtype and not (type.dtype is DType.STRING and array.dtype.kind in "USO"):
        raise InputError(f"input '{name}' must be {type}, but an array of dtype {array.dtype} was given")
    if type.shape is not None:
        _check_shape(name, type, array.shape, bound)
    return array


def _check_shape(name: str, type: TensorType, shape: tuple[int, ...], bound: dict[str, tuple[int, str]]) -> None:
    if len(shape) != type.rank:
        raise InputError(f"input '{name}' must be {type}, but an array of shape {show_shape(shape)} was given")
    for axis, (dim, size) in enumerate(zip(type.dims, shape, strict=True)):
        symbol = dim.symbol if isinstance(dim, SymDim) else None
        if symbol is not None and symbol not in bound:
            bound[symbol] = (size, name)
        wanted = substitute(dim, {s: n for s, (n, _) in bound.items()})
        if isinstance(wanted, int) and wanted != size:
            because = f" since '{bound[symbol][1]}' has {symbol} = {wanted}" if symbol in bound and symbol else ""
            raise InputError(
                f"input '{name}' must be {type}, but an array of shape {show_shape(shape)} was given: "
                f"axis {axis} must be {wanted}{because}"
            )


# ── values that depend on weights alone ──────────────────────────────────────────────────────────────────────────


@dataclass
class _Cache:
    """Small results of constant values, kept while their values live; the oldest give way."""

    limit: int
    held: int = 0

    def __post_init__(self) -> None:
        self.arrays: weakref.WeakKeyDictionary[Value, Array] = weakref.WeakKeyDictionary()

    def put(self, value: Value, array: Array) -> None:
        if array.dtype.kind == "O" or array.nbytes > self.limit // 4:
            return
        self.arrays[value] = array
        self.held = sum(a.nbytes for a in self.arrays.values())
        for oldest in list(self.arrays):
            if self.held <= self.limit:
                break
            self.held -= self.arrays.pop(oldest).nbytes


_CACHE = _Cache(limit=64 << 20)


def constant_value(value: Value) -> Array:
    """The array that `value`, which depends on weights alone, stands for.

    Raises `GraphError` where it depends on more. Small results are cached; a large one is computed again each time.
    """
    if not value.node.constant:
        raise GraphError(f"{value!r} does not depend on weights alone")
    if value.node.op.has(Trait.SOURCE):
        return weight_of(value).array()
    cached = _CACHE.arrays.get(value)
    if cached is None:
        cached = _computed(value)
        _CACHE.put(value, cached)
    return cached


def _computed(wanted: Value) -> Array:
    nodes = _constant_nodes(wanted)
    left = Counter(v for node in nodes for v in node.inputs if v is not None)
    left[wanted] += 1
    values: dict[Value, Array] = {}
    for node in nodes:
        arrays = [_take(v, values, left) for v in node.inputs]
        for value, array in zip(node.outputs, evaluate_node(node, arrays), strict=True):
            if left[value]:
                values[value] = array
    return np.ascontiguousarray(values[wanted]).reshape(values[wanted].shape)


def _constant_nodes(wanted: Value) -> list[Node]:
    found: dict[Node, None] = {}
    stack = [wanted.node]
    while stack:
        node = stack.pop()
        if node not in found and not node.op.has(Trait.SOURCE):
            found[node] = None
            stack.extend(v.node for v in node.inputs if v is not None)
    return sorted(found, key=lambda n: n.guid)
