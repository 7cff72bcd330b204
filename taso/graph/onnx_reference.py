"""What ONNX's own reference implementation makes of a node: the meaning of all operators that have none of ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np
import onnx
import onnx.defs
import onnx.version_converter
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from taso.graph.errors import GraphError
from taso.graph.graph import Node
from taso.graph.onnx_corrected import reference
from taso.graph.onnx_protos import all_names, spell, tensor_proto, type_proto
from taso.graph.operator import Array, Attrs, Operator, Trait, Types
from taso.graph.types import DType, TensorType

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator

log = logging.getLogger(__name__)

IR_VERSION = 10
NEWEST = onnx.defs.onnx_opset_version()


def run(
    op: Operator, attrs: Attrs, types: Types, outputs: Sequence[TensorType], arrays: Sequence[Array | None]
) -> tuple[Array, ...]:
    """Outputs of `op` on `arrays`, whose types are `types`, by onnx.reference.

    Of an opaque node the outputs that are not in use are empty arrays. Raises `GraphError` where the reference does
    not know the operator or fails on it.
    """
    first = arrays[0] if arrays else None
    if op.name == "MaxPool" and isinstance(first, np.ndarray) and first.dtype.kind in "iu":
        # the reference pads with what is no integer
        wide = [TensorType(DType.DOUBLE, t.shape) if t is not None else None for t in types]
        found, *indices = run(op, attrs, wide, outputs, [first.astype(np.float64)])
        return (found.astype(first.dtype), *indices)
    evaluator, wanted = _evaluator(op, attrs, tuple(types), len(outputs))
    # an empty optional is None and yet fed
    fed = [a for a, t in zip(arrays, types, strict=True) if t is not None]
    feeds = dict(zip(evaluator.input_names, fed, strict=True))
    try:
        with np.errstate(all="ignore"):
            made = cast("list[Array]", evaluator.run(None, feeds))
    except Exception as error:
        raise GraphError(f"{op.label}: onnx.reference fails on it: {error}") from error
    results = dict(zip(evaluator.output_names, made, strict=True))
    empty: Array = np.zeros(0, np.float32)
    return tuple(_array(results[name]) if name else empty for name in wanted)


def can_run(node: Node) -> bool:
    """Whether onnx.reference can be expected to know an opaque node's operator."""
    return bool(onnx.defs.has(node.op.label, node.op.domain))


def _array(result: Array) -> Array:
    # sequences come as lists and stay lists; scalars must be arrays, and strings objects as everywhere
    if isinstance(result, list) or result is None:
        return result
    array = np.asarray(result)
    return texts(array) if array.dtype.kind in "SUO" else array


def texts(array: Array) -> Array:
    """An array of strings; the empty one is what filling with zero means (Pad 19 to 25)."""
    items = [i if isinstance(i, (str, bytes)) else "" for i in array.reshape(-1).tolist()]
    found: Array = np.empty(len(items), object)
    found[:] = items
    return found.reshape(array.shape)


@lru_cache(maxsize=256)
def _evaluator(
    op: Operator, attrs: Attrs, types: tuple[TensorType | None, ...], count: int
) -> tuple[ReferenceEvaluator, list[str]]:
    if op.has(Trait.OPAQUE):
        graph, opsets, wanted = _opaque_graph(op, attrs, types)
    else:
        graph, opsets, wanted = _spelled_graph(op, attrs, types, count)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
    try:
        return reference(model), wanted
    except Exception as error:
        newer = _converted(model, opsets[""])
        if newer is None:
            raise GraphError(f"{op.label}: onnx.reference does not know it: {error}") from error
        return newer, wanted


def _converted(model: ModelProto, opset: int) -> ReferenceEvaluator | None:
    """The model in the next opset that the reference knows (it lacks some old versions), by ONNX's own converter."""
    for version in range(opset + 1, NEWEST + 1):
        try:
            return reference(onnx.version_converter.convert_version(model, version))
        except Exception as error:
            log.debug("not in opset %d either: %s", version, error)
    return None


def _spelled_graph(
    op: Operator, attrs: Attrs, types: tuple[TensorType | None, ...], count: int
) -> tuple[GraphProto, dict[str, int], list[str]]:
    node, inputs = spell(op, attrs, types, NEWEST)
    wanted = [f"y{i}" for i in range(count)]
    node.output.extend(wanted)
    graph = _graph(node, types, [f"x{i}" for i in range(len(types))], wanted)
    for i, given in enumerate(inputs):
        if isinstance(given, int):
            node.input.append(f"x{given}")
        elif given is None:
            node.input.append("")
        else:
            node.input.append(f"c{i}")
            graph.initializer.append(tensor_proto(given, DType.from_numpy(given.dtype), f"c{i}"))
    graph.node.append(node)
    return graph, {"": NEWEST}, wanted


def _opaque_graph(
    op: Operator, attrs: Attrs, types: tuple[TensorType | None, ...]
) -> tuple[GraphProto, dict[str, int], list[str]]:
    proto, pattern, captures = attrs["proto"], attrs["outputs"], attrs["captures"]
    if not (isinstance(proto, bytes) and isinstance(pattern, tuple) and isinstance(captures, tuple)):
        raise GraphError(f"the opaque {op.label} does not say what it is")
    node = NodeProto.FromString(proto)
    outer = [name for name in captures if isinstance(name, str)]
    taken = all_names(node) | set(outer)
    own = [_free(f"x{i}", taken) for i in range(len(types) - len(outer))]
    wanted = [_free(f"y{i}", taken) if used else "" for i, used in enumerate(pattern)]
    node.input[:] = [name if types[i] is not None else "" for i, name in enumerate(own)]
    node.output[:] = wanted
    graph = _graph(node, types, own + outer, [name for name in wanted if name])
    graph.node.append(node)
    return graph, _opsets(op.domain, attrs.int("opset")), wanted


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _opsets(domain: str, version: int) -> dict[str, int]:
    """Versions to evaluate at: the node's own, and the newest of every other domain, which its bodies may use."""
    newest: dict[str, int] = {}
    for found in onnx.defs.get_all_schemas():
        newest[found.domain] = max(newest.get(found.domain, 1), found.since_version)
    return {**newest, "": NEWEST, domain: version}


def _graph(node: NodeProto, types: Types, inputs: Sequence[str], outputs: Sequence[str]) -> GraphProto:
    given = [
        helper.make_value_info(name, type_proto(t)) for name, t in zip(inputs, types, strict=True) if t is not None
    ]
    return helper.make_graph([], node.op_type, given, [ValueInfoProto(name=name) for name in outputs])
