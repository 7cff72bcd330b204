"""Rules as data: a source pattern, a target, and the conditions under which the two mean the same.

How a pattern matches (the search engine's matcher and the trials both go by it):

1. Source nodes stand in topological order; a variable matches any value, the same variable the same value.
2. An attribute whose expression is a bare name binds that attribute variable where it first occurs and must equal it
   afterwards; an attribute with another expression must equal its value; one that is not mentioned must have the
   operator's default. Attributes are compared written out (`settled`), so that strides () and (1, 1) are the same.
3. All conditions must hold. A target's attributes are evaluated from what the match has bound.
4. A rule that is not `exact` speaks of real numbers: it applies to floating-point tensors only.
"""

from __future__ import annotations

import enum
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Union

from taso.graph.errors import RuleError
from taso.graph.operator import Attrs, AttrValue, Operator, Required, Types
from taso.graph.types import DType, SymDim
from taso.rules.constants import CONSTANTS
from taso.rules.expression import (
    Call,
    Environment,
    Expr,
    ExpressionError,
    Name,
    Tuple,
    Value,
    attribute_names,
    conjuncts,
    equal,
    reason_against,
    show,
    show_value,
    tensor_names,
    value_of,
)  # fmt: skip


class Port(NamedTuple):
    """Output number `output` of node number `node` of one side of a rule."""

    node: int
    output: int


Ref = Union[str, Port]
"""A variable's name, or an output of a node."""


class Exactness(enum.Enum):
    """How close the two sides of a rule are in floating point; `exact` is the strongest claim."""

    EXACT = "exact"
    REASSOCIATES = "reassociates"
    APPROXIMATES = "approximates"


class Status(enum.Enum):
    """What is known of a rule's truth."""

    PROVED = "proved"
    BOUNDED = "bounded"
    TESTED = "tested"
    UNPROVED = "unproved"
    REFUTED = "refuted"


@dataclass(frozen=True)
class Certificate:
    """How a status was reached.

    `error_bound` bounds the probability that an equation which is false on one of the shapes tried passed there;
    `counterexample` and `reason` are sentences; `dimensions` is how many a variable may have for the verdict to hold of
    it, 0 where that is not said. `digest` is that of the statement and of the definitions and gates that
    judged it (`taso.rules.build`): where it is the same again, so is the verdict.
    """

    method: str = ""
    command: str = ""
    seed: int | None = None
    trials: int = 0
    primes: tuple[int, ...] = ()
    error_bound: float | None = None
    counterexample: str = ""
    reason: str = ""
    digest: str = ""
    dimensions: int = 0


@dataclass(frozen=True)
class PatternNode:
    """An operator of a rule; `inputs` holds None where an optional input is left out."""

    op: Operator
    inputs: tuple[Ref | None, ...]
    attrs: tuple[tuple[str, Expr], ...] = ()
    n_outputs: int = 1

    def bind(self, types: Types, attrs: Attrs, bound: dict[str, Value]) -> str | None:
        """Compares a graph node's attributes with this source node's and binds its bare names in `bound`.

        Returns None, or the reason why they differ. Expressions that are no bare names are left to
        `Rule.check_attributes`.
        """
        actual = settled(self.op, types, attrs)
        mentioned = dict(self.attrs)
        for name, default in self.op.attributes.items():
            expr = mentioned.get(name)
            if isinstance(expr, Name):
                value = expression_value(actual[name])
                if not same_value(bound.setdefault(expr.name, value), value):
                    return f"{self.op.name}.{name} is {show_value(value)}, but {expr} is {show_value(bound[expr.name])}"
            elif expr is None and not isinstance(default, Required):
                wanted = _settled_value(name, default, self.op, types, attrs)
                if not same_value(expression_value(actual[name]), expression_value(wanted)):
                    return f"{self.op.name}.{name} is {show_value(expression_value(actual[name]))}, not its default"
        return None

    def attributes(self, types: Types, env: Environment) -> Attrs:
        """The attributes of a target node, written out.

        Raises `ExpressionError` where one has no value or would be symbolic, `GraphError` where the operator refuses.
        """
        given = {name: attribute_value(self.op, name, value_of(expr, env)) for name, expr in self.attrs}
        return settled(self.op, types, self.op.complete(given))


def expression_value(value: AttrValue) -> Value:
    """An operator's attribute as a value of the expression language."""
    if value is None or isinstance(value, (bool, int, float, str, DType)):
        return value
    if isinstance(value, tuple):
        return tuple(expression_value(v) for v in value)
    raise ExpressionError(f"a rule cannot speak of the attribute value {value!r}")


def attribute_value(op: Operator, name: str, value: Value) -> AttrValue:
    """A value of the expression language as an operator's attribute; raises `ExpressionError` for symbols."""
    plain = _plain(op, name, value)
    default = op.attributes.get(name)
    if isinstance(default, float) and isinstance(plain, int) and not isinstance(plain, bool):
        return float(plain)
    return plain


def _plain(op: Operator, name: str, value: Value) -> AttrValue:
    if isinstance(value, SymDim):
        raise ExpressionError(f"{op.name}.{name} would depend on the symbolic dimension {value}")
    if isinstance(value, tuple):
        return tuple(_plain(op, name, v) for v in value)
    return value


def same_value(a: Value, b: Value) -> bool:
    """Equality of attribute values; 1 and 1.0 are the same setting."""
    return equal(a, b) is True


# ── attributes written out ───────────────────────────────────────────────────────────────────────────────────────


def settled(op: Operator, types: Types, attrs: Attrs) -> Attrs:
    """`attrs` with every short form replaced by what it stands for: (), negative axes, a missing permutation."""
    return Attrs({name: _settled_value(name, value, op, types, attrs) for name, value in attrs.items()})


def _settled_value(name: str, value: AttrValue | Required, op: Operator, types: Types, attrs: Attrs) -> AttrValue:
    if isinstance(value, Required):
        raise RuleError(f"{op.name} needs the attribute '{name}'")
    rule = _SHORT_FORMS.get(name)
    first = types[0] if types else None
    if rule is None or first is None or first.shape is None:
        return value
    return rule(value, op, first.rank, attrs)


def _ones(value: AttrValue, op: Operator, rank: int, attrs: Attrs) -> AttrValue:
    return value if value != () else (1,) * max(rank - 2, 0)


def _pads(value: AttrValue, op: Operator, rank: int, attrs: Attrs) -> AttrValue:
    return value if value != () else (0,) * (2 * max(rank - 2, 0))


def _perm(value: AttrValue, op: Operator, rank: int, attrs: Attrs) -> AttrValue:
    return value if value != () else tuple(reversed(range(rank)))


def _axis(value: AttrValue, op: Operator, rank: int, attrs: Attrs) -> AttrValue:
    return value + rank if isinstance(value, int) and value < 0 else value


def _axes(value: AttrValue, op: Operator, rank: int, attrs: Attrs) -> AttrValue:
    if not isinstance(value, tuple):
        return value
    if "starts" in attrs:
        starts = attrs["starts"]
        value = value or tuple(range(len(starts) if isinstance(starts, tuple) else 0))
        return tuple(a + rank if isinstance(a, int) and a < 0 else a for a in value)
    if "keepdims" in attrs:
        value = value or tuple(range(rank))
        return tuple(sorted(a + rank if a < 0 else a for a in value if isinstance(a, int)))
    return value


def _steps(value: AttrValue, op: Operator, rank: int, attrs: Attrs) -> AttrValue:
    starts = attrs.get("starts")
    return value if value != () or not isinstance(starts, tuple) else (1,) * len(starts)


_SHORT_FORMS: dict[str, Callable[[AttrValue, Operator, int, Attrs], AttrValue]] = {
    "strides": _ones, "dilations": _ones, "pads": _pads, "perm": _perm, "axis": _axis, "axes": _axes, "steps": _steps,
}  # fmt: skip


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Rule:
    """source => target, where every condition holds.

    `outputs` pairs each output of the source that is replaced with what replaces it, in the order of the equation. The
    nodes of both sides are brought into one order (operands first, as the equation is read), equal ones merged and
    those that no output needs dropped, so that equal equations are equal rules. Raises `RuleError` where the parts do
    not fit together.
    """

    source: tuple[PatternNode, ...]
    target: tuple[PatternNode, ...]
    outputs: tuple[tuple[Port, Ref], ...]
    conditions: tuple[Expr, ...] = ()
    exactness: Exactness = Exactness.REASSOCIATES
    status: Status = Status.UNPROVED
    certificate: Certificate = Certificate()
    origin: str = ""
    id: str = ""
    name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.outputs:
            raise RuleError("a rule must replace at least one output of its source")
        source, old = _ordered(self.source, [s for s, _ in self.outputs], "source")
        target, new = _ordered(self.target, [t for _, t in self.outputs], "target")
        pairs = []
        for before, after in zip(old, new, strict=True):
            if isinstance(before, str):
                raise RuleError(f"the source of a rule cannot be the variable '{before}' alone")
            pairs.append((before, after))
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "outputs", tuple(pairs))
        object.__setattr__(self, "conditions", tuple(p for c in self.conditions for p in conjuncts(c)))
        _validate(self)
        object.__setattr__(self, "name", equation(self))

    @property
    def variables(self) -> tuple[str, ...]:
        """The tensor variables, in order of appearance in the source."""
        return tuple(dict.fromkeys(r for node in self.source for r in node.inputs if isinstance(r, str)))

    @property
    def attribute_variables(self) -> tuple[str, ...]:
        """The attribute variables, in the order in which the source binds them."""
        return tuple(dict.fromkeys(e.name for node in self.source for _, e in node.attrs if isinstance(e, Name)))

    @property
    def needs_content_match(self) -> bool:
        """Whether the source holds a constant tensor, which matches only a weight made by the same operator."""
        return any(node.op in CONSTANTS for node in self.source)

    @property
    def trivial(self) -> bool:
        """Whether both sides are the same graph, as where an activation was fused in TASO's format only."""
        same = self.source == self.target and all(s == t for s, t in self.outputs)
        return same and len({s for s, _ in self.outputs}) == len(self.outputs)

    def check_attributes(self, env: Environment, matched: Sequence[Attrs]) -> str | None:
        """Compares the source's computed attributes with those of the matched nodes (`settled`, in source order).

        Returns None, or the reason why the rule does not apply.
        """
        for node, attrs in zip(self.source, matched, strict=True):
            for name, expr in node.attrs:
                if isinstance(expr, Name):
                    continue
                try:
                    wanted = value_of(expr, env)
                except ExpressionError as error:
                    return f"{node.op.name}.{name} cannot be compared with {expr}: {error}"
                actual = expression_value(attrs[name])
                if not same_value(wanted, actual):
                    return f"{node.op.name}.{name} is {show_value(actual)}, not {show_value(wanted)}"
        return None

    def check_conditions(self, env: Environment) -> str | None:
        """None where all conditions hold, else a sentence about the first that does not, with the values it met."""
        for condition in self.conditions:
            reason = reason_against(condition, env)
            if reason is not None:
                return reason
        return None

    def with_conditions(self, *conditions: Expr) -> Rule:
        """The same equation under further conditions, its status open again."""
        return replace(
            self, conditions=(*self.conditions, *conditions), status=Status.UNPROVED, certificate=Certificate()
        )

    def judged(self, status: Status, certificate: Certificate) -> Rule:
        """This rule with another status."""
        return replace(self, status=status, certificate=certificate)

    def __str__(self) -> str:
        return self.name


def _ordered(
    nodes: Sequence[PatternNode], roots: Sequence[Ref], side: str
) -> tuple[tuple[PatternNode, ...], list[Ref]]:
    """The nodes that `roots` need, operands first, equal ones merged; and the roots renumbered."""
    if len(nodes) > _MOST_NODES:
        raise RuleError(f"the {side} of a rule has {len(nodes)} operators, more than {_MOST_NODES}")
    order: dict[PatternNode, int] = {}
    places: dict[int, int] = {}
    open_nodes: set[int] = set()

    def visit(ref: Ref | None) -> Ref | None:
        if ref is None or isinstance(ref, str):
            return ref
        if not 0 <= ref.node < len(nodes):
            raise RuleError(f"the {side} of a rule reads node {ref.node}, but has {len(nodes)} nodes")
        node = nodes[ref.node]
        if not 0 <= ref.output < node.n_outputs:
            count = node.n_outputs
            raise RuleError(f"the {side} of a rule reads output {ref.output} of {node.op.name}, which has {count}")
        if ref.node not in places:
            if ref.node in open_nodes:
                raise RuleError(f"the {side} of a rule has a cycle through {node.op.name}")
            open_nodes.add(ref.node)
            inputs = tuple(visit(r) for r in node.inputs)
            moved = replace(node, inputs=inputs, attrs=tuple(sorted(node.attrs, key=lambda a: a[0])))
            places[ref.node] = order.setdefault(moved, len(order))
        return Port(places[ref.node], ref.output)

    moved_roots: list[Ref] = []
    for root in roots:
        moved = visit(root)
        if moved is None:
            raise RuleError(f"an output of the {side} of a rule is missing")
        moved_roots.append(moved)
    return tuple(order), moved_roots


_MOST_NODES = 256
_MOST_OUTPUTS = 1024


def _validate(rule: Rule) -> None:
    for node in (*rule.source, *rule.target):
        _validate_node(node)
    if len({s for s, _ in rule.outputs}) != len(rule.outputs):
        raise RuleError("a rule replaces one output of its source twice")
    variables, bound = frozenset(rule.variables), frozenset(rule.attribute_variables)
    for name in rule.variables:
        if not name.isidentifier() or keyword.iskeyword(name) or name == "_" or name in DType.__members__:
            raise RuleError(f"'{name[:40]}' cannot be the name of a tensor")
    both = variables & bound
    if both:
        raise RuleError(f"'{min(both)}' is both a tensor and an attribute variable")
    used = {r for node in rule.target for r in node.inputs if isinstance(r, str)}
    used |= {t for _, t in rule.outputs if isinstance(t, str)}
    expressions = [*rule.conditions, *(e for node in (*rule.source, *rule.target) for _, e in node.attrs)]
    for expr in expressions:
        used |= tensor_names(expr)
        _known(attribute_names(expr) - bound, "attribute variable", show(expr))
    _known(used - variables, "tensor", "the target or the conditions")


def _known(unknown: Iterable[str], what: str, where: str) -> None:
    for name in sorted(unknown):
        raise RuleError(f"'{name}' in {where} is no {what} of the source")


def _validate_node(node: PatternNode) -> None:
    op = node.op
    if not 1 <= node.n_outputs <= _MOST_OUTPUTS:
        raise RuleError(f"{op.name} cannot have {node.n_outputs} outputs")
    low, high = op.arity
    if not low <= len(node.inputs) <= high:
        raise RuleError(f"{op.name} takes {low if low == high else f'{low} to {high}'} inputs, not {len(node.inputs)}")
    names = [n for n, _ in node.attrs]
    if len(set(names)) != len(names):
        raise RuleError(f"{op.name} is given an attribute twice")
    for name in names:
        if name not in op.attributes:
            raise RuleError(f"{op.name} has no attribute '{name}'; it has {', '.join(op.attributes) or 'none'}")
    for name, default in op.attributes.items():
        if isinstance(default, Required) and name not in names:
            raise RuleError(f"{op.name}.{name} has no default: a rule must mention it")


# ── the equation ─────────────────────────────────────────────────────────────────────────────────────────────────

_LONGEST_EQUATION = 20000


def equation(rule: Rule) -> str:
    """The equation of a rule: both sides as nested calls, outputs separated by `|`."""
    left = _side(rule.source, [s for s, _ in rule.outputs])
    right = _side(rule.target, [t for _, t in rule.outputs])
    return f"{left} => {right}"


def _side(nodes: Sequence[PatternNode], outputs: Sequence[Ref]) -> str:
    terms: list[str] = []
    for node in nodes:
        terms.append(_term(node, terms, nodes))
        if len(terms[-1]) > _LONGEST_EQUATION:
            raise RuleError(f"the equation of a rule is longer than {_LONGEST_EQUATION} characters")
    shown, position = [], 0
    while position < len(outputs):
        ref = outputs[position]
        width = 1
        if isinstance(ref, Port) and nodes[ref.node].n_outputs > 1:
            every_output = [Port(ref.node, i) for i in range(nodes[ref.node].n_outputs)]
            if list(outputs[position : position + len(every_output)]) == every_output:
                width = len(every_output)
        shown.append(terms[ref.node] if width > 1 and isinstance(ref, Port) else _ref(ref, terms, nodes))
        position += width
    return " | ".join(shown)


def _ref(ref: Ref | None, terms: Sequence[str], nodes: Sequence[PatternNode]) -> str:
    if ref is None:
        return "_"
    if isinstance(ref, str):
        return ref
    return terms[ref.node] if nodes[ref.node].n_outputs == 1 else f"{terms[ref.node]}[{ref.output}]"


def _term(node: PatternNode, terms: Sequence[str], nodes: Sequence[PatternNode]) -> str:
    args = [_ref(r, terms, nodes) for r in node.inputs]
    for name, expr in node.attrs:
        if node.op in CONSTANTS and name == "dtype" and isinstance(expr, Call) and expr.function == "dtype":
            args.append(f"like={show(expr.args[0])}")
        else:
            args.append(f"{name}={show(expr)}")
    if node.n_outputs != natural_outputs(node.op, dict(node.attrs)):
        args.append(f"outputs={node.n_outputs}")
    return f"{node.op.name}({', '.join(args)})"


def natural_outputs(op: Operator, attrs: Mapping[str, Expr]) -> int:
    """How many outputs an operator has as far as its attributes tell: as many as `split` lists sizes, else one."""
    sizes = attrs.get("split")
    return max(len(sizes.items), 1) if isinstance(sizes, Tuple) and "split" in op.attributes else 1
