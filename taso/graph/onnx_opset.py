"""Graphs in another opset than they came in: by our own operators' spellings, else by ONNX's version converter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx.checker
import onnx.defs
import onnx.version_converter
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from taso.graph.errors import ModelError
from taso.graph.graph import Graph, Node
from taso.graph.onnx_protos import bodies, schema
from taso.graph.operator import Trait, Unspellable

_SMALL = 1 << 12
"""Elements up to which the converter sees a weight: adapters look at shapes, axes and the like."""


def checked_opset(opset: int) -> int:
    """`opset`, if the installed onnx package knows it; raises `ModelError` otherwise."""
    newest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or not 1 <= opset <= newest:
        raise ModelError(f"there is no opset {opset!r}: the installed onnx package knows 1 to {newest}")
    return opset


def respelled(graph: Graph, opset: int) -> Graph | None:
    """The same graph with its file's opset set to `opset`, or None where our operators cannot say all of it there."""
    if not all(_says(node, graph.info.opset, opset) for node in graph.nodes):
        return None
    fresh = copy.copy(graph)
    opsets = {**graph.info.opsets, "": opset}
    fresh.info = replace(graph.info, opsets=opsets, ir_version=_ir_version(graph.info.ir_version, opsets))
    if graph.has_named_outputs:
        fresh.set_outputs(graph.outputs)
    return fresh


def _ir_version(given: int, opsets: Mapping[str, int]) -> int:
    needed: int = helper.find_min_ir_version_for(
        [helper.make_opsetid("", opsets[""])], ignore_unknown=True
    )  # fmt: skip
    return max(given, needed)


def _says(node: Node, opset: int, wanted: int) -> bool:
    if node.op.has(Trait.SOURCE) or node.op.internal and node.constant:
        return True
    if node.op.has(Trait.OPAQUE):
        proto = node.attrs["proto"]
        return isinstance(proto, bytes) and _unchanged(NodeProto.FromString(proto), opset, wanted)
    try:
        said = node.op.spell(node.attrs, [v.type if v is not None else None for v in node.inputs], wanted)
    except Unspellable:
        return node.op.parts is not None and wanted >= node.op.parts.since
    known = schema(said.op_type, wanted, node.op.domain)
    return known is not None and said.attrs.keys() <= known.attributes.keys()


def _unchanged(node: NodeProto, opset: int, wanted: int) -> bool:
    """Whether both opsets mean the same by a node and by all in its bodies."""
    if node.domain in ("", "ai.onnx"):
        old, new = (schema(node.op_type, version, "") for version in (opset, wanted))
        if old is None or new is None or new.deprecated or old.since_version != new.since_version:
            return False
    return all(_unchanged(inner, opset, wanted) for body in bodies(node) for inner in body.node)


# ── ONNX's converter ─────────────────────────────────────────────────────────────────────────────────────────────


def converted(model: ModelProto, opset: int) -> ModelProto:
    """`model` in `opset` by `onnx.version_converter`; names, types and all that a model says besides nodes stay.

    Raises `ModelError` where the converter cannot say it there, or makes an invalid model of it.
    """
    given = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    if opset < 13 <= given:
        for node in _every_node(model.graph):
            if node.op_type in _FLATTENED_BEFORE_13 and node.domain in ("", "ai.onnx"):
                # the converter keeps the axis, which there means all axes from it on
                why = f"{node.op_type} means another thing there"
                raise ModelError(f"the model cannot be written in opset {opset}: {why}")
    large = [t for t in model.graph.initializer if _size(t) > _SMALL]
    listed = {v.name for v in model.graph.input}
    light = ModelProto()
    light.CopyFrom(_without(model, large))
    for tensor in large:
        if tensor.name not in listed:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    try:
        found = onnx.version_converter.convert_version(light, opset)
    except Exception as error:
        raise ModelError(f"the model cannot be written in opset {opset}: {_first_line(error)}") from error
    result = _joined(model, found, opset)
    try:
        onnx.checker.check_model(result, full_check=True)
    except Exception as error:
        raise ModelError(f"the model cannot be written in opset {opset}: {_first_line(error)}") from error
    return result


_FLATTENED_BEFORE_13 = frozenset({"Softmax", "LogSoftmax", "Hardmax"})


def _every_node(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from _every_node(body)


def _without(model: ModelProto, tensors: list[TensorProto]) -> ModelProto:
    names = {t.name for t in tensors}
    light = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    given = model.graph
    graph = light.graph
    graph.name = given.name
    graph.node.extend(given.node)
    graph.input.extend(given.input)
    graph.output.extend(given.output)
    graph.value_info.extend(given.value_info)
    graph.sparse_initializer.extend(given.sparse_initializer)
    graph.initializer.extend(t for t in given.initializer if t.name not in names)
    return light


def _joined(model: ModelProto, found: ModelProto, opset: int) -> ModelProto:
    """`model` with the nodes of `found`, and with the initializers that those need besides its own."""
    result = ModelProto()
    result.CopyFrom(model)
    result.ClearField("opset_import")
    result.opset_import.extend(
        helper.make_opsetid(said.domain, opset if said.domain in ("", "ai.onnx") else said.version)
        for said in model.opset_import
    )
    result.ir_version = _ir_version(model.ir_version, {"": opset})
    if model.ir_version < 4 <= result.ir_version:
        # there, what is listed as an input too is one that callers may override
        weights = {t.name for t in model.graph.initializer}
        inputs = [v for v in model.graph.input if v.name not in weights]
        result.graph.ClearField("input")
        result.graph.input.extend(inputs)
    result.graph.ClearField("node")
    old = {(n.op_type, *n.output): n for n in model.graph.node}
    for node in found.graph.node:
        written = result.graph.node.add()
        written.CopyFrom(node)
        same = old.get((node.op_type, *node.output))
        if same is not None:
            written.name, written.doc_string = same.name, same.doc_string
            written.ClearField("metadata_props")
            written.metadata_props.extend(same.metadata_props)
    have = {t.name for t in model.graph.initializer}
    result.graph.initializer.extend(t for t in found.graph.initializer if t.name not in have)
    return result


def _size(tensor: TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).split("\n") if line.strip()]
    return lines[0] if lines else type(error).__name__
