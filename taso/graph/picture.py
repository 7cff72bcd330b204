"""A graph as boxes and arrows, in plain data: what is drawn, and what a report keeps of a graph.

A box is one operator, or several that run as one kernel. Weights are told in the box that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import AttrValue, Required, Trait, Weight
from taso.graph.types import DType, TensorType, show_shape

OPERATOR, CONSTANT, LAYOUT, INPUT, OUTPUT = "operator", "constant", "layout", "input", "output"
"""Kinds of boxes: what runs, what depends on weights alone, a change of layout, and the ends of the graph."""

REWRITTEN, PLANNED = "rewritten", "planned"
"""How a box may differ from those of another graph: its operators are others, or they run otherwise."""

FAMILIES = ("", "moves", "elementwise", "opaque")

_LONGEST = 200


@dataclass
class Step:
    """An operator in a box. `name` is the node's, `rule` the equation that made it ("" for none).

    `detail` says its attributes in short, `attributes` those that are not the default, `weights` the types of weights
    that it reads; `family` is "moves", "elementwise", "opaque" or "" for all others.
    """

    operator: str
    name: str = ""
    detail: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    rule: str = ""
    family: str = ""
    changed: bool = False


@dataclass
class Box:
    """A node of the picture. `inputs` are pairs of the box that makes a value and of the value's type.

    `cost_ms` is None where no cost is known; a view costs nothing. `algorithm` and `layout` are those of its kernel.
    """

    kind: str
    steps: list[Step] = field(default_factory=list)
    inputs: list[tuple[int, str]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    cost_ms: float | None = None
    algorithm: str = ""
    layout: str = ""
    change: str = ""

    @property
    def label(self) -> str:
        """Its operators in order, as "Conv + Relu"."""
        return " + ".join(step.operator for step in self.steps)


@dataclass
class Picture:
    """The boxes of a graph; those that a box reads may come in any order."""

    boxes: list[Box] = field(default_factory=list)

    @property
    def operators(self) -> int:
        """How many operators run."""
        return sum(len(box.steps) for box in self.boxes if box.kind == OPERATOR)

    @property
    def most(self) -> float:
        """The highest cost of a box, 0 where none is known."""
        return max((box.cost_ms for box in self.boxes if box.cost_ms is not None), default=0.0)


def read_picture(data: object) -> Picture:
    """The picture that `dataclasses.asdict` made `data` of; raises `TypeError` or `KeyError` where it is none."""
    boxes = [_read_box(box) for box in _mappings(_mapping(data)["boxes"])]
    if any(not 0 <= maker < len(boxes) for box in boxes for maker, _ in box.inputs):
        raise TypeError("a box reads one that there is not")
    if not _is_acyclic(boxes):
        raise TypeError("a box reads what is made of it")
    return Picture(boxes)


def _is_acyclic(boxes: Sequence[Box]) -> bool:
    left = [len({maker for maker, _ in box.inputs}) for box in boxes]
    readers: list[list[int]] = [[] for _ in boxes]
    for place, box in enumerate(boxes):
        for maker in {maker for maker, _ in box.inputs}:
            readers[maker].append(place)
    ready, seen = [i for i, count in enumerate(left) if not count], 0
    while ready:
        seen += 1
        for reader in readers[ready.pop()]:
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return seen == len(boxes)


def _read_box(data: Mapping[str, object]) -> Box:
    cost = data["cost_ms"]
    if cost is not None and (isinstance(cost, bool) or not isinstance(cost, (int, float))):
        raise TypeError("a cost is a number")
    if cost is not None and not 0 <= cost < math.inf:
        raise TypeError("a cost is finite and not negative")
    kind, algorithm, layout, change = (_text(data[name]) for name in ("kind", "algorithm", "layout", "change"))
    if kind not in (OPERATOR, CONSTANT, LAYOUT, INPUT, OUTPUT) or change not in ("", REWRITTEN, PLANNED):
        raise TypeError("a box of no known kind")
    inputs = [(_whole(_list(pair)[0]), _text(_list(pair)[1])) for pair in _list(data["inputs"])]
    outputs = [_text(said) for said in _list(data["outputs"])]
    steps = [_read_step(step) for step in _mappings(data["steps"])]
    if not steps:
        raise TypeError("a box without steps")
    return Box(kind, steps, inputs, outputs, None if cost is None else float(cost), algorithm, layout, change)


def _read_step(data: Mapping[str, object]) -> Step:
    operator, name, detail, rule, family = (
        _text(data[part]) for part in ("operator", "name", "detail", "rule", "family")
    )
    attributes = {_text(key): _text(said) for key, said in _mapping(data["attributes"]).items()}
    weights = [_text(said) for said in _list(data["weights"])]
    if family not in FAMILIES or not isinstance(data["changed"], bool):
        raise TypeError("an operator of no known kind")
    return Step(operator, name, detail, attributes, weights, rule, family, data["changed"])


def _text(data: object) -> str:
    if not isinstance(data, str):
        raise TypeError("a text was expected")
    return data


def _whole(data: object) -> int:
    if isinstance(data, bool) or not isinstance(data, int):
        raise TypeError("a whole number was expected")
    return data


def _list(data: object) -> Sequence[object]:
    if not isinstance(data, (list, tuple)):
        raise TypeError("a list was expected")
    return data


def _mapping(data: object) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise TypeError("names and values were expected")
    return data


def _mappings(data: object) -> list[Mapping[str, object]]:
    return [_mapping(part) for part in _list(data)]


def picture(graph: Graph) -> Picture:
    """The picture of a graph as it is: a box for each operator."""
    return drawn(graph).picture


def drawn(graph: Graph) -> Drawing:
    """The picture of a graph as it is, with what its boxes stand for."""
    drawing = Drawing(graph)
    for node in graph.operators:
        drawing.add_node(node)
    drawing.finish()
    return drawing


class Drawing:
    """A picture in the making: boxes are added producers first or not, arrows and outputs by `finish`.

    `nodes` are those of each box, none for the ends of the graph and for changes of layout.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.boxes: list[Box] = []
        self.nodes: list[tuple[Node, ...]] = []
        self.makers: dict[Value, int] = {}
        self._reads: list[list[Value]] = []
        self._names = _names(graph)
        for name, value in zip(graph.input_names, graph.inputs, strict=True):
            self._add(Box(INPUT, [Step("Input", name)]), (), (value,))

    def add_node(self, node: Node) -> Box:
        """A box for one operator."""
        return self.add((node,), CONSTANT if node.constant else OPERATOR)

    def add(self, nodes: Sequence[Node], kind: str = OPERATOR) -> Box:
        """A box for operators that run as one: each but the first reads the one before."""
        inside = {v for n in nodes for v in n.outputs}
        reads = [v for n in nodes for v in n.inputs if v is not None and v not in inside]
        return self._add(Box(kind, [self._step(n) for n in nodes]), reads, nodes[-1].outputs, tuple(nodes))

    def add_change(self, value: Value, label: str) -> int:
        """A box for a change of layout of `value`; its number stands for the value as it lies then."""
        self._add(Box(LAYOUT, [Step("Reorder", detail=label)]), (value,), ())
        self.boxes[-1].outputs = [str(value.type)]
        return len(self.boxes) - 1

    def finish(self, instead: Mapping[tuple[int, Value], int] | None = None) -> None:
        """Draws arrows and outputs. `instead` names the box from which a box (by number; −1 for an output of the graph)
        takes a value."""
        other = instead or {}
        for number, (box, reads) in enumerate(zip(self.boxes, self._reads, strict=True)):
            for value in dict.fromkeys(reads):
                maker = other.get((number, value), self.makers.get(value))
                if maker is not None:
                    box.inputs.append((maker, str(value.type)))
        for name, value in self.graph.outputs:
            made = other.get((-1, value), self.makers.get(value))
            arrows = [] if made is None else [(made, str(value.type))]
            self._add(Box(OUTPUT, [Step("Output", name)], arrows, [str(value.type)]), (), ())

    @property
    def picture(self) -> Picture:
        return Picture(self.boxes)

    def boxes_and_nodes(self) -> Iterator[tuple[Box, tuple[Node, ...]]]:
        """Each box with its nodes."""
        return zip(self.boxes, self.nodes, strict=True)

    def steps(self) -> Iterator[tuple[Node, Step]]:
        """Each node that is drawn, and how it is told."""
        for box, nodes in self.boxes_and_nodes():
            yield from zip(nodes, box.steps, strict=False)

    def _add(
        self, box: Box, reads: Iterable[Value], makes: Iterable[Value], nodes: tuple[Node, ...] = ()
    ) -> Box:
        self.nodes.append(nodes)
        for value in makes:
            self.makers[value] = len(self.boxes)
            box.outputs.append(str(value.type))
        self.boxes.append(box)
        self._reads.append(list(reads))
        return box

    def _step(self, node: Node) -> Step:
        given = {
            name: _shortened(said) for name, value in node.attrs.items()
            if (said := _told(value)) and not _is_default(node, name, value)
        }  # fmt: skip
        weights = [str(v.type) for v in node.inputs if v is not None and v.node.op.name == "Weight"]
        label = f"{node.op.domain}.{node.op.label}" if node.op.domain else node.op.label
        return Step(label, self._names[node], _detail(node, given), given, weights, node.origin, _family(node))


def _names(graph: Graph) -> dict[Node, str]:
    """What nodes are called: by the file, or by what they compute, or by operator and place in the graph."""
    outputs: dict[Value, str] = {}
    if graph.has_named_outputs:
        outputs = {value: name for name, value in graph.outputs}
    found = {}
    for place, node in enumerate(graph.nodes):
        values = [*(graph.info.value_names.get(v, [""])[0] for v in node.outputs), *map(outputs.get, node.outputs)]
        named = graph.info.node_names.get(node) or next((n for n in values if n), "")
        found[node] = named or f"{node.op.label}#{place}"
    return found


def _family(node: Node) -> str:
    if node.op.has(Trait.OPAQUE):
        return "opaque"
    if node.op.has(Trait.MOVES_DATA):
        return "moves"
    return "elementwise" if node.op.has(Trait.ELEMENTWISE) else ""


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────


def _is_default(node: Node, name: str, value: AttrValue) -> bool:
    default = node.op.attributes.get(name)
    if not isinstance(default, Required) and default == value:
        return True
    ones = name in ("strides", "dilations") and isinstance(value, tuple) and all(v == 1 for v in value)
    zeros = name == "pads" and isinstance(value, tuple) and not any(value)
    return ones or zeros or name == "group" and value == 1


def _told(value: AttrValue) -> str:
    """An attribute as text, "" for what has no short one."""
    if value is None or isinstance(value, (bytes, Weight, TensorType)):
        return ""
    if isinstance(value, DType):
        return value.name.lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return f"({', '.join(filter(None, map(_told, value)))})"
    return str(value)


def _detail(node: Node, given: Mapping[str, str]) -> str:
    """The attributes that matter in the short form in which people say them."""
    said = []
    kernel = _window(node)
    if kernel:
        said.append(kernel)
    for name, text in given.items():
        value = node.attrs[name]
        if name == "kernel_shape":
            continue
        same = isinstance(value, tuple) and len(set(value)) == 1 and name in _ALONE
        said.append(f"{_ALONE.get(name, name)} {_told(value[0]) if same and isinstance(value, tuple) else text}")
    return _shortened(", ".join(said), 48)


_ALONE = {"strides": "stride", "pads": "pad", "dilations": "dilation"}


def _window(node: Node) -> str:
    shape = node.attrs.get("kernel_shape")
    if isinstance(shape, tuple) and shape:
        return "×".join(map(str, shape))
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op.name in ("Conv", "ConvTranspose") and weight is not None and weight.type.shape is not None:
        return show_shape(weight.type.dims[2:])
    return ""


def _shortened(text: str, most: int = _LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# ── what differs ─────────────────────────────────────────────────────────────────────────────────────────────────


def counterparts(before: Graph, after: Graph) -> dict[Node, Node]:
    """For nodes of `after` the nodes of `before` that they are, as far as rewrites left them alone.

    A node that a rule made has none. Two nodes are one where they are the same operator with the same attributes and
    weights and read, or are read by, nodes that are one.
    """
    return _Pairing(before, after).found


class _Pairing:
    def __init__(self, before: Graph, after: Graph) -> None:
        self.found: dict[Node, Node] = {}
        self._taken: set[Node] = set()
        self._readers = before.consumers()
        self._made = [n for n in after.nodes if not n.origin and n.op.name != "Weight"]
        inputs = dict(zip(before.input_names, before.inputs, strict=True))
        for name, value in zip(after.input_names, after.inputs, strict=True):
            if name in inputs:
                self._pair(value.node, inputs[name].node)
        self._forwards()
        self._backwards(before, after)
        self._rest(before)

    def _pair(self, node: Node, same: Node) -> None:
        self.found[node] = same
        self._taken.add(same)

    def _free(self, node: Node, candidates: Iterable[Node]) -> Node | None:
        return next((c for c in candidates if c not in self._taken and _key(c) == _key(node)), None)

    def _forwards(self) -> None:
        """Pairs nodes whose operands are paired, in the same places."""
        for node in self._made:
            values = [v for v in node.inputs if v is not None and v.node.op.name != "Weight"]
            if node in self.found or not values or any(v.node not in self.found for v in values):
                continue
            first = values[0]
            readers = self._readers.get(self.found[first.node].outputs[first.index], [])
            same = self._free(node, (r for r in readers if self._reads_the_same(node, r)))
            if same is not None:
                self._pair(node, same)

    def _reads_the_same(self, node: Node, other: Node) -> bool:
        if len(node.inputs) != len(other.inputs):
            return False
        for a, b in zip(node.inputs, other.inputs, strict=True):
            if a is None or b is None or a.node.op.name == "Weight":
                if (a is None) != (b is None):
                    return False
            elif self.found.get(a.node) is not b.node or a.index != b.index:
                return False
        return True

    def _backwards(self, before: Graph, after: Graph) -> None:
        """Pairs nodes by those who read them, or by the outputs that they compute."""
        ends = dict(before.outputs)
        for name, value in after.outputs:
            if name in ends:
                self._try(value, ends[name])
        for node in reversed(self._made):
            if node in self.found:
                for a, b in zip(node.inputs, self.found[node].inputs, strict=False):
                    if a is not None and b is not None:
                        self._try(a, b)

    def _try(self, value: Value, same: Value) -> None:
        node = value.node
        if not node.origin and node not in self.found and value.index == same.index and self._free(node, (same.node,)):
            self._pair(node, same.node)

    def _rest(self, before: Graph) -> None:
        """Pairs what is left with the first that is alike."""
        alike: dict[object, list[Node]] = {}
        for node in before.nodes:
            if node not in self._taken and node.op.name != "Weight":
                alike.setdefault(_key(node), []).append(node)
        for node in self._made:
            left = alike.get(_key(node), [])
            if node not in self.found and left:
                self._pair(node, left.pop(0))


def _key(node: Node) -> object:
    weights = tuple(v.node if v is not None and v.node.op.name == "Weight" else None for v in node.inputs)
    read = tuple(w.attrs["data"] if w is not None else None for w in weights)
    return node.op.name, node.op.label, node.attrs, read, tuple(str(v.type) for v in node.outputs)


__all__ = [
    "CONSTANT", "FAMILIES", "INPUT", "LAYOUT", "OPERATOR", "OUTPUT", "PLANNED", "REWRITTEN", "Box", "Drawing",
    "Picture", "Step", "counterparts", "drawn", "picture", "read_picture",
]  # fmt: skip
