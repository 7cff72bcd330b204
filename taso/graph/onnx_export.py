"""Graphs into ONNX models: operators of the graph's own opset only, every name that a file gave kept."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from onnx import (
    ModelProto,
    NodeProto,
    StringStringEntryProto,
    TensorAnnotation,
    TensorProto,
    ValueInfoProto,
    helper,
)  # fmt: skip

from taso.graph.composite import written_out
from taso.graph.errors import ModelError
from taso.graph.evaluate import constant_value, weight_of
from taso.graph.graph import Graph, Node, Value
from taso.graph.onnx_import import load
from taso.graph.onnx_opset import checked_opset, converted, respelled
from taso.graph.onnx_protos import (
    all_names,
    array_bytes,
    array_of,
    element_type,
    fill_tensor,
    rename_captures,
    schema,
    spell,
    type_proto,
)  # fmt: skip
from taso.graph.onnx_weights import (
    ConstantNode,
    External,
    Filled,
    Initializer,
    Sparse,
    bytes_needed,
    stored_weight_bytes,
)  # fmt: skip
from taso.graph.onnx_wire import Held, spliced
from taso.graph.operator import Array, Trait, Unspellable, Weight
from taso.graph.types import DType, TensorType

SLACK = 1 << 20
LIMIT = (1 << 31) - (1 << 24)
_OUTSIDE = 1024
_ALIGNMENT = 4096

# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Names:
    """The one place that hands out names: none twice, and none that a file uses already."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._taken: set[str] = set()
        self._avoided = {"", *reserved}
        self._counts: dict[str, int] = {}

    def taken(self, name: str) -> bool:
        return name in self._taken

    def take(self, name: str) -> str:
        """`name` itself, from now on in use."""
        self._taken.add(name)
        return name

    def fresh(self, base: str) -> str:
        """A name that begins with `base` and occurs nowhere."""
        name = base
        while name in self._taken or name in self._avoided:
            self._counts[base] = self._counts.get(base, 0) + 1
            name = f"{base}_{self._counts[base]}"
        return self.take(name)

    def prefer(self, wanted: Iterable[str], base: str) -> str:
        """The first of the names `wanted` that is free, else a fresh one."""
        for name in wanted:
            if name and name not in self._taken:
                return self.take(name)
        return self.fresh(base)


# ── what is folded ───────────────────────────────────────────────────────────────────────────────────────────────


def folded_nodes(graph: Graph, fold_limit: int = SLACK) -> set[Node]:
    """The operators on weights alone whose results are written as initializers instead.

    Always where ONNX has no such operator. What rules made is folded where that adds at most `fold_limit` bytes to the
    weights it was made of, and where the opset cannot spell it; what the file had stays as it was.
    """
    return {
        node for node in graph.operators
        if node.constant and (node.op.internal or (node.origin and _foldable(node, graph.info.opset, fold_limit)))
    }  # fmt: skip


def _foldable(node: Node, opset: int, fold_limit: int) -> bool:
    result = sum(v.type.nbytes for v in node.outputs)
    if result <= fold_limit + sum(map(stored_weight_bytes, _weights_behind(node))):
        return True
    try:
        spell(node.op, node.attrs, [v.type if v is not None else None for v in node.inputs], opset)
    except Unspellable:
        return True
    return False


def _weights_behind(node: Node) -> list[Weight]:
    """The weights that a node's value is computed from."""
    seen: dict[Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen[current] = None
            stack.extend(v.node for v in current.inputs if v is not None)
    return [weight_of(n.output) for n in seen if n.op.has(Trait.SOURCE)]


# ── where tensors' bytes go ──────────────────────────────────────────────────────────────────────────────────────


class _Inside:
    """Keeps all bytes in the model."""

    def store(self, tensor: TensorProto, data: Held) -> None:
        tensor.raw_data = data.make().tobytes()


class _Later:
    """Keeps the bytes of large tensors out of the model, in which a mark says where they go when it is written."""

    def __init__(self) -> None:
        self.mark = os.urandom(16)
        self.held: dict[bytes, Held] = {}

    def store(self, tensor: TensorProto, data: Held) -> None:
        if data.length < _OUTSIDE:
            tensor.raw_data = data.make().tobytes()
            return
        tensor.raw_data = self.mark + len(self.held).to_bytes(8, "little")
        self.held[tensor.raw_data] = data


@dataclass
class _Outside:
    """Writes the bytes of large tensors to a file of their own (ONNX's ExternalData.md), aligned to pages."""

    file: IO[bytes]
    location: str

    def store(self, tensor: TensorProto, data: Held) -> None:
        if data.length < _OUTSIDE:
            tensor.raw_data = data.make().tobytes()
            return
        offset = self.file.tell()
        padding = -offset % _ALIGNMENT
        self.file.write(bytes(padding))
        self.file.write(data.make())
        tensor.data_location = TensorProto.EXTERNAL
        said = {"location": self.location, "offset": str(offset + padding), "length": str(data.length)}
        for key, value in said.items():
            tensor.external_data.add(key=key, value=value)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Writer:
    """Writes one graph."""

    def __init__(self, graph: Graph, fold_limit: int, store: _Inside | _Later | _Outside) -> None:
        graph = written_out(graph, graph.info.opset)
        self.graph = graph
        self.info = graph.info
        self.fold_limit = fold_limit
        self.store = store
        self.model = ModelProto()
        self.proto = self.model.graph
        self.sources = set(graph.inputs)
        self.folded = folded_nodes(graph, fold_limit)
        self.nodes = written_nodes(graph, self.folded)
        self.read = {v for node in self.nodes for v in node.inputs if v is not None}
        self.read.update(v for _, v in graph.outputs)
        self.names = Names(self._reserved())
        self.node_names = Names()
        self.name_of: dict[Value, str] = {}
        self.weight_names: dict[Weight, str] = {}
        self.by_weight: dict[Weight, Value] | None = None
        self.literals: dict[tuple[object, ...], str] = {}
        self.written: set[str] = set()
        self.identities: list[tuple[str, str]] = []
        self.domains = {""} if not self.info.opsets else set(self.info.opsets)

    def run(self) -> ModelProto:
        self._name_sources_and_outputs()
        self._name_nodes()
        for node in self.nodes:
            self._write_node(node)
        for name, value in self.graph.outputs:
            self._available(value)
            self.proto.output.append(self._declared(name, value.type))
        for target, source in self.identities:
            self._append(helper.make_node("Identity", [source], [target]), "")
        self._write_inputs()
        self._write_value_infos()
        return self._model()

    # ── names ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reserved(self) -> Iterator[str]:
        for names in self.info.value_names.values():
            yield from names
        yield from self.graph.input_names
        yield from self.info.input_order
        yield from (name for name, _ in self.graph.outputs)
        # a value that is gone leaves its type and its quantization behind: nobody else may be called like it
        yield from self.info.value_infos
        yield from (TensorAnnotation.FromString(a).tensor_name for a in self.info.annotations)
        for node in self.nodes:
            proto = node.attrs.get("proto")
            if isinstance(proto, bytes) and node.op.has(Trait.OPAQUE):
                yield from all_names(NodeProto.FromString(proto))

    def _known_names(self, value: Value) -> list[str]:
        names = list(self.info.value_names.get(value, ()))
        if value.node.op.has(Trait.SOURCE) and value.node.constant:
            names.append(weight_of(value).name)
        return names

    def _name_sources_and_outputs(self) -> None:
        """Inputs keep their names; an output's name goes to its value, or to an Identity where that has another."""
        for name, value in zip(self.graph.input_names, self.graph.inputs, strict=True):
            self.name_of[value] = self.names.take(name)
        outputs = list(dict.fromkeys(self.graph.outputs))
        for name, value in outputs:
            if self.names.taken(name) and self.name_of.get(value) != name:
                raise ModelError(f"the output '{name}' of the graph has the name of one of its inputs")
            if value not in self.name_of and (not self._is_stored(value) or self._was_called(value, name)):
                self.name_of[value] = name
            self.names.take(name)
        for name, value in outputs:
            if value not in self.name_of:
                self.name_of[value] = self._name(value)
            if self.name_of[value] != name:
                self.identities.append((name, self.name_of[value]))

    def _was_called(self, value: Value, name: str) -> bool:
        """Whether the file itself has the weight `value` under the name of an output."""
        return value.node.op.has(Trait.SOURCE) and name in self._known_names(value)

    def _is_stored(self, value: Value) -> bool:
        """Whether `value` is there without a node that computes it."""
        return value.node.op.has(Trait.SOURCE) or value.node in self.folded

    def _name(self, value: Value) -> str:
        base = "weight" if self._is_stored(value) else value.node.op.label.lower()
        return self.names.prefer(self._known_names(value), base)

    def _name_nodes(self) -> None:
        """Gives every value a name, those that files gave first, so that no new name comes before an old one."""
        values = [v for node in self.nodes for v in node.outputs]
        values += [v for node in self.nodes for v in node.inputs if v is not None and self._is_stored(v)]
        waiting = [v for v in dict.fromkeys(values) if v not in self.name_of]
        for value in sorted(waiting, key=lambda v: not self._known_names(v)):
            self.name_of[value] = self._name(value)

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _write_node(self, node: Node) -> None:
        if node.op.has(Trait.SOURCE):
            return
        inputs = [self._available(v) if v is not None else "" for v in node.inputs]
        proto = self._opaque(node, inputs) if node.op.has(Trait.OPAQUE) else self._spelled(node, inputs)
        if node in self.info.node_docs:
            proto.doc_string = self.info.node_docs[node]
        for key, value in self.info.node_metadata.get(node, ()):
            proto.metadata_props.add(key=key, value=value)
        self._append(proto, self._node_name(node))

    def _node_name(self, node: Node) -> str:
        known = self.info.node_names.get(node)
        if known is None:
            return self.node_names.fresh(node.op.label)
        return known if not known else self.node_names.prefer([known], known)

    def _append(self, proto: NodeProto, name: str) -> None:
        if name:
            proto.name = name
        self.domains.add(proto.domain)
        self.written.update(proto.output)
        self.proto.node.append(proto)

    def _spelled(self, node: Node, inputs: Sequence[str]) -> NodeProto:
        types = [v.type if v is not None else None for v in node.inputs]
        try:
            proto, given = spell(node.op, node.attrs, types, self.info.opset)
        except Unspellable as error:
            raise ModelError(f"{node!r} cannot be written: {error}") from error
        for source in given:
            if isinstance(source, int):
                proto.input.append(inputs[source])
            else:
                proto.input.append("" if source is None else self._literal(source, node))
        proto.output.extend(self._output_names(node))
        return proto

    def _output_names(self, node: Node) -> list[str]:
        """Names of the outputs; one that may be left out and that nobody reads has none."""
        optional = node.op.optional_outputs
        names = ["" if i in optional and v not in self.read else self.name_of[v] for i, v in enumerate(node.outputs)]
        while len(names) > 1 and not names[-1]:
            names.pop()
        return names

    def _opaque(self, node: Node, inputs: Sequence[str]) -> NodeProto:
        proto, captures, pattern = node.attrs["proto"], node.attrs["captures"], node.attrs["outputs"]
        if not (isinstance(proto, bytes) and isinstance(captures, tuple) and isinstance(pattern, tuple)):
            raise ModelError(f"the opaque {node!r} does not say what it is")
        written = NodeProto.FromString(proto)
        own = len(inputs) - len(captures)
        written.input.extend(inputs[:own])
        written.output.extend(self.name_of[v] if used else "" for v, used in zip(node.outputs, pattern, strict=True))
        outer = {str(name): now for name, now in zip(captures, inputs[own:], strict=True)}
        rename_captures(written, outer, self.names.taken, self.names.fresh)
        return written

    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _available(self, value: Value) -> str:
        """The name of `value`, which is written now if it is a weight or folded."""
        name = self.name_of[value]
        if name in self.written or value in self.sources:
            return name
        if value.node in self.folded:
            self._initializer(name, lambda: constant_value(value), value.type)
        elif value.node.op.has(Trait.SOURCE):
            self._write_weight(weight_of(value), name)
        return name

    def _write_weight(self, weight: Weight, name: str) -> None:
        if name in self.written:
            return
        self.written.add(name)
        self.weight_names[weight] = name
        original = weight.original
        if isinstance(original, ConstantNode) and self._knows(original.node):
            self._write_constant(original, name)
        elif isinstance(original, Filled) and self._knows(original.node):
            self._write_filled(original, name)
        elif isinstance(original, Filled) and weight.type.nbytes > self.fold_limit:
            raise ModelError(
                f"opset {self.info.opset} has no ConstantOfShape, and '{name}' of type {weight.type} written out would "
                f"take {weight.type.nbytes} bytes, more than the limit of {self.fold_limit}"
            )
        elif isinstance(original, Sparse):
            sparse = self.proto.sparse_initializer.add()
            sparse.CopyFrom(original.tensor)
            sparse.values.name = name
        else:
            self._write_initializer(weight, name)

    def _knows(self, node: NodeProto) -> bool:
        """Whether the opset has the node's operator with its attributes."""
        found = schema(node.op_type, self.info.opset, "")
        return found is not None and all(a.name in found.attributes for a in node.attribute)

    def _write_initializer(self, weight: Weight, name: str) -> None:
        original = weight.original
        if isinstance(original, External):
            tensor = self.proto.initializer.add()
            _describe(tensor, original.tensor, name)
            self.store.store(tensor, Held(len(original.held), original.held.lease))
        elif isinstance(original, Initializer):
            self._copy(self.proto.initializer.add(), original.tensor, name)
        else:
            self._initializer(name, weight.array, weight.type)

    def _copy(self, target: TensorProto, tensor: TensorProto, name: str) -> None:
        """Copies a tensor that holds its own data, which goes where the store puts it."""
        dtype = element_type(tensor.data_type)
        as_it_is = isinstance(self.store, _Later) and not tensor.HasField("raw_data")
        if isinstance(self.store, _Inside) or as_it_is or dtype is None or dtype is DType.STRING:
            target.CopyFrom(tensor)
            target.name = name
            return
        _describe(target, tensor, name)
        self.store.store(target, _bytes_of(lambda: array_of(tensor), TensorType(dtype, tuple(tensor.dims))))

    def _initializer(self, name: str, load: Callable[[], Array], type: TensorType) -> None:
        """Writes the array that `load` gives; it is asked for when its bytes are written and not kept."""
        self.written.add(name)
        tensor = self.proto.initializer.add()
        if type.dtype is DType.STRING:
            fill_tensor(tensor, load(), type.dtype, name)
            return
        tensor.name, tensor.data_type = name, type.dtype.value
        tensor.dims[:] = type.static_shape
        self.store.store(tensor, _bytes_of(load, type))

    def _write_constant(self, original: ConstantNode, name: str) -> None:
        node = NodeProto()
        node.CopyFrom(original.node)
        node.output[:] = [name]
        said, target = original.node.attribute[0], node.attribute[0]
        if original.held is not None:
            target.ClearField("t")
            _describe(target.t, said.t, said.t.name)
            self.store.store(target.t, Held(len(original.held), original.held.lease))
        elif not isinstance(self.store, _Inside) and said.HasField("t"):
            target.ClearField("t")
            self._copy(target.t, said.t, said.t.name)
        self._append(node, self.node_names.prefer([node.name], node.name) if node.name else "")

    def _write_filled(self, original: Filled, name: str) -> None:
        node = NodeProto()
        node.CopyFrom(original.node)
        node.input[:] = [self._weight(original.shape)]
        node.output[:] = [name]
        self._append(node, self.node_names.prefer([node.name], node.name) if node.name else "")

    def _weight(self, weight: Weight) -> str:
        """The name of a weight that need not be a value of the graph; it is written if it is not there yet."""
        if weight not in self.weight_names:
            value = self._value_of(weight)
            if value is not None and value in self.name_of:
                return self._available(value)
            self._write_weight(weight, self.names.prefer([weight.name], "weight"))
        return self.weight_names[weight]

    def _value_of(self, weight: Weight) -> Value | None:
        return self._weight_values().get(weight)

    def _weight_values(self) -> Mapping[Weight, Value]:
        if self.by_weight is None:
            # asked for once all values have their names
            stored = [v for v in self.name_of if v.node.op.has(Trait.SOURCE) and v.node.constant]
            self.by_weight = {weight_of(v): v for v in stored}
        return self.by_weight

    def _literal(self, array: Array, node: Node) -> str:
        """The name of a constant that became an attribute: the weight that it was in the file, or a new initializer."""
        dtype = DType.from_numpy(array.dtype)
        key = (dtype, array.shape, array.tobytes())
        given = self.info.literals.get(node, ())
        if len(given) == 1 and _same_numbers(given[0].array(), array):
            # in the element type that the file has it in, too: runtimes know OneHot and CumSum in some types alone
            return self._weight(given[0])
        for weight in given:
            if (weight.type.dtype, weight.type.shape) == key[:2] and weight.array().tobytes() == key[2]:
                return self._weight(weight)
        if key not in self.literals:
            self.literals[key] = self.names.fresh("constant")
            self._initializer(self.literals[key], lambda: array, TensorType(dtype, array.shape))
        return self.literals[key]

    # ── the rest of the model ────────────────────────────────────────────────────────────────────────────────────

    def _declared(self, name: str, type: TensorType) -> ValueInfoProto:
        if name in self.info.value_infos:
            return ValueInfoProto.FromString(self.info.value_infos[name])
        return helper.make_value_info(name, type_proto(type))

    def _write_inputs(self) -> None:
        """Inputs in the file's order; up to IR version 3 every initializer is listed too."""
        types = dict(zip(self.graph.input_names, (v.type for v in self.graph.inputs), strict=True))
        for name, weight in self.info.input_defaults.items():
            if name in types:
                self._write_initializer(weight, name)
        if self.info.ir_version < 4:
            for tensor in self.proto.initializer:
                if tensor.name not in types:
                    types[tensor.name] = TensorType(DType(tensor.data_type), tuple(tensor.dims))
        order = dict.fromkeys(n for n in self.info.input_order if n in types)
        order.update(dict.fromkeys(types))
        for name in order:
            self.proto.input.append(self._declared(name, types[name]))

    def _write_value_infos(self) -> None:
        """Types that the file gave, and those that only the graph knows: of operators foreign to ONNX."""
        listed = {v.name for v in (*self.proto.input, *self.proto.output)} | {t.name for t in self.proto.initializer}
        for node in self.nodes:
            foreign = node.op.has(Trait.OPAQUE) and node.op.domain != ""
            for value in node.outputs:
                name = self.name_of[value]
                if name in listed or name not in self.written:
                    continue
                if name in self.info.value_infos or (foreign and value.type.shape is not None):
                    listed.add(name)
                    self.proto.value_info.append(self._declared(name, value.type))
        self.proto.metadata_props.extend(_properties(self.info.graph_metadata))
        names = listed | self.written
        for data in self.info.annotations:
            annotation = TensorAnnotation.FromString(data)
            if annotation.tensor_name in names:
                self.proto.quantization_annotation.append(annotation)

    def _model(self) -> ModelProto:
        info, model = self.info, self.model
        model.ir_version = info.ir_version
        said = {
            "producer_name": info.producer_name, "producer_version": info.producer_version, "domain": info.domain,
            "model_version": info.model_version, "doc_string": info.doc,
        }  # fmt: skip
        for name, value in said.items():
            if value:
                setattr(model, name, value)
        model.graph.name = info.graph_name
        if info.graph_doc:
            model.graph.doc_string = info.graph_doc
        opsets = dict(info.opsets)
        if "" in self.domains:
            opsets.setdefault("", info.opset)
        model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in opsets.items())
        model.metadata_props.extend(_properties(info.metadata))
        for data in info.functions:
            model.functions.add().ParseFromString(data)
        return model


def written_nodes(graph: Graph, folded: set[Node]) -> list[Node]:
    """The live nodes that a file has as nodes, inputs among them: what only folded nodes read is left out."""
    live: dict[Node, None] = {}
    stack = [v.node for v in graph.inputs] + [v.node for _, v in graph.outputs]
    while stack:
        node = stack.pop()
        if node not in live and node not in folded:
            live[node] = None
            stack.extend(v.node for v in node.inputs if v is not None)
    return [node for node in graph.nodes if node in live]


def _bytes_of(load: Callable[[], Array], type: TensorType) -> Held:
    return Held(bytes_needed(type), lambda: array_bytes(load(), type.dtype))


def _describe(target: TensorProto, tensor: TensorProto, name: str) -> None:
    """Says of `target` everything that `tensor` says but its data."""
    target.name, target.data_type = name, tensor.data_type
    if tensor.doc_string:
        target.doc_string = tensor.doc_string
    target.dims[:] = tensor.dims
    target.metadata_props.extend(tensor.metadata_props)


def _properties(metadata: Mapping[str, str]) -> Iterator[StringStringEntryProto]:
    for key, value in metadata.items():
        yield StringStringEntryProto(key=key, value=value)


# ── the doors ────────────────────────────────────────────────────────────────────────────────────────────────────


def stored_bytes(graph: Graph, fold_limit: int = SLACK) -> int:
    """Bytes of all tensors that a file of `graph` holds."""
    folded = folded_nodes(graph, fold_limit)
    read = {v for node in written_nodes(graph, folded) for v in node.inputs if v is not None}
    read.update(v for _, v in graph.outputs)
    total = sum(v.type.nbytes for v in read if v.node in folded)
    weights = [weight_of(v) for v in read if v.node.constant and v.node.op.has(Trait.SOURCE)]
    weights.extend(graph.info.input_defaults.values())
    return total + sum(map(stored_weight_bytes, weights))


def _same_numbers(one: Array, other: Array) -> bool:
    if one.dtype == object or one.size != other.size:
        return False
    return bool((one.reshape(-1) == other.reshape(-1)).all())


def export(graph: Graph, *, opset: int | None = None, fold_limit: int = SLACK) -> ModelProto:
    """`graph` as an ONNX model in memory, in `opset`, or that of the file it came from (ONNX 21 if built by hand).

    `fold_limit` is how many bytes an operator on weights may add when it is replaced by its result. Raises `ModelError`
    where the opset cannot say what the graph does, and above 2 GB, which protobuf cannot hold.
    """
    if opset is not None and checked_opset(opset) != graph.info.opset:
        same = respelled(graph, opset)
        return converted(export(graph, fold_limit=fold_limit), opset) if same is None else export(
            same, fold_limit=fold_limit
        )
    size = stored_bytes(graph, fold_limit)
    if size > LIMIT:
        raise ModelError(
            f"the model holds {size} bytes of weights, more than the 2 GB of one protobuf; save it to a file instead"
        )
    return _Writer(graph, fold_limit, _Inside()).run()


def save(
    graph: Graph, path: str | os.PathLike[str], *, opset: int | None = None, fold_limit: int = SLACK,
    external_data: bool | None = None,
) -> None:  # fmt: skip
    """Writes `graph` to the ONNX file `path`; large tensors go to `path`.data beside it above 2 GB, or if asked for.

    The file appears whole or not at all; `opset` and `fold_limit` are those of `export`. Weights are written one by
    one, and from mapped files without a copy. Raises `ModelError` where the graph or the file cannot be written.
    """
    if opset is not None and checked_opset(opset) != graph.info.opset:
        graph = respelled(graph, opset) or load(export(graph, opset=opset, fold_limit=fold_limit))
    target = checked_target(path)
    outside = external_data if external_data is not None else stored_bytes(graph, fold_limit) > LIMIT
    try:
        if outside:
            _save_in_two(graph, target, fold_limit)
        else:
            _save_in_one(graph, target, fold_limit)
    except OSError as error:
        raise ModelError(f"'{target}' cannot be written: {error.strerror or error}") from error


def _save_in_two(graph: Graph, target: str, fold_limit: int) -> None:
    data_path = target + ".data"
    with _temporary(data_path) as (file, name):
        model = _Writer(graph, fold_limit, _Outside(file, os.path.basename(data_path))).run()
        _finish(file)
        with _temporary(target) as (model_file, model_name):
            model_file.write(model.SerializeToString())
            _finish(model_file)
            os.replace(name, data_path)
            os.replace(model_name, target)


def checked_target(path: str | os.PathLike[str]) -> str:
    """Where to write: the file that a link leads to.

    Raises `ModelError` for what is no path, no ordinary file, or lies in a folder that nothing can be written to.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ModelError(f"a model is saved under the path of a file, not {path!r}")
    target = os.path.realpath(os.fspath(path))
    if os.path.isdir(target):
        raise ModelError(f"'{path}' is a folder, not a file to write to")
    if os.path.exists(target) and not os.path.isfile(target):
        raise ModelError(f"'{path}' is no ordinary file, and would be lost if a model were written there")
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise ModelError(f"'{path}' cannot be written: there is no folder '{folder}'")
    if not os.access(folder, os.W_OK):
        raise ModelError(f"'{path}' cannot be written: the folder '{folder}' is not writable")
    return target


def _save_in_one(graph: Graph, target: str, fold_limit: int) -> None:
    store = _Later()
    skeleton = _Writer(graph, fold_limit, store).run().SerializeToString()
    with _temporary(target) as (file, name):
        for part in spliced(skeleton, store.mark, store.held):
            file.write(part)
        _finish(file)
        os.replace(name, target)


def _finish(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _temporary(target: str) -> Iterator[tuple[IO[bytes], str]]:
    """A file in the folder of `target`, gone afterwards unless it was renamed."""
    folder, base = os.path.split(target)
    handle, name = tempfile.mkstemp(prefix=f".{base}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            _open_to_others(name)
            yield file, name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _open_to_others(name: str) -> None:
    # mkstemp makes files for their owner alone; the user's mask says what is wanted
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(name, 0o666 & ~mask)
