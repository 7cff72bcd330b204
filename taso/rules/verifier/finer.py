"""A second normal form, for sides whose first ones differ: it says more, and costs more.

- Sums over few terms are written out.
- Scalar functions that others make up are opened by their definitions (`taso.graph.numbers`).
- What maxima and minima make of the same things is the largest of several smallest: min(max(x, 0), 6) is
  max(min(x, 6), 0). The real numbers are a distributive lattice, and x ↦ −x turns it round.

Each step replaces a term by an equal one, so that equal texts still mean equal elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from taso.rules.verifier import terms as algebra
from taso.rules.verifier.cases import Case, NotUnderstood
from taso.rules.verifier.polynomials import ONE, Atom, Poly, Rational
from taso.rules.verifier.simplify import Simplifier
from taso.rules.verifier.terms import Applied, Bound, Entry, Factor, Largest, Sum, Term

_MOST_WRITTEN_OUT = 16  # terms of a sum
_MOST_CLAUSES = 32

_Clause = Mapping[str, Sum]
"""Things of which the smallest is taken, by their texts."""


def finer(case: Case, terms: Sum, integers: bool) -> Sum:
    """A sum equal to `terms` in the second normal form; of `integers`, which wrap around, orders are left alone."""
    return Simplifier(case).sum(_Finer(case, integers).sum(Simplifier(case).sum(terms)))


class _Finer:
    def __init__(self, case: Case, integers: bool) -> None:
        self._case = case
        self._integers = integers
        self._simplifier = Simplifier(case)

    def sum(self, terms: Sum) -> Sum:
        return _merged(t for term in terms for written in self._written_out(term) for t in self._term(written))

    def _term(self, term: Term) -> Sum:
        total: Sum = (Term(term.coefficient, term.bound, term.guards),)
        for factor in term.factors:
            total = self._times(total, self._factor(factor))
        return total

    def _times(self, left: Sum, right: Sum) -> Sum:
        return algebra.product(left, right, self._fresh)

    def _fresh(self, bound: Bound) -> Bound:
        return self._case.known.index("bound", bound[1]), bound[1]

    # ── sums written out ─────────────────────────────────────────────────────────────────────────────────────────

    def _written_out(self, term: Term) -> Iterable[Term]:
        for position, (atom, extent) in enumerate(term.bound):
            count = self._case.known.now(extent).constant
            if not isinstance(count, int) or not 0 < count <= _MOST_WRITTEN_OUT:
                continue
            if any(_binds(factor, atom) for factor in term.factors):
                # within, it is another index of the same name
                continue
            rest = Term(
                term.coefficient, term.bound[:position] + term.bound[position + 1 :], term.guards, term.factors
            )
            for value in range(count):
                made = self._simplifier.term(algebra.change_term(rest, self._replacing(atom, Poly.number(value))))
                yield from self._written_out(made) if made is not None else ()
            return
        yield term

    def _replacing(self, atom: Atom, value: Poly) -> algebra.Change:
        known = self._case.known
        return lambda poly: known.now(known.substituted(poly, atom, value))

    # ── factors ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _factor(self, factor: Factor) -> Sum:
        if isinstance(factor, Applied):
            args = [self._simplifier.sum(self.sum(a)) for a in factor.args]
            definition = None if self._integers else _DEFINITIONS.get(factor.function)
            if definition is not None:
                return self.sum(definition(_Algebra(self._times), args))
            if factor.function == "reciprocal":
                return algebra.reciprocal(args[0])
            return algebra.of(Applied(factor.function, tuple(args)))
        return self._extreme(factor) if isinstance(factor, Largest) else algebra.of(factor)

    def _extreme(self, factor: Largest) -> Sum:
        """A maximum in the shorter of its two forms: as itself, or as the negative of the contrary."""
        own = algebra.of(factor)
        if self._integers or not _plain(factor):
            entries = (Entry(e.bound, e.guards, self._simplifier.sum(self.sum(e.value))) for e in factor.entries)
            return algebra.largest(entries, self._integers)
        found = [self._clauses(own), self._clauses(algebra.negative(own))]
        if None in found:
            return own
        made = [_largest(c) for c in found if c is not None]
        return min((made[0], algebra.negative(made[1])), key=_form)

    def _clauses(self, terms: Sum) -> Sequence[_Clause] | None:
        """Clauses of whose smallest elements `terms` is the largest; None where there are too many."""
        lone = _lone(terms)
        if lone is None:
            value = self._simplifier.sum(self.sum(terms))
            again = _lone(value)
            return [{_key(value): value}] if again is None or value == terms else self._clauses(value)
        factor, times = lone
        parts = []
        for entry in factor.entries:
            found = self._clauses(algebra.scaled(entry.value, Poly.number(times)))
            if found is None:
                return None
            parts.append(found)
        if times > 0:
            return _absorbed([clause for part in parts for clause in part])
        return _met(parts)


def _binds(factor: Factor, atom: Atom) -> bool:
    """Whether a sum or maximum within a factor runs over `atom` itself."""

    def within(terms: Sum) -> bool:
        return any(any(a is atom for a, _ in t.bound) or any(_binds(f, atom) for f in t.factors) for t in terms)

    if isinstance(factor, Applied):
        return any(map(within, factor.args))
    if isinstance(factor, Largest):
        return any(any(a is atom for a, _ in e.bound) or within(e.value) for e in factor.entries)
    return False


# ── clauses ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _plain(factor: Largest) -> bool:
    return all(not e.bound and not e.guards for e in factor.entries)


def _lone(terms: Sum) -> tuple[Largest, Rational] | None:
    """(maximum, number) where a sum is a multiple of a maximum of few."""
    if len(terms) != 1:
        return None
    (term,) = terms
    times = term.coefficient.constant
    if term.bound or term.guards or len(term.factors) != 1 or not times:
        return None
    (factor,) = term.factors
    return (factor, times) if isinstance(factor, Largest) and _plain(factor) else None


def _met(parts: Sequence[Sequence[_Clause]]) -> Sequence[_Clause] | None:
    """The smallest of several, each the largest of its clauses."""
    total: Sequence[_Clause] = [{}]
    for part in parts:
        if len(total) * len(part) > _MOST_CLAUSES:
            return None
        total = _absorbed([_joined(a, b) for a, b in product(total, part)])
    return total


def _joined(a: _Clause, b: _Clause) -> _Clause:
    """Both together, of numbers the smallest alone."""
    every = {**a, **b}
    numbers = {key: n for key, value in every.items() if (n := algebra.number_of(value)) is not None}
    if len(numbers) < 2:
        return every
    least = min(numbers, key=lambda key: numbers[key])
    return {key: value for key, value in every.items() if key not in numbers or key == least}


def _absorbed(clauses: Sequence[_Clause]) -> Sequence[_Clause]:
    """Without clauses that are never larger than another one."""
    kept: list[_Clause] = []
    for clause in clauses:
        if not any(_below(clause, other) for other in kept):
            kept = [other for other in kept if not _below(other, clause)] + [clause]
    return kept


def _below(small: _Clause, large: _Clause) -> bool:
    """Whether min(small) ≤ min(large) for certain: each of the latter is no smaller than one of the former."""
    numbers = [n for value in small.values() if (n := algebra.number_of(value)) is not None]

    def reached(key: str, value: Sum) -> bool:
        number = algebra.number_of(value)
        return key in small or number is not None and any(n <= number for n in numbers)

    return all(reached(key, value) for key, value in large.items())


def _largest(clauses: Sequence[_Clause]) -> Sum:
    return algebra.largest(e for clause in clauses for e in algebra.entries_of(_smallest(clause)))


def _smallest(clause: _Clause) -> Sum:
    # with several members no flattening: they are no maxima themselves
    return algebra.negative(algebra.largest(Entry((), (), algebra.negative(value)) for value in clause.values()))


def _key(terms: Sum) -> str:
    return algebra.text(terms, {})


def _form(terms: Sum) -> tuple[int, str]:
    shown = _key(terms)
    return len(shown), shown


def _merged(terms: Iterable[Term]) -> Sum:
    """Like terms taken together."""
    found: dict[str, Term] = {}
    for term in terms:
        key = algebra.text((Term(ONE, term.bound, term.guards, term.factors),), {})
        if key in found:
            term = Term(found[key].coefficient + term.coefficient, term.bound, term.guards, term.factors)
        found[key] = term
    return tuple(t for t in found.values() if t.coefficient.terms)


# ── definitions ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Algebra:
    """Arithmetic that definitions are written in."""

    def __init__(self, times: Callable[[Sum, Sum], Sum]) -> None:
        self.times = times

    @staticmethod
    def number(value: int) -> Sum:
        return algebra.number(Poly.number(value))

    @staticmethod
    def largest(*args: Sum) -> Sum:
        return algebra.largest(e for a in args for e in algebra.entries_of(a))

    def smallest(self, *args: Sum) -> Sum:
        return algebra.negative(self.largest(*map(algebra.negative, args)))

    @staticmethod
    def apply(function: str, arg: Sum) -> Sum:
        return algebra.of(Applied(function, (arg,)))

    def elu(self, x: Sum, alpha: Sum) -> Sum:
        """x where x ≥ 0, else alpha · (eˣ − 1)."""
        power = self.apply("exp", self.smallest(x, ())) + self.number(-1)
        return self.largest(x, ()) + self.times(alpha, power)


def _of_three(args: Sequence[Sum]) -> tuple[Sum, Sum, Sum]:
    if len(args) != 3:
        raise NotUnderstood("a function of three arguments with another number of them")
    return args[0], args[1], args[2]


def _hard_sigmoid(a: _Algebra, args: Sequence[Sum]) -> Sum:
    x, alpha, beta = _of_three(args)
    return a.largest((), a.smallest(a.number(1), a.times(alpha, x) + beta))


def _selu(a: _Algebra, args: Sequence[Sum]) -> Sum:
    x, alpha, gamma = _of_three(args)
    return a.times(gamma, a.elu(x, alpha))


_DEFINITIONS: dict[str, Callable[[_Algebra, Sequence[Sum]], Sum]] = {
    "sigmoid": lambda a, args: algebra.reciprocal(a.number(1) + a.apply("exp", algebra.negative(args[0]))),
    "softplus": lambda a, args: a.apply("log", a.number(1) + a.apply("exp", args[0])),
    "leaky_relu": lambda a, args: a.largest(args[0], ()) + a.times(args[1], a.smallest(args[0], ())),
    "elu": lambda a, args: a.elu(args[0], args[1]),
    "selu": _selu,
    "hard_sigmoid": _hard_sigmoid,
}

__all__ = ["finer"]
