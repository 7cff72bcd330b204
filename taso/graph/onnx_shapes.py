"""Puts into a graph what is known of its shapes: fixed sizes, folded shape arithmetic, operators that it gives away.

A value that is known before the model runs becomes a weight, whatever made it; a Reshape or Expand whose target was
computed and is known in part says so in its attributes; and what only the computation of the target needed is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import onnx.shape_inference
from onnx import NodeProto, TypeProto, ValueInfoProto

from taso.graph.errors import GraphError, ShapeError
from taso.graph.graph import Graph, Node, Value
from taso.graph.known import Known
from taso.graph.onnx_protos import type_proto
from taso.graph.onnx_reading import MALFORMED, REFUSALS, infer_node, read_node
from taso.graph.operator import ONNX_NAMES, Trait, Unmodelled, Weight
from taso.graph.ops.movement import EXPAND, RESHAPE, SLICE
from taso.graph.types import Dim, DType, SymDim, TensorType

log = logging.getLogger(__name__)

_FOLDED = (DType.INT64, DType.INT32, DType.BOOL)
_ENDLESS = (1 << 31) - 1
"""Where a Slice ends that means to go to the end: no tensor has so long an axis."""

# ── the doors ────────────────────────────────────────────────────────────────────────────────────────────────────


def fold_shapes(graph: Graph) -> Graph:
    """An equal graph that uses what is known of shapes; `graph` itself where that changes nothing.

    Symbols stand for sizes of 1 and more. Raises `ShapeError` where operators do not fit what they are given.
    """
    rebuilt = _Rebuilt(graph, {}, {})
    return rebuilt.fresh if rebuilt.changed else graph


def freeze(graph: Graph, sizes: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> Graph:
    """The graph for one size of its inputs: symbols are replaced by `sizes`, shapes of unknown rank by `shapes`.

    Types that the file states for inputs, outputs and other values become numbers too. Raises `ShapeError` where
    operators do not take these sizes.
    """
    types: dict[Value, TensorType] = {}
    for name, value in zip(graph.input_names, graph.inputs, strict=True):
        bound = value.type.bind(sizes)
        if bound.shape is None and bound.other is None and name in shapes:
            bound = bound.with_shape(shapes[name])
        types[value] = bound
    rebuilt = _Rebuilt(graph, types, sizes)
    fresh = rebuilt.fresh
    by_name = {name: value for value, names in fresh.info.value_names.items() for name in names}
    by_name.update(zip(fresh.input_names, fresh.inputs, strict=True))
    by_name.update(fresh.outputs)
    fresh.info.value_infos = {
        name: _restated(data, by_name[name].type if name in by_name else None, sizes)
        for name, data in graph.info.value_infos.items()
    }
    return fresh


def specialise(graph: Graph, types: Mapping[Value, TensorType]) -> Graph:
    """The graph with its inputs of the given types and everything behind them inferred and folded anew.

    Raises `ShapeError` where an operator does not take these shapes.
    """
    sizes: dict[str, Dim] = {}
    for value, given in types.items():
        for dim, size in zip(value.type.shape or (), given.shape or (), strict=False):
            if isinstance(dim, SymDim) and dim.symbol is not None:
                sizes[dim.symbol] = size
    return _Rebuilt(graph, types, sizes).fresh


def _restated(data: bytes, type: TensorType | None, sizes: Mapping[str, int]) -> bytes:
    """What a file states of a value, with numbers where they are known by now."""
    stated = ValueInfoProto.FromString(data)
    if stated.type.WhichOneof("value") != "tensor_type":
        return data
    dims = stated.type.tensor_type.shape.dim
    known = type.shape if type is not None and type.other is None else None
    if type is not None and known is not None and (
        len(dims) != len(known) or not stated.type.tensor_type.HasField("shape")
    ):
        stated.type.CopyFrom(type_proto(type))
        return stated.SerializeToString()
    for position, dim in enumerate(dims):
        number = known[position] if known is not None else None
        if isinstance(number, int):
            dim.dim_value = number
        elif dim.dim_param in sizes:
            dim.dim_value = sizes[dim.dim_param]
    return stated.SerializeToString()


# ── rebuilding ───────────────────────────────────────────────────────────────────────────────────────────────────


class _Rebuilt:
    """A graph built anew, node by node: `fresh`. `changed` says whether anything but names of values differs."""

    def __init__(self, graph: Graph, types: Mapping[Value, TensorType], sizes: Mapping[str, Dim]) -> None:
        self.graph = graph
        self.fresh = type(graph)()
        self.known = Known()
        self.types = types
        self.bound: dict[str, Dim] = dict(sizes)
        self.changed = bool(types)
        self.mapping: dict[Value, Value] = {}
        self.named = graph.symbols
        self.reread: list[tuple[Node, Node]] = []
        for node in graph.nodes:
            inputs = tuple(self.mapping[v] if v is not None else None for v in node.inputs)
            for old, new in zip(node.outputs, self._outputs(node, inputs), strict=True):
                self._bind(old.type, new.type)
                self.mapping[old] = new
        graph.transfer(self.fresh, self.mapping)
        for old_node, new_node in self.reread:
            graph.info.describe(old_node, new_node, self.fresh.info)

    def _bind(self, old: TensorType, new: TensorType) -> None:
        """Notes what a symbol has turned out to be that stood for a size which nobody knew."""
        for before, now in zip(old.shape or (), new.shape or (), strict=False):
            symbol = before.symbol if isinstance(before, SymDim) else None
            if symbol is not None and symbol not in self.named and before != now:
                self.bound.setdefault(symbol, now)

    def _outputs(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        if node.op.has(Trait.SOURCE):
            given = [self.types.get(v, v.type.bind(self.bound)) for v in node.outputs]
            return self.fresh.make(node.op, inputs, node.attrs, given, node.origin).outputs
        if node.op.has(Trait.OPAQUE):
            made = self._opaque(node, inputs)
        else:
            made = self.fresh.make(node.op, inputs, node.attrs, None, node.origin).outputs
        return made if node.constant else [self._folded(node, v) for v in made]

    def _folded(self, node: Node, value: Value) -> Value:
        """The weight that a value is where it is known; floating point is left to whoever computes it otherwise."""
        if value.type.dtype not in _FOLDED and node.op.has(Trait.OPAQUE) or value.node.op.has(Trait.SOURCE):
            return value
        array = self.known(value)
        if array is None:
            return value
        self.changed = True
        return self.fresh.add_weight(Weight(TensorType(value.type.dtype, array.shape), array))

    # ── opaque nodes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _opaque(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        proto = NodeProto.FromString(_bytes(node))
        pattern = node.attrs["outputs"]
        proto.output[:] = [str(name) for name in pattern] if isinstance(pattern, tuple) else []
        if not proto.domain and not node.attrs["captures"]:
            proto.input[:] = [f"x{i}" if v is not None else "" for i, v in enumerate(inputs)]
            found = self._read(node, proto, inputs)
            if found is not None:
                self.changed = True
                return found
        types = self._types(node, proto, inputs)
        return self.fresh.make(node.op, inputs, node.attrs, types, node.origin).outputs

    def _read(self, node: Node, proto: NodeProto, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        """The outputs of an opaque node in our terms, now that more is known of its inputs; None if not enough is."""
        op = ONNX_NAMES.get(("", proto.op_type))
        if op is None:
            return None
        try:
            reading = read_node(op, proto, node.attrs.int("opset"), inputs, self.known, tuple(proto.output))
            given = [inputs[i] if i is not None else None for i in reading.inputs]
            made = self.fresh.make(op, given, reading.attrs)
            op.spell(made.attrs, [v.type if v is not None else None for v in made.inputs], self.graph.info.opset)
            outputs: Sequence[Value] = made.outputs
        except (Unmodelled, GraphError, *MALFORMED) as reason:
            log.debug("%s is known in part at most: %s", proto.op_type, reason)
            partly = self._partly(node, proto, inputs)
            if partly is None:
                return None
            outputs = partly
        expected = [t.bind(self.bound) for t in (v.type for v in node.outputs)]
        if any(proto.output[len(outputs) :]) or any(map(_contradict, (v.type for v in outputs), expected)):
            return None
        if outputs[0].node not in (v.node for v in inputs if v is not None):
            self.reread.append((node, outputs[0].node))
        # outputs that the file leaves out are read by nobody
        spare = [outputs[0]] * (len(node.outputs) - len(outputs))
        return [*outputs[: len(node.outputs)], *spare]

    def _partly(self, node: Node, proto: NodeProto, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        reader = _PARTLY.get(proto.op_type)
        data = inputs[0] if inputs else None
        if reader is None or data is None or data.type.shape is None or data.type.other is not None:
            return None
        numbers = [self.known.elements(v) if v is not None else None for v in inputs[1:]]
        opset = self.graph.info.opset
        try:
            return reader(self, data, numbers, proto) if opset >= 10 else None
        except GraphError as reason:
            log.debug("%s stays opaque: %s", proto.op_type, reason)
            return None

    # ── types of what stays opaque ───────────────────────────────────────────────────────────────────────────────

    def _types(self, node: Node, proto: NodeProto, inputs: tuple[Value | None, ...]) -> list[TensorType]:
        stated = [v.type.bind(self.bound) for v in node.outputs]
        if proto.domain or node.attrs["captures"]:
            return stated
        opsets = {**self.graph.info.opsets, proto.domain: node.attrs.int("opset")}
        try:
            inferred = infer_node(proto, inputs, self.known, opsets, self.graph.info.ir_version)
        except onnx.shape_inference.InferenceError as reason:
            shown = ", ".join(str(v.type) if v is not None else "nothing" for v in inputs)
            said = str(reason).split("\n")[0]
            which = self._label(node, proto)
            raise ShapeError(f"{which} does not take its inputs {shown}; ONNX says: {said}") from reason
        except REFUSALS as reason:
            log.debug("%s: its type is not inferred: %s", proto.op_type, reason)
            inferred = {}
        types = [_sharper(t, inferred.get(name)) for t, name in zip(stated, proto.output, strict=True)]
        dims = self._computed_dims(proto, inputs)
        if dims is not None and types[0].other is None and types[0].dtype is not DType.UNDEFINED:
            types[0] = _merged(types[0], dims)
        return types

    def _label(self, node: Node, proto: NodeProto) -> str:
        name = self.graph.info.node_names.get(node)
        names = [n for v in node.outputs for n in self.graph.info.value_names.get(v, ())]
        return f"node '{name}' ({proto.op_type})" if name else f"the {proto.op_type} node that computes {names}"

    def _computed_dims(self, proto: NodeProto, inputs: tuple[Value | None, ...]) -> list[Dim] | None:
        """The shape of what is made to order, as far as the order is known."""
        numbers = [self.known.elements(v) if v is not None else None for v in inputs]
        if proto.op_type == "ConstantOfShape" and numbers and numbers[0] is not None:
            return numbers[0] if all(map(self.known.is_size, numbers[0])) else None
        if proto.op_type == "Reshape" and len(numbers) == 2 and numbers[1] is not None:
            positive = all(self.known.is_size(n) and n != 0 for n in numbers[1])
            return numbers[1] if positive else None
        if proto.op_type == "Expand" and len(numbers) == 2 and numbers[1] is not None and inputs[0] is not None:
            return self._expanded(inputs[0], numbers[1])
        if proto.op_type == "Range" and len(numbers) == 3 and numbers[1] is not None:
            length = numbers[1][0]
            from_0_by_1 = numbers[0] == [0] and numbers[2] == [1]
            return [length] if from_0_by_1 and self.known.is_size(length) else None
        return None

    def _expanded(self, x: Value, target: list[Dim]) -> list[Dim] | None:
        if x.type.shape is None or len(x.type.shape) > len(target) or not all(map(self.known.is_size, target)):
            return None
        pairs = list(zip(_aligned(x, len(target)), target, strict=True))
        if any(own not in (1, size) and size != 1 for own, size in pairs):
            return None
        return [size if own == 1 else own for own, size in pairs]


def _bytes(node: Node) -> bytes:
    proto = node.attrs["proto"]
    if not isinstance(proto, bytes):
        raise GraphError(f"the opaque {node!r} does not say what it is")
    return proto


def _contradict(ours: TensorType, stated: TensorType) -> bool:
    if stated.dtype is DType.UNDEFINED or stated.other is not None:
        return stated.other is not None
    if ours.dtype is not stated.dtype:
        return True
    if ours.shape is None or stated.shape is None:
        return False
    if len(ours.shape) != len(stated.shape):
        return True
    pairs = zip(ours.shape, stated.shape, strict=True)
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)


def _sharper(stated: TensorType, inferred: TypeProto | None) -> TensorType:
    """`stated` with the numbers that inference found; names that inference makes up are left aside."""
    if inferred is None or inferred.WhichOneof("value") != "tensor_type" or stated.other is not None:
        return stated
    tensor = inferred.tensor_type
    if not tensor.HasField("shape") or stated.dtype.value != tensor.elem_type or stated.shape is None:
        return stated
    if len(tensor.shape.dim) != len(stated.shape):
        return stated
    pairs = zip(tensor.shape.dim, stated.shape, strict=True)
    return stated.with_shape(d.dim_value if d.HasField("dim_value") else old for d, old in pairs)


def _merged(stated: TensorType, dims: Sequence[Dim]) -> TensorType:
    """`stated` with the sizes `dims` wherever it has no number itself."""
    if stated.shape is None:
        return stated.with_shape(dims)
    if len(stated.shape) != len(dims):
        return stated
    return stated.with_shape(a if isinstance(a, int) else b for a, b in zip(stated.shape, dims, strict=True))


# ── operators that say in attributes what was computed ───────────────────────────────────────────────────────────

Numbers = Sequence["list[Dim] | None"]


def _reshape(rebuilt: _Rebuilt, x: Value, numbers: Numbers, proto: NodeProto) -> Sequence[Value] | None:
    """A Reshape whose target is a number, the size that is there (0), or unknown at one place (−1).

    Where several places are unknown and the input's sizes in them are equal to the target's, each is a 0.
    """
    target = numbers[0] if numbers else None
    if target is None:
        return None
    zero_means_empty = any(a.name == "allowzero" and a.i for a in proto.attribute)
    if 0 in target and zero_means_empty:
        return None
    kept = list(x.type.dims)
    said = [_one(size, kept[i] if i < len(kept) else None) for i, size in enumerate(target)]
    open_places = [i for i, size in enumerate(said) if size is None]
    if len(open_places) + said.count(-1) > 1:
        return None
    shape = tuple(-1 if size is None else size for size in said)
    made = rebuilt.fresh.make(RESHAPE, [x], {"shape": shape})
    # of a place that was a formula, the operator's own type rule must come to the same
    for place in open_places:
        formula = target[place]
        if rebuilt.known.is_size(formula) and made.output.type.dims[place] != formula:
            return None
    return made.outputs


def _one(size: Dim, kept: Dim | None) -> int | None:
    if isinstance(size, int):
        return size
    return 0 if size == kept else None


def _expand(rebuilt: _Rebuilt, x: Value, numbers: Numbers, proto: NodeProto) -> Sequence[Value] | None:
    """An Expand whose target is a number, or the size that is there (1)."""
    target = numbers[0] if numbers else None
    if target is None:
        return None
    own = _aligned(x, len(target))
    said = [size if isinstance(size, int) else 1 if size == own[i] else None for i, size in enumerate(target)]
    shape = tuple(size for size in said if size is not None)
    return rebuilt.fresh.make(EXPAND, [x], {"shape": shape}).outputs if len(shape) == len(target) else None


def _aligned(x: Value, rank: int) -> list[Dim]:
    """The sizes of `x` as broadcasting to a target of `rank` dimensions sees them."""
    padded: list[Dim] = [1] * (rank - x.type.rank)
    padded.extend(x.type.dims)
    return padded[len(padded) - rank :]


def _slice(rebuilt: _Rebuilt, x: Value, numbers: Numbers, proto: NodeProto) -> Sequence[Value] | None:
    """A Slice that takes axes of symbolic size whole; one that takes everything whole is its input."""
    starts, ends, axes, steps = (numbers[i] if i < len(numbers) else None for i in range(4))
    left_out = [bool(name) and found is None for name, found in zip(proto.input[1:], numbers, strict=True)]
    if starts is None or ends is None or proto.input[3:4] == [""] or any(left_out):
        return None
    axes = axes if axes is not None else list(range(len(starts)))
    steps = steps if steps is not None else [1] * len(starts)
    cut: dict[int, tuple[int, int, int]] = {}
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(axis, int) or not isinstance(start, int) or not isinstance(step, int):
            return None
        size = x.type.dims[axis]
        if start == 0 and step == 1 and _covers(rebuilt.known, end, size):
            continue
        if not isinstance(end, int) or not isinstance(size, int):
            return None
        cut[axis] = (start, end, step)
    if not cut:
        return [x]
    parts = {name: tuple(c[i] for c in cut.values()) for i, name in enumerate(("starts", "ends", "steps"))}
    return rebuilt.fresh.make(SLICE, [x], {**parts, "axes": tuple(a % x.type.rank for a in cut)}).outputs


def _covers(known: Known, end: Dim, size: Dim) -> bool:
    """Whether a Slice from 0 to `end` takes all of an axis, for every value of the symbols."""
    if isinstance(end, int) and end >= _ENDLESS:
        return True
    return end == size or known.is_size(end - size)


Reader = Callable[[_Rebuilt, Value, Numbers, NodeProto], "Sequence[Value] | None"]
_PARTLY: dict[str, Reader] = {"Reshape": _reshape, "Expand": _expand, "Slice": _slice}

__all__ = ["fold_shapes", "freeze", "specialise"]
