"""Operators that are made of others: written out where an opset lacks them, and gathered again from their parts.

Exporters write x · sigmoid(x), or Gelu by Erf, as several operators, since ONNX names them in newer opsets only. A
backend that computes such a function in one go wants it as one operator: `gathered` finds it. `written_out` is the way
back. Both keep every value that is read elsewhere and everything that a file says of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from taso.graph.evaluate import constant_value
from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import Attrs, AttrValue, Trait, Types, Unspellable, Weight, operator_named
from taso.graph.types import DType, TensorType

_CLOSE = 2.0**-23
"""How far, relatively, a factor in a file may be from the real number that it stands for: float32 rounds it so."""

# ── written out ──────────────────────────────────────────────────────────────────────────────────────────────────


def written_out(graph: Graph, opset: int) -> Graph:
    """An equal graph in which operators that `opset` lacks are made of those it has; `graph` where it lacks none."""
    if not any(_lacks(node, opset) for node in graph.run_time_nodes):
        return graph
    made: dict[Node, Node] = {}

    def outputs(fresh: Graph, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        if node.constant or not _lacks(node, opset):
            types = [v.type for v in node.outputs]
            stated = types if node.op.has(Trait.SOURCE) or node.op.has(Trait.OPAQUE) else None
            return fresh.make(node.op, inputs, node.attrs, stated, node.origin).outputs
        value = _Making(fresh, opset, node).parts(node.op.name, [v for v in inputs if v is not None], node.attrs)
        made[node] = value.node
        return (value,)

    fresh = graph.rebuilt(outputs)
    for node, last in made.items():
        graph.info.describe(node, last, fresh.info)
    return fresh


def _lacks(node: Node, opset: int) -> bool:
    """Whether an opset has no such operator, and all that it is made of."""
    if node.op.parts is None or opset < node.op.parts.since:
        return False
    try:
        node.op.spell(node.attrs, _types(node), opset)
    except Unspellable:
        return True
    return False


def _types(node: Node) -> Types:
    return [v.type if v is not None else None for v in node.inputs]


class _Making:
    """Makes the parts of one node in a graph."""

    def __init__(self, graph: Graph, opset: int, node: Node) -> None:
        self.graph = graph
        self.opset = opset
        self.dtype = node.outputs[0].type.dtype
        self.origin = node.origin

    def parts(self, name: str, inputs: Sequence[Value], attrs: Attrs) -> Value:
        said = operator_named(name).parts
        if said is None:
            raise Unspellable(f"{name} is not made of others")
        return said.make(self, inputs, attrs)

    def __call__(
        self, name: str, inputs: Sequence[Value | float], attrs: Mapping[str, AttrValue] | None = None
    ) -> Value:
        values = [v if isinstance(v, Value) else self._number(v) for v in inputs]
        return self.graph.make(operator_named(name), values, attrs, origin=self.origin).output

    def _number(self, value: float) -> Value:
        array = np.asarray(value, self.dtype.numpy)
        return self.graph.add_weight(Weight(TensorType(self.dtype, ()), array))


# ── gathered ─────────────────────────────────────────────────────────────────────────────────────────────────────

Found = tuple[str, dict[str, AttrValue], Value]
"""An operator's name, its attributes, and what it is applied to."""


def gathered(graph: Graph, names: Collection[str]) -> tuple[Graph, dict[Node, Node]]:
    """An equal graph with those of the operators `names` as one node that it has in parts; `graph` where it has none.

    Also which node of the new graph computes what a node of the old one did: nodes inside of what was gathered are not
    in it. float32 alone is gathered; numbers in the file may differ by a rounding from those of the definition.
    """
    if not names:
        return graph, {}
    gathering = _Gathering(graph)
    found: dict[Node, Found] = {}
    inside: set[Node] = set()
    for node in reversed(graph.run_time_nodes):
        if node in inside:
            continue
        for seek in _SEEKERS.get(node.op.name, ()):
            gathering.begin(node)
            match = seek(gathering, node)
            if match is not None and match[0] in names and gathering.closed(match[2]):
                found[node] = match
                inside |= gathering.members - {node}
                break
    if not found:
        return graph, {}
    return _rebuilt(graph, found, inside)


def _rebuilt(graph: Graph, found: Mapping[Node, Found], inside: Collection[Node]) -> tuple[Graph, dict[Node, Node]]:
    fresh = type(graph)()
    values: dict[Value, Value] = {}
    nodes: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in inside:
            continue
        if node in found:
            name, attrs, x = found[node]
            new = fresh.make(operator_named(name), (values[x],), attrs, None, node.origin)
        else:
            inputs = tuple(values[v] if v is not None else None for v in node.inputs)
            types = [v.type for v in node.outputs]
            stated = types if node.op.has(Trait.SOURCE) or node.op.has(Trait.OPAQUE) else None
            new = fresh.make(node.op, inputs, node.attrs, stated, node.origin)
        nodes[node] = new
        values.update(zip(node.outputs, new.outputs, strict=True))
    graph.transfer(fresh, values)
    for node in found:
        graph.info.describe(node, nodes[node], fresh.info)
    return fresh, nodes


class _Gathering:
    """Looks at what a node is made of, and keeps the nodes that it looked through."""

    def __init__(self, graph: Graph) -> None:
        self._readers = graph.consumers()
        self._outputs = {v for _, v in graph.outputs}
        self.members: set[Node] = set()
        self._last: Node | None = None

    def begin(self, node: Node) -> None:
        self.members, self._last = {node}, node

    def closed(self, x: Value) -> bool:
        """Whether nobody else reads what lies between x and the node that was begun with, all of x's shape."""
        t = x.type
        if t.dtype is not DType.FLOAT or t.shape is None or x.node in self.members:
            return False
        return all(
            node.output.type == t and (node is self._last or self._is_inside(node.output)) for node in self.members
        )

    def _is_inside(self, value: Value) -> bool:
        return value not in self._outputs and all(reader in self.members for reader in self._readers[value])

    def through(self, value: Value, name: str) -> tuple[Value, ...] | None:
        """The inputs of the operator `name` that computes a value, which is a member from now on."""
        node = value.node
        if node.op.name != name or node.op.domain or node.constant or any(v is None for v in node.inputs):
            return None
        self.members.add(node)
        return tuple(v for v in node.inputs if v is not None)

    def with_number(self, value: Value, name: str, number: float) -> Value | None:
        """x where a value is x op `number`, in either order."""
        inputs = self.through(value, name)
        if inputs is None or len(inputs) != 2:
            return None
        return next((x for x, c in (inputs, inputs[::-1]) if _is(number_of(c), number)), None)

    def factors(self, value: Value) -> tuple[float, list[Value]]:
        """The product of numbers, and the other factors, that a value is the product of by Mul and Div."""
        inputs = self.through(value, "Mul")
        if inputs is None:
            divided = self._divided(value)
            if divided is None:
                return 1.0, [value]
            by, x = divided
            number, others = self.factors(x)
            return number / by, others
        number, others = 1.0, list[Value]()
        for factor in inputs:
            constant = number_of(factor)
            if constant is not None:
                number *= constant
            elif factor.node.op.name in ("Mul", "Div") and self._alone(factor):
                inner, more = self.factors(factor)
                number, others = number * inner, others + more
            else:
                others.append(factor)
        return number, others

    def _divided(self, value: Value) -> tuple[float, Value] | None:
        node = value.node
        by = node.inputs[1] if node.op.name == "Div" and not node.op.domain else None
        number = number_of(by) if by is not None else None
        inputs = self.through(value, "Div") if number else None
        return None if number is None or inputs is None else (number, inputs[0])

    def _alone(self, value: Value) -> bool:
        return len(self._readers[value]) == 1 and value not in self._outputs


def number_of(value: Value) -> float | None:
    """The number that a constant of one element is, None of any other value."""
    shape = value.type.shape
    if not value.node.constant or shape is None or any(d != 1 for d in shape) or len(shape) > 4:
        return None
    return float(constant_value(value).reshape(()))


def _is(found: float | None, wanted: float) -> bool:
    return found is not None and math.isclose(found, wanted, rel_tol=_CLOSE)


def _only(x: Value, factors: Sequence[Value]) -> bool:
    """Whether x is all that numbers are multiplied with."""
    return len(factors) == 1 and factors[0] is x


def _pairs(values: Sequence[Value]) -> Iterator[tuple[Value, Value]]:
    if len(values) == 2:
        yield values[0], values[1]
        yield values[1], values[0]


def _swish(g: _Gathering, node: Node) -> Found | None:
    """x · sigmoid(α·x)."""
    number, others = g.factors(node.output)
    for x, gate in _pairs(others) if number == 1 else ():
        inner = g.through(gate, "Sigmoid") if gate.node.op.name == "Sigmoid" else None
        if inner is not None:
            alpha, inside = g.factors(inner[0]) if inner[0] is not x else (1.0, [x])
            return ("Swish", {"alpha": alpha}, x) if _only(x, inside) else None
    return None


def _gelu(g: _Gathering, node: Node) -> Found | None:
    """½·x·(1 + erf(x / √2))."""
    number, others = g.factors(node.output)
    for x, gate in _pairs(others) if number == 0.5 else ():
        error = g.with_number(gate, "Add", 1.0) if gate.node.op.name == "Add" else None
        inner = g.through(error, "Erf") if error is not None else None
        if inner is not None:
            scale, inside = g.factors(inner[0])
            fits = _only(x, inside) and _is(scale, math.sqrt(0.5))
            return ("Gelu", {"approximate": "none"}, x) if fits else None
    return None


def _gelu_tanh(g: _Gathering, node: Node) -> Found | None:
    """½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""
    number, others = g.factors(node.output)
    for x, gate in _pairs(others) if number == 0.5 else ():
        bent = g.with_number(gate, "Add", 1.0) if gate.node.op.name == "Add" else None
        inner = g.through(bent, "Tanh") if bent is not None else None
        if inner is None:
            continue
        slope, inside = g.factors(inner[0])
        fits = len(inside) == 1 and _is(slope, math.sqrt(2 / math.pi))
        terms = g.through(inside[0], "Add") if fits else None
        for y, cubic in _pairs(terms or ()):
            if y is x and cubic is not x and _is_cube(g, cubic, x, 0.044715):
                return "Gelu", {"approximate": "tanh"}, x
    return None


def _is_cube(g: _Gathering, value: Value, x: Value, scale: float) -> bool:
    number, factors = g.factors(value)
    if not _is(number, scale):
        return False
    if len(factors) == 1:
        raised = g.through(factors[0], "Pow")
        return raised is not None and raised[0] is x and number_of(raised[1]) == 3
    return len(factors) == 3 and all(f is x for f in factors)


def _mish(g: _Gathering, node: Node) -> Found | None:
    """x · tanh(softplus(x))."""
    number, others = g.factors(node.output)
    for x, gate in _pairs(others) if number == 1 else ():
        bent = g.through(gate, "Tanh") if gate.node.op.name == "Tanh" else None
        inner = g.through(bent[0], "Softplus") if bent is not None else None
        if inner is not None:
            return ("Mish", {}, x) if inner[0] is x else None
    return None


def _hard_swish(g: _Gathering, node: Node) -> Found | None:
    """x · hard_sigmoid(x), or x · clip(x + 3, 0, 6) / 6."""
    number, others = g.factors(node.output)
    for x, gate in _pairs(others):
        if gate.node.op.name == "HardSigmoid" and number == 1:
            attrs, inner = gate.node.attrs, g.through(gate, "HardSigmoid")
            fits = _is(attrs.float("alpha"), 1 / 6) and attrs.float("beta") == 0.5
            return ("HardSwish", {}, x) if fits and inner is not None and inner[0] is x else None
        if gate.node.op.name == "Clip" and _is(number, 1 / 6):
            attrs, inner = gate.node.attrs, g.through(gate, "Clip")
            shifted = g.with_number(inner[0], "Add", 3.0) if inner is not None else None
            return ("HardSwish", {}, x) if shifted is x and (attrs["min"], attrs["max"]) == (0, 6) else None
    return None


_PRODUCTS: tuple[Callable[[_Gathering, Node], Found | None], ...] = (_swish, _gelu, _gelu_tanh, _mish, _hard_swish)
_SEEKERS = {"Mul": _PRODUCTS, "Div": _PRODUCTS}

__all__ = ["gathered", "number_of", "written_out"]
