"""Graphs: immutable, interned nodes, the values they compute, and what a file says about them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from taso.graph.errors import GraphError
from taso.graph.operator import Attrs, AttrValue, Operator, Trait, Weight
from taso.graph.types import TensorType, symbols_of


class Value:
    """Output number `index` of `node`; made by the node, compared by identity."""

    __slots__ = ("__weakref__", "index", "node", "type")

    def __init__(self, node: Node, index: int, type: TensorType) -> None:
        self.node = node
        self.index = index
        self.type = type

    @property
    def nDim(self) -> int:  # noqa: N802  # TASO's name
        """Number of dimensions."""
        return self.type.rank

    def dim(self, i: int) -> int:
        """Size of dimension `i`; raises `GraphError` where it is symbolic."""
        size = self.type.dims[i]
        if not isinstance(size, int):
            raise GraphError(f"dimension {i} is the symbol {size}, not a number")
        return size

    def __repr__(self) -> str:
        return f"<{self.node.op.name}#{self.node.guid}:{self.index} {self.type}>"


class Node:
    """An operator on inputs (None where an optional one is left out). Immutable.

    `guid` numbers the nodes of one table in order of creation; `origin` names the rule that made it ("" for none).
    """

    __slots__ = ("attrs", "constant", "guid", "inputs", "op", "origin", "outputs")

    def __init__(
        self, op: Operator, inputs: tuple[Value | None, ...], attrs: Attrs, types: Sequence[TensorType],
        guid: int, origin: str,
    ) -> None:  # fmt: skip
        self.op = op
        self.inputs = inputs
        self.attrs = attrs
        self.guid = guid
        self.origin = origin
        self.outputs = tuple(Value(self, i, t) for i, t in enumerate(types))
        self.constant = _is_constant(op, inputs)

    @property
    def output(self) -> Value:
        return self.outputs[0]

    def __repr__(self) -> str:
        return f"<{self.op.name}#{self.guid}>"


def _is_constant(op: Operator, inputs: tuple[Value | None, ...]) -> bool:
    """Whether a node's value depends on weights alone."""
    if op.name == "Weight":
        return True
    given = [v for v in inputs if v is not None]
    return op.foldable and bool(given) and all(v.node.constant for v in given)


class NodeTable:
    """Interns nodes: the same operator on the same inputs with the same attributes is the same node."""

    def __init__(self) -> None:
        self._interned: dict[tuple[object, ...], Node] = {}
        self._guids = itertools.count(100)

    def make(
        self,
        op: Operator,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, AttrValue] | None = None,
        types: Sequence[TensorType] | None = None,
        origin: str = "",
    ) -> Node:
        """The node `op(inputs)`; `types` is given for opaque nodes and sources only.

        Raises `GraphError` and `ShapeError` where operator, attributes and types do not fit.
        """
        given = tuple(inputs)
        full = op.complete(attrs or {})
        key = (op.name, given, full)
        found = None if op.has(Trait.RANDOM) else self._interned.get(key)
        if found is None:
            if types is None:
                types = op.types_of([v.type if v is not None else None for v in given], full)
            found = Node(op, given, full, types, next(self._guids), origin)
            if not op.has(Trait.RANDOM):
                self._interned[key] = found
        return found

    def restored(
        self, op: Operator, inputs: tuple[Value | None, ...], attrs: Attrs, types: Sequence[TensorType], guid: int,
        origin: str,
    ) -> Node:  # fmt: skip
        """A node of another table, with its number; nodes come in the order of their numbers."""
        node = Node(op, inputs, attrs, types, guid, origin)
        self._guids = itertools.count(guid + 1)
        if not op.has(Trait.RANDOM):
            self._interned[op.name, inputs, attrs] = node
        return node


@dataclass
class FileInfo:
    """What a file says beyond its operators, kept so that it can be said again.

    `value_names` and `node_names` hold the names that values and nodes had (the first is the one in use, others are
    duplicates that interning merged); `value_infos`, `functions` and `annotations` are serialized protobufs, opaque
    here. `weights_as_inputs` are weights that the file lists as inputs too (IR version 3 and older), `input_order` all
    names so listed; `input_defaults` are the values of inputs that a caller may leave out; `literals` are weights that
    became attributes of a node.
    """

    opsets: dict[str, int] = field(default_factory=lambda: {"": 21})
    ir_version: int = 10
    producer_name: str = "taso"
    producer_version: str = ""
    domain: str = ""
    model_version: int = 0
    doc: str = ""
    graph_name: str = "taso"
    graph_doc: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    value_names: dict[Value, list[str]] = field(default_factory=dict)
    node_names: dict[Node, str] = field(default_factory=dict)
    node_docs: dict[Node, str] = field(default_factory=dict)
    value_infos: dict[str, bytes] = field(default_factory=dict)
    node_metadata: dict[Node, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    literals: dict[Node, tuple[Weight, ...]] = field(default_factory=dict)
    graph_metadata: dict[str, str] = field(default_factory=dict)
    weights_as_inputs: list[str] = field(default_factory=list)
    input_order: list[str] = field(default_factory=list)
    input_defaults: dict[str, Weight] = field(default_factory=dict)
    functions: list[bytes] = field(default_factory=list)
    annotations: list[bytes] = field(default_factory=list)
    folder: str = ""
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        """Version of the default operator set."""
        return self.opsets.get("", 1)

    def describe(self, node: Node, same: Node, other: FileInfo) -> None:
        """Says in `other` of the node `same` what this says of `node`."""
        if node in self.node_names:
            other.node_names.setdefault(same, self.node_names[node])
        if node in self.node_docs:
            other.node_docs.setdefault(same, self.node_docs[node])
        if node in self.node_metadata:
            other.node_metadata.setdefault(same, self.node_metadata[node])
        if node in self.literals:
            other.literals.setdefault(same, self.literals[node])


class Graph:
    """A dataflow graph. Inputs keep their order; outputs are those the file names, or, of a graph built by hand,
    every value that no operator consumes, in order of creation."""

    def __init__(self) -> None:
        self.table = NodeTable()
        self.inputs: list[Value] = []
        self.input_names: list[str] = []
        self.info = FileInfo()
        # how a backend, by its name, is to run the graph: it alone knows what that is
        self.plans: dict[str, object] = {}
        self._named_outputs: list[tuple[str, Value]] | None = None
        self._created: dict[Node, None] = {}

    def __copy__(self) -> Graph:
        """A graph of the same nodes, to which more can be added without changing this one."""
        fresh = type(self)()
        fresh.__dict__.update(self.__dict__)
        fresh.inputs, fresh.input_names = list(self.inputs), list(self.input_names)
        fresh._created, fresh.plans = dict(self._created), dict(self.plans)
        return fresh

    def __getstate__(self) -> dict[str, object]:
        """What a pickle and a deep copy hold: nodes as rows in order of creation, which read values of earlier rows.

        So graphs of any depth can be pickled. Weights that lie in files are read.
        """
        described = (*self.info.value_names, *(v for n in self._described() for v in n.outputs))
        roots = [*self._created, *(v.node for v in (*self.inputs, *(v for _, v in self.outputs), *described))]
        nodes = topological([*roots, *self._described()])
        place = {node: i for i, node in enumerate(nodes)}

        def at(value: Value | None) -> Place | None:
            return None if value is None else (place[value.node], value.index)

        rows = [
            (n.op, tuple(map(at, n.inputs)), n.attrs, tuple(v.type for v in n.outputs), n.guid, n.origin) for n in nodes
        ]
        named = self._named_outputs
        tables = {name: [(place[n], said) for n, said in getattr(self.info, name).items()] for name in _OF_NODES}
        state = {name: value for name, value in self.__dict__.items() if name not in _NODE_FIELDS}
        return state | {
            "rows": rows, "inputs": [at(v) for v in self.inputs], "created": [place[n] for n in self._created],
            "outputs": None if named is None else [(name, at(v)) for name, v in named],
            "info": replace(
                self.info, value_names={}, node_names={}, node_docs={}, node_metadata={}, literals={}
            ),
            "value_names": [(at(v), names) for v, names in self.info.value_names.items()], "of_nodes": tables,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, object]) -> None:
        said = _State(**{name: state.pop(name) for name in _State._fields})  # type: ignore[arg-type]  # __getstate__ made it
        self.__dict__.update(state)
        self.table, nodes = NodeTable(), list[Node]()

        def value(at: Place) -> Value:
            return nodes[at[0]].outputs[at[1]]

        for op, inputs, attrs, types, guid, origin in said.rows:
            read = tuple(None if at is None else value(at) for at in inputs)
            nodes.append(self.table.restored(op, read, attrs, types, guid, origin))
        self.inputs, self._created = [value(at) for at in said.inputs], dict.fromkeys(nodes[i] for i in said.created)
        self._named_outputs = None if said.outputs is None else [(name, value(at)) for name, at in said.outputs]
        tables = {name: {nodes[i]: what for i, what in rows} for name, rows in said.of_nodes.items()}
        names = {value(at): its_names for at, its_names in said.value_names}
        self.info = replace(said.info, value_names=names, **tables)  # type: ignore[arg-type]  # fields of one kind each

    def _described(self) -> list[Node]:
        """Nodes that the file says something of."""
        return [n for name in _OF_NODES for n in getattr(self.info, name)]

    def make(
        self, op: Operator, inputs: Sequence[Value | None], attrs: Mapping[str, AttrValue] | None = None,
        types: Sequence[TensorType] | None = None, origin: str = "",
    ) -> Node:  # fmt: skip
        """Adds the node `op(inputs)`, or returns the one that is there already."""
        node = self.table.make(op, inputs, attrs, types, origin)
        self._created.setdefault(node)
        return node

    def add_input(self, name: str, type: TensorType) -> Value:
        """A new graph input."""
        from_op = _source("Input")
        if name in self.input_names:
            raise GraphError(f"the graph already has an input named '{name}'")
        value = self.make(from_op, (), {"name": name}, (type,)).output
        self.inputs.append(value)
        self.input_names.append(name)
        return value

    def add_weight(self, weight: Weight) -> Value:
        """The value of a constant tensor."""
        return self.make(_source("Weight"), (), {"data": weight}, (weight.type,)).output

    def set_outputs(self, outputs: Iterable[tuple[str, Value]]) -> None:
        """Names the outputs, in order; the same value may be named twice."""
        named = list(outputs)
        for name, value in named:
            if not isinstance(value, Value):
                raise GraphError(f"output '{name}' must be a tensor of the graph, not {value!r}")
        by_name = dict(named)
        for name, value in named:
            # ONNX lets a file list one value twice under one name
            if by_name[name] is not value:
                raise GraphError(f"two outputs of the graph have the same name: {[n for n, _ in named]}")
        self._named_outputs = named

    @property
    def outputs(self) -> list[tuple[str, Value]]:
        """(name, value) of each output."""
        if self._named_outputs is not None:
            return list(self._named_outputs)
        consumed = {v for node in self._created for v in node.inputs}
        free = [
            v for node in self._created for v in node.outputs if v not in consumed and node.op.name != "Weight"
        ]
        return [("output" if i == 0 else f"output_{i}", v) for i, v in enumerate(free)]

    @property
    def has_named_outputs(self) -> bool:
        return self._named_outputs is not None

    @property
    def nodes(self) -> list[Node]:
        """Nodes that the outputs depend on, and all inputs, in order of creation, which is topological."""
        return topological([v.node for v in self.inputs] + [v.node for _, v in self.outputs])

    @property
    def operators(self) -> list[Node]:
        """Live nodes other than inputs and weights."""
        return [n for n in self.nodes if not n.op.has(Trait.SOURCE)]

    @property
    def run_time_nodes(self) -> list[Node]:
        """Live operators that do not depend on weights alone."""
        return [n for n in self.operators if not n.constant]

    def consumers(self) -> dict[Value, list[Node]]:
        """For each value the live nodes that read it, once per node."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(v for v in node.inputs if v is not None):
                found.setdefault(value, []).append(node)
        return found

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the symbolic dimensions of the inputs."""
        return frozenset(s for v in self.inputs for d in v.type.shape or () for s in symbols_of(d))

    def rebuilt(self, replacement: Callable[[Graph, Node, tuple[Value | None, ...]], Sequence[Value]]) -> Graph:
        """A new graph in which `replacement(graph, node, new inputs)` gives the outputs of each live node.

        Names and everything else a file says move along.
        """
        fresh = type(self)()
        mapping: dict[Value, Value] = {}
        for node in self.nodes:
            inputs = tuple(mapping[v] if v is not None else None for v in node.inputs)
            for old, new in zip(node.outputs, replacement(fresh, node, inputs), strict=True):
                mapping[old] = new
        self.transfer(fresh, mapping)
        return fresh

    def transfer(self, fresh: Graph, mapping: Mapping[Value, Value]) -> None:
        """Gives `fresh` the inputs, outputs, names and file information of this graph, values mapped by `mapping`."""
        fresh.inputs = [mapping[v] for v in self.inputs]
        fresh.input_names = list(self.input_names)
        fresh.set_outputs([(name, mapping[v]) for name, v in self.outputs])
        names: dict[Value, list[str]] = {}
        for old, its_names in self.info.value_names.items():
            if old in mapping:
                names.setdefault(mapping[old], []).extend(its_names)
        info = replace(self.info, value_names=names, node_names={}, node_docs={}, node_metadata={}, literals={})
        told: list[dict[Node, object]] = [getattr(self.info, name) for name in _OF_NODES]
        for node in dict.fromkeys(node for field_of_nodes in told for node in field_of_nodes):
            same = mapping.get(node.outputs[0]) if node.outputs else None
            if same is not None and same.node.op is node.op:
                self.info.describe(node, same.node, info)
        fresh.info, fresh.plans = info, dict(self.plans)

    def __repr__(self) -> str:
        return f"<Graph: {len(self.operators)} operators, {len(self.inputs)} inputs, {len(self.outputs)} outputs>"


Place = tuple[int, int]
"""A value in a pickle: the row of its node, and its number among the node's outputs."""
Row = tuple[Operator, "tuple[Place | None, ...]", Attrs, "tuple[TensorType, ...]", int, str]
_OF_NODES = ("node_names", "node_docs", "node_metadata", "literals")
"""Fields of `FileInfo` that say something of nodes."""
_NODE_FIELDS = ("table", "inputs", "info", "_named_outputs", "_created")


class _State(NamedTuple):
    """The part of a pickled graph that speaks of nodes."""

    rows: list[Row]
    inputs: list[Place]
    created: list[int]
    outputs: list[tuple[str, Place]] | None
    info: FileInfo
    value_names: list[tuple[Place, list[str]]]
    of_nodes: dict[str, list[tuple[int, object]]]


def topological(roots: Iterable[Node]) -> list[Node]:
    """All nodes that `roots` depend on, producers first, otherwise in order of `guid`."""
    live: dict[Node, None] = {}
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in live:
            live[node] = None
            stack.extend(v.node for v in node.inputs if v is not None)
    return _ordered(list(live))


def _ordered(nodes: list[Node]) -> list[Node]:
    # a node is made after its inputs, so within one table the order of creation is topological
    return sorted(nodes, key=lambda n: n.guid)


_SOURCES: dict[str, Operator] = {}


def _source(name: str) -> Operator:
    return _SOURCES[name]


def define_sources(input_operator: Operator, weight_operator: Operator) -> None:
    """Tells graphs which operators their inputs and weights are."""
    _SOURCES.update(Input=input_operator, Weight=weight_operator)
