"""Finds where rules apply in a graph: by index on a rule's operators, outwards along edges, never by scanning."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from taso.graph.errors import GraphError, RuleError
from taso.graph.operator import Attrs, Operator, Trait
from taso.graph.ops import WEIGHT
from taso.graph.types import DType, TensorType
from taso.rules.constants import CONSTANTS, ConstantWeight
from taso.rules.expression import Bindings, Value
from taso.rules.pattern import Exactness, PatternNode, Port, Rule, settled

Array = NDArray[np.generic]


class Searched(Protocol):
    """A graph as the matcher sees it: nodes and values are numbers, types keep their symbols."""

    def op(self, node: int) -> Operator: ...
    def attrs(self, node: int) -> Attrs: ...
    def inputs(self, node: int) -> Sequence[int | None]: ...
    def outputs(self, node: int) -> Sequence[int]: ...
    def producer(self, value: int) -> int: ...
    def consumers(self, value: int) -> Sequence[int]: ...
    def is_constant(self, value: int) -> bool: ...
    def symbolic_type(self, value: int) -> TensorType: ...
    def live_nodes(self) -> Iterable[int]: ...
    def content(self, value: int) -> Array | None: ...


@dataclass(frozen=True, eq=False)
class Match:
    """A rule's source found in a graph: the node for each source node, the value for each variable."""

    number: int
    rule: Rule
    nodes: tuple[int, ...]
    variables: Mapping[str, int]
    attributes: Mapping[str, Value]

    @property
    def key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Names the match within a search; keys order matches the same way on every run."""
        return self.number, self.nodes, tuple(self.variables.values())


@dataclass(frozen=True)
class Hop:
    """How the matcher reaches a source node from those it has.

    "up": it makes input `slot` of node `other`; "down": it reads output `slot` of node `other`; "beside": it reads the
    variable `variable`; "anywhere": nothing connects it, so it must share a producer or a reader with what is there.
    """

    node: int
    kind: str
    other: int = -1
    slot: int = -1
    variable: str = ""


class CompiledRule:
    """A rule with, for each source node, the order in which the others are found from there."""

    def __init__(self, number: int, rule: Rule) -> None:
        self.number = number
        self.rule = rule
        self.routes, self.exchanges = _prepared(rule)

    def rarest(self, counts: Mapping[Operator, int]) -> int | None:
        """The source node whose operator the graph has least often, None where it lacks one."""
        found = [(counts.get(_stands_for(n), 0), i) for i, n in enumerate(self.rule.source)]
        return None if min(found)[0] == 0 else min(found)[1]


_Prepared = tuple[list[tuple[Hop, ...]], tuple[tuple[int, ...], ...]]
_PREPARED: dict[int, tuple[Rule, _Prepared]] = {}
_MOST_PREPARED = 20_000


def _prepared(rule: Rule) -> _Prepared:
    """Routes and exchanges of a rule, worked out once for each rule object: searches are made of the same ones."""
    known = _PREPARED.get(id(rule))
    if known is not None and known[0] is rule:
        return known[1]
    if len(_PREPARED) >= _MOST_PREPARED:
        _PREPARED.clear()
    made = [_route(rule.source, start) for start in range(len(rule.source))], exchanges(rule)
    _PREPARED[id(rule)] = rule, made
    return made


def exchanges(rule: Rule) -> tuple[tuple[int, ...], ...]:
    """The orders of the source nodes that exchanging two outputs brings about which the rule does not tell apart.

    Of matches that differ by such exchanges alone, one is enough.
    """
    places = itertools.combinations([port for port, _ in rule.outputs], 2)
    return tuple(order for first, second in places if (order := _exchange(rule, first, second)))


def _exchange(rule: Rule, first: Port, second: Port) -> tuple[int, ...]:
    nodes: dict[int, int] = {}
    names: dict[str, str] = {}
    if first.output != second.output or not _exchanged(rule.source, first.node, second.node, nodes, names):
        return ()
    order = tuple(nodes.get(i, i) for i in range(len(rule.source)))
    if sorted(order) != list(range(len(order))) or any(order[order[i]] != i for i in order):
        return ()
    if any(_names_of(node, names) for i, node in enumerate(rule.source) if i not in nodes):
        # what is not exchanged reads, or is set by, what is
        return ()
    renamed = {_normal(_renamed(str(c), names)) for c in rule.conditions}
    return order if renamed == {_normal(str(c)) for c in rule.conditions} else ()


def _names_of(node: PatternNode, names: Mapping[str, str]) -> bool:
    """Whether a source node speaks of a name that is exchanged for another."""
    said = {ref for ref in node.inputs if isinstance(ref, str)}
    said.update(w for _, value in node.attrs for w in re.findall(r"[A-Za-z_]\w*", str(value)))
    return any(names.get(name, name) != name for name in said)


def _exchanged(source: Sequence[PatternNode], a: int, b: int, nodes: dict[int, int], names: dict[str, str]) -> bool:
    """Whether term `a` becomes term `b` by a renaming that is its own inverse; notes it in `nodes` and `names`."""
    if a in nodes or b in nodes:
        return nodes.get(a) == b and nodes.get(b) == a
    nodes[a], nodes[b] = b, a
    x, y = source[a], source[b]
    if x.op is not y.op or x.n_outputs != y.n_outputs or len(x.inputs) != len(y.inputs) or len(x.attrs) != len(y.attrs):
        return False
    for (name, left), (other, right) in zip(x.attrs, y.attrs, strict=True):
        if name != other or not _same_expression(str(left), str(right), names):
            return False
    for p, q in zip(x.inputs, y.inputs, strict=True):
        if isinstance(p, Port) and isinstance(q, Port):
            if p.output != q.output or not _exchanged(source, p.node, q.node, nodes, names):
                return False
        elif isinstance(p, str) and isinstance(q, str):
            if names.setdefault(p, q) != q or names.setdefault(q, p) != p:
                return False
        elif p is not q:
            return False
    return True


def _same_expression(left: str, right: str, names: dict[str, str]) -> bool:
    if left.isidentifier() and right.isidentifier():
        return names.setdefault(left, right) == right and names.setdefault(right, left) == left
    return left == right


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda m: names.get(m.group(), m.group()), text)


def _normal(text: str) -> str:
    """Equations, and comparisons of all tensors named, read the same from both sides."""
    compared = re.fullmatch(r"(same_shape|same_dtype)\(([\w, ]*)\)", text)
    if compared:
        return f"{compared[1]}({', '.join(sorted(compared[2].split(', ')))})"
    sides = text.split(" == ")
    return " == ".join(sorted(sides)) if len(sides) == 2 else text


def _first_of_two(partial: _Partial, order: Sequence[int]) -> bool:
    nodes = _in_order(partial)
    return nodes <= tuple(nodes[i] for i in order)


def _stands_for(node: PatternNode) -> Operator:
    return WEIGHT if node.op in CONSTANTS else node.op


def _route(source: Sequence[PatternNode], start: int) -> tuple[Hop, ...]:
    reached = [start]
    hops: list[Hop] = []
    while len(reached) < len(source):
        hop = next(_hops(source, reached), None)
        if hop is None:
            rest = next(i for i in range(len(source)) if i not in reached)
            hop = Hop(rest, "anywhere")
        hops.append(hop)
        reached.append(hop.node)
    return tuple(hops)


def _hops(source: Sequence[PatternNode], reached: Sequence[int]) -> Iterator[Hop]:
    for i in reached:
        for slot, ref in enumerate(source[i].inputs):
            if isinstance(ref, Port) and ref.node not in reached:
                yield Hop(ref.node, "up", i, slot)
    for j, node in enumerate(source):
        if j in reached:
            continue
        for ref in node.inputs:
            if isinstance(ref, Port) and ref.node in reached:
                yield Hop(j, "down", ref.node, ref.output)
    known = {r for i in reached for r in source[i].inputs if isinstance(r, str)}
    for j, node in enumerate(source):
        if j not in reached:
            for ref in node.inputs:
                if isinstance(ref, str) and ref in known:
                    yield Hop(j, "beside", variable=ref)


@dataclass
class _Partial:
    """A match under way."""

    nodes: dict[int, int] = field(default_factory=dict)
    variables: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    # for each source node, which input of the graph node each of its own inputs is: a commutative one may exchange them
    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def copy(self) -> _Partial:
        return _Partial(dict(self.nodes), dict(self.variables), dict(self.attributes), dict(self.orders))

    def read(self, view: Searched, place: int, slot: int) -> int | None:
        """The value that input `slot` of source node `place` stands for."""
        return view.inputs(self.nodes[place])[self.orders[place][slot]]


class Matcher:
    """All rules of a search, indexed by operator. The order of `rules` decides ties."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = [CompiledRule(i, r) for i, r in enumerate(rules) if not r.trivial]
        self._by_op: dict[Operator, list[tuple[CompiledRule, int]]] = {}
        for compiled in self.rules:
            for place, node in enumerate(compiled.rule.source):
                self._by_op.setdefault(_stands_for(node), []).append((compiled, place))

    def find_all(self, view: Searched) -> list[Match]:
        """Every match in a graph."""
        nodes: dict[Operator, list[int]] = {}
        for node in view.live_nodes():
            nodes.setdefault(view.op(node), []).append(node)
        counts = {op: len(found) for op, found in nodes.items()}
        found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Match] = {}
        for compiled in self.rules:
            start = compiled.rarest(counts)
            if start is not None:
                for node in nodes[_stands_for(compiled.rule.source[start])]:
                    found.update((m.key, m) for m in self._from(view, compiled, start, node))
        return list(found.values())

    def find_at(self, view: Searched, nodes: Iterable[int]) -> list[Match]:
        """Every match that takes in at least one of `nodes`."""
        found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Match] = {}
        for node in nodes:
            for compiled, place in self._by_op.get(view.op(node), ()):
                found.update((m.key, m) for m in self._from(view, compiled, place, node))
        return list(found.values())

    def explain(self, view: Searched, rule_number: int) -> list[tuple[tuple[int, ...], str]]:
        """Where the shape of a rule's source fits: the nodes, and why the rule does not apply there ("" if it does)."""
        compiled = next((c for c in self.rules if c.number == rule_number), None)
        if compiled is None:
            raise RuleError(f"rule {rule_number} is not among those searched with")
        place = 0
        wanted = _stands_for(compiled.rule.source[place])
        told = []
        for node in view.live_nodes():
            if view.op(node) is wanted:
                for partial in self._complete(view, compiled, place, node):
                    told.append((_in_order(partial), _reason(view, compiled.rule, partial)))
        return told

    def _from(self, view: Searched, compiled: CompiledRule, place: int, node: int) -> Iterator[Match]:
        for partial in self._complete(view, compiled, place, node):
            if not all(_first_of_two(partial, order) for order in compiled.exchanges):
                continue
            if not _reason(view, compiled.rule, partial):
                variables = {v: partial.variables[v] for v in compiled.rule.variables}
                yield Match(compiled.number, compiled.rule, _in_order(partial), variables, partial.attributes)

    def _complete(self, view: Searched, compiled: CompiledRule, place: int, node: int) -> Iterator[_Partial]:
        for partial in _unify(view, compiled.rule, _Partial(), place, node):
            yield from self._extend(view, compiled, partial, compiled.routes[place])

    def _extend(
        self, view: Searched, compiled: CompiledRule, partial: _Partial, hops: Sequence[Hop]
    ) -> Iterator[_Partial]:
        if not hops:
            yield partial
            return
        for candidate in _candidates(view, compiled.rule, partial, hops[0]):
            for extended in _unify(view, compiled.rule, partial, hops[0].node, candidate):
                yield from self._extend(view, compiled, extended, hops[1:])


def _in_order(partial: _Partial) -> tuple[int, ...]:
    return tuple(partial.nodes[i] for i in range(len(partial.nodes)))


def _candidates(view: Searched, rule: Rule, partial: _Partial, hop: Hop) -> Sequence[int]:
    if hop.kind == "up":
        value = partial.read(view, hop.other, hop.slot)
        return [] if value is None else [view.producer(value)]
    if hop.kind == "down":
        return view.consumers(view.outputs(partial.nodes[hop.other])[hop.slot])
    if hop.kind == "beside":
        return view.consumers(partial.variables[hop.variable])
    wanted = _stands_for(rule.source[hop.node])
    near: dict[int, None] = {}
    for node in partial.nodes.values():
        for value in view.inputs(node):
            if value is not None:
                near.update(dict.fromkeys(view.consumers(value)))
        for value in view.outputs(node):
            for reader in view.consumers(value):
                near.update(dict.fromkeys(view.producer(v) for v in view.inputs(reader) if v is not None))
    return [n for n in near if view.op(n) is wanted]


def _unify(view: Searched, rule: Rule, partial: _Partial, place: int, node: int) -> Iterator[_Partial]:
    """The ways in which graph node `node` can be source node `place`, given what is matched already."""
    pattern = rule.source[place]
    if view.op(node) is not _stands_for(pattern) or node in partial.nodes.values():
        return
    if pattern.op in CONSTANTS:
        yield from _unify_constant(view, rule, partial, place, node)
        return
    inputs = view.inputs(node)
    if len(inputs) != len(pattern.inputs) or len(view.outputs(node)) != pattern.n_outputs:
        return
    orders = [tuple(range(len(inputs)))]
    if pattern.op.has(Trait.COMMUTATIVE) and len(inputs) == 2 and inputs[0] != inputs[1]:
        orders.append((1, 0))
    # most nodes are ruled out by the operators around them, which are known sooner than settings are compared
    orders = [order for order in orders if _made_right(view, rule, pattern, inputs, order)]
    if not orders:
        return
    types = [view.symbolic_type(v) if v is not None else None for v in inputs]
    attributes = dict(partial.attributes)
    if pattern.bind(types, view.attrs(node), attributes) is not None:
        return
    for order in orders:
        extended = partial.copy()
        extended.attributes = dict(attributes)
        extended.nodes[place] = node
        extended.orders[place] = order
        pairs = [(ref, inputs[i]) for ref, i in zip(pattern.inputs, order, strict=True)]
        if all(_fits(view, rule, extended, ref, value) for ref, value in pairs):
            if _used_right(view, rule, extended, place, node):
                yield extended


def _made_right(
    view: Searched, rule: Rule, pattern: PatternNode, inputs: Sequence[int | None], order: Sequence[int]
) -> bool:
    """Whether what the pattern reads from operators comes from such ones."""
    for ref, place in zip(pattern.inputs, order, strict=True):
        if isinstance(ref, Port):
            value = inputs[place]
            if value is None or view.op(view.producer(value)) is not _stands_for(rule.source[ref.node]):
                return False
    return True


def _unify_constant(view: Searched, rule: Rule, partial: _Partial, place: int, node: int) -> Iterator[_Partial]:
    pattern = rule.source[place]
    weight = view.attrs(node)["data"]
    if not isinstance(weight, ConstantWeight) or weight.op is not pattern.op:
        return
    attributes = dict(partial.attributes)
    if pattern.bind((), weight.attrs, attributes) is None:
        extended = partial.copy()
        extended.attributes = attributes
        extended.nodes[place] = node
        extended.orders[place] = ()
        if _used_right(view, rule, extended, place, node):
            yield extended


def _fits(view: Searched, rule: Rule, partial: _Partial, ref: str | Port | None, value: int | None) -> bool:
    if ref is None or value is None:
        return ref is None and value is None
    if isinstance(ref, str):
        return partial.variables.setdefault(ref, value) == value
    producer = view.producer(value)
    known = partial.nodes.get(ref.node)
    if known is not None and known != producer:
        return False
    outputs = view.outputs(producer)
    return (
        view.op(producer) is _stands_for(rule.source[ref.node])
        and ref.output < len(outputs)
        and outputs[ref.output] == value
    )


def _used_right(view: Searched, rule: Rule, partial: _Partial, place: int, node: int) -> bool:
    """Whether matched readers of the node read it where the rule says."""
    outputs = view.outputs(node)
    for other in partial.nodes:
        for slot, ref in enumerate(rule.source[other].inputs):
            if isinstance(ref, Port) and ref.node == place:
                if ref.output >= len(outputs) or partial.read(view, other, slot) != outputs[ref.output]:
                    return False
    return True


def bindings(view: Searched, rule: Rule, variables: Mapping[str, int], attributes: Mapping[str, Value]) -> Bindings:
    """What the rule's expressions speak of, in a match."""
    types = {v: view.symbolic_type(c) for v, c in variables.items()}
    weights = frozenset(v for v, c in variables.items() if view.is_constant(c))
    return Bindings(types, attributes, weights, _Contents(view, variables))


class _Contents(Mapping[str, Array]):
    """Contents of weights, looked at only where a condition asks."""

    def __init__(self, view: Searched, variables: Mapping[str, int]) -> None:
        self._view = view
        self._variables = variables

    def __getitem__(self, name: str) -> Array:
        found = self._view.content(self._variables[name])
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


_WIDE = frozenset({DType.FLOAT, DType.DOUBLE})
"""Element types in which rules that lose digits apply."""


def _reason(view: Searched, rule: Rule, partial: _Partial) -> str:
    """Why a rule does not apply where the shape of its source fits; "" where it does."""
    mapped = [view.outputs(partial.nodes[p.node])[p.output] for p, _ in rule.outputs]
    if all(view.is_constant(v) for v in mapped):
        return "what it would replace depends on weights alone and costs nothing"
    if any(view.symbolic_type(v).shape is None for v in (*partial.variables.values(), *mapped)):
        return "the rank of a value is unknown"
    env = bindings(view, rule, partial.variables, partial.attributes)
    for variable in partial.variables:
        if reason := _beyond(rule.certificate.dimensions, variable, env.type_of(variable)):
            return reason
    if rule.exactness is not Exactness.EXACT:
        for variable in partial.variables:
            if not env.type_of(variable).dtype.is_float:
                return f"'{variable}' is {env.type_of(variable).dtype.name}, and the rule holds for real numbers"
    if rule.exactness is Exactness.APPROXIMATES:
        for variable in partial.variables:
            if env.type_of(variable).dtype not in _WIDE:
                return f"'{variable}' is {env.type_of(variable).dtype.name}, too narrow for a rule that loses digits"
    try:
        matched = [_settled(view, rule.source[i], partial.nodes[i]) for i in range(len(rule.source))]
        return rule.check_attributes(env, matched) or rule.check_conditions(env) or ""
    except (GraphError, RuleError) as error:
        return str(error)


def _beyond(dimensions: int, variable: str, type: TensorType) -> str:
    """Why no verdict covers a tensor: each holds up to a number of `dimensions`, and of sizes of at least 1."""
    if 0 < dimensions < type.rank:
        return f"'{variable}' has {type.rank} dimensions, and the rule is known to hold up to {dimensions}"
    return f"'{variable}' has a size of 0" if 0 in type.dims else ""


def _settled(view: Searched, pattern: PatternNode, node: int) -> Attrs:
    if pattern.op in CONSTANTS:
        weight = view.attrs(node)["data"]
        if isinstance(weight, ConstantWeight):
            return weight.attrs
    types = [view.symbolic_type(v) if v is not None else None for v in view.inputs(node)]
    return settled(view.op(node), types, view.attrs(node))
