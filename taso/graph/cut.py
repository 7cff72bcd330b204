"""Cutting out what nothing here can run, so that the rest of a graph can be run, compared and timed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from taso.graph.graph import Graph, Node, Value
from taso.graph.onnx_reference import can_run
from taso.graph.operator import Trait


def unrunnable(graph: Graph) -> list[Node]:
    """Live nodes of operators whose meaning is not known here, such as those of a custom domain."""
    return [n for n in graph.operators if n.op.has(Trait.OPAQUE) and not can_run(n)]


def without_unrunnable(graph: Graph) -> Graph:
    """The graph with each unrunnable node cut out: what it reads becomes outputs, what it makes becomes inputs.

    New names follow from the node as its file has it, so that two equal graphs are cut alike.
    """
    gone = {node: _label(node) for node in unrunnable(graph)}
    if not gone:
        return graph
    read: list[tuple[str, Value]] = []
    made: list[tuple[str, Value]] = []

    def replacement(fresh: Graph, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        if node not in gone:
            given = [v.type for v in node.outputs]
            return fresh.make(node.op, inputs, node.attrs, given, node.origin).outputs
        read.extend((f"{gone[node]}:in{i}", v) for i, v in enumerate(inputs) if v is not None)
        outs = [fresh.add_input(f"{gone[node]}:out{v.index}", v.type) for v in node.outputs]
        made.extend((f"{gone[node]}:out{v.index}", o) for v, o in zip(node.outputs, outs, strict=True))
        return outs

    fresh = graph.rebuilt(replacement)
    fresh.inputs = [*fresh.inputs, *(v for _, v in made)]
    fresh.input_names = [*fresh.input_names, *(n for n, _ in made)]
    fresh.set_outputs([*fresh.outputs, *read])
    return fresh


def _label(node: Node) -> str:
    proto = node.attrs["proto"]
    # values have unique names in a file, so a node's serialized form names it
    said = hashlib.sha256(proto).hexdigest()[:16] if isinstance(proto, bytes) else str(node.guid)
    return f"cut:{node.op.domain}.{node.op.label}:{said}"
