"""A rule with everything unknown that can be: types of its variables, settings of its operators, and both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from taso.graph.errors import TasoError
from taso.graph.index import Meaning
from taso.graph.operator import Attrs, Operator
from taso.graph.types import DType, Shape, TensorType
from taso.graph.unknown import UnknownReal
from taso.rules.expression import (
    Array,
    Binary,
    Call,
    Compare,
    Expr,
    ExpressionError,
    Index,
    Literal,
    Name,
    Span,
    Value,
    attribute_names,
    children,
    evaluate,
    exact_number,
    value_of,
)  # fmt: skip
from taso.rules.pattern import Exactness, PatternNode, Port, Ref, Rule
from taso.rules.verifier import terms as algebra
from taso.rules.verifier.cases import Case, Inadmissible, NotUnderstood
from taso.rules.verifier.elements import Placed
from taso.rules.verifier.facts import is_zero
from taso.rules.verifier.polynomials import ONE, Poly
from taso.rules.verifier.terms import Sum

_FLAGS = frozenset({
    "keepdims", "ceil_mode", "count_include_pad", "transA", "transB", "flattened", "allowzero",
})  # fmt: skip
_REALS = frozenset({"alpha", "beta", "gamma", "epsilon", "ratio", "bias", "lambd", "value"})
_WINDOWS = {"strides": 1, "dilations": 1, "kernel_shape": 1, "output_padding": 1, "pads": 2}
_COUNTS = frozenset({"group", "groups"})

_ALIKE = (DType.FLOAT, DType.DOUBLE, DType.INT64)
"""Element types that stand for all others where a rule names none: none is like the one before it."""

ELEMENT_TYPES = (*_ALIKE, *(t for t in DType if t not in _ALIKE and (t.is_float or t.is_integer or t is DType.BOOL)))
"""Those that a rule which names some is tried on, as each of the others may be treated in its own way."""

_OF_NUMBERS = frozenset({"min", "max", "sum", "abs"})

_OF_ELEMENT_TYPES = frozenset({"dtype", "same_dtype", "is_float", "is_integer"})


class LazyType(TensorType):
    """The type of a variable, whose number of dimensions is chosen when first asked for."""

    def __init__(self, tensors: Tensors, name: str, dtype: DType) -> None:
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "other", None)
        object.__setattr__(self, "_tensors", tensors)
        object.__setattr__(self, "_name", name)

    _tensors: Tensors
    _name: str

    @property
    def shape(self) -> Shape:
        return self._tensors.shape(self._name)


@dataclass
class Tensors:
    """The variables of a rule on one way: ranks chosen so far, sizes, and what all elements of one are."""

    case: Case
    most: int
    given: Mapping[str, int]
    """Ranks that are not to be chosen."""
    alike: Mapping[str, str]
    """Of each tensor that must have the shape of another one, that one."""

    def __post_init__(self) -> None:
        self._shapes: dict[str, Shape] = {}

    def shape(self, name: str) -> Shape:
        if name not in self._shapes:
            self._shapes[name] = self.shape(self.alike[name]) if name in self.alike else self._chosen(name)
        return self._shapes[name]

    def _chosen(self, name: str) -> Shape:
        rank = self.given[name] if name in self.given else self.case.choose(self.most + 1)
        return tuple(self.case.size(f"{name}.{axis}", 1) for axis in range(rank))

    @property
    def ranks(self) -> dict[str, int]:
        return {name: len(shape) for name, shape in self._shapes.items()}


class SymbolicRule:
    """A rule on one way: its environment, typed nodes, and conditions, assumed as soon as what they speak of is there.

    Raises `Inadmissible` where source or conditions exclude the way.
    """

    def __init__(
        self, rule: Rule, case: Case, most: int, ranks: Mapping[str, int] | None = None,
        dtypes: Mapping[str, DType] | None = None,
    ) -> None:  # fmt: skip
        self._rule = rule
        self._case = case
        self.tensors = Tensors(case, most, {**_asked_ranks(rule, most), **(ranks or {})}, _alike(rule))
        self._types = {n: LazyType(self.tensors, n, (dtypes or {}).get(n, DType.FLOAT)) for n in rule.variables}
        self._attrs: dict[str, Value] = {}
        self._open = list(rule.conditions)
        self.fills: dict[str, Sum] = {}

    @property
    def integers(self) -> bool:
        """Whether the rule applies to integers too."""
        return self._rule.exactness is Exactness.EXACT

    # environment of expressions

    def type_of(self, tensor: str) -> TensorType:
        if tensor not in self._types:
            raise ExpressionError(f"'{tensor}' is not a tensor of this rule")
        return self._types[tensor]

    def attribute(self, name: str) -> Value:
        if name not in self._attrs:
            raise ExpressionError(f"'{name}' is not an attribute variable of this rule")
        return self._attrs[name]

    def is_weight(self, tensor: str) -> bool:
        raise NotUnderstood("whether a tensor is a weight, within an expression")

    def content(self, tensor: str) -> Array | None:
        raise NotUnderstood("the content of a weight, within an expression")

    def number(self, tensor: str) -> Value:
        """An unknown number that all elements of the tensor are: the rule applies to no other tensors."""
        unknown = UnknownReal(f"value({tensor})")
        self.fills.setdefault(tensor, algebra.of(algebra.Setting(unknown.name)))
        return unknown

    # sides

    def side(self, nodes: Sequence[PatternNode]) -> tuple[list[Placed], list[tuple[TensorType, ...]]]:
        """The nodes ready to be read, and the types of their outputs."""
        placed: list[Placed] = []
        done: list[tuple[TensorType, ...]] = []
        self._assume_conditions()
        for node in nodes:
            inputs = tuple(self.type_at(ref, done) for ref in node.inputs)
            attrs = self._settings(node, inputs)
            types = _types(node.op, inputs, attrs)
            if len(types) != node.n_outputs:
                raise TasoError(f"{node.op.name} has {len(types)} outputs here, the rule says {node.n_outputs}")
            shapes = tuple(() if t is None else tuple(map(self._case.poly, t.dims)) for t in inputs)
            placed.append(Placed(node.inputs, shapes, _meanings(node.op, inputs, attrs)))
            done.append(types)
        return placed, done

    def type_at(self, ref: Ref | None, done: Sequence[tuple[TensorType, ...]]) -> TensorType | None:
        if ref is None:
            return None
        if isinstance(ref, str):
            return self.type_of(ref)
        if not isinstance(ref, Port) or ref.output >= len(done[ref.node]):
            raise TasoError("an output is read that is not there")
        return done[ref.node][ref.output]

    def _settings(self, node: PatternNode, inputs: Sequence[TensorType | None]) -> Attrs:
        for name, expr in node.attrs:
            if isinstance(expr, Name) and expr.name not in self._attrs:
                self._attrs[expr.name] = self._unknown(node, name, inputs, expr.name)
                self._assume_conditions()
        return node.attributes(inputs, self)

    # ── conditions ───────────────────────────────────────────────────────────────────────────────────────────────

    def _assume_conditions(self) -> None:
        """Assumes each condition whose attribute variables are known."""
        ready = [c for c in self._open if attribute_names(c) <= self._attrs.keys()]
        self._open = [c for c in self._open if c not in ready]
        for condition in ready:
            if not self._holds(condition):
                raise Inadmissible(str(condition))

    def _holds(self, condition: Expr) -> bool:
        """Whether a condition holds on this way. One that is left out admits more than the rule does."""
        if _speaks_of_weights(condition):
            return self._content(condition)
        if isinstance(condition, Call) and condition.function == "static":
            return True
        if isinstance(condition, Call) and condition.function == "broadcasts_to":
            return self._broadcasts(*(value_of(a, self) for a in condition.args))
        if isinstance(condition, Compare) and len(condition.ops) == 1 and condition.ops[0] in _ORDERS:
            return self._ordered(condition)
        result = evaluate(condition, self)
        if not isinstance(result, bool):
            raise NotUnderstood(f"the condition {condition}")
        return result

    def _content(self, condition: Expr) -> bool:
        """filled(c, v) as all of a condition says what c's elements are; all else about weights is left out."""
        if isinstance(condition, Call) and condition.function == "filled":
            tensor, value = condition.args
            number = exact_number(value)
            if isinstance(tensor, Name) and number is not None:
                self.fills[tensor.name] = algebra.number(Poly.number(number))
        return True

    def _broadcasts(self, small: Value, big: Value) -> bool:
        if not (isinstance(small, tuple) and isinstance(big, tuple)):
            raise NotUnderstood("broadcasts_to() of what are no shapes")
        if len(small) > len(big):
            return False
        for a, b in zip(reversed(small), reversed(big), strict=False):
            p, q = self._case.poly(a), self._case.poly(b)
            self._case.known.assume_one_of(((is_zero(p - ONE),), (is_zero(p - q),)))
        return True

    def _ordered(self, condition: Compare) -> bool:
        """An order, that of the largest or smallest of several taken one by one."""
        left, right = condition.first, condition.rest[0]
        op = condition.ops[0]
        if op in (">", ">="):
            left, right, op = right, left, op.replace(">", "<")
        lower, upper = self._all_of(left, "max"), self._all_of(right, "min")
        for a in lower:
            for b in upper:
                if not (isinstance(a, (int, float)) and isinstance(b, (int, float))):
                    raise ExpressionError(f"{condition} compares what has no order")
                if isinstance(a, UnknownReal) or isinstance(b, UnknownReal):
                    raise NotUnderstood(f"the condition {condition}")
                if not (a < b if op == "<" else a <= b):
                    return False
        return True

    def _all_of(self, expr: Expr, extreme: str) -> tuple[Value, ...]:
        """What must all be small for the largest to be, and the other way round."""
        if isinstance(expr, Call) and expr.function == extreme:
            values = tuple(value_of(a, self) for a in expr.args)
            found = values[0] if len(values) == 1 else values
            if isinstance(found, tuple) and found:
                return found
            raise ExpressionError(f"{expr} of nothing")
        return (value_of(expr, self),)

    # ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _unknown(self, node: PatternNode, name: str, inputs: Sequence[TensorType | None], variable: str) -> Value:
        """A setting of which only the kind is known; where it can be one of few, one of them on each way."""
        op, first = node.op, inputs[0] if inputs else None
        if name in _REALS:
            return self._real(variable)
        if name in _FLAGS:
            return self._case.choose(2)
        if name in _COUNTS or (name == "count" and op.name == "MergeGroupConv"):
            return self._case.size(variable, None)
        if name in ("to", "dtype"):
            every = ELEMENT_TYPES if names_element_types(self._rule) else _ALIKE
            return every[self._case.choose(len(every))]
        if name == "approximate":
            return ("none", "tanh")[self._case.choose(2)]
        if name in ("min", "max") and op.name == "Clip":
            return None if self._case.choose(2) == 0 else self._real(variable)
        if name == "split":
            return self._sizes(variable, node.n_outputs)
        if name == "shape":
            # a Reshape is that of the shape it gives: where nothing else reads the setting, 0 and −1 need no way of
            # their own (tests/rules/test_verifier.py proves this of Reshape)
            written_out = op.name == "Reshape" and self._uses(variable) == 1
            return self._sizes(variable, self._case.choose(self.tensors.most + 1), 1 if written_out else None)
        if first is not None:
            return self._by_rank(node, name, first, variable)
        raise NotUnderstood(f"it is not known which values {op.name}.{name} can take")

    def _real(self, variable: str) -> float:
        """One of the numbers that the rule compares the setting with, or any other."""
        named = tuple(dict.fromkeys(n for e in _expressions(self._rule) for n in _compared_with(e, variable)))
        chosen = self._case.choose(len(named) + 1)
        return named[chosen] if chosen < len(named) else UnknownReal(variable, named)

    def _by_rank(self, node: PatternNode, name: str, first: TensorType, variable: str) -> Value:
        op, rank = node.op, first.rank
        if name in _WINDOWS and op.name != "Pad":
            return self._sizes(variable, _WINDOWS[name] * max(rank - 2, 0))
        if name == "pads":
            return self._sizes(variable, 2 * rank)
        if name == "repeats":
            return self._sizes(variable, rank)
        if name == "axis":
            return self._case.choose(rank + 1 if op.name == "Flatten" else rank)
        if name == "perm":
            return self._permutation(rank)
        if name == "axes" and op.name == "Unsqueeze":
            return self._new_axes(rank)
        if name == "axes":
            return self._ordered_axes(rank) if op.name == "Slice" else self._axes(rank)
        if name in ("starts", "ends", "steps") and op.name == "Slice":
            return self._sizes(variable, self._sliced(node, name, rank))
        raise NotUnderstood(f"it is not known which values {op.name}.{name} can take")

    def _uses(self, variable: str) -> int:
        """How often an attribute variable stands in the rule."""
        return sum(_count(e, variable) for e in _expressions(self._rule))

    def _sizes(self, variable: str, count: int, least: int | None = None) -> Value:
        return tuple(self._case.size(f"{variable}[{i}]", least) for i in range(count))

    def _permutation(self, rank: int) -> Value:
        every = list(permutations(range(rank)))
        return every[self._case.choose(len(every))]

    def _new_axes(self, rank: int) -> Value:
        counts = range(self.tensors.most - rank + 1)
        every = [axes for count in counts for axes in combinations(range(rank + count), count)]
        return every[self._case.choose(len(every))]

    def _ordered_axes(self, rank: int) -> Value:
        """The axes of a Slice, which may come in any order."""
        every = list(permutations(range(rank), self._case.choose(rank + 1)))
        return every[self._case.choose(len(every))]

    def _sliced(self, node: PatternNode, setting: str, rank: int) -> int:
        """How many axes a Slice cuts: as many as its settings before this one say, else any number."""
        for name, expr in node.attrs:
            if name < setting:
                known = value_of(expr, self)
                # () that a rule writes is short for the first axes; what a name is bound to is written out
                if isinstance(known, tuple) and (known or isinstance(expr, Name)):
                    return len(known)
        return self._case.choose(rank + 1)

    def _axes(self, rank: int) -> Value:
        chosen = self._case.choose(1 << rank)
        return tuple(a for a in range(rank) if chosen >> a & 1)


def _types(op: Operator, inputs: Sequence[TensorType | None], attrs: Attrs) -> tuple[TensorType, ...]:
    try:
        return op.types_of(inputs, attrs)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        # not how a type rule refuses its inputs, so that it says nothing about them
        raise NotUnderstood(f"the type rule of {op.name} fails: {error}") from error


def _meanings(op: Operator, inputs: Sequence[TensorType | None], attrs: Attrs) -> tuple[Meaning, ...]:
    if op.meaning is None:
        raise NotUnderstood(f"no meaning is written down for {op.name}")
    try:
        return op.meaning(inputs, attrs)
    except TasoError as error:
        # it has types and no meaning: that the rule does not apply there is not said anywhere
        raise NotUnderstood(str(error)) from error


def _alike(rule: Rule) -> dict[str, str]:
    """Tensors that must have the shape of one that comes earlier: no way needs to be taken where they have another."""
    first: dict[str, str] = {}
    for c in rule.conditions:
        if isinstance(c, Call) and c.function == "same_shape":
            names = [first.get(a.name, a.name) for a in c.args if isinstance(a, Name)]
            earliest = min(names, key=rule.variables.index)
            group = {n for n in rule.variables if first.get(n, n) in names}
            first.update(dict.fromkeys(group - {earliest}, earliest))
    return first


def _asked_ranks(rule: Rule, most: int) -> dict[str, int]:
    """Ranks that conditions such as rank(x) == 4 ask for."""
    found: dict[str, int] = {}
    for c in rule.conditions:
        if isinstance(c, Compare) and c.ops == ("==",) and isinstance(c.rest[0], Literal):
            call, rank = c.first, c.rest[0].value
            if isinstance(call, Call) and call.function == "rank" and isinstance(rank, int) and 0 <= rank <= most:
                found.update((a.name, rank) for a in call.args if isinstance(a, Name))
    return found


def ranks_told_apart(rule: Rule) -> int:
    """Up to which rank a rule treats ranks one by one: a proof that goes no further says nothing of those behind."""
    asked = [n for c in rule.conditions for n in (_largest_rank(c),) if n is not None]
    open_ones = [c for c in rule.conditions if _largest_rank(c) is None]
    held = (n + 1 for e in (*open_ones, *(e for _, e in _settings_of(rule))) for n in _held_against_ranks(e))
    return max((*asked, *held), default=0)


def _largest_rank(c: Expr) -> int | None:
    """n where a condition admits no rank above n: rank(x) == n, rank(x) <= n."""
    if not isinstance(c, Compare) or len(c.ops) != 1 or not isinstance(c.rest[0], Literal):
        return None
    call, op, most = c.first, c.ops[0], c.rest[0].value
    if not isinstance(call, Call) or call.function != "rank" or not isinstance(most, int):
        return None
    return {"==": most, "<=": most, "<": most - 1}.get(op)


def _held_against_ranks(expr: Expr) -> Iterator[int]:
    """The numbers that numbers of axes are compared or computed with."""
    if isinstance(expr, (Compare, Binary)) and _counts_axes(expr):
        yield from _whole_numbers(expr)
    if isinstance(expr, Span) and isinstance(expr.base, Call) and expr.base.function == "shape":
        for bound in (expr.start, expr.stop):
            yield from () if bound is None else _whole_numbers(bound)
    for part in children(expr):
        yield from _held_against_ranks(part)


def _counts_axes(expr: Expr) -> bool:
    """Whether the value of an expression is a number of axes, or made of one."""
    if isinstance(expr, Call):
        return expr.function in ("rank", "len") or expr.function in _OF_NUMBERS and any(map(_counts_axes, expr.args))
    return not isinstance(expr, (Index, Span)) and any(map(_counts_axes, children(expr)))


def _whole_numbers(expr: Expr) -> Iterator[int]:
    if isinstance(expr, Literal) and isinstance(expr.value, int):
        yield abs(expr.value)
    elif not isinstance(expr, Call) or expr.function in _OF_NUMBERS:
        for part in children(expr):
            yield from _whole_numbers(part)


# ── element types ────────────────────────────────────────────────────────────────────────────────────────────────


def names_element_types(rule: Rule) -> bool:
    """Whether a rule treats some element types unlike others that are also floating-point numbers, or integers."""
    return any(map(_names_a_type, _expressions(rule)))


def types_depend_on_more(rule: Rule) -> bool:
    """Whether ranks, sizes or settings have a say in which element types a rule admits or gives."""
    given = [e for name, e in _settings_of(rule) if name in ("to", "dtype")]
    return not all(_of_types_alone(e) for e in (*given, *filter(_speaks_of_types, rule.conditions)))


def _expressions(rule: Rule) -> list[Expr]:
    return [*rule.conditions, *(e for _, e in _settings_of(rule))]


def _compared_with(expr: Expr, variable: str) -> Iterator[float]:
    """The numbers that an expression asks of a variable whether it is one of them."""
    if isinstance(expr, Compare):
        sides = (expr.first, *expr.rest)
        if any(isinstance(e, Name) and e.name == variable for e in sides):
            numbers = (exact_number(e) for e in sides)
            yield from (float(n) for n in numbers if n is not None)
    for part in children(expr):
        yield from _compared_with(part, variable)


def _settings_of(rule: Rule) -> list[tuple[str, Expr]]:
    return [setting for node in (*rule.source, *rule.target) for setting in node.attrs]


def _names_a_type(expr: Expr) -> bool:
    return (isinstance(expr, Literal) and isinstance(expr.value, DType)) or any(map(_names_a_type, children(expr)))


def _speaks_of_types(expr: Expr) -> bool:
    own = isinstance(expr, Call) and expr.function in _OF_ELEMENT_TYPES
    return own or _names_a_type(expr) or any(map(_speaks_of_types, children(expr)))


def _of_types_alone(expr: Expr) -> bool:
    if isinstance(expr, Call):
        return expr.function in _OF_ELEMENT_TYPES
    return not isinstance(expr, Name) and all(map(_of_types_alone, children(expr)))


# ── conditions ───────────────────────────────────────────────────────────────────────────────────────────────────

_ORDERS = frozenset({"<", "<=", ">", ">="})


def _count(expr: Expr, name: str) -> int:
    return int(isinstance(expr, Name) and expr.name == name) + sum(_count(e, name) for e in children(expr))


def _speaks_of_weights(expr: Expr) -> bool:
    if isinstance(expr, Call) and expr.function in ("is_weight", "filled", "value"):
        return True
    return any(map(_speaks_of_weights, children(expr)))

