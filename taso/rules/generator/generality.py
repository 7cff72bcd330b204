"""Makes a proved rule as general as its proof allows: fewer conditions, settings and axes that the source binds.

Each step changes the statement, and is kept where the new one is proved as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import ne

from taso.graph.errors import RuleError
from taso.rules.expression import Binary, Call, Compare, Expr, Literal, Name, Tuple, parse, tensor_names
from taso.rules.generator.spelling import spelled
from taso.rules.pattern import Certificate, PatternNode, Rule, Status
from taso.rules.verifier import prove

STEPS = 20_000
"""Steps of the prover that each attempt may take: bounded by work and not by time, so that the result is the same
on every machine."""

_SECONDS = 60.0

_WINDOWS = {
    "Conv": ("pads", "strides", "dilations"), "MaxPool": ("pads", "strides", "kernel_shape"),
    "AveragePool": ("pads", "strides", "kernel_shape"),
}  # fmt: skip
_FIXED_AXES = {"Transpose", "MatMul", "Conv", "Gemm"}


Mapped = Callable[[Callable[[Rule], bool], Sequence[Rule]], Iterable[bool]]
"""`map`, or that of an executor."""


def generalised(rules: Sequence[Rule], mapped: Mapped = map) -> list[Rule]:
    """Each rule, or a more general one that has a proof (its status is open then); each statement once.

    Rules that differ in settings only become one, so that what is tried for one serves all.
    """
    current = list(rules)
    for step in (_windows, _axes, _ranks):
        current = _stepped(current, [list(step(r)) for r in current], mapped)
    for place in reversed(range(max((len(r.conditions) for r in current), default=0))):
        # from the last condition backwards, so that those before keep their places
        current = _stepped(current, [list(_without(r, place)) for r in current], mapped)
    return current


def _stepped(rules: Sequence[Rule], wider: Sequence[Sequence[Rule]], mapped: Mapped) -> list[Rule]:
    """Each rule, or the first of its wider ones that has a proof."""
    known = {spelled(r): True for r in rules}
    result = list(rules)
    waiting = {i: iter(w) for i, w in enumerate(wider)}
    while waiting:
        tried = {i: r for i, candidates in waiting.items() if (r := next(candidates, None)) is not None}
        fresh = {spelled(r): r for r in tried.values() if spelled(r) not in known}
        known.update(zip(fresh, mapped(provable, list(fresh.values())), strict=True))
        for i, rule in tried.items():
            if known[spelled(rule)]:
                result[i] = rule
        waiting = {i: waiting[i] for i, rule in tried.items() if not known[spelled(rule)]}
    return distinct(result)


def distinct(rules: Iterable[Rule]) -> list[Rule]:
    """Each statement once, whatever its variables are called."""
    found: dict[str, Rule] = {}
    for rule in rules:
        found.setdefault(spelled(rule), rule)
    return list(found.values())


def provable(rule: Rule) -> bool:
    """Whether a rule has a proof of bounded length."""
    return prove(rule, _SECONDS, STEPS).done


def _without(rule: Rule, place: int) -> Iterator[Rule]:
    """The rule without its condition number `place`."""
    if place < len(rule.conditions):
        condition = rule.conditions[place]
        if tensor_names(condition) and not (isinstance(condition, Call) and condition.function == "is_float"):
            yield from _changed(rule, lambda node: node, partial(ne, condition))


def _changed(
    rule: Rule, node: Callable[[PatternNode], PatternNode], kept: Callable[[Expr], bool], more: tuple[Expr, ...] = ()
) -> Iterator[Rule]:  # fmt: skip
    """The rule with each node changed and other conditions; nothing where the parts do not fit together."""
    conditions = tuple(dict.fromkeys((*(c for c in rule.conditions if kept(c)), *more)))
    source, target = tuple(map(node, rule.source)), tuple(map(node, rule.target))
    if (source, target, conditions) == (rule.source, rule.target, rule.conditions):
        return
    try:
        yield replace(
            rule, source=source, target=target, conditions=conditions, status=Status.UNPROVED, certificate=Certificate()
        )
    except RuleError:
        return


def _free_names(rule: Rule, letters: str) -> list[str]:
    """A name for each letter that the rule does not use yet."""
    used = {*rule.variables, *rule.attribute_variables}
    found: list[str] = []
    for letter in letters:
        found.append(next(n for n in (letter, *(f"{letter}{i}" for i in range(100))) if n not in used))
        used.add(found[-1])
    return found


def _windows(rule: Rule) -> Iterator[Rule]:
    """Settings of convolutions and pools that are the same everywhere, bound by the source."""
    names = dict(zip(("pads", "strides", "dilations", "kernel_shape"), _free_names(rule, "psdk"), strict=True))

    def lifted(node: PatternNode) -> PatternNode:
        bound = {n: Name(names[n]) for n in _WINDOWS.get(node.op.name, ())}
        return replace(node, attrs=tuple({**dict(node.attrs), **bound}.items()))

    if any(n.op.name in _WINDOWS for n in rule.source):
        yield from _changed(rule, lifted, lambda c: not _fixes_window(c))
        yield from _changed(rule, lifted, lambda c: not _fixes_window(c), _images_alike(rule))


def _images_alike(rule: Rule) -> tuple[Expr, ...]:
    """That all images have one height and width: of a window at stride 1 that follows from what comes out."""
    read = [n.inputs[0] for n in rule.source if n.op.name in _WINDOWS]
    images = list(dict.fromkeys(r for r in read if isinstance(r, str)))
    return tuple(parse(f"dim({images[0]}, {axis}) == dim({other}, {axis})") for other in images[1:] for axis in (2, 3))


def _fixes_window(condition: Expr) -> bool:
    """Whether a condition says that a dimension of a kernel's window is a number."""
    if not (isinstance(condition, Compare) and isinstance(condition.rest[-1], Literal)):
        return False
    return isinstance(condition.first, Call) and condition.first.args[-1] in (Literal(2), Literal(3))


def _axes(rule: Rule) -> Iterator[Rule]:
    """The one axis along which everything is joined and cut, bound by the source, at any rank."""
    nodes = (*rule.source, *rule.target)
    axes = {axis for n in nodes if (axis := dict(n.attrs).get("axis")) is not None}
    if len(axes) != 1 or any(n.op.name in _FIXED_AXES for n in nodes):
        return
    (axis,), (name,) = axes, _free_names(rule, "i")

    def lifted(node: PatternNode) -> PatternNode:
        attrs = {n: _at_axis(e, axis, Name(name)) for n, e in node.attrs}
        if "axis" in attrs:
            attrs["axis"] = Name(name)
        return replace(node, attrs=tuple(attrs.items()))

    yield from _changed(rule, lifted, lambda c: not _about_sizes(c))
    pairs = sorted({pair for c in rule.conditions if (pair := _pair(c)) is not None})
    alike = [
        parse(f"shape({a})[{part}] == shape({b})[{part}]") for a, b in pairs for part in (f":{name}", f"{name} + 1:")
    ]
    yield from _changed(rule, lifted, lambda c: not _about_sizes(c), tuple(alike))


def _pair(condition: Expr) -> tuple[str, str] | None:
    """The two variables that a condition says to have a dimension in common."""
    if not isinstance(condition, Compare) or len(condition.rest) != 1:
        return None
    named = [sorted(tensor_names(side)) for side in (condition.first, condition.rest[0])]
    return (named[0][0], named[1][0]) if all(len(n) == 1 for n in named) else None


def _at_axis(expr: Expr, axis: Expr, name: Expr) -> Expr:
    """`expr` with every dimension along one axis told by a name instead."""
    if isinstance(expr, Call) and expr.function == "dim" and expr.args[1] == axis:
        return Call("dim", (expr.args[0], name))
    if isinstance(expr, Tuple):
        return Tuple(tuple(_at_axis(item, axis, name) for item in expr.items))
    if isinstance(expr, Binary):
        return Binary(expr.op, _at_axis(expr.left, axis, name), _at_axis(expr.right, axis, name))
    return expr


def _about_sizes(condition: Expr) -> bool:
    return isinstance(condition, Compare) and any(
        isinstance(side, Call) and side.function in ("rank", "dim") for side in (condition.first, *condition.rest)
    )


def _ranks(rule: Rule) -> Iterator[Rule]:
    """Without the conditions on ranks."""
    yield from _changed(rule, lambda node: node, lambda c: not _about_rank(c))


def _about_rank(condition: Expr) -> bool:
    return isinstance(condition, Compare) and isinstance(condition.first, Call) and condition.first.function == "rank"
