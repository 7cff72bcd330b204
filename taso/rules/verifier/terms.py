"""Elements of tensors as sums of terms, and the one text that equal sums have.

A term is  coefficient · Σ over bound indices [guards] · product of factors.  A guard is a polynomial that must be ≥ 0;
a factor is an element of a variable, a scalar function of sums, or the largest of several sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Union

from taso.rules.verifier.cases import NotUnderstood
from taso.rules.verifier.polynomials import ONE, ZERO, Atom, Poly, Rational, show


@dataclass(frozen=True)
class Element:
    """An element of a variable of the rule."""

    variable: str
    index: tuple[Poly, ...]


@dataclass(frozen=True)
class Setting:
    """A real number that an attribute gives."""

    name: str


@dataclass(frozen=True)
class Applied:
    """A scalar function of which nothing is used but that equal arguments give equal values."""

    function: str
    args: tuple[Sum, ...]


@dataclass(frozen=True)
class Entry:
    """Candidates for the largest: the values of a sum for all values of bound indices that satisfy the guards."""

    bound: tuple[Bound, ...]
    guards: tuple[Poly, ...]
    value: Sum


@dataclass(frozen=True)
class Largest:
    """The largest of all candidates (below every number where there are none)."""

    entries: tuple[Entry, ...]


Factor = Union[Element, Setting, Applied, Largest]
Bound = tuple[Atom, Poly]
"""An index that runs from 0 to extent − 1."""


@dataclass(frozen=True)
class Term:
    coefficient: Poly
    bound: tuple[Bound, ...] = ()
    guards: tuple[Poly, ...] = ()
    factors: tuple[Factor, ...] = ()


Sum = tuple[Term, ...]

_MOST_TERMS = 400
_MOST_ORDERS = 720  # orders of alike indices that are tried for a normal form

Change = Callable[[Poly], Poly]


def number(value: Poly) -> Sum:
    return (Term(value),) if value.terms else ()


def of(factor: Factor) -> Sum:
    return (Term(ONE, factors=(factor,)),)


def scaled(terms: Sum, factor: Poly) -> Sum:
    return tuple(Term(t.coefficient * factor, t.bound, t.guards, t.factors) for t in terms) if factor.terms else ()


def guarded(terms: Sum, guards: Sequence[Poly]) -> Sum:
    """`terms` where all guards are ≥ 0, else 0."""
    return tuple(Term(t.coefficient, t.bound, (*t.guards, *guards), t.factors) for t in terms) if guards else terms


def product(left: Sum, right: Sum, fresh: Callable[[Bound], Bound]) -> Sum:
    """left · right; `fresh` gives an index of its own to what would be bound twice."""
    if len(left) * len(right) > _MOST_TERMS:
        raise NotUnderstood(f"a product of more than {_MOST_TERMS} terms")
    made = []
    for a in left:
        for b in right:
            taken = {atom for atom, _ in a.bound}
            renamed = {atom: fresh((atom, extent)) for atom, extent in b.bound if atom in taken}
            b = rebound(b, renamed) if renamed else b
            bound, guards, factors = a.bound + b.bound, a.guards + b.guards, a.factors + b.factors
            made.append(Term(a.coefficient * b.coefficient, bound, guards, factors))
    return tuple(made)


def rebound(term: Term, renamed: Mapping[Atom, Bound]) -> Term:
    values = {old: Poly.atom(new) for old, (new, _) in renamed.items()}
    bound = tuple(renamed.get(atom, (atom, extent)) for atom, extent in term.bound)
    changed = change_term(term, lambda p: p.replace(values))
    return Term(changed.coefficient, bound, changed.guards, changed.factors)


# ── changing all polynomials within ──────────────────────────────────────────────────────────────────────────────


def change(terms: Sum, by: Change) -> Sum:
    return tuple(change_term(t, by) for t in terms)


def change_term(term: Term, by: Change) -> Term:
    return Term(
        by(term.coefficient), tuple((a, by(e)) for a, e in term.bound), tuple(map(by, term.guards)),
        tuple(change_factor(f, by) for f in term.factors),
    )  # fmt: skip


def change_factor(factor: Factor, by: Change) -> Factor:
    if isinstance(factor, Element):
        return Element(factor.variable, tuple(map(by, factor.index)))
    if isinstance(factor, Applied):
        return Applied(factor.function, tuple(change(a, by) for a in factor.args))
    if isinstance(factor, Largest):
        return Largest(tuple(change_entry(e, by) for e in factor.entries))
    return factor


def change_entry(entry: Entry, by: Change) -> Entry:
    bound = tuple((a, by(e)) for a, e in entry.bound)
    return Entry(bound, tuple(map(by, entry.guards)), change(entry.value, by))


def atoms_of(factor: Factor) -> frozenset[Atom]:
    """All atoms that a factor depends on."""
    found: set[Atom] = set()

    def look(poly: Poly) -> Poly:
        found.update(poly.within)
        return poly

    change_factor(factor, look)
    return frozenset(found)


def atoms_of_sum(terms: Sum) -> frozenset[Atom]:
    found: set[Atom] = set()

    def look(poly: Poly) -> Poly:
        found.update(poly.within)
        return poly

    change(terms, look)
    return frozenset(found)


# ── one text for equal sums ──────────────────────────────────────────────────────────────────────────────────────

Names = Mapping[Atom, str]


def text(terms: Sum, names: Names) -> str:
    """The normal form of a sum; two sums with the same text are equal."""
    total: dict[str, Poly] = {}
    for term in terms:
        key = _term_text(term, names)
        total[key] = total.get(key, ZERO) + term.coefficient
    shown = [f"({show(c, names)})·{key}" for key, c in sorted(total.items()) if c.terms]
    return " + ".join(shown) or "0"


_FEW = 16


def gathered(terms: Sum) -> Sum:
    """An equal sum in which terms that are the same but for their coefficients are one; short sums stay as they are."""
    if len(terms) < _FEW:
        return terms
    first: dict[str, Term] = {}
    total: dict[str, Poly] = {}
    for term in terms:
        key = _term_text(term, {})
        first.setdefault(key, term)
        total[key] = total.get(key, ZERO) + term.coefficient
    return tuple(Term(total[k], t.bound, t.guards, t.factors) for k, t in first.items() if total[k].terms)


def _term_text(term: Term, names: Names) -> str:
    return _bound_text(
        term.bound, names,
        lambda n: ("".join(f"[{g}≥0]" for g in sorted({show(g, n) for g in term.guards}))
                   + "·".join(sorted(factor_text(f, n) for f in term.factors))),
    )  # fmt: skip


def factor_text(factor: Factor, names: Names) -> str:
    if isinstance(factor, Element):
        return f"{factor.variable}[{', '.join(show(p, names) for p in factor.index)}]"
    if isinstance(factor, Setting):
        return factor.name
    if isinstance(factor, Applied):
        return f"{factor.function}({'; '.join(text(a, names) for a in factor.args)})"
    return "max{" + "; ".join(sorted({_entry_text(e, names) for e in factor.entries})) + "}"


def _entry_text(entry: Entry, names: Names) -> str:
    return _bound_text(
        entry.bound, names,
        lambda n: "".join(f"[{g}≥0]" for g in sorted({show(g, n) for g in entry.guards})) + text(entry.value, n),
    )  # fmt: skip


def _bound_text(bound: Sequence[Bound], names: Names, body: Callable[[Names], str]) -> str:
    """The smallest text among those that the orders of the bound indices give."""
    if not bound:
        return body(names)
    depth = sum(1 for n in names.values() if n.startswith("#"))

    def shown(order: Sequence[Bound]) -> str:
        inner = {**names, **{atom: f"#{depth + i}" for i, (atom, _) in enumerate(order)}}
        return "Σ" + ",".join(show(e, names) for _, e in order) + ":" + body(inner)

    if len(bound) == 1:
        return shown(bound)

    def alone(item: Bound) -> str:
        inner = {**names, **{atom: "#*" for atom, _ in bound}, item[0]: "#@"}
        return show(item[1], names) + " " + body(inner)

    ranked = sorted(((alone(item), item) for item in bound), key=lambda r: r[0])
    groups = [[item for _, item in group] for _, group in itertools.groupby(ranked, key=lambda r: r[0])]
    orders = itertools.product(*(itertools.permutations(g) for g in groups))
    return min(shown([i for g in order for i in g]) for order in itertools.islice(orders, _MOST_ORDERS))


# ── algebra ──────────────────────────────────────────────────────────────────────────────────────────────────────


def lone_factor(terms: Sum) -> Factor | None:
    """The factor that a sum consists of, or None."""
    if len(terms) != 1:
        return None
    (term,) = terms
    plain = term.coefficient == ONE and not term.bound and not term.guards and len(term.factors) == 1
    return term.factors[0] if plain else None


def number_of(terms: Sum) -> Rational | None:
    """The number that a sum is, or None."""
    if not terms:
        return 0
    (term, *others) = terms
    plain = not others and not term.bound and not term.guards and not term.factors
    return term.coefficient.constant if plain else None


def reciprocal(terms: Sum) -> Sum:
    """1 / terms. What is divided by is not 0: where it is, both sides of a rule are undefined alike."""
    if not terms:
        raise NotUnderstood("a division by what is 0 for certain")
    if len(terms) > 1 or terms[0].bound or terms[0].guards:
        return of(Applied("reciprocal", (terms,)))
    (term,) = terms
    result = number(ONE)
    value = term.coefficient.constant
    if value is None:
        result = of(Applied("reciprocal", (number(term.coefficient),)))
    elif value != 1:
        result = number(Poly.number(1 / Fraction(value)))
    (made,) = result
    turned = list(made.factors)
    extra: Sum = number(ONE)
    for factor in term.factors:
        if isinstance(factor, Applied) and factor.function == "reciprocal":
            extra = product(extra, factor.args[0], _never)
        else:
            turned.append(Applied("reciprocal", (of(factor),)))
    return product((Term(made.coefficient, factors=tuple(turned)),), extra, _never)


def _never(bound: Bound) -> Bound:
    raise NotUnderstood("a reciprocal of a sum of sums")


def variables_in(terms: Sum) -> frozenset[str]:
    """The variables and real settings that a sum is made of."""
    found: set[str] = set()
    for factor in _factors_in(terms):
        if isinstance(factor, Element):
            found.add(factor.variable)
        elif isinstance(factor, Setting):
            found.add(factor.name)
    return frozenset(found)


def applied_in(terms: Sum) -> Iterator[Applied]:
    """The scalar functions within a sum, at any depth."""
    yield from (f for f in _factors_in(terms) if isinstance(f, Applied))


def _factors_in(terms: Sum) -> Iterator[Factor]:
    for term in terms:
        for factor in term.factors:
            yield factor
            if isinstance(factor, Applied):
                for arg in factor.args:
                    yield from _factors_in(arg)
            elif isinstance(factor, Largest):
                for entry in factor.entries:
                    yield from _factors_in(entry.value)


def entries_of(terms: Sum, integers: bool = False) -> tuple[Entry, ...]:
    """The candidates whose largest is `terms`; of `integers` no multiple, which may wrap around."""
    if len(terms) == 1:
        (term,) = terms
        factor = term.factors[0] if len(term.factors) == 1 and not term.bound and not term.guards else None
        times = term.coefficient.constant
        if isinstance(factor, Largest) and times is not None and (times == 1 if integers else times > 0):
            by = Poly.number(times)
            return tuple(Entry(e.bound, e.guards, scaled(e.value, by)) for e in factor.entries)
    return (Entry((), (), terms),)


def largest(entries: Iterable[Entry], integers: bool = False) -> Sum:
    """The largest of all candidates; of one it is that one. A positive factor that all share stands in front.

    Not so of `integers`: where twice a number wraps around, the largest of two is another one.
    """
    kept = tuple(entries)
    if len(kept) == 1 and not kept[0].bound and not kept[0].guards:
        return kept[0].value
    shared = Fraction(1) if integers else _shared_factor(kept)
    if shared == 1:
        return of(Largest(kept))
    smaller = Poly.number(1 / shared)
    reduced = tuple(Entry(e.bound, e.guards, scaled(e.value, smaller)) for e in kept)
    return scaled(of(Largest(reduced)), Poly.number(shared))


def assuming(factor: Factor, guards: Sequence[Poly]) -> Factor:
    """A factor where all of `guards` are known to be ≥ 0: it need not ask for them itself."""
    if isinstance(factor, Applied):
        return Applied(factor.function, tuple(_assuming(a, guards) for a in factor.args))
    if isinstance(factor, Largest):
        left = (tuple(g for g in e.guards if g not in guards) for e in factor.entries)
        pairs = zip(factor.entries, left, strict=True)
        return Largest(tuple(Entry(e.bound, asked, _assuming(e.value, guards)) for e, asked in pairs))
    return factor


def _assuming(terms: Sum, guards: Sequence[Poly]) -> Sum:
    return tuple(
        Term(
            t.coefficient, t.bound, tuple(g for g in t.guards if g not in guards),
            tuple(assuming(f, guards) for f in t.factors),
        )
        for t in terms
    )  # fmt: skip


def _shared_factor(entries: Sequence[Entry]) -> Fraction:
    """The largest number of which all coefficients of the candidates are whole multiples."""
    numbers = [Fraction(c) for e in entries for t in e.value for c in t.coefficient.terms.values()]
    if not numbers:
        return Fraction(1)
    return Fraction(math.gcd(*(n.numerator for n in numbers)), math.lcm(*(n.denominator for n in numbers)))


def negative(terms: Sum) -> Sum:
    return scaled(terms, -ONE)
