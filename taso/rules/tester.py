"""Trial of rules: exact evaluation of both sides modulo primes, on shapes and settings that the conditions admit.

Both sides are polynomials (or fractions of such) in the elements of the variables, once functions such as the sigmoid
are taken for unknown ones. Two different polynomials of degree d agree at a uniformly random point modulo a prime p
with probability at most d / p (Schwartz 1980, Zippel 1979). Where an operator compares (relu, max, …) the trial is one
in small integers instead, whose order is that of the residues.

A counterexample is told only where floating point confirms it; otherwise a function that was taken for unknown may
explain the difference, and the rule stays unproved.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from taso.graph.errors import GraphError, TasoError
from taso.graph.index import Call, Const, Expr, Flat, Inside, Meaning, Numbers, Pick, Read, Reduce, evaluate
from taso.graph.numbers import SCALAR_FUNCTIONS, Float64, Modular
from taso.graph.operator import Attrs
from taso.graph.types import DType, TensorType
from taso.rules import expression
from taso.rules.instances import MOST_DIMENSIONS, Instance, draw_instances, types_of_nodes, with_dtype
from taso.rules.pattern import Certificate, Exactness, PatternNode, Ref, Rule, Status

Array = NDArray[np.generic]

PRIMES = (33554393, 33554383)
"""The two largest primes below 2²⁵."""

TRIALS = 16
_FEWEST = 12  # instances below which agreement is no evidence
_ATTEMPTS_PER_TRIAL = 12
_REDRAWS = 8  # of inputs that would divide by zero
_SMALL = 40  # largest absolute value where order matters
_METHOD = "exact trials modulo primes"
_ORDERED = "exact trials in small integers, modulo primes; the bound is one for each order of the values compared"
_ORDER = frozenset({"max", "min", "relu", "abs"})
_DIVISIONS = {"div": 1, "reciprocal": 0}


def test_rule(rule: Rule, *, trials: int = TRIALS, primes: Sequence[int] = PRIMES, seed: int = 0) -> Rule:
    """`rule` with the status that trials give it: tested, refuted (with counterexample) or unproved (with reason).

    The same rule and seed always give the same verdict. Each of `trials` instances is evaluated once for each prime.
    """
    unmeant = sorted({n.op.name for n in (*rule.source, *rule.target) if n.op.meaning is None})
    certificate = Certificate(_METHOD, _command(trials, seed), seed, 0, tuple(primes))
    if unmeant:
        return _unproved(rule, certificate, f"no meaning is written down for {', '.join(unmeant)}")
    rng = random.Random(f"{seed} {rule.name}")
    count, bound, ordered, passed_over = 0, 0.0, False, ""
    for instance in draw_instances(rule, rng, trials * _ATTEMPTS_PER_TRIAL):
        verdict = _try_instance(rule, instance, primes, rng)
        if verdict.refuted:
            return _refuted(rule, certificate, count + 1, verdict.text)
        if verdict.silent:
            passed_over = f"; {verdict.text}"
            continue
        if verdict.text:
            return _unproved(rule, certificate, verdict.text)
        count, bound, ordered = count + 1, max(bound, verdict.bound), ordered or verdict.ordered
        if count == 1 and rule.exactness is Exactness.EXACT and (reason := _on_integers(rule, instance)):
            return _unproved(rule, certificate, reason)
        if count == trials:
            break
    if count < min(trials, _FEWEST):
        shown = f"only {count} different" if count else "no"
        reason = f"{shown} shapes and settings were found that source and conditions admit{passed_over}"
        return _unproved(rule, certificate, reason)
    method = _ORDERED if ordered else _METHOD
    done = Certificate(method, certificate.command, seed, count, tuple(primes), bound, dimensions=MOST_DIMENSIONS)
    return rule.judged(Status.TESTED, done)


# pytest would take it for a test of its own
test_rule.__test__ = False  # type: ignore[attr-defined]  # functions take attributes


def test_rules(
    rules: Iterable[Rule], *, trials: int = TRIALS, primes: Sequence[int] = PRIMES, seed: int = 0,
    executor: Executor | None = None,
) -> list[Rule]:  # fmt: skip
    """`test_rule` of each, in order; `executor` spreads them over processes."""
    trial = partial(test_rule, trials=trials, primes=tuple(primes), seed=seed)
    return list(map(trial, rules) if executor is None else executor.map(trial, rules, chunksize=8))


test_rules.__test__ = False  # type: ignore[attr-defined]  # functions take attributes


def _command(trials: int, seed: int) -> str:
    return f"taso.rules.tester.test_rule(rule, trials={trials}, seed={seed})"


def _unproved(rule: Rule, c: Certificate, reason: str) -> Rule:
    return rule.judged(Status.UNPROVED, Certificate(c.method, c.command, c.seed, 0, c.primes, reason=reason))


def _refuted(rule: Rule, c: Certificate, count: int, counterexample: str) -> Rule:
    found = Certificate(c.method, c.command, c.seed, count, c.primes, counterexample=counterexample)
    return rule.judged(Status.REFUTED, found)


def repairs(rule: Rule, *, trials: int = TRIALS, seed: int = 0) -> Iterator[Rule]:
    """Variants of a refuted rule that hold under one more condition, that two dimensions of its variables are equal.

    The weaker conditions of the variants found are not compared; all that pass the trial are given.
    """
    instance = next(draw_instances(rule, random.Random(f"{seed} {rule.name}"), _ATTEMPTS_PER_TRIAL), None)
    if instance is None:
        return
    places = [(name, axis) for name, t in instance.types.items() for axis in range(t.rank)]
    for i, (a, axis_a) in enumerate(places):
        for b, axis_b in places[i + 1 :]:
            if a == b or axis_a != axis_b:
                continue
            condition = expression.parse(f"dim({a}, {axis_a}) == dim({b}, {axis_b})")
            tried = test_rule(rule.with_conditions(condition), trials=trials, seed=seed)
            if tried.status is Status.TESTED:
                yield tried


# ── one instance ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Verdict:
    """What an instance says: agreement (no text), a counterexample, or a reason why it says nothing.

    A `silent` one says nothing of itself alone, so that others may be asked.
    """

    text: str = ""
    refuted: bool = False
    silent: bool = False
    bound: float = 0.0
    ordered: bool = False


@dataclass(frozen=True)
class _Prepared:
    """A side of a rule ready to be evaluated: of each node its inputs' places and the meanings of its outputs."""

    nodes: tuple[tuple[tuple[Ref | None, ...], tuple[Meaning, ...]], ...]
    types: tuple[tuple[TensorType, ...], ...]
    outputs: tuple[Ref, ...]

    def type_of(self, ref: Ref, variables: Mapping[str, TensorType]) -> TensorType:
        return variables[ref] if isinstance(ref, str) else self.types[ref.node][ref.output]

    def evaluate(self, values: Mapping[str, Array], numbers: Numbers) -> list[Array]:
        done: list[tuple[Array, ...]] = []
        for inputs, meanings in self.nodes:
            given = [_value_at(ref, values, done) for ref in inputs]
            done.append(tuple(evaluate(m, given, numbers) for m in meanings))
        return [a for ref in self.outputs if (a := _value_at(ref, values, done)) is not None]


def _value_at(ref: Ref | None, values: Mapping[str, Array], done: Sequence[tuple[Array, ...]]) -> Array | None:
    if ref is None:
        return None
    return values[ref] if isinstance(ref, str) else done[ref.node][ref.output]


def _prepare(nodes: Sequence[PatternNode], outputs: Sequence[Ref], instance: Instance) -> _Prepared:
    """Raises `TasoError` where the side has no types or no meaning on this instance."""
    typed = types_of_nodes(nodes, instance.types, instance.environment)
    prepared = []
    for node, (inputs, attrs, results) in zip(nodes, typed, strict=True):
        if len(results) != node.n_outputs:
            raise GraphError(f"{node.op.name} has {len(results)} outputs here, the rule says {node.n_outputs}")
        prepared.append((node.inputs, _meanings(node, inputs, attrs)))
    return _Prepared(tuple(prepared), tuple(t for _, _, t in typed), tuple(outputs))


def _meanings(node: PatternNode, inputs: Sequence[TensorType | None], attrs: Attrs) -> tuple[Meaning, ...]:
    if node.op.meaning is None:
        raise GraphError(f"no meaning is written down for {node.op.name}")
    return node.op.meaning(inputs, attrs)


def _try_instance(rule: Rule, instance: Instance, primes: Sequence[int], rng: random.Random) -> _Verdict:
    try:
        source = _prepare(rule.source, [s for s, _ in rule.outputs], instance)
    except TasoError as error:
        return _Verdict(f"the source has no meaning on {instance}: {error}")
    try:
        types_of_nodes(rule.target, instance.types, instance.environment)
    except TasoError as error:
        return _Verdict(f"{instance}: the source has a value, the target has none: {error}", refuted=True)
    try:
        target = _prepare(rule.target, [t for _, t in rule.outputs], instance)
    except TasoError as error:
        return _Verdict(f"the target has no meaning on {instance}: {error}")
    for position, (before, after) in enumerate(rule.outputs):
        left, right = source.type_of(before, instance.types), target.type_of(after, instance.types)
        if left != right:
            return _Verdict(f"{instance}: output {position} is {left} on the left, {right} on the right", refuted=True)
    return _compare(source, target, instance, primes, rng)


def _compare(
    source: _Prepared, target: _Prepared, instance: Instance, primes: Sequence[int], rng: random.Random
) -> _Verdict:
    sizes = [_Sizes(side, instance) for side in (source, target)]
    degree = max(s.outputs.degree for s in sizes)
    compared = [e for s in sizes for e in s.compared]
    span = min((_span(e, min(primes)) for e in compared), default=0)
    for prime in primes:
        seed = rng.randrange(1 << 30)
        found = _evaluate_both(source, target, instance, prime, seed, span)
        if found is None:
            return _Verdict(f"every drawing of inputs divides by zero on {instance}", silent=True)
        place = _difference(*found)
        if place is not None:
            where = f"{instance} (inputs from seed {seed}): output {place[0]} at {place[1]} is {place[2]} on the left, "
            where += f"{place[3]} on the right, modulo {prime}"
            if _confirmed(source, target, instance, seed):
                return _Verdict(where, refuted=True)
            return _Verdict(f"the sides differ for functions taken as unknown, and agree in floating point: {where}")
    bound = math.prod(min(1.0, degree / (2 * span + 1 if span else p)) for p in primes)
    return _Verdict(bound=bound, ordered=bool(span))


def _span(compared: _Extent, prime: int) -> int:
    """Largest absolute value of inputs such that what is compared stays within ±prime / 2, in the order of integers."""
    return max(4, min(1 << 20, int((prime / 2 / max(compared.terms, 1)) ** (1 / max(compared.degree, 1)))))


class _DividedByZero(Exception):
    """The inputs drawn divide by zero and say nothing."""


class _Guarded(Modular):
    """Residues, with divisions by zero told instead of answered."""

    def call(self, function: str, args: Sequence[Array]) -> Array:
        divisor = _DIVISIONS.get(function)
        if divisor is not None and not np.all(args[divisor]):
            raise _DividedByZero
        return super().call(function, args)


def _evaluate_both(
    source: _Prepared, target: _Prepared, instance: Instance, prime: int, seed: int, span: int
) -> tuple[list[Array], list[Array]] | None:
    """Both sides' outputs modulo a prime; None where every drawing divides by zero."""
    numbers = _Guarded(prime, seed)
    for redraw in range(_REDRAWS):
        values = _inputs(instance, numbers, seed + redraw, span)
        try:
            return source.evaluate(values, numbers), target.evaluate(values, numbers)
        except _DividedByZero:
            continue
    return None


def _inputs(instance: Instance, numbers: Modular, seed: int, span: int) -> dict[str, Array]:
    """Random residues: all of them, or those of −span … span where that is not 0."""
    generator = np.random.default_rng(seed)
    low, high = (-span, span + 1) if span else (0, numbers.p)
    values: dict[str, Array] = {}
    for name, t in instance.types.items():
        drawn = generator.integers(low, high, t.static_shape, np.int64)
        if name in instance.fills:
            drawn = np.full(t.static_shape, np.asarray(numbers.constant(instance.fills[name])).item(), np.int64)
        values[name] = drawn % numbers.p
    return values


def _difference(left: Sequence[Array], right: Sequence[Array]) -> tuple[int, tuple[int, ...], int, int] | None:
    """(output, index, left element, right element) of the first place where the sides differ."""
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        places = np.argwhere(a != b)
        if len(places):
            index = tuple(int(i) for i in places[0])
            return position, index, int(a[index]), int(b[index])
    return None


def _confirmed(source: _Prepared, target: _Prepared, instance: Instance, seed: int) -> bool:
    """Whether the sides differ in floating point as well, on small numbers; positive ones where others give NaN."""
    for shift in (0, _SMALL + 1):
        generator = np.random.default_rng(seed)
        values: dict[str, Array] = {}
        for name, t in instance.types.items():
            drawn = generator.integers(-_SMALL, _SMALL + 1, t.static_shape).astype(np.float64)
            filled = name in instance.fills
            values[name] = np.full_like(drawn, float(instance.fills[name])) if filled else drawn / 16 + shift
        left, right = (
            [np.asarray(a, np.float64) for a in side.evaluate(values, Float64())] for side in (source, target)
        )
        if not any(np.isnan(a).any() for a in (*left, *right)):
            return any(_far(a, b) for a, b in zip(left, right, strict=True))
    return False


def _far(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    """Whether elements differ by more than rounding; equal infinities do not (a maximum over nothing is one)."""
    unequal = a != b
    a, b = a[unequal], b[unequal]
    if not a.size:
        return False
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return True
    return float(np.abs(a - b).max()) > 1e-8 * max(float(np.abs(a).max()), float(np.abs(b).max()))


def _on_integers(rule: Rule, instance: Instance) -> str:
    """Why an exact rule, which integers may match, must not admit them: one of its operators has no meaning there."""
    changed = with_dtype(rule, instance, DType.INT32)
    if changed is None:
        return ""
    try:
        _prepare(rule.source, [s for s, _ in rule.outputs], changed)
        _prepare(rule.target, [t for _, t in rule.outputs], changed)
    except TasoError as error:
        return f"the conditions admit integers: {error}"
    return ""


# ── what the meanings are made of ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Extent:
    """Bounds on a polynomial in the elements of the variables: its degree, and the number of its terms."""

    degree: int
    terms: int


class _Sizes:
    """Extents of a side's outputs, and of all that it compares; of a fraction, with its denominators multiplied out."""

    def __init__(self, side: _Prepared, instance: Instance) -> None:
        self.compared: list[_Extent] = []
        variables = {name: _Extent(0 if name in instance.fills else 1, 1) for name in instance.types}
        done: list[tuple[_Extent, ...]] = []

        def at(ref: Ref | None) -> _Extent:
            if ref is None:
                return _Extent(0, 0)
            return variables[ref] if isinstance(ref, str) else done[ref.node][ref.output]

        for inputs, meanings in side.nodes:
            given = [at(r) for r in inputs]
            done.append(tuple(self._of(m.body, given) for m in meanings))
        found = [at(ref) for ref in side.outputs]
        self.outputs = _Extent(max(e.degree for e in found), max(e.terms for e in found))

    def _of(self, expr: Expr, given: Sequence[_Extent]) -> _Extent:
        if isinstance(expr, (Read, Flat)):
            return given[expr.input]
        if isinstance(expr, (Const, Inside)):
            return _Extent(0, 1)
        if isinstance(expr, Pick):
            parts = [self._of(piece, given) for _, piece in expr.pieces]
            return _Extent(max(p.degree for p in parts), max(p.terms for p in parts))
        if isinstance(expr, Call):
            return self._of_call(expr, [self._of(a, given) for a in expr.args])
        return self._of_reduction(expr, self._of(expr.body, given))

    def _of_reduction(self, expr: Reduce, inner: _Extent) -> _Extent:
        count = math.prod(loop.extent for loop in expr.loops if isinstance(loop.extent, int))
        if expr.kind in _ORDER:
            self.compared.append(inner)
            return inner
        if expr.kind == "prod":
            return _Extent(inner.degree * count, inner.terms)
        return _Extent(inner.degree * (count if _divides(expr.body) else 1), inner.terms * count)

    def _of_call(self, call: Call, args: Sequence[_Extent]) -> _Extent:
        degrees, terms = [a.degree for a in args], [a.terms for a in args]
        if call.function == "pow":
            # at most the third power, or a function that is taken for unknown
            return _Extent(3 * max(degrees) + 1, max(terms) ** 3)
        if SCALAR_FUNCTIONS[call.function].exact is None:
            # hides a difference of the sides where its arguments agree; its value is one more unknown
            return _Extent(max(degrees) + 1, 1)
        if call.function in _ORDER:
            self.compared.extend(args)
            return _Extent(max(degrees), max(terms))
        if call.function in ("mul", "div"):
            return _Extent(sum(degrees), math.prod(terms))
        return _Extent(sum(degrees) if any(map(_divides, call.args)) else max(degrees), sum(terms))


def _divides(expr: Expr) -> bool:
    """Whether an expression divides by what is no number."""
    if isinstance(expr, Call):
        divisor = _DIVISIONS.get(expr.function)
        if divisor is not None and any(isinstance(e, (Read, Flat)) for e in _parts(expr.args[divisor])):
            return True
        return any(map(_divides, expr.args))
    if isinstance(expr, Reduce):
        return _divides(expr.body)
    return isinstance(expr, Pick) and any(_divides(piece) for _, piece in expr.pieces)


def _parts(expr: Expr) -> Iterator[Expr]:
    """An expression and all that it is made of."""
    yield expr
    if isinstance(expr, Call):
        for arg in expr.args:
            yield from _parts(arg)
    elif isinstance(expr, Reduce):
        yield from _parts(expr.body)
    elif isinstance(expr, Pick):
        for _, piece in expr.pieces:
            yield from _parts(piece)
