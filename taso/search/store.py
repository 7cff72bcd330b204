"""One store of interned nodes for all states of a search, and the value classes that name what they compute.

Every rewrite keeps the meaning of the values it replaces, so a value is named by the class of everything that computes
it. A node is an operator on classes; the class made for a node's output when it is first seen is its *natural* one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taso.backends.lowering import PLAIN, Layouts
from taso.graph.errors import GraphError
from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import Attrs, AttrValue, Operator, Trait, Unspellable, Weight
from taso.graph.types import Dim, TensorType

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Entry:
    """An interned node. `hash` names it by content; `classes` are its natural output classes, made when needed."""

    op: Operator
    attrs: Attrs
    inputs: tuple[int | None, ...]
    types: tuple[TensorType, ...]
    constant: bool
    hash: int
    origin: str
    classes: list[int | None]
    writable: bool | None = None


class Store:
    """Nodes and classes, both numbered from 0; numbers depend on nothing but the order of requests.

    `sizes` gives numbers for symbolic dimensions, for costs only: rules see the symbols.
    """

    def __init__(self, layouts: Layouts, opset: int, sizes: Mapping[str, Dim]) -> None:
        self.layouts = layouts
        self.opset = opset
        self.sizes = dict(sizes)
        self.entries: list[Entry] = []
        self.class_types: list[TensorType] = []
        self.class_sized: list[TensorType] = []
        self.class_layouts: list[str] = []
        self.class_constant: list[bool] = []
        self.class_hashes: list[int] = []
        self.class_origins: list[tuple[int, int]] = []
        self._interned: dict[tuple[object, ...], int] = {}

    def intern(
        self, op: Operator, attrs: Attrs, inputs: tuple[int | None, ...], types: Sequence[TensorType] | None = None,
        origin: str = "", label: str = "",
    ) -> int:  # fmt: skip
        """Number of the node `op(inputs)`. `types` is for sources and opaque nodes; `label` tells sources apart.

        Raises `GraphError` or `ShapeError` where operator, attributes and types do not fit.
        """
        key = (op.name, op.domain, attrs, inputs)
        random = op.has(Trait.RANDOM)
        found = None if random else self._interned.get(key)
        if found is not None:
            return found
        given = [self.class_types[c] if c is not None else None for c in inputs]
        outs = tuple(types) if types is not None else op.types_of(given, attrs)
        present = [c for c in inputs if c is not None]
        constant = op.name == "Weight" or (
            op.foldable and bool(present) and all(self.class_constant[c] for c in present)
        )
        number = len(self.entries)
        content = self._content(op, attrs, inputs, label or (f"random{number}" if random else ""))
        self.entries.append(Entry(op, attrs, inputs, outs, constant, content, origin, [None] * len(outs)))
        if not random:
            self._interned[key] = number
        return number

    def _content(self, op: Operator, attrs: Attrs, inputs: tuple[int | None, ...], label: str) -> int:
        said = [op.domain, op.name, label] if label else [op.domain, op.name, show_attrs(attrs)]
        said += ["-" if c is None else str(self.class_hashes[c]) for c in inputs]
        return int.from_bytes(hashlib.blake2b("\0".join(said).encode(), digest_size=8).digest(), "little")

    def natural(self, node: int, index: int) -> int:
        """The class named after output `index` of `node`."""
        entry = self.entries[node]
        found = entry.classes[index]
        if found is None:
            found = entry.classes[index] = self._new_class(entry, index)
            self.class_origins.append((node, index))
        return found

    def name(self, node: int, index: int, value_class: int) -> None:
        """Makes a class that exists already the natural one of a node's output, if it has none."""
        entry = self.entries[node]
        if entry.classes[index] is None:
            entry.classes[index] = value_class

    def _new_class(self, entry: Entry, index: int) -> int:
        number = len(self.class_types)
        self.class_types.append(entry.types[index])
        self.class_sized.append(entry.types[index].bind(self.sizes))
        self.class_constant.append(entry.constant)
        self.class_hashes.append((entry.hash * 0x9E3779B97F4A7C15 + index + 1) & _MASK)
        self.class_layouts.append(self._layout(entry, index))
        return number

    def _layout(self, entry: Entry, index: int) -> str:
        if entry.constant or entry.op.has(Trait.SOURCE):
            return PLAIN
        types = [self.class_sized[c] if c is not None else None for c in entry.inputs]
        given = [self.class_layouts[c] if c is not None else None for c in entry.inputs]
        results = [t.bind(self.sizes) for t in entry.types]
        return self.layouts.of_outputs(entry.op, entry.attrs, types, given, results)[index]

    def writable(self, node: int) -> bool:
        """Whether ONNX of the graph's opset can spell the node (one that depends on weights alone is folded)."""
        entry = self.entries[node]
        if entry.writable is None:
            types = [self.class_types[c] if c is not None else None for c in entry.inputs]
            entry.writable = entry.constant or spellable(entry.op, entry.attrs, types, self.opset)
        return entry.writable


def spellable(op: Operator, attrs: Attrs, types: Sequence[TensorType | None], opset: int) -> bool:
    """Whether ONNX of `opset` has a way to write the node, of the operator's parts where it lacks the operator."""
    if op.has(Trait.SOURCE) or op.has(Trait.OPAQUE) or op.parts is not None and opset >= op.parts.since:
        return True
    try:
        op.spell(attrs, types, opset)
    except Unspellable:
        return False
    return True


def show_attrs(attrs: Mapping[str, AttrValue]) -> str:
    """Attributes as text that is the same on every run."""
    return ",".join(f"{k}={_show(v)}" for k, v in attrs.items())


def _show(value: AttrValue) -> str:
    if isinstance(value, Weight):
        raise GraphError("weights are told apart by label")
    return repr(value)


def load(store: Store, graph: Graph) -> tuple[dict[Value, int], list[int]]:
    """Puts a graph's live nodes into the store; gives the class of each value and the nodes in order."""
    classes: dict[Value, int] = {}
    order = []
    weights = 0
    for node in graph.nodes:
        label = ""
        if node.op.name == "Weight":
            label = f"weight{weights}:{node.output.type}"
            weights += 1
        elif node.op.name == "Input":
            label = f"input:{node.attrs.str('name')}:{node.output.type}"
        number = _put(store, node, classes, label)
        order.append(number)
        for value in node.outputs:
            classes[value] = store.natural(number, value.index)
    return classes, order


def _put(store: Store, node: Node, classes: Mapping[Value, int], label: str) -> int:
    inputs = tuple(classes[v] if v is not None else None for v in node.inputs)
    types = [v.type for v in node.outputs]
    return store.intern(node.op, node.attrs, inputs, types, node.origin, label)
