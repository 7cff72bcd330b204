"""Sums of terms made simpler: guards that hold or fail for certain, ranges that guards cut out, indices without use."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from taso.rules.verifier import terms as algebra
from taso.rules.verifier.cases import Case
from taso.rules.verifier.polynomials import ONE, ZERO, Atom, Poly, without
from taso.rules.verifier.terms import Applied, Bound, Entry, Factor, Largest, Sum, Term

_Parts = tuple[tuple[Bound, ...], tuple[Poly, ...]]


class Simplifier:
    """Brings sums into a simpler form, by what is known in one case."""

    def __init__(self, case: Case) -> None:
        self._known = case.known

    def sum(self, terms: Sum) -> Sum:
        found = (self.term(t) for t in algebra.change(terms, self._known.now))
        return tuple(t for t in found if t is not None)

    def term(self, term: Term) -> Term | None:
        """The term, or None where it is 0."""
        if not term.coefficient.terms:
            return None
        factors = term.factors
        bound, guards = term.bound, term.guards
        while True:
            kept = self._guards(guards)
            if kept is None:
                return None
            guards = self._parted(kept)
            cut = self._cut(bound, guards)
            if cut is None:
                break
            old, value, new, guards = cut
            bound = tuple(b for b in bound if b[0] is not old) + new

            def moved(poly: Poly, old: Atom = old, value: Poly = value) -> Poly:
                return self._known.now(self._known.substituted(poly, old, value))

            guards = tuple(map(moved, guards))
            factors = tuple(algebra.change_factor(f, moved) for f in factors)
        factors = tuple(algebra.assuming(f, guards) for f in self._met(guards, factors))
        return _cancelled(self._without_idle(Term(term.coefficient, bound, guards, tuple(map(self.factor, factors)))))

    def _parted(self, guards: tuple[Poly, ...]) -> tuple[Poly, ...]:
        """With equations s·a + b = 0 where |b| < s taken apart into a = 0 and b = 0."""
        for equation in guards:
            if -equation not in guards:
                continue
            for unit in sorted((a for a in equation.atoms if not a.is_index), key=lambda a: a.order):
                parts = equation.split(unit)
                if parts is None or not parts[0].terms or not parts[1].terms:
                    continue
                a, b = parts
                size = Poly.atom(unit)
                if self._known.nonneg(size - ONE - b) and self._known.nonneg(size - ONE + b):
                    rest = tuple(g for g in guards if g not in (equation, -equation))
                    return self._parted((*rest, a, -a, b, -b))
        return guards

    def _met(self, guards: tuple[Poly, ...], factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
        """Factors with an index written as the guards say that it is."""
        for equation in guards:
            if -equation not in guards:
                continue
            for atom in sorted((a for a in equation.atoms if a.kind == "free"), key=lambda a: a.order, reverse=True):
                parts = equation.split(atom)
                if parts is not None and parts[0] in (ONE, -ONE):
                    value = -parts[1] if parts[0] == ONE else parts[1]
                    factors = tuple(self._replaced(f, atom, value) for f in factors)
                    break
        return factors

    def _replaced(self, factor: Factor, atom: Atom, value: Poly) -> Factor:
        return algebra.change_factor(factor, lambda p: self._known.now(self._known.substituted(p, atom, value)))

    def factor(self, factor: Factor) -> Factor:
        if isinstance(factor, Applied):
            return Applied(factor.function, tuple(map(self.sum, factor.args)))
        if isinstance(factor, Largest):
            entries = (self.entry(e) for e in factor.entries)
            return Largest(tuple(e for e in entries if e is not None))
        return factor

    def entry(self, entry: Entry) -> Entry | None:
        """The candidates, or None where there are none."""
        guards = self._guards(tuple(map(self._known.now, entry.guards)))
        if guards is None:
            return None
        value = self.sum(entry.value)
        used = algebra.atoms_of_sum(value).union(*(g.within for g in guards))
        bound = tuple((a, self._known.now(e)) for a, e in entry.bound if a in used)
        return Entry(bound, guards, value)

    def _guards(self, guards: tuple[Poly, ...]) -> tuple[Poly, ...] | None:
        """Those that neither hold anyhow nor follow from another; None where one fails."""
        kept: list[Poly] = []
        for guard in dict.fromkeys(guards):
            if self._known.nonneg(-guard - ONE):
                return None
            if not self._known.nonneg(guard) and not any(self._known.nonneg(guard - k) for k in kept):
                kept = [k for k in kept if not self._known.nonneg(k - guard)] + [guard]
        return tuple(kept)

    def _cut(
        self, bound: tuple[Bound, ...], guards: tuple[Poly, ...]
    ) -> tuple[Atom, Poly, tuple[Bound, ...], tuple[Poly, ...]] | None:
        """(index, its new value, new indices, guards left) where guards cut a range out of that of an index."""
        for atom, extent in bound:
            low, high = self._limits(atom, extent, guards)
            if low is None and high is None:
                continue
            start = low if low is not None else ZERO
            end = high if high is not None else extent - ONE
            count = self._known.now(end - start + ONE)
            if not self._known.nonneg(count - ONE) or any(a.kind == "bound" for a in count.within):
                continue
            used = [start - Poly.atom(atom), Poly.atom(atom) - end]
            left = tuple(g for g in guards if -g not in used)
            if count == ONE:
                return atom, start, (), left
            fresh = self._known.index("bound", count)
            return atom, start + Poly.atom(fresh), ((fresh, count),), left
        return None

    def _limits(self, atom: Atom, extent: Poly, guards: Sequence[Poly]) -> tuple[Poly | None, Poly | None]:
        """Limits that guards set to an index, where they lie within its range for certain."""
        low = high = None
        for guard in guards:
            parts = guard.split(atom)
            if parts is None:
                continue
            factor, rest = parts
            if factor == ONE and low is None and self._known.nonneg(-rest) and self._known.nonneg(extent - ONE + rest):
                low = -rest
            if factor == -ONE and high is None and self._known.nonneg(rest) and self._known.nonneg(extent - ONE - rest):
                high = rest
        return low, high

    def _without_idle(self, term: Term) -> Term:
        """Σ over an index that nothing depends on is a multiple."""
        used = frozenset[Atom]().union(*(g.within for g in term.guards), *map(algebra.atoms_of, term.factors))
        coefficient = term.coefficient
        for atom, extent in term.bound:
            if atom not in used:
                coefficient = coefficient * extent
        return Term(coefficient, tuple(b for b in term.bound if b[0] in used), term.guards, term.factors)


def _cancelled(term: Term) -> Term:
    """The term with 1 / (a · b) taken apart, and without what is both multiplied by and divided by."""
    coefficient, left = term.coefficient, list[Factor]()
    for factor in term.factors:
        divisor = _divisor(factor)
        if divisor is None or len(divisor.terms) != 1:
            left.append(factor)
            continue
        ((monomial, number),) = divisor.terms.items()
        coefficient = coefficient * (1 / Fraction(number))
        for atom in monomial:
            quotient = _quotient(coefficient, atom)
            if quotient is None:
                left.append(Applied("reciprocal", (algebra.number(Poly.atom(atom)),)))
            else:
                coefficient = quotient
    return Term(coefficient, term.bound, term.guards, tuple(left))


def _divisor(factor: Factor) -> Poly | None:
    """p where a factor is 1 / p."""
    if not isinstance(factor, Applied) or factor.function != "reciprocal" or len(factor.args[0]) != 1:
        return None
    (term,) = factor.args[0]
    return None if term.bound or term.guards or term.factors else term.coefficient


def _quotient(poly: Poly, atom: Atom) -> Poly | None:
    """poly / atom where each of its terms holds the atom."""
    parts = {without(monomial, (atom,)): c for monomial, c in poly.terms.items()}
    return None if None in parts else Poly({m: c for m, c in parts.items() if m is not None})
