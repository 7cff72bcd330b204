"""The bodies of If, Loop, Scan and the like: read as graphs of their own, and written back into their node.

What a body reads of the surrounding graph becomes an input of it, or a weight where it is one outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from taso.graph.errors import GraphError, ModelError
from taso.graph.evaluate import weight_of
from taso.graph.graph import Graph, Node, Value
from taso.graph.onnx_export import export
from taso.graph.onnx_import import load
from taso.graph.onnx_protos import (
    all_names,
    bodies,
    captured_names,
    defined_names,
    rename_captures,
    type_proto,
)  # fmt: skip
from taso.graph.operator import AttrValue, Trait, Weight
from taso.graph.types import DType, SymDim, TensorType

_ROUNDS = 16
"""How often the types of a loop's state are loosened before the body is left alone."""


@dataclass(frozen=True)
class Body:
    """Body number `position` of a node. `graph` has the body's inputs first, then what it captures (`captured`).

    `outside` names the weights of the surrounding graph that it reads; `like` are sizes for its symbols, from what the
    node is fed.
    """

    position: int
    label: str
    graph: Graph
    captured: tuple[str, ...]
    outside: Mapping[Weight, str]
    like: Mapping[str, int]


# ── the doors ────────────────────────────────────────────────────────────────────────────────────────────────────


def body_labels(node: Node) -> list[str]:
    """For each body of an opaque node of ONNX the attribute that holds it; none for other nodes."""
    if not node.op.has(Trait.OPAQUE) or node.op.domain != "":
        return []
    return [a.name for a in _proto(node).attribute for _ in bodies(NodeProto(attribute=[a]))]


def read_body(graph: Graph, node: Node, position: int, sizes: Mapping[str, int]) -> Body:
    """Body `position` of `node`, a node of `graph`; `sizes` are those of the symbols of `graph`.

    The shapes that a body states of itself are believed as far as they hold in every iteration. Raises `ModelError`
    where the body cannot be read alone.
    """
    proto = bodies(_proto(node))[position]
    if defined_names(GraphProto(input=proto.input)) & {t.name for t in proto.initializer}:
        raise ModelError("it gives an input a default value")
    outer = _captured_values(node)
    captured = tuple(name for name in _free_names(proto) if name in outer)
    fed = _fed(node, len(proto.input))
    types = [_input_type(v.type, t, node) for v, t in zip(proto.input, fed, strict=True)]
    inner = _settled(graph, node, proto, types, {name: outer[name].type for name in captured})
    like = _sizes_like(inner, fed, sizes)
    outside: dict[Weight, str] = {}
    for name in captured:
        if outer[name].node.op.name == "Weight":
            outside.setdefault(weight_of(outer[name]), name)
    label = body_labels(node)[position]
    return Body(position, label, _with_weights(inner, captured, outer), captured, outside, like)


def with_bodies(graph: Graph, changed: Mapping[Node, Sequence[tuple[Body, Graph]]]) -> Graph:
    """`graph` with bodies of some nodes replaced by equal graphs. Raises `GraphError` where one cannot be written."""
    names = _names(graph)

    def replacement(fresh: Graph, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        types = [v.type for v in node.outputs]
        if node not in changed:
            return fresh.make(node.op, inputs, node.attrs, types, node.origin).outputs
        attrs = _rewritten(node, changed[node], names, graph.info.ir_version)
        old, new = _captures(node.attrs["captures"]), _captures(attrs["captures"])
        own = len(inputs) - len(old)
        by_name = dict(zip(old, inputs[own:], strict=True))
        given = [*inputs[:own], *(by_name[name] for name in new)]
        return fresh.make(node.op, given, attrs, types, node.origin).outputs

    return graph.rebuilt(replacement)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _proto(node: Node) -> NodeProto:
    data = node.attrs["proto"]
    if not isinstance(data, bytes):
        raise GraphError(f"the opaque {node!r} does not say what it is")
    return NodeProto.FromString(data)


def _captures(names: AttrValue) -> list[str]:
    return [str(name) for name in names] if isinstance(names, tuple) else []


def _free_names(body: GraphProto) -> tuple[str, ...]:
    holder = NodeProto()
    holder.attribute.append(helper.make_attribute("body", body))
    return captured_names(holder)


def _captured_values(node: Node) -> dict[str, Value]:
    names = _captures(node.attrs["captures"])
    values = node.inputs[len(node.inputs) - len(names) :]
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _fed(node: Node, count: int) -> list[TensorType | None]:
    """Types of what the node feeds to the `count` inputs of its body at first; None where that is not known."""
    own = [v.type if v is not None else None for v in node.inputs[: len(node.inputs) - len(_captured_values(node))]]
    if node.op.label == "Loop" and len(own) == count:
        # Loop: trip count and condition, then the state
        return [TensorType(DType.INT64, ()), TensorType(DType.BOOL, ()), *own[2:]]
    if node.op.label == "Scan" and len(own) == count and node.attrs.int("opset") >= 9:
        said = {a.name: a for a in _proto(node).attribute}
        scanned = said["num_scan_inputs"].i
        axes = list(said["scan_input_axes"].ints) if "scan_input_axes" in said else [0] * scanned
        return [*own[: count - scanned], *map(_slice, own[count - scanned :], axes)]
    return [None] * count


def _slice(type: TensorType | None, axis: int) -> TensorType | None:
    """The type of what one step of a Scan sees."""
    if type is None or not type.shape or type.other is not None:
        return None
    dims = list(type.shape)
    del dims[axis]
    return type.with_shape(dims)


def _input_type(stated: TypeProto, fed: TensorType | None, node: Node) -> TypeProto:
    """What a body may assume of an input: numbers only, for a loop may give a symbol another size every time."""
    result = TypeProto()
    result.CopyFrom(stated)
    if stated.WhichOneof("value") is None and fed is not None:
        result.CopyFrom(type_proto(fed))
    if result.WhichOneof("value") != "tensor_type":
        return result
    shape = fed.shape if fed is not None and fed.other is None else None
    if shape is not None and 0 in shape:
        raise ModelError("what it starts from is empty")
    tensor = result.tensor_type
    if not tensor.HasField("shape") and shape is not None and fed is not None:
        result.CopyFrom(type_proto(fed))
    for position, dim in enumerate(tensor.shape.dim):
        given = shape[position] if shape is not None and len(shape) == len(tensor.shape.dim) else None
        if dim.HasField("dim_value") and isinstance(given, int) and dim.dim_value != given:
            raise ModelError("the shapes that it states are not those that it is given")
        dim.ClearField("dim_param")
        if isinstance(given, int):
            dim.dim_value = given
    if shape is not None and tensor.HasField("shape") and len(shape) != len(tensor.shape.dim):
        raise ModelError("the shapes that it states are not those that it is given")
    return result


def _settled(
    graph: Graph, node: Node, body: GraphProto, types: list[TypeProto], captured: Mapping[str, TensorType]
) -> Graph:
    """The body as a graph, with types of its state that hold after each iteration if they did before."""
    state = range(2, len(types)) if node.op.label == "Loop" else range(0)
    for _ in range(_ROUNDS):
        inner = load(_model(graph, node, body, types, captured), graph_class=type(graph))
        # a Loop's body gives the condition first, then the state
        loosened = [_loosened(types[i], inner.outputs[i - 1][1].type) for i in state]
        if not any(loosened):
            inner.info.value_infos.update((v.name, v.SerializeToString()) for v in body.value_info)
            return inner
    raise ModelError("the shapes of its state change too often")


def _loosened(assumed: TypeProto, result: TensorType) -> bool:
    """Takes from `assumed` what does not hold of `result`; says whether there was anything."""
    if assumed.WhichOneof("value") != "tensor_type" or not assumed.tensor_type.HasField("shape"):
        return False
    dims = assumed.tensor_type.shape.dim
    if result.shape is None or len(result.shape) != len(dims):
        assumed.tensor_type.ClearField("shape")
        return True
    wrong = [d for d, now in zip(dims, result.shape, strict=True) if d.HasField("dim_value") and d.dim_value != now]
    for dim in wrong:
        dim.ClearField("dim_value")
    return bool(wrong)


def _model(
    graph: Graph, node: Node, body: GraphProto, types: Sequence[TypeProto], captured: Mapping[str, TensorType]
) -> ModelProto:
    """The body as a model: what it captures comes after its inputs, and its outputs state no shapes."""
    model = ModelProto(ir_version=max(graph.info.ir_version, 4))
    model.graph.CopyFrom(body)
    for kind in ("input", "output", "value_info"):
        model.graph.ClearField(kind)
    for declared, type in zip(body.input, types, strict=True):
        model.graph.input.append(ValueInfoProto(name=declared.name, type=type))
    for name, known in captured.items():
        model.graph.input.append(ValueInfoProto(name=name, type=type_proto(known)))
    for declared in body.output:
        said = model.graph.output.add(name=declared.name)
        said.type.CopyFrom(declared.type)
        if said.type.WhichOneof("value") == "tensor_type":
            said.type.tensor_type.ClearField("shape")
    opsets = {**graph.info.opsets, "": node.attrs.int("opset")}
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in opsets.items())
    return model


def _sizes_like(inner: Graph, fed: Sequence[TensorType | None], sizes: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {s: sizes.get(s, 1) for s in inner.symbols}
    for value, given in zip(inner.inputs, fed, strict=False):
        for own, outer in zip(value.type.shape or (), (given.shape if given else None) or (), strict=False):
            symbol = own.symbol if isinstance(own, SymDim) else None
            named = outer.symbol if isinstance(outer, SymDim) else None
            size = outer if isinstance(outer, int) else sizes.get(named or "")
            if symbol is not None and size is not None:
                found[symbol] = size
    return found


def _with_weights(inner: Graph, captured: Sequence[str], outer: Mapping[str, Value]) -> Graph:
    """The body with the weights of the surrounding graph as weights and not as inputs."""
    weights = {name: weight_of(outer[name]) for name in captured if outer[name].node.op.name == "Weight"}
    if not weights:
        return inner

    def replacement(fresh: Graph, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        name = node.attrs["name"] if node.op.name == "Input" else None
        if isinstance(name, str) and name in weights:
            return [fresh.add_weight(weights[name])]
        return fresh.make(node.op, inputs, node.attrs, [v.type for v in node.outputs], node.origin).outputs

    fresh = inner.rebuilt(replacement)
    kept = [(n, v) for n, v in zip(fresh.input_names, fresh.inputs, strict=True) if n not in weights]
    fresh.input_names, fresh.inputs = [n for n, _ in kept], [v for _, v in kept]
    return fresh


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _rewritten(
    node: Node, changed: Sequence[tuple[Body, Graph]], outer: set[str], ir_version: int
) -> dict[str, AttrValue]:
    """The attributes of `node` with other bodies; new names in them are none of the names `outer`."""
    proto = _proto(node)
    before = all_names(proto)
    for body, graph in changed:
        target = bodies(proto)[body.position]
        target.CopyFrom(_written(target, body, graph))
        if ir_version < 4:
            _without_initializers(target, body, node.attrs.int("opset"))
    inside = outer | before | all_names(proto)

    def fresh(name: str) -> str:
        number = 1
        while f"{name}_{number}" in inside:
            number += 1
        inside.add(f"{name}_{number}")
        return f"{name}_{number}"

    rename_captures(proto, {}, lambda name: name in outer and name not in before, fresh)
    return {
        **node.attrs, "proto": proto.SerializeToString(deterministic=True), "captures": captured_names(proto)
    }  # fmt: skip


def _written(old: GraphProto, body: Body, graph: Graph) -> GraphProto:
    """The body `graph` as ONNX, with the inputs and outputs of `old` word for word."""
    written = export(_with_inputs(graph, body.outside)).graph
    if [v.name for v in written.output] != [v.name for v in old.output]:
        raise GraphError(f"the outputs of {body.label} would change")
    if [v.name for v in written.input[: len(old.input)]] != [v.name for v in old.input]:
        raise GraphError(f"the inputs of {body.label} would change")
    for kind in ("input", "output"):
        written.ClearField(kind)
    written.input.extend(old.input)
    written.output.extend(old.output)
    strange = set(_free_names(written)) - set(body.captured)
    if strange:
        raise GraphError(f"{body.label} would read '{sorted(strange)[0]}', which it did not read before")
    return written


def _without_initializers(target: GraphProto, body: Body, opset: int) -> None:
    """Makes initializers Constant nodes: up to IR version 3 they would have to be inputs, which the node feeds."""
    for tensor in target.initializer:
        if opset < 9 and tensor.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE):
            raise GraphError(f"a Constant of opset {opset} cannot hold what {body.label} would: whole numbers")
    constants = [
        NodeProto(op_type="Constant", output=[t.name], attribute=[helper.make_attribute("value", t)])
        for t in target.initializer
    ]
    rest = list(target.node)
    target.ClearField("initializer")
    target.ClearField("node")
    target.node.extend([*constants, *rest])


def _with_inputs(graph: Graph, outside: Mapping[Weight, str]) -> Graph:
    """The graph with the weights `outside` as inputs behind its own, so that they are not written into the body."""
    added: list[tuple[str, Value]] = []

    def replacement(fresh: Graph, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        data = node.attrs["data"] if node.op.name == "Weight" else None
        if isinstance(data, Weight) and data in outside:
            added.append((outside[data], fresh.add_input(outside[data], data.type)))
            return [added[-1][1]]
        return fresh.make(node.op, inputs, node.attrs, [v.type for v in node.outputs], node.origin).outputs

    fresh = graph.rebuilt(replacement)
    fresh.inputs = [*fresh.inputs, *(v for _, v in added)]
    fresh.input_names = [*fresh.input_names, *(n for n, _ in added)]
    fresh.info.input_order = []
    return fresh


def _names(graph: Graph) -> set[str]:
    """All names that a file of `graph` may use outside of bodies."""
    names = {n for given in graph.info.value_names.values() for n in given}
    names.update(graph.input_names, graph.info.input_order, (name for name, _ in graph.outputs))
    names.update(weight_of(n.output).name for n in graph.nodes if n.op.name == "Weight")
    names.update(w.name for weights in graph.info.literals.values() for w in weights)
    return names - {""}


__all__ = ["Body", "body_labels", "read_body", "with_bodies"]
