"""ONNX files into graphs. Nothing is skipped: a node that is not modelled becomes an opaque one."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping
from typing import TypeVar, Union

import onnx
import onnx.checker
import onnx.defs
import onnx.shape_inference
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto, TypeProto

from taso.graph.errors import GraphError, ModelError, ShapeError
from taso.graph.graph import Graph, Node, Value
from taso.graph.known import Known
from taso.graph.onnx_protos import (
    UNKNOWN,
    Symbols,
    bodies,
    captured_names,
    schema,
    tensor_type,
)  # fmt: skip
from taso.graph.onnx_reading import MALFORMED, REFUSALS, infer_node, read_node
from taso.graph.onnx_skeleton import Parts, label, prepare
from taso.graph.onnx_weights import (
    ExternalFiles,
    constant_weight,
    embed_all,
    filled_weight,
    sparse_weight,
    tensor_weight,
)  # fmt: skip
from taso.graph.onnx_wire import Malformed, cut
from taso.graph.operator import ONNX_NAMES, AttrValue, Operator, Unmodelled, Weight
from taso.graph.ops import opaque
from taso.graph.types import DType, TensorType

log = logging.getLogger(__name__)

Source = Union[str, "os.PathLike[str]", bytes, ModelProto]
GraphType = TypeVar("GraphType", bound=Graph)

# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def load(source: Source, *, graph_class: type[GraphType] = Graph) -> GraphType:  # type: ignore[assignment]  # mypy wants no default for a TypeVar
    """The graph of an ONNX model: a path, the bytes of a file, or a `ModelProto` (which is not changed).

    Raises `ModelError` for what is no valid model, `InputNotFoundError` where a node reads what nothing computes.
    """
    model, what, folder, own = _parse(source)
    files = ExternalFiles(folder, own)
    graph = graph_class()
    try:
        _Importer(graph, prepare(model, what, files), files, what).run()
    except UnicodeDecodeError as error:
        # protobuf looks at its strings only when they are asked for
        raise ModelError(f"{what} is damaged: a string in it is no text ({error.reason})") from error
    graph.info.folder = folder or ""
    return graph


MAPPED = 1 << 26
"""Bytes of a file from which on the large tensors in it are mapped into memory and not read."""


def _parse(source: Source) -> tuple[ModelProto, str, str | None, memoryview | None]:
    """The model, how to call it in messages, the folder where its data files lie, and its own bytes if mapped."""
    if isinstance(source, ModelProto):
        model = ModelProto()
        model.CopyFrom(source)
        return model, "the given model", None, None
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decoded(bytes(source), "the given data"), "the given data", None, None
    path = os.fspath(source)
    own: memoryview | None = None
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size >= MAPPED:
                own = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                data = cut(own)
            else:
                data = file.read()
    except OSError as error:
        raise ModelError(f"'{path}' cannot be read: {error.strerror}") from error
    except Malformed as error:
        raise ModelError(f"'{path}' is not an ONNX model, or it is truncated ({error})") from error
    return _decoded(data, f"'{path}'"), f"'{path}'", os.path.dirname(os.path.abspath(path)), own


def _decoded(data: bytes, what: str) -> ModelProto:
    if not data:
        raise ModelError(f"{what} is empty, not an ONNX model")
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(f"{what} is not an ONNX model, or it is truncated") from error
    return model


# ── building the graph ───────────────────────────────────────────────────────────────────────────────────────────

_RANDOM = frozenset(
    {
        "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli",
        # what is not modelled of these two is their training mode
        "Dropout", "BatchNormalization",
    }
)  # fmt: skip
_PURE_DOMAINS = ("", "ai.onnx.ml")

class _Importer:
    """Turns the parts of one file into a graph."""

    def __init__(self, graph: Graph, parts: Parts, files: ExternalFiles, what: str) -> None:
        self.graph = graph
        self.parts = parts
        self.files = files
        self.what = what
        self.known = Known()
        self.symbols = Symbols(parts.symbols)
        self.values: dict[str, Value] = {}
        self.weights: dict[str, Weight] = {}
        self.captures = [captured_names(node) for node in parts.nodes]
        self.read = {name for node in parts.nodes for name in node.input}
        self.read.update(name for names in self.captures for name in names)
        self.read.update(v.name for v in parts.model.graph.output)

    def run(self) -> None:
        self._describe_model()
        self._add_weights()
        self._add_inputs()
        for node, captures in zip(self.parts.nodes, self.captures, strict=True):
            self._add_node(node, captures)
        self.graph.set_outputs([(v.name, self._value(v.name)) for v in self.parts.model.graph.output])

    def _describe_model(self) -> None:
        model, info = self.parts.model, self.graph.info
        info.opsets = dict(self.parts.opsets)
        info.ir_version = model.ir_version
        info.producer_name, info.producer_version = model.producer_name, model.producer_version
        info.domain, info.model_version, info.doc = model.domain, model.model_version, model.doc_string
        info.graph_name, info.graph_doc = model.graph.name, model.graph.doc_string
        info.metadata = {p.key: p.value for p in model.metadata_props}
        info.graph_metadata = {p.key: p.value for p in model.graph.metadata_props}
        info.functions = [f.SerializeToString() for f in self.parts.functions]
        info.annotations = [a.SerializeToString() for a in model.graph.quantization_annotation]
        for declared in (*model.graph.value_info, *model.graph.output, *model.graph.input):
            info.value_infos[declared.name] = declared.SerializeToString()
        if model.training_info:
            log.warning("%s carries training information, which does not come along", self.what)

    def _add_weights(self) -> None:
        for tensor in self.parts.model.graph.initializer:
            self.weights[tensor.name] = tensor_weight(tensor, self.files)
        for sparse in self.parts.model.graph.sparse_initializer:
            self.weights[sparse.values.name] = sparse_weight(sparse, sparse.values.name)

    def _add_inputs(self) -> None:
        """Adds inputs. One that has an initializer is a weight up to IR version 3, and has a default from 4 on."""
        info = self.graph.info
        for declared in self.parts.model.graph.input:
            name = declared.name
            info.input_order.append(name)
            if name in self.weights and info.ir_version < 4:
                info.weights_as_inputs.append(name)
                continue
            value = self.graph.add_input(name, tensor_type(declared.type, self.symbols))
            self._define(name, value)
            if name in self.weights:
                info.input_defaults[name] = self.weights.pop(name)

    def _define(self, name: str, value: Value) -> None:
        self.values[name] = value
        names = self.graph.info.value_names.setdefault(value, [])
        if name not in names:
            names.append(name)

    def _value(self, name: str) -> Value:
        if name not in self.values:
            self._define(name, self.graph.add_weight(self.weights[name]))
        return self.values[name]

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _add_node(self, node: NodeProto, captures: tuple[str, ...]) -> None:
        if node.op_type == "Constant" and node.domain == "":
            self.weights[node.output[0]] = constant_weight(node, self.files)
            return
        inputs = [self._value(name) if name else None for name in node.input]
        if node.op_type == "ConstantOfShape" and node.domain == "" and self._add_filled(node, inputs):
            return
        op = ONNX_NAMES.get((node.domain, node.op_type))
        made = self._modelled(op, node, inputs) if op is not None else None
        if made is None:
            made = self._opaque(node, inputs, captures)
        for name, value in zip(node.output, made.outputs):  # noqa: B905  # the file may leave later outputs out
            if name:
                self._define(name, value)
        self._describe_node(node, made)
        self._keep_literals(inputs, made)

    def _keep_literals(self, inputs: list[Value | None], made: Node) -> None:
        """Remembers the weights that became attributes: they are written again under their own names."""
        gone = [v.node.attrs.get("data") for v in inputs if v is not None and v not in made.inputs]
        weights = tuple(w for w in gone if isinstance(w, Weight))
        if weights:
            self.graph.info.literals.setdefault(made, weights)

    def _describe_node(self, node: NodeProto, made: Node) -> None:
        info = self.graph.info
        info.node_names.setdefault(made, node.name)
        if node.doc_string:
            info.node_docs.setdefault(made, node.doc_string)
        if node.metadata_props:
            info.node_metadata.setdefault(made, tuple((p.key, p.value) for p in node.metadata_props))

    def _add_filled(self, node: NodeProto, inputs: list[Value | None]) -> bool:
        """A ConstantOfShape of a known shape is a weight; says whether this one is."""
        dims = self.known(inputs[0]) if inputs and inputs[0] is not None else None
        if dims is None or inputs[0] is None:
            return False
        data = inputs[0].node.attrs.get("data")
        shape = data if isinstance(data, Weight) else Weight(TensorType(DType.INT64, dims.shape), dims, node.input[0])
        self.weights[node.output[0]] = filled_weight(node, shape)
        return True

    def _modelled(self, op: Operator, node: NodeProto, inputs: list[Value | None]) -> Node | None:
        """The node in our terms, or None where it says something that ours do not."""
        try:
            outputs = tuple(name if name in self.read else "" for name in node.output)
            reading = read_node(op, node, self.parts.opsets[node.domain], inputs, self.known, outputs)
            given = [inputs[i] if i is not None else None for i in reading.inputs]
            made = self.graph.make(op, given, reading.attrs)
            # old versions that can be read and not written stay as they are
            op.spell(made.attrs, [v.type if v is not None else None for v in made.inputs], self.parts.opsets[""])
        except ShapeError as reason:
            refused = self._refusal(node, inputs)
            if refused is not None:
                raise ModelError(f"{self._label(node)} does not fit its inputs: {reason} ({refused})") from reason
            log.debug("%s stays opaque: %s", self._label(node), reason)
            return None
        except (Unmodelled, GraphError, *MALFORMED) as reason:
            log.debug("%s stays opaque: %s", self._label(node), reason)
            return None
        return made if self._agrees(node, inputs, made) else None

    def _agrees(self, node: NodeProto, inputs: list[Value | None], made: Node) -> bool:
        """Whether ONNX's own inference sees the types that our rules give; where it does not, ONNX is right."""
        if self.read.intersection(node.output[len(made.outputs) :]):
            log.debug("%s stays opaque: it has more outputs than are modelled", self._label(node))
            return False
        pairs = [
            (value.type, self.parts.inferred[name])
            for name, value in zip(node.output, made.outputs)  # noqa: B905  # as above
            if name in self.parts.inferred
        ]
        if all(not _contradict(ours, theirs) for ours, theirs in pairs):
            return True
        # what the file declares may be wrong; what inference makes of this node alone decides
        try:
            again = self._inferred(node, inputs)
        except REFUSALS as error:
            log.warning("%s stays opaque: %s", self._label(node), error)
            return False
        wrong = [
            f"{value.type} and not {tensor_type(again[name], self.symbols)}"
            for name, value in zip(node.output, made.outputs)  # noqa: B905  # as above
            if name in again and _contradict(value.type, again[name])
        ]
        if wrong:
            log.warning("%s stays opaque: its type would be %s", self._label(node), wrong[0])
        return not wrong

    def _label(self, node: NodeProto) -> str:
        return f"{label(node)} of {self.what}"

    # ── ONNX's inference for one node ────────────────────────────────────────────────────────────────────────────

    def _refusal(self, node: NodeProto, inputs: list[Value | None]) -> str | None:
        """What ONNX's inference has against `node`, in its own words and with the shapes; None if nothing."""
        try:
            self._inferred(node, inputs)
        except REFUSALS as error:
            shown = ", ".join(str(v.type) if v is not None else "nothing" for v in inputs)
            return f"its inputs are {shown}; ONNX says: {str(error).split(chr(10))[0]}"
        return None

    def _inferred(self, node: NodeProto, inputs: list[Value | None]) -> Mapping[str, TypeProto]:
        return infer_node(node, inputs, self.known, self.parts.opsets, self.parts.model.ir_version)

    # ── opaque nodes ─────────────────────────────────────────────────────────────────────────────────────────────

    def _opaque(self, node: NodeProto, inputs: list[Value | None], captures: tuple[str, ...]) -> Node:
        """The node as it is: its own inputs, then what its bodies read of this graph."""
        proto = NodeProto()
        proto.CopyFrom(node)
        embed_all(proto, self.files)
        for said in ("input", "output", "name", "doc_string", "metadata_props"):
            proto.ClearField(said)
        op = opaque(node.op_type, node.domain, _is_random(node))
        attrs: dict[str, AttrValue] = {
            "proto": proto.SerializeToString(deterministic=True),
            "captures": captures,
            "outputs": tuple(f"y{i}" if name else "" for i, name in enumerate(node.output)),
            "opset": self.parts.opsets[node.domain],
        }
        given = [*inputs, *(self._value(name) for name in captures)]
        return self.graph.make(op, given, attrs, self._output_types(node, inputs))

    def _output_types(self, node: NodeProto, inputs: list[Value | None]) -> list[TensorType]:
        stated = [self.parts.inferred.get(name) for name in node.output]
        if any(name and _vague(t) for name, t in zip(node.output, stated, strict=True)):
            try:
                again = self._inferred(node, inputs)
            except onnx.shape_inference.InferenceError as error:
                raise ModelError(
                    f"{self._label(node)} does not fit its inputs: {self._refusal(node, inputs)}"
                ) from error
            except (onnx.checker.ValidationError, ValueError) as error:
                log.warning("%s: its type is not known: %s", self._label(node), error)
                again = {}
            stated = [again.get(name, t) if _vague(t) else t for name, t in zip(node.output, stated, strict=True)]
        return [tensor_type(t, self.symbols) if t is not None else UNKNOWN for t in stated]


def _vague(type: TypeProto | None) -> bool:
    if type is None or type.WhichOneof("value") is None:
        return True
    return type.HasField("tensor_type") and not type.tensor_type.HasField("shape")


def _is_random(node: NodeProto) -> bool:
    """Whether two runs of `node` may differ, or nobody can say."""
    if node.domain not in _PURE_DOMAINS or schema(node.op_type, onnx.defs.onnx_opset_version(), node.domain) is None:
        return True
    if node.op_type in _RANDOM:
        return True
    return any(_is_random(inner) for body in bodies(node) for inner in body.node)


def _contradict(ours: TensorType, theirs: TypeProto) -> bool:
    """Whether no tensor can have both types."""
    if theirs.WhichOneof("value") != "tensor_type" or ours.dtype is DType.UNDEFINED:
        return theirs.WhichOneof("value") not in (None, "tensor_type")
    stated = theirs.tensor_type
    if stated.elem_type not in (ours.dtype.value, TensorProto.UNDEFINED):
        return True
    if ours.shape is None or not stated.HasField("shape"):
        return False
    if len(stated.shape.dim) != len(ours.shape):
        return True
    return any(
        isinstance(mine, int) and d.HasField("dim_value") and d.dim_value >= 0 and d.dim_value != mine
        for mine, d in zip(ours.shape, stated.shape.dim, strict=True)
    )

