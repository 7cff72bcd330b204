"""Carries a match out in a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from taso.graph.errors import GraphError, RuleError
from taso.graph.operator import Attrs, Operator
from taso.graph.ops import WEIGHT
from taso.graph.types import TensorType
from taso.rules.constants import CONSTANTS, constant_weight
from taso.rules.expression import Bindings
from taso.rules.matcher import Match, Searched, bindings
from taso.rules.pattern import PatternNode, Port, Ref
from taso.search.state import Setting


class Rewritable(Searched, Protocol):
    """What a match is carried out in: a draft of a state, or an e-graph."""

    setting: Setting

    def is_live(self, node: int) -> bool: ...
    def is_output(self, value: int) -> bool: ...
    def resolve(self, value: int) -> int: ...
    def alias(self, value: int, target: int) -> None: ...

    def add(
        self, op: Operator, attrs: Attrs, inputs: Sequence[int | None], wanted: Mapping[int, int], origin: str
    ) -> tuple[int, ...]: ...

    def place_source(
        self, op: Operator, attrs: Attrs, types: tuple[TensorType, ...], label: str
    ) -> tuple[int, ...]: ...


class Refused(Exception):
    """A rewrite that does not apply here; the message is the reason."""


def apply(match: Match, draft: Rewritable) -> None:
    """Replaces the match by the rule's target; raises `Refused` with the reason where it does not apply."""
    rule = match.rule
    _check_still_there(match, draft)
    _check_outside_use(match, draft)
    env = bindings(draft, rule, match.variables, match.attributes)
    replaced = [draft.outputs(match.nodes[p.node])[p.output] for p, _ in rule.outputs]
    wanted: dict[int, dict[int, int]] = {}
    again: list[tuple[int, Ref]] = []
    for value, (_, ref) in zip(replaced, rule.outputs, strict=True):
        if isinstance(ref, Port) and ref.output not in wanted.get(ref.node, {}):
            wanted.setdefault(ref.node, {})[ref.output] = value
        else:
            again.append((value, ref))
    made: list[tuple[int, ...]] = []
    for number, node in enumerate(rule.target):
        made.append(_instantiate(match, draft, env, node, made, wanted.get(number, {})))
    for value, ref in again:
        target = match.variables[ref] if isinstance(ref, str) else made[ref.node][ref.output]
        _check_type(draft, value, target)
        draft.alias(value, target)


def _check_still_there(match: Match, draft: Rewritable) -> None:
    for pattern, node in zip(match.rule.source, match.nodes, strict=True):
        if not draft.is_live(node):
            raise Refused("a node of the match is gone")
        for ref in pattern.inputs:
            if isinstance(ref, Port):
                maker = match.nodes[ref.node]
                value = draft.outputs(maker)[ref.output]
                if draft.producer(value) != maker or value not in draft.inputs(node):
                    raise Refused("a value of the match is computed by another node by now")


def _check_outside_use(match: Match, draft: Rewritable) -> None:
    """A source value used outside the match must be mapped, unless it costs nothing to keep."""
    mapped = {p for p, _ in match.rule.outputs}
    inside = set(match.nodes)
    for place, node in enumerate(match.nodes):
        for index, value in enumerate(draft.outputs(node)):
            if Port(place, index) in mapped or draft.is_constant(value) or draft.producer(value) != node:
                continue
            if draft.is_output(value):
                raise Refused(f"{draft.op(node).name} inside the match is an output of the graph")
            if any(reader not in inside for reader in draft.consumers(value)):
                raise Refused(f"{draft.op(node).name} inside the match is used outside of it")


def _instantiate(
    match: Match, draft: Rewritable, env: Bindings, node: PatternNode, made: list[tuple[int, ...]],
    wanted: dict[int, int],
) -> tuple[int, ...]:  # fmt: skip
    store = draft.setting.store
    try:
        if node.op in CONSTANTS:
            weight = constant_weight(node.op, node.attributes((), env))
            label = f"{node.op.name}:{weight.attrs}"
            return draft.place_source(WEIGHT, Attrs({"data": weight}), (weight.type,), label)
        inputs = [_input(match, draft, r, made) for r in node.inputs]
        types = [store.class_types[c] if c is not None else None for c in inputs]
        attrs = node.attributes(types, env)
        results = node.op.types_of(types, attrs)
        for index, value in wanted.items():
            if results[index] != store.class_types[value]:
                raise Refused(f"{node.op.name} would give {results[index]} where {store.class_types[value]} was")
        number = store.intern(node.op, attrs, tuple(inputs), origin=match.rule.name)
    except (GraphError, RuleError) as error:
        raise Refused(str(error)) from error
    if not store.writable(number):
        raise Refused(f"{node.op.name} cannot be written in ONNX opset {store.opset}")
    if not store.entries[number].constant and any(draft.is_constant(value) for value in wanted.values()):
        # and what else depends on weights alone might come to read it, and be what it is computed from
        raise Refused(f"{node.op.name} would compute at run time what depends on weights alone")
    return draft.add(node.op, attrs, inputs, wanted, match.rule.name)


def _input(match: Match, draft: Rewritable, ref: Ref | None, made: list[tuple[int, ...]]) -> int | None:
    if ref is None:
        return None
    return draft.resolve(match.variables[ref] if isinstance(ref, str) else made[ref.node][ref.output])


def _check_type(draft: Rewritable, value: int, target: int) -> None:
    old, new = draft.symbolic_type(value), draft.symbolic_type(draft.resolve(target))
    if old != new:
        raise Refused(f"the result would be {new} where {old} was")
    if draft.is_constant(value) and not draft.is_constant(draft.resolve(target)):
        raise Refused("what depends on weights alone would be taken from what is computed at run time")
