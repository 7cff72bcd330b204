"""Admissible instances of a rule: shapes, element types and settings on which its source and its conditions hold.

Every variable first gets symbols for its dimensions. The source's own type rules say which of them must be equal, the
conditions say more; both are solved for one symbol at a time. What stays free is drawn at random, and the outcome is
checked in numbers, because not everything that a type rule or condition asks is an equation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from taso.graph.errors import DimensionMismatch, TasoError
from taso.graph.operator import Attrs, AttrValue, Operator
from taso.graph.types import Dim, DType, SymDim, TensorType, substitute, symbols_of
from taso.rules.expression import (
    Array,
    Binary,
    Bindings,
    Call,
    Compare,
    DependsOnSymbols,
    Expr,
    ExpressionError,
    Literal,
    Logic,
    Name,
    Unary,
    Value,
    attribute_names,
    children,
    evaluate,
    exact_number,
    leaves,
    show_value,
    tensor_names,
    value_of,
)  # fmt: skip
from taso.rules.pattern import PatternNode, Port, Ref, Rule, attribute_value, settled
from taso.rules.settings import NeedsNumbers, NoDomain, Site, draw_setting
from taso.rules.solving import is_dim, larger_in, solve

Types = tuple[TensorType, ...]

_RANKS = (4, 2, 3, 1, 0, 5)
MOST_DIMENSIONS = max(_RANKS)
"""Ranks up to which rules are tried."""

_RANK_CHOICES = 48  # combinations of ranks that are kept
_STEPS = 120  # equations solved before a drawing is given up
_REDRAWS = 40  # of a setting that conditions speak of
_NUMBERINGS = 12  # drawings of numbers for one set of symbols
_LARGEST = 4000  # elements of a tensor
_NUMBERS = ("0.5", "0.25", "2", "0.001", "3.5")  # what a tensor of one number may hold


def contents_of(fills: Mapping[str, Fraction]) -> dict[str, Array]:
    """What tensors hold of which all elements are one number: a scalar stands for each."""
    return {name: np.asarray(float(value)) for name, value in fills.items()}


@dataclass(frozen=True)
class Instance:
    """What a rule is tried on: types of its variables and values of its attribute variables.

    `fills` gives the number that all elements of a tensor must be, where a condition or attribute asks for one.
    """

    types: Mapping[str, TensorType]
    attrs: Mapping[str, Value]
    weights: frozenset[str]
    fills: Mapping[str, Fraction]

    @property
    def environment(self) -> Bindings:
        return Bindings(self.types, self.attrs, self.weights, contents_of(self.fills))

    def __str__(self) -> str:
        shown = [f"{name}: {t}" for name, t in self.types.items()]
        shown += [f"{name} = {show_value(v)}" for name, v in self.attrs.items()]
        return ", ".join(shown + [f"all of {name} is {float(v)}" for name, v in self.fills.items()])


class Inadmissible(Exception):
    """This drawing leads nowhere; another may. Carries the reason."""


class Impossible(Inadmissible):
    """No sizes help: an operator does not take tensors of these ranks."""


class _Again(Exception):
    """Symbols became known: start over with them."""


def types_of_nodes(
    nodes: Sequence[PatternNode], variables: Mapping[str, TensorType], env: Bindings
) -> list[tuple[tuple[TensorType | None, ...], Attrs, Types]]:
    """(input types, attributes, output types) of each node, all in numbers.

    Raises `TasoError` where an operator does not take its inputs.
    """
    done: list[tuple[tuple[TensorType | None, ...], Attrs, Types]] = []
    for node in nodes:
        inputs = tuple(_type_at(ref, variables, [d[2] for d in done]) for ref in node.inputs)
        attrs = node.attributes(inputs, env)
        done.append((inputs, attrs, node.op.types_of(inputs, attrs)))
    return done


def _type_at(ref: Ref | None, variables: Mapping[str, TensorType], done: Sequence[Types]) -> TensorType | None:
    if ref is None:
        return None
    if isinstance(ref, str):
        return variables[ref]
    if ref.output >= len(done[ref.node]):
        raise ExpressionError(f"output {ref.output} is read of an operator that has {len(done[ref.node])}")
    return done[ref.node][ref.output]


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rank_choices(rule: Rule, rng: random.Random) -> list[dict[str, int]]:
    """Combinations of ranks that the source's type rules and the conditions admit, those known to be admissible first.

    A combination of which no drawing so far was admissible, although nothing rules it out, is kept for last.
    """
    found = _RankSearch(rule, rng).found
    if len(found) > 4 * _RANK_CHOICES:
        found = rng.sample(found, 4 * _RANK_CHOICES)
    sure = [ranks for ranks in found if any(_attempted(rule, ranks, rng) for _ in range(3))]
    rest = [ranks for ranks in found if ranks not in sure]
    return (sure + rest[: max(1, len(sure) // 3)] if sure else rest)[:_RANK_CHOICES]


def _attempted(rule: Rule, ranks: Mapping[str, int], rng: random.Random) -> bool:
    try:
        return next(_Attempt(rule, ranks, rng).instances(), None) is not None
    except Inadmissible:
        return False


class _RankSearch:
    """Assigns ranks to one group of variables after the other, leaving off where an operator cannot take them."""

    def __init__(self, rule: Rule, rng: random.Random) -> None:
        self.found: list[dict[str, int]] = []
        self._rule = rule
        self._rng = rng
        self._takes: dict[tuple[int, tuple[int | None, ...]], bool] = {}
        self._extend(_tied(rule), {})

    def _extend(self, groups: Sequence[tuple[str, ...]], ranks: dict[str, int]) -> None:
        if len(self.found) >= 8 * _RANK_CHOICES:
            return
        if not groups:
            self.found.append(ranks)
            return
        for rank in _asked_ranks(self._rule, groups[0]) or _RANKS:
            more = {**ranks, **dict.fromkeys(groups[0], rank)}
            if self._possible(more):
                self._extend(groups[1:], more)

    def _possible(self, ranks: Mapping[str, int]) -> bool:
        """Whether nothing rules these ranks out, as far as nodes and conditions speak of them alone."""
        attempt = _Attempt(self._rule, ranks, self._rng)
        consistent = True
        try:
            attempt.solve()
        except Impossible:
            return False
        except Inadmissible:
            consistent = False
        known = {Port(i, k): t.rank for i, types in enumerate(attempt.outputs) for k, t in enumerate(types)}
        for place, node in enumerate(self._rule.source):
            if not self._taken(place, [_rank_at(r, ranks, known) for r in node.inputs]):
                return False
        if attempt.drawn:
            # another drawing may do
            return True
        open_ones = [c for c in attempt.conditions if not attribute_names(c)]
        return consistent and not any(_impossible(c, attempt.environment) for c in open_ones)

    def _taken(self, place: int, ranks: Sequence[int | None]) -> bool:
        """Whether a node takes inputs of these ranks, for some ranks of those that are still open (None)."""
        key = (place, tuple(ranks))
        if key not in self._takes:
            if None in ranks:
                open_at = ranks.index(None)
                self._takes[key] = any(
                    self._taken(place, [*ranks[:open_at], rank, *ranks[open_at + 1 :]]) for rank in _RANKS
                )
            else:
                self._takes[key] = self._probe(self._rule.source[place], [r or 0 for r in ranks])
        return self._takes[key]

    def _probe(self, node: PatternNode, ranks: Sequence[int]) -> bool:
        pairs = zip(node.inputs, ranks, strict=True)
        types = [None if ref is None else TensorType(DType.FLOAT, (2,) * rank) for ref, rank in pairs]
        attrs: dict[str, AttrValue] = {}
        try:
            for name, expr in node.attrs:
                site = Site(self._rng, node.op, types, node.n_outputs, attrs)
                attrs[name] = attribute_value(node.op, name, _fixed(expr) or draw_setting(site, name))
        except (NoDomain, NeedsNumbers):
            return True
        return not _never(node.op, types, settled(node.op, types, node.op.complete(attrs)))


def _fixed(expr: Expr) -> Value:
    """The value of an expression that speaks of nothing, else None."""
    try:
        return value_of(expr, Bindings({}))
    except ExpressionError:
        return None


def _rank_at(ref: Ref | None, ranks: Mapping[str, int], known: Mapping[Port, int]) -> int | None:
    if ref is None:
        return 0
    return ranks.get(ref) if isinstance(ref, str) else known.get(ref)


def _tied(rule: Rule) -> list[tuple[str, ...]]:
    """Variables that conditions give one rank, in order of appearance."""
    root = {name: name for name in rule.variables}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    for condition in rule.conditions:
        names = sorted(tensor_names(condition))
        if _equal_ranks(condition):
            for name in names[1:]:
                root[find(name)] = find(names[0])
    groups: dict[str, list[str]] = {}
    for name in rule.variables:
        groups.setdefault(find(name), []).append(name)
    return [tuple(g) for g in groups.values()]


def _equal_ranks(condition: Expr) -> bool:
    if isinstance(condition, Call):
        return condition.function == "same_shape"
    if isinstance(condition, Compare) and set(condition.ops) == {"=="}:
        parts = (condition.first, *condition.rest)
        return all(isinstance(p, Call) and p.function == "rank" for p in parts)
    return False


def _asked_ranks(rule: Rule, names: Sequence[str]) -> list[int]:
    """The ranks of conditions such as rank(x) == 4."""
    asked = []
    for c in rule.conditions:
        if isinstance(c, Compare) and c.ops == ("==",) and isinstance(c.first, Call) and c.first.function == "rank":
            if isinstance(c.rest[0], Literal) and isinstance(c.rest[0].value, int) and tensor_names(c) <= set(names):
                asked.append(c.rest[0].value)
    return asked[:1]


def _impossible(condition: Expr, env: Bindings) -> bool:
    """Whether a condition is false, or without value, for every value of the symbols."""
    try:
        return evaluate(condition, env) is False
    except DependsOnSymbols:
        return False
    except ExpressionError:
        return True


# ── one drawing ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Attempt:
    """Symbols, what is known of them, and the settings drawn so far."""

    def __init__(
        self, rule: Rule, ranks: Mapping[str, int], rng: random.Random, dtypes: Mapping[str, DType] | None = None,
        spread: int = 0,
    ) -> None:  # fmt: skip
        self._rule = rule
        self._spread = spread
        self._rng = rng
        self.conditions = [c for c in rule.conditions if tensor_names(c) <= ranks.keys()]
        self._shapes = {n: tuple(SymDim.named(f"{n}.{i}") for i in range(r)) for n, r in ranks.items()}
        self._dtypes = {n: (dtypes or {}).get(n, DType.FLOAT) for n in ranks}
        self._known: dict[str, Dim] = {}
        self._types: dict[str, TensorType] | None = None
        self._attrs: dict[str, Value] = {}
        self._fills = {name: Fraction(rng.choice(_NUMBERS)) for name in asked_numbers(rule)}
        self._weights = frozenset(rule.variables) - not_weights(rule)
        self._at: tuple[TensorType | None, ...] = ()
        self.drawn = False  # whether anything was left to chance
        self.outputs: list[Types] = []

    @property
    def types(self) -> dict[str, TensorType]:
        """Types of the variables as far as they are known now."""
        if self._types is None:
            self._types = {n: TensorType(self._dtypes[n], tuple(map(self._now, s))) for n, s in self._shapes.items()}
        return self._types

    @property
    def environment(self) -> Bindings:
        return Bindings(self.types, self._attrs, self._weights, contents_of(self._fills))

    def instances(self) -> Iterator[Instance]:
        """Numbers for the symbols such that source and conditions hold."""
        self.solve()
        symbols = sorted({s for shape in self._shapes.values() for d in shape for s in symbols_of(self._now(d))})
        for _ in range(_NUMBERINGS):
            values = self._numbering(symbols)
            instance = Instance(
                {n: t.bind(values) for n, t in self.types.items()}, dict(self._attrs), self._weights, dict(self._fills)
            )
            if _holds(self._rule, instance):
                yield instance
            if not symbols:
                return

    # equations

    def solve(self) -> None:
        """Solves what the conditions and the source's type rules ask; raises `Inadmissible`."""
        for _ in range(_STEPS):
            try:
                if any(self._aim(c) for c in self.conditions):
                    continue
                known = len(self._attrs)
                self.outputs = self._walk()
                if len(self._attrs) == known and not self._meet_broadcast(self.outputs):
                    return
            except _Again:
                continue
            except NeedsNumbers as error:
                if not self._concrete(error.type.dims):
                    raise Inadmissible(str(error)) from error
            except NoDomain as error:
                raise Inadmissible(str(error)) from error
            except DimensionMismatch as error:
                if not (is_dim(error.left) and is_dim(error.right) and self._equate(error.left, error.right)):
                    raise Inadmissible(str(error)) from error
            except TasoError as error:
                if not self._one_number():
                    raise Inadmissible(str(error)) from error
        raise Inadmissible("too many equations")

    def _now(self, dim: Dim) -> Dim:
        return substitute(dim, self._known)

    def _learn(self, symbol: str, value: Dim) -> None:
        self._known = {n: substitute(d, {symbol: value}) for n, d in self._known.items()}
        self._known[symbol] = value
        self._types = None

    def _walk(self) -> list[Types]:
        """Types of the source's nodes as far as their variables have a rank."""
        types, done = self.types, list[Types]()
        for node in self._rule.source:
            inputs: list[TensorType | None] = []
            for ref in node.inputs:
                known = ref in types if isinstance(ref, str) else ref is None or bool(done[ref.node])
                if not known:
                    break
                inputs.append(_type_at(ref, types, done))
            names = {n for _, e in node.attrs for n in tensor_names(e)}
            if len(inputs) < len(node.inputs) or not names <= types.keys():
                done.append(())
                continue
            self._at = tuple(inputs)
            attrs = self._settings(node, tuple(inputs))
            try:
                done.append(node.op.types_of(inputs, attrs))
            except DimensionMismatch:
                raise
            except TasoError as error:
                if _never(node.op, inputs, attrs):
                    raise Impossible(str(error)) from error
                raise
        self._at = ()
        return done

    def _settings(self, node: PatternNode, types: tuple[TensorType | None, ...]) -> Attrs:
        known: dict[str, AttrValue] = {}
        for name, expr in node.attrs:
            if isinstance(expr, Name) and expr.name not in self._attrs:
                self._attrs[expr.name] = self._setting(expr.name, name, Site(
                    self._rng, node.op, types, node.n_outputs, known
                ))  # fmt: skip
            value = value_of(expr, self.environment)
            self._concrete_value(value)
            known[name] = attribute_value(node.op, name, value)
        return settled(node.op, types, node.op.complete(known))

    def _setting(self, variable: str, name: str, site: Site) -> Value:
        """A value for an attribute variable: what a condition says it equals, else one that the attribute can take."""
        for condition in self._rule.conditions:
            options = self._options(condition, variable)
            if options:
                self.drawn |= len(options) > 1
                value = self._rng.choice(options)
                self._concrete_value(value)
                return value
        self.drawn = True
        for _ in range(_REDRAWS):
            value = draw_setting(site, name)
            env = Bindings(self.types, {**self._attrs, variable: value}, self._weights)
            if not any(_impossible(c, env) for c in self.conditions if _settles(c, variable, env)):
                return value
        raise Inadmissible(f"no value of {site.op.name}.{name} was found that the conditions admit")

    def _options(self, condition: Expr, variable: str) -> list[Value]:
        if not isinstance(condition, Compare) or len(condition.ops) != 1 or condition.ops[0] not in ("==", "in"):
            return []
        left, right = condition.first, condition.rest[0]
        if condition.ops[0] == "==" and right == Name(variable):
            left, right = right, left
        if left != Name(variable) or variable in attribute_names(right):
            return []
        try:
            value = value_of(right, self.environment)
        except ExpressionError:
            return []
        if condition.ops[0] == "==":
            return [value]
        return list(value) if isinstance(value, tuple) else []

    def _concrete_value(self, value: Value) -> None:
        """Draws numbers for the symbols in the value of an attribute, which must not have any."""
        dims = [v for v in leaves(value) if isinstance(v, SymDim)]
        if self._concrete(dims):
            raise _Again

    def _concrete(self, dims: Sequence[Dim]) -> bool:
        symbols = sorted({s for d in dims for s in symbols_of(d)})
        for symbol in symbols:
            self.drawn = True
            self._learn(symbol, self._rng.choice((1, 2, 3, 4, 5)))
        return bool(symbols)

    def _one_number(self) -> bool:
        """Draws a number for one symbol of the operator that complained: the last size of its last input."""
        for t in reversed(self._at):
            for dim in reversed(t.shape or () if t is not None else ()):
                symbols = sorted(symbols_of(dim))
                if symbols:
                    self.drawn = True
                    self._learn(symbols[-1], self._rng.choice((1, 2, 3)))
                    return True
        return False

    def _equate(self, left: Dim, right: Dim) -> bool:
        solved = solve(self._now(left), self._now(right), lambda symbol: 0)
        if solved is not None:
            self._learn(*solved)
        return solved is not None

    def _equate_values(self, left: Value, right: Value) -> bool:
        if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
            return any(self._equate_values(a, b) for a, b in zip(left, right, strict=True))
        return is_dim(left) and is_dim(right) and left != right and self._equate(left, right)

    def _meet_broadcast(self, outputs: Sequence[Types]) -> bool:
        """Where two free sizes broadcast, makes them equal, or one of them 1."""
        for t in (t for types in outputs for t in types):
            for met in (m for d in t.shape or () for m in larger_in(d)):
                options = [(met.left, met.right), (met.left, 1), (met.right, 1)]
                self._rng.shuffle(options)
                self.drawn = True
                if any(self._equate(a, b) for a, b in options):
                    return True
                raise Inadmissible(f"{met.left} and {met.right} do not broadcast")
        return False

    # conditions

    def _aim(self, condition: Expr) -> bool:
        """Makes a condition hold where that is an equation; whether anything became known by it."""
        try:
            result = evaluate(condition, self.environment)
        except ExpressionError:
            return self._aim_at_division(condition)
        if result is True:
            return False
        if self._aim_at_parts(condition):
            return True
        if result is False:
            raise Inadmissible(f"the condition {condition} does not hold")
        return False

    def _aim_at_parts(self, condition: Expr) -> bool:
        if isinstance(condition, Logic):
            items = list(condition.items)
            self._rng.shuffle(items)
            self.drawn = True
            return any(self._try_aim(item) for item in items)
        if isinstance(condition, Compare):
            values = [value_of(e, self.environment) for e in (condition.first, *condition.rest)]
            return any(self._aim_at(op, values[i], values[i + 1]) for i, op in enumerate(condition.ops))
        if isinstance(condition, Call):
            return self._aim_at_call(condition)
        return False

    def _aim_at_division(self, condition: Expr) -> bool:
        """Makes a size that must divide by another a multiple of it."""
        if not (isinstance(condition, Compare) and condition.ops == ("==",) and condition.rest == (Literal(0),)):
            return False
        if not (isinstance(condition.first, Binary) and condition.first.op == "%"):
            return False
        try:
            size, divisor = (value_of(e, self.environment) for e in (condition.first.left, condition.first.right))
        except ExpressionError:
            return False
        if not (isinstance(size, SymDim) and is_dim(divisor)):
            return False
        return self._equate(size, divisor * SymDim.named(f"times.{len(self._known)}"))

    def _try_aim(self, condition: Expr) -> bool:
        try:
            return self._aim(condition)
        except Inadmissible:
            return False

    def _aim_at(self, op: str, left: Value, right: Value) -> bool:
        if op == "==":
            return self._equate_values(left, right)
        if op == "in" and isinstance(right, tuple) and right:
            self.drawn = True
            return self._equate_values(left, self._rng.choice(right))
        return False

    def _aim_at_call(self, call: Call) -> bool:
        env = self.environment
        if call.function == "same_shape":
            shapes = [env.type_of(n.name).dims for n in call.args if isinstance(n, Name)]
            return any(self._equate_values(shapes[0], s) for s in shapes[1:])
        if call.function == "filled" and isinstance(call.args[0], Name):
            value = value_of(call.args[1], env)
            if not isinstance(value, (int, float)):
                return False
            exact = exact_number(call.args[1])
            exact = Fraction(repr(value)) if exact is None else exact
            if self._fills.get(call.args[0].name) != exact:
                self._fills[call.args[0].name] = exact
                return True
        if call.function == "all_equal":
            items, wanted = (value_of(a, env) for a in call.args)
            return isinstance(items, tuple) and any(self._equate_values(i, wanted) for i in items)
        if call.function == "broadcasts_to":
            return self._aim_at_broadcast(*(value_of(a, env) for a in call.args))
        return False

    def _aim_at_broadcast(self, small: Value, big: Value) -> bool:
        if not isinstance(small, tuple) or not isinstance(big, tuple):
            return False
        for a, b in zip(reversed(small), reversed(big), strict=False):
            if a not in (1, b):
                self.drawn = True
                return self._equate_values(a, self._rng.choice((1, b, b)))
        return False

    # numbers

    def _numbering(self, symbols: Sequence[str]) -> dict[str, Dim]:
        """Small numbers, mostly unequal ones: what is confused with what shows only where sizes differ."""
        if self._rng.random() < 0.7:
            pool = range(1 if self._rng.random() < 0.3 else 2, 5 + len(symbols) + self._spread)
            drawn = self._rng.sample(pool, len(symbols))
        else:
            drawn = [self._rng.randint(1, 4 + self._spread) for _ in symbols]
        whole = [v for v in self._attrs.values() if isinstance(v, int) and not isinstance(v, bool) and 1 < v < 13]
        factor = math.lcm(*whole) if whole else self._rng.choice((1, 1, 2))
        values: dict[str, Dim] = {}
        for symbol, number in zip(symbols, drawn, strict=True):
            grouped = factor > 1 and self._rng.random() < 0.4
            values[symbol] = factor * max(1, number // 2) if grouped else number
        return values


def _never(op: Operator, types: Sequence[TensorType | None], attrs: Attrs) -> bool:
    """Whether an operator takes tensors of these ranks on no sizes, as far as a few sizes tell."""
    for size in (1, 2, 4):
        try:
            op.types_of([None if t is None else t.with_shape((size,) * t.rank) for t in types], attrs)
        except DimensionMismatch:
            return False
        except TasoError:
            continue
        return False
    return True


def _settles(condition: Expr, variable: str, env: Bindings) -> bool:
    """Whether a condition speaks of `variable` and of no attribute variable that is still open."""
    names = attribute_names(condition)
    return variable in names and names <= env.attrs.keys()


def not_weights(rule: Rule) -> frozenset[str]:
    """Tensors that a condition wants not to be weights."""
    found: set[str] = set()
    for c in rule.conditions:
        if isinstance(c, Unary) and c.op == "not" and isinstance(c.operand, Call) and c.operand.function == "is_weight":
            found |= tensor_names(c)
    return frozenset(found)


def asked_numbers(rule: Rule) -> list[str]:
    """Tensors of which the rule asks for the number that all their elements are."""
    attributes = [e for node in (*rule.source, *rule.target) for _, e in node.attrs]
    asked = [name for e in (*rule.conditions, *attributes) for name in _numbers_in(e)]
    return list(dict.fromkeys(asked))


def _numbers_in(expr: Expr) -> Iterator[str]:
    if isinstance(expr, Call) and expr.function == "value" and isinstance(expr.args[0], Name):
        yield expr.args[0].name
    for part in children(expr):
        yield from _numbers_in(part)


def _holds(rule: Rule, instance: Instance) -> bool:
    """Whether source and conditions hold in numbers."""
    sizes = [t.dims for t in instance.types.values()]
    if not all(isinstance(d, int) and d > 0 for dims in sizes for d in dims):
        return False
    env = instance.environment
    try:
        for _, _, outputs in types_of_nodes(rule.source, instance.types, env):
            if any(not 0 < t.size <= _LARGEST for t in outputs):
                return False
    except TasoError:
        return False
    if any(t.size > _LARGEST for t in instance.types.values()):
        return False
    return rule.check_conditions(env) is None


def draw_instances(rule: Rule, rng: random.Random, attempts: int) -> Iterator[Instance]:
    """Distinct admissible instances, as many as `attempts` drawings of symbols give.

    One in four drawings mixes FLOAT and DOUBLE, to show where element types are taken for equal without saying so.
    """
    choices = rank_choices(rule, rng)
    seen: set[tuple[object, ...]] = set()
    for number in range(attempts if choices else 0):
        ranks = choices[number % len(choices)]
        mixed = number % 4 == 1 and {n: rng.choice((DType.FLOAT, DType.DOUBLE)) for n in rule.variables}
        try:
            # where few are admissible, the first drawings use up the small sizes
            for instance in _Attempt(rule, ranks, rng, mixed or None, number // 16).instances():
                key = (*instance.types.items(), *instance.attrs.items(), *instance.fills.items())
                if key not in seen:
                    seen.add(key)
                    yield instance
                    break
        except Inadmissible:
            continue


def with_dtype(rule: Rule, instance: Instance, dtype: DType) -> Instance | None:
    """The same shapes with all floating-point tensors of another type, where that is admissible too."""
    types = {n: TensorType(dtype if t.dtype.is_float else t.dtype, t.shape) for n, t in instance.types.items()}
    changed = Instance(types, instance.attrs, instance.weights, instance.fills)
    return changed if _holds(rule, changed) else None
