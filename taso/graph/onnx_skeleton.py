"""Makes an ONNX model ready to be read: checks its wiring, inlines its functions, infers its types.

Inference and inlining run on a skeleton, the model without its large tensors, so that these are never copied.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx.defs
import onnx.inliner
import onnx.shape_inference
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

from taso.graph.errors import InputNotFoundError, ModelError
from taso.graph.onnx_protos import bodies, captured_names
from taso.graph.onnx_weights import ExternalFiles, embedded, is_external, tensor_weight

log = logging.getLogger(__name__)

SMALL = 4096
HEAVY = 1 << 20


@dataclass(frozen=True)
class Parts:
    """A checked model: `nodes` in topological order with functions inlined, `inferred` types by value name,
    `symbols` all names of dimensions, `functions` those that could not be inlined."""

    model: ModelProto
    nodes: Sequence[NodeProto]
    opsets: Mapping[str, int]
    inferred: Mapping[str, TypeProto]
    symbols: frozenset[str]
    functions: Sequence[FunctionProto]


def prepare(model: ModelProto, what: str, files: ExternalFiles) -> Parts:
    """Checks `model` and gathers its parts; raises `ModelError` with a sentence about `what` is wrong."""
    _check_model(model, what)
    _check_texts(model, what)
    for node in _all_nodes(model):
        if node.domain == "ai.onnx":
            node.domain = ""
    opsets = _opsets(model, what)
    _check_nodes(model, opsets, what)
    nodes = sorted_nodes(model.graph, what)
    functions: list[FunctionProto] = []
    skeleton = _skeleton(model, nodes, opsets, files)
    if model.functions:
        skeleton = _inlined(skeleton, what)
        functions = list(skeleton.functions)
        opsets = _opsets(skeleton, what)
        inlined = sorted_nodes(skeleton.graph, what)
        nodes = [n for n in nodes if _is_large_constant(n)] + inlined
    inferred = _inferred(skeleton, what)
    return Parts(model, nodes, opsets, inferred, frozenset(_symbols(skeleton, inferred)), functions)


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────


def label(node: NodeProto) -> str:
    """How to call a node in messages."""
    if node.name:
        return f"node '{node.name}' ({node.op_type})"
    computed = next((name for name in node.output if name), "")
    return f"the {node.op_type} node that computes '{computed}'"


def _check_model(model: ModelProto, what: str) -> None:
    if not model.HasField("graph") or not model.ir_version:
        raise ModelError(f"{what} is not an ONNX model: it holds no {'graph' if model.ir_version else 'IR version'}")
    if not model.opset_import:
        raise ModelError(f"{what} does not say which operator set it uses (no opset import); it may be truncated")
    if not model.graph.output:
        raise ModelError(f"{what} has no outputs; it may be truncated")
    untyped = next((v.name for v in model.graph.input if v.type.WhichOneof("value") is None), None)
    if untyped is not None:
        raise ModelError(f"the input '{untyped}' of {what} has no type")


def _check_texts(model: ModelProto, what: str) -> None:
    """Refuses names that are no UTF-8, which protobuf gives as bytes."""
    texts: list[object] = [model.producer_name, model.producer_version, model.domain, model.doc_string]
    texts += [said.domain for said in model.opset_import]
    texts += [part for p in (*model.metadata_props, *model.graph.metadata_props) for part in (p.key, p.value)]
    texts += [model.graph.name, model.graph.doc_string, *(t.name for t in model.graph.initializer)]
    for declared in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        texts += [declared.name, declared.doc_string]
        texts += [d.dim_param for d in declared.type.tensor_type.shape.dim]
    for node in _all_nodes(model):
        texts += [node.name, node.op_type, node.domain, node.doc_string, *node.input, *node.output]
        texts += [a.name for a in node.attribute]
        texts += [part for p in node.metadata_props for part in (p.key, p.value)]
    broken = next((t for t in texts if not isinstance(t, str)), None)
    if broken is not None:
        raise ModelError(f"{what} is damaged: the name {broken!r} in it is no text")


def _all_nodes(model: ModelProto) -> Iterable[NodeProto]:
    stack = list(model.graph.node)
    for function in model.functions:
        stack.extend(function.node)
    while stack:
        node = stack.pop()
        yield node
        for body in bodies(node):
            stack.extend(body.node)


def _opsets(model: ModelProto, what: str) -> dict[str, int]:
    opsets: dict[str, int] = {}
    for said in model.opset_import:
        domain = "" if said.domain == "ai.onnx" else said.domain
        if opsets.setdefault(domain, said.version) != said.version:
            raise ModelError(f"{what} imports two versions of the operator set '{domain or 'ai.onnx'}'")
    newest = onnx.defs.onnx_opset_version()
    if opsets.get("", 1) > newest:
        raise ModelError(
            f"{what} uses opset {opsets['']}, and the installed onnx package knows opsets up to {newest}; upgrade onnx"
        )
    for domain, version in opsets.items():
        if not 0 < version < 1 << 31:
            raise ModelError(f"{what} imports version {version} of '{domain or 'ai.onnx'}', which does not exist")
    return opsets


def _check_nodes(model: ModelProto, opsets: Mapping[str, int], what: str) -> None:
    for node in model.graph.node:
        if not node.op_type:
            raise ModelError(f"{what} has a node without an operator, which computes {list(node.output)}")
        if node.domain not in opsets:
            raise ModelError(
                f"{label(node)} of {what} is of the domain '{node.domain or 'ai.onnx'}', which is not imported"
            )


def _source_names(graph: GraphProto, what: str) -> set[str]:
    """Names that are there before any node runs; raises `ModelError` where one is defined twice."""
    names: set[str] = set()
    for declared in graph.input:
        if declared.name in names:
            raise ModelError(f"{what} has two inputs named '{declared.name}'")
        names.add(declared.name)
    held: set[str] = set()
    for name in (*(t.name for t in graph.initializer), *(s.values.name for s in graph.sparse_initializer)):
        if name in held:
            raise ModelError(f"{what} has two initializers named '{name}'")
        held.add(name)
    if "" in names | held:
        raise ModelError(f"{what} has an input or initializer without a name")
    return names | held


def sorted_nodes(graph: GraphProto, what: str) -> list[NodeProto]:
    """The nodes of `graph`, producers first and otherwise in the file's order.

    Raises `InputNotFoundError` where a node reads a name that nothing defines, `ModelError` where a name is defined
    twice, nodes form a cycle, or an output of the graph is computed by nothing.
    """
    nodes = list(graph.node)
    sources = _source_names(graph, what)
    producer: dict[str, int] = {}
    for position, node in enumerate(nodes):
        for name in node.output:
            if name and (name in producer or name in sources):
                raise ModelError(f"{label(node)} of {what} computes '{name}', which is defined already")
            if name:
                producer[name] = position
    needs = [_needed(node, producer, sources, what) for node in nodes]
    for declared in graph.output:
        if declared.name not in producer and declared.name not in sources:
            raise ModelError(f"nothing computes the output '{declared.name}' of {what}")
    return [nodes[i] for i in _order(needs, nodes, what)]


def _needed(node: NodeProto, producer: Mapping[str, int], sources: set[str], what: str) -> set[int]:
    needed: set[int] = set()
    for name in (*node.input, *captured_names(node)):
        if name in producer:
            needed.add(producer[name])
        elif name and name not in sources:
            raise InputNotFoundError(f"{label(node)} of {what} reads '{name}', which nothing computes")
    return needed


def _order(needs: Sequence[set[int]], nodes: Sequence[NodeProto], what: str) -> list[int]:
    if all(not needed or max(needed) < position for position, needed in enumerate(needs)):
        return list(range(len(needs)))
    followers: dict[int, list[int]] = {}
    for position, needed in enumerate(needs):
        for before in needed:
            followers.setdefault(before, []).append(position)
    waiting = [len(needed) for needed in needs]
    ready = [position for position, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for after in followers.get(position, ()):
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, after)
    if len(order) < len(needs):
        stuck = next(position for position, count in enumerate(waiting) if count)
        raise ModelError(f"the nodes of {what} form a cycle; {label(nodes[stuck])} is on it or behind it")
    return order


# ── the skeleton ─────────────────────────────────────────────────────────────────────────────────────────────────


def _elements(tensor: TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count


def _is_large_constant(node: NodeProto) -> bool:
    if node.op_type != "Constant" or node.domain != "":
        return False
    return any(
        a.type == AttributeProto.TENSOR and (_elements(a.t) > SMALL or is_external(a.t)) for a in node.attribute
    )


def _skeleton(
    model: ModelProto, nodes: Sequence[NodeProto], opsets: Mapping[str, int], files: ExternalFiles
) -> ModelProto:
    """`model` with each large tensor replaced by an input of its name and type."""
    bare = ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in opsets.items())
    bare.functions.extend(model.functions)
    graph = bare.graph
    graph.name = model.graph.name
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    listed = {v.name for v in graph.input}
    for tensor in model.graph.initializer:
        # what a caller may override says nothing about shapes
        if tensor.name not in listed or model.ir_version < 4:
            _add_tensor(graph, tensor, listed, files)
    for node in nodes:
        if _is_large_constant(node):
            _declare(graph, node.output[0], node.attribute[0].t)
        elif not model.functions and bodies(node) and node.ByteSize() > HEAVY:
            graph.node.append(_light(node))
        else:
            graph.node.append(node)
    return bare


def _add_tensor(graph: GraphProto, tensor: TensorProto, listed: set[str], files: ExternalFiles) -> None:
    if _elements(tensor) <= SMALL:
        if is_external(tensor):
            tensor_weight(tensor, files)
            tensor = embedded(tensor, files.bytes_of(tensor))
        graph.initializer.append(tensor)
    elif tensor.name not in listed:
        _declare(graph, tensor.name, tensor)


def _declare(graph: GraphProto, name: str, tensor: TensorProto) -> None:
    graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))


def _light(node: NodeProto) -> NodeProto:
    """`node` with each large tensor in its bodies replaced by a ConstantOfShape of its type."""
    copy = NodeProto(op_type=node.op_type, domain=node.domain, name=node.name, input=node.input, output=node.output)
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            copy.attribute.append(helper.make_attribute(attribute.name, _light_graph(attribute.g)))
        else:
            copy.attribute.append(attribute)
    return copy


def _light_graph(graph: GraphProto) -> GraphProto:
    copy = GraphProto(name=graph.name, input=graph.input, output=graph.output, value_info=graph.value_info)
    for tensor in graph.initializer:
        if _elements(tensor) <= SMALL:
            copy.initializer.append(tensor)
        else:
            copy.node.extend(_stand_in(tensor.name, tensor))
    for node in graph.node:
        if _is_large_constant(node):
            copy.node.extend(_stand_in(node.output[0], node.attribute[0].t))
        else:
            copy.node.append(_light(node))
    return copy


def _stand_in(name: str, tensor: TensorProto) -> list[NodeProto]:
    shape = helper.make_tensor("", TensorProto.INT64, [len(tensor.dims)], list(tensor.dims))
    one = TensorProto(data_type=tensor.data_type, dims=[1], raw_data=bytes(16)[: _width(tensor)])
    return [
        helper.make_node("Constant", [], [f"{name}__shape"], value=shape),
        helper.make_node("ConstantOfShape", [f"{name}__shape"], [name], value=one),
    ]


def _width(tensor: TensorProto) -> int:
    return helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


# ── inlining and inference ───────────────────────────────────────────────────────────────────────────────────────


def _inlined(skeleton: ModelProto, what: str) -> ModelProto:
    """`skeleton` with its functions inlined; those of another opset are converted where ONNX can, else they stay."""
    _import_domains(skeleton)
    _write_out_defaults(skeleton)
    try:
        found = onnx.inliner.inline_local_functions(skeleton)
    except Exception as error:
        raise ModelError(f"the functions of {what} cannot be inlined: {_first_line(error)}") from error
    if not found.functions:
        return found
    try:
        # the converter must know the types of what the functions are called on
        typed = onnx.shape_inference.infer_shapes(skeleton)
        return onnx.inliner.inline_local_functions(typed, convert_version=True)
    except Exception as error:
        log.warning("functions of %s stay functions: %s", what, _first_line(error))
        return found


def _write_out_defaults(skeleton: ModelProto) -> None:
    """Gives every call of a function the attributes that it leaves at their default, which onnx 1.23 forgets."""
    functions = {(f.domain, f.name): f for f in skeleton.functions}
    for node in _all_nodes(skeleton):
        called = functions.get((node.domain, node.op_type))
        if called is not None:
            given = {a.name for a in node.attribute}
            node.attribute.extend(a for a in called.attribute_proto if a.name not in given)


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def _import_domains(skeleton: ModelProto) -> None:
    """What functions import beyond the model must be imported by the model once they are inlined."""
    have = {said.domain for said in skeleton.opset_import}
    for function in skeleton.functions:
        for said in function.opset_import:
            if said.domain not in have and said.domain != "ai.onnx":
                have.add(said.domain)
                skeleton.opset_import.add(domain=said.domain, version=said.version)


def _inferred(skeleton: ModelProto, what: str) -> dict[str, TypeProto]:
    try:
        graph = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    except Exception as error:
        raise ModelError(f"ONNX refuses {what}: {_first_line(error)}") from error
    return {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}


def _symbols(skeleton: ModelProto, inferred: Mapping[str, TypeProto]) -> Iterable[str]:
    declared = (v.type for v in (*skeleton.graph.input, *skeleton.graph.value_info, *skeleton.graph.output))
    for type in (*declared, *inferred.values()):
        if type.HasField("tensor_type"):
            yield from (d.dim_param for d in type.tensor_type.shape.dim if d.dim_param)
