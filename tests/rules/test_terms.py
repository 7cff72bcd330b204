"""Sums of terms keep their value: gathered, and by the one text that equal ones have."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from fractions import Fraction

import pytest

from taso.rules.verifier import terms as algebra
from taso.rules.verifier.facts import Effort, Knowledge
from taso.rules.verifier.polynomials import ONE, Atom, Poly
from taso.rules.verifier.terms import Applied, Element, Factor, Sum, Term

SIZE = 4


class Numbers:
    """What sums are where elements and functions are numbers drawn once each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.drawn: dict[tuple[object, ...], Fraction] = {}

    def _number(self, *key: object) -> Fraction:
        return self.drawn.setdefault(key, Fraction(self.random.randint(-9, 9), self.random.randint(1, 5)))

    def sum(self, terms: Sum, at: Mapping[Atom, int]) -> Fraction:
        return sum((self.term(t, at) for t in terms), Fraction(0))

    def term(self, term: Term, at: Mapping[Atom, int]) -> Fraction:
        atoms = [atom for atom, _ in term.bound]
        extents = [range(int(value(extent, at))) for _, extent in term.bound]
        total = Fraction(0)
        for index in itertools.product(*extents):
            here = {**at, **dict(zip(atoms, index, strict=True))}
            if all(value(guard, here) >= 0 for guard in term.guards):
                part = value(term.coefficient, here)
                for factor in term.factors:
                    part *= self.factor(factor, here)
                total += part
        return total

    def factor(self, factor: Factor, at: Mapping[Atom, int]) -> Fraction:
        if isinstance(factor, Element):
            return self._number(factor.variable, *(value(p, at) for p in factor.index))
        assert isinstance(factor, Applied)
        return self._number(factor.function, *(self.sum(a, at) for a in factor.args))


def value(poly: Poly, at: Mapping[Atom, int]) -> Fraction:
    found = poly.replace({atom: Poly.number(n) for atom, n in at.items()}).constant
    assert found is not None
    return Fraction(found)


def drawn(rng: random.Random, count: int) -> tuple[Sum, dict[Atom, int]]:
    """Terms of few kinds, so that many are the same but for coefficients and the names of indices; free indices."""
    known = Knowledge(Effort(time.monotonic() + 60))
    free = [known.index("free", Poly.number(SIZE)) for _ in range(2)]
    kinds = [(rng.randint(0, 2), rng.randint(0, 3), rng.randint(0, 2), rng.random() < 0.5) for _ in range(6)]

    def term() -> Term:
        indices, shape, shift, guarded = rng.choice(kinds)
        bound = tuple((known.index("bound", Poly.number(SIZE)), Poly.number(SIZE)) for _ in range(indices))
        at = [Poly.atom(atom) for atom, _ in rng.sample(bound, len(bound))] + [Poly.atom(f) for f in free]
        first, second = Element("x", (at[0], at[1] + shift)), Element("w", (at[-1], at[0]))
        factors: list[Factor] = [first] if shape % 2 else [first, second]
        if shape > 1:
            factors.append(Applied("exp", (algebra.of(second),)))
        rng.shuffle(factors)
        guards = (at[0] - at[1] + shift,) if guarded else ()
        coefficient = Poly.number(Fraction(rng.choice((-2, -1, 1, 2)), rng.choice((1, 3))))
        return Term(coefficient, bound, guards, tuple(factors))

    return tuple(term() for _ in range(count)), {f: rng.randrange(SIZE) for f in free}


@pytest.mark.parametrize("seed", range(12))
def test_gathered_terms_make_the_same_sum_and_are_fewer(seed: int) -> None:
    terms, at = drawn(random.Random(seed), 24)
    found, numbers = algebra.gathered(terms), Numbers(seed)
    assert numbers.sum(found, at) == numbers.sum(terms, at) != 0
    assert len(found) < len(terms)
    assert algebra.text(found, {}) == algebra.text(terms, {})


@pytest.mark.parametrize("seed", range(12))
def test_sums_of_one_text_have_one_value(seed: int) -> None:
    terms, at = drawn(random.Random(seed), 40)
    by_text: dict[str, set[Fraction]] = {}
    numbers = Numbers(seed)
    for term in terms:
        by_text.setdefault(algebra.text((term,), {}), set()).add(numbers.term(term, at))
    assert all(len(values) == 1 for values in by_text.values())
    assert len(by_text) < len(terms)


def test_terms_that_cancel_are_gone_and_short_sums_stay() -> None:
    known = Knowledge(Effort(time.monotonic() + 60))
    x = algebra.of(Element("x", (Poly.atom(known.index("free", Poly.number(SIZE))),)))
    assert algebra.gathered(x * 8 + algebra.scaled(x, -ONE) * 8) == ()
    assert algebra.gathered(x * 3) == x * 3
