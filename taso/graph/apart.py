"""Operators taken apart into others that a backend has kernels for: Attention and Einsum.

The parts compute what the operator means. What cannot be said so, in static shapes and float32, stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from taso.graph.evaluate import constant_value
from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import Array, AttrValue, Trait, Weight, operator_named
from taso.graph.ops.einsum import parse
from taso.graph.types import DType, TensorType


def taken_apart(graph: Graph, names: Collection[str]) -> tuple[Graph, dict[Node, Node]]:
    """An equal graph in which those of the operators `names` are made of others that can be; `graph` where none can.

    Also which node of the new graph computes what a node of the old one did: those taken apart are not in it.
    """
    readers, outputs = graph.consumers(), {v for _, v in graph.outputs}

    def is_read(value: Value) -> bool:
        return value in outputs or bool(readers.get(value))

    makers: dict[Node, _Maker] = {}
    for node in graph.run_time_nodes:
        if node.op.name in names and not node.op.domain and node.op.name in _SEEKERS:
            maker = _SEEKERS[node.op.name](node, [is_read(v) for v in node.outputs])
            if maker is not None:
                makers[node] = maker
    if not makers:
        return graph, {}
    return _rebuilt(graph, makers)


_Maker = Callable[["_Making", Sequence[Value]], "Sequence[Value | None]"]
"""Makes the outputs of a node of its inputs that are there, None for those that nobody reads."""


def _rebuilt(graph: Graph, makers: Mapping[Node, _Maker]) -> tuple[Graph, dict[Node, Node]]:
    fresh = type(graph)()
    values: dict[Value, Value] = {}
    nodes: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in makers:
            given = [values[v] for v in node.inputs if v is not None]
            found = makers[node](_Making(fresh, node), given)
            values.update((old, new) for old, new in zip(node.outputs, found, strict=True) if new is not None)
            continue
        inputs = tuple(values[v] if v is not None else None for v in node.inputs)
        types = [v.type for v in node.outputs]
        stated = types if node.op.has(Trait.SOURCE) or node.op.has(Trait.OPAQUE) else None
        nodes[node] = fresh.make(node.op, inputs, node.attrs, stated, node.origin)
        values.update(zip(node.outputs, nodes[node].outputs, strict=True))
    graph.transfer(fresh, values)
    return fresh, nodes


class _Making:
    """Makes parts of one node in a graph; what would change nothing is left out."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph = graph
        self.origin = node.origin

    def __call__(self, name: str, *inputs: Value, **attrs: AttrValue) -> Value:
        return self.graph.make(operator_named(name), inputs, attrs, None, self.origin).output

    def constant(self, array: Array) -> Value:
        return self.graph.add_weight(Weight(TensorType(DType.from_numpy(array.dtype), array.shape), array))

    def reshaped(self, x: Value, shape: Sequence[int]) -> Value:
        return x if x.type.static_shape == tuple(shape) else self("Reshape", x, shape=tuple(shape))

    def turned(self, x: Value, perm: Sequence[int]) -> Value:
        return x if list(perm) == sorted(perm) else self("Transpose", x, perm=tuple(perm))


def _is_static(node: Node) -> bool:
    """Whether all inputs are tensors of known sizes, with elements."""
    given = [v.type for v in node.inputs if v is not None]
    return all(t.static and t.other is None and 0 not in t.static_shape for t in given)


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────


def _attention(node: Node, read: Sequence[bool]) -> _Maker | None:
    """softmax(scale · Q · Kᵀ + mask) · V (ONNX Attention 23 and 24) without what came before, caps and windows."""
    attrs, inputs = node.attrs, node.inputs
    if not _is_static(node) or read[3] or any(v is not None for v in inputs[4:]):
        return None
    whole = attrs.int("left_window_size") < 0 and attrs.int("right_window_size") < 0
    if attrs.float("softcap") != 0 or not whole or attrs["softmax_precision"] not in (None, DType.FLOAT):
        return None
    if any(v is None or v.type.dtype is not DType.FLOAT for v in inputs[:3]):
        return None
    masked = _mask(node)
    if masked is None:
        return None
    q, k = node.outputs[3].type.static_shape[1:3], node.outputs[1].type.static_shape

    def make(part: _Making, given: Sequence[Value]) -> Sequence[Value | None]:
        queries, keys, values = (_by_heads(part, given[i], heads) for i, heads in enumerate((q[0], k[1], k[1])))
        scale = attrs["scale"]
        factor = float(scale) if isinstance(scale, (int, float)) else 1 / math.sqrt(k[3])
        shared = [_repeated(part, x, q[0] // k[1]) for x in (keys, values)]
        scores = part("MatMul", queries, part.turned(shared[0], (0, 1, 3, 2)))
        scores = part("Mul", scores, part.constant(np.asarray(factor, np.float32)))
        added, alive = masked(part, given[3] if len(given) > 3 else None)
        scores = scores if added is None else part("Add", scores, added)
        mixed = part("MatMul", part("Softmax", scores, axis=-1), shared[1])
        if alive is not None:
            # what may see no key at all is 0
            mixed = part("Where", alive, mixed, part.constant(np.zeros((), np.float32)))
        if given[0].type.rank == 3:
            mixed = part.reshaped(part.turned(mixed, (0, 2, 1, 3)), node.outputs[0].type.static_shape)
        return mixed, keys if read[1] else None, values if read[2] else None, None

    return make


_Masked = Callable[["_Making", "Value | None"], "tuple[Value | None, Value | None]"]
"""Makes what is added to the scores, and which rows see any key at all where that is known at run time only."""


def _mask(node: Node) -> _Masked | None:
    """The mask of an Attention, its own and what is_causal says; None where it is not taken apart."""
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    rows, keys = node.outputs[3].type.static_shape[2:]
    later = np.tril(np.ones((rows, keys), bool)) if node.attrs.int("is_causal") else None
    if mask is not None:
        dims, dtype = mask.type.static_shape, mask.type.dtype
        # a mask that is shorter than the keys is filled up
        if not 2 <= len(dims) <= 4 or dims[-1] != keys or dtype not in (DType.FLOAT, DType.BOOL):
            return None
        if later is not None and dims[-2] != rows:
            # onnx.reference takes what is_causal says from the rows of the mask
            return None
    if mask is None or mask.node.constant:
        array = np.zeros((1, keys), np.float32) if mask is None else constant_value(mask)
        array = np.where(array, np.float32(0), np.float32(-np.inf)) if array.dtype == bool else array
        array = array if later is None else np.where(later, array, np.float32(-np.inf))
        nothing = mask is None and later is None
        if (array == -np.inf).all(-1).any():
            return None
        return lambda part, given: (None if nothing else part.constant(array), None)
    return _computed_mask if later is None else None


def _computed_mask(part: _Making, mask: Value | None) -> tuple[Value | None, Value | None]:
    if mask is None:
        return None, None
    last = (mask.type.rank - 1,)
    if mask.type.dtype is DType.BOOL:
        seen = part("ReduceMax", part("Cast", mask, to=DType.FLOAT), axes=last, keepdims=1)
        numbers = (part.constant(np.asarray(n, np.float32)) for n in (0, -np.inf))
        return part("Where", mask, *numbers), part("Greater", seen, part.constant(np.asarray(0.5, np.float32)))
    least = part.constant(np.asarray(np.finfo(np.float32).min))
    return mask, part("GreaterOrEqual", part("ReduceMax", mask, axes=last, keepdims=1), least)


def _by_heads(part: _Making, x: Value, heads: int) -> Value:
    """With an axis of heads before that of places."""
    if x.type.rank == 4:
        return x
    batch, length, width = x.type.static_shape
    return part.turned(part.reshaped(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _repeated(part: _Making, x: Value, times: int) -> Value:
    """Each head so many times in a row."""
    if times == 1:
        return x
    batch, heads, length, size = x.type.static_shape
    spread = part("Expand", part.reshaped(x, (batch, heads, 1, length, size)), shape=(1, 1, times, 1, 1))
    return part.reshaped(spread, (batch, heads * times, length, size))


# ── Einsum ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _einsum(node: Node, read: Sequence[bool]) -> _Maker | None:
    """An Einsum of one or two operands without ellipses, and without a letter twice in a term, as a product."""
    equation = parse(node.attrs.str("equation"))
    values = [v for v in node.inputs if v is not None]
    if not _is_static(node) or any(v.type.dtype is not DType.FLOAT for v in values) or len(values) > 2:
        return None
    if any("." in term or len(set(term)) < len(term) for term in equation.inputs):
        return None
    sizes = {c: n for t, v in zip(equation.inputs, values, strict=True) for c, n in zip(t, v.type.static_shape,
                                                                                       strict=True)}  # fmt: skip
    out = equation.output

    def make(part: _Making, given: Sequence[Value]) -> Sequence[Value | None]:
        terms, factors = list(equation.inputs), list(given)
        for i, term in enumerate(terms):
            others = out + "".join(t for j, t in enumerate(terms) if j != i)
            alone = tuple(a for a, c in enumerate(term) if c not in others)
            if alone:
                factors[i] = part("ReduceSum", factors[i], axes=alone, keepdims=0)
                terms[i] = "".join(c for c in term if c in others)
        if len(terms) == 1:
            return (part.turned(factors[0], [terms[0].index(c) for c in out]),)
        return (_product(part, terms, factors, out, sizes),)

    return make


def _product(
    part: _Making, terms: Sequence[str], factors: Sequence[Value], out: str, sizes: Mapping[str, int]
) -> Value:
    """A batch of products of matrices: letters of both terms and the output count its matrices."""
    left, right = terms
    batch = [c for c in out if c in left and c in right]
    rows, columns = [c for c in out if c not in right], [c for c in out if c not in left]
    summed = [c for c in left if c in right and c not in out]
    sides = ((left, rows, summed), (right, summed, columns))
    matrices = []
    for factor, (term, first, second) in zip(factors, sides, strict=True):
        order = [*batch, *first, *second]
        count = (math.prod(sizes[c] for c in batch),) if batch else ()
        shape = (*count, *(math.prod(sizes[c] for c in group) for group in (first, second)))
        matrices.append(part.reshaped(part.turned(factor, [term.index(c) for c in order]), shape))
    made = [*batch, *rows, *columns]
    whole = part.reshaped(part("MatMul", *matrices), [sizes[c] for c in made])
    return part.turned(whole, [made.index(c) for c in out])


_SEEKERS: dict[str, Callable[[Node, Sequence[bool]], _Maker | None]] = {"Attention": _attention, "Einsum": _einsum}

__all__ = ["taken_apart"]
