"""The rules of some spaces as one text: named, without what others say already, and only what a search can use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Union

from taso.graph.operator import Trait
from taso.rules.expression import Expr, Name
from taso.rules.generator.generality import distinct
from taso.rules.generator.generation import Generated
from taso.rules.pattern import PatternNode, Port, Rule
from taso.rules.text import show_rules

HEAD = "# Substitutions that `taso rules generate` found: do not edit, run it again.\n\n"


SAID = "said by another rule, which may ask for more"


@dataclass(frozen=True)
class Packaged:
    """Rules, and how many more there were of each kind that was left out."""

    rules: list[Rule]
    left_out: dict[str, int]


def packaged(found: Sequence[Generated], others: Iterable[Rule] = (), everything: bool = False) -> Packaged:
    """The rules of all spaces, each once and with an identifier.

    Left out are those that `others` say already, in these or more general words, and, unless `everything` is wanted,
    those that a search has no use for: that match operators which no file holds, or make a graph larger.
    """
    rules = distinct(r for space in found for r in space.rules)
    left_out = {"of no use to a search": 0, SAID: 0}
    if not everything:
        useful = [r for r in rules if _useful(r)]
        left_out["of no use to a search"] = len(rules) - len(useful)
        rules = useful
    # the most general first, so that what they say is recognised in the others
    ordered = sorted(rules, key=lambda r: (len(r.source) + len(r.target), -len(r.variables), r.name))
    kept: list[Rule] = []
    known = list(others)
    for rule in ordered:
        if any(instance_of(rule, general) for general in (*known, *kept)):
            left_out[SAID] += 1
        else:
            kept.append(rule)
    return Packaged(_named(kept), left_out)


def text_of(rules: Sequence[Rule]) -> str:
    """The file that holds these rules."""
    return HEAD + show_rules(rules)


def _useful(rule: Rule) -> bool:
    known = not any(node.op.internal for node in rule.source)
    return known and len(rule.outputs) == 1 and _size(rule.target) <= _size(rule.source)


def _size(nodes: Sequence[PatternNode]) -> int:
    """Operators that do something at run time."""
    return sum(1 for node in nodes if node.inputs)


def _named(rules: Iterable[Rule]) -> list[Rule]:
    names: dict[str, int] = {}
    named = []
    for rule in rules:
        base = _label(rule)
        names[base] = names.get(base, 0) + 1
        named.append(replace(rule, id=f"{base}-{names[base]}", origin=""))
    return named


def _label(rule: Rule) -> str:
    """The operators of a source, the outermost first: `found-relu-transpose`."""
    parts = [re.sub(r"(?<=[a-z])(?=[A-Z])", "-", node.op.name).lower() for node in reversed(rule.source)]
    return "-".join(("found", *parts))


# ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────

_Tree = Union[str, "tuple[PatternNode, int, tuple[_Tree | None, ...]]"]
_Bound = dict[str, object]


def instance_of(special: Rule, general: Rule) -> bool:
    """Whether a rule of one output is another one with its variables and settings filled in.

    Conditions are not compared: the general rule may ask for more, and then applies in fewer places.
    """
    if len(special.outputs) != 1 or len(general.outputs) != 1 or len(general.source) > len(special.source):
        return False
    ((old, new),), ((pattern, result),) = special.outputs, general.outputs
    source, target = _tree(special.source, old), _tree(special.target, new)
    for bound in _matches(_tree(general.source, pattern), source, {}):
        if any(True for _ in _matches(_tree(general.target, result), target, bound)):
            return True
    return False


def _tree(nodes: Sequence[PatternNode], ref: str | Port) -> _Tree:
    if isinstance(ref, str):
        return ref
    node = nodes[ref.node]
    return node, ref.output, tuple(None if r is None else _tree(nodes, r) for r in node.inputs)


def _matches(pattern: _Tree | None, tree: _Tree | None, bound: _Bound) -> Iterator[_Bound]:
    """What the pattern's variables stand for where the tree is an instance of it."""
    if isinstance(pattern, str):
        if bound.get(pattern, tree) == tree:
            yield {**bound, pattern: tree}
        return
    if pattern is None or tree is None or isinstance(tree, str):
        if pattern is None and tree is None:
            yield bound
        return
    (node, port, inputs), (other, other_port, operands) = pattern, tree
    if node.op is not other.op or port != other_port or len(inputs) != len(operands):
        return
    filled = _settings(dict(node.attrs), dict(other.attrs), bound)
    if filled is None:
        return
    orders = permutations(operands) if node.op.has(Trait.COMMUTATIVE) else [operands]
    for order in orders:
        yield from _all(inputs, order, filled)


def _all(patterns: Sequence[_Tree | None], trees: Sequence[_Tree | None], bound: _Bound) -> Iterator[_Bound]:
    if not patterns:
        yield bound
        return
    for first in _matches(patterns[0], trees[0], bound):
        yield from _all(patterns[1:], trees[1:], first)


def _filled(expr: Expr, bound: _Bound) -> str:
    """A setting with the variables that it speaks of replaced by what they stand for."""
    def replaced(match: re.Match[str]) -> str:
        stands_for = bound.get(match.group(), match.group())
        return stands_for if isinstance(stands_for, str) else "?"

    return re.sub(r"\b[A-Za-z_]\w*\b(?!\()", replaced, str(expr))


def _settings(wanted: Mapping[str, Expr], given: Mapping[str, Expr], bound: _Bound) -> _Bound | None:
    for name in {**wanted, **given}:
        expr = wanted.get(name)
        if isinstance(expr, Name):
            # a setting that is not mentioned has its default, which a name may stand for
            if bound.get(f"setting {expr.name}", given.get(name)) != given.get(name):
                return None
            bound = {**bound, f"setting {expr.name}": given.get(name)}
        elif expr is None or _filled(expr, bound) != str(given.get(name)):
            return None
    return bound
