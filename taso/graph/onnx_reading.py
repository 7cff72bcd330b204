"""One node of a file in our terms: what import and the folding of shapes have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx.checker
import onnx.shape_inference
from onnx import NodeProto, TensorProto, TypeProto, helper

from taso.graph.graph import Value
from taso.graph.known import Known
from taso.graph.onnx_protos import attribute_kinds, attribute_value, bodies, schema, tensor_proto, type_proto
from taso.graph.operator import Array, AttrValue, FileNode, Operator, Reading, Unmodelled
from taso.graph.types import DType

# what reading a node may come upon when the node is not as its schema wants it
MALFORMED = (ValueError, TypeError, IndexError, OverflowError)
# ValueError: an element type that there is not
REFUSALS = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError)

Inputs = Sequence["Value | None"]


def read_node(
    op: Operator, node: NodeProto, opset: int, inputs: Inputs, known: Known, outputs: tuple[str, ...]
) -> Reading:
    """`node` of a file of `opset` as `op` says it; `outputs` are the names of those in use ("" for the others).

    Raises `Unmodelled`, with the reason, for what lies outside of what is modelled.
    """
    types = tuple(v.type if v is not None else None for v in inputs)
    if any(t is not None and t.dtype is DType.UNDEFINED for t in types):
        raise Unmodelled("an input has no known element type")
    found = schema(node.op_type, opset, node.domain)
    if found is None or found.deprecated:
        raise Unmodelled(f"ONNX has no operator {node.op_type} in opset {opset}")
    kinds = attribute_kinds(node.op_type, opset, node.domain)
    for attribute in node.attribute:
        if kinds.get(attribute.name) != attribute.type:
            raise Unmodelled(f"ONNX's {node.op_type} has no such attribute '{attribute.name}'")
    attrs: dict[str, AttrValue] = {a.name: attribute_value(a) for a in node.attribute}

    def constant(position: int) -> Array | None:
        value = inputs[position] if position < len(inputs) else None
        return None if value is None else known(value)

    if op.read is not None:
        reading = op.read(FileNode(node.op_type, found.since_version, opset, attrs, types, constant, outputs))
    else:
        positions: list[int | None] = [i if v is not None else None for i, v in enumerate(inputs)]
        while positions and positions[-1] is None:
            positions.pop()
        reading = Reading(attrs, tuple(positions))
    if any(i is not None and i >= len(inputs) for i in reading.inputs):
        raise Unmodelled(f"{node.op_type} with {len(inputs)} inputs")
    return reading


def infer_node(
    node: NodeProto, inputs: Inputs, known: Known, opsets: Mapping[str, int], ir_version: int
) -> Mapping[str, TypeProto]:
    """Types of the node's outputs by ONNX's own inference, by name; empty where it cannot say.

    `node.input` names the inputs. Raises one of `REFUSALS` where ONNX refuses the node.
    """
    found = schema(node.op_type, opsets.get(node.domain, 1), node.domain)
    types = {name: type_proto(v.type) for name, v in zip(node.input, inputs, strict=True) if v is not None}
    if found is None or bodies(node) or not all(t.WhichOneof("value") for t in types.values()):
        return {}
    data: dict[str, TensorProto] = {}
    for name, value in zip(node.input, inputs, strict=True):
        numbers = known(value) if value is not None else None
        if numbers is not None and value is not None and value.type.dtype in (DType.INT64, DType.INT32):
            data[name] = tensor_proto(numbers, value.type.dtype, name)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return onnx.shape_inference.infer_node_outputs(
        found, node, types, data, opset_imports=imports, ir_version=ir_version
    )
