"""Graphs of which something is known at run time only: which branch an If takes, how large a result is.

What comes before is a program of its own; once it has run, the branch is put in the If's place, and what comes behind
is compiled for the sizes that were found: one program per combination of branches and sizes, kept for the next time.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from taso.backends.base import Array
from taso.graph import onnx_shapes
from taso.graph.errors import BackendError, ModelError, TasoError
from taso.graph.evaluate import constant_value, evaluate_node
from taso.graph.graph import Graph, Node, Value
from taso.graph.onnx_bodies import body_labels, read_body
from taso.graph.operator import Trait, Weight
from taso.graph.types import DType, TensorType

log = logging.getLogger(__name__)

MOST_TAILS = 16
"""Programs that are kept for what comes behind."""

OWN, EVALUATED = "own", "evaluated"
"""How an operator runs: by a kernel of the backend, or by its definition (which may be that of onnx.reference)."""


class Runs(Protocol):
    """What a part of a graph is compiled to."""

    @property
    def kernels(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def operators(self) -> list[tuple[str, str]]: ...
    def run(self, given: Mapping[str, Array]) -> dict[str, Array]: ...
    def profile(self, given: Mapping[str, Array]) -> list[tuple[str, float]]: ...


# ── what is known ────────────────────────────────────────────────────────────────────────────────────────────────


def is_known(t: TensorType) -> bool:
    """Whether a value's place is known before it is computed; what is no tensor needs none."""
    return t.other is not None or t.static


def is_closed(graph: Graph) -> bool:
    """Whether everything is known that it takes to compile the graph as one."""
    return not any(map(_is_open, graph.nodes)) and all(is_known(v.type) for _, v in graph.outputs)


def _is_if(node: Node) -> bool:
    return node.op.has(Trait.OPAQUE) and node.op.label == "If" and node.op.domain == ""


def _is_open(node: Node) -> bool:
    if node.constant:
        return False
    return _is_if(node) or not all(is_known(v.type) for v in node.outputs)


# ── branches ─────────────────────────────────────────────────────────────────────────────────────────────────────


def resolved(graph: Graph) -> Graph:
    """The graph with the branch in the place of each If whose condition is known; shapes inferred anew."""
    while True:
        chosen = {}
        for node in graph.nodes:
            value = node.inputs[0] if _is_if(node) else None
            if value is not None and value.node.constant:
                chosen[node] = bool(constant_value(value).reshape(-1)[0])
        fresh = _inlined(graph, chosen) if chosen else None
        if fresh is None:
            return graph
        graph = onnx_shapes.specialise(fresh, {})


def _inlined(graph: Graph, chosen: Mapping[Node, bool]) -> Graph | None:
    """The graph with branches for the Ifs `chosen`; None where none of them can be read."""
    count = 0

    def replacement(fresh: Graph, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        nonlocal count
        if node in chosen:
            try:
                results = _branch(graph, fresh, node, inputs, chosen[node])
            except ModelError as reason:
                log.debug("an If stays as it is: %s", reason)
            else:
                count += 1
                return results
        return fresh.make(node.op, inputs, node.attrs, [v.type for v in node.outputs], node.origin).outputs

    fresh = graph.rebuilt(replacement)
    return fresh if count else None


def _branch(
    graph: Graph, fresh: Graph, node: Node, inputs: tuple[Value | None, ...], condition: bool
) -> Sequence[Value]:
    """The outputs of a branch of `node`, whose nodes are added to `fresh`; `inputs` are those of `node` there."""
    position = body_labels(node).index("then_branch" if condition else "else_branch")
    body = read_body(graph, node, position, {}).graph
    names = node.attrs["captures"]
    captures = [str(n) for n in names] if isinstance(names, tuple) else []
    outer = dict(zip(captures, inputs[len(inputs) - len(captures) :], strict=True))
    found: dict[Value, Value | None] = {
        value: outer[name] for name, value in zip(body.input_names, body.inputs, strict=True)
    }
    for inner in body.nodes:
        if inner.op.name != "Input":
            given = [None if v is None else found[v] for v in inner.inputs]
            made = fresh.make(inner.op, given, inner.attrs, [v.type for v in inner.outputs], inner.origin)
            found.update(zip(inner.outputs, made.outputs, strict=True))
    results = [found[v] for _, v in body.outputs]
    given_out = [v for v in results if v is not None]
    if len(given_out) < len(node.outputs):
        raise ModelError("a branch of an If has fewer outputs than it")
    return given_out[: len(node.outputs)]


def _can_branch(graph: Graph, node: Node) -> bool:
    try:
        for position in range(len(body_labels(node))):
            read_body(graph, node, position, {})
    except TasoError as reason:
        log.debug("an If is evaluated by onnx.reference: %s", reason)
        return False
    return True


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────

Build = Callable[[Graph], Runs]


def compiled(graph: Graph, build: Build, said: set[str]) -> Runs:
    """A program for a graph whose inputs' types are known; `build` compiles what is closed.

    `said` are operators of which a warning has said that they are evaluated, and is added to.
    """
    graph = resolved(graph)
    return build(graph) if is_closed(graph) else Stages(graph, build, said)


class Stages:
    """A graph in two parts: `head`, which is compiled, then the operators that decide how the rest is compiled."""

    def __init__(self, graph: Graph, build: Build, said: set[str]) -> None:
        self._graph = graph
        self._build = build
        self._said = said
        late: set[Node] = set()
        deciding: list[Node] = []
        for node in graph.nodes:
            if any(v is not None and v.node in late for v in node.inputs):
                late.add(node)
            elif _is_open(node):
                late.add(node)
                deciding.append(node)
        self._late = late
        self._ifs = [n for n in deciding if _is_if(n) and _can_branch(graph, n)]
        self._evaluated = [n for n in deciding if n not in self._ifs]
        self._boundary = self._early_values()
        self._head = self._compiled_head()
        self._lock = threading.Lock()
        self._tails: OrderedDict[object, Runs] = OrderedDict()
        self._tail: Runs | None = None
        for label in sorted({n.op.label for n in self._evaluated} - said):
            said.add(label)
            log.warning("the shape of what %s gives is known at run time only: it is evaluated by itself", label)

    def _early_values(self) -> list[Value]:
        """What is computed before and read behind, or an output."""
        read = [v for node in self._graph.nodes if node in self._late for v in node.inputs if v is not None]
        asked = dict.fromkeys([*read, *(v for _, v in self._graph.outputs)])
        return [v for v in asked if v.node not in self._late and not v.node.constant]

    def _compiled_head(self) -> Runs:
        head = copy.copy(self._graph)
        head.set_outputs([(f"v{i}", v) for i, v in enumerate(self._boundary)])
        return self._build(head)

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """One inference on checked inputs."""
        held = dict(zip(self._boundary, self._head.run(given).values(), strict=True))
        conditions, found = self._decided(held)
        tail, feeds = self._behind(held, conditions, found)
        return self._outputs(held, tail.run(feeds))

    def profile(self, given: Mapping[str, Array]) -> list[tuple[str, float]]:
        """One inference, with the seconds that each kernel took."""
        times = self._head.profile(given)
        held = dict(zip(self._boundary, self._head.run(given).values(), strict=True))
        started = time.perf_counter()
        conditions, found = self._decided(held)
        times.append(("+".join(n.op.label for n in (*self._ifs, *self._evaluated)), time.perf_counter() - started))
        tail, feeds = self._behind(held, conditions, found)
        return [*times, *tail.profile(feeds)]

    def _decided(self, held: Mapping[Value, Array]) -> tuple[dict[Node, bool], dict[Value, Array]]:
        """The conditions of the Ifs, and the results of what is evaluated alone."""
        conditions: dict[Node, bool] = {}
        for node in self._ifs:
            value = node.inputs[0]
            if value is None:
                raise BackendError("an If without a condition")
            conditions[node] = bool(np.asarray(self._array(value, held)).reshape(-1)[0])
        found: dict[Value, Array] = {}
        for node in self._evaluated:
            arrays = [None if v is None else self._array(v, held) for v in node.inputs]
            found.update(zip(node.outputs, evaluate_node(node, arrays), strict=True))
        return conditions, found

    def _array(self, value: Value, held: Mapping[Value, Array]) -> Array:
        return constant_value(value) if value.node.constant else held[value]

    def _behind(
        self, held: Mapping[Value, Array], conditions: Mapping[Node, bool], found: Mapping[Value, Array]
    ) -> tuple[Runs, dict[str, Array]]:
        """The program for what comes behind, and what it is fed."""
        arrays = {**held, **found}
        key = (tuple(conditions.values()), tuple(getattr(a, "shape", None) for a in found.values()))
        with self._lock:
            if key not in self._tails:
                self._tails[key] = self._compiled_tail(arrays, conditions)
            self._tails.move_to_end(key)
            while len(self._tails) > MOST_TAILS:
                self._tails.popitem(last=False)
            self._tail = self._tails[key]
            return self._tail, {f"v{i}": a for i, a in enumerate(arrays.values())}

    def _compiled_tail(self, arrays: Mapping[Value, Array], conditions: Mapping[Node, bool]) -> Runs:
        graph = self._graph
        fresh = type(graph)()
        mapping: dict[Value, Value] = {}
        for number, (value, array) in enumerate(arrays.items()):
            mapping[value] = fresh.add_input(f"v{number}", _type_of(value, array))
        for node in graph.nodes:
            if node in self._evaluated or not (node in self._late or node.constant):
                continue
            inputs = [None if v is None else mapping[v] for v in node.inputs]
            if node in conditions:
                said = np.asarray(conditions[node], bool)
                inputs[0] = fresh.add_weight(Weight(TensorType(DType.BOOL, ()), said))
            made = fresh.make(node.op, inputs, node.attrs, [v.type for v in node.outputs], node.origin)
            mapping.update(zip(node.outputs, made.outputs, strict=True))
        fresh.set_outputs([(n, mapping[v]) for n, v in graph.outputs if v.node in self._late])
        fresh.info = replace(
            graph.info, value_names={}, node_names={}, node_docs={}, node_metadata={}, literals={}, input_defaults={}
        )
        return compiled(onnx_shapes.specialise(fresh, {}), self._build, self._said)

    def _outputs(self, held: Mapping[Value, Array], late: Mapping[str, Array]) -> dict[str, Array]:
        return {n: late[n] if n in late else self._array(v, held) for n, v in self._graph.outputs}

    # ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def kernels(self) -> int:
        return self._head.kernels + len(self._evaluated) + (self._tail.kernels if self._tail is not None else 0)

    @property
    def peak_bytes(self) -> int:
        return max(self._head.peak_bytes, self._tail.peak_bytes if self._tail is not None else 0)

    @property
    def operators(self) -> list[tuple[str, str]]:
        """The operators of the latest run, and how each ran."""
        between = [(n.op.label, OWN) for n in self._ifs] + [(n.op.label, EVALUATED) for n in self._evaluated]
        return [*self._head.operators, *between, *(self._tail.operators if self._tail is not None else [])]


def _type_of(value: Value, array: Array) -> TensorType:
    """The type of what was computed; of what is no tensor, as it was declared."""
    if value.type.other is not None or not isinstance(array, np.ndarray):
        return value.type
    dtype = value.type.dtype
    return TensorType(DType.from_numpy(array.dtype) if dtype is DType.UNDEFINED else dtype, array.shape)


__all__ = ["EVALUATED", "OWN", "Runs", "compiled", "is_closed", "is_known", "resolved"]
