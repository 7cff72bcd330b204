"""Rules as text: one paragraph each, read and written both ways.

    # Products that share an operand
    [merge-matmul]
    MatMul(x, a) | MatMul(x, b) => Split(MatMul(x, Concat(a, b, axis=1)), axis=1, split=(dim(a, 1), dim(b, 1)))
      where rank(a) == 2 and rank(b) == 2
      exact: reassociates

A paragraph ends at an empty line. Lines that begin with # are comments. The identifier in brackets is optional, so is
the condition; an exactness that is not given is the weaker `reassociates`. Operators have ONNX's names; `_` leaves an
optional input out; equal terms are one node. A term with several outputs stands for all of them between the bars and
takes an index elsewhere: Split(…)[0]. `Constant(v, like=x)` is the number v with the element type of x. Status and
certificate are no part of the text: a rule that is written down is yet to be tried.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping

from taso.graph.errors import GraphError, RuleError
from taso.graph.ops import operator_named
from taso.rules.constants import CONSTANTS
from taso.rules.expression import Call, Expr, Name, conjuncts, from_ast, parse, show, written
from taso.rules.pattern import Exactness, PatternNode, Port, Ref, Rule, natural_outputs

_IDENTIFIER = re.compile(r"\[([A-Za-z0-9][A-Za-z0-9_.-]*)\]")
_DEEPEST = 60


class _Side:
    """The nodes of one side, gathered while its terms are read."""

    def __init__(self) -> None:
        self.nodes: list[PatternNode] = []
        self._places: dict[PatternNode, int] = {}

    def outputs(self, tree: ast.expr) -> list[Ref]:
        """What a term between the bars stands for: all outputs of its operator, or the one that is indexed."""
        if isinstance(tree, ast.Call):
            place = self._call(tree, 0)
            return [Port(place, i) for i in range(self.nodes[place].n_outputs)]
        return [self._ref(tree, 0)]

    def _ref(self, tree: ast.expr, depth: int) -> Ref:
        if depth > _DEEPEST:
            raise RuleError(f"a term is nested more than {_DEEPEST} levels deep")
        if isinstance(tree, ast.Name) and tree.id != "_":
            return tree.id
        if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Call):
            index = tree.slice
            if isinstance(index, ast.Constant) and type(index.value) is int:
                return Port(self._call(tree.value, depth), index.value)
        if isinstance(tree, ast.Call):
            place = self._call(tree, depth)
            if self.nodes[place].n_outputs != 1:
                raise RuleError(f"'{written(tree)}' has several outputs: say which, as in Split(…)[0]")
            return Port(place, 0)
        raise RuleError(f"'{written(tree)}' is neither a variable nor an operator's output")

    def _call(self, tree: ast.Call, depth: int) -> int:
        if not isinstance(tree.func, ast.Name):
            raise RuleError(f"'{written(tree.func)}' is not an operator's name")
        try:
            op = operator_named(tree.func.id)
        except GraphError as error:
            raise RuleError(str(error)) from error
        args = list(tree.args)
        attrs: dict[str, Expr] = {}
        if op in CONSTANTS and args:
            attrs["value"] = from_ast(args.pop(0))
        inputs = tuple(None if isinstance(a, ast.Name) and a.id == "_" else self._ref(a, depth + 1) for a in args)
        attrs.update(_keywords(tree, op.name))
        if "like" in attrs and op in CONSTANTS:
            attrs["dtype"] = _dtype_of(attrs.pop("like"))
        count = _count(attrs.pop("outputs", None)) or natural_outputs(op, attrs)
        node = PatternNode(op, inputs, tuple(sorted(attrs.items())), count)
        if node not in self._places:
            self._places[node] = len(self.nodes)
            self.nodes.append(node)
        return self._places[node]


def _keywords(tree: ast.Call, op: str) -> dict[str, Expr]:
    found: dict[str, Expr] = {}
    for keyword in tree.keywords:
        if keyword.arg is None or keyword.arg in found:
            raise RuleError(f"the attributes of {op} must have names, each once")
        found[keyword.arg] = from_ast(keyword.value)
    return found


def _dtype_of(like: Expr) -> Expr:
    if not isinstance(like, Name):
        raise RuleError(f"like= takes the name of a tensor, not {like}")
    return Call("dtype", (like,))


def _count(given: Expr | None) -> int | None:
    if given is None:
        return None
    text = show(given)
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise RuleError(f"outputs= takes a number from 1 to 1024, not {text}")
    return int(text)


def parse_equation(text: str) -> tuple[list[PatternNode], list[PatternNode], list[tuple[Port, Ref]]]:
    """Source nodes, target nodes and the outputs that are replaced; raises `RuleError`."""
    sides = text.split("=>")
    if len(sides) != 2:
        raise RuleError(f"an equation has one '=>' between its sides: {text.strip()[:80]}")
    source, target = _Side(), _Side()
    before, after = (_outputs(side, words) for side, words in ((source, sides[0]), (target, sides[1])))
    if len(before) != len(after):
        raise RuleError(f"the left side has {len(before)} outputs, the right side {len(after)}")
    pairs: list[tuple[Port, Ref]] = []
    for old, new in zip(before, after, strict=True):
        if isinstance(old, str):
            raise RuleError(f"the left side of an equation cannot be the variable '{old}' alone")
        pairs.append((old, new))
    return source.nodes, target.nodes, pairs


def _outputs(side: _Side, text: str) -> list[Ref]:
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RuleError(f"'{text.strip()[:80]}' cannot be read: {getattr(error, 'msg', error)}") from error
    return [ref for term in _bars(tree) for ref in side.outputs(term)]


def _bars(tree: ast.expr) -> list[ast.expr]:
    """The terms between the bars, left to right."""
    terms: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        terms.append(tree.right)
        tree = tree.left
    return [tree, *reversed(terms)]


def parse_rule(text: str, origin: str = "") -> Rule:
    """The rule that one paragraph says; raises `RuleError`."""
    rules = parse_rules(text, origin)
    if len(rules) != 1:
        raise RuleError(f"one rule was expected, not {len(rules)}")
    return rules[0]


def parse_rules(text: str, origin: str = "") -> list[Rule]:
    """The rules of a text, in order; raises `RuleError` naming the line."""
    rules = []
    for number, lines in _paragraphs(text):
        try:
            rules.append(_rule(lines, origin))
        except RuleError as error:
            raise RuleError(f"{origin or 'rules'}, line {number}: {error}") from error
    return rules


def _paragraphs(text: str) -> Iterable[tuple[int, list[str]]]:
    """(number of the first line, lines) of each paragraph, without comments."""
    start, lines = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith("#"):
            continue
        if stripped:
            start = start if lines else number
            lines.append(stripped)
        elif lines:
            yield start, lines
            lines = []


def _rule(lines: list[str], origin: str) -> Rule:
    parts = _parts(lines)
    source, target, outputs = parse_equation(parts["equation"])
    conditions = conjuncts(parse(parts["where"])) if "where" in parts else ()
    return Rule(
        tuple(source), tuple(target), tuple(outputs), conditions, _exactness(parts.get("exact:", "reassociates")),
        origin=origin, id=parts.get("id", ""),
    )  # fmt: skip


def _parts(lines: list[str]) -> Mapping[str, str]:
    """The paragraph's parts by what introduces them; a line that introduces nothing continues the last part."""
    parts: dict[str, str] = {}
    current = "equation"
    for position, line in enumerate(lines):
        identifier = _IDENTIFIER.fullmatch(line)
        word, _, rest = line.partition(" ")
        if position == 0 and identifier:
            parts["id"] = identifier.group(1)
            continue
        if word in ("where", "exact:"):
            if word in parts:
                raise RuleError(f"'{word}' stands twice in one rule")
            current, line = word, rest
        parts[current] = f"{parts[current]} {line}" if current in parts else line
    if "equation" not in parts:
        raise RuleError("a rule without an equation")
    return parts


def _exactness(text: str) -> Exactness:
    try:
        return Exactness(text.strip())
    except ValueError as error:
        known = ", ".join(e.value for e in Exactness)
        raise RuleError(f"exactness is one of {known}, not '{text.strip()[:40]}'") from error


def show_rule(rule: Rule) -> str:
    """The paragraph that says `rule`."""
    lines = [f"[{rule.id}]"] if rule.id else []
    lines.append(rule.name)
    if rule.conditions:
        shown = [f"({c})" if show(c).startswith("not ") or " or " in show(c) or " if " in show(c) else show(c)
                 for c in rule.conditions]  # fmt: skip
        lines.append("  where " + " and ".join(shown))
    lines.append(f"  exact: {rule.exactness.value}")
    return "\n".join(lines) + "\n"


def show_rules(rules: Iterable[Rule]) -> str:
    """All rules, a paragraph each."""
    return "\n".join(show_rule(rule) for rule in rules)
